"""Masks of a user's own: a class with `holds`, or the `mask_mod` of a FlexAttention user.

    @register_pattern
    class Prefix(Mask):
        length: int

        def holds(self, p, k, frame):
            return (k <= p) | (k < self.length)

    attention(query, key, value, Prefix(100) & SlidingWindow(512, 512))

Cost of such a mask: its layout looks at every pair once, O(Nq Nk) time, unless the class says more
of its tiles (`Mask.candidates`, `Mask.status`); the memory of a layout and the time of attention
are those of any other mask with the same pairs.
"""

import zlib
from collections import Counter, OrderedDict
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any, TypeVar
from weakref import WeakKeyDictionary, WeakValueDictionary

import torch
from torch import Tensor

from .algebra import Frame, Mask, Pattern
from .arguments import checked_integer
from .expression import BUILT_IN, add_constructor

MaskModFunction = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
Own = TypeVar("Own", bound=Mask)

_MOST_FUNCTIONS = 1024  # mask_mods that are kept although no pattern of theirs is alive


def register_pattern(cls: type[Own]) -> type[Own]:
    """Makes a subclass of `Mask` that defines `holds` a pattern like those of the library.

    Its annotated attributes become the arguments of its constructor (the class is made a frozen
    dataclass): numbers, strings, None, patterns, CPU tensors (copied), or tuples of these. It then
    combines by `&`, `|`, `+`, runs on every backend, under torch.compile and over ranks, and
    `parse` reads it. `holds` is asked for positions inside the sequence alone; rarely-needed
    methods are those of `Mask`. A class of the same name replaces an earlier one, as cells that
    are run again in a notebook do.

    Returns: the class.

    Raises: TypeError for what is no such class, ValueError for a name that is taken.

    Example:
        >>> @register_pattern
        ... class Diagonal(Mask):
        ...     offset: int = 0
        ...     def holds(self, p, k, frame):
        ...         return p - k == self.offset
    """
    if not (isinstance(cls, type) and issubclass(cls, Mask)):
        raise TypeError(f"register_pattern wants a subclass of sparsering.Mask, got {cls!r}")
    name = cls.__name__
    if cls.holds is Mask.holds:
        raise TypeError(
            f"{name} must define holds(self, p, k, frame), which says whether query position p "
            "pairs with key position k"
        )
    if name in (*BUILT_IN, "MaskMod") or (name[:1] == "t" and name[1:].isdigit()):
        raise ValueError(f"{name} is a name of the library's own patterns; choose another")
    if "__init__" in vars(cls) and not is_dataclass(cls):
        raise TypeError(
            f"{name} must not define __init__: annotate its arguments in the class, as in "
            "`length: int`, and check them in __post_init__, which ends with "
            "super().__post_init__()"
        )
    made = dataclass(frozen=True, repr=False, eq=False)(cls)
    for method in ("__repr__", "__eq__", "__hash__"):
        setattr(made, method, getattr(Pattern, method))
    if "_validate" not in vars(cls):
        setattr(made, "_validate", _freeze_arguments)  # noqa: B010
    setattr(made, "holds", _asked_inside(cls.holds))  # noqa: B010
    add_constructor(name, made)
    return made


def _freeze_arguments(pattern: Pattern) -> None:
    """Makes the arguments values that can be written and read back."""
    for field in fields(pattern):  # type: ignore[arg-type]
        label = f"{type(pattern).__name__} {field.name}"
        object.__setattr__(pattern, field.name, _frozen(label, getattr(pattern, field.name)))


def _frozen(label: str, value: object) -> object:
    match value:
        case list() | tuple():
            return tuple(_frozen(label, item) for item in value)
        case Tensor() if value.device.type == "cpu":
            return value.detach().clone()
        case float() if value != value or value in (float("inf"), float("-inf")):
            raise ValueError(f"{label} must be finite, got {value}; pass None for no bound")
        case int() | float() | str() | None | Pattern():
            return value
    try:
        return checked_integer(label, value, None)
    except TypeError:
        raise TypeError(
            f"{label} must be a number, a string, None, a pattern, a CPU tensor or a tuple of "
            f"these, got {value!r}"
        ) from None


def _asked_inside(holds: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The definition, never asked for positions past the end of the sequence, as tiles may do."""

    def inside(self: Mask, p: Tensor, k: Tensor, frame: Frame) -> Tensor:
        p = p.clamp(frame.q_start, max(frame.q_start, frame.q_start + frame.q_len - 1))
        k = k.clamp(0, max(0, frame.kv_len - 1))
        try:
            held = holds(self, p, k, frame)
        except Exception as error:
            error.add_note(f"raised by holds of {self}, a mask of your own")
            raise
        shape = torch.broadcast_shapes(p.shape, k.shape)
        if not isinstance(held, Tensor) or held.dtype != torch.bool:
            got = held.dtype if isinstance(held, Tensor) else type(held).__name__
            raise ValueError(
                f"{type(self).__name__}.holds must give a bool tensor that broadcasts to "
                f"{tuple(shape)}, got {got}; compare tensors with ==, <=, &, |"
            )
        return held.expand(shape)

    return inside


def from_mask_mod(mask_mod: MaskModFunction, *, batch_size: int | None = None) -> Mask:
    """The mask of a FlexAttention `mask_mod(batch, head, q_idx, kv_idx) -> bool tensor`.

    As FlexAttention does, it asks for query *indices*, which count from 0 whatever `q_start`, and
    calls the function under `torch.vmap`. Make the mask once and keep it: what is cached of it
    goes by the function object.

    Args:
        mask_mod: any that FlexAttention takes; tensors that it closes over must be on the CPU and
            stay as they are. Over ranks every rank brings an equal one.
        batch_size: needed where it depends on the batch entry.

    Returns: a mask, for heads and batch entries of its own where the function looks at them.

    Raises: ValueError where the function does not give a bool tensor, or looks at the batch entry
        without a batch_size.

    Cost: its layout asks for every pair once, for each head and batch entry that it tells apart.

    Example:
        >>> document = torch.tensor([0, 0, 1, 1])
        >>> def same(b, h, q, k):
        ...     return document[q] == document[k]
        >>> out = attention(query, key, value, from_mask_mod(same) & Causal())
    """
    if not callable(mask_mod):
        raise ValueError(
            f"mask_mod must be a function of (batch, head, q_idx, kv_idx), got {mask_mod!r}; "
            "Dense(mask) takes a bool tensor"
        )
    if batch_size is not None:
        checked_integer("batch_size", batch_size, 0)
    zero = torch.zeros((), dtype=torch.int64)
    try:
        result = mask_mod(zero, zero, zero, zero)
    except TypeError as error:
        raise ValueError(
            f"mask_mod must take (batch, head, q_idx, kv_idx), each an index tensor, got: {error}; "
            "FlexAttention's functions are such"
        ) from error
    if not isinstance(result, Tensor) or result.dtype != torch.bool:
        got = result.dtype if isinstance(result, Tensor) else type(result).__name__
        raise ValueError(
            f"mask_mod must give a bool tensor for integer tensors, got {got}; combine comparisons "
            "with & and | (not `and`, `or`)"
        )
    try:
        torch.vmap(mask_mod, in_dims=(None, None, 0, 0))(zero, zero, zero[None], zero[None])
    except RuntimeError as error:
        raise ValueError(
            f"mask_mod must work under torch.vmap, got: {error} Combine comparisons with & and | "
            "(not `and`, `or`), choose with torch.where (not `if`)"
        ) from error
    by_batch, by_head = (_looks_at(mask_mod, argument) for argument in (0, 1))
    if by_batch and batch_size is None:
        raise ValueError(
            "mask_mod looks at the batch entry: expected batch_size, got None; pass the number of "
            "batch entries"
        )
    named = _named(mask_mod)
    return MaskMod(named.name, batch_size if by_batch else None, by_head)


@dataclass(frozen=True, repr=False, eq=False)
class MaskMod(Mask):
    """What `from_mask_mod` makes of a function, which it knows by a name."""

    name: str
    batch_size: int | None = None
    by_head: bool = False
    batch: int = 0
    head: int = 0

    def _validate(self) -> None:
        if (named := _live.get(self.name)) is None:
            raise ValueError(
                f"the mask_mod {self.name!r} is gone: {_MOST_FUNCTIONS} newer ones were made since "
                "its pattern was last used; keep the pattern that from_mask_mod returns"
            )
        _keep(named)
        object.__setattr__(self, "_named", named)

    def at(self, batch: int, head: int, frame: Frame) -> Mask:
        batch = batch if self.batch_size is not None else 0
        return replace(self, batch_size=None, batch=batch, head=head if self.by_head else 0)

    def num_batches(self) -> int | None:
        return self.batch_size

    def num_tables(self, frame: Frame) -> int:
        return frame.num_heads if self.by_head else 1

    def holds(self, p: Tensor, k: Tensor, frame: Frame) -> Tensor:
        row = (p - frame.q_start).clamp(0, max(0, frame.q_len - 1))
        row, column = torch.broadcast_tensors(row, k.clamp(0, max(0, frame.kv_len - 1)))
        if not row.numel():
            return torch.zeros(row.shape, dtype=torch.bool)
        function = self._named.function  # type: ignore[attr-defined]
        of_pairs = torch.vmap(function, in_dims=(None, None, 0, 0))
        batch, head = torch.tensor(self.batch), torch.tensor(self.head)
        try:
            held: Tensor = of_pairs(batch, head, row.flatten(), column.flatten())
        except IndexError as error:
            raise ValueError(
                f"the mask_mod {self.name!r} must answer for query indices up to "
                f"{frame.q_len - 1} and key indices up to {frame.kv_len - 1}, got: {error}; the "
                "tensors that it reads must reach that far"
            ) from error
        return held.view(row.shape)


class _Named:
    """A function and its name; alive while a pattern holds it."""

    def __init__(self, function: MaskModFunction, name: str) -> None:
        self.function, self.name = function, name


_live: WeakValueDictionary[str, _Named] = WeakValueDictionary()
_kept: OrderedDict[str, _Named] = OrderedDict()  # a backward pass may come after its pattern died
_by_function: WeakKeyDictionary[Any, str] = WeakKeyDictionary()
_made: Counter[str] = Counter()  # functions so far, by what their names begin with


def _named(function: MaskModFunction) -> _Named:
    """The function under a name: its own, a digest of its code, and a number."""
    try:
        name = _by_function.get(function)
    except TypeError:  # of no hash, or to which no weak reference can be
        name = None
    if name is not None and (named := _live.get(name)) is not None:
        return named
    code = getattr(getattr(function, "__code__", None), "co_code", b"")
    stem = f"{getattr(function, '__qualname__', type(function).__name__)}-{zlib.crc32(code):08x}"
    _made[stem] += 1  # a name is never given twice: layouts and graphs may remember it
    name = f"{stem}-{_made[stem]}"
    named = _live[name] = _Named(function, name)
    with suppress(TypeError):
        _by_function[function] = named.name
    _keep(named)
    return named


def _keep(named: _Named) -> None:
    _kept[named.name] = named
    _kept.move_to_end(named.name)
    while len(_kept) > _MOST_FUNCTIONS:
        _kept.popitem(last=False)


def _looks_at(mask_mod: MaskModFunction, argument: int) -> bool:
    """Whether a result depends on one of the arguments, or may do so."""
    given = [torch.zeros((), dtype=torch.int64)] * 4
    given[argument] = torch.zeros(2, dtype=torch.int64)
    in_dims = tuple(0 if number == argument else None for number in range(4))
    try:
        torch.vmap(mask_mod, in_dims=in_dims, out_dims=None)(*given)
    except (RuntimeError, ValueError, TypeError, IndexError):
        return True
    return False


add_constructor("MaskMod", MaskMod)
