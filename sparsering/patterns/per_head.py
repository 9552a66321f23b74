"""`PerHead`: a pattern of its own for each key/value head."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ..ground.arguments import not_a_pattern, shortened
from ..ground.keywords import class_with_hints
from .algebra import Frame, Mask, Mixture, Pattern, parts_of
from .positions import GlobalTokens
from .selected import SelectedBlocks
from .written import part_text

NO_PAIRS = GlobalTokens(0, rows=False)
"""A mask without pairs."""


@class_with_hints
@dataclass(frozen=True, repr=False, eq=False)
class PerHead(Mask):
    """A pattern of its own for each key/value head, such as half of the heads with a window.

    Key/value head h, and the query heads that share it, attend by `patterns[h]`. Equal patterns are
    laid out once, and a `KVCache` holds for each head the keys that its own pattern still needs.

    Args:
        patterns: a mask or mixture for each kv head, as many as the call has kv heads.

    Returns: a mask, or a mixture if one of the patterns is a mixture.

    Raises: TypeError for what is no pattern; ValueError for no pattern at all, a `SelectedBlocks`,
        and, in a call, for another number of kv heads.

    Cost: the layout of each distinct pattern, and a table of visited tiles for each kv head.

    Example: `PerHead((Causal(), Causal(), streaming, streaming))` of `streaming = Causal() &
        (SlidingWindow(255) | GlobalTokens(4, rows=False))`.

    Source: DuoAttention (arXiv 2410.10819), which finds the heads that need all keys.
    """

    patterns: tuple[Mask, ...]

    def __new__(cls, patterns: Sequence[Pattern]) -> Any:  # `PerHead` or a `Mixture`
        given = patterns if isinstance(patterns, Sequence) else ()
        if any(isinstance(pattern, Mixture) for pattern in given):
            branches = [pattern.branches for pattern in patterns]
            most = max(map(len, branches))
            rows = [(*x, *(NO_PAIRS,) * (most - len(x))) for x in branches]
            return Mixture(tuple(cls(column) for column in zip(*rows, strict=True)))
        return super().__new__(cls)

    def _validate(self) -> None:
        patterns: Any = self.patterns
        if not isinstance(patterns, Sequence) or isinstance(patterns, str) or not patterns:
            raise ValueError(
                "PerHead needs a sequence with a pattern for each kv head, got "
                f"{shortened(repr(patterns))}; for example PerHead((Causal(), SlidingWindow(255)))"
            )
        for pattern in patterns:
            if not isinstance(pattern, Mask):
                raise TypeError(
                    f"PerHead needs a pattern for each kv head, {not_a_pattern(pattern)}"
                )
            if any(isinstance(part, SelectedBlocks) for part in parts_of(pattern)):
                raise ValueError(
                    f"PerHead takes no SelectedBlocks, got {shortened(str(pattern))}; its indices "
                    "have a dim of heads: give those of each head there"
                )
        object.__setattr__(self, "patterns", tuple(patterns))

    def _spell(self, tensors: list[Tensor], as_data: bool) -> str:
        parts = (part_text(pattern, tensors, as_data) for pattern in self.patterns)
        return f"PerHead(({', '.join(parts)},))"

    def _shown_by_default(self) -> str:
        return f"PerHead(({', '.join(pattern._shown() for pattern in self.patterns)},))"

    def _components(self) -> tuple[Mask, ...]:
        return tuple(dict.fromkeys(self.patterns))

    @property
    def asks_frame(self) -> bool:
        return any(pattern.asks_frame for pattern in self.patterns)

    def at(self, batch: int, head: int, frame: Frame) -> Mask:
        return self.patterns[frame.kv_head(head)].at(batch, head, frame)

    def check(self, frame: Frame) -> None:
        if len(self.patterns) != frame.num_kv_heads:
            raise ValueError(
                f"PerHead must have a pattern for each of the {frame.num_kv_heads} kv heads, got "
                f"{len(self.patterns)}; give as many patterns as there are kv heads"
            )
        super().check(frame)

    def num_tables(self, frame: Frame) -> int:
        inner = super().num_tables(frame)
        return inner if len(self._components()) == 1 else max(inner, frame.num_kv_heads)

    def holds(self, p: Tensor, k: Tensor, frame: Frame) -> Tensor:
        return self.patterns[0].holds(p, k, frame)  # for other heads, callers first take `at`
