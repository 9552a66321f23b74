"""The algebra of patterns: masks, mixtures, and how they combine.

A *mask* is a set of pairs (`&`, `|`, `-` are set operations); a *mixture* is a multiset (`+`): a
pair in two of its branches counts twice in the softmax. Patterns are compared by content.
"""

import operator
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import reduce
from itertools import product
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn

import torch
from torch import Tensor

from ..ground.arguments import not_a_pattern, shortened
from ..ground.keywords import class_with_hints
from ..ground.rows import expand_counts
from .frame import Frame as Frame
from .frame import Restarts as Restarts
from .written import WrittenValue, part_text

if TYPE_CHECKING:
    from ..layouts.layout import BlockLayout


@class_with_hints
class Pattern(WrittenValue):
    """Base class of masks and mixtures: a frozen value that says which pairs attend.

    `parse` reads its `expression` and `tensors`.
    """

    __array_ufunc__ = None  # makes `array & pattern` call the pattern's operator, not NumPy's

    moves_tokens: ClassVar[bool] = False  # True if the tokens of its parts stand at other places

    def __init__(self, *_: Any, **__: Any) -> None:
        """Raises TypeError; each registered class is a dataclass with an `__init__` of its own."""
        raise TypeError(
            f"{type(self).__name__} is no pattern yet; put @sparsering.register_pattern above its "
            "class"
        )

    def __bool__(self) -> NoReturn:
        raise TypeError(
            "a pattern has no truth value; combine patterns with &, | and + (not and, or)"
        )

    @property
    def branches(self) -> "tuple[Mask, ...]":
        """The masks of a mixture; for a mask, a tuple of the mask alone."""
        return self.masks if isinstance(self, Mixture) else (self,)  # type: ignore[return-value]

    def to_dense(
        self,
        q_len: int,
        kv_len: int | None = None,
        *,
        num_heads: int = 1,
        num_kv_heads: int | None = None,
        q_start: int | None = None,
    ) -> Tensor:
        """Writes the pattern out pair by pair, from its definition.

        Args:
            q_len, kv_len: tokens; `kv_len` defaults to `q_len`.
            num_heads, num_kv_heads: number of query heads and of key/value heads (default: equal).
            q_start: position of the first query, default `kv_len - q_len`.

        Returns: [H or 1, Nq, Nk], or [B, H or 1, Nq, Nk] if the pattern depends on the batch entry:
            bool for a mask, int64 counts for a mixture.

        Cost: O(B H Nq Nk) time and memory; for tests and small inputs.
        """
        frame = Frame.build(q_len, kv_len, num_heads, num_kv_heads, q_start)
        check_fits(self, frame)
        p = torch.arange(frame.q_start, frame.q_start + frame.q_len)[:, None]
        k = torch.arange(frame.kv_len)[None, :]
        batch = self.num_batches()
        tables = min(1, num_heads) if self.num_tables(frame) == 1 else num_heads
        batches = 1 if batch is None else batch
        shape = (batches, tables, frame.q_len, frame.kv_len)
        dense = torch.zeros(shape, dtype=torch.bool if isinstance(self, Mask) else torch.int64)
        for b, h, mask in product(range(batches), range(tables), self.branches):
            dense[b, h] += mask.at(b, h, frame).holds(p, k, frame)
        return dense if batch is not None else dense[0]

    def layout(
        self,
        q_len: int,
        kv_len: int | None = None,
        *,
        num_heads: int = 1,
        num_kv_heads: int | None = None,
        q_start: int | None = None,
        block_size: int | None = None,
        device: torch.device | str = "cpu",
    ) -> "BlockLayout":
        """Compiles the pattern to tiles, or takes the compiled form from `layout_cache`.

        Args:
            q_len, kv_len, num_heads, num_kv_heads, q_start: as for `to_dense`.
            block_size: tokens per tile, a multiple of 16 from 16 to 256; default: as `attention`
                chooses on a machine where `sparsering tune` has not run.
            device: device of the tables.

        Raises: ValueError if the pattern requires other lengths or heads, or for more than 2^25
            tiles of queries or of keys, or 2^35 pairs of a query tile and a key tile.

        Cost: time and memory in proportion to the visited pairs of tiles.
        """
        # Layouts import patterns, so patterns can import layouts only inside functions.
        from ..layouts.cache import layout_cache, place_of
        from ..layouts.compile import BLOCK_SIZES, check_not_dense, chosen_block_size

        frame = Frame.build(q_len, kv_len, num_heads, num_kv_heads, q_start)
        place = place_of(device)
        if block_size is None:
            check_fits(self, frame)
            check_not_dense(self, frame, BLOCK_SIZES[-1])
        size = chosen_block_size(self, frame, place) if block_size is None else block_size
        return layout_cache.layout(self, frame, size, place)

    def live_keys(
        self,
        length: int,
        *,
        num_heads: int = 1,
        num_kv_heads: int | None = None,
        max_length: int | None = None,
    ) -> list[Tensor]:
        """Returns the keys that a cache must store after `length` tokens: later queries visit them.

        Args:
            length: tokens so far.
            num_heads, num_kv_heads: as for `to_dense`.
            max_length: upper bound of the sequence's tokens; default: the length that the pattern
                requires, else no bound. `RandomBlocks` and custom masks need it.

        Returns: for each kv head, int64 positions below `length`, ascending, that a later query of
            one of its query heads visits in any branch or batch entry. `SelectedBlocks` counts as
            a mask that visits all keys, since later selections are unknown.

        Raises: ValueError if the pattern needs a `max_length`, or requires other lengths or heads.

        Cost: O(keys that may be live) for each distinct mask; custom masks are evaluated on pairs.

        Example:
            >>> (Causal() & (SlidingWindow(2) | GlobalTokens(1, rows=False))).live_keys(9)
            [tensor([0, 7, 8])]
        """
        from ..layouts.lifetimes import live_keys

        return live_keys(self, length, num_heads, num_kv_heads, max_length)

    def cache_bound(
        self, *, num_heads: int = 1, num_kv_heads: int | None = None, max_length: int | None = None
    ) -> int | None:
        """Returns the most keys that `live_keys` lists for a kv head at any length; None: no bound.

        Raises: ValueError as `live_keys`, and if the pattern's period is over 2^26 tokens.

        Cost: O(max_length), or O(tokens after which the pattern repeats), for each distinct mask.
        """
        from ..layouts.lifetimes import cache_bound

        return cache_bound(self, num_heads, num_kv_heads, max_length)

    def check(self, frame: Frame) -> None:
        """Raises ValueError if the pattern requires other lengths or heads than `frame` has."""
        for mask in self._components():
            for inner in self._frames(frame):
                mask.check(inner)

    def _frames(self, frame: Frame) -> Iterable[Frame]:
        """Yields the lengths and heads, as frames, in which `_components` see the pairs; each once.

        By default the parts see the whole sequence, as the pattern does.

        A mask that restarts positions, such as `Packed`, overrides this: its part sees one frame
        for each distinct document length.
        """
        return (frame,)

    def num_batches(self) -> int | None:
        """Returns the batch size that the pattern requires; None if any batch size fits."""
        sizes = {self._own_batches(), *(mask.num_batches() for mask in self._components())} - {None}
        if len(sizes) > 1:
            raise ValueError(
                "the parts of a pattern must agree on the batch size, got "
                f"{shortened(str(sorted(sizes)))} in {shortened(str(self))}"
            )
        return sizes.pop() if sizes else None

    def _own_batches(self) -> int | None:
        return None  # a class whose fields have a batch dim overrides this

    def num_tables(self, frame: Frame) -> int:
        """Returns how many heads have tables of their own: 1, num_kv_heads or num_heads."""
        return max((mask.num_tables(frame) for mask in self._components()), default=1)

    @property
    def own_length(self) -> int | None:
        """Smallest sequence length that a mask in the pattern requires; None if any length fits."""
        lengths = [mask.own_length for mask in self._components()]
        known = [length for length in lengths if length is not None]
        return min(known) if known else None

    @property
    def restarts(self) -> "Restarts | None":
        """Document lengths (of queries, of keys), if positions restart in each.

        None if they do not.
        """
        return None

    @property
    def num_streams(self) -> int:
        """Number of random streams of dropout in each batch entry: one, or one per document."""
        return 1

    def coordinates(self, frame: Frame) -> tuple[Tensor, Tensor, Tensor]:
        """Returns positions of queries [Nq] and keys [Nk], and each query's document [Nq].

        Positions restart in documents; without documents, all queries are in document 0.
        """
        if self.restarts is None:
            query = torch.arange(frame.q_start, frame.q_start + frame.q_len)
            return query, torch.arange(frame.kv_len), query * 0
        q_lengths, kv_lengths = (torch.tensor(x, dtype=torch.int64) for x in self.restarts)
        stream, query = expand_counts(q_lengths)
        return query + (kv_lengths - q_lengths)[stream], expand_counts(kv_lengths)[1], stream

    def __invert__(self) -> NoReturn:
        raise TypeError(
            "a pattern has no complement; subtract it from the pairs that attend, as in "
            "Full() - pattern"
        )

    def __and__(self, other: object) -> Any:
        return _combined("&", self, other)

    def __or__(self, other: object) -> Any:
        return _combined("|", self, other)

    def __add__(self, other: object) -> Any:
        return _combined("+", self, other)

    def __sub__(self, other: object) -> Any:
        return _combined("-", self, other)

    # Python calls these if the left side is no pattern; they raise TypeError.
    __rand__, __ror__, __radd__, __rsub__ = __and__, __or__, __add__, __sub__


@class_with_hints
class Mask(Pattern):
    """A set of (query position, key position) pairs."""

    has_complement: ClassVar[bool] = True  # False if the mask cannot be subtracted by `-`

    @property
    def asks_frame(self) -> bool:
        """Whether `holds` reads `frame`.

        False if the positions p and k alone decide about a pair.
        """
        return True

    def holds(self, p: Tensor, k: Tensor, frame: Frame) -> Tensor:
        """Defines the mask: returns bool, True where query position p pairs with key position k.

        p and k are int64 tensors that broadcast; `frame` has the lengths and heads.
        """
        raise NotImplementedError

    def at(self, batch: int, head: int, frame: Frame) -> "Mask":
        """Returns the mask of one query head of one batch entry; by default, all have this mask."""
        return self

    @property
    def run_ids(self) -> Tensor | None:
        """Ids of tokens [B or 1, Nk], if the mask pairs tokens of one run of equal ids; else None.

        Exported programs read them as data.
        """
        return None

    def status(
        self, q_first: Tensor, q_last: Tensor, k_first: Tensor, k_last: Tensor, frame: Frame
    ) -> Tensor | None:
        """Classifies n (query tile, key tile) pairs; a custom mask may define it for fast layouts.

        Args: first and last position of each query tile and key tile, int64 [n]. A tile may contain
            only some of the positions between the two.

        Returns: int64 [n]: 2 if the mask holds for all position pairs of the two tiles, 0 if it
            holds for none, 1 otherwise or if unknown. None means that all n are unknown.
        """
        return None

    def candidates(
        self, q_first: Tensor, q_last: Tensor, frame: Frame
    ) -> tuple[Tensor, Tensor] | None:
        """Bounds the keys that n query tiles see; a custom mask may define it for fast layouts.

        Args: first and last position of each query tile, int64 [n].

        Returns: (first, last) key position that each tile may see, int64 [n] each; None: any key.
        """
        return None


@dataclass(frozen=True, repr=False, eq=False)
class _Combination(Pattern):
    """Base class of patterns that combine several masks by one operator: `+`, `&` or `|`."""

    masks: tuple[Mask, ...]
    symbol: ClassVar[str]

    def _spell(self, tensors: list[Tensor], as_data: bool) -> str:
        first, *rest = self.masks
        text = part_text(first, tensors, as_data)
        for mask in rest:
            symbol, part = ("-", mask.mask) if isinstance(mask, Not) else (self.symbol, mask)
            text += f" {symbol} {part_text(part, tensors, as_data)}"
        return f"({text})"

    def _shown_by_default(self) -> str:
        first, *rest = self.masks
        text = first._shown()
        for mask in rest:
            symbol, part = ("-", mask.mask) if isinstance(mask, Not) else (self.symbol, mask)
            text += f" {symbol} {part._shown()}"
        return f"({text})"

    def _components(self) -> tuple[Mask, ...]:
        return self.masks

    @property
    def restarts(self) -> Restarts | None:
        restarts = {mask.restarts for mask in self.masks}
        return restarts.pop() if len(restarts) == 1 else None

    @property
    def num_streams(self) -> int:
        same = torch.compiler.is_compiling() or self.restarts is not None
        return self.masks[0].num_streams if same else 1


@class_with_hints
@dataclass(frozen=True, repr=False, eq=False)
class Mixture(_Combination):
    """A multiset union of masks under one softmax; written `a + b`."""

    symbol = "+"


@dataclass(frozen=True, repr=False, eq=False)
class _SetOperation(_Combination, Mask):
    """Base class of `And` and `Or`, which are masks: a pair is in them once or not at all."""

    join: ClassVar[Any]

    @property
    def asks_frame(self) -> bool:
        return any(mask.asks_frame for mask in self.masks)

    def holds(self, p: Tensor, k: Tensor, frame: Frame) -> Tensor:
        return reduce(type(self).join, (mask.holds(p, k, frame) for mask in self.masks))

    def at(self, batch: int, head: int, frame: Frame) -> Mask:
        own = tuple(mask.at(batch, head, frame) for mask in self.masks)
        return self if all(map(operator.is_, own, self.masks)) else type(self)(own)


@dataclass(frozen=True, repr=False, eq=False)
class And(_SetOperation):
    """Intersection; written `a & b`, or `a - b` where `b` is a complement."""

    symbol = "&"
    join = operator.and_


@dataclass(frozen=True, repr=False, eq=False)
class Or(_SetOperation):
    """Union; written `a | b`."""

    symbol = "|"
    join = operator.or_


@dataclass(frozen=True, repr=False, eq=False)
class Not(Mask):
    """Complement of a mask: `b` in `a - b`. Layouts use it to count each pair in only one pass."""

    mask: Mask

    @property
    def asks_frame(self) -> bool:
        return self.mask.asks_frame

    def holds(self, p: Tensor, k: Tensor, frame: Frame) -> Tensor:
        return ~self.mask.holds(p, k, frame)

    def at(self, batch: int, head: int, frame: Frame) -> Mask:
        own = self.mask.at(batch, head, frame)
        return self if own is self.mask else Not(own)

    def _components(self) -> tuple[Mask, ...]:
        return (self.mask,)


def joined_masks(pattern: Pattern) -> Iterator[Mask]:
    """Yields the masks that `&`, `|` and `+` combine in a pattern, in order.

    Inner masks of other classes, such as the pattern inside `Packed`, are not yielded.
    """
    if isinstance(pattern, _Combination):
        for mask in pattern.masks:
            yield from joined_masks(mask)
    elif isinstance(pattern, Mask):
        yield pattern


def parts_of(pattern: Pattern) -> Iterator[Pattern]:
    """Yields a pattern and all its parts, at any depth."""
    yield pattern
    for part in pattern._components():
        yield from parts_of(part)


def parts_in(pattern: Pattern, frame: Frame) -> Iterator[tuple[Pattern, Frame]]:
    """Yields (part, frame) for a pattern and its parts at any depth, once per frame of a part."""
    yield pattern, frame
    for part in pattern._components():
        for inner in pattern._frames(frame):
            yield from parts_in(part, inner)


def check_fits(pattern: Pattern, frame: Frame) -> None:
    """Calls `pattern.check(frame)`, and adds the pattern's text to its ValueError."""
    try:
        pattern.check(frame)
    except ValueError as error:
        raise ValueError(f"{error}, in {shortened(str(pattern))}") from None


def _combined(symbol: str, left: Pattern, right: object) -> Pattern:
    pattern = _joined(symbol, left, right)
    if isinstance(right, Pattern):
        pattern.write_as((symbol, left, right))
    return pattern


def _joined(symbol: str, left: Pattern, right: object) -> Pattern:
    mixtures = [isinstance(side, Mixture) for side in (left, right)]
    if symbol == "|" and any(mixtures):
        raise TypeError(
            "| is for sets of pairs; a mixture counts them: use +, or | inside each branch"
        )
    if not isinstance(right, Pattern):
        raise TypeError(f"{symbol} needs a pattern on both sides, {not_a_pattern(right)}")
    if symbol == "+":
        return Mixture((*left.branches, *right.branches))
    if symbol == "-":
        right = _complement(right)
    elif all(mixtures):
        raise TypeError(
            "& needs a pattern that is a mask on one side, got two mixtures: a mixture counts "
            "pairs; use & of each with a mask, or + of both"
        )
    operation = Or if symbol == "|" else And
    parts = (
        [m for x in pair for m in (x.masks if isinstance(x, operation) else (x,))]
        for pair in product(left.branches, right.branches)
    )
    masks = tuple(operation(tuple(each)) for each in parts)
    return Mixture(masks) if any(mixtures) else masks[0]


def _complement(mask: Pattern) -> Not:
    if not isinstance(mask, Mask):
        raise TypeError("- removes a set of pairs; a mixture counts them: subtract each branch")
    if not all(part.has_complement for part in joined_masks(mask)):
        raise TypeError(
            "a SelectedBlocks cannot be subtracted, since caches and kernels look for its blocks; "
            "leave the unwanted blocks out of its indices"
        )
    return Not(mask)
