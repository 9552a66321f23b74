"""Attention over a layer's pattern from `apply`, within the model's mask.

The mask contributes causality, padding and documents. Positions count from each row's first token
after the padding and restart in each document: a text has the same result alone, padded or packed.
"""

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from ....distributed.ring import ring_attention
from ....functional import attention
from ....ground.arguments import is_shape_alone, shortened
from ....ground.numerics import merge_attention
from ....ground.once import unseen
from ....patterns.algebra import Pattern, parts_of
from ....patterns.blocks import RandomBlocks
from ....patterns.keys import KeyMask
from ....patterns.positions import Causal, Full
from ....patterns.shifts import is_shift_invariant
from ..families import QUERIES_BY_INDEX
from ..model.config import pattern_of
from .calls import SharedCall
from .chosen import Chosen
from .masks import Inputs, InRuns, ModelMask, Options, SameRun, several_runs
from .once import once
from .seen import remember_tokens


def attend_pattern(
    pattern: Pattern, inputs: Inputs, mask: ModelMask, q_start: int, extras: Options
) -> Tensor:
    """Attends over a pattern of `apply`, within the mask's causality, padding and documents."""
    query, key, _ = inputs
    kind, kv_len = mask.kind, key.shape[2]
    assert kind is not None
    in_steps = q_start + mask.kv_start > 0
    if mask.cache is not None and pattern not in (Full(), Causal()):
        once(mask, "kept", lambda: _check_kept(pattern, mask, q_start + mask.kv_start))
    if in_steps and any(isinstance(part, RandomBlocks) for part in parts_of(pattern)):
        raise ValueError(
            "decoding with a cache needs a pattern that does not depend on the length, got "
            f"{shortened(str(pattern))}, whose blocks are drawn for a whole sequence; call the "
            "model with use_cache=False"
        )
    if kind.causal:
        pattern = looking_back(pattern)
    elif not torch.compiler.is_compiling() and query.shape[2] != kv_len:
        raise NotImplementedError(
            "a layer with a pattern must be self-attention, got keys of another sequence "
            f"({query.shape[2]} queries, {kv_len} keys); call apply(model, "
            "{layer: pattern, ...}) without this layer"
        )
    if mask.kv_start > 0:
        _check_dropped(pattern, mask.kv_start, q_start, query.shape[1], key.shape[1])
    if (
        query.shape[2] == 1
        and mask.documents is None
        and not is_shift_invariant(pattern)
        and not torch.compiler.is_compiling()
        and (ids := _row_runs(mask, kv_len)) is not None
    ):
        return _attend_rows(pattern, inputs, mask, ids, q_start, extras)
    return attention(*inputs, within(pattern, mask, kv_len), q_start=q_start, **extras)


def within(pattern: Pattern, mask: ModelMask, kv_len: int) -> Pattern:
    """Returns a layer's pattern, restricted to the documents and padding of the model's mask."""
    assert mask.kind is not None
    if mask.kind.has_chunks:
        raise NotImplementedError(
            "a pattern cannot replace a layer's chunks inside torch.compile, where they look like "
            "documents; leave layers with chunks out of apply"
        )
    if is_shift_invariant(pattern):
        if mask.documents is not None:
            pattern = pattern & SameRun(mask.documents)
    elif (ids := _row_runs(mask, kv_len)) is not None:
        pattern = InRuns(ids, pattern)  # type: ignore[arg-type]  # accepts a Mixture
    return _without_padding(pattern, _valid(mask, kv_len))


def looking_back(pattern: Pattern) -> Pattern:
    """Returns `pattern & Causal()`, built once for all layers and steps."""
    compiling = torch.compiler.is_compiling()  # torch.compile warns of lru_cache
    return pattern & Causal() if compiling else _looking_back(pattern)


_looking_back = lru_cache(256)(lambda pattern: pattern & Causal())


def _without_padding(pattern: Pattern, valid: Tensor | None) -> Pattern:
    return pattern if valid is None else pattern & KeyMask(valid)


def _valid(mask: ModelMask, kv_len: int) -> Tensor | None:
    return once(mask, ("valid", kv_len), lambda: mask.valid(kv_len))


def _row_runs(mask: ModelMask, kv_len: int) -> Tensor | None:
    """Numbers runs [B or 1, Nk]: left padding is one, and each document; None for a single run.

    It is None if there is only one run.
    """

    def runs() -> Tensor | None:
        ids = [] if mask.documents is None else [mask.documents[:, :kv_len]]
        if mask.valid_keys is not None:
            valid = mask.valid_keys[:, mask.kv_start : mask.kv_start + kv_len]
            ids.append((valid.cumsum(1) > 0).long())  # 0 in left padding, 1 after
        return several_runs(*ids)

    return once(mask, ("rows", kv_len), runs)


def _attend_rows(
    pattern: Pattern, inputs: Inputs, mask: ModelMask, ids: Tensor, q_start: int, extras: Options
) -> Tensor:
    """Attends from one query per row; rows with equal left padding share a call.

    `ids` [B or 1, Nk] are the run indices of `_row_runs`. Each call leaves the padding out, so its
    layout is that of a shorter row without padding, which may be cached.
    """
    (query, key, value), valid = inputs, _valid(mask, ids.shape[1])
    begins = (ids == ids[:, :1]).sum(1) * (ids[:, -1] > ids[:, 0])
    outs = query.new_empty(*query.shape[:3], value.shape[3])
    for begin in begins.unique().tolist():
        rows = (begins == begin).nonzero()[:, 0]
        first, last = int(rows[0]), int(rows[-1])
        part = slice(first, last + 1) if last - first == len(rows) - 1 else rows  # slice: no copy
        group = query[part], key[part][:, :, begin:], value[part][:, :, begin:]
        rows_pattern = _without_padding(pattern, None if valid is None else valid[part][:, begin:])
        out = attention(*group, rows_pattern, q_start=q_start - begin, **extras)
        outs[part] = out.to(outs.dtype)
    return outs


def _check_dropped(
    pattern: Pattern, dropped: int, q_start: int, num_heads: int, num_kv_heads: int
) -> None:
    """Raises ValueError if the cache no longer has keys that the pattern needs."""
    heads = {"num_heads": num_heads, "num_kv_heads": num_kv_heads}
    with unseen(pattern):
        needed = [keys for keys in pattern.live_keys(q_start + dropped, **heads) if len(keys)]
        first = min((int(keys[0]) for keys in needed), default=dropped)
    if first < dropped or not is_shift_invariant(pattern):
        raise ValueError(
            f"the cache has dropped the first {dropped} keys, which lie outside the model's own "
            f"window; {shortened(str(pattern))} needs keys from {first} on and positions from 0; "
            "pass past_key_values=SparseCache(model)"
        )


def _check_kept(pattern: Pattern, mask: ModelMask, held: int) -> None:
    """Raises NotImplementedError if keys were dropped by hand from a cache of `held` keys.

    If the cache holds what the last call left there, nothing else is looked at. Otherwise the
    positions of the new tokens decide; reading them waits for the device, but only in this call.
    """
    assert mask.cache is not None
    count = held + mask.shape[2]
    if held not in (0, mask.seen):
        tokens = _tokens_by_positions(mask, count)
        if tokens is None:  # positions say nothing
            tokens = count if mask.seen is None else max(count, mask.seen + mask.shape[2])
        if tokens > count:
            raise NotImplementedError(
                f"the cache holds {held} keys of {tokens - mask.shape[2]} tokens, so keys were "
                f"dropped, and {shortened(str(pattern))} would take the kept ones for neighbors; "
                "use past_key_values=SparseCache(model), which drops what the pattern cannot see, "
                "or give the prompt alone the pattern, by hf.using; if only the last tokens were "
                "removed, do so by cache.crop, or pass position_ids that go on behind the others"
            )
    remember_tokens(mask.cache, count)


def _tokens_by_positions(mask: ModelMask, count: int) -> int | None:
    """Returns how many tokens the call's position_ids say there are, with the new ones.

    It is `count` if each row's last position agrees with `count` keys, less padding or not. It is
    None if the ids show nothing: there are none, or images and documents have numbered them anew.
    """
    ids = mask.position_ids
    if ids is not None and ids.dim() == 3 and len(ids) == 4:
        ids = ids[0]
    if ids is None or ids.dim() != 2 or ids.shape[1] != mask.shape[2] or is_shape_alone(ids):
        return None
    tokens = [1 + position for position in ids[:, -1].tolist()]
    valid = [count] * len(tokens)
    if mask.valid_keys is not None and len(mask.valid_keys) == len(tokens):
        valid = mask.valid_keys[:, :count].sum(1).tolist()
    if all(x in (count, y) for x, y in zip(tokens, valid, strict=True)):
        return count
    return max(tokens) if max(tokens) > count else None


def attend_shared(
    module: Any,
    inputs: Inputs,
    mask: ModelMask | Chosen | Tensor,
    used: Pattern | None,
    shared: SharedCall,
    extras: Options,
) -> Tensor:
    """Attends from this rank's tokens over the whole batch's mask, or a pattern of `using`.

    Returns: [B, Hq, n, Dv]; rows behind those of the rank's own tokens are 0.
    """
    if used is None:
        used = _whole_pattern(module, mask)
    out = _over_ranks(module, inputs, used, shared, extras)
    assert isinstance(out, Tensor)
    return _with_rows(out, inputs[0].shape[2])


def _over_ranks(
    module: Any, inputs: Inputs, pattern: Pattern, shared: SharedCall, options: Options
) -> Tensor | tuple[Tensor, Tensor]:
    """Runs ring attention for the tokens that this rank owns, and returns its result for them."""
    query, key, value = (x[:, :, : shared.num_tokens] for x in inputs)
    for at_whole_positions in QUERIES_BY_INDEX:
        query = at_whole_positions(module, query, lambda: shared.tokens)
    if not torch.compiler.is_compiling():
        sizes = query.shape[1], key.shape[1], key.shape[3], value.shape[3]
        shared.shapes[getattr(module, "layer_idx", len(shared.shapes))] = (*sizes, query.dtype)
    return ring_attention(
        query, key, value, pattern, group=shared.place, sharding=shared.sharding, **options
    )


def _with_rows(out: Tensor, rows: int) -> Tensor:
    """Pads [B, Hq, n, Dv] with rows of 0 to `rows` rows, as the model expects."""
    missing = rows - out.shape[2]
    return torch.nn.functional.pad(out, (0, 0, 0, missing)) if missing else out


def _attend_entries_shared(
    module: Any,
    inputs: Inputs,
    mask: ModelMask | Chosen,
    chosen: Chosen,
    shared: SharedCall,
    extras: Options,
) -> Tensor:
    """Attends over ranks' tokens, and apart over compressed entries; merges both by lse."""
    if extras["dropout_p"]:
        raise NotImplementedError(
            "a model of compressed entries that ranks share has no dropout of attention, got "
            f"dropout {extras['dropout_p']}; set config.attention_dropout=0.0"
        )
    rows = inputs[0].shape[2]  # of tokens; entries are behind
    query, key, value = (x[:, :, :rows] for x in inputs)
    pattern, options = _whole_pattern(module, mask), {**extras, "return_lse": True}
    of_tokens = _over_ranks(module, (query, key, value), pattern, shared, options)
    options["sink"] = None  # it counts once, in the part of the tokens
    own, listed = query[:, :, : shared.num_tokens], chosen.of_rank(shared)
    key, value = (x[:, :, rows:] for x in inputs[1:])  # of the entries
    of_entries: Any = attention(own, key, value, listed, q_start=0, **options)
    outs, lses = zip(of_tokens, of_entries, strict=True)
    return _with_rows(merge_attention(outs, lses)[0], rows)


def attend_lists_shared(
    module: Any,
    inputs: Inputs,
    mask: ModelMask | Chosen,
    chosen: Chosen,
    shared: SharedCall,
    extras: Options,
) -> Tensor:
    """Attends from this rank's tokens to the keys that they list, within the batch's mask.

    Listed entries are whole on each rank, behind the keys of its tokens.
    """
    if chosen.entries:
        return _attend_entries_shared(module, inputs, mask, chosen, shared, extras)
    pattern: Pattern = chosen.of_rank(shared)
    if isinstance(mask, ModelMask):
        pattern = pattern & _whole_pattern(module, mask)
    return attend_shared(module, inputs, mask, pattern, shared, extras)


def _whole_pattern(module: Any, mask: ModelMask | Chosen | Tensor) -> Pattern:
    """Returns a layer's pattern for the whole batch of all ranks: from `apply`, or the mask."""
    if not isinstance(mask, ModelMask) or mask.kind is None:
        got = "a function of the model's own" if isinstance(mask, ModelMask) else "one of all pairs"
        raise NotImplementedError(
            "a model that ranks share needs masks of causality, windows, chunks, documents and "
            f"padding, got {got}; run it with hf.parallelize(model, False), or write the mask as "
            "a pattern for hf.using"
        )
    length, pattern = mask.shape[3], pattern_of(module, mask)
    if pattern is None:
        return once(mask, ("own", length), lambda: mask.pattern(0, length))
    if mask.kind.causal:
        pattern = looking_back(pattern)
    return within(pattern, mask, length)
