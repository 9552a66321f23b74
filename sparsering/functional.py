"""The public functions: `attention`, and `explain`, which says what would run and why."""

from typing import Literal, overload

from torch import Tensor

from .checks import (
    autocast_inputs,
    check_inputs,
    check_integer_or_none,
    check_scale,
    default_scale,
    expanded_bias,
)
from .dispatch import BACKENDS, block_size_of, choose, is_default, reasons_against
from .ops import attend
from .patterns.algebra import Pattern


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
    check_inputs(query, key, value, pattern)
    check_scale(scale)
    check_integer_or_none("q_start", q_start)
    check_integer_or_none("block_size", block_size)
    query, key, value = autocast_inputs(query, key, value)
    if block_bias is not None:
        block_bias = expanded_bias(block_bias, query, block_size)
    extras = {"block_bias": block_bias}
    in_use = [name for name, given in extras.items() if given is not None]
    name = choose(backend, (query, key, value), in_use)
    out, lse = attend(
        name,
        pattern,
        query=query,
        key=key,
        value=value,
        scale=default_scale(query) if scale is None else float(scale),
        q_start=key.shape[2] - query.shape[2] if q_start is None else q_start,
        block_size=block_size,
        **extras,
    )
    return (out, lse) if return_lse else out


def explain(query: Tensor, key: Tensor, value: Tensor, pattern: Pattern) -> str:
    """What `attention` would run on these inputs, then one line per backend.

    A line has a backend's name first, then "usable", or the reasons why it cannot run; those that
    run only when named are marked.

    Example:
        >>> print(explain(query, key, value, Causal()))
        runs: cpu, blocks of 128
        cpu: usable
        ...
    """
    check_inputs(query, key, value, pattern)
    query, key, value = tensors = autocast_inputs(query, key, value)
    chosen = choose(None, tensors)
    lines = [f"runs: {chosen}, blocks of {block_size_of(chosen, pattern, query, key.shape[2])}"]
    for name in BACKENDS:
        told = "; ".join(reasons_against(name, tensors, ())) or "usable"
        lines.append(f"{name}: {told}" + (" (only when named)" * (not is_default(name))))
    return "\n".join(lines)
