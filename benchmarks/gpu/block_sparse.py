"""FlashInfer's kernels for blocks, an optional peer; NVIDIA's are the backend "cudnn".

A call raises ImportError with the package's name if it is missing; the record shows it. The
signatures are those of flashinfer-python 0.7 (`BlockSparseAttentionWrapper`).
"""

from collections.abc import Callable, Sequence
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from sparsering.layouts.layout import BlockLayout, Pass

from .device import sized

CUDNN, FLASHINFER = "cudnn block-sparse", "flashinfer"
_WORKSPACE = sized(128 << 20, 1 << 10)  # bytes that FlashInfer recommends


def key_blocks(p: Pass) -> tuple[Tensor, Tensor]:
    """Lists the key blocks of each row: counts int32 [B, H, rows], blocks [B, H, rows, columns].

    Blocks beyond a row's count are 0. A table that all heads share stays one, with H = 1.
    """
    rows, columns = p.query_start.shape[1], p.key_start.shape[1]
    counts = p.row_ptr.diff().int()
    slot = torch.arange(columns, device=counts.device)
    place = p.row_ptr[..., :-1, None].long() + slot  # index in `key_tile` of each slot
    place = place.clamp(max=p.key_tile.shape[2] - 1).flatten(2)
    index = p.key_tile.gather(2, place).unflatten(2, (rows, columns))
    return counts, torch.where(slot < counts[..., None], index, 0)


class FlashInfer:
    """FlashInfer's block-sparse attention, forward only; all heads share one list of blocks.

    Args:
        args: query, key and value [1, H, N, D]; copied to its order [N, H, D].
        block: rows and columns of a block.
    """

    def __init__(self, args: Sequence[Tensor], block: int) -> None:
        self._args, self._block = args, block
        self._ordered: list[Tensor] = []
        self._wrapper: Any = None

    def plan(self, row_ptr: Tensor, blocks: Tensor) -> None:
        """Prepares calls over a new choice of blocks, as compressed sparse rows on the GPU."""
        if self._wrapper is None:
            if find_spec("flashinfer") is None:
                raise ImportError("the package flashinfer-python is not installed")
            from flashinfer import BlockSparseAttentionWrapper

            query = self._args[0]
            room = torch.empty(_WORKSPACE, dtype=torch.uint8, device=query.device)
            self._wrapper = BlockSparseAttentionWrapper(room)
        query, key, _ = self._args
        types = dict.fromkeys(("q_data_type", "kv_data_type", "o_data_type"), query.dtype)
        self._wrapper.plan(
            row_ptr, blocks, query.shape[2], key.shape[2], self._block, self._block,
            query.shape[1], key.shape[1], query.shape[3], **types,
        )  # fmt: skip

    def call(self, layout: BlockLayout) -> Callable[[], Tensor]:
        """Builds a call over the layout's blocks; its first run plans, before anything is timed."""

        def run() -> Tensor:
            if not self._ordered:
                self.plan(*sparse_rows(layout))
                self._ordered += [x.detach()[0].transpose(0, 1).contiguous() for x in self._args]
            out: Tensor = self._wrapper.run(*self._ordered)
            return out.transpose(0, 1)[None]

        return run


def sparse_rows(layout: BlockLayout) -> tuple[Tensor, Tensor]:
    """Returns (row_ptr, blocks), int32, of a layout of one pass whose heads see equal blocks."""
    counts, index = key_blocks(layout.passes[0])
    if not bool((counts == counts[:, :1]).all() and (index == index[:, :1]).all()):
        raise NotImplementedError("FlashInfer has one list of blocks for all heads")
    counts, index = counts[0, 0], index[0, 0]
    listed = torch.arange(index.shape[1], device=index.device) < counts[:, None]
    row_ptr = torch.nn.functional.pad(counts.cumsum(0), (1, 0)).int()
    return row_ptr, index[listed].int()
