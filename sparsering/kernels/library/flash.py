"""Adapter to FlashAttention-3 and FlashAttention-4, where they are installed.

FlashAttention-3 is the package `flash_attn_interface` (Hopper), FlashAttention-4 is
`flash_attn.cute` (Hopper and Blackwell). A band (full, causal, a window) runs as one dense call of
the package, or in adjacent documents as one varlen call; on Hopper FlashAttention-3 is preferred.
Patterns of whole blocks run by FlashAttention-4's block sparsity. The packages compute their own
gradients.
"""

from collections.abc import Callable, Sequence
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from ...call import Call
from ...ground.arguments import per_entry
from ...layouts.cache import layout_cache
from ...patterns.algebra import And, Frame, Pattern
from ...patterns.positions import Causal, Documents, Full, Packed, SlidingWindow
from ...patterns.varlen_mask import Varlen
from .blocks import listed, whole_blocks, without_rows
from .derivatives import (
    with_first_derivatives,
    with_positive_scale,
    without_gradient,
    without_keys,
)
from .on_gpu import capability_of, faults_on_gpu

EXTRAS: frozenset[str] = frozenset()
"""Options of a call, other than its scale, that this backend computes."""

_BLOCK = 128  # tokens in the tiles of FlashAttention-4's forward and backward on Hopper
_HOPPER = 9  # the major number of a compute capability; 10 and 11 are Blackwell


def reasons(*tensors: Tensor) -> list[str]:
    """Returns why no FlashAttention can run on these tensors or on this machine; [] if one can."""
    faults, packages = [], _installed()
    if not packages:
        faults.append(
            "neither FlashAttention-4 (package flash-attn-4) nor FlashAttention-3 "
            "(flash_attn_interface, from the folder hopper of its repository) is installed"
        )

    def fault_of(device: torch.device) -> str:
        major, minor = capability_of(device)
        if not _HOPPER <= major <= 11:
            return (
                "it needs a GPU of compute capability 9 (Hopper), or 10 or 11 (Blackwell), "
                f"got {major}.{minor}"
            )
        if major > _HOPPER and packages == (3,):
            return "FlashAttention-3 is for Hopper; Blackwell needs the package flash-attn-4"
        return ""

    faults += faults_on_gpu(tensors, fault_of)
    if tensors and (fault := _head_dim_fault(*tensors)):
        faults.append(fault)
    return faults


# torch.compile breaks its graph at the next two functions, because FlashAttention-4 compiles its
# kernels in Python. `torch.compiler.disable` would import torch._dynamo together with this file.
@torch._disable_dynamo
def refuses(call: Call) -> list[str]:
    """Returns why FlashAttention cannot run a call of a pattern; [] if it can.

    For a pattern that is no band, it builds the layout, to see whether it has whole blocks only.
    """
    query, value, pattern, frame = call.query, call.value, call.pattern, call.frame
    if (band := _band(pattern)) is not None:
        fault = band.misfit(frame)
        return [fault] if fault else []
    if 4 not in _installed():
        return [
            "FlashAttention-3 runs full, causal and windowed attention and documents of these, "
            f"not {type(pattern).__name__}; for whole blocks, install the package flash-attn-4"
        ]
    if max(query.shape[3], value.shape[3]) > _BLOCK:
        return [f"FlashAttention-4 has whole blocks for head dims up to {_BLOCK}"]
    found = _blocks(pattern, frame, query)
    return [found] if isinstance(found, str) else []


@torch._disable_dynamo
def attention(call: Call) -> tuple[Tensor, Tensor]:
    """Computes (out, lse) of a call that `refuses` accepts; lse is float32.

    Raises: NotImplementedError for gradients that the package lacks or computes wrongly.
    """
    query, key, value = with_first_derivatives(*call.inputs)
    pattern, frame, scale = call.pattern, call.frame, call.scale
    if not query.numel() or not key.numel():
        return without_keys(query, key, value)
    query, scale = with_positive_scale(query, scale)
    if (band := _band(pattern)) is not None:
        band = band.aligned(frame)
        if band.lengths is None:
            return _dense(query, key, value, band, scale)
        return _varlen(query, key, value, band, frame, scale)
    return _block_sparse(query, key, value, pattern, frame, scale)


# What is installed


@cache
def _installed() -> tuple[int, ...]:
    """Returns which of FlashAttention-3 and -4 are installed, without importing them."""
    found = (3,) if find_spec("flash_attn_interface") is not None else ()
    package = find_spec("flash_attn")  # FlashAttention-2 has this name too, without `cute`
    folders = (package.submodule_search_locations or ()) if package is not None else ()
    has_cute = any((Path(folder) / "cute" / "interface.py").is_file() for folder in folders)
    return (*found, 4) if has_cute else found


def _version(query: Tensor) -> int:
    """Returns which FlashAttention, 3 or 4, runs bands on a tensor's GPU."""
    is_hopper = capability_of(query.device)[0] == _HOPPER
    return 3 if is_hopper and 3 in _installed() else 4


def _head_dim_fault(query: Tensor, key: Tensor, value: Tensor) -> str:
    """Returns why neither package can run a call's head dims, or "" if they can."""
    dim, value_dim = query.shape[-1], value.shape[-1]
    if dim != value_dim:
        return f"it runs one head dim for query, key and value, got {dim} and {value_dim}"
    if dim % 8 or not 8 <= dim <= 256:
        return f"it runs head dims that are multiples of 8 up to 256, got {dim}"
    if query.is_cuda and capability_of(query.device)[0] > _HOPPER and 128 < dim < 256:
        return f"on Blackwell it runs head dims up to 128, and 256, got {dim}"
    return ""


# Bands: keys from position p - left to p + right, in documents or not


class _Band(NamedTuple):
    """A pattern that the packages compute: keys from p - left to p + right, maybe in documents."""

    left: int | None  # number of keys before the query's position; None without a bound
    right: int | None  # number of keys after it; None without a bound
    lengths: Any = None  # lengths of adjacent documents, as `Documents.lengths`; None without
    q_lengths: Any = None  # numbers of their queries, if they differ from `lengths` (`Varlen`)

    def misfit(self, frame: Frame) -> str:
        """Returns why the package would align queries and keys otherwise; "" if it would not."""
        if self.q_lengths is not None:
            return ""
        if self.lengths is not None:
            if 0 <= frame.q_start == frame.kv_len - frame.q_len:
                return ""
            return (
                "in documents it aligns the last query with the last key, and begins at the first "
                f"key or later; leave out q_start, got {frame.q_start} of {frame.q_len} queries "
                f"and {frame.kv_len} keys"
            )
        bounds = self.aligned(frame)[:2]
        if all(bound is None or bound >= 0 for bound in bounds):
            return ""
        return (
            "it counts positions so that the last query is at the last key; leave out q_start, got "
            f"{frame.q_start} of {frame.q_len} queries and {frame.kv_len} keys"
        )

    def aligned(self, frame: Frame) -> "_Band":
        """Returns the band for the query positions that the package assumes.

        The package always puts the last query at the last key.
        """
        if self.lengths is not None:
            return self
        later = frame.q_start - (frame.kv_len - frame.q_len)
        return self._replace(
            left=None if self.left is None else self.left - later,
            right=None if self.right is None else self.right + later,
        )

    @property
    def is_causal(self) -> bool:
        return self.left is None and self.right == 0


def _band(pattern: Pattern) -> _Band | None:
    """Returns a pattern as a band; None if it is something else."""
    if type(pattern) is Full:
        return _Band(left=None, right=None)
    if type(pattern) is Causal:
        return _Band(left=None, right=0)
    if type(pattern) is SlidingWindow and pattern.dilation == 1:
        return _Band(left=pattern.left, right=pattern.right)
    if type(pattern) is Documents:
        return _Band(left=None, right=None, lengths=pattern.lengths)
    if type(pattern) in (Packed, Varlen):
        inner = _band(pattern.pattern)  # type: ignore[attr-defined]
        if inner is None or inner.lengths is not None:
            return None
        if type(pattern) is Packed:
            return inner._replace(lengths=pattern.lengths)
        return inner._replace(lengths=pattern.kv_lengths, q_lengths=pattern.q_lengths)  # type: ignore[attr-defined]
    if type(pattern) is And:
        return _intersection([_band(mask) for mask in pattern.masks])
    return None


def _intersection(bands: Sequence[_Band | None]) -> _Band | None:
    """Returns the intersection of bands as a band; None if it is something else."""
    found = [band for band in bands if band is not None]
    documents = [band for band in found if band.lengths is not None]
    if len(found) < len(bands) or len(documents) > 1:
        return None
    lefts = [band.left for band in found if band.left is not None]
    rights = [band.right for band in found if band.right is not None]
    of_documents = documents[0] if documents else found[0]
    return of_documents._replace(left=min(lefts, default=None), right=min(rights, default=None))


def _dense(
    query: Tensor, key: Tensor, value: Tensor, band: _Band, scale: float
) -> tuple[Tensor, Tensor]:
    """Computes (out, lse) of a band over whole sequences."""
    attend, options = _function(query, "flash_attn_func", band, scale)
    out, lse = attend(*(x.transpose(1, 2) for x in (query, key, value)), **options)
    out = out.transpose(1, 2)  # [B, Hq, Nq, Dv]
    q_len, kv_len = query.shape[2], key.shape[2]
    blind = 0 if band.right is None else q_len - kv_len - band.right  # rows that see no key
    if blind > 0:
        empty = torch.arange(q_len, device=query.device) < blind
        out, lse = without_rows(out, lse, empty)
    return out, lse


def _varlen(
    query: Tensor, key: Tensor, value: Tensor, band: _Band, frame: Frame, scale: float
) -> tuple[Tensor, Tensor]:
    """Computes (out, lse) of a band in documents, by one varlen call for all batch entries."""
    batch, device = len(query), query.device
    k_lengths = _rows(band.lengths, batch)  # [B, documents]
    if band.q_lengths is not None:
        q_lengths = _rows(band.q_lengths, batch)
    else:  # the last queries of a sequence are the last ones of their documents
        ends = k_lengths.cumsum(1)
        q_lengths = (ends - (ends - k_lengths).clamp(min=frame.q_start)).clamp(min=0)
    longest = [int(x.max()) if x.numel() else 0 for x in (q_lengths, k_lengths)]
    cu_q, cu_k = (pad(x.flatten().cumsum(0), (1, 0)).to(device, torch.int32) for x in
                  (q_lengths, k_lengths))  # fmt: skip
    attend, options = _function(query, "flash_attn_varlen_func", band, scale)
    joined = [x.transpose(1, 2).flatten(0, 1) for x in (query, key, value)]  # [B * N, H, D]
    out, lse = attend(
        *joined,
        cu_seqlens_q=cu_q,
        cu_seqlens_k=cu_k,
        max_seqlen_q=longest[0],
        max_seqlen_k=longest[1],
        **options,
    )
    out = out.unflatten(0, (batch, frame.q_len)).transpose(1, 2)
    lse = lse.unflatten(1, (batch, frame.q_len)).transpose(0, 1)  # from [Hq, B * Nq]
    empty = _rows_without_keys(q_lengths.flatten(), k_lengths.flatten(), band.right)
    if empty.any():
        out, lse = without_rows(out, lse, empty.view(batch, 1, -1).to(device))
    return out, lse


def _rows_without_keys(q_lengths: Tensor, k_lengths: Tensor, right: int | None) -> Tensor:
    """Returns bool [sum of q_lengths]: which queries see no key of their document."""
    blind = torch.zeros_like(q_lengths) if right is None else q_lengths - k_lengths - right
    blind = torch.where(k_lengths == 0, q_lengths, blind)  # the first rows of each document
    first = (q_lengths.cumsum(0) - q_lengths).repeat_interleave(q_lengths)
    return torch.arange(len(first)) - first < blind.repeat_interleave(q_lengths)


def _rows(lengths: Any, batch: int) -> Tensor:
    """Returns each batch entry's document lengths [B, documents], padded with 0."""
    if isinstance(lengths, Tensor):
        return lengths.cpu().expand(batch, -1)
    entries = lengths if per_entry(lengths) else (lengths,) * batch
    most = max(map(len, entries), default=0)
    filled = [(*entry, *(0,) * (most - len(entry))) for entry in entries]
    return torch.tensor(filled, dtype=torch.int64).view(batch, most)


def _function(
    query: Tensor, name: str, band: _Band, scale: float
) -> tuple[Callable[..., tuple[Tensor, Tensor]], dict[str, Any]]:
    """Returns a function of the installed package and its options for a band."""
    options: dict[str, Any] = {
        "softmax_scale": scale,
        "causal": band.is_causal,
        "deterministic": torch.are_deterministic_algorithms_enabled(),  # else dQ has no fixed order
    }
    window = (None, None) if band.is_causal else (band.left, band.right)
    if _version(query) == 4:
        from flash_attn.cute import interface

        return getattr(interface, name), {**options, "window_size": window, "return_lse": True}
    import flash_attn_interface

    def attend(*tensors: Tensor, **rest: Any) -> tuple[Tensor, Tensor]:
        out, lse = getattr(flash_attn_interface, name)(*tensors, **rest)
        return out, without_gradient(lse, _NO_LSE_GRADIENT)

    left, right = (-1 if bound is None else bound for bound in window)  # -1: no bound
    return attend, {**options, "window_size": (left, right), "return_attn_probs": True}


_NO_LSE_GRADIENT = (
    "flash: FlashAttention-3 has no gradient of lse; detach it, install flash-attn-4 without "
    "FlashAttention-3, or leave out backend="
)


# Whole blocks


def _block_sparse(
    query: Tensor, key: Tensor, value: Tensor, pattern: Pattern, frame: Frame, scale: float
) -> tuple[Tensor, Tensor]:
    """Computes (out, lse) of a pattern of whole blocks by FlashAttention-4's block sparsity."""
    from flash_attn.cute.block_sparsity import BlockSparseTensorsTorch
    from flash_attn.cute.interface import flash_attn_func

    is_hopper = capability_of(query.device)[0] == _HOPPER
    learns = torch.is_grad_enabled() and any(x.requires_grad for x in (query, key, value))
    if learns and is_hopper:
        raise NotImplementedError(
            "flash: FlashAttention-4's gradients of whole blocks are wrong on Hopper for some head "
            "dims (its issues 2623 and 2896); call it under torch.no_grad(), or leave out backend="
        )
    if learns and torch.are_deterministic_algorithms_enabled():
        raise NotImplementedError(
            "flash: FlashAttention-4 adds gradients of whole blocks in no fixed order; leave out "
            "torch.use_deterministic_algorithms, or backend="
        )
    blocks = _blocks(pattern, frame, query)
    assert isinstance(blocks, _Blocks)
    rows = _block_rows(frame, query)
    lists = {"block_sparse_tensors": blocks.of_rows}
    if learns:
        lists["block_sparse_tensors_bwd"] = blocks.of_columns
    out, lse = flash_attn_func(
        *(x.transpose(1, 2) for x in (query, key, value)),
        softmax_scale=scale,
        pack_gqa=False,
        return_lse=True,
        **{
            name: BlockSparseTensorsTorch(
                mask_block_cnt=torch.zeros_like(counts),
                mask_block_idx=torch.zeros_like(index),
                full_block_cnt=counts,
                full_block_idx=index,
                block_size=(rows, _BLOCK),
            )
            for name, (counts, index) in lists.items()
        },
    )
    empty = (blocks.of_rows[0] == 0).repeat_interleave(rows, 2)[..., : frame.q_len]
    return without_rows(out.transpose(1, 2), lse, empty)


class _Blocks(NamedTuple):
    """Lists of visited blocks for FlexAttention: by row for a forward pass, by column for backward.

    Each field is (number of visited blocks, int32 [B or 1, H or 1, rows]; block indices with the
    visited ones first, ascending, int32 [B or 1, H or 1, rows, columns]). In `of_columns`, rows and
    columns are exchanged.
    """

    of_rows: tuple[Tensor, Tensor]
    of_columns: tuple[Tensor, Tensor]

    @classmethod
    def listed(cls, visits: Tensor) -> "_Blocks":
        """Lists the blocks that are True in `visits` [B or 1, H or 1, rows, columns]."""
        return cls(of_rows=listed(visits), of_columns=listed(visits.mT))


def _block_rows(frame: Frame, query: Tensor) -> int:
    """Returns how many queries a block has: 128, or 256 on Blackwell with more than 128 queries."""
    is_blackwell = capability_of(query.device)[0] > _HOPPER
    return 2 * _BLOCK if is_blackwell and frame.q_len > _BLOCK else _BLOCK


def _blocks(pattern: Pattern, frame: Frame, query: Tensor) -> _Blocks | str:
    """Lists the blocks of `_block_rows` queries and 128 keys that a pattern visits.

    Returns a text that says why not if the pattern has others. The layout keeps the result, because
    reading its tables waits for a GPU.
    """
    if frame.q_len % _BLOCK or frame.kv_len % _BLOCK or not frame.q_len or not frame.kv_len:
        return (
            f"for whole blocks it needs lengths that are multiples of {_BLOCK}, got {frame.q_len} "
            f"queries and {frame.kv_len} keys"
        )
    layout = layout_cache.layout(pattern, frame, _BLOCK, query.device)
    if len(layout.passes) > 1:
        return (
            "it runs full, causal and windowed attention, documents of these, and blocks; a "
            f"layout of this pattern has {len(layout.passes)} passes"
        )
    pair = _block_rows(frame, query) > _BLOCK
    if not layout.passes:
        size = frame.q_len // _BLOCK, frame.kv_len // _BLOCK
        visits = torch.zeros(1, 1, *size, dtype=torch.bool, device=query.device)
        return _Blocks.listed(visits[:, :, ::2] if pair else visits)
    (p,) = layout.passes
    if (blocks := p.memo.get(("flash", pair))) is None:
        visited = whole_blocks(p, frame, _BLOCK)
        if pair and isinstance(visited, Tensor):
            visited = _of_two_rows(visited)
        if isinstance(visited, Tensor) and (tables := visited.shape[1]) > 1:
            visited = visited.repeat_interleave(query.shape[1] // tables, 1)
        blocks = visited if isinstance(visited, str) else _Blocks.listed(visited)
        p.memo["flash", pair] = blocks
    found: _Blocks | str = blocks
    return found


def _of_two_rows(visits: Tensor) -> Tensor | str:
    """Joins rows of blocks in pairs, for blocks of 256 queries; returns why not if they differ."""
    first, second = visits[:, :, ::2], visits[:, :, 1::2]
    if not torch.equal(first[:, :, : second.shape[2]], second):
        return (
            f"on Blackwell it needs blocks of {2 * _BLOCK} queries and {_BLOCK} keys; this pattern "
            "has smaller ones"
        )
    return first
