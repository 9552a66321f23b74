"""The options of a call, besides `scale`, that change its scores or weights.

Each has a row in `OPTIONS`, at the end; operators, rings and caches derive their options from it.
They apply in this order: score_mod, softcap, biases, the pattern, softmax, sink, dropout.
"""

from collections.abc import Callable, Collection, Mapping
from numbers import Real
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..call import NO_OPTIONS, Options
from ..checks import DTYPES, check_local, check_tensor, in_memory
from ..ground.arguments import checked_integer, index_of, shortened
from ..ground.dropout import batch_seeds, checked_probability, checked_seed, drawn_seed
from ..ground.keywords import refuse_unknown, with_hints
from ..patterns.algebra import Pattern
from ..patterns.selected import selections_of
from ..patterns.tree import check_distances
from .score_function import checked_function


class Option(NamedTuple):
    """One option of a call: its type in operators, what it has a number for, and its check."""

    schema: str  # its type in an operator's schema; "" for an option that no operator takes
    # what the option has a number for: each call, head, query, key, pair, distance, block or slot
    by: str
    check: Callable[[Any, "_Given"], Any]  # converts the argument to a field of `Problem`
    learns: bool = False  # True if it gets a gradient


class _Given(NamedTuple):
    """A call's arguments that the checks of options need."""

    query: Tensor
    key: Tensor
    pattern: Pattern
    block_size: int | None
    options: Collection[str]  # names of the options in use


ELSEWHERE = {  # hints for option names of other libraries
    "attn_mask": "the pattern says which pairs attend; pass pattern=Dense(mask) for a bool mask, "
    "and distance_bias for a bias by distance",
    "mask": "the pattern says which pairs attend; pass pattern=Dense(mask) for a bool mask of "
    "pairs, or pattern & KeyMask(mask) for one of keys",
    "mask_mod": "the pattern says which pairs attend; pass pattern=from_mask_mod(mask_mod)",
    "block_mask": "the pattern says which pairs attend; pass pattern=from_mask_mod(mask_mod), or "
    "Blocks(active, 128) for whole blocks",
    "key_padding_mask": "keys that nobody sees are part of the pattern; pass pattern & "
    "KeyMask(valid), where True is a key that may be attended",
    "is_causal": "causality is a pattern; pass pattern=Causal(), or pattern & Causal()",
    "causal": "causality is a pattern; pass pattern=Causal(), or pattern & Causal()",
    "window_size": "a window is a pattern; pass pattern=SlidingWindow(left, right)",
    "score_mod": "a function of scores runs in attention alone; write softcap, distance_bias or "
    "sink where one of them says the same",
    "dropout": "its name is dropout_p; write dropout_p=",
    "enable_gqa": "key and value may have fewer heads than query as they are; leave it out",
}


def operator_schema(options: Collection[str], rest: str) -> str:
    """Returns an operator's argument list: query, key, value, pattern, options, then `rest`."""
    rows = [f"{OPTIONS[name].schema} {name}" for name in options]
    tensors = [row for row in rows if row.startswith("Tensor")]
    inputs = ["Tensor query, Tensor key, Tensor value", *tensors]
    call = ["Tensor[] tensors, str pattern, float scale", *(x for x in rows if x not in tensors)]
    return ", ".join([*inputs, *call, rest])


def refuse_options(
    verb: str, others: Collection[str], options: Collection[str], reasons: Mapping[str, str]
) -> None:
    """Raises an error with a hint if `others` has a name that is not among `options` of `verb`.

    `reasons` says, by name or by `Option.by`, why `verb` does not take another option of
    `attention`, and what to do (after a semicolon) if leaving it out would change the result; these
    raise ValueError. The hints of `ELSEWHERE` hold for every verb. An unknown name raises
    TypeError.
    """
    reasons = {**ELSEWHERE, **reasons}
    for name in others:
        if name in options:
            continue
        by = OPTIONS[name].by if name in OPTIONS else ""
        if by or name in reasons:
            why = reasons.get(name) or reasons.get(by) or f"it has a number for each {by}"
            way_out = "" if ";" in why else "; leave it out"
            raise ValueError(f"{verb} takes no {name}: {why}{way_out}")
        refuse_unknown(verb, name, [x for x in options if x not in others])


@with_hints()
def alibi(slopes: Tensor | int, radius: int) -> Tensor:
    """Returns the `distance_bias` of ALiBi: `-slope * abs(distance)`, for distances up to `radius`.

    Args:
        slopes: [H], one per query head; or H, for the slopes that the paper has for H heads.
        radius: R; larger distances count as R.

    Returns: [H, 2R + 1] float32, differentiable in the slopes.

    Raises: ValueError if slopes are not a floating point tensor [H], or the radius is negative.

    Example:
        >>> out = attention(query, key, value, Causal(), distance_bias=alibi(8, 4096))

    Source: ALiBi (arXiv 2108.12409), section 3.
    """
    table: Any = slopes
    if (heads := index_of(slopes)) is not None:
        power = 1 << checked_integer("slopes", heads, 1).bit_length() - 1
        places = [*range(2, 2 * power + 1, 2), *range(1, 2 * (heads - power), 2)]
        table = 2.0 ** (-4 / power * torch.tensor(places))
    check_tensor("slopes", table, "[heads]")
    if table.dim() != 1 or table.dtype not in DTYPES:
        raise ValueError(
            "slopes must be a floating point tensor [heads], got "
            f"{table.dtype} {tuple(table.shape)}; torch.tensor([...]) makes one"
        )
    radius = checked_integer("radius", radius, 0)
    distance = torch.arange(-radius, radius + 1, device=table.device).abs()
    return -table.float()[:, None] * distance


def checked_options(
    query: Tensor, key: Tensor, pattern: Pattern, block_size: int | None, /, **options: Any
) -> Options:
    """Checks options and expands them to full shapes; ValueError for a wrong shape or value."""
    p = options.pop("dropout_p", 0.0)
    in_use = {name: x for name, x in options.items() if x is not None}
    if type(p) is float and p == 0.0 and not in_use:
        return NO_OPTIONS
    call = _Given(query=query, key=key, pattern=pattern, block_size=block_size, options=in_use)
    checked = {name: OPTIONS[name].check(x, call) for name, x in in_use.items()}
    number = checked.pop("dropout_seed", None)
    if p := OPTIONS["dropout_p"].check(p, call):
        number = drawn_seed(query) if number is None else number
        batch, streams = len(query), pattern.num_streams  # one stream, or one per document
        seeds = batch_seeds(number, batch * streams, query.device)
        checked |= {"dropout_p": p, "dropout_seed": seeds.view(batch, streams)}
    return Options(checked)


def _checked_block_bias(bias: object, call: _Given) -> Tensor:
    """Checks a block bias and expands it to [B, Hq, num_blocks]."""
    if call.block_size is None:
        raise ValueError(
            "block_bias needs an explicit block_size: it has one number for each block of "
            "pattern.layout(block_size=...)"
        )
    bias = _checked_floats("block_bias", bias, call)
    batch, heads = call.query.shape[:2]
    if bias.dim() != 3 or bias.shape[0] not in (1, batch) or bias.shape[1] not in (1, heads):
        raise ValueError(
            f"block_bias must be [{batch} or 1, {heads} or 1, num_blocks], got "
            f"{tuple(bias.shape)}; see pattern.layout(...).num_blocks"
        )
    return bias.expand(batch, heads, -1)


def _checked_slots(bias: object, call: _Given) -> Tensor:
    """Checks a slot bias, which is shaped like selected indices; expands it to [B, Hq, R * k]."""
    if "block_bias" in call.options:
        raise ValueError(
            "expected block_bias or slot_bias, got both; pass slot_bias with SelectedBlocks, "
            "block_bias with other patterns"
        )
    selections = selections_of(call.pattern)
    if len(selections) != 1:
        raise ValueError(
            f"slot_bias needs a pattern with one SelectedBlocks, got {len(selections)} in "
            f"{shortened(str(call.pattern))}; pass block_bias with other patterns"
        )
    bias = _checked_floats("slot_bias", bias, call)
    (batch, heads), kv_heads = call.query.shape[:2], call.key.shape[1]
    rows, slots = selections[0].indices.shape[-2:]
    fits = bias.dim() == 4 and bias.shape[0] in (1, batch) and bias.shape[1] in (1, kv_heads, heads)
    if not fits or bias.shape[2:] != (rows, slots):
        raise ValueError(
            f"slot_bias must be [{batch} or 1, {heads} or {kv_heads} or 1, {rows}, {slots}], like "
            f"the indices, got {tuple(bias.shape)}; select_blocks gives indices of 4 dims"
        )
    each = bias.flatten(2)[:, :, None].expand(-1, -1, heads // max(1, bias.shape[1]), -1)
    return each.flatten(1, 2).expand(batch, -1, -1)


def _checked_softcap(softcap: object, call: _Given) -> float:
    """Returns the softcap as a float; ValueError unless it is from 2^-100 to 2^100."""
    if isinstance(softcap, torch.SymFloat):
        return float(softcap)
    number = isinstance(softcap, Real) and not isinstance(softcap, bool | Tensor)
    if not number or not 2.0**-100 <= softcap <= 2.0**100:  # type: ignore[operator]
        raise ValueError(
            "softcap must be a finite number above 0, from 2 ** -100 to 2 ** 100, or None, got "
            f"{shortened(repr(softcap))}; for example 50.0"
        )
    return float(softcap)  # type: ignore[arg-type]


def _checked_table(table: object, call: _Given) -> Tensor:
    """Checks a distance bias [Hq or 1, 2R + 1] and expands it to [B, Hq, 2R + 1]."""
    check_distances(call.pattern)
    heads = call.query.shape[1]
    table = _checked_floats("distance_bias", table, call)
    if table.dim() != 2 or table.shape[0] not in (1, heads) or table.shape[1] % 2 == 0:
        raise ValueError(
            f"distance_bias must be [{heads} or 1, 2R + 1], a number for each distance from -R to "
            f"R, got {tuple(table.shape)}; alibi(slopes, R) makes one"
        )
    return table.expand(len(call.query), heads, -1)


def _checked_sink(sink: object, call: _Given) -> Tensor:
    """Checks a sink and expands it to [B, Hq, Nq or 1], for batch entries and query heads."""
    batch, heads, tokens, _ = call.query.shape
    sink = _checked_floats("sink", sink, call)
    if sink.dim() == 1:
        sink = sink[None, :, None]
    fits = sink.dim() == 3 and sink.shape[0] in (1, batch) and sink.shape[1] == heads
    if not fits or sink.shape[2] not in (1, tokens):
        raise ValueError(
            f"sink must be [{heads}], a logit for each query head, or [{batch} or 1, {heads}, "
            f"{tokens} or 1], got {tuple(sink.shape)}; sink[..., None] adds a dim"
        )
    return sink.expand(batch, -1, -1)


def _checked_drawn(seed: object, call: _Given) -> Any:
    """Checks a dropout seed, and moves a tensor to the query's device."""
    number = checked_seed(seed)  # an int stays on the host: kernels take it as a scalar
    return number.to(call.query.device) if isinstance(seed, Tensor) else number


def _checked_floats(name: str, x: object, call: _Given) -> Tensor:
    """Checks that an option is a tensor of floats on the query's device; else ValueError.

    Returns the tensor; a lazy negation in it, which kernels would miss, is carried out.
    """
    check_tensor(name, x)
    assert isinstance(x, Tensor)
    check_local(name, x)
    if x.dtype not in DTYPES or x.device != call.query.device:
        raise ValueError(
            f"{name} must be floating point, of 16 bits or more, on {call.query.device}, got "
            f"{x.dtype} on {x.device}; cast or move it with .to()"
        )
    return in_memory(x)


OPTIONS = {
    "block_bias": Option("Tensor?", "block", _checked_block_bias, learns=True),
    "slot_bias": Option("Tensor?", "slot", _checked_slots, learns=True),
    "softcap": Option("float?", "call", _checked_softcap),
    "distance_bias": Option("Tensor?", "distance", _checked_table, learns=True),
    "sink": Option("Tensor?", "query", _checked_sink, learns=True),
    "dropout_p": Option("float?", "call", lambda p, call: checked_probability(p)),
    "dropout_seed": Option("Tensor?", "call", _checked_drawn),
    "score_mod": Option("", "pair", lambda f, call: checked_function(f, call.query, call.key)),
}
"""All options, by name, in the order of `attention`'s signature."""

IN_OPERATORS = [name for name, x in OPTIONS.items() if x.schema]
"""Names of the options that an operator takes: tensors and numbers, but no functions."""


def for_queries(options: Options, change: Callable[[Tensor], Tensor]) -> Options:
    """Applies `change` to options with a number per query, [B, H, Nq], such as a cut of queries."""
    rows = {n: x for n, x in options.in_use.items() if OPTIONS[n].by == "query" and x.shape[2] > 1}
    return options.changed(**{name: change(x) for name, x in rows.items()})


ANYWHERE = [name for name, x in OPTIONS.items() if x.by in ("call", "head", "query", "distance")]
"""Options that rings and caches take: they need neither all keys nor the whole layout."""
