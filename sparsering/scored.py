"""Attention with a function of scores: `attention(..., score_mod=f)`, as in FlexAttention.

The function is evaluated on visited tiles alone, by the backend gather, or on all pairs, by the
reference. It takes no operator's way: operators take tensors and numbers, and no functions.
"""

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum
from functools import partial
from types import CellType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn import Module
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map_only

from .call import Call, Inputs, Options
from .checks import check_batch, refuse_forward_mode
from .decision import checked_call
from .differentiable import transforming
from .extras import OPTIONS
from .ground.arguments import is_shape_alone, kind_of, shortened
from .ground.numerics import sum_dtype, without_autocast
from .kernels.backends import BACKENDS, choose
from .kernels.dense.call import reference
from .kernels.over_pairs import over_pairs
from .kernels.problem import ScoreMod
from .patterns.algebra import Pattern, check_fits
from .patterns.function_state import in_library, names_of
from .work import problem_of, slot_gradient

_IN_A_GRAPH = "attention with a score_mod cannot run inside a compiled function; call it outside"


def scored_attention(
    inputs: Inputs, pattern: Pattern, score_mod: ScoreMod, backend: str | None, **options: Any
) -> tuple[Tensor, Tensor]:
    """Computes (out, lse) of a call with a score_mod; `options`: those of `attention`."""
    if torch.compiler.is_compiling():
        torch._dynamo.graph_break(msg=_IN_A_GRAPH)
    call = checked_call(inputs, pattern, **options)
    refuse_forward_mode(*call.inputs)
    if transforming():
        raise NotImplementedError(
            "torch.func.grad and vmap cannot see the tensors that a score_mod reads; use "
            "torch.autograd, and a batch dim, or leave out score_mod"
        )
    name = choose(backend, call.inputs, [*call.options.in_use, "score_mod"], pattern)
    check_batch(pattern, len(call.query))
    check_fits(pattern, call.frame)
    read = _checked(score_mod, call.inputs)
    with without_autocast(call.query):
        if not BACKENDS[name].reads_layouts:
            return reference(call, score_mod)
        learning = [n for n, x in OPTIONS.items() if x.learns and call.options[n] is not None]
        tensors = *call.inputs, *(call.options[n] for n in learning), *read
        scored = _ScoredCall(
            on=partial(
                Call,
                pattern=pattern,
                scale=call.scale,
                q_start=call.q_start,
                block_size=call.block_size,
            ),
            options=call.options.changed(**dict.fromkeys(learning)),
            backend=name,
            score_mod=_kept(score_mod, {}),
            learning=learning,
        )
        out, lse = _Scored.apply(scored, *tensors)
    return out, lse


@dataclass(frozen=True)
class _ScoredCall:
    """Shared by the forward and backward of a call with a score_mod; autograd saves its tensors."""

    on: Callable[..., Call]  # makes the call on query, key, value and options
    options: Options  # those without gradients
    backend: str
    score_mod: ScoreMod
    learning: list[str]  # options that get gradients

    def problem(self, tensors: tuple[Tensor, ...]) -> Any:
        """Returns the problem on query, key, value, extras that learn, and captured tensors."""
        query, key, value, *rest = tensors
        count = len(self.learning)
        learning = dict(zip(self.learning, rest[:count], strict=True))
        call = self.on(query=query, key=key, value=value, options=self.options.changed(**learning))
        problem = problem_of(call, self.backend)
        read = rest[count:]
        function = _bound(self.score_mod, read) if read else self.score_mod
        return problem._replace(
            score_mod=function, captured=tuple(x for x in read if x.requires_grad)
        )


class _Scored(Function):
    @staticmethod
    def forward(ctx: Any, call: _ScoredCall, *tensors: Tensor) -> tuple[Tensor, Tensor]:
        query, _, value, *_ = tensors
        if is_shape_alone(query):  # nobody can evaluate the function where pairs are
            out = query.new_empty(*query.shape[:3], value.shape[3])
            lse = query.new_empty(query.shape[:3], dtype=sum_dtype(query))
        else:
            out, lse = BACKENDS[call.backend].forward(call.problem(tensors))
        ctx.call = call
        ctx.save_for_backward(*tensors, out, lse)
        return out, lse

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_out: Tensor, grad_lse: Tensor) -> tuple[Tensor | None, ...]:
        call, (*tensors, out, lse) = ctx.call, ctx.saved_tensors
        if is_shape_alone(out):
            return None, *(torch.empty_like(x) if x.requires_grad else None for x in tensors)
        problem, backward = call.problem(tuple(tensors)), BACKENDS[call.backend].backward
        with without_autocast(problem.query):
            found = backward(problem, out, lse, grad_out, grad_lse)
        grads = found._asdict()
        if "slot_bias" in call.learning:
            slots = tensors[3 + call.learning.index("slot_bias")]
            grads["slot_bias"] = slot_gradient(grads["block_bias"], problem, slots)
        own = (grads[name] for name in ("query", "key", "value", *call.learning))
        captured = iter(found.captured)
        read = tensors[3 + len(call.learning) :]
        return None, *own, *(next(captured) if x.requires_grad else None for x in read)


def _checked(score_mod: object, inputs: Inputs) -> list[Tensor]:
    """Checks a score_mod on one pair; returns the tensors that it reads, in the order of reading.

    The call saves them, so that backward evaluates the function on what forward read.
    """
    query, key, _ = inputs
    if not callable(score_mod):
        raise ValueError(
            "score_mod must be a function of (score, batch, head, q_idx, kv_idx), got "
            f"{shortened(repr(score_mod))}; distance_bias and slot_bias take tensors"
        )
    if (check := getattr(score_mod, "check", None)) is not None:
        check(query, key)
    if not query.numel() or not key.numel():
        return []  # no pair has an index that the function could read
    score = torch.zeros((), dtype=sum_dtype(query), device=query.device)
    zero = torch.zeros((), dtype=torch.int64, device=query.device)
    places = zero[None], zero[None, None], zero[None, None], zero[None, None]
    read: list[Tensor] = []

    def reading(*arguments: Tensor) -> Tensor:
        with torch.enable_grad(), _Reads(arguments) as reads:
            result = score_mod(*arguments)
        read.extend(reads.found.values())
        return result

    if is_shape_alone(query):  # an index of one number, outside of vmap, needs that number
        over_pairs(reading, score[None, None, None, None], *places)
        return read
    try:
        result = reading(score, zero, zero, zero, zero)
    except TypeError as error:
        raise ValueError(
            "score_mod must take (score, batch, head, q_idx, kv_idx), a score and four index "
            f"tensors, got: {error}; write it as for FlexAttention"
        ) from error
    if not isinstance(result, Tensor) or result.dim() or not result.is_floating_point():
        raise ValueError(
            "score_mod must return one number, a tensor of shape (), for a score of shape (), got "
            f"{kind_of(result)}; it may use torch.where, and no `if`"
        )
    try:
        with torch.no_grad():
            over_pairs(score_mod, score[None, None, None, None], *places)
    except RuntimeError as error:
        raise ValueError(
            f"score_mod must work under torch.vmap, got: {error} Choose with torch.where (not "
            "`if`), combine comparisons with & and | (not `and`, `or`)"
        ) from error
    return read


def _kept(value: Any, memo: dict[int, Any]) -> Any:
    """Copies a function and what it holds, so that the copy keeps the numbers that it reads now.

    Backward evaluates it again, when a loop or the caller has gone on. Copied are closures, globals
    that the code names, and attributes of objects, modules of torch among them. Tensors, lists,
    dicts and what libraries define stay themselves: a function may write to them.
    """
    if id(value) in memo:
        return memo[id(value)][0]
    kind = type(value)
    if kind is FunctionType:
        if in_library(value.__module__):
            return value
        known = dict(value.__globals__)
        cells = [CellType() for _ in value.__closure__ or ()]
        copy = FunctionType(value.__code__, known, value.__name__, value.__defaults__, tuple(cells))
        memo[id(value)] = copy, value
        copy.__kwdefaults__ = value.__kwdefaults__
        for name in names_of(value.__code__) & known.keys():
            known[name] = _kept(known[name], memo)
        for cell, of in zip(cells, value.__closure__ or (), strict=True):
            with suppress(ValueError):  # an empty cell
                cell.cell_contents = _kept(of.cell_contents, memo)
        return copy
    if kind is MethodType:
        return MethodType(value.__func__, _kept(value.__self__, memo))
    if kind is partial:
        parts = (_kept(x, memo) for x in (value.func, value.args, value.keywords))
        function, args, keywords = parts
        return partial(function, *args, **keywords)
    if kind is tuple:
        return tuple(_kept(x, memo) for x in value)
    own = isinstance(value, Module) or not in_library(kind.__module__)
    if not own or isinstance(value, Tensor | type | ModuleType | Enum) or not _is_plain(value):
        return value
    other = object.__new__(kind)
    memo[id(value)] = other, value
    vars(other).update({name: _kept(x, memo) for name, x in vars(value).items()})
    if isinstance(value, Module):
        inner = {name: _kept(x, memo) for name, x in value._modules.items()}
        vars(other)["_modules"] = inner
    return other


def _is_plain(value: Any) -> bool:
    """Whether all that an object holds is in its `__dict__`."""
    kind = type(value)
    made = "__new__" not in {name for x in kind.__mro__[:-1] for name in vars(x)} or isinstance(
        value, Module
    )
    slots = any(getattr(x, "__slots__", ()) for x in kind.__mro__)
    return made and not slots and hasattr(value, "__dict__")


def _bound(score_mod: ScoreMod, read: list[Tensor]) -> ScoreMod:
    """Returns a score_mod that reads the tensors `read`, whatever its closure holds by now."""

    def bound(*arguments: Tensor) -> Tensor:
        with _Reads(arguments, read) as reading:
            result = score_mod(*arguments)
        if len(reading.found) != len(read):
            raise RuntimeError(
                f"score_mod read {len(read)} tensors when the call began, and "
                f"{len(reading.found)} when it was evaluated again; let it read the same tensors "
                "each time"
            )
        return result

    return bound


class _Reads(TorchFunctionMode):
    """Finds the tensors that a function reads, but not its arguments or those that it makes.

    With `saved`, the n-th tensor that the function reads is replaced by the n-th of `saved`: a
    variable of its closure, an attribute or a global may hold another tensor by then.
    """

    def __init__(self, arguments: Sequence[Tensor], saved: Sequence[Tensor] | None = None) -> None:
        super().__init__()
        self.found: dict[int, Tensor] = {}
        self._saved = saved
        self._held: list[Tensor] = []  # so that no other tensor gets the id of one that was read
        self._made = {id(x): x for x in arguments}  # held, so that no other tensor gets their id

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        args, kwargs = tree_map_only(Tensor, self._read, (args, kwargs or {}))
        result = func(*args, **kwargs)
        for x in tree_leaves(result):
            if isinstance(x, Tensor):
                self._made[id(x)] = x
        return result

    def _read(self, x: Tensor) -> Tensor:
        if id(x) in self._made:
            return x
        if id(x) not in self.found:
            number = len(self.found)
            self._held.append(x)
            if self._saved is None:
                self.found[id(x)] = x
            elif number < len(self._saved) and self._saved[number].shape == x.shape:
                self.found[id(x)] = self._saved[number]
            else:
                raise RuntimeError(
                    "score_mod read other tensors when the call began than when it was evaluated "
                    f"again: tensor {number} has shape {tuple(x.shape)} now; let it read the same "
                    "tensors each time"
                )
        return self.found[id(x)]
