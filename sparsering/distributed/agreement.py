"""What ranks tell each other before any payload: a difference is an error on all of them."""

import hashlib
import struct
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from .exchange import Exchange, RingMismatchError
from .plan import RingPlan
from .sharding import num_tokens
from .wire import FORMATS, wire

_VERSION = 1
_BUDGET = 0.01
_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


class Call(NamedTuple):
    """What the ranks' calls must have in common."""

    backward: bool
    tensors: tuple[Tensor, ...]
    pattern: str
    scale: float
    sharding: str
    compression: str | None
    differentiable: bool


_FIELDS = (
    "version", "failure", "pass (0 forward, 1 backward)", "number of ranks", "batch size",
    "query heads", "key/value heads", "head dim", "value head dim", "dtype", "pattern", "scale",
    "sharding", "compression", "whether gradients are wanted",
)  # fmt: skip
_HASHED = ("pattern", "scale", "sharding", "compression")


def agree_on_call(
    exchange: Exchange, call: Call, query: Tensor, key: Tensor, value: Tensor
) -> tuple[list[int], str | None, float]:
    """(tokens of each rank, wire format, its error here). RingMismatchError on all ranks where
    their calls differ.
    """
    tables = (t.cpu().contiguous().view(torch.uint8).flatten() for t in call.tensors)
    common = [
        _VERSION, 0, int(call.backward), exchange.world_size, len(query),
        query.shape[1], key.shape[1], query.shape[3], value.shape[3],
        _DTYPES.index(query.dtype), _digest(call.pattern, *tables), _digest(call.scale),
        _digest(call.sharding), _digest(call.compression), int(call.differentiable),
    ]  # fmt: skip
    errors = _wire_errors(call.compression, key, value)
    bits = [struct.unpack("<q", struct.pack("<d", error))[0] for error in errors]
    records = exchange.agree([*common, query.shape[2], *bits], query.device)
    failed = [rank for rank, record in enumerate(records) if record[1]]
    if failed:
        raise RingMismatchError(
            f"rank {failed[0]} raised before the call began; its own error says why",
            exchange.rank, failed[0], "agreement",
        )  # fmt: skip
    for number, name in enumerate(_FIELDS):
        values = [record[number] for record in records]
        if len(set(values)) > 1:
            other = next(rank for rank, v in enumerate(values) if v != values[0])
            got = "" if name in _HASHED else f": {values[0]} and {values[other]}"
            raise RingMismatchError(
                f"ranks must agree on the {name}, but rank 0 and rank {other} differ{got}; pass "
                "the same on every rank",
                exchange.rank, other, "agreement",
            )  # fmt: skip
    lengths = [record[len(_FIELDS)] for record in records]
    of_ranks = [
        [struct.unpack("<d", struct.pack("<q", x))[0] for x in record[len(_FIELDS) + 1 :]]
        for record in records
    ]
    worst = [max(column) for column in zip(*of_ranks, strict=True)]
    chosen = _chosen(call.compression, worst, query.dtype)
    return lengths, chosen, 0.0 if chosen is None else errors[FORMATS.index(chosen)]


def tell_failure(group: dist.ProcessGroup, timeout: float | None, device: torch.device) -> None:
    """Lets the other ranks' agreement fail at once, where this one raises before its own."""
    record = [_VERSION, 1] + [0] * (len(_FIELDS) - 2 + 1 + len(FORMATS))
    Exchange(group, timeout).agree(record, device)


def check_lengths(plan: RingPlan, lengths: list[int], rank: int) -> None:
    """Raises RingMismatchError where shards are not those of the plan's sharding."""
    for peer, (length, ranges) in enumerate(zip(lengths, plan.ranges, strict=True)):
        if length != num_tokens(ranges):
            raise RingMismatchError(
                f"sharding {plan.sharding!r} gives rank {peer} {num_tokens(ranges)} of "
                f"{sum(lengths)} tokens, got {length}; cut the sequence with "
                "sparsering.distributed.shard",
                rank, peer, "agreement",
            )  # fmt: skip


def error_budget(compression: str | None) -> float | None:
    """The bound of "auto" or "auto:bound"; None for another name. Raises ValueError."""
    if not (isinstance(compression, str) and compression.startswith("auto")):
        return None
    try:
        name, given, bound = compression.partition(":")
        budget = float(bound) if given else _BUDGET
        if not budget > 0 or name != "auto":
            raise ValueError
    except ValueError:
        raise ValueError(
            f"compression must be 'auto' or 'auto:' and an error bound above 0, as in "
            f"'auto:0.001', got {compression!r}"
        ) from None
    return budget


def _wire_errors(compression: str | None, key: Tensor, value: Tensor) -> list[float]:
    """Error of each format on this rank's keys and values; 0 where it is not asked for."""
    asked = FORMATS if error_budget(compression) is not None else (compression,)
    errors = []
    for name in FORMATS:
        of_both = [0.0]
        for x in (key, value) if name in asked else ():
            rows, form = x.detach().reshape(-1, x.shape[3]), wire(name, x.dtype)
            came = form.decode(form.encode(rows, rows.shape[1]), rows.shape[1], 0)
            size = rows.double().square().sum()
            lost = (came.double() - rows.double()).square().sum()
            of_both.append(float((lost / size).sqrt()) if size > 0 else 0.0)
        errors.append(max(of_both))
    return errors


def _chosen(compression: str | None, errors: list[float], dtype: torch.dtype) -> str | None:
    """The format that all ranks use: of those within the budget the smallest, then most exact."""
    budget = error_budget(compression)
    if budget is None:
        return compression
    within = [
        (wire(name, dtype).row_bytes(64, 64), error, name)
        for name, error in zip(FORMATS, errors, strict=True)
        if error <= budget and wire(name, dtype).element != dtype
    ]
    return min(within)[2] if within else None


def _digest(*parts: object) -> int:
    """63 bits that tell values apart."""
    state = hashlib.sha256()
    for part in parts:
        content = part.numpy().tobytes() if isinstance(part, Tensor) else repr(part).encode()
        state.update(len(content).to_bytes(8, "little") + content)
    return int.from_bytes(state.digest()[:8], "little") >> 1
