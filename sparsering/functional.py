"""The public functions: `attention`, and `explain`, which says what would run and why."""

from typing import Any, Literal, overload

from torch import Tensor

from .checks import (
    autocast_inputs,
    check_batch,
    check_inputs,
    check_integer_or_none,
    checked_scale,
    expanded_bias,
)
from .dispatch import BACKENDS, block_size_of, choose, is_default, reasons_against
from .ops import attend
from .patterns.algebra import Frame, Pattern, check_fits


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
    return_lse: Literal[True],
    backend: str | None = ...,
) -> tuple[Tensor, Tensor]: ...


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    pattern: Pattern,
    *,
    scale: float | None = None,
    q_start: int | None = None,
    block_size: int | None = None,
    block_bias: Tensor | None = None,
    return_lse: bool = False,
    backend: str | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Exact softmax attention over the pairs of a pattern, at the cost of the pattern.

    `out_q = sum_k m(q, k) e^{s_k} v_k / sum_k m(q, k) e^{s_k}`, `s_k = scale * q.k (+ bias)`, m
    the multiplicity of the pair. A query without keys has out = 0, lse = -inf and zero gradients.

    Args:
        query: [B, Hq, Nq, D], any strides.
        key: [B, Hkv, Nk, D], Hq a multiple of Hkv.
        value: [B, Hkv, Nk, Dv].
        pattern: a mask or a mixture.
        scale: of the scores, default D ** -0.5.
        q_start: position of the first query, default Nk - Nq (the last query is aligned with the
            last key).
        block_size: tokens to a tile, a multiple of 16 from 16 to 256; default the backend's choice.
        block_bias: [B or 1, H or 1, num_blocks], added to every score of a visited block, in the
            order of `layout.entries`; differentiable. Needs an explicit block_size.
        return_lse: also return the natural log of each row's softmax denominator.
        backend: a name from `backends()`, which then runs or raises; default the first that can
            run.

    Returns:
        out [B, Hq, Nq, Dv] in the query's dtype (the autocast dtype under autocast), and with
        `return_lse` lse [B, Hq, Nq] in float32 (float64 for float64 inputs), through which
        gradients flow too.

    Raises:
        ValueError: shapes, dtypes or pattern do not fit. NotImplementedError: the named backend
            cannot run, with reasons.

    Cost: O(pairs in visited blocks) time, O(N) memory beside a bounded workspace, forward and
    backward.

    Example:
        >>> out = attention(query, key, value, LongNet((2048, 4096), (1, 2)) & Causal())
    """
    inputs, call, options = checked_call(
        query,
        key,
        value,
        pattern,
        scale=scale,
        q_start=q_start,
        block_size=block_size,
        block_bias=block_bias,
    )
    chosen = choose(backend, inputs, options)
    out, lse = attend(chosen, *inputs, pattern, **call, options=options)
    return (out, lse) if return_lse else out


def checked_call(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    pattern: Pattern,
    *,
    scale: float | None = None,
    q_start: int | None = None,
    block_size: int | None = None,
    block_bias: Tensor | None = None,
) -> tuple[tuple[Tensor, Tensor, Tensor], dict[str, Any], dict[str, Any]]:
    """Query, key and value; what every backend computes; and the options that only some do."""
    check_inputs(query, key, value, pattern)
    scale = checked_scale(scale, query)
    check_integer_or_none("q_start", q_start)
    check_integer_or_none("block_size", block_size)
    query, key, value = autocast_inputs(query, key, value)
    call = {
        "scale": scale,
        "q_start": key.shape[2] - query.shape[2] if q_start is None else q_start,
        "block_size": block_size,
    }
    if block_bias is not None:
        block_bias = expanded_bias(block_bias, query, block_size)
    return (query, key, value), call, {"block_bias": block_bias}


def explain(query: Tensor, key: Tensor, value: Tensor, pattern: Pattern, **options: Any) -> str:
    """What `attention` would run on these inputs, then one line per backend.

    Args:
        query, key, value, pattern: as `attention`.
        options: those of `attention` that are about the scores: `scale`, `q_start`, `block_size`,
            `block_bias`.

    Returns: the backend, its block size and the shapes as they are read; then each backend's name
        with "usable", or the reasons why it cannot run; those that run only when named are marked.

    Raises: as `attention`, and where the pattern does not fit these lengths and heads. No layout is
        built.

    Example:
        >>> print(explain(query, key, value, Causal()))
        runs: cpu, blocks of 128; batch 1, 8 heads of 4096 queries, 4 heads of 4096 keys
        cpu: usable
        ...
    """
    inputs, call, only_some = checked_call(query, key, value, pattern, **options)
    (batch, heads, q_len, _), (_, kv_heads, kv_len, _) = query.shape, key.shape
    check_batch(pattern, query)
    check_fits(pattern, Frame(q_len, kv_len, heads, kv_heads, call["q_start"]))
    chosen = choose(None, inputs, only_some)
    size = call["block_size"] or block_size_of(chosen, pattern, inputs[0], kv_len)
    lines = [
        f"runs: {chosen}, blocks of {size}; batch {batch}, {heads} heads of {q_len} queries, "
        f"{kv_heads} heads of {kv_len} keys"
    ]
    for name in BACKENDS:
        told = "; ".join(reasons_against(name, inputs, only_some)) or "usable"
        lines.append(f"{name}: {told}" + (" (only when named)" * (not is_default(name))))
    return "\n".join(lines)
