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
    """Arguments of the ring operator on one rank, in the order of its schema.

    Ranks agree on all of them but the rows of their own tokens, `timeout`, `group` and `backend`.
    If `seed_is_given` is False, they all use rank 0's seed.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    distance_bias: Tensor | None
    sink: Tensor | None
    dropout_seed: Tensor | None
    tensors: list[Tensor]
    pattern: str
    scale: float
    softcap: float | None
    dropout_p: float | None
    seed_is_given: bool
    group: str
    sharding: str
    compression: str | None
    timeout: float | None
    backend: str
    differentiable: bool

    @property
    def seed(self) -> int:
        """The seed of the first batch entry; 0 without dropout."""
        seed = self.dropout_seed
        return 0 if seed is None or not len(seed) else int(seed[0])


class Agreement(NamedTuple):
    """Results of the agreement, equal on all ranks; only `error` is of this rank's own rows."""

    lengths: list[int]
    compression: str | None
    error: float
    seed: int


_TABLES = "softcap, distance_bias, sink, dropout_p and dropout_seed"
_HASHED = ("pattern", "scale", "sharding", "compression", _TABLES)


def agree_on_call(exchange: Exchange, backward: bool, call: RingCall) -> Agreement:
    """Checks that all ranks make the same call, and picks the wire format of "auto"."""
    fields = _fields(exchange.world_size, backward, call)
    record = [_digest(list(fields.values())), call.query.shape[2], 0, call.seed]
    digests, lengths, failures, seeds = zip(*exchange.agree(record), strict=True)
    if any(failures):
        rank = failures.index(1)
        text = f"rank {rank} raised before the call began; its own error says why"
        raise _mismatch(text, exchange.rank, rank)
    if len(set(digests)) > 1:
        _raise_difference(exchange, fields)
    compression, budget = call.compression, error_budget(call.compression)
    errors = [0.0] * len(FORMATS)
    if budget is not None or not backward:
        errors = _wire_errors(compression, call.key, call.value)
    if budget is not None:
        bits = [struct.unpack("<q", struct.pack("<d", error))[0] for error in errors]
        columns = zip(*exchange.agree(bits), strict=True)
        worst = [max(struct.unpack("<d", struct.pack("<q", x))[0] for x in xs) for xs in columns]
        compression = _smallest(worst, budget, call.query.dtype)
    error = 0.0 if compression is None else errors[FORMATS.index(compression)]
    return Agreement(list(lengths), compression, error, seeds[0])


def _fields(world_size: int, backward: bool, call: RingCall) -> dict[str, int]:
    """Integers that must be equal on all ranks, by their name in an error."""
    query, key, value, bias, sink, *_ = call
    shared_sink = None if sink is None or sink.shape[2] > 1 else sink  # else of a rank's own rows
    tables = [x[:1] for x in (bias, shared_sink) if x is not None]
    seed = call.seed if call.seed_is_given else None
    extras = (call.softcap, call.dropout_p, seed, bias is None, sink is None)
    return {
        "version": _VERSION,
        "pass (0 forward, 1 backward)": int(backward),
        "number of ranks": world_size,
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
        _TABLES: _digest(extras, *tables),
        "whether gradients are wanted": int(call.differentiable),
    }


def _raise_difference(exchange: Exchange, fields: dict[str, int]) -> NoReturn:
    """Raises on all ranks, and names the first field that differs."""
    records = exchange.agree(list(fields.values()))
    for name, values in zip(fields, zip(*records, strict=True), strict=True):
        if len(set(values)) > 1:
            other = next(rank for rank, v in enumerate(values) if v != values[0])
            got = "" if name in _HASHED else f": {values[0]} and {values[other]}"
            text = f"ranks must agree on the {name}, but rank 0 and rank {other} differ{got}"
            raise _mismatch(f"{text}; pass the same on every rank", exchange.rank, other)
    raise AssertionError("digests differ, fields do not")


def _mismatch(text: str, rank: int, peer: int) -> RingMismatchError:
    return RingMismatchError(text, rank, peer, "agreement")


def report_failure(group: dist.ProcessGroup, timeout: float | None) -> None:
    """Makes the other ranks' agreement fail at once, because this rank raised before it."""
    with contextlib.suppress(RingError):
        Exchange(group, timeout).agree([0, 0, 1, 0])


def agree_on_lengths(exchange: Exchange, length: int, common: object) -> list[int]:
    """Returns each rank's length; raises RingMismatchError on all ranks if `common` differs."""
    with exchange.break_on_error():
        digests, lengths = zip(*exchange.agree([_digest(common), length]), strict=True)
    if len(set(digests)) > 1:
        other = next(rank for rank, digest in enumerate(digests) if digest != digests[0])
        text = f"ranks must agree on dim, dtype and the other sizes, but rank 0 and rank {other}"
        raise _mismatch(f"{text} differ; pass parts of one tensor", exchange.rank, other)
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
        name, colon, bound = compression.partition(":")
        budget = float(bound) if colon else _BUDGET
        if not budget > 0 or name != "auto":
            raise ValueError
    except ValueError:
        raise ValueError(
            f"compression must be 'auto' or 'auto:' and an error bound above 0, as in "
            f"'auto:0.001', got {shortened(repr(compression))}"
        ) from None
    return budget


def _wire_errors(compression: str | None, key: Tensor, value: Tensor) -> list[float]:
    """Relative error of each format on this rank's keys and values; 0 for formats out of use."""
    names = FORMATS if error_budget(compression) is not None else (compression,)
    return [max(_error(key, x), _error(value, x)) if x in names else 0.0 for x in FORMATS]


def _error(x: Tensor, name: str) -> float:
    """Relative root mean square error of a tensor in a format."""
    form, square_error, square = wire_format(name, x.dtype), 0.0, 0.0
    for rows in x.detach().flatten(0, 1):  # one head at a time, to save memory
        decoded = form.decode(form.encode(rows, rows.shape[1]), rows.shape[1], 0)
        square_error += (decoded.double() - rows).square().sum().item()
        square += rows.double().square().sum().item()
    error = math.sqrt(square_error / square) if square != 0 else 0.0
    return error if math.isfinite(error) else math.inf


def _smallest(errors: list[float], budget: float, dtype: torch.dtype) -> str | None:
    """Smallest format within the budget, of equals the most exact; None if none saves bytes."""
    formats = [
        (wire_format(name, dtype).row_bytes(64, 64), error, name)
        for name, error in zip(FORMATS, errors, strict=True)
        if error <= budget and wire_format(name, dtype).element != dtype
    ]
    return min(formats)[2] if formats else None


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
