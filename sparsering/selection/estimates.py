"""Summaries of key blocks, from which queries estimate the softmax mass of each block.

A block is cut into equal parts. The logit of a query and a part is the dot product of their
features, plus the log of the number of tokens in the part. Each method defines its features.
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
        raise ValueError(f"parts must divide {sizes} ({got}), got {parts}; 1 always does")
    return parts if method == "antidiagonal" else block_size // parts


class BlockEstimate(NamedTuple):
    """Keys cut into blocks, and the features of the blocks' parts."""

    method: str  # one of METHODS
    length: int  # number of keys, Nk
    part: int  # tokens in each part
    # [B, Hkv, slots, Nb, F], slot c holds part c of each block. A partial last block may be left
    # out if only queries inside that block see it.
    feature: Tensor
    keys: Tensor  # [B, Hkv, blocks, block_size, D], blocks from `first_own` on, padded with zeros
    first_own: int = 0

    @classmethod
    def build(cls, key: Tensor, block_size: int, method: str, part: int) -> "BlockEstimate":
        """Summarises all keys [B, Hkv, Nk, D]."""
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
        """Number of consecutive queries that share one logit per part."""
        return self.part if self.method == "antidiagonal" else 1

    @property
    def ragged(self) -> bool:
        """Whether the last block has fewer than `block_size` tokens."""
        return self.length % self.block_size > 0

    def counts(self, blocks: int | None = None) -> Tensor:
        """Number of tokens in each part of the first blocks: float64 [blocks, slots]."""
        part, end = self.part, self.num_blocks * self.block_size
        first = torch.arange(0, end, part).view(self.num_blocks, self.block_size // part)
        return (self.length - first).clamp(0, part).double()[:blocks]

    def log_counts(self, blocks: int) -> Tensor:
        """Log of the number of tokens in each part [slots, blocks]; NEVER for empty parts."""
        count = self.counts(blocks)
        logs = torch.where(count > 0, count.clamp(min=1).log(), NEVER).mT
        return logs.to(self.feature)

    def query_strides(self, query: Tensor, scale: float, front: int) -> Tensor:
        """Features [entries, n / stride * G, F] of queries [entries, n, G, D], times the scale.

        `front` rows of zeros are put before the first query, which need not begin a stride.
        """
        query = query_features(query, scale, self.method)
        if self.stride > 1:  # an antidiagonal pairs the last query of a stride with the first key
            back = -(front + query.shape[1]) % self.stride
            query = pad(query, (0, 0, 0, 0, front, back)).unflatten(1, (-1, self.stride)).flip(2)
            query = query.transpose(2, 3).flatten(3)
        return query.flatten(1, 2)

    def antidiagonal_weight(self, blocks: int, present: Tensor | None) -> Tensor | float:
        """Weight that turns the sum of an antidiagonal's products into their mean.

        `present` [n / stride, stride] marks the places that hold a query; None if all do. Returns a
        float if all antidiagonals are full, else [slots, n / stride, 1, blocks].
        """
        if present is None and not (self.ragged and blocks == self.num_blocks):
            return 1 / self.stride
        count = self.counts(blocks).mT.flatten()
        keys = (torch.arange(self.stride) < count[:, None]).to(self.feature)
        queries = torch.ones(1, self.stride) if present is None else present.flip(1)
        products = (queries.to(keys) @ keys.mT).clamp(min=1)
        return products.reciprocal().unflatten(1, (self.slots, blocks)).transpose(0, 1)[:, :, None]


def query_features(query: Tensor, scale: float, method: str) -> Tensor:
    """Features [..., F] of queries [..., D]; their dot product with key features is a logit."""
    if method == "gauss":
        return torch.cat((query * scale, query.square() * (scale * scale / 2)), -1)
    if method == "bounds":
        return torch.cat((query.clamp(min=0) * scale, query.clamp(max=0) * scale), -1)
    return query * scale


def features(keys: Tensor, count: Tensor, method: str) -> Tensor:
    """Features [..., blocks, slots, F] of keys [..., blocks, slots, part, D].

    `count` [blocks, slots] is the number of keys in each part; the rest of a part is zeros.
    """
    if method == "exact":
        return keys.squeeze(-2)
    if method == "antidiagonal":
        return keys.flatten(-2)
    exists = torch.arange(keys.shape[-2], device=keys.device)[:, None] < count[..., None, None]
    if method == "bounds":
        highest = torch.where(exists, keys, -torch.inf).amax(-2)
        lowest = torch.where(exists, keys, torch.inf).amin(-2)
        return torch.cat((highest, lowest), -1)
    divisor = count.clamp(min=1).to(keys.dtype)[..., None]
    mean = keys.sum(-2) / divisor
    if method != "gauss":
        return mean
    centred = torch.where(exists, keys - mean[..., None, :], 0.0)
    return torch.cat((mean, centred.square().sum(-2) / divisor), -1)
