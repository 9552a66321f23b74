"""Summaries of key blocks, from which queries estimate the softmax mass of each block.

A block is cut into parts. The logit of a part is the dot product of its key features and the
query's features, plus the log of its number of real tokens. Each method defines the features.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..patterns.arguments import checked_integer, shortened

NEVER = -1e30  # logit of missing or hidden keys: finite, so that gradients are not NaN
METHODS = ("mean", "sub", "gauss", "bounds", "antidiagonal", "exact")


def checked_method(method: str, parts: int, block_size: int, query_block: int = 0) -> int:
    """Returns the tokens per part of a block for a method; ValueError for bad arguments."""
    if not isinstance(method, str) or method not in METHODS:
        raise ValueError(
            f"method must be one of {', '.join(METHODS)}, got {shortened(repr(method))}"
        )
    parts = checked_integer("parts", parts, 1)
    if method not in ("sub", "antidiagonal"):
        return 1 if method == "exact" else block_size
    if block_size % parts or (method == "antidiagonal" and query_block % parts):
        sizes = "block_size" if method == "sub" else "block_size and query_block"
        got = block_size if method == "sub" else f"{block_size} and {query_block}"
        raise ValueError(f"parts must divide {sizes}, {got}, got {parts}; 1 does")
    return parts if method == "antidiagonal" else block_size // parts


class BlockEstimate(NamedTuple):
    """Keys cut into blocks, and the features of their parts.

    Attributes:
        method: name of the estimate, one of METHODS.
        length: number of keys, Nk.
        part: tokens per part.
        feature: [B, Hkv, slots, Nb, F]; slot c of block b is its part c. A partial last block is
            left out where no query needs its features.
        keys: [B, Hkv, blocks, block_size, D], the blocks from `first_own` on, zeros past Nk.
        first_own: index of the first block in `keys`.
    """

    method: str
    length: int
    part: int
    feature: Tensor
    keys: Tensor
    first_own: int = 0

    @classmethod
    def of(cls, key: Tensor, block_size: int, method: str, part: int) -> "BlockEstimate":
        """Builds the estimate for all keys [B, Hkv, Nk, D]."""
        length = key.shape[2]
        blocks = -(-length // block_size)
        keys = pad(key, (0, 0, 0, blocks * block_size - length)).unflatten(2, (blocks, block_size))
        estimate = cls(method, length, part, keys[..., :0], keys)
        parts = keys.unflatten(3, (block_size // part, part))
        feature = features(parts, estimate.counts().to(key.device), method)
        return estimate._replace(feature=feature.transpose(2, 3))

    @property
    def block_size(self) -> int:
        return self.keys.shape[-2]

    @property
    def slots(self) -> int:
        return self.feature.shape[-3]

    @property
    def num_blocks(self) -> int:
        return -(-self.length // self.block_size)

    @property
    def stride(self) -> int:
        """Number of consecutive queries that share one logit."""
        return self.part if self.method == "antidiagonal" else 1

    @property
    def ragged(self) -> bool:
        """Whether the last block has fewer tokens."""
        return self.length % self.block_size > 0

    def counts(self, blocks: int | None = None) -> Tensor:
        """Number of real tokens of each part of the first blocks: [blocks, slots], float64."""
        part, end = self.part, self.num_blocks * self.block_size
        first = torch.arange(0, end, part).view(self.num_blocks, self.block_size // part)
        return (self.length - first).clamp(0, part).double()[:blocks]

    def log_counts(self, blocks: int) -> Tensor:
        """Log of the number of real tokens of each part [slots, blocks]; NEVER where it is 0."""
        count = self.counts(blocks)
        logs = torch.where(count > 0, count.clamp(min=1).log(), NEVER).mT
        return logs.to(self.feature)

    def of_queries(self, query: Tensor, scale: float, front: int) -> Tensor:
        """Features [entries, n / stride * G, F] of queries [entries, n, G, D], times the scale.

        `front`: number of empty places before the first query in its stride.
        """
        query = query_features(query, scale, self.method)
        if self.stride > 1:  # antidiagonals: queries descend as keys ascend
            back = -(front + query.shape[1]) % self.stride
            query = pad(query, (0, 0, 0, 0, front, back)).unflatten(1, (-1, self.stride)).flip(2)
            query = query.transpose(2, 3).flatten(3)
        return query.flatten(1, 2)

    def products(self, blocks: int, present: Tensor | None) -> Tensor | float:
        """Reciprocal of the number of products in each antidiagonal sum.

        A float where all sums are full, else [slots, n / stride, 1, blocks].
        `present`: mask [n / stride, stride] of the queries that exist, None for all.
        """
        if present is None and not (self.ragged and blocks == self.num_blocks):
            return 1 / self.stride
        count = self.counts(blocks).mT.flatten()
        keys = (torch.arange(self.stride) < count[:, None]).to(self.feature)
        queries = torch.ones(1, self.stride) if present is None else present.flip(1)
        products = (queries.to(keys) @ keys.mT).clamp(min=1)
        return products.reciprocal().unflatten(1, (self.slots, blocks)).transpose(0, 1)[:, :, None]


def query_features(query: Tensor, scale: float, method: str) -> Tensor:
    """Features [..., F] of queries [..., D]; the dot product with key `features` is a logit."""
    if method == "gauss":
        return torch.cat((query * scale, query.square() * (scale * scale / 2)), -1)
    if method == "bounds":
        return torch.cat((query.clamp(min=0) * scale, query.clamp(max=0) * scale), -1)
    return query * scale


def features(keys: Tensor, count: Tensor, method: str) -> Tensor:
    """Features [..., blocks, slots, F] of keys [..., blocks, slots, part, D], zeros past the end.

    `count`: number of real keys of each part, [blocks, slots].
    """
    if method == "exact":
        return keys.squeeze(-2)
    if method == "antidiagonal":
        return keys.flatten(-2)
    is_real = torch.arange(keys.shape[-2], device=keys.device)[:, None] < count[..., None, None]
    if method == "bounds":
        highest = torch.where(is_real, keys, -torch.inf).amax(-2)
        lowest = torch.where(is_real, keys, torch.inf).amin(-2)
        return torch.cat((highest, lowest), -1)
    divisor = count.clamp(min=1).to(keys.dtype)[..., None]
    mean = keys.sum(-2) / divisor
    if method != "gauss":
        return mean
    centred = torch.where(is_real, keys - mean[..., None, :], 0.0)
    return torch.cat((mean, centred.square().sum(-2) / divisor), -1)
