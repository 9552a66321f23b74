"""Makes differentiable operators (query, key, value, ...) -> (out, lse), for local and ring calls.

Each operator is registered with torch.library, so that torch.compile, FLOP counters and tracers see
it. `torch.func.grad` and `vmap` cannot handle such an operator: they get an autograd.Function. If
only autograd observes a call, it gets a Function too, which costs a tenth of the operator.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from .checks import NO_FORWARD_MODE, observed
from .numerics import sum_dtype
from .patterns.expression import parse
from .streams import OUTSIDE_CUDA_GRAPHS


def differentiable(
    name: str,
    call: str,
    forward: Callable[..., tuple[Tensor, Tensor]],
    backward: Callable[..., Sequence[Tensor | None]],
    *,
    refusal: str,
) -> Callable[..., tuple[Tensor, Tensor]]:
    """Registers the operator `sparsering::NAME`, and its backward.

    Args:
        call: the schema of its arguments: tensors [B, ...], query, key and value first; then
            `Tensor[] tensors` and `str pattern`; then plain values. The floating point tensors
            before `tensors` get gradients.
        forward: maps the arguments to (out, lse).
        backward: maps (*arguments, out, lse, grad_out, grad_lse, wanted) to a gradient for each
            tensor before `tensors`. `wanted` has a bool for each of these tensors: where it is
            False, the gradient is not used and may be None.
        refusal: error text if the backward itself is differentiated.

    Returns: a function that takes the arguments by keyword.
    """
    names = [argument.split()[-1] for argument in call.split(",")]
    count = names.index("tensors")
    gradients = _gradients(name, call, count, backward, refusal)

    def fake(query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
        out = query.new_empty(*query.shape[:3], value.shape[3])
        return out, query.new_empty(query.shape[:3], dtype=sum_dtype(query))

    def save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        ctx.values = inputs[count + 1 :]
        ctx.save_for_backward(*inputs[:count], *output, *inputs[count])

    def differentiate(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        saved = ctx.saved_tensors  # read once only: checkpointing frees it after one read
        inputs, results, tensors = saved[:count], saved[count : count + 2], [*saved[count + 2 :]]
        grads = tuple(
            torch.zeros_like(x) if g is None else g for x, g in zip(results, grads, strict=True)
        )
        needs = zip(ctx.needs_input_grad, inputs, strict=False)
        wanted = [need and x is not None and x.is_floating_point() for need, x in needs]
        by_input = gradients(*inputs, tensors, *ctx.values, *results, *grads, wanted)
        by_input = [x if want else None for x, want in zip(by_input, wanted, strict=True)]
        return (*by_input, [None] * len(tensors), *(None for _ in ctx.values))

    op = torch.library.custom_op(
        f"sparsering::{name}",
        forward,
        mutates_args=(),
        schema=f"({call}) -> (Tensor, Tensor)",
        tags=OUTSIDE_CUDA_GRAPHS,
    )
    op.register_fake(fake)
    op.register_autograd(differentiate, setup_context=save)
    op.register_vmap(lambda info, in_dims, *inputs: _mapped(op, count, info, in_dims, inputs))

    class Differentiated(Function):
        @staticmethod
        def forward(ctx: Any, *inputs: Any) -> tuple[Tensor, Tensor]:
            results = forward(*inputs)
            save(ctx, inputs, results)
            return results

        @staticmethod
        def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
            grads = differentiate(ctx, *grads)
            return (*grads[:count], None, *grads[count + 1 :])

    transformed = _transformed(op, count, save, Differentiated.backward)

    def run(**arguments: Any) -> tuple[Tensor, Tensor]:
        inputs = [arguments.pop(name) for name in names]
        assert not arguments, f"not in the schema of {name}: {sorted(arguments)}"
        function: Callable[..., tuple[Tensor, Tensor]] = Differentiated.apply
        if transforming():
            function = transformed
        elif observed(*inputs, *inputs[count]):
            function = op
        out, lse = function(*inputs)
        return out, lse

    return run


def _gradients(
    name: str, call: str, count: int, backward: Callable[..., Sequence[Tensor | None]], refusal: str
) -> Callable[..., Sequence[Any]]:
    """Registers the operator `sparsering::NAME_backward`, and returns a function that runs it.

    The function takes the arguments of `backward`. Gradients that are not wanted are empty tensors.
    """

    def gradients(*arguments: Any) -> list[Tensor]:
        empty, grads = arguments[0].new_empty, backward(*arguments)
        pairs = zip(grads, arguments[-1], strict=True)
        return [grad if wanted and grad is not None else empty(0) for grad, wanted in pairs]

    def fake(*arguments: Any) -> list[Tensor]:
        empty, pairs = arguments[0].new_empty, zip(arguments[:count], arguments[-1], strict=True)
        return [empty(0) if x is None or not want else x.new_empty(x.shape) for x, want in pairs]

    def refuse(ctx: Any, *grads: object) -> None:
        raise NotImplementedError(refusal)

    results = "Tensor out, Tensor lse, Tensor grad_out, Tensor grad_lse, bool[] wanted"
    op = torch.library.custom_op(
        f"sparsering::{name}_backward",
        gradients,
        mutates_args=(),
        schema=f"({call}, {results}) -> Tensor[]",
        tags=OUTSIDE_CUDA_GRAPHS,
    )
    op.register_fake(fake)
    op.register_autograd(refuse)
    transformed = _transformed(op, count, lambda *results: None, refuse)

    def run(*arguments: Any) -> Any:
        if transforming():
            return transformed(*arguments)
        is_seen = torch.is_grad_enabled() or observed(*arguments, *arguments[count])
        return (op if is_seen else gradients)(*arguments)

    return run


def _transformed(
    op: Callable[..., Any], count: int, save: Callable[..., None], backward: Callable[..., Any]
) -> Callable[..., Any]:
    """Returns an autograd.Function that runs an operator inside transforms of torch.func."""

    class Transformed(Function):
        forward = staticmethod(lambda *inputs: tuple(op(*inputs)))
        setup_context = staticmethod(save)

        @staticmethod
        def jvp(ctx: Any, *tangents: object) -> None:
            raise NotImplementedError(NO_FORWARD_MODE)

        @staticmethod
        def vmap(info: Any, in_dims: Any, *inputs: Any) -> tuple[Any, Any]:
            return _mapped(Transformed.apply, count, info, in_dims, inputs)

    Transformed.backward = staticmethod(backward)  # type: ignore[method-assign]
    return Transformed.apply


def transforming() -> bool:
    """True inside a torch.func transform that cannot handle operators, such as grad and vmap."""
    if torch.compiler.is_compiling() or not torch._C._are_functorch_transforms_active():
        return False
    functorch = torch._C._functorch
    innermost = functorch.peek_interpreter_stack()
    return innermost is not None and innermost.key() != functorch.TransformType.Functionalize


def _mapped(
    run: Callable[..., Any], count: int, info: Any, in_dims: Sequence[Any], inputs: Sequence[Any]
) -> tuple[Any, Any]:
    """Implements vmap: joins the mapped dim to the batch dim, and runs the operator once.

    If the pattern has a fixed batch size, it runs once for each index of the mapped dim instead.

    Returns: the results, and the index of the mapped dim in each: 0, or None if it has none.
    """
    size, tensors, pattern = info.batch_size, inputs[count], inputs[count + 1]
    refuse_mapped_pattern(in_dims[count])
    if not size:
        raise NotImplementedError("vmap needs a dim of at least 1, got 0; skip the call")
    stacked = [_stacked(x, dim, size) for x, dim in zip(inputs, in_dims, strict=True)]
    if parse(pattern, tensors).num_batches() is None:
        folded = [x.flatten(0, 1) if isinstance(x, Tensor) else x for x in stacked]
        results = tuple(x.unflatten(0, (size, -1)) if x.dim() > 1 else x for x in run(*folded))
    else:
        parts = [run(*(x[i] if isinstance(x, Tensor) else x for x in stacked)) for i in range(size)]
        results = tuple(torch.stack(part) for part in zip(*parts, strict=True))
    return results, tuple(0 if x.dim() > 1 else None for x in results)


def refuse_mapped_pattern(in_dims: Sequence[int | None]) -> None:
    """Raises NotImplementedError if vmap maps over a tensor of the pattern."""
    if any(dim is not None for dim in in_dims):
        raise NotImplementedError(
            "vmap cannot map over the tensors of a pattern, since layouts depend on their values; "
            "give the pattern a batch dim ([B, H, ...]) and call attention without vmap"
        )


def _stacked(x: Any, dim: int | None, size: int) -> Any:
    """Moves a tensor's mapped dim to the front, or adds one by expand(); keeps other values."""
    if not isinstance(x, Tensor):
        return x
    return x.expand(size, *x.shape) if dim is None else x.movedim(dim, 0)
