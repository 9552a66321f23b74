"""Compares the arguments of all ranks before keys are sent; a difference raises on every rank.

Each rank sends a few integers to all others: digests of the call's kind and arguments, whether it
failed, its shard's length, its seed. Every collective of the library begins so, also in a backward
pass. An error then names a rank that is in another call, where gloo would abort the process.
"""

import contextlib
import hashlib
import math
from collections.abc import Sequence
from enum import IntEnum
from typing import Any, NamedTuple, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from ..call import NO_OPTIONS, Options
from ..checks import DTYPES
from ..ground.arguments import shortened
from ..ground.buffers import add_bytes
from ..layouts.tiles import Ranges
from ..patterns.algebra import Pattern
from ..patterns.selected import has_lists
from ..route.options import ANYWHERE, OPTIONS, operator_schema
from .exchange import Exchange, RingMismatchError
from .own_rows import may_be_own_rows, without_tables
from .sharding import num_tokens, owned_ranges
from .wire import FORMATS, wire_format

_VERSION = 7  # version of these integers; ranks with different versions raise an error
_BUDGET = 0.01  # default error bound of compression="auto"

SCHEMA = operator_schema(
    ANYWHERE,
    "bool seed_is_given, str group, str sharding, str? compression, float? timeout, str backend, "
    "bool differentiable, int first_head",
)


class Derivative(IntEnum):
    """Names the pass of a call that ranks compute together.

    Ranks compare it, so that none waits for messages of another pass.
    """

    NONE = 0
    GRADIENTS = 1
    TANGENTS = 2
    GRADIENT_TANGENTS = 3


class RingCall(NamedTuple):
    """The arguments of the ring operator on one rank, by name.

    They must be equal on all ranks, except `timeout`, `group`, `backend`, and tensors that have a
    row per token. If `seed_is_given` is False, all ranks use the seed of rank 0.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    tensors: list[Tensor]
    pattern: str
    scale: float
    options: Options
    seed_is_given: bool
    group: str
    sharding: str
    compression: str | None
    timeout: float | None
    backend: str
    differentiable: bool
    first_head: int  # of a group of heads: where it begins among all, for dropout

    @classmethod
    def of(cls, arguments: Sequence[Any]) -> "RingCall":
        """Builds the call from the operator's arguments, which `SCHEMA` names."""
        names = [argument.split()[-1] for argument in SCHEMA.split(", ")]
        call = dict(zip(names, arguments, strict=True))
        options = NO_OPTIONS.changed(**{name: call.pop(name) for name in ANYWHERE})
        return cls(**call, options=options)

    @property
    def seed(self) -> int:
        """Dropout seed of the first batch entry; 0 without dropout."""
        seed = self.options["dropout_seed"]
        return 0 if seed is None or not len(seed) else int(seed[0])


class Agreement(NamedTuple):
    """The results of `agree_on_call`, which are equal on all ranks except for `error`."""

    lengths: list[int]  # tokens of each rank's shard
    compression: str | None  # wire format of keys and values, never "auto"
    error: float  # relative error of this rank's keys and values in that format
    seed: int
    own_rows: bool  # True if each rank passes only the rows of lists for its own tokens


_PASS = "pass (0 forward, 1 backward, 2 tangents of results, 3 of gradients)"
_TABLES = f"{', '.join(ANYWHERE[:-1])} and {ANYWHERE[-1]}"
# These fields are compared by digest, so an error cannot show their values.
_HASHED = ("pattern", "scale", "sharding", "compression", _TABLES)


def agree_on_call(
    exchange: Exchange, kind: Derivative, call: RingCall, pattern: Pattern
) -> Agreement:
    """Compares the call's arguments among ranks.

    Returns what they agree on, with the wire format.
    """
    fields, tokens = _fields(exchange.world_size, kind, call), call.query.shape[2]
    tables = 0
    if has_lists(pattern):
        common, tensors = without_tables(pattern).operands
        fields["pattern"] = _digest(common, *tensors)
        tables = _digest(call.pattern, *call.tensors)
    own = tokens, call.seed, tables, int(may_be_own_rows(pattern, tokens))
    columns = agree_on_batch(exchange, "ring_attention", fields, own, hidden=_HASHED)
    lengths, seeds, all_tables, are_own = columns
    own_rows = len(set(all_tables)) > 1 or (all(are_own) and sum(lengths) > max(lengths))
    if own_rows and not all(are_own):
        other = next(rank for rank, x in enumerate(all_tables) if x != all_tables[exchange.rank])
        text = (
            "ranks must pass the same whole table of lists, or each the rows of its own tokens "
            "with its first token's first_row; pass one row for each token of the rank's shard"
        )
        raise _mismatch(text, exchange.rank, other)
    compression, budget = call.compression, error_budget(call.compression)
    errors = [0.0] * len(FORMATS)  # stays 0 for formats that need no measurement
    if budget is not None or kind is Derivative.NONE:
        for i, name in enumerate(FORMATS):
            if budget is not None or name == compression:
                errors[i] = max(_error(x, name) for x in (call.key, call.value))
    if budget is not None:
        bits = torch.tensor(errors, dtype=torch.float64).view(torch.int64).tolist()
        worst = torch.tensor(exchange.agree(bits)).view(torch.float64).amax(0).tolist()
        formats = [
            (wire_format(name, call.query.dtype).row_bytes(64, 64), of_all, name)
            for name, of_all in zip(FORMATS, worst, strict=True)
            if of_all <= budget and wire_format(name, call.query.dtype).element != call.query.dtype
        ]
        compression = min(formats)[2] if formats else None  # fewest bytes, then least error
    error = 0.0 if compression is None else errors[FORMATS.index(compression)]
    return Agreement(
        lengths=list(lengths),
        compression=compression,
        error=error,
        seed=seeds[0],
        own_rows=own_rows,
    )


def agree_on_mesh(
    exchange: Exchange, shape: tuple[int, int], call: RingCall, pattern: Pattern
) -> tuple[list[int], int]:
    """Compares a call's arguments among all ranks of a mesh of two axes, before they exchange.

    Returns each rank's number of tokens, and the seed of rank 0.
    """
    fields = {"shape of the mesh": _digest(shape)}
    fields |= _fields(exchange.world_size, Derivative.NONE, call)
    tokens = call.query.shape[2]
    own = tokens, call.seed, int(may_be_own_rows(pattern, tokens))
    hidden = ("shape of the mesh", *_HASHED)
    columns = agree_on_batch(exchange, "ring_attention on a mesh", fields, own, hidden=hidden)
    lengths, seeds, are_own = columns
    if any(are_own) and sum(lengths) > max(lengths):
        text = (
            "on a mesh of heads and tokens, lists must be the whole table on every rank, got one "
            "with the rows of a rank's tokens; pass the table of all tokens, or a mesh of one axis"
        )
        raise _mismatch(text, exchange.rank, are_own.index(1))
    return list(lengths), seeds[0]


def _fields(world_size: int, kind: Derivative, call: RingCall) -> dict[str, int]:
    """Returns {name in errors: integer} of the arguments that must be equal on all ranks.

    They are arguments or digests of arguments.
    """
    query, key, value, *_ = call
    in_use = {name: x for name, x in call.options.in_use.items() if name != "dropout_seed"}
    tables = {name: x[:1] for name, x in in_use.items() if isinstance(x, Tensor)}
    numbers = [(name, x) for name, x in in_use.items() if name not in tables]
    options = (sorted(numbers), call.seed if call.seed_is_given else None, sorted(tables))
    # compare contents, except of a tensor with a row per query: each rank has its own rows
    equal = [x for n, x in sorted(tables.items()) if OPTIONS[n].by != "query" or x.shape[2] == 1]
    return {
        "version": _VERSION, _PASS: int(kind),
        "number of ranks": world_size, "batch size": len(query), "query heads": query.shape[1],
        "key/value heads": key.shape[1], "head dim": query.shape[3],
        "value head dim": value.shape[3], "dtype": DTYPES.index(query.dtype),
        "pattern": _digest(call.pattern, *call.tensors), "scale": _digest(call.scale),
        "sharding": _digest(call.sharding), "compression": _digest(call.compression),
        _TABLES: _digest(options, *equal), "wish for derivatives": int(call.differentiable),
    }  # fmt: skip


def _raise_difference(
    exchange: Exchange, fields: dict[str, int], hidden: tuple[str, ...]
) -> NoReturn:
    """Raises an error that names the first argument that differs.

    Values of `hidden` are left out.
    """
    names, *columns = zip(*exchange.agree([_digest(*fields), *fields.values()]), strict=True)
    if len(set(names)) > 1:
        other = next(rank for rank, x in enumerate(names) if x != names[exchange.rank])
        text = "ranks must pass the same arguments by name; pass equal arguments on every rank"
        raise _mismatch(text, exchange.rank, other)
    for name, values in zip(fields, columns, strict=True):
        if len(set(values)) > 1:
            other = next(rank for rank, v in enumerate(values) if v != values[0])
            got = "" if name in hidden else f": {values[0]} and {values[other]}"
            text = f"ranks must agree on the {name}, but rank 0 and rank {other} differ{got}"
            raise _mismatch(f"{text}; pass equal arguments on every rank", exchange.rank, other)
    raise AssertionError("the digests of two ranks differ, but no field does")


def _mismatch(text: str, rank: int, peer: int) -> RingMismatchError:
    return RingMismatchError(text, rank, peer, "agreement")


def report_failure(group: dist.ProcessGroup, timeout: float | None, query: object) -> None:
    """Tells the other ranks that this rank raised before its call began, so they raise, too."""
    device = query.device if isinstance(query, Tensor) else None
    with contextlib.suppress(RuntimeError):  # a RingError, or a CUDA graph is being captured
        agree_on_batch(Exchange(group, timeout, device), "", None)


def digests_of(values: dict[str, object]) -> dict[str, int]:
    """Returns an integer per value that ranks compare: equal values have equal digests."""
    return {name: _digest(value) for name, value in values.items()}


def agree_on_batch(
    exchange: Exchange,
    call: str,
    digests: dict[str, int] | None,
    numbers: Sequence[int] = (),
    hidden: tuple[str, ...] | None = None,
) -> list[tuple[int, ...]]:
    """Compares digests among ranks and returns all ranks' `numbers`; raises on all if they differ.

    Args:
        call: what this rank is in, such as "ring_attention"; a rank in another call is an error.
        digests: what must be equal, by name; None says that this rank raised before the call.
        numbers: what all ranks may know.
        hidden: names of digests that mean nothing to a reader; default all.
    """
    kind, digest = _digest(call), _digest(list((digests or {}).values()))
    records = exchange.agree([kind, digest, int(digests is None), *numbers])
    kinds, values, flags, *columns = zip(*records, strict=True)
    if any(flags):
        rank = flags.index(1)
        if digests is not None:
            what = "refused its batch" if hidden is None else "raised before the call began"
            text = f"rank {rank} {what}; its own error says why"
            raise _mismatch(text, exchange.rank, rank)
    elif len(set(kinds)) > 1:
        other = next(rank for rank, x in enumerate(kinds) if x != kind)
        text = (
            f"this rank is in {call}, and rank {other} in another call; all ranks must make the "
            "same calls in the same order, so a rank that meets an error between calls must tell "
            "the others"
        )
        raise _mismatch(text, exchange.rank, other)
    elif digests is not None and len(set(values)) > 1:
        _raise_difference(exchange, digests, tuple(digests) if hidden is None else hidden)
    return columns


def agree_to_begin(
    group: dist.ProcessGroup, call: str, like: Tensor | None = None, **equal: object
) -> None:
    """Waits until all ranks are in this call with equal arguments; else raises on all ranks.

    `like` is a tensor on the device of the messages, which groups without a CPU backend need.
    """
    exchange = Exchange(group, None, None if like is None else like.device)
    with exchange.break_on_error():
        agree_on_batch(exchange, call, digests_of(equal))


def agree_on_shards(
    exchange: Exchange, call: str, sharding: str, lengths: Sequence[int], common: dict[str, object]
) -> list[tuple[Ranges, ...]]:
    """Compares the shards' lengths among ranks; returns which ranges each rank owns, per length.

    `lengths` are this rank's shard lengths. Raises RingMismatchError on all ranks if shards do not
    fit.
    """
    digests = digests_of(common | {"sharding": sharding})
    with exchange.break_on_error():
        counts = agree_on_batch(exchange, call, digests, lengths)
    shards = [owned_ranges(sharding, sum(count), len(count)) for count in counts]
    for ranges, count in zip(shards, counts, strict=True):
        check_lengths(sharding, ranges, count, exchange.rank)
    return shards


def check_lengths(sharding: str, ranges: Sequence[Ranges], sizes: Sequence[int], rank: int) -> None:
    """Raises RingMismatchError unless each rank's shard is as long as the sharding says."""
    for peer, (length, owned) in enumerate(zip(sizes, ranges, strict=True)):
        if length != num_tokens(owned):
            text = (
                f"sharding {sharding!r} gives rank {peer} {num_tokens(owned)} of {sum(sizes)} "
                f"tokens, got {length}; cut the sequence with sparsering.distributed.shard"
            )
            raise _mismatch(text, rank, peer)


def error_budget(compression: str | None) -> float | None:
    """Returns the error bound of compression "auto" or "auto:BOUND"; None for other formats."""
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


def _error(x: Tensor, name: str) -> float:
    """Returns the relative RMS error of rounding `x` [B, H, n, D] to the wire format `name`."""
    form, square_error, square = wire_format(name, x.dtype), 0.0, 0.0
    for rows in x.detach().flatten(0, 1):  # one head at a time, to save memory
        decoded = form.decode(form.encode(rows, rows.shape[1]), rows.shape[1], 0)
        square_error += (decoded.double() - rows).square().sum().item()
        square += rows.double().square().sum().item()
    error = math.sqrt(square_error / square) if square != 0 else 0.0
    return error if math.isfinite(error) else math.inf


def _digest(*parts: object) -> int:
    state = hashlib.sha256()
    for part in parts:
        if isinstance(part, Tensor):
            state.update(repr((part.dtype, tuple(part.shape))).encode())
            state.update(part.nbytes.to_bytes(8, "little"))
            add_bytes(state, part)
        else:
            content = repr(part).encode()
            state.update(len(content).to_bytes(8, "little") + content)
    return int.from_bytes(state.digest()[:8], "little") >> 1  # 63 bits fit an int64
