"""Makes differentiable operators (query, key, value, ...) -> (out, lse), for local and ring calls.

Each operator is registered with torch.library, so that torch.compile, FLOP counters and tracers see
it. `torch.func.grad` and `vmap` cannot handle such an operator, so inside them an autograd.Function
runs. If only autograd observes a call, a Function runs too, because its overhead is a tenth.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from ..checks import NO_FORWARD_MODE, observed, refuse_mapped_pattern
from ..ground.numerics import sum_dtype
from ..ground.streams import OUTSIDE_CUDA_GRAPHS
from ..patterns.expression import parse

_operator: Any = partial(torch.library.custom_op, mutates_args=(), tags=OUTSIDE_CUDA_GRAPHS)
_LIBRARY = torch.library.Library("sparsering", "FRAGMENT")  # its operators live as long as it does


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
            tensor before `tensors`; None or any value where the list `wanted` has False.
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
        pairs = zip(results, grads, strict=True)
        grads = tuple(torch.zeros_like(x) if g is None else g for x, g in pairs)
        needs = zip(ctx.needs_input_grad, inputs, strict=False)
        wanted = [need and x is not None and x.is_floating_point() for need, x in needs]
        by_input = gradients(*inputs, tensors, *ctx.values, *results, *grads, wanted)
        by_input = [x if want else None for x, want in zip(by_input, wanted, strict=True)]
        return (*by_input, [None] * len(tensors), *(None for _ in ctx.values))

    op = _operator(f"sparsering::{name}", forward, schema=f"({call}) -> (Tensor, Tensor)")
    op.register_fake(fake)
    op.register_autograd(differentiate, setup_context=save)
    op.register_vmap(
        lambda info, in_dims, *inputs: _mapped(count, op, info.batch_size, in_dims, inputs)
    )

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
    """Registers the operator `sparsering::NAME_backward`; returns a function that runs it.

    The function takes the arguments of `backward`. Gradients that nobody wants are empty tensors.
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
    schema = f"({call}, {results}) -> Tensor[]"
    op = _operator(f"sparsering::{name}_backward", gradients, schema=schema)
    op.register_fake(fake)
    op.register_autograd(refuse)
    batched = partial(for_each_gradient, op, mapped=partial(_mapped, count))
    _LIBRARY.impl(f"{name}_backward", lambda *arguments: batched(arguments), "Batched")
    transformed = _transformed(op, count, lambda *results: None, refuse)

    def run(*arguments: Any) -> Any:
        if transforming():
            return transformed(*arguments)
        is_seen = torch.is_grad_enabled() or observed(*arguments, *arguments[count])
        return (op if is_seen or is_batch(*arguments[-3:-1]) else gradients)(*arguments)

    return run


def _transformed(
    op: Callable[..., Any], count: int, save: Callable[..., None], backward: Callable[..., Any]
) -> Callable[..., Any]:
    """Returns an autograd.Function that runs an operator inside transforms of torch.func.

    `save` and `backward` are those of the operator; `count` is the number of its tensor inputs.
    """

    class Transformed(Function):
        forward = staticmethod(lambda *inputs: tuple(op(*inputs)))
        setup_context = staticmethod(save)

        @staticmethod
        def jvp(ctx: Any, *tangents: object) -> None:
            raise NotImplementedError(NO_FORWARD_MODE)

        @staticmethod
        def vmap(info: Any, in_dims: Any, *inputs: Any) -> tuple[Any, Any]:
            return _mapped(count, Transformed.apply, info.batch_size, in_dims, inputs)

    Transformed.backward = staticmethod(backward)  # type: ignore[method-assign]
    return Transformed.apply


def transforming() -> bool:
    """True inside a torch.func transform that cannot handle operators, such as grad and vmap."""
    if torch.compiler.is_compiling() or not torch._C._are_functorch_transforms_active():
        return False
    functorch = torch._C._functorch
    innermost = functorch.peek_interpreter_stack()
    return innermost is not None and innermost.key() != functorch.TransformType.Functionalize


def is_batch(*grads: Tensor) -> bool:
    """True if a tensor is torch's stand-in for a batch of gradients (`is_grads_batched`)."""
    return any(map(torch._C._functorch.is_legacy_batchedtensor, grads))


def for_each_gradient(
    run: Callable[..., Any], inputs: Sequence[Any], mapped: Callable[..., Any] | None = None
) -> list[Any]:
    """Runs a backward on a batch of gradients (`is_batch`), for which torch has no hook.

    `mapped` is a vmap rule (run, size, in_dims, inputs) -> (results, out_dims) that replaces the
    default, a loop over the batch.
    """
    level = torch._C._vmapmode_increment_nesting()
    torch._C._vmapmode_decrement_nesting()
    stacked, size = list(inputs), 0
    while not size:  # finds the innermost batch
        level -= 1
        for i, x in enumerate(inputs):
            if isinstance(x, Tensor) and is_batch(x):
                rows = torch._remove_batch_dim(x, level, 0, 0)  # 0 rows if x is not in this batch
                if len(rows):
                    stacked[i], size = rows, len(rows)
    in_dims = [None if a is b else 0 for a, b in zip(stacked, inputs, strict=True)]
    results, dims = (mapped or _looped)(run, size, in_dims, stacked)
    pairs = zip(results, dims, strict=True)
    return [x if dim is None else torch._add_batch_dim(x, dim, level) for x, dim in pairs]


def _looped(
    run: Callable[..., Any], size: int, in_dims: Sequence[Any], inputs: Sequence[Any]
) -> tuple[Any, Any]:
    """Implements vmap by a loop over `size` rows; returns (results, mapped dim or None of each)."""
    pairs = list(zip(inputs, in_dims, strict=True))
    rows = ((x.select(d, i) if isinstance(d, int) else x for x, d in pairs) for i in range(size))
    parts = list(zip(*(run(*row) for row in rows), strict=True))
    results = tuple(None if part[0] is None else torch.stack(part) for part in parts)
    return results, tuple(None if x is None else 0 for x in results)


def _mapped(
    count: int, run: Callable[..., Any], size: int, in_dims: Sequence[Any], inputs: Sequence[Any]
) -> tuple[Any, Any]:
    """Implements vmap: folds the mapped dim into the batch, or loops if the batch is fixed."""
    tensors, pattern = inputs[count], inputs[count + 1]
    refuse_mapped_pattern(in_dims[count] or ())
    if not size:
        raise NotImplementedError("vmap needs a dim of at least 1, got 0; skip the call")
    if parse(pattern, tensors).num_batches() is not None:
        return _looped(run, size, in_dims, inputs)
    stacked = (_stacked(x, dim, size) for x, dim in zip(inputs, in_dims, strict=True))
    folded = (  # reshape, since a batch of batches of gradients has neither flatten nor unflatten
        x.reshape(size * x.shape[1], *x.shape[2:]) if isinstance(x, Tensor) else x for x in stacked
    )
    results = [
        x.reshape(size, len(x) // size, *x.shape[1:]) if x.dim() > 1 else x for x in run(*folded)
    ]
    return tuple(results), tuple(0 if x.dim() > 1 else None for x in results)


def _stacked(x: Any, dim: int | None, size: int) -> Any:
    """Moves a tensor's mapped dim to the front; without one, adds it by expand().

    Other values are returned unchanged.
    """
    if not isinstance(x, Tensor):
        return x
    return x.expand(size, *x.shape) if dim is None else x.movedim(dim, 0)
