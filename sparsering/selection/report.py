"""`selection_report`: how much of dense attention a selection keeps, compared with baselines."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..checks import check_inputs, refuse_meta
from ..functional import attention
from ..ground.arguments import checked_integer, shortened
from ..ground.keywords import class_with_hints, with_hints
from ..ground.numerics import long_sum_dtype, sum_dtype, without_autocast
from ..patterns.algebra import And, Frame, Pattern, check_fits
from ..patterns.positions import Causal
from ..patterns.selected import SelectedBlocks
from .loss import listed_blocks
from .query_rows import num_rows

_AT_A_TIME = 1 << 23  # logits computed at a time, to bound memory
_RISK = 1e-3  # probability that the mean of all rows lies outside `Captured.interval`
_BASELINES = ("random", "window", "oracle")


@dataclass(frozen=True, eq=False)
class Captured:
    """Share of a query's dense softmax that falls on the keys that the selection keeps.

    Attributes:
        mean, p05, least: [Hkv] mean, 5% quantile and minimum over queries and the query heads of a
            kv head. Rounding may make a share slightly larger than 1.
        interval: [Hkv] half width of the interval around `mean` that contains the mean over all
            rows with probability 0.999 (Hoeffding and Serfling); 0 if all were examined.
    """

    mean: Tensor
    p05: Tensor
    least: Tensor
    interval: Tensor


@class_with_hints
@dataclass(frozen=True, eq=False)
class SelectionReport:
    """Measures how much of dense attention a selection keeps; tensors are [Hkv].

    Attributes:
        density: selected pairs / visible pairs.
        captured: shares of the softmax, `exp(lse_selected - lse_full)`.
        error: error of the output, `|o_selected - o_full| / |o_full|` over all queries.
        recall: for a row (group of queries) that lists n blocks, how many of the n blocks of
            largest exact mass it lists, divided by n; mean over rows.
        inflation: number of distinct blocks that block_size neighbouring queries list together,
            divided by the mean number of a row; NaN in baselines unless all rows were examined.
        rows: number of rows that were examined.
        random, window, oracle: reports on baselines that list as many blocks in each row as the
            selection; None in the report on a baseline. random: the block at the row's position
            and random blocks; window: the latest blocks; oracle: the blocks of largest exact mass.
    """

    density: Tensor
    captured: Captured
    error: Tensor
    recall: Tensor
    inflation: Tensor
    rows: int
    random: "SelectionReport | None" = None
    window: "SelectionReport | None" = None
    oracle: "SelectionReport | None" = None

    def __str__(self) -> str:
        """Formats a table of means over kv heads, one line for each report; clips shares to 1."""
        titles = ("", "density", "captured", "p05", "least", "error", "recall", "inflation")
        lines = ["".join(f"{title:>10}" for title in titles)]
        names, reports = ("selected", *_BASELINES), (self, self.random, self.window, self.oracle)
        for name, x in zip(names, reports, strict=True):
            if x is not None:
                shares = (x.captured.mean, x.captured.p05, x.captured.least)
                clipped = (y.clamp(max=1.0) for y in shares)
                numbers = x.density, *clipped, x.error, x.recall, x.inflation
                lines.append(f"{name:>10}" + "".join(f"{float(y.mean()):>10.3f}" for y in numbers))
        half = float(self.captured.interval.max())
        lines.append(f"{self.rows} rows; captured +- {half:.3f} (probability 0.999)")
        lines.append(
            "note: a model trained with sparse attention from the start may capture little of its "
            "own dense softmax, and lose nothing by it"
        )
        return "\n".join(lines)


@with_hints()
@torch.no_grad()
def selection_report(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    pattern: Pattern,
    *,
    rows: int | None = None,
    seed: int = 0,
) -> SelectionReport:
    """Compares a selection with dense attention, and with baselines of the same size.

    For a query of captured share c, `o_full - o_selected = (1 - c) (o_rest - o_selected)`; o_rest
    is attention to the keys that the selection leaves out.

    Args:
        query: [B, Hq, Nq, D], the last query aligned with the last key.
        key: [B, Hkv, Nk, D].
        value: [B, Hkv, Nk, Dv].
        pattern: `SelectedBlocks(...)`, or with `& Causal()`, then for causal dense attention.
        rows: number of rows of the selection to examine, drawn at random; None examines all rows.
        seed: seed of the drawn rows and of the random baseline; the draw is equal on all devices.

    Returns: `SelectionReport`; `print` shows it as a table.

    Raises: ValueError for another pattern (such as one with a window) or an invalid argument.

    Cost: O(n Nk) time for the n queries of the examined rows; memory O(N + B Hq R Nb).
        It waits for the device: use it for inspection, not in training steps.

    Example:
        >>> print(selection_report(query, key, value, chosen & Causal(), rows=64))

    Source: SSA (arXiv 2511.20102) for the note below the printed table.
    """
    check_inputs(query, key, value, pattern)
    refuse_meta(query, key, value)
    if long_sum_dtype(query.device) != torch.float64:
        message = f"selection_report sums in float64, which {query.device} may not have"
        raise NotImplementedError(f"{message}: move the tensors to the CPU")
    masks = pattern.masks if isinstance(pattern, And) else (pattern,)
    selections = [mask for mask in masks if isinstance(mask, SelectedBlocks)]
    causal = any(isinstance(mask, Causal) for mask in masks)
    if len(selections) != 1 or len(masks) != 1 + causal:
        raise ValueError(
            "selection_report needs SelectedBlocks(...) or SelectedBlocks(...) & Causal(), got "
            f"{shortened(str(pattern))}; select a window's blocks by select_blocks(local=...)"
        )
    start = key.shape[2] - query.shape[2]
    if min(query.numel(), key.numel()) == 0 or start < 0:
        raise ValueError(
            "selection_report needs tokens, and at most as many queries as keys, got query "
            f"{tuple(query.shape)} and key {tuple(key.shape)}; pass the keys of all tokens"
        )
    check_fits(
        pattern,
        Frame(
            q_len=query.shape[2],
            kv_len=key.shape[2],
            num_heads=query.shape[1],
            num_kv_heads=key.shape[1],
            q_start=start,
        ),
    )
    seed = checked_integer("seed", seed, -(1 << 63), (1 << 63) - 1)
    total = num_rows(start, query.shape[2], selections[0].row_size)
    sample = torch.arange(total)
    if rows is not None:
        rows = checked_integer("rows", rows, 1)
        order = torch.randperm(total, generator=torch.Generator().manual_seed(seed))
        sample = order[:rows].sort().values
    with without_autocast(query):
        comparison = _Comparison(query, key, value, selections[0], causal, sample, total)
        listed = comparison.listed()
        count = listed.sum(-1, keepdim=True)
        ranks = comparison.ranks(seed).items()
        baselines = {name: comparison.report(rank < count) for name, rank in ranks}
        return comparison.report(listed, baselines)


class _Comparison:
    """Dense attention of the examined rows, computed once, and the selections compared with it."""

    def __init__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        selected: SelectedBlocks,
        causal: bool,
        sample: Tensor,  # [rows] indices of the examined rows, ascending
        total: int,  # number of all rows
    ) -> None:
        self.query, self.key, self.value = query, key, value
        self.selected, self.causal, self.total = selected, causal, total
        self.sample = sample.to(query.device)
        size, start = selected.row_size, key.shape[2] - query.shape[2]
        self.first_row = start // size  # rows count from position 0; the first query is in this one
        position = start + torch.arange(query.shape[2], device=query.device)
        row = position // size - self.first_row
        # For the n queries in examined rows: index, position, and row (as an index in `sample`).
        self.query_index = torch.nonzero(torch.isin(row, self.sample))[:, 0]  # [n]
        self.position = position[self.query_index]
        self.row = torch.searchsorted(self.sample, row[self.query_index])  # [n]
        heads = selected.indices.shape[-3] if selected.indices.dim() > 2 else 1
        self.heads = max(heads, key.shape[1])  # heads that choose blocks separately, H
        self.blocks = -(-key.shape[2] // selected.block_size)
        block = torch.arange(self.blocks, device=query.device) * selected.block_size
        stop = self.position[:, None] + 1 if causal else torch.full_like(block[:1], key.shape[2])
        keys = (stop.clamp(max=key.shape[2]) - block).clamp(0, selected.block_size).double()
        keys = keys.expand(len(self.position), -1)
        # [rows, Nb] number of visible pairs of each row and block
        self.visible = keys.new_zeros(len(sample), self.blocks).index_add(0, self.row, keys)
        self._attend()

    def _attend(self) -> None:
        """Computes dense lse [B, Hq, n], out [B, Hq, n, Dv] and block masses [B, H, rows, Nb]."""
        dtype, size = sum_dtype(self.query), self.selected.block_size
        batch, heads, _, dim = self.query.shape
        group, kv_len = heads // self.key.shape[1], self.key.shape[2]
        keys, values = (x.to(dtype).repeat_interleave(group, 1) for x in (self.key, self.value))
        padded_len = self.blocks * size
        key_position = torch.arange(padded_len, device=keys.device)
        step = max(1, _AT_A_TIME // (batch * heads * padded_len))
        self.mass = keys.new_zeros(batch, self.heads, len(self.sample), self.blocks)
        lses, outs = [], []
        columns = self.query_index, self.position, self.row
        for index, position, row in zip(*(x.split(step) for x in columns), strict=True):
            query = self.query[:, :, index].to(dtype)
            logits = pad(dim**-0.5 * query @ keys.mT, (0, padded_len - kv_len))
            last = position[:, None].clamp(max=kv_len - 1) if self.causal else kv_len - 1
            logits = logits.masked_fill(key_position > last, -torch.inf)
            lse = logits.logsumexp(-1)
            share = (logits - lse[..., None]).exp()
            outs.append(share[..., :kv_len] @ values)
            lses.append(lse)
            share = share.unflatten(-1, (self.blocks, size)).sum(-1)
            self.mass.index_add_(2, row, share.unflatten(1, (self.heads, -1)).sum(2))
        self.lse, self.out = torch.cat(lses, 2), torch.cat(outs, 2)

    def listed(self) -> Tensor:
        """Returns which visible blocks the selection lists: bool [B, H, rows, Nb]."""
        rows = self.sample + self.first_row - self.selected.first_row
        indices = self.selected.of_rows(rows).to(self.query.device)
        return listed_blocks(indices, self.blocks).expand_as(self.mass) & (self.visible > 0)

    def ranks(self, seed: int) -> dict[str, Tensor]:
        """Ranks the blocks for each baseline, [B, H, rows, Nb].

        A baseline takes the lowest ranks.
        """
        block = torch.arange(self.blocks, device=self.query.device)
        own = (self.sample + self.first_row) * self.selected.row_size // self.selected.block_size
        generator = torch.Generator().manual_seed(seed)
        noise = torch.rand(self.mass.shape, generator=generator, dtype=torch.float64)
        noise = torch.where(block == own[:, None], 2.0, noise.to(self.query.device))
        latest = torch.where(block <= own[:, None], block, -1 - block).double()
        scores = noise, latest.expand_as(noise), self.mass.double()
        return dict(zip(_BASELINES, map(self._rank, scores), strict=True))

    def _rank(self, score: Tensor) -> Tensor:
        """Ranks blocks by score, 0 for the highest; blocks that a row cannot see come last."""
        score = torch.where(self.visible > 0, score, -torch.inf)
        return score.argsort(dim=-1, descending=True, stable=True).argsort(-1)

    def report(
        self, listed: Tensor, baselines: dict[str, SelectionReport] | None = None
    ) -> SelectionReport:
        """Reports on a selection of the blocks that are marked in `listed` [B, H, rows, Nb]."""
        kv_heads = self.key.shape[1]
        # Examined rows list their marked blocks; all other rows list none, as -1.
        most = int(listed.sum(-1).max())
        order = listed.to(torch.int8).argsort(dim=-1, descending=True, stable=True)[..., :most]
        indices = order.new_full((*order.shape[:2], self.total, most), -1)
        indices[:, :, self.sample] = torch.where(listed.gather(-1, order), order, -1)
        sizes = self.selected.block_size, self.selected.row_size
        table = SelectedBlocks(indices, *sizes, self.first_row)
        pattern = table & Causal() if self.causal else table
        query, key, value = (x.to(self.out.dtype) for x in (self.query, self.key, self.value))
        out, lse = attention(query, key, value, pattern, return_lse=True)
        out, lse = out[:, :, self.query_index], lse[:, :, self.query_index]
        share = (lse - self.lse).exp().unflatten(1, (kv_heads, -1)).double()  # [B, Hkv, G, n]
        share = share.transpose(0, 1).flatten(1).sort(-1).values
        rows = len(self.sample)
        unseen = (1 - (rows - 1) / self.total) * (rows < self.total)
        half = math.sqrt(unseen * math.log(2 / _RISK) / (2 * rows))
        least, p05 = share[:, 0], share[:, int(0.05 * (share.shape[1] - 1))]
        captured = Captured(share.mean(-1), p05, least, interval=torch.full_like(least, half))
        of_heads = (x.unflatten(1, (kv_heads, -1)) for x in (out - self.out, self.out))
        difference, norm = (x.double().square().sum((0, 2, 3, 4)).sqrt() for x in of_heads)
        count = listed.sum(-1, keepdim=True)
        best = self._rank(self.mass.double()) < count
        hits = (listed & best).sum(-1).double() / count[..., 0].clamp(min=1)
        hits = torch.where(count[..., 0] > 0, hits, torch.nan)
        density = (listed * self.visible).sum((0, 2, 3)) / self.visible.sum() / len(self.query)
        inflation = torch.full((kv_heads,), torch.nan, dtype=torch.float64)
        if baselines or rows == self.total:
            table = self.selected if baselines else table
            inflation = table.inflation(table.block_size, key.shape[2]).double()
        return SelectionReport(
            density=self._of_kv_heads(density),
            captured=captured,
            error=difference / norm.clamp(min=1e-300),
            recall=self._of_kv_heads(hits.nanmean((0, 2))),
            inflation=self._of_kv_heads(inflation).to(density.device),
            rows=rows,
            **(baselines or {}),
        )

    def _of_kv_heads(self, x: Tensor) -> Tensor:
        """Averages x [H] over the heads of each kv head: [Hkv]. H may be 1 or a multiple of Hkv."""
        kv_heads = self.key.shape[1]
        return x.unflatten(0, (kv_heads, -1)).mean(-1) if len(x) > 1 else x.expand(kv_heads)
