"""Attention over documents of any lengths, laid end to end, without a batch dim or padding."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from .checks import check_pattern, check_tensor
from .functional import attention
from .ground.arguments import index_of, is_traced, listed, shortened
from .patterns.algebra import Pattern
from .patterns.positions import Full
from .patterns.varlen_mask import Varlen
from .route.options import ANYWHERE, refuse_options

_OPTIONS = ("scale", "block_size", *ANYWHERE, "return_lse", "backend")
_REFUSED = {  # why `attention_varlen` does not take other options of `attention`
    "q_start": "each document's last query is aligned with its last key",
    "block": "a caller cannot know the order of the documents' blocks; call attention for each",
    "slot": "a selection lists blocks for one sequence's rows; call attention for each document",
}


def attention_varlen(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_q: Tensor | Sequence[int],
    cu_k: Tensor | Sequence[int],
    pattern: Pattern = Full(),  # noqa: B008 - a frozen value
    **options: Any,
) -> Tensor | tuple[Tensor, Tensor]:
    """Computes exact softmax attention inside each of several documents that lie end to end.

    In every document the pattern's positions restart, and its last query is aligned with its last
    key: row r of nq queries with nk keys has position nk - nq + r. A document may have no queries,
    or no keys: then out = 0, lse = -inf and zero gradients.

    Args:
        query: [Tq, H, D], the queries of all documents, any strides.
        key: [Tk, Hkv, D], H a multiple of Hkv.
        value: [Tk, Hkv, Dv].
        cu_q, cu_k: [documents + 1] cumulative lengths, not decreasing, from 0 to Tq and Tk: int32
            or int64 tensors, or sequences of ints. Tensors on a GPU make the host wait. In compiled
            functions tensors are data; sequences of ints are constants.
        pattern: a mask or a mixture, applied to each document; it cannot contain `KeyPadding` or
            `KeyMask`, which differ between documents.
        options: as the options of `attention`, without `q_start`, `block_bias` and `slot_bias`. A
            sink is [H]; in `dropout_kept`, `batch` is the index of the document.

    Returns:
        out [Tq, H, Dv] in the query's dtype, and with `return_lse` lse [H, Tq] in float32 (float64
        for float64 inputs), through which gradients flow too.

    Raises:
        ValueError: shapes, lengths or dtypes differ. NotImplementedError: as `attention`.

    Cost: the sum of the documents' costs, in one call: tiles never cross documents. A layout is
    compiled for each new tuple of lengths, in milliseconds, and cached.

    Example:
        >>> out = attention_varlen(query, key, value, [0, 3, 8], [0, 5, 12], Causal())
    """
    refuse_options("attention_varlen", options, _OPTIONS, _REFUSED)
    check_pattern(pattern)
    for name, x in (("query", query), ("key", key), ("value", value)):
        check_tensor(name, x, "[tokens, heads, head dim]")
    if any(x.dim() != 3 for x in (query, key, value)):
        shapes = ", ".join(str(tuple(x.shape)) for x in (query, key, value))
        raise ValueError(
            f"query, key and value must be tensors [tokens, heads, head dim], got {shapes}; "
            "documents lie end to end, without a batch dim"
        )
    q_lengths = _lengths("cu_q", cu_q, query.shape[0], "queries")
    kv_lengths = _lengths("cu_k", cu_k, key.shape[0], "keys")
    if len(q_lengths) != len(kv_lengths):
        raise ValueError(
            f"cu_q and cu_k must have equally many documents, got {len(q_lengths)} and "
            f"{len(kv_lengths)}; a document without queries, or keys, has length 0"
        )
    packed: Pattern = Varlen(q_lengths, kv_lengths, pattern)  # type: ignore[arg-type]  # or mixture
    query, key, value = (x.transpose(0, 1)[None] for x in (query, key, value))
    results = attention(query, key, value, packed, q_start=0, **options)
    if isinstance(results, Tensor):
        return results[0].transpose(0, 1)
    out, lse = results
    return out[0].transpose(0, 1), lse[0]


def _lengths(name: str, cumulative: object, tokens: int, items: str) -> tuple[int, ...] | Tensor:
    """Converts cumulative lengths to lengths; raises ValueError if they are malformed.

    While a compiler traces, a tensor of cumulative lengths [documents + 1] gives a tensor of
    lengths [documents], which the operator checks when it runs. If the first number is not 0, all
    of them are -1, so that the operator refuses them.
    """
    way_out = "from lengths, compute torch.nn.functional.pad(lengths.cumsum(0), (1, 0))"
    if isinstance(cumulative, Tensor):
        check_tensor(name, cumulative, "[documents + 1] of integers")
        if cumulative.is_meta:
            raise ValueError(
                f"{name} must hold numbers, got a tensor on the meta device; pass a list of ints"
            )
        if cumulative.dtype not in (torch.int32, torch.int64) or cumulative.dim() != 1:
            raise ValueError(
                f"{name} must be an int32 or int64 tensor [documents + 1], got {cumulative.dtype} "
                f"{tuple(cumulative.shape)}; {way_out}"
            )
        if is_traced(cumulative):
            # a first number other than 0 gives lengths -1, which the operator refuses
            return torch.where(cumulative[:1] == 0, cumulative.long().diff(), -1)
    numbers = listed(name, cumulative)
    edges: list[Any] = [*map(index_of, numbers)] if isinstance(numbers, Sequence) else [None]
    if None in edges:
        got = shortened(repr(cumulative))
        raise ValueError(f"{name} must be a tensor or a sequence of ints, got {got}; {way_out}")
    lengths = tuple([last - first for first, last in pairwise(edges)])
    if not edges or edges[0] or edges[-1] != tokens or min(lengths, default=0) < 0:
        raise ValueError(
            f"{name} must hold cumulative lengths from 0, not decreasing, to the {tokens} {items}, "
            f"got {shortened(str(edges))}; {way_out}"
        )
    return lengths
