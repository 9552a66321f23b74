"""Summaries of key blocks, from which queries estimate the softmax mass of each block.

A block's mass is the sum of e^score over its keys. Each block is cut into equal parts. A method
turns each query and each part into a vector of features. A part's logit, which estimates its log
mass, is the dot product of both vectors plus the log of the number of tokens in the part.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..ground.arguments import checked_integer, shortened

NEVER = -1e30  # logit of missing or hidden keys; it is finite so that gradients are not NaN
METHODS = ("mean", "sub", "gauss", "bounds", "antidiagonal", "exact")


def checked_method(method: str, parts: int, block_size: int, query_block: int = 0) -> int:
    """Returns how many tokens a part of a block has under a method.

    ValueError if sizes do not fit.
    """
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
    """Keys cut into blocks, and the features that summarize the parts of each block."""

    method: str  # one of METHODS
    length: int  # number of keys, Nk
    part: int  # tokens in each part
    # [B, Hkv, parts, Nb, F], features of each part of each block. A last block that is not full may
    # be missing if only queries inside it see it, because these queries use `keys` instead.
    feature: Tensor
    keys: Tensor  # [B, Hkv, blocks, block_size, D] from block `first_own` on, padded with zeros
    first_own: int = 0  # index of the first block in `keys`
    exists: Tensor | None = None  # bool [B, Hkv, Nb, block_size], True for keys that count

    @classmethod
    def build(
        cls, key: Tensor, block_size: int, method: str, part: int, valid: Tensor | None = None
    ) -> "BlockEstimate":
        """Cuts keys [B, Hkv, Nk, D] into blocks and summarizes the parts of each block.

        `valid` is bool [B or 1, Nk], True for keys that count; the others may hold anything, even
        NaN.
        """
        length = key.shape[2]
        blocks = -(-length // block_size)
        exists = None
        if valid is not None:
            key = torch.where(valid[:, None, :, None], key, 0.0)
            exists = pad(valid, (0, blocks * block_size - length))
            exists = exists.unflatten(1, (blocks, block_size))[:, None]
            exists = exists.expand(*key.shape[:2], -1, -1)
        keys = pad(key, (0, 0, 0, blocks * block_size - length)).unflatten(2, (blocks, block_size))
        estimate = cls(method, length, part, keys[..., :0], keys, exists=exists)
        cut = (block_size // part, part)
        exists = None if exists is None else exists.unflatten(3, cut)
        feature = features(keys.unflatten(3, cut), estimate.counts(), method, exists)
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
        """Returns the number of tokens in each part of the first `blocks` blocks.

        The result is float64 [.., blocks, parts]. If some keys do not count, the dims before the
        blocks are those of `exists`.
        """
        if self.exists is not None:
            parts = self.exists.unflatten(-1, (-1, self.part))
            return parts.sum(-1).double()[..., :blocks, :]
        part, end = self.part, self.num_blocks * self.block_size
        first = torch.arange(0, end, part, device=self.keys.device)
        first = first.view(self.num_blocks, self.block_size // part)
        return (self.length - first).clamp(0, part).double()[:blocks]

    def log_counts(self, blocks: int) -> Tensor:
        """Returns the log of the tokens in each part [.., parts, blocks]; NEVER for empty parts."""
        count = self.counts(blocks)
        return torch.where(count > 0, count.clamp(min=1).log(), NEVER).mT.to(self.feature)

    def query_strides(self, query: Tensor, scale: float, front: int) -> Tensor:
        """Returns scaled features [B * Hkv, n / stride * G, F] of queries [B * Hkv, n, G, D].

        A stride is a run of queries that share logits; `front` zero queries come before the first
        query, so that strides begin at multiples of their length.
        """
        query = query_features(query, scale, self.method)
        if self.stride > 1:  # an antidiagonal pairs the last query of a stride with the first key
            back = -(front + query.shape[1]) % self.stride
            query = pad(query, (0, 0, 0, 0, front, back)).unflatten(1, (-1, self.stride)).flip(2)
            query = query.transpose(2, 3).flatten(3)
        return query.flatten(1, 2)

    def antidiagonal_weight(self, blocks: int, present: Tensor | None) -> Tensor | float:
        """Returns 1 / (number of query-key products on each antidiagonal), to turn sums into means.

        `present` [.., n / stride, stride] is False for a missing query; None if all exist. Returns
        a float if all antidiagonals have `stride` products, else [.., parts, n / stride, 1,
        blocks].
        """
        if self.exists is not None:
            parts = self.exists[:, :blocks].unflatten(2, (self.slots, self.part))
            keys = parts.transpose(1, 2).flatten(1, 2).to(self.feature)
        elif present is None and not (self.ragged and blocks == self.num_blocks):
            return 1 / self.stride
        else:
            count = self.counts(blocks).mT.flatten()
            place = torch.arange(self.stride, device=count.device)
            keys = (place < count[:, None]).to(self.feature)
        queries = keys.new_ones(1, self.stride) if present is None else present.flip(-1)
        products = (queries.to(keys) @ keys.mT).clamp(min=1)
        weight = products.reciprocal().unflatten(-1, (self.slots, blocks))
        return weight.transpose(-3, -2)[..., None, :]


def query_features(query: Tensor, scale: float, method: str) -> Tensor:
    """Query features [..., F] of queries [..., D].

    Their dot product with key features is the logit.
    """
    if method == "gauss":
        return torch.cat((query * scale, query.square() * (scale * scale / 2)), -1)
    if method == "bounds":
        return torch.cat((query.clamp(min=0) * scale, query.clamp(max=0) * scale), -1)
    return query * scale


def features(keys: Tensor, count: Tensor, method: str, exists: Tensor | None = None) -> Tensor:
    """Computes features [..., blocks, parts, F] of keys [..., blocks, parts, tokens of a part, D].

    `count` [.., blocks, parts] is the number of keys that count in each part. `exists` [.., blocks,
    parts, tokens of a part] says which; by default the first ones. Other keys must be 0.
    """
    if method == "exact":
        return keys.squeeze(-2)
    if method == "antidiagonal":
        return keys.flatten(-2)
    if exists is None:
        exists = torch.arange(keys.shape[-2], device=keys.device) < count[..., None]
    exists, empty = exists[..., None], count[..., None] == 0
    if method == "bounds":
        highest = torch.where(exists, keys, -torch.inf).amax(-2)
        lowest = torch.where(exists, keys, torch.inf).amin(-2)
        return torch.cat((highest, lowest), -1).masked_fill(empty, 0.0)  # no inf - inf
    divisor = count.clamp(min=1).to(keys.dtype)[..., None]
    mean = keys.sum(-2) / divisor
    if method != "gauss":
        return mean
    centred = torch.where(exists, keys - mean[..., None, :], 0.0)
    return torch.cat((mean, centred.square().sum(-2) / divisor), -1)
