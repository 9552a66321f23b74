"""Performance bars for a GPU, and whether the record meets them."""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

Record = dict[str, Any]

MAIN = "D 128, blocks of 128"


class Bar(NamedTuple):
    """A figure with a floor and, for some, an aim; `at_most`: smaller is better."""

    name: str
    unit: str
    floor: float
    aim: float | None
    measure: Callable[[Record], float | None]
    at_most: bool = False


def rows_of(record: Record, part: str, **wanted: object) -> list[dict[str, Any]]:
    """Rows of a part with these values, without rows that were left out or failed."""
    rows = record.get("parts", {}).get(part, {}).get("rows", [])
    return [
        row for row in rows
        if "ms" in row and all(row.get(key) == value for key, value in wanted.items())
    ]  # fmt: skip


def rate(record: Record, case: str) -> float | None:
    """TFLOP/s of our kernels at the main shape."""
    rows = rows_of(record, "main shapes", setting=MAIN, case=case, backend="ours")
    return rows[0]["tflops"] if rows else None


def _times(case: str, *peers: str) -> Callable[[Record], float | None]:
    """Speedup over the fastest peer at the main shape."""

    def speedup(record: Record) -> float | None:
        rows = rows_of(record, "main shapes", setting=MAIN, case=case)
        ms = {row["backend"]: row["ms"] for row in rows}
        theirs = [ms[peer] for peer in peers if peer in ms]
        return min(theirs) / ms["ours"] if theirs and "ours" in ms else None

    return speedup


def _worst(part: str, key: str, **wanted: object) -> Callable[[Record], float | None]:
    def worst(record: Record) -> float | None:
        rows = rows_of(record, part, **wanted)
        return max(row[key] for row in rows) if rows else None

    return worst


def _wrong(record: Record) -> float | None:
    """Number of correctness cases that failed; None if some were not tried."""
    states = [
        state for name, part in record.get("parts", {}).items() if name.endswith("right")
        for state in part["cases"].values()
    ]  # fmt: skip
    if not states or any("left" in state for state in states):
        return None
    return float(sum("failed" in state for state in states))


_DENSE = ("dense cudnn", "dense flash", "dense flash-attn-3")
_FLEX = ("flex", "flex, FLASH")
BARS = [
    Bar("cases of correctness that fail", "", 0, None, _wrong, at_most=True),
    Bar("forward, main shape", "TFLOP/s", 400, 600, lambda record: rate(record, "forward")),
    Bar("forward and backward, main shape", "TFLOP/s", 310, 450,
        lambda record: rate(record, "forward+backward")),
    Bar("forward, times FlexAttention's speed", "x", 1.0, 1.3, _times("forward", *_FLEX)),
    Bar("forward and backward, times FlexAttention's speed", "x", 1.0, 1.3,
        _times("forward+backward", *_FLEX)),
    Bar("forward, times the fastest dense, 90% sparse", "x", 6.5, 9, _times("forward", *_DENSE)),
    Bar("forward and backward, times the fastest dense, 90% sparse", "x", 6.5, 9,
        _times("forward+backward", *_DENSE)),
    Bar("4096 tokens, 90% sparse, forward", "ms", 0.2, None,
        _worst("founding table", "ms", backend="ours", case="forward"), at_most=True),
    Bar("overhead of a call on the host", "us", 60, None,
        _worst("overhead", "us", backend="ours", case="forward"), at_most=True),
    Bar("from new indices of blocks to the first tile", "ms", 1.3, 0.15,  # 1.3: FlashInfer's plan
        _worst("new masks", "first_tile_ms", backend="ours, indices"), at_most=True),
]  # fmt: skip
"""The bars. The main shape: 10% random blocks of 128, 16 heads of 128, 32768 tokens, bfloat16."""


def bars(record: Record) -> list[dict[str, Any]]:
    """Compares each bar with the record: its figure or None, and whether floor and aim are met."""
    return list(_judged(record))


def _judged(record: Record) -> Iterator[dict[str, Any]]:
    for bar in BARS:
        value = bar.measure(record)

        def met(limit: float | None, bar: Bar = bar, value: float | None = value) -> bool | None:
            if value is None or limit is None:
                return None
            return value <= limit if bar.at_most else value >= limit

        yield {"bar": bar.name, "unit": bar.unit, "at_most": bar.at_most, "floor": bar.floor,
               "aim": bar.aim, "found": value, "floor_met": met(bar.floor),
               "aim_met": met(bar.aim)}  # fmt: skip
