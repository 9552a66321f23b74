"""`selection_report`: how much of dense attention a selection keeps, beside others of its size."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from ..checks import check_inputs, refuse_meta
from ..functional import attention
from ..numerics import sum_dtype, without_autocast
from ..patterns.algebra import And, Frame, Pattern, check_fits
from ..patterns.arguments import checked_integer, shortened
from ..patterns.positions import Causal
from ..patterns.selected import SelectedBlocks
from .rows import num_rows

_AT_A_TIME = 1 << 23  # logits
_RISK = 1e-3  # of a mean outside its interval


@dataclass(frozen=True, eq=False)
class Captured:
    """Of queries, the share of dense attention's softmax that falls on what they see.

    Attributes:
        mean, p05, least: [Hkv] over queries and the query heads of a kv head; sums are rounded, so
            that a share may be above 1 by as much.
        interval: [Hkv] half the width around `mean` in which that of all rows lies with probability
            0.999 (Hoeffding and Serfling's inequality); 0 where no rows were drawn.
    """

    mean: Tensor
    p05: Tensor
    least: Tensor
    interval: Tensor


@dataclass(frozen=True, eq=False)
class SelectionReport:
    """What a selection keeps of dense attention; tensors are [Hkv].

    Attributes:
        density: pairs over visible pairs.
        captured: shares of the softmax, `exp(lse_selected - lse_full)`.
        error: of the output, `|o_selected - o_full| / |o_full|` over all queries.
        recall: share of the blocks of largest exact mass that are selected, as many of them as the
            row lists; mean of rows.
        inflation: blocks that as many neighbouring queries as a block has keys list together, over
            those that one row lists; NaN for the others where rows were drawn.
        rows: rows that were looked at.
        random, window, oracle: the same for as many blocks a row: the row's own and random others;
            the last ones; those of largest exact mass. None in those.
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
        """A line for each selection, means over kv heads; shares clamped to 1."""
        titles = ("", "density", "captured", "p05", "least", "error", "recall", "inflation")
        lines = ["".join(f"{title:>10}" for title in titles)]
        for name in ("selected", "random", "window", "oracle"):
            report = self if name == "selected" else getattr(self, name)
            if report is not None:
                captured = report.captured
                shares = (captured.mean, captured.p05, captured.least)
                numbers = [report.density, *(x.clamp(max=1.0) for x in shares), report.error]
                numbers += [report.recall, report.inflation]
                told = "".join(f"{float(x.mean()):>10.3f}" for x in numbers)
                lines.append(f"{name:>10}{told}")
        wide = float(self.captured.interval.max())
        lines.append(f"{self.rows} rows; captured +- {wide:.3f} (probability 0.999)")
        lines.append(
            "note: a model trained with sparse attention from the start may capture little of its "
            "own dense softmax, and lose nothing by it"
        )
        return "\n".join(lines)


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
    """Compares a selection with dense attention, and with others of the same size.

    The captured mass bounds the error: `o_full - o_selected = (1 - c) (o_rest - o_selected)`.

    Args:
        query: [B, Hq, Nq, D], the last of them aligned with the last key.
        key: [B, Hkv, Nk, D].
        value: [B, Hkv, Nk, Dv].
        pattern: `SelectedBlocks`, or that `& Causal()`; dense attention is then causal too.
        rows: how many rows of the selection are looked at, drawn without replacement; None: all,
            exactly.
        seed: of drawn rows, and of the random selection; the same wherever it is run.

    Returns: `SelectionReport`; `print` shows it as a table.

    Raises: ValueError for other patterns (what is merged with a selection is not a part of it), or
        where arguments do not fit.

    Cost: O(n Nk) time for n queries of the rows, streamed; memory O(B Hq R Nb / query_block + N),
        and it waits for the device: to look at, not to train by.

    Example:
        >>> print(selection_report(query, key, value, chosen & Causal(), rows=64))

    Source: SSA (arXiv 2511.20102) for the note that is printed.
    """
    check_inputs(query, key, value, pattern)
    refuse_meta(query, key, value)
    selected, causal = _selection(pattern)
    first = (start := key.shape[2] - query.shape[2]) // selected.row_size
    total = num_rows(start, query.shape[2], selected.row_size)
    if min(query.numel(), key.numel()) == 0 or start < 0:
        raise ValueError(
            "selection_report needs queries that are the last of its keys, got query "
            f"{tuple(query.shape)} and key {tuple(key.shape)}; give both"
        )
    check_fits(pattern, Frame(query.shape[2], key.shape[2], query.shape[1], key.shape[1], start))
    seed = checked_integer("seed", seed, -(1 << 63), (1 << 63) - 1)
    drawn = torch.arange(total)
    if rows is not None:
        rows = checked_integer("rows", rows, 1)
        order = torch.randperm(total, generator=torch.Generator().manual_seed(seed))
        drawn = order[:rows].sort().values
    with without_autocast(query):
        looked = _Looked(query, key, value, selected, causal, drawn, first)
        listed = looked.listed()
        count = listed.sum(-1, keepdim=True)
        of_rank, whole = looked.ranks(seed), len(drawn) == total
        others = {name: looked.report(rank < count, None, whole) for name, rank in of_rank.items()}
        return looked.report(listed, others, True)


def _selection(pattern: Pattern) -> tuple[SelectedBlocks, bool]:
    masks = pattern.masks if isinstance(pattern, And) else (pattern,)
    selections = [mask for mask in masks if isinstance(mask, SelectedBlocks)]
    causal = any(isinstance(mask, Causal) for mask in masks)
    if len(selections) != 1 or len(masks) != 1 + causal:
        raise ValueError(
            "selection_report needs SelectedBlocks(...), or that & Causal(), got "
            f"{shortened(str(pattern))}; select_blocks(local=...) lists a window as blocks"
        )
    return selections[0], causal


class _Looked:
    """Some rows of a selection, and what dense attention gives their queries.

    Attributes:
        place: [n] indices of their queries; `row` [n]: of each, the number of its row among them.
        lse, out: of dense attention, [B, Hq, n] and [B, Hq, n, Dv].
        mass: [B, H, rows, Nb] exact shares of blocks, summed over a row's queries and the query
            heads that share its list.
    """

    def __init__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        selected: SelectedBlocks,
        causal: bool,
        drawn: Tensor,
        first_row: int,
    ) -> None:
        self.query, self.key, self.value = query, key, value
        self.selected, self.causal, self.first_row = selected, causal, first_row
        self.drawn = drawn.to(query.device)
        start, size = key.shape[2] - query.shape[2], selected.row_size
        position = start + torch.arange(query.shape[2], device=query.device)
        local = torch.searchsorted(self.drawn, position // size - first_row)
        local = local.clamp(max=len(drawn) - 1)
        self.place = torch.nonzero(self.drawn[local] == position // size - first_row)[:, 0]
        self.row, self.position = local[self.place], position[self.place]
        heads = selected.indices.shape[-3] if selected.indices.dim() > 2 else 1
        self.heads = max(heads, key.shape[1])  # lists: of query heads, or of kv heads
        self.blocks = -(-key.shape[2] // selected.block_size)
        block = torch.arange(self.blocks, device=query.device) * selected.block_size
        seen = self.position[:, None] + 1 if causal else torch.full_like(block[:1], key.shape[2])
        keys = (seen.clamp(max=key.shape[2]) - block).clamp(0, selected.block_size).double()
        keys = keys.expand(len(self.place), -1)
        # [rows, Nb] visible keys of a block, summed over a row's queries
        self.visible = keys.new_zeros(len(drawn), self.blocks).index_add(0, self.row, keys)
        self._attend()

    def _attend(self) -> None:
        """Dense attention, some queries at a time."""
        dtype, size = sum_dtype(self.query), self.selected.block_size
        batch, heads, _, dim = self.query.shape
        group, room = heads // self.key.shape[1], -self.key.shape[2] % size
        keys, values = (x.to(dtype).repeat_interleave(group, 1) for x in (self.key, self.value))
        key_place = torch.arange(keys.shape[2] + room, device=keys.device)
        step = max(1, _AT_A_TIME // (batch * heads * len(key_place)))
        self.mass = keys.new_zeros(batch, self.heads, len(self.drawn), self.blocks)
        lses, outs = [], []
        for first in range(0, len(self.place), step):
            some = slice(first, first + step)
            query = self.query[:, :, self.place[some]].to(dtype)
            logits = torch.nn.functional.pad(dim**-0.5 * query @ keys.mT, (0, room))
            hidden = key_place >= keys.shape[2]
            if self.causal:
                hidden = hidden | (key_place > self.position[some][:, None])
            logits = logits.masked_fill(hidden, -torch.inf)
            lse = logits.logsumexp(-1)
            share = (logits - lse[..., None]).exp()
            outs.append(share[..., : keys.shape[2]] @ values)
            lses.append(lse)
            share = share.unflatten(-1, (self.blocks, size)).sum(-1)
            share = share.unflatten(1, (self.heads, -1)).sum(2)
            self.mass.index_add_(2, self.row[some], share)
        self.lse, self.out = torch.cat(lses, 2), torch.cat(outs, 2)

    def listed(self) -> Tensor:
        """[B, H, rows, Nb] which visible blocks the selection lists."""
        indices = self.selected.indices.to(self.query.device)
        indices = indices.view((1,) * (4 - indices.dim()) + indices.shape)
        indices = indices[:, :, self.drawn + self.first_row - self.selected.first_row]
        indices = indices.expand(len(self.query), self.heads, -1, -1)
        there = (indices >= 0) & (indices < self.blocks)
        listed = torch.zeros(*self.mass.shape[:3], self.blocks + 1, dtype=torch.bool)
        listed = listed.to(indices.device)
        listed.scatter_(3, torch.where(there, indices, self.blocks), True)
        return listed[..., : self.blocks] & (self.visible > 0)

    def ranks(self, seed: int) -> dict[str, Tensor]:
        """[B, H, rows, Nb] the place of each block in the order of the other selections."""
        block = torch.arange(self.blocks, device=self.query.device)
        size = self.selected.row_size
        own = (self.drawn + self.first_row) * size // self.selected.block_size
        generator = torch.Generator().manual_seed(seed)
        noise = torch.rand(self.mass.shape, generator=generator, dtype=torch.float64)
        noise = torch.where(block == own[:, None], 2.0, noise.to(self.query.device))
        latest = torch.where(block <= own[:, None], block, -1 - block).double()
        wanted = {"random": noise, "window": latest.expand_as(noise), "oracle": self.mass.double()}
        found = {}
        for name, score in wanted.items():
            score = torch.where(self.visible > 0, score, -torch.inf)
            found[name] = score.argsort(dim=-1, descending=True, stable=True).argsort(-1)
        return found

    def report(
        self, listed: Tensor, others: dict[str, SelectionReport] | None, whole: bool
    ) -> SelectionReport:
        """Of a selection that lists blocks [B, H, rows, Nb]."""
        kv_heads, group = self.key.shape[1], self.query.shape[1] // self.key.shape[1]
        out, lse = self._attended(listed)
        captured = (lse - self.lse).exp().unflatten(1, (kv_heads, group))  # [B, Hkv, G, n]
        apart, exact = (
            x.unflatten(1, (kv_heads, group)).double().square().sum((0, 2, 3, 4)).sqrt()
            for x in (out - self.out, self.out)
        )
        count = listed.sum(-1, keepdim=True)
        best = self.ranks(0)["oracle"] < count
        hits = (listed & best).sum(-1).double() / count[..., 0].clamp(min=1)
        hits = torch.where(count[..., 0] > 0, hits, torch.nan)
        density = (listed * self.visible).sum((0, 2, 3)) / self.visible.sum() / len(self.query)
        inflation = torch.full((kv_heads,), torch.nan, dtype=torch.float64)
        if whole:
            table = self.selected if others is not None else self._table(listed)
            tokens = self.selected.block_size
            inflation = table.inflation(tokens, self.key.shape[2]).double()
        return SelectionReport(
            density=self._of_kv_heads(density),
            captured=self._captured(captured),
            error=apart / exact.clamp(min=1e-300),
            recall=self._of_kv_heads(hits.nanmean((0, 2))),
            inflation=self._of_kv_heads(inflation).to(density.device),
            rows=len(self.drawn),
            **(others or {}),
        )

    def _table(self, listed: Tensor) -> SelectedBlocks:
        """A selection that lists the same in these rows, and nothing in others."""
        most = int(listed.sum(-1).max())
        order = listed.to(torch.int8).argsort(dim=-1, descending=True, stable=True)[..., :most]
        chosen = torch.where(listed.gather(-1, order), order, -1)
        start, size = self.key.shape[2] - self.query.shape[2], self.selected.row_size
        rows = num_rows(start, self.query.shape[2], size)
        table = chosen.new_full((*chosen.shape[:2], rows, most), -1)
        table[:, :, self.drawn] = chosen
        return SelectedBlocks(table, self.selected.block_size, size, self.first_row)

    def _attended(self, listed: Tensor) -> tuple[Tensor, Tensor]:
        """(out, lse) of the rows' queries, in the sums' dtype."""
        table = self._table(listed)
        pattern = table & Causal() if self.causal else table
        query, key, value = (x.to(self.out.dtype) for x in (self.query, self.key, self.value))
        out, lse = attention(query, key, value, pattern, return_lse=True)
        return out[:, :, self.place], lse[:, :, self.place]

    def _captured(self, share: Tensor) -> Captured:
        """Of shares [B, Hkv, G, n]."""
        each = share.double().transpose(0, 1).flatten(1).sort(-1).values  # [Hkv, B * G * n]
        drawn, start = len(self.drawn), self.key.shape[2] - self.query.shape[2]
        total = num_rows(start, self.query.shape[2], self.selected.row_size)
        rest = (1 - (drawn - 1) / total) * (drawn < total)
        half = math.sqrt(rest * math.log(2 / _RISK) / (2 * drawn))
        return Captured(
            mean=each.mean(-1),
            p05=each[:, int(0.05 * (each.shape[1] - 1))],
            least=each[:, 0],
            interval=torch.full_like(each[:, 0], half),
        )

    def _of_kv_heads(self, x: Tensor) -> Tensor:
        """[Hkv] the mean over the lists that a kv head's query heads have; of one list for all."""
        kv_heads = self.key.shape[1]
        return x.unflatten(0, (kv_heads, -1)).mean(-1) if len(x) > 1 else x.expand(kv_heads)
