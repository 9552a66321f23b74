"""Attention weights on the visited blocks: for looking at, not for training."""

import itertools
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from .checks import refuse_meta
from .dispatch import choose
from .functional import checked_call
from .layouts.layout import BlockLayout
from .numerics import capped, entry_of_distance, finite_or_zero, without_autocast
from .ops import attend
from .patterns.algebra import Pattern


@dataclass(frozen=True, eq=False, repr=False)
class BlockWeights:
    """Attention weights on the visited blocks alone.

    Attributes:
        values: [B, H, num_blocks, block, block] in the order of `layout.entries`, zero where there
            is no pair.
        layout: the blocks.
    """

    values: Tensor
    layout: BlockLayout

    def __repr__(self) -> str:
        return f"<BlockWeights {tuple(self.values.shape)} of {self.layout!r}>"

    def to_dense(self) -> Tensor:
        """[B, H, Nq, Nk]; rows sum to 1, or 0 where there is no key.

        A pair in several branches has its parts added.
        """
        frame = self.layout.frame
        batch, heads = self.values.shape[:2]
        tables = []
        for b, h in itertools.product(range(batch), range(heads)):
            dense = self.values.new_zeros(frame.q_len + 1, frame.kv_len + 1)  # with a margin
            for first, q, k, _ in self.layout.visits(b, h):
                part = self.values[b, h, first : first + len(q)]
                dense = dense + torch.zeros_like(dense).index_put((q[:, :, None], k[:, None]), part)
            tables.append(dense[:-1, :-1])
        empty = self.values.new_zeros(batch, heads, frame.q_len, frame.kv_len)
        return torch.stack(tables).view(empty.shape) if tables else empty


def attention_weights(
    query: Tensor,
    key: Tensor,
    pattern: Pattern,
    *,
    scale: float | None = None,
    q_start: int | None = None,
    block_size: int | None = None,
    block_bias: Tensor | None = None,
    softcap: float | None = None,
    distance_bias: Tensor | None = None,
    sink: Tensor | None = None,
) -> BlockWeights:
    """The softmax weights of `attention`, on the visited blocks; differentiable.

    Args: as `attention`; block_size defaults to that of `pattern.layout`.

    Returns: `BlockWeights` in float32 (float64 for float64 inputs). With a sink rows sum to less
        than 1: the rest is the sink's.

    Cost: memory O(B H num_blocks block_size^2).
    """
    inputs, call, options = checked_call(
        query,
        key,
        key,
        pattern,
        scale=scale,
        q_start=q_start,
        block_size=block_size,
        block_bias=block_bias,
        softcap=softcap,
        distance_bias=distance_bias,
        sink=sink,
    )
    refuse_meta(query, key)
    query, key, _ = inputs
    with without_autocast(query):
        _, lse = attend(choose(None, inputs, options), *inputs, pattern, **call, options=options)
        layout = pattern.layout(
            query.shape[2],
            key.shape[2],
            num_heads=query.shape[1],
            num_kv_heads=key.shape[1],
            q_start=call["q_start"],
            block_size=block_size,
            device=query.device,
        )
        group = query.shape[1] // max(1, key.shape[1])
        # a margin for what is not real
        q, k = (pad(x.to(lse.dtype), (0, 0, 0, 1)) for x in (query, key))
        lse = pad(finite_or_zero(lse), (0, 1))
        position, key_position, _ = pattern.coordinates(layout.frame)
        position, key_position = (pad(x.to(lse.device), (0, 1)) for x in (position, key_position))
        batch, heads, blocks, size = *query.shape[:2], layout.num_blocks, layout.block_size
        bias, table = options["block_bias"], options["distance_bias"]
        tables = []
        for b, h in itertools.product(range(batch), range(heads)):
            weights = [lse.new_zeros(0, size, size)]
            for first, rows, columns, cells in layout.visits(b, h):
                score = call["scale"] * (q[b, h, rows] @ k[b, h // group, columns].mT)
                score = capped(score, softcap)
                if table is not None:
                    distance = key_position[columns][:, None] - position[rows][..., None]
                    score = score + table[b, h, entry_of_distance(distance, table)]
                if bias is not None:
                    score = score + bias[b, h, first : first + len(rows), None, None]
                shifted = torch.where(cells, score - lse[b, h, rows][..., None], -torch.inf)
                weights.append(shifted.exp())
            visited = torch.cat(weights)
            missing = lse.new_zeros(blocks - len(visited), size, size)
            tables.append(torch.cat((visited, missing)))
        empty = lse.new_zeros(batch, heads, blocks, size, size)
        return BlockWeights(torch.stack(tables).view(empty.shape) if tables else empty, layout)
