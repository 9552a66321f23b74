"""`SelectedAttention`: self-attention to blocks of keys that each query chooses by content.

    layer = SelectedAttention(512, 8, num_kv_heads=2)       # 16 blocks of 64 keys per token
    layer = SelectedAttention.nsa(512, 32, num_kv_heads=2)  # window + pooled keys + chosen blocks
    out = layer(x)                                          # [B, N, 512]

A call scores blocks of keys, selects the best, attends to them, and adds the outputs of the other
branches. It can also return a loss that trains the scorer.
"""

import contextlib
from collections.abc import Sequence
from typing import Any, Literal, Self

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.functional import pad

from ..checks import check_tensor, checked_integer_or_none
from ..functional import attention
from ..ground.arguments import checked_flag, checked_integer, shortened
from ..ground.keywords import class_with_hints
from ..ground.numerics import autocasting
from ..patterns.algebra import Mask
from ..patterns.blocks import Owned
from ..patterns.positions import Causal, Full, Lengths, PooledCausal, SlidingWindow
from ..patterns.selected import SelectedBlocks
from ..selection import (
    BlockScorer,
    block_mass,
    block_scores,
    pool_blocks,
    select_blocks,
    selection_loss,
)
from ..selection.estimates import METHODS, checked_method
from ..selection.query_rows import checked_blocks
from .alone import documents_by_length
from .over_ranks import CallRanks, OverRanks
from .pooled import gated_pool, pooled_scores
from .transformer import check_rope, checked_heads, rotate

GATES = ("sigmoid", "zero")


@class_with_hints
class SelectedAttention(OverRanks, nn.Module):
    """Multi-head self-attention in which groups of queries choose `k` blocks of keys by content.

    The result is a sum of up to three attentions, called branches: to the chosen blocks (exact, and
    causal inside them), to a sliding window, and to pooled keys. The last two are optional. Each
    branch has its own softmax over the same projections, and a gate for every head and token. A
    group of queries, called row, chooses separately in every kv head. Its k blocks always include
    the first `sink` blocks and the `local` blocks up to the one that contains the row's queries.

    How the scorer learns: no gradient flows through the choice. The methods of `block_scores` have
    no weights; they depend on query and key projections, which learn from the attention. "pooled"
    scores blocks by the attention of the pooled branch, which the model's loss trains. "learned" is
    a `BlockScorer` with a loss of its own: call `out, loss = layer(x, return_loss=True)` and add
    `loss` to the model's loss. While the layer is dense this loss covers all blocks, later only
    chosen blocks. So a scorer that selects few blocks from the start never learns what to select:
    keep `k` large (dense) until the model has learned, then shrink it slowly by setting `layer.k`
    to the value of a `GatedSchedule`. The "pooled" scorer needs no schedule.

    Args:
        embed_dim: channels of x.
        num_heads: query heads, of embed_dim / num_heads channels.
        num_kv_heads: heads of keys and values, a divisor of num_heads; default num_heads.
        block_size: keys in a block.
        k: number of blocks that a row chooses, including sink and local blocks.
        query_block: queries in a row, a divisor of block_size. Above 1, a choice depends on later
            queries of its row: fine for encoders and prompts, a leak in causal training.
        scorer: a method of `block_scores` ("mean", "sub", "gauss", "bounds", "antidiagonal",
            "exact"), "pooled", or "learned".
        window: tokens in the window branch, which ends at the query (and reaches as far after it if
            not causal); None for no such branch.
        sink, local: numbers of always chosen blocks: at the start, and up to the row's block.
        pooled: (size, stride) in tokens of the pooled branch, which attends to weighted means of
            keys and values; None for no such branch. The weights are a softmax of u . k over each
            window; u is learned and starts at 0, which gives the plain mean of the window.
        pool_queries: the pooled branch has means of queries too, over the same windows. A token has
            the output of the latest window that ended by then (0 before the first), or of its own
            window if not causal. So the branch costs O((N / stride)^2).
        gate: factors of the branches, if there are several. "sigmoid": each is a sigmoid of a
            linear map of x and starts at 1/2. "zero": 1 for the chosen blocks, and for each other
            branch a linear map that starts at 0. Use "zero" to add branches to a trained model; in
            a new model a branch that starts at 0, and a scorer that depends on it, do not learn.
        dense_below: sequences shorter than this attend to everything instead of choosing. Sequences
            of at most k blocks always do: they would choose all their blocks.
        causal: whether later keys are hidden from a query.
        group, sharding: a process group or a `DeviceMesh` of one axis, or of two (heads, tokens);
            and which rank has which tokens.

    Attributes:
        q_proj, k_proj, v_proj, out_proj: linear maps without bias.
        gate_proj: linear map with bias, None for a single branch. Its outputs for each head are the
            gates of the chosen blocks (only for gate "sigmoid"), the window and the pooled branch.
        pool_gate: u of the pooled branch, [Hkv, D].
        block_scorer: the `BlockScorer` of "learned", else None.
        k: may be set between calls.

    Positions: none are added. Pass `rope`, or add positions to x. A mean of a block's keys also
    averages their rotary positions.

    Over ranks: with `group`, a call takes this rank's tokens (and rows of `rope`), as `shard` cuts
    them, and returns this rank's rows. Gradients of parameters are each rank's part; their sum is
    one process's. Each rank gathers all keys and values, whatever blocks are chosen: it receives
    2 D numbers per other token and kv head, and in the backward pass their gradients. A shard that
    does not begin at a multiple of `query_block` raises on all ranks; `return_loss` is refused. A
    copied or unpickled module needs `module.group` to be set.

    Raises: ValueError if arguments contradict one another.

    Cost: O(N k block_size) for the chosen blocks and their backward, plus the scorer (see
        `block_scores`), the window, and O(N^2 / stride) for the pooled branch. Scores take
        O(N / query_block x N / block_size) memory for each kv head; only a learned scorer with
        `return_loss` keeps them for the backward.

    Example:
        >>> layer = SelectedAttention(256, 8, num_kv_heads=2, scorer="learned", k=8)
        >>> out, scorer_loss = layer(x, return_loss=True)
        >>> (task_loss(out) + scorer_loss).backward()

    Source: NSA (arXiv 2502.11089), MoBA (2502.13189), DeepSeek-V3.2 (2512.02556) for the loss.
    """

    gate_proj: nn.Linear | None
    pool_gate: nn.Parameter | None
    block_scorer: BlockScorer | None

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        *,
        num_kv_heads: int | None = None,
        block_size: int = 64,
        k: int = 16,
        query_block: int = 1,
        scorer: str = "sub",
        window: int | None = None,
        sink: int = 1,
        local: int = 1,
        pooled: Sequence[int] | None = None,
        pool_queries: bool = False,
        gate: Literal["sigmoid", "zero"] = "sigmoid",
        dense_below: int | None = None,
        causal: bool = True,
        group: dist.ProcessGroup | DeviceMesh | None = None,
        sharding: str = "contiguous",
    ) -> None:
        super().__init__()
        self.sharding, self.group = sharding, group
        embed_dim, num_heads = checked_heads(embed_dim, num_heads)
        kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        kv_heads = checked_integer("num_kv_heads", kv_heads, 1)
        query_block, block_size = checked_blocks(query_block, block_size)
        if num_heads % kv_heads:
            raise ValueError(
                f"num_heads must be a multiple of num_kv_heads, got {num_heads} and {kv_heads}; "
                "num_kv_heads=1 shares keys among all heads"
            )
        scorers = (*METHODS, "pooled", "learned")
        for name, value, choices in (("scorer", scorer, scorers), ("gate", gate, GATES)):
            if not isinstance(value, str) or value not in choices:
                got = shortened(repr(value))
                raise ValueError(f"{name} must be one of {', '.join(choices)}, got {got}")
        if scorer in METHODS:
            checked_method(scorer, 4, block_size, query_block)
        if scorer == "pooled" and pooled is None:
            raise ValueError(
                "scorer='pooled' needs a pooled branch, got pooled=None; pass pooled=(32, 16)"
            )
        self.num_heads, self.num_kv_heads = num_heads, kv_heads
        self.head_dim = embed_dim // num_heads
        self.block_size, self.query_block = block_size, query_block
        self.k = checked_integer("k", k, 1)
        self.scorer, self.gate, self.causal = scorer, gate, checked_flag("causal", causal)
        self.sink, self.local = checked_integer("sink", sink, 0), checked_integer("local", local, 0)
        self.dense_below = checked_integer_or_none("dense_below", dense_below)
        self.window = None if window is None else checked_integer("window", window, 1)
        self.pooled = None if pooled is None else _checked_pooling(pooled)
        if checked_flag("pool_queries", pool_queries) and pooled is None:
            raise ValueError(
                "pool_queries=True needs windows, got pooled=None; pass pooled=(32, 16)"
            )
        self.pool_queries = pool_queries
        kv_width = kv_heads * self.head_dim
        self.q_proj = nn.Linear(embed_dim, embed_dim, bias=False)
        self.k_proj = nn.Linear(embed_dim, kv_width, bias=False)
        self.v_proj = nn.Linear(embed_dim, kv_width, bias=False)
        self.out_proj = nn.Linear(embed_dim, embed_dim, bias=False)
        self.gate_proj = self.pool_gate = self.block_scorer = None
        if branches := (window is not None) + (pooled is not None):
            gates = num_heads * (branches + (gate == "sigmoid"))
            self.gate_proj = nn.Linear(embed_dim, gates)
            nn.init.zeros_(self.gate_proj.weight)
            nn.init.zeros_(self.gate_proj.bias)
        if pooled is not None:
            self.pool_gate = nn.Parameter(torch.zeros(kv_heads, self.head_dim))
        if scorer == "learned":
            self.block_scorer = BlockScorer(
                self.head_dim, kv_heads, block_size, query_block=query_block, causal=causal
            )
        self._select(torch.zeros(1, 1, 1, self.k + 1))  # raises now if sink + local > k

    @classmethod
    def nsa(cls, embed_dim: int, num_heads: int, **options: Any) -> Self:
        """Builds NSA: 16 blocks of 64, chosen by pooled keys (size 32, stride 16), a window of 512.

        Differences from NSA: pooled keys and values are weighted means, where NSA learns an MLP;
        one projection of keys and values serves all branches. NSA has 16 query heads per kv head.
        `options` are arguments of `SelectedAttention` and override the preset.
        """
        preset = {"pooled": (32, 16), "scorer": "pooled", "window": 512, "local": 2}
        return cls(embed_dim, num_heads, **{**preset, **options})

    @classmethod
    def moba(cls, embed_dim: int, num_heads: int, **options: Any) -> Self:
        """Builds MoBA: chooses 3 blocks of 512 keys, one of them the query's, by their mean keys.

        If num_kv_heads equals num_heads, each query head chooses for itself, as in MoBA. Query
        heads that share a kv head choose together. `options` are arguments of `SelectedAttention`
        and override the preset.
        """
        preset = {"block_size": 512, "k": 3, "scorer": "mean", "sink": 0}
        return cls(embed_dim, num_heads, **{**preset, **options})

    @classmethod
    def adaptive(cls, embed_dim: int, num_heads: int, **options: Any) -> Self:
        """Builds a layer whose blocks a learned scorer chooses.

        `forward(x, return_loss=True)` returns the loss that trains the scorer. `options` are
        arguments of `SelectedAttention`.
        """
        return cls(embed_dim, num_heads, **{"scorer": "learned", **options})

    @classmethod
    def hierarchical(cls, embed_dim: int, num_heads: int, **options: Any) -> Self:
        """Builds a layer that is exact near the query and coarse far away.

        It has a window of 256 tokens, means of every 64 tokens, and the 8 blocks of 64 whose means
        get most attention. `options` are arguments of `SelectedAttention` and override the preset.
        """
        preset = {"pooled": (64, 64), "scorer": "pooled", "window": 256, "k": 8}
        return cls(embed_dim, num_heads, **{**preset, **options})

    def extra_repr(self) -> str:
        """Lists the constructor's arguments for `repr`."""
        names = ("block_size", "k", "query_block", "scorer", "window", "sink", "local", "pooled")
        parts = [f"{name}={getattr(self, name)!r}" for name in (*names, "dense_below", "causal")]
        return f"{self.num_heads} heads on {self.num_kv_heads}, {', '.join(parts)}"

    def forward(
        self,
        x: Tensor,
        *,
        rope: tuple[Tensor, Tensor] | None = None,
        return_loss: bool = False,
        documents: Lengths | None = None,
        valid: Tensor | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Computes self-attention on x.

        Args:
            x: [B, N, embed_dim], any N.
            rope: cosine and sine [N, D / 2] that rotate queries and keys, as
                `sparsering.nn.transformer.rotary_table` returns them; D is the head dim.
            return_loss: also return the loss of a learned scorer. Its gradients reach the scorer
                alone. The module does not store the loss, so activation checkpointing works.
            documents: lengths of the documents packed in x, as for `Documents`: ints for all batch
                entries, ints for each, or an int64 tensor. Each document chooses and attends as it
                does alone. `rope` still has a row for each token of x.
            valid: bool [B, N], False for padding and other tokens that do not exist. The others of
                a batch entry, or of a document, attend as if they were alone; the rest get 0.

        Returns: [B, N, embed_dim]; with `return_loss` also a 0-d loss, the mean over all rows.

        Raises: ValueError for another shape of x, for `return_loss` without a learned scorer, and
            for `documents` or `valid` that do not fit x.

        Cost: with `documents` or `valid`, documents of equal length are computed together, those of
            each length in a call of their own. The host waits for a GPU's lengths and `valid`.
        """
        refused = {
            "return_loss": return_loss is not False,
            "pool_queries": self.pool_queries,
            "documents": documents is not None,
            "valid": valid is not None,
        }
        ranks = self._ranks(x, **refused)
        with ranks or contextlib.nullcontext():
            return self._forward(x, rope, return_loss, ranks, documents, valid)

    def _forward(
        self,
        x: Tensor,
        rope: Any,
        return_loss: bool,
        ranks: CallRanks | None,
        documents: Lengths | None,
        valid: Tensor | None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Implements `forward`; `ranks` is not None if ranks share the sequence."""
        check_tensor("x", x, f"[batch, tokens, {self.q_proj.in_features}]")
        wanted = x.dim() == 3 and x.shape[2] == self.q_proj.in_features
        if not wanted or not x.is_floating_point():
            raise ValueError(
                f"x must be floating point [B, N, {self.q_proj.in_features}], got {x.dtype} "
                f"{tuple(x.shape)}; add a missing dim with unsqueeze()"
            )
        own = self.q_proj.weight.dtype
        if x.dtype != own and not autocasting(x):
            raise ValueError(f"x must be of {own}, got {x.dtype}; cast with .to()")
        if checked_flag("return_loss", return_loss) and self.block_scorer is None:
            raise ValueError(
                f"return_loss=True needs scorer='learned', got {self.scorer!r}, which has no loss; "
                "leave return_loss out"
            )
        query, key, value = (
            project(x).unflatten(2, (-1, self.head_dim)).transpose(1, 2)  # [B, H, N, D]
            for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        if rope is not None:
            check_rope(rope, x.shape[1], self.head_dim)
            query, key = rotate(query, *rope), rotate(key, *rope)
        loss: Tensor | None = None
        if documents is not None or valid is not None:
            shape = x.shape[0], x.shape[1]
            parts = documents_by_length(documents, valid, shape, x.device)
            branches, loss = self._of_documents(parts, query, key, value, return_loss)
        elif ranks is None:
            *branches, loss = self._branches(query, key, value, 0, return_loss)
        else:
            options = {"step": self.query_block, "options": self.extra_repr()}
            branches = ranks.attend_to_all_keys(
                query, key, value, **options, attend=lambda *part: self._branches(*part)[:-1]
            )
        out = self.out_proj(self._gated_sum(x, branches).transpose(1, 2).flatten(2))
        return out if loss is None else (out, loss)

    def _branches(
        self, query: Tensor, key: Tensor, value: Tensor, start: int, return_loss: bool = False
    ) -> list[Any]:
        """Computes the branches' outputs [B, H, n, D], and last the scorer's loss or None.

        Keys and values are of the whole sequence; `start` is the position of the first query.
        """
        if self.is_dense(key.shape[2]):
            dense = Causal() if self.causal else Full()
            out, loss = attention(query, key, value, dense, q_start=start), None
            if return_loss:
                # The score "exact" is the log of the softmax weight that a block gets from a row.
                mass = self._estimates(query, key, "exact").exp()
                loss = selection_loss(self.scores(query, key), mass)
        else:
            out, loss = self._attend_selected(query, key, value, start, return_loss)
        branches = [out]
        if self.window is not None:
            ahead = 0 if self.causal else self.window - 1
            window = SlidingWindow(self.window - 1, ahead)
            branches.append(attention(query, key, value, window, q_start=start))
        if self.pooled is not None:
            coarse_key, coarse_value = self.pool(key, key), self.pool(key, value)
            coarse = PooledCausal(*self.pooled) if self.causal else Full()
            if self.pool_queries:
                branches.append(self._of_windows(query, coarse_key, coarse_value))
            else:
                branches.append(attention(query, coarse_key, coarse_value, coarse, q_start=start))
        return [*branches, loss]

    def _of_documents(
        self, parts: list[Tensor], query: Tensor, key: Tensor, value: Tensor, return_loss: bool
    ) -> tuple[list[Tensor], Tensor | None]:
        """Computes the branches for each document alone; padding gets zeros.

        Args:
            parts: for each length n, int64 [documents, n]: indices of their tokens in [B * N].
            query, key, value: [B, H, N, D].

        Returns: outputs [B, H, N, D] of the branches, and the mean loss of all rows.
        """
        flat = [x.transpose(1, 2).flatten(0, 1) for x in (query, key, value)]  # [B * N, H, D]
        number = 1 + (self.window is not None) + (self.pooled is not None)
        outs = [torch.zeros_like(flat[0])] * number
        losses, rows = [], 0
        for places in parts:
            q, k, v = (x[places].transpose(1, 2) for x in flat)  # [documents, H, n, D]
            *found, loss = self._branches(q, k, v, 0, return_loss)
            at = places.flatten()
            each = [x.transpose(1, 2).flatten(0, 1).to(outs[0].dtype) for x in found]
            outs = [out.index_copy(0, at, x) for out, x in zip(outs, each, strict=True)]
            if loss is not None:
                count = len(places) * -(-places.shape[1] // self.query_block)
                losses.append(count * loss)
                rows += count
        back = [x.unflatten(0, (len(query), query.shape[2])).transpose(1, 2) for x in outs]
        if not return_loss:
            return back, None
        return back, sum(losses, query.new_zeros(())) / max(1, rows)

    def _of_windows(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Attends from pooled queries to pooled keys; each token gets its window's output.

        query is [B, H, N, D], key and value are pooled: [B, Hkv, windows, D]. Returns [B, H, N, D].
        """
        assert self.pooled is not None
        size, stride = self.pooled
        pattern = Causal() if self.causal else Full()
        out = attention(pool_blocks(query, size, stride), key, value, pattern, q_start=0)
        token = torch.arange(query.shape[2], device=query.device)
        window = (token - (size - 1 if self.causal else 0)) // stride
        return pad(out, (0, 0, 1, 0))[:, :, window.clamp(-1, out.shape[2] - 1) + 1]

    def is_dense(self, length: int) -> bool:
        """Whether all `length` tokens attend to each other, because the sequence is short."""
        short = self.dense_below is not None and length < self.dense_below
        return short or length <= self.k * self.block_size

    def scores(self, query: Tensor, key: Tensor, q_start: int = 0) -> Tensor:
        """Computes scores [B, Hkv, rows, blocks] of key blocks, for query and key [B, H, N, D]."""
        if self.block_scorer is not None:
            return self.block_scorer(query, key, q_start=q_start)
        if self.pooled is None or self.scorer != "pooled":
            return self._estimates(query, key, self.scorer, q_start)
        pooled_key, kv_len = self.pool(key, key), key.shape[2]
        options = {**self._row_options, "q_start": q_start}
        return pooled_scores(query, pooled_key, self.block_size, self.pooled, kv_len, **options)

    @property
    def _row_options(self) -> dict[str, Any]:
        return {"query_block": self.query_block, "causal": self.causal}

    @torch.no_grad()
    def _estimates(self, query: Tensor, key: Tensor, method: str, q_start: int = 0) -> Tensor:
        options = {**self._row_options, "q_start": q_start}
        return block_scores(query, key, self.block_size, method=method, **options)

    def pool(self, key: Tensor, x: Tensor) -> Tensor:
        """Averages keys or values x by window: [B, Hkv, windows, D]; `key` decides the weights."""
        assert self.pooled is not None and self.pool_gate is not None
        gate = (key * self.pool_gate[:, None]).sum(3)
        return gated_pool(gate, x, *self.pooled)

    def _select(self, scores: Tensor, q_start: int = 0) -> Tensor:
        options = {"q_start": q_start, "block_size": self.block_size, **self._row_options}
        return select_blocks(scores, self.k, sink=self.sink, local=self.local, **options)

    def _attend_selected(
        self, query: Tensor, key: Tensor, value: Tensor, start: int, with_loss: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Attends to chosen blocks: output [B, H, n, D], and the scorer's loss or None."""
        with torch.set_grad_enabled(torch.is_grad_enabled() and with_loss):
            scores = self.scores(query, key, start)
        indices = self._select(scores, start)
        owned: Any = Owned(indices)
        first = start // self.query_block
        pattern: Mask = SelectedBlocks(owned, self.block_size, self.query_block, first)
        if self.causal:
            pattern = pattern & Causal()
        out, lse = attention(query, key, value, pattern, return_lse=True, q_start=start)
        if not with_loss:
            return out, None
        return out, selection_loss(scores, block_mass(query, key, pattern, lse), indices)

    def _gated_sum(self, x: Tensor, branches: list[Tensor]) -> Tensor:
        """Sums the branches' outputs [B, H, N, D], each times a gate computed from x."""
        if self.gate_proj is None:
            return branches[0]
        gates = self.gate_proj(x).unflatten(2, (self.num_heads, -1)).transpose(1, 2)
        start: Any = 0
        if self.gate == "sigmoid":
            gates = gates.sigmoid()
        else:  # "zero": chosen blocks, the first branch, have no gate
            start, *branches = branches
        pairs = zip(gates.unbind(-1), branches, strict=True)  # each gate is [B, H, N]
        return sum((gate[..., None] * out for gate, out in pairs), start)


def _checked_pooling(pooled: Sequence[int]) -> tuple[int, int]:
    """Returns (window size, stride) of pooling; ValueError unless 1 <= stride <= size."""
    if not isinstance(pooled, Sequence) or len(pooled) != 2:
        raise ValueError(
            f"pooled must be (size, stride) in tokens, got {shortened(repr(pooled))}; NSA has "
            "(32, 16)"
        )
    size = checked_integer("pooled size", pooled[0], 1)
    return size, checked_integer("pooled stride", pooled[1], 1, size)
