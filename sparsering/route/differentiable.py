"""Makes differentiable operators (query, key, value, ...) -> (out, lse), for local and ring calls.

Each operator is registered with torch.library, so that torch.compile, FLOP counters and tracers see
it, with kernels of its own for autograd, forward mode and vmap: torch's own hooks for operators
know neither forward mode nor `torch.func.grad`. If only autograd observes a call, an
autograd.Function runs instead, because its overhead is a tenth.

Four operators do all derivatives up to the second. With x the tensors of a call, J the derivative
of (out, lse) by x, y the gradients of (out, lse), and u a direction of x:

    NAME                        (out, lse)
    NAME_backward               J^T y
    NAME_tangent                J u
    NAME_backward_tangent       the derivative of J^T y in the direction (u, of y)

The second derivative of <(out, lse), y> is symmetric. So the backward of `NAME_backward` is the
last operator for x and `NAME_tangent` for y; the backward of `NAME_tangent` is the last operator
for x and `NAME_backward` for u.
"""

import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._functorch.utils import enable_single_level_autograd_function
from torch.autograd import Function, forward_ad

from ..checks import has_tangent, observed, refuse_mapped_pattern
from ..ground.namespace import NAMESPACE
from ..ground.numerics import sum_dtype
from ..ground.streams import OUTSIDE_CUDA_GRAPHS
from ..patterns.expression import parse

_operator: Any = partial(torch.library.custom_op, mutates_args=(), tags=OUTSIDE_CUDA_GRAPHS)
_LIBRARY = torch.library.Library(NAMESPACE, "FRAGMENT")  # its operators live as long as it does

NO_THIRD_DERIVATIVE = (
    "third derivatives, and forward mode over forward mode, need backend='reference'; pass it, or "
    "use torch.func.jacfwd(jacrev(...)) for second derivatives"
)


class Derivatives(NamedTuple):
    """The functions of an operator; `arguments` are those of its schema."""

    # (*arguments) -> (out, lse)
    forward: Callable[..., tuple[Tensor, Tensor]]
    # (*arguments, out, lse, grad_out, grad_lse, wanted) -> a gradient for each tensor before
    # `tensors`; None or any value where the list `wanted` has False
    backward: Callable[..., Sequence[Tensor | None]]
    # (*arguments, out, lse, *tangents) -> tangents of (out, lse); a tangent may be None
    tangent: Callable[..., tuple[Tensor, Tensor]]
    # (*arguments, out, lse, grad_out, grad_lse, *tangents, tangents of grad_out and grad_lse,
    # wanted) -> tangents of the gradients, as `backward` returns these
    backward_tangent: Callable[..., Sequence[Tensor | None]]


def differentiable(
    name: str, call: str, functions: Derivatives
) -> Callable[..., tuple[Tensor, Tensor]]:
    """Registers the operator `sparsering::NAME`, and those of its derivatives.

    Args:
        call: the schema of its arguments: tensors [B, ...], query, key and value first; then
            `Tensor[] tensors` and `str pattern`; then plain values. The floating point tensors
            before `tensors` get gradients.

    Returns: a function that takes the arguments by keyword.
    """
    names = [argument.split()[-1] for argument in call.split(",")]
    four = _Operators(name, call, names.index("tensors"), functions)

    def run(**arguments: Any) -> tuple[Tensor, Tensor]:
        inputs = [arguments.pop(name) for name in names]
        assert not arguments, f"not in the schema of {name}: {sorted(arguments)}"
        out, lse = four.attend(inputs)
        return out, lse

    return run


class _Operators:
    """The four operators of one call, and the functions that connect them for autograd.

    `inputs` are the arguments of the schema. Saved tensors are those of the inputs that get
    gradients, then those of an operator's own, then `tensors`.
    """

    def __init__(self, name: str, call: str, count: int, functions: Derivatives) -> None:
        self.count, self.length = count, len(call.split(","))
        names = [argument.split()[-1] for argument in call.split(",")][:count]
        results, grads = "Tensor out, Tensor lse", "Tensor grad_out, Tensor grad_lse"
        tangents = ", ".join(f"Tensor? {x}_t" for x in names)
        of_grads = "Tensor? grad_out_t, Tensor? grad_lse_t"
        self.attention = _Operator(
            f"{name}", f"({call}) -> (Tensor, Tensor)", functions.forward, _fake_results
        )
        self.backward = _Operator(
            f"{name}_backward",
            f"({call}, {results}, {grads}, bool[] wanted) -> Tensor[]",
            partial(_only_wanted, functions.backward),
            self._fake_gradients,
        )
        self.tangent = _Operator(
            f"{name}_tangent",
            f"({call}, {results}, {tangents}) -> (Tensor, Tensor)",
            functions.tangent,
            _fake_results,
        )
        self.backward_tangent = _Operator(
            f"{name}_backward_tangent",
            f"({call}, {results}, {grads}, {tangents}, {of_grads}, bool[] wanted) -> Tensor[]",
            partial(_only_wanted, functions.backward_tangent),
            self._fake_tangents,
        )
        self.attention.register(count, self._save, self._differentiate, self._move)
        self.backward.register(
            count, self._save_backward, self._differentiate_backward, self._move_backward
        )
        self.tangent.register(count, self._save_tangent, self._differentiate_tangent, _refuse)
        self.backward_tangent.register(count, lambda *_: None, _refuse, _refuse)
        batched = partial(for_each_gradient, self.backward.op, mapped=partial(_mapped, count))
        _LIBRARY.impl(f"{name}_backward", lambda *arguments: batched(arguments), "Batched")
        self.recorded = self._recorded()

    def attend(self, inputs: Sequence[Any]) -> tuple[Tensor, Tensor]:
        """Returns (out, lse); runs an operator only if more than autograd observes the call."""
        seen = observed(*inputs, *inputs[self.count]) or has_tangent(*inputs)
        out, lse = (self.attention.op if seen else self.recorded)(*inputs)
        return out, lse

    def gradients(self, *arguments: Any) -> Sequence[Tensor]:
        """Returns the gradients of a call; those that are not wanted are empty tensors."""
        return self.backward.run(*arguments)

    def tangents(self, *arguments: Any) -> tuple[Tensor, Tensor]:
        """Returns the tangents of (out, lse)."""
        out, lse = self.tangent.run(*arguments)
        return out, lse

    def gradient_tangents(self, *arguments: Any) -> Sequence[Tensor]:
        """Returns the tangents of the gradients, then those of (out, lse)."""
        return self.backward_tangent.run(*arguments)

    def _save(self, ctx: Any, inputs: Sequence[Any], output: Sequence[Tensor]) -> None:
        self._keep(ctx, inputs, output)

    def _differentiate(self, ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        inputs, results = self._kept(ctx, 2)
        wanted = self._wanted(ctx.needs_input_grad, inputs)
        found = self.gradients(*inputs, *_constant(results), *_filled(grads, results), wanted)
        return self._by_input(found, wanted, inputs)

    def _move(
        self, inputs: Sequence[Any], results: Sequence[Tensor], tangents: Sequence[Tensor | None]
    ) -> Sequence[Tensor]:
        return self.tangents(*inputs, *_constant(results), *tangents[: self.count])

    def _save_backward(self, ctx: Any, arguments: Sequence[Any], output: object) -> None:
        ctx.wanted = arguments[-1]
        self._keep(ctx, arguments, arguments[self.length : -1])

    def _differentiate_backward(self, ctx: Any, *cotangents: Tensor | None) -> tuple[Any, ...]:
        inputs, results = self._kept(ctx, 4)
        directions = [x if y else None for x, y in zip(cotangents, ctx.wanted, strict=True)]
        needs = ctx.needs_input_grad
        wanted = self._wanted(needs, inputs)
        *found, of_out, of_lse = self.gradient_tangents(
            *inputs, *results, *directions, None, None, wanted
        )
        needs = needs[self.length + 2 : self.length + 4]
        of_grads = (x if need else None for x, need in zip((of_out, of_lse), needs, strict=True))
        return (*self._by_input(found, wanted, inputs), None, None, *of_grads, None)

    def _move_backward(
        self, arguments: Sequence[Any], results: object, tangents: Sequence[Tensor | None]
    ) -> Sequence[Tensor]:
        of_grads = tangents[self.length + 2 : self.length + 4]
        moves = *tangents[: self.count], *of_grads
        return self.gradient_tangents(*arguments[:-1], *moves, arguments[-1])[: self.count]

    def _save_tangent(self, ctx: Any, arguments: Sequence[Any], output: object) -> None:
        self._keep(ctx, arguments, arguments[self.length :])

    def _differentiate_tangent(self, ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        inputs, (out, lse, *directions) = self._kept(ctx, 2 + self.count)
        own = _filled(grads, (out, lse))
        wanted = self._wanted(ctx.needs_input_grad, inputs)
        found: Sequence[Any] = [None] * self.count
        if any(wanted):
            found = self.gradient_tangents(
                *inputs, out, lse, *own, *directions, None, None, wanted
            )[:-2]
        needs = ctx.needs_input_grad[self.length + 2 :]
        learns = [need and x is not None for need, x in zip(needs, directions, strict=True)]
        of_directions: Sequence[Any] = [None] * self.count
        if any(learns):
            of_directions = self.gradients(*inputs, out, lse, *own, learns)
        moved = (x if want else None for x, want in zip(of_directions, learns, strict=True))
        return (*self._by_input(found, wanted, inputs), None, None, *moved)

    def _keep(self, ctx: Any, inputs: Sequence[Any], own: Sequence[Tensor | None]) -> None:
        """Saves an operator's arguments, and the tensors in `own`, for its backward pass."""
        ctx.values = inputs[self.count + 1 : self.length]
        saved = *inputs[: self.count], *own, *inputs[self.count]
        ctx.save_for_backward(*saved)

    def _kept(self, ctx: Any, own: int) -> tuple[list[Any], Sequence[Any]]:
        """Returns what `_keep` saved: the arguments of the call, and `own` more tensors."""
        saved = ctx.saved_tensors  # read once only: checkpointing frees it after one read
        end = self.count + own
        return [*saved[: self.count], [*saved[end:]], *ctx.values], saved[self.count : end]

    def _wanted(self, needs: Sequence[bool], inputs: Sequence[Any]) -> list[bool]:
        """Returns, for each tensor before `tensors`, whether autograd needs its gradient."""
        pairs = zip(needs[: self.count], inputs[: self.count], strict=True)
        return [need and x is not None and x.is_floating_point() for need, x in pairs]

    def _by_input(
        self, grads: Sequence[Any], wanted: Sequence[bool], inputs: Sequence[Any]
    ) -> tuple[Any, ...]:
        """Returns one gradient for each argument of the call, None where none is wanted."""
        own = [x if want else None for x, want in zip(grads, wanted, strict=True)]
        return (*own, *(None for _ in inputs[self.count :]))

    def _recorded(self) -> Callable[..., tuple[Tensor, Tensor]]:
        """Returns an autograd.Function for calls that only autograd observes: the fastest way."""
        operators = self

        class Unobserved(Function):
            @staticmethod
            def forward(ctx: Any, *inputs: Any) -> tuple[Tensor, Tensor]:
                results = operators.attention.function(*inputs)
                operators._save(ctx, inputs, results)
                return results

            @staticmethod
            def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
                return operators._differentiate(ctx, *grads)

        return Unobserved.apply

    def _fake_gradients(self, *arguments: Any) -> list[Tensor]:
        query, pairs = arguments[0], zip(arguments[: self.count], arguments[-1], strict=True)
        return [x.new_empty(x.shape) if wanted else query.new_empty(0) for x, wanted in pairs]

    def _fake_tangents(self, *arguments: Any) -> list[Tensor]:
        out, lse = arguments[self.length : self.length + 2]
        return [
            *self._fake_gradients(*arguments),
            out.new_empty(out.shape),
            lse.new_empty(lse.shape),
        ]


class _Operator:
    """One torch.library operator, and the Python function that it runs."""

    def __init__(
        self, name: str, schema: str, function: Callable[..., Any], fake: Callable[..., Any]
    ) -> None:
        self.function = function
        self.op = _operator(f"{NAMESPACE}::{name}", function, schema=schema)
        self.op.register_fake(fake)

    def register(
        self,
        count: int,
        save: Callable[[Any, Sequence[Any], Sequence[Tensor]], None],
        backward: Callable[..., tuple[Any, ...]],
        move: Callable[..., Sequence[Tensor]],
    ) -> None:
        """Registers the derivatives of the operator, and its rule for vmap.

        Args:
            count: number of its tensors before `tensors`.
            save, backward: as of an autograd.Function.
            move: maps arguments, results and tangents of arguments to tangents of results.
        """
        overload = self.op._opoverload

        def run_below(keyset: Any, *arguments: Any) -> Any:
            with torch._C._AutoDispatchBelowAutograd():
                return overload.redispatch(keyset & torch._C._after_autograd_keyset, *arguments)

        class Differentiated(Function):
            @staticmethod
            def forward(ctx: Any, keyset: Any, *arguments: Any) -> tuple[Tensor, ...]:
                # Inside torch.func (as grad of grad), outer transforms must see these operations
                # too.
                outer = torch._C._are_functorch_transforms_active()
                with torch.set_grad_enabled(outer), forward_ad._set_fwd_grad_enabled(outer):
                    results = tuple(run_below(keyset, *arguments))
                save(ctx, arguments, results)
                ctx.made = (arguments, results) if forward_ad._current_level >= 0 else None
                return results

            @staticmethod
            def jvp(ctx: Any, _: None, *tangents: Tensor | None) -> tuple[Tensor, ...]:
                (arguments, results), ctx.made = ctx.made, None
                primals = [_dual(x)[0] for x in arguments]
                return tuple(move(primals, [_dual(x)[0] for x in results], tangents))

            @staticmethod
            def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
                needs, ctx.needs_input_grad = ctx.needs_input_grad, ctx.needs_input_grad[1:]
                found = backward(ctx, *grads)
                ctx.needs_input_grad = needs
                return None, *found

            @classmethod
            def record(cls, *arguments: Any) -> tuple[Tensor, ...]:
                """Runs at the level of torch.func that dispatched the operator."""
                with enable_single_level_autograd_function():
                    return super(Function, cls).apply(*arguments)  # type: ignore[misc]

        def differentiate(keyset: Any, *arguments: Any) -> Any:
            if is_recorded(*arguments):
                found = [*Differentiated.record(keyset, *arguments)]
            else:
                duals = [_dual(x) for x in arguments] if _may_move() else []
                if all(tangent is None for _, tangent in duals):
                    return run_below(keyset, *arguments)
                primals, tangents = zip(*duals, strict=True)
                results = self.op(*primals)
                pairs = zip(results, move(primals, results, tangents), strict=True)
                found = [forward_ad.make_dual(*x, level=0) if len(x[0]) else x[0] for x in pairs]
            return tuple(found) if len(overload._schema.returns) > 1 else found

        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Warning only once for all operators")
            options = {"with_keyset": True, "allow_override": True}
            _LIBRARY.impl(overload._opname, differentiate, "Autograd", **options)
        self.op.register_vmap(
            lambda info, in_dims, *inputs: _mapped(count, self.op, info.batch_size, in_dims, inputs)
        )

    def run(self, *arguments: Any) -> Any:
        """Runs the function, or the operator if autograd, forward mode or a mode is active."""
        lists = (x for x in arguments if isinstance(x, list))
        seen = is_recorded(*arguments) or has_tangent(*arguments) or is_batch(*arguments)
        seen = seen or observed(*arguments, *(x for each in lists for x in each))
        return (self.op if seen else self.function)(*arguments)


def _may_move() -> bool:
    """Whether tensors may have forward-mode tangents here, as not inside grad or vmap."""
    if not torch._C._are_functorch_transforms_active():
        return True
    functorch = torch._C._functorch
    innermost = functorch.peek_interpreter_stack()
    return innermost is None or innermost.key() == functorch.TransformType.Jvp


def _dual(x: Any) -> tuple[Any, Tensor | None]:
    """Splits an argument into (value, forward-mode tangent); None if it has no tangent."""
    if not isinstance(x, Tensor) or not x.is_floating_point():
        return x, None
    primal, tangent = torch._VF._unpack_dual(x, level=0)
    return (x, None) if tangent is None else (primal, tangent)


def _fake_results(query: Tensor, key: Tensor, value: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    out = query.new_empty(*query.shape[:3], value.shape[3])
    return out, query.new_empty(query.shape[:3], dtype=sum_dtype(query))


def _only_wanted(function: Callable[..., Sequence[Tensor | None]], *arguments: Any) -> list[Tensor]:
    """Runs a derivative; returns empty tensors for gradients that are None or not wanted."""
    empty, wanted = arguments[0].new_empty, arguments[-1]
    found = [*function(*arguments)]
    wanted = [*wanted, *[True] * (len(found) - len(wanted))]
    pairs = zip(found, wanted, strict=True)
    return [x.contiguous() if want and x is not None else empty(0) for x, want in pairs]


def _refuse(*_: object) -> Any:
    raise NotImplementedError(NO_THIRD_DERIVATIVE)


def _filled(grads: Sequence[Tensor | None], results: Sequence[Tensor]) -> list[Tensor]:
    """Returns gradients of results; autograd passes None for some, which become zeros."""
    pairs = zip(grads, results, strict=True)
    return [torch.zeros_like(x) if grad is None else grad for grad, x in pairs]


def _constant(results: Sequence[Tensor]) -> list[Tensor]:
    """Detaches (out, lse), so that autograd does not run the call's backward for zeros.

    The operators that take them have derivatives by the tensors of the call alone.
    """
    return [x.detach() for x in results]


def is_recorded(*values: object) -> bool:
    """Whether autograd records the call: gradients are on, and a tensor requires them."""
    return torch.is_grad_enabled() and any(x.requires_grad for x in values if isinstance(x, Tensor))


def is_batch(*values: object) -> bool:
    """Whether a tensor stands for a batch of gradients, as with `is_grads_batched=True`."""
    tensors = (x for x in values if isinstance(x, Tensor))
    return any(map(torch._C._functorch.is_legacy_batchedtensor, tensors))


def for_each_gradient(
    run: Callable[..., Any], inputs: Sequence[Any], mapped: Callable[..., Any] | None = None
) -> list[Any]:
    """Runs a backward function on a batch of gradients (see `is_batch`), which torch cannot.

    `mapped` is a vmap rule (run, size, in_dims, inputs) -> (results, out_dims) that replaces the
    default, a loop over the batch.
    """
    level = torch._C._vmapmode_increment_nesting()
    torch._C._vmapmode_decrement_nesting()
    stacked, size = list(inputs), 0
    while not size:  # vmap levels from the innermost one outwards, until inputs have its dim
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
    """Runs `run` for each of `size` items of the mapped dims.

    Returns (stacked results, their dims).
    """
    pairs = list(zip(inputs, in_dims, strict=True))
    rows = ((x.select(d, i) if isinstance(d, int) else x for x, d in pairs) for i in range(size))
    parts = list(zip(*(run(*row) for row in rows), strict=True))
    results = tuple(None if part[0] is None else torch.stack(part) for part in parts)
    return results, tuple(None if x is None else 0 for x in results)


def _mapped(
    count: int, run: Callable[..., Any], size: int, in_dims: Sequence[Any], inputs: Sequence[Any]
) -> tuple[Any, Any]:
    """Implements vmap: the mapped dim joins the batch, or a loop runs if the batch is fixed."""
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
    """Returns a tensor with its mapped dim in front; without one, repeats it `size` times.

    Other values are returned unchanged.
    """
    if not isinstance(x, Tensor):
        return x
    return x.expand(size, *x.shape) if dim is None else x.movedim(dim, 0)
