"""`Call`: the checked arguments of attention, which public functions build and backends run."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor

from .patterns.algebra import Frame, Pattern

Inputs = tuple[Tensor, Tensor, Tensor]
"""Query, key and value."""


@dataclass(frozen=True, slots=True)
class Options:
    """Checked options of a call, which change its scores or weights, by name.

    `in_use` has only the options that the call uses: fields of `Problem`, and `slot_bias`.
    """

    in_use: Mapping[str, Any]

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the options in use; a score_mod that `coordinate_bias` made has its name."""
        return tuple(x.name if name == "score_mod" else name for name, x in self.in_use.items())

    def __getitem__(self, name: str) -> Any:
        """Returns the value of an option, or None if the call does not use it."""
        return self.in_use.get(name)

    def changed(self, **changes: Any) -> "Options":
        """Returns options with some values replaced; None removes an option."""
        return Options({name: x for name, x in {**self.in_use, **changes}.items() if x is not None})

    def mapped(self, change: Callable[[Tensor], Tensor]) -> "Options":
        """Returns options with `change(x)` in place of each tensor x, for example a slice of it."""
        values = {name: x for name, x in self.in_use.items() if isinstance(x, Tensor)}
        return self.changed(**{name: change(x) for name, x in values.items()})


NO_OPTIONS = Options({})


class Call(NamedTuple):
    """A checked call of attention: its tensors, pattern, numbers and options.

    How it runs also depends on the machine; a `Decision` (route/decision.py) says that.
    """

    query: Tensor  # [B, Hq, Nq, D]
    key: Tensor  # [B, Hkv, Nk, D]
    value: Tensor  # [B, Hkv, Nk, Dv]
    pattern: Pattern
    scale: float
    q_start: int  # position of the first query
    block_size: int | None = None  # tokens of a tile; None if the caller named none
    options: Options = NO_OPTIONS

    @property
    def inputs(self) -> Inputs:
        """Query, key and value."""
        return self.query, self.key, self.value

    @property
    def frame(self) -> Frame:
        """The lengths and heads of the call, and the position of its first query."""
        return frame_of(self.query, self.key, self.q_start)


def frame_of(query: Tensor, key: Tensor, q_start: int) -> Frame:
    """Returns the frame of a query [B, Hq, Nq, D] and a key [B, Hkv, Nk, D]."""
    return Frame(
        q_len=query.shape[2],
        kv_len=key.shape[2],
        num_heads=query.shape[1],
        num_kv_heads=key.shape[1],
        q_start=q_start,
    )
