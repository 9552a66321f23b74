"""Checks the extras of a call: the options, besides `scale`, that change its scores or weights.

Extras apply in this order: softcap, distance and block bias, the pattern, softmax, sink, dropout.
"""

from numbers import Real
from typing import Any

import torch
from torch import Tensor

from .checks import DTYPES, check_local, check_tensor, in_memory
from .dropout import batch_seeds, checked_probability, checked_seed, drawn_seed
from .patterns.algebra import Pattern
from .patterns.arguments import checked_integer, shortened
from .patterns.selected import selections_of
from .patterns.tree import check_distances

NAMES = ("block_bias", "softcap", "distance_bias", "sink", "dropout_p", "dropout_seed")
NO_EXTRAS: dict[str, Any] = dict.fromkeys(NAMES)
"""Extra fields of `Problem` for a call without extras: all are None."""


def alibi(slopes: Tensor, radius: int) -> Tensor:
    """Returns the `distance_bias` of ALiBi: `-slope * abs(distance)`, for distances up to `radius`.

    Args:
        slopes: [H], one per query head.
        radius: R; larger distances count as R.

    Returns: [H, 2R + 1] float32, differentiable in the slopes.

    Raises: ValueError if slopes are not a floating point tensor [H], or the radius is negative.

    Example:
        >>> slopes = 2.0 ** -torch.arange(1, 9)  # of 8 heads
        >>> out = attention(query, key, value, Causal(), distance_bias=alibi(slopes, 4096))

    Source: ALiBi (arXiv 2108.12409), section 3.
    """
    check_tensor("slopes", slopes, "[heads]")
    if slopes.dim() != 1 or slopes.dtype not in DTYPES:
        raise ValueError(
            "slopes must be a floating point tensor [heads], got "
            f"{slopes.dtype} {tuple(slopes.shape)}; torch.tensor([...]) makes one"
        )
    radius = checked_integer("radius", radius, 0)
    distance = torch.arange(-radius, radius + 1, device=slopes.device).abs()
    return -slopes.float()[:, None] * distance


def checked_extras(
    query: Tensor,
    pattern: Pattern,
    block_size: int | None,
    key: Tensor | None = None,
    /,
    **options: Any,
) -> dict[str, Any]:
    """Returns the extras of a call as fields of `Problem`, and `slot_bias` if it is in use.

    Unused fields are None. Distance bias and sink get a batch dim. `key` is needed for a slot_bias.

    Raises: ValueError for a wrong shape, dtype or number; TypeError for an unknown option.
    """
    names = NO_EXTRAS if key is None else (*NO_EXTRAS, "slot_bias")
    if unknown := options.keys() - set(names):
        raise TypeError(f"attention has no option {shortened(', '.join(sorted(unknown)))}")
    p = options.pop("dropout_p", 0.0)
    seed = options.pop("dropout_seed", None)
    in_use = {name: x for name, x in options.items() if x is not None}
    if type(p) is float and p == 0.0 and not in_use and seed is None:
        return NO_EXTRAS
    bias, slot_bias = in_use.pop("block_bias", None), in_use.pop("slot_bias", None)
    extras = dict(NO_EXTRAS)
    if slot_bias is not None and key is not None:
        extras["slot_bias"] = _checked_slots(slot_bias, query, key, pattern, bias)
    if "distance_bias" in in_use:
        check_distances(pattern)
    extras |= {name: _CHECKS[name](x, query) for name, x in in_use.items()}
    if bias is not None:
        extras["block_bias"] = _checked_block_bias(bias, query, block_size)
    number = None if seed is None else checked_seed(seed)
    if p := checked_probability(p):
        if number is None:
            number = drawn_seed(query)
        elif isinstance(seed, Tensor):  # an int stays on the host: kernels take it as a scalar
            number = number.to(query.device)
        batch, streams = len(query), pattern.num_streams  # one stream, or one per document
        extras["dropout_p"] = p
        seeds = batch_seeds(number, batch * streams, query.device)
        extras["dropout_seed"] = seeds.view(batch, streams)
    return extras


def _checked_block_bias(bias: object, query: Tensor, block_size: int | None) -> Tensor:
    """Checks a block bias [B or 1, H or 1, num_blocks]; expands it to [B, Hq, num_blocks]."""
    if block_size is None:
        raise ValueError(
            "block_bias needs an explicit block_size: it has one number for each block of "
            "pattern.layout(block_size=...)"
        )
    bias = _checked_floats("block_bias", bias, query)
    batch, heads = query.shape[:2]
    if bias.dim() != 3 or bias.shape[0] not in (1, batch) or bias.shape[1] not in (1, heads):
        raise ValueError(
            f"block_bias must be [{batch} or 1, {heads} or 1, num_blocks], got "
            f"{tuple(bias.shape)}; see pattern.layout(...).num_blocks"
        )
    return bias.expand(batch, heads, -1)


def _checked_slots(
    bias: object, query: Tensor, key: Tensor, pattern: Pattern, block_bias: object
) -> Tensor:
    """Checks a slot bias, shaped like a selection's indices; expands it to [B, Hq, R * k]."""
    if block_bias is not None:
        raise ValueError(
            "expected block_bias or slot_bias, got both; pass slot_bias with SelectedBlocks, "
            "block_bias with other patterns"
        )
    selections = selections_of(pattern)
    if len(selections) != 1:
        raise ValueError(
            f"slot_bias needs a pattern with one SelectedBlocks, got {len(selections)} in "
            f"{shortened(str(pattern))}; pass block_bias with other patterns"
        )
    bias = _checked_floats("slot_bias", bias, query)
    (batch, heads), kv_heads = query.shape[:2], key.shape[1]
    rows, slots = selections[0].indices.shape[-2:]
    fits = bias.dim() == 4 and bias.shape[0] in (1, batch) and bias.shape[1] in (1, kv_heads, heads)
    if not fits or bias.shape[2:] != (rows, slots):
        raise ValueError(
            f"slot_bias must be [{batch} or 1, {heads} or {kv_heads} or 1, {rows}, {slots}], like "
            f"the indices, got {tuple(bias.shape)}; select_blocks gives indices of 4 dims"
        )
    each = bias.flatten(2)[:, :, None].expand(-1, -1, heads // max(1, bias.shape[1]), -1)
    return each.flatten(1, 2).expand(batch, -1, -1)


def _checked_softcap(softcap: object, query: Tensor) -> float:
    if isinstance(softcap, torch.SymFloat):
        return float(softcap)
    number = isinstance(softcap, Real) and not isinstance(softcap, bool | Tensor)
    if not number or not 2.0**-100 <= softcap <= 2.0**100:  # type: ignore[operator]
        raise ValueError(
            "softcap must be a finite number above 0, from 2 ** -100 to 2 ** 100, or None, got "
            f"{shortened(repr(softcap))}; for example 50.0"
        )
    return float(softcap)  # type: ignore[arg-type]


def _checked_table(table: object, query: Tensor) -> Tensor:
    """Checks a distance bias [Hq or 1, 2R + 1]; expands it to [B, Hq, 2R + 1]."""
    heads = query.shape[1]
    table = _checked_floats("distance_bias", table, query)
    if table.dim() != 2 or table.shape[0] not in (1, heads) or table.shape[1] % 2 == 0:
        raise ValueError(
            f"distance_bias must be [{heads} or 1, 2R + 1], a number for each distance from -R to "
            f"R, got {tuple(table.shape)}; alibi(slopes, R) makes one"
        )
    return table.expand(len(query), heads, -1)


def _checked_sink(sink: object, query: Tensor) -> Tensor:
    """Checks a sink; expands it to every batch entry and query head, [B, Hq, Nq or 1]."""
    batch, heads, tokens, _ = query.shape
    sink = _checked_floats("sink", sink, query)
    if sink.dim() == 1:
        sink = sink[None, :, None]
    fits = sink.dim() == 3 and sink.shape[0] in (1, batch) and sink.shape[1] == heads
    if not fits or sink.shape[2] not in (1, tokens):
        raise ValueError(
            f"sink must be [{heads}], a logit for each query head, or [{batch} or 1, {heads}, "
            f"{tokens} or 1], got {tuple(sink.shape)}; sink[..., None] adds a dim"
        )
    return sink.expand(batch, -1, -1)


def _checked_floats(name: str, x: object, query: Tensor) -> Tensor:
    check_tensor(name, x)
    assert isinstance(x, Tensor)
    check_local(name, x)
    if x.dtype not in DTYPES or x.device != query.device:
        raise ValueError(
            f"{name} must be floating point, of 16 bits or more, on {query.device}, got {x.dtype} "
            f"on {x.device}; cast or move it with .to()"
        )
    return in_memory(x)


_CHECKS = {"softcap": _checked_softcap, "distance_bias": _checked_table, "sink": _checked_sink}
