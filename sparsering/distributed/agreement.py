"""Agreement of all ranks on a call, before any payload; a difference raises on all of them."""

import contextlib
import hashlib
import math
import struct
from typing import NamedTuple, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from ..checks import DTYPES
from ..patterns.arguments import shortened
from .exchange import Exchange, RingError, RingMismatchError
from .plan import RingPlan
from .sharding import num_tokens
from .wire import FORMATS, wire_format

_VERSION = 2
_BUDGET = 0.01


class RingCall(NamedTuple):
    """Arguments that must be equal on all ranks, except a drawn `seed`: all ranks use rank 0's."""

    backward: bool
    tensors: tuple[Tensor, ...]
    pattern: str
    scale: float
    sharding: str
    compression: str | None
    differentiable: bool
    extras: tuple[object, ...]
    tables: tuple[Tensor, ...]
    seed: int


class Agreed(NamedTuple):
    """Results of the agreement, equal on all ranks; only `error` is of this rank's own rows."""

    lengths: list[int]
    compression: str | None
    error: float
    seed: int


_TABLES = "softcap, distance_bias, sink, dropout_p and dropout_seed"
_HASHED = ("pattern", "scale", "sharding", "compression", _TABLES)


def agree_on_call(
    exchange: Exchange, call: RingCall, query: Tensor, key: Tensor, value: Tensor
) -> Agreed:
    """Checks that all ranks make the same call, and picks the wire format of "auto".

    Ranks first exchange a digest of the call. Only if digests differ, they exchange the fields too,
    and all ranks raise RingMismatchError.
    """
    fields = {
        "version": _VERSION,
        "pass (0 forward, 1 backward)": int(call.backward),
        "number of ranks": exchange.world_size,
        "batch size": len(query),
        "query heads": query.shape[1],
        "key/value heads": key.shape[1],
        "head dim": query.shape[3],
        "value head dim": value.shape[3],
        "dtype": DTYPES.index(query.dtype),
        "pattern": _digest(call.pattern, *call.tensors),
        "scale": _digest(call.scale),
        "sharding": _digest(call.sharding),
        "compression": _digest(call.compression),
        _TABLES: _digest(call.extras, *call.tables),
        "whether gradients are wanted": int(call.differentiable),
    }
    mine = [_digest(list(fields.values())), query.shape[2], 0, call.seed]
    digests, lengths, failed, seeds = zip(*exchange.agree(mine), strict=True)
    if any(failed):
        rank = failed.index(1)
        told = f"rank {rank} raised before the call began; its own error says why"
        raise _mismatch(told, exchange.rank, rank)
    if len(set(digests)) > 1:
        _raise_difference(exchange, fields)
    measured = not call.backward or error_budget(call.compression) is not None
    errors = _wire_errors(call.compression, key, value) if measured else [0.0] * len(FORMATS)
    chosen = call.compression
    if (budget := error_budget(call.compression)) is not None:
        bits = [struct.unpack("<q", struct.pack("<d", error))[0] for error in errors]
        of_ranks = [
            [struct.unpack("<d", struct.pack("<q", x))[0] for x in record]
            for record in exchange.agree(bits)
        ]
        worst = [max(column) for column in zip(*of_ranks, strict=True)]
        chosen = _smallest(worst, budget, query.dtype)
    error = 0.0 if chosen is None else errors[FORMATS.index(chosen)]
    return Agreed(list(lengths), chosen, error, seeds[0])


def _raise_difference(exchange: Exchange, fields: dict[str, int]) -> NoReturn:
    """Raises on all ranks, and names the first field that differs."""
    records = exchange.agree(list(fields.values()))
    for name, values in zip(fields, zip(*records, strict=True), strict=True):
        if len(set(values)) > 1:
            other = next(rank for rank, v in enumerate(values) if v != values[0])
            got = "" if name in _HASHED else f": {values[0]} and {values[other]}"
            told = f"ranks must agree on the {name}, but rank 0 and rank {other} differ{got}"
            raise _mismatch(f"{told}; pass the same on every rank", exchange.rank, other)
    raise AssertionError("digests differ, fields do not")


def _mismatch(told: str, rank: int, peer: int) -> RingMismatchError:
    return RingMismatchError(told, rank, peer, "agreement")


def tell_failure(group: dist.ProcessGroup, timeout: float | None) -> None:
    """Makes the other ranks' agreement fail at once, because this rank raised before it."""
    usable = isinstance(timeout, float | int) and 0 < timeout < math.inf
    with contextlib.suppress(RingError):
        Exchange(group, timeout if usable else None).agree([0, 0, 1, 0])


def agree_on_lengths(exchange: Exchange, length: int, common: object) -> list[int]:
    """Returns each rank's length; raises RingMismatchError on all ranks if `common` differs."""
    with exchange.going_on():
        digests, lengths = zip(*exchange.agree([_digest(common), length]), strict=True)
    if len(set(digests)) > 1:
        other = next(rank for rank, digest in enumerate(digests) if digest != digests[0])
        told = f"ranks must agree on dim, dtype and the other sizes, but rank 0 and rank {other}"
        raise _mismatch(f"{told} differ; pass parts of one tensor", exchange.rank, other)
    return list(lengths)


def check_lengths(plan: RingPlan, lengths: list[int], rank: int) -> None:
    """Raises RingMismatchError if a shard's length is not that of the plan's sharding."""
    for peer, (length, ranges) in enumerate(zip(lengths, plan.ranges, strict=True)):
        if length != num_tokens(ranges):
            raise _mismatch(
                f"sharding {plan.sharding!r} gives rank {peer} {num_tokens(ranges)} of "
                f"{sum(lengths)} tokens, got {length}; cut the sequence with "
                "sparsering.distributed.shard",
                rank,
                peer,
            )


def error_budget(compression: str | None) -> float | None:
    """Returns the bound of "auto" or "auto:bound", None for other names. Raises ValueError."""
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
            f"'auto:0.001', got {shortened(repr(compression))}"
        ) from None
    return budget


def _wire_errors(compression: str | None, key: Tensor, value: Tensor) -> list[float]:
    """Relative error of each format on this rank's keys and values; 0 for formats not asked for."""
    asked = FORMATS if error_budget(compression) is not None else (compression,)
    errors = []
    for name in FORMATS:
        of_both = [0.0]
        for x in (key, value) if name in asked else ():
            form = wire_format(name, x.dtype)
            lost = size = 0.0
            for rows in x.detach().flatten(0, 1):  # one head at a time, to save memory
                came = form.decode(form.encode(rows, rows.shape[1]), rows.shape[1], 0)
                lost += (came.double() - rows).square().sum().item()
                size += rows.double().square().sum().item()
            error = math.sqrt(lost / size) if size != 0 else 0.0
            of_both.append(error if math.isfinite(error) else math.inf)
        errors.append(max(of_both))
    return errors


def _smallest(errors: list[float], budget: float, dtype: torch.dtype) -> str | None:
    """Smallest format within the budget, of equals the most exact; None if none saves bytes."""
    within = [
        (wire_format(name, dtype).row_bytes(64, 64), error, name)
        for name, error in zip(FORMATS, errors, strict=True)
        if error <= budget and wire_format(name, dtype).element != dtype
    ]
    return min(within)[2] if within else None


def _digest(*parts: object) -> int:
    """Hashes values to 63 bits."""
    state = hashlib.sha256()
    for part in parts:
        if isinstance(part, Tensor):
            state.update(repr((part.dtype, tuple(part.shape))).encode())
            content = part.cpu().contiguous().view(torch.uint8).numpy().tobytes()
        else:
            content = repr(part).encode()
        state.update(len(content).to_bytes(8, "little") + content)
    return int.from_bytes(state.digest()[:8], "little") >> 1
