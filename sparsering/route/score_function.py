"""Checks the function of `attention(..., score_mod=f)`, and keeps what it reads for backward.

Backward evaluates the function again. By then its variables may have changed, for example in a
loop, so the call keeps the tensors and the numbers that the function read.
"""

from collections.abc import Callable, Sequence
from contextlib import suppress
from enum import Enum
from functools import partial
from types import CellType, FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Module
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map_only

from ..coordinates import is_coordinate_bias
from ..ground.arguments import is_shape_alone, kind_of, shortened
from ..ground.numerics import sum_dtype
from ..kernels.over_pairs import over_pairs
from ..kernels.problem import ScoreMod
from ..patterns.function_state import in_library, names_of


class ScoreFunction(NamedTuple):
    """A checked score_mod, and the tensors that it reads, in the order of reading."""

    function: ScoreMod
    read: tuple[Tensor, ...] = ()

    @property
    def name(self) -> str:
        """The name under which backends know the function."""
        return "coordinate_bias" if is_coordinate_bias(self.function) else "score_mod"

    def kept(self) -> "ScoreFunction":
        """Returns a copy with today's values of the variables that it reads, for backward."""
        return self._replace(function=_kept(self.function, {}))

    def on(self, read: Sequence[Tensor]) -> "ScoreFunction":
        """Returns a copy that reads the tensors `read` instead of the current ones."""
        if read and is_coordinate_bias(self.function):
            return ScoreFunction(self.function.on(read), tuple(read))
        return ScoreFunction(_bound(self.function, read), tuple(read)) if read else self


def checked_function(score_mod: Any, query: Tensor, key: Tensor) -> ScoreFunction:
    """Checks a score_mod on one pair, and finds the tensors that it reads.

    The call saves them, so that backward evaluates the function on what forward read.
    """
    if not callable(score_mod):
        raise ValueError(
            "score_mod must be a function of (score, batch, head, q_idx, kv_idx), got "
            f"{shortened(repr(score_mod))}; distance_bias and slot_bias take tensors"
        )
    if (check := getattr(score_mod, "check", None)) is not None:
        check(query, key)
    if is_coordinate_bias(score_mod):
        return ScoreFunction(score_mod, score_mod.tensors)
    if not query.numel() or not key.numel():
        return ScoreFunction(score_mod)  # there is no pair to evaluate the function on
    score = torch.zeros((), dtype=sum_dtype(query), device=query.device)
    zero = torch.zeros((), dtype=torch.int64, device=query.device)
    places = zero[None], zero[None, None], zero[None, None], zero[None, None]
    read: list[Tensor] = []

    def reading(*arguments: Tensor) -> Tensor:
        with torch.enable_grad(), _Reads(arguments) as reads:
            result = score_mod(*arguments)
        read.extend(reads.found.values())
        return result

    if is_shape_alone(query):  # outside of vmap, an index without dims would have to be a number
        over_pairs(reading, score[None, None, None, None], *places)
        return ScoreFunction(score_mod, tuple(read))
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
    return ScoreFunction(score_mod, tuple(read))


def _kept(value: Any, memo: dict[int, Any]) -> Any:
    """Copies a function with the values that it refers to, so that later changes do not matter.

    It copies closures, globals that the code names, and attributes of objects, among them torch
    modules. It does not copy tensors, lists, dicts and what libraries define, because a function
    may write to them.
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
    """Whether everything that an object holds is in its `__dict__`, so it can be copied by that."""
    kind = type(value)
    made = "__new__" not in {name for x in kind.__mro__[:-1] for name in vars(x)} or isinstance(
        value, Module
    )
    slots = any(getattr(x, "__slots__", ()) for x in kind.__mro__)
    return made and not slots and hasattr(value, "__dict__")


def _bound(score_mod: ScoreMod, read: Sequence[Tensor]) -> ScoreMod:
    """Returns a score_mod that reads the tensors `read` in place of those it would read now."""

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
    """While active, records which tensors a function reads besides its arguments.

    With `saved`, the n-th tensor that the function reads is replaced by the n-th of `saved`,
    because a variable of its closure, an attribute or a global may hold another tensor by then.
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
