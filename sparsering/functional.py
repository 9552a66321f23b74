"""Public functions: `attention`, and `explain`, which says what would run and why."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal, overload

import torch
from torch import Tensor

from .checks import check_batch
from .ground.arguments import checked_flag
from .ground.keywords import with_hints
from .kernels.backends import (
    BACKENDS,
    NAMES,
    block_size_of,
    choose,
    form_for_mode,
    is_default,
    mode,
    reasons_against,
)
from .kernels.problem import ScoreMod
from .patterns.algebra import Pattern, check_fits, parts_in
from .patterns.selected import SelectedBlocks, has_lists, selections_of
from .route.decision import checked_call, decided
from .route.options import OPTIONS, refuse_options
from .route.run import attend

_EXPLAINED = ("scale", "q_start", "block_size", *OPTIONS)
_OPTIONS = (*_EXPLAINED, "return_lse", "backend")
_NOT_EXPLAINED = {  # why `explain` does not take other options of `attention`
    "return_lse": "it attends to nothing, so there is no lse",
    "backend": "it says of every backend whether it can run",
}
_IN_A_GRAPH = "attention with a score_mod cannot run inside a compiled function; call it outside"


@overload
def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    pattern: Pattern,
    *,
    scale: float | None = ...,
    q_start: int | None = ...,
    block_size: int | None = ...,
    block_bias: Tensor | None = ...,
    slot_bias: Tensor | None = ...,
    softcap: float | None = ...,
    distance_bias: Tensor | None = ...,
    sink: Tensor | None = ...,
    dropout_p: float = ...,
    dropout_seed: int | Tensor | None = ...,
    score_mod: ScoreMod | None = ...,
    return_lse: Literal[False] = ...,
    backend: str | None = ...,
) -> Tensor: ...


@overload
def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    pattern: Pattern,
    *,
    scale: float | None = ...,
    q_start: int | None = ...,
    block_size: int | None = ...,
    block_bias: Tensor | None = ...,
    slot_bias: Tensor | None = ...,
    softcap: float | None = ...,
    distance_bias: Tensor | None = ...,
    sink: Tensor | None = ...,
    dropout_p: float = ...,
    dropout_seed: int | Tensor | None = ...,
    score_mod: ScoreMod | None = ...,
    return_lse: Literal[True],
    backend: str | None = ...,
) -> tuple[Tensor, Tensor]: ...


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    pattern: Pattern = None,  # type: ignore[assignment]  # so that options of others are named
    *,
    scale: float | None = None,
    q_start: int | None = None,
    block_size: int | None = None,
    block_bias: Tensor | None = None,
    slot_bias: Tensor | None = None,
    softcap: float | None = None,
    distance_bias: Tensor | None = None,
    sink: Tensor | None = None,
    dropout_p: float = 0.0,
    dropout_seed: int | Tensor | None = None,
    score_mod: ScoreMod | None = None,
    return_lse: bool = False,
    backend: str | None = None,
    **unknown: Any,
) -> Tensor | tuple[Tensor, Tensor]:
    """Computes exact softmax attention over the pairs of a pattern, at the cost of the pattern.

    `out_q = sum_k m(q, k) e^{s_k} v_k / sum_k m(q, k) e^{s_k}`, `s_k = scale * q.k`, m(q, k) the
    number of branches with the pair. Without keys, a query has out 0, lse -inf, zero gradients.
    Options apply in this order: `s = scale * q.k`; score_mod; softcap; + distance_bias + block_bias
    + slot_bias; the pattern; softmax; sink; dropout. A score of -inf removes its pair. A score of
    +inf or NaN makes out and lse of its row NaN, as a softmax does.

    Args:
        query: [B, Hq, Nq, D], any strides.
        key: [B, Hkv, Nk, D], Hq a multiple of Hkv.
        value: [B, Hkv, Nk, Dv].
        pattern: a mask or a mixture; it has no default.
        scale: factor of the scores, default D ** -0.5.
        q_start: position of the first query, default Nk - Nq: the last query is at the last key.
        block_size: tokens per tile, a multiple of 16 from 16 to 256; default as measured by
            `sparsering tune`, or else chosen by the pattern's density, as in `pattern.layout()`.
        block_bias: [B or 1, H or 1, num_blocks], added to every score of a visited block, in the
            order of `layout.entries`; differentiable. -inf removes a block; +inf and NaN make its
            rows NaN. Needs an explicit block_size.
        slot_bias: for a pattern with one `SelectedBlocks`, shaped like its indices, [B or 1, Hkv or
            Hq or 1, R, k]: R rows of k slots. Each number is added to every score of its row with
            the block in its slot. If several slots of a row list one block, the first one counts.
            Differentiable; the gradient is 0 for slots that list no block.
        softcap: a number above 0: `s = softcap * tanh(s / softcap)`, as Gemma 2 caps its logits.
        distance_bias: [Hq or 1, 2R + 1]; the number at index `R + clamp(k - p, -R, R)` is added to
            the score of query position p and key position k; differentiable. See `alibi`.
        sink: [Hq], or [B or 1, Hq, Nq or 1], the logit of one more key whose value is zero:
            `out * sigmoid(lse - sink)`, `lse = logaddexp(lse, sink)`; -inf: none; differentiable.
        dropout_p: share of the weights that is dropped, 0 <= p < 1; the other weights are divided
            by 1 - p, lse is unchanged. Every backend, block size and number of threads and ranks
            drops the same weights; `dropout_kept` returns which.
        dropout_seed: int or int64 tensor without dims; default drawn from torch's generator.
        score_mod: a function of (score, batch, head, q_idx, kv_idx) that returns the changed score,
            as in FlexAttention; `coordinate_bias` makes one. Indices count from 0 for any q_start.
            It is evaluated on visited tiles, under torch.vmap, by the backends gather and
            reference alone; gradients reach the tensors that it reads. Options above are faster,
            and so is `coordinate_bias`, which kernels compute without a call.
        return_lse: also return the natural log of each row's softmax denominator.
        backend: a name from `backends()`, which then runs or raises; default the first that can.

    Returns:
        out [B, Hq, Nq, Dv] in the query's dtype (the autocast dtype under autocast), and with
        `return_lse` lse [B, Hq, Nq] in float32 (float64 for float64 inputs), also differentiable.

    Raises:
        ValueError: shapes or dtypes differ, or the pattern is for other lengths or heads.
        NotImplementedError: the named backend cannot run; the message has the reasons.

    Cost, also of backward: O(pairs in visited blocks) time, O(N) memory and a bounded workspace.

    Example:
        >>> out = attention(query, key, value, LongNet((2048, 4096), (1, 2)) & Causal())
    """
    if unknown:
        refuse_options("attention", unknown, _OPTIONS, {})
    return_lse = checked_flag("return_lse", return_lse)
    options: dict[str, Any] = {
        "block_bias": block_bias,
        "slot_bias": slot_bias,
        "softcap": softcap,
        "distance_bias": distance_bias,
        "sink": sink,
        "dropout_seed": dropout_seed,
        "score_mod": score_mod,
    }
    if score_mod is not None and torch.compiler.is_compiling():
        torch._dynamo.graph_break(msg=_IN_A_GRAPH)
    used = not (type(dropout_p) is float and dropout_p == 0.0)
    for x in options.values():  # a generator would be eight calls
        used = used or x is not None
    options = {**options, "dropout_p": dropout_p} if used else {}
    choices = backend, scale, q_start, block_size
    call, decision = decided((query, key, value), pattern, choices, options)
    if return_lse and not BACKENDS[decision.backend].returns_lse:
        raise NotImplementedError(
            f"{decision.backend}: it has no lse; leave out return_lse, or leave out backend="
        )
    out, lse = attend(call, decision)
    return (out, lse) if return_lse else out


def explain(query: Tensor, key: Tensor, value: Tensor, pattern: Pattern, **options: Any) -> str:
    """Explains which backend `attention` would run on these inputs, and why others cannot run.

    Args:
        query, key, value, pattern: as `attention`.
        options: the options of `attention`, without `return_lse` and `backend`.

    Returns: lines of text. The first has the backend, its block size, and the batch, heads and
        lengths. A line says why a row's bits may depend on its company, if they may. A line per
        `SelectedBlocks` has the size of its rows, and how many times as many blocks a tile of
        queries reads as a row lists; another counts the slots that name keys which do not exist. A
        line per backend: "usable" or why not.

    Raises: as `attention`. No layout is built, but for a `flash` or `cudnn` that could run whole
        blocks; a `cudnn` that could run declared masks lists the pattern's intervals of keys.

    Example:
        >>> print(explain(query, key, value, Causal()))
        runs: cpu, blocks of 128; batch 1, 8 heads of 4096 queries, 4 heads of 4096 keys
        bits: those of a row may depend on what else the call computes: cpu sums in an order ...
        cpu: usable
        ...
    """
    refuse_options("explain", options, _EXPLAINED, _NOT_EXPLAINED)
    options = {"dropout_seed": 0, **options}  # a default seed would advance torch's generator
    call = checked_call((query, key, value), pattern, **options)
    (batch, heads, q_len, _), (_, kv_heads, kv_len, _) = query.shape, key.shape
    check_batch(pattern, batch)
    check_fits(pattern, frame := call.frame)
    backend = choose(None, call.inputs, call.options.names, pattern)
    form = form_for_mode(backend)
    size = call.block_size or block_size_of(form, pattern, call.query, frame)
    lists = " and lists of keys" * (has_lists(pattern) and BACKENDS[backend].runs_lists)
    sizes = f"batch {batch}, {heads} heads of {q_len} queries, {kv_heads} heads of {kv_len} keys"
    lines = [f"runs: {backend}, blocks of {size}{lists}; {sizes}"]
    for selection in selections_of(pattern):
        tokens, blocks = selection.row_size, round(selection.mean_slots, 2)
        more = float(selection.inflation(size, kv_len).mean())
        line = (
            f"selection: each row of {tokens} queries lists {blocks} blocks of "
            f"{selection.block_size}; a tile of {size} queries {more:.3g} times as many"
        )
        later = "; the choice for a query may depend on later queries of its row"
        lines.append(line + later * (tokens > 1))
    for part, inner in parts_in(pattern, frame):
        if isinstance(part, SelectedBlocks) and (found := part.listed_outside(inner)):
            told = f"selection: lists take {part.numbers(inner)}: got {found}; that adds nothing"
            lines += [told] * (told not in lines)
    if why := _not_invariant(form):
        lines.append(f"bits: those of a row may depend on what else the call computes: {why}")
    for name in NAMES:
        reasons = reasons_against(name, call.inputs, call.options.names, pattern)
        if not reasons and (refuses := BACKENDS[name].refuses) is not None:
            reasons = refuses(call)
        state = "; ".join(reasons) or "usable"
        lines.append(f"{name}: {state}" + " (only when named)" * (not is_default(name)))
    return "\n".join(lines)


def _not_invariant(backend: str) -> str:
    """Returns why the bits of a row may depend on what else a backend computes; "" if they do not.

    docs/invariance.md explains when they do.
    """
    if BACKENDS[backend].is_invariant:
        return ""
    able = any(x.form_of == backend for x in BACKENDS.values())
    mended = ", unless batch_invariant() asks for one that does not" * able
    return f"{backend} sums in an order that depends on shapes{mended}"


@with_hints()
@contextmanager
def batch_invariant(enabled: bool = True) -> Iterator[None]:
    """Makes the bits of a row independent of what else is computed.

    The bits of a row's `out`, `lse` and gradient of the query are then a function of its query and
    position, of the keys and values that it sees and their positions, and of the options. They do
    not depend on the batch, on how many queries come at once, on documents beside its own, or on
    padding before it. "cpu" and "triton" have another form of their kernels for it; that of "cpu"
    takes a tenth to a fifth longer. docs/invariance.md has all that is promised, what is not, and
    the price; `explain` names what a call cannot keep. A backward has the mode of its forward, each
    thread has its own mode, and `torch.compile` guards on it.

    Args:
        enabled: False for code that may lose the promise again.

    Returns: a context manager, which is a decorator, too; contexts nest.

    Example:
        >>> with sr.batch_invariant():
        ...     out = sr.attention(query, key, value, Causal())
    """
    enabled, before = checked_flag("enabled", enabled), mode.is_batch_invariant
    mode.is_batch_invariant = enabled
    try:
        yield
    finally:
        mode.is_batch_invariant = before
