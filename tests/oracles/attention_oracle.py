"""Attention by definition, one query at a time; cases, inputs and patterns for operator tests.

`attend_by_rows` repeats each key as often as the pattern counts it and takes one softmax over that
list: no mask, no log of a count, no -inf. It shares no code with the library. `PATTERNS` has every
pattern of the contract, and expressions of them, as functions of a `Case`.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

import sparsering as sr

if TYPE_CHECKING:  # `strategies` needs hypothesis, which a GPU machine may not have
    from oracles.strategies import Scene


@dataclass(frozen=True)
class Case:
    """Shapes of one call; `arrange` names the memory layout of the inputs."""

    batch: int = 2
    num_heads: int = 2
    num_kv_heads: int = 2
    q_len: int = 75
    kv_len: int = 75
    head_dim: int = 16
    value_dim: int = 16
    block_size: int | None = 16
    q_start: int | None = None
    arrange: str = "contiguous"

    @classmethod
    def of(cls, scene: "Scene", head_dim: int, value_dim: int, block_size: int | None) -> "Case":
        """Builds a case from a drawn scene and widths."""
        sizes = scene.batch, scene.num_heads, scene.num_kv_heads, scene.q_len, scene.kv_len
        return cls(*sizes, head_dim, value_dim, block_size, scene.q_start)

    @property
    def heads(self) -> dict[str, Any]:
        """Keyword arguments of `to_dense` and `layout`."""
        return {
            "q_len": self.q_len,
            "kv_len": self.kv_len,
            "num_heads": self.num_heads,
            "num_kv_heads": self.num_kv_heads,
            "q_start": self.q_start,
        }

    @property
    def last_position(self) -> int:
        start = self.kv_len - self.q_len if self.q_start is None else self.q_start
        return max(start + self.q_len, self.kv_len) - 1


def attend_by_rows(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    counts: Tensor,
    scale: float | None = None,
    bias: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Computes (out, lse) of softmax attention over each query's multiset of keys; differentiable.

    `counts` and `bias` (per pair, optional) broadcast to [B, Hq, Nq, Nk].
    """
    batch, heads, q_len, width = query.shape
    group = heads // key.shape[1]
    scale = width**-0.5 if scale is None else scale
    counts = counts.expand(batch, heads, q_len, key.shape[2]).long()
    outs, lses = [], []
    for b in range(batch):
        for h in range(heads):
            for i in range(q_len):
                keys = torch.arange(key.shape[2]).repeat_interleave(counts[b, h, i])
                if not len(keys):
                    outs.append(value.new_zeros(value.shape[3]))
                    lses.append(query.new_full((), -torch.inf))
                    continue
                score = scale * (key[b, h // group, keys] * query[b, h, i]).sum(-1)
                if bias is not None:
                    score = score + bias.expand(counts.shape)[b, h, i, keys]
                outs.append(score.softmax(0) @ value[b, h // group, keys])
                lses.append(score.logsumexp(0))
    of_all = 0 * (query.sum() + key.sum() + value.sum())  # gives zero gradients if no row has keys
    out = torch.stack(outs).view(batch, heads, q_len, -1) + of_all
    return out, torch.stack(lses).view(batch, heads, q_len) + of_all


def dense_counts(pattern: sr.Pattern, case: Case) -> Tensor:
    """Returns the pattern's counts, int64 [B, Hq, Nq, Nk]."""
    dense = pattern.to_dense(**case.heads).long()
    dense = dense if dense.dim() == 4 else dense[None]
    return dense.expand(case.batch, case.num_heads, case.q_len, case.kv_len)


def eager_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    counts: Tensor,
    scale: float | None = None,
    bias: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Plain dense attention: scores, softmax and matmul in the inputs' dtype."""
    group = query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(group, 1) for x in (key, value))
    scale = query.shape[3] ** -0.5 if scale is None else scale
    log_counts = counts.to(query.dtype).log()
    score = query @ key.mT * scale + (0 if bias is None else bias.to(query.dtype))
    score = score + log_counts
    empty = (log_counts == -torch.inf).all(-1, keepdim=True)
    weights = torch.where(empty, 0.0, score.masked_fill(empty, 0.0).softmax(-1))
    lse = torch.where(empty[..., 0], -torch.inf, score.masked_fill(empty, 0.0).logsumexp(-1))
    return weights @ value, lse


def arranged(shape: tuple[int, int, int, int], arrange: str, dtype: torch.dtype) -> Tensor:
    """Draws random numbers of a [B, H, N, D] shape with the memory layout `arrange`."""
    batch, heads, tokens, width = shape
    if arrange == "tokens before heads":  # the layout of a projection's output
        return torch.randn(batch, tokens, heads, width, dtype=dtype).transpose(1, 2)
    if arrange == "one head expanded":
        return torch.randn(batch, 1, tokens, width, dtype=dtype).expand(shape)
    if arrange == "every other of a larger tensor":
        wide = torch.randn(batch, heads, 2 * tokens + 1, 3 * width + 2, dtype=dtype)
        return wide[:, :, 1 : 2 * tokens + 1 : 2, 1 : 3 * width + 1 : 3]
    if arrange == "width before tokens":
        return torch.randn(batch, heads, width, tokens, dtype=dtype).mT
    if arrange == "from an odd address":
        return torch.randn(1 + batch * heads * tokens * width, dtype=dtype)[1:].view(shape)
    assert arrange == "contiguous"
    return torch.randn(shape, dtype=dtype)


def inputs(
    case: Case, dtype: torch.dtype = torch.float64, requires_grad: bool = True
) -> tuple[Tensor, Tensor, Tensor]:
    """Draws query, key and value: leaves of the autograd graph, with the strides of the case."""
    shapes = (
        (case.batch, case.num_heads, case.q_len, case.head_dim),
        (case.batch, case.num_kv_heads, case.kv_len, case.head_dim),
        (case.batch, case.num_kv_heads, case.kv_len, case.value_dim),
    )
    query_arrange = "contiguous" if case.arrange == "one head expanded" else case.arrange
    arranges = (query_arrange, case.arrange, case.arrange)
    drawn = (arranged(s, a, dtype) for s, a in zip(shapes, arranges, strict=True))
    query, key, value = (x.requires_grad_(requires_grad) for x in drawn)
    return query, key, value


def gradients(results: Sequence[Tensor], wrt: Sequence[Tensor], seed: int = 1) -> list[Tensor]:
    """Gradients of `wrt` for random gradients of every result, including lse of empty rows."""
    generator = torch.Generator().manual_seed(seed)
    grads = [torch.randn(x.shape, generator=generator, dtype=torch.float64) for x in results]
    grads = [grad.to(x.dtype) for grad, x in zip(grads, results, strict=True)]
    options = {"retain_graph": True, "materialize_grads": True}
    return list(torch.autograd.grad(list(results), list(wrt), grads, **options))


def assert_close(got: Tensor, expected: Tensor, tolerance: float, what: str = "") -> None:
    """Asserts equal shape, dtype and infinities, no NaN, and a bounded largest error.

    The error is relative to the largest expected number if that is above 1.
    """
    assert got.shape == expected.shape, f"{what}: shape {got.shape}, expected {expected.shape}"
    assert got.dtype == expected.dtype, f"{what}: {got.dtype}, expected {expected.dtype}"
    assert not got.isnan().any(), f"{what}: NaN"
    infinite = expected.isinf()
    assert torch.equal(got[infinite], expected[infinite]), f"{what}: infinities differ"
    assert not (got.isinf() & ~infinite).any(), f"{what}: infinite where {what} should not be"
    if infinite.all():
        return
    largest = expected[~infinite].abs().max().clamp(min=1.0)
    error = ((got - expected)[~infinite].abs().max() / largest).item()
    assert error <= tolerance, f"{what}: error {error:.3g}, bound {tolerance:.3g}"


def assert_same_attention(
    got: Iterable[Tensor],
    expected: Iterable[Tensor],
    wrt: Sequence[Tensor],
    wrt_expected: Sequence[Tensor] | None = None,
    forward: float = 1e-12,
    backward: float = 1e-10,
) -> None:
    """Asserts that (out, lse) agree, and the gradients through both of them."""
    got, expected = list(got), list(expected)
    for name, a, b in zip(("out", "lse"), got, expected, strict=True):
        assert_close(a.detach(), b.detach(), forward, name)
    grads = gradients(got, wrt)
    grads_expected = gradients(expected, wrt if wrt_expected is None else wrt_expected)
    names = ["dquery", "dkey", "dvalue", *(f"gradient {i}" for i in range(3, len(wrt)))]
    for name, a, b in zip(names[: len(wrt)], grads, grads_expected, strict=True):
        assert_close(a, b, backward, name)


def errors(got: Tensor, exact: Tensor) -> tuple[float, float]:
    """(root mean square, largest) difference of the finite numbers; infinities must agree."""
    finite = exact.isfinite()
    assert torch.equal(got.isfinite(), finite), "not finite in the same places"
    difference = (got.double() - exact)[finite]
    if not difference.numel():
        return 0.0, 0.0
    return difference.square().mean().sqrt().item(), difference.abs().max().item()


@contextmanager
def workspace(limit: int) -> Iterator[None]:
    old = sr.set_workspace(limit)
    try:
        yield
    finally:
        sr.set_workspace(old)


def random_table(*shape: int) -> Tensor:
    """Draws bools; the first row is all False, and the second (if any) all True."""
    table = torch.rand(*shape, generator=torch.Generator().manual_seed(5)) < 0.4
    table[..., 0, :] = False
    table[..., 1:2, :] = True
    return table


def _parts(total: int) -> tuple[int, ...]:
    """Lengths of three documents and an empty one that sum to `total`."""
    first, second = total // 5, total // 2
    return (first, 0, second, total - first - second)


def _end(case: Case) -> int:
    """The position behind the last query and the last key."""
    return case.kv_len if case.q_start is None else max(case.kv_len, case.q_start + case.q_len)


def _per_head(case: Case) -> tuple[int, ...]:
    return tuple(3 * h + 1 for h in range(case.num_kv_heads))


def _of_heads(case: Case, *patterns: sr.Pattern) -> tuple[sr.Pattern, ...]:
    """Returns a pattern for each kv head, in turns; the first is `Full()`."""
    turns = sr.Full(), *patterns
    return tuple(turns[head % len(turns)] for head in range(case.num_kv_heads))


def _paddings(case: Case) -> tuple[int, ...]:
    return tuple(case.kv_len * (b + 1) // (case.batch + 1) for b in range(case.batch))


def _blocks(case: Case, *outer: int, block_size: int = 24) -> sr.Pattern:
    size = case.last_position // block_size + 1
    return sr.Blocks(random_table(*outer, size, size), block_size)


def _dense(case: Case, *outer: int) -> sr.Pattern:
    table = random_table(*outer, case.q_len, case.kv_len)
    table[..., -1:] = False  # a key that no query sees
    return sr.Dense(table)


def _grid(tokens: int) -> tuple[int, int]:
    rows = next((n for n in (5, 3, 2) if tokens % n == 0 and tokens >= 3 * n), 1)
    return rows, tokens // rows


PATTERNS: dict[str, Callable[[Case], sr.Pattern]] = {
    "full": lambda case: sr.Full(),
    "causal": lambda case: sr.Causal(),
    "window": lambda case: sr.SlidingWindow(9),
    "two-sided window": lambda case: sr.SlidingWindow(5, 19),
    "window without left end": lambda case: sr.SlidingWindow(None, 3),
    "dilated window": lambda case: sr.SlidingWindow(20, 20, 3),
    "global tokens": lambda case: sr.GlobalTokens(5),
    "global rows": lambda case: sr.GlobalTokens(20, columns=False),
    "global columns": lambda case: sr.GlobalTokens(20, rows=False),
    "dilated": lambda case: sr.Dilated(16, 4),
    "dilated, rate not dividing": lambda case: sr.Dilated(13, 3, "block"),
    "dilated, segment past the end": lambda case: sr.Dilated(1000, 7, 5),
    "dilated, offset of each head": lambda case: sr.Dilated(24, 4, _per_head(case)),
    "longnet": lambda case: sr.LongNet((8, 16, 64), (1, 2, 4)),
    "longnet, every rate above 1": lambda case: sr.LongNet((7, 30), (2, 3), "block"),
    "longnet, offset of each head": lambda case: sr.LongNet((11, 64), (2, 5), _per_head(case)),
    "block dilated": lambda case: sr.BlockDilated((1, 3), 16),
    "block window": lambda case: sr.BlockWindow(1, 24),
    "block causal": lambda case: sr.BlockCausal(24),
    "blocks of unlike sizes": lambda case: sr.BlockCausal(_parts(case.kv_len)),
    "block diffusion": lambda case: sr.BlockDiffusion(24 * -(-_end(case) // 48), 24),
    "neighbourhood": lambda case: sr.Neighbourhood((case.kv_len,), 1),
    "neighbourhood of a grid": lambda case: sr.Neighbourhood(_grid(case.kv_len), (0, 1)),
    "causal but for a window": lambda case: sr.Causal() - sr.SlidingWindow(9, 2),
    "random blocks": lambda case: sr.RandomBlocks(0.4, 16),
    "random blocks of one choice": lambda case: sr.RandomBlocks(0.2, 8, 3, per_head=False),
    "hierarchical": lambda case: sr.Hierarchical(((16, 32), (32, 64), (64, None)), 16),
    "documents": lambda case: sr.Documents(_parts(case.kv_len)),
    "packed": lambda case: sr.Packed(_parts(case.kv_len), sr.Dilated(8, 3) | sr.GlobalTokens(2)),
    "packed longnet": lambda case: sr.Packed(_parts(case.kv_len), sr.LongNet((8, 16), (1, 2))),
    "key padding": lambda case: sr.KeyPadding(_paddings(case)),
    "blocks": _blocks,
    "blocks of each head": lambda case: _blocks(case, case.num_heads),
    "blocks of each kv head": lambda case: _blocks(case, case.num_kv_heads, block_size=16),
    "blocks of each batch entry": lambda case: _blocks(case, case.batch, case.num_heads),
    "dense": _dense,
    "dense of each head": lambda case: _dense(case, case.num_heads),
    "intersection": lambda case: (
        sr.Causal() & (sr.SlidingWindow(9) | sr.GlobalTokens(4)) & sr.KeyPadding(_paddings(case))
    ),
    "union of steps": lambda case: sr.SlidingWindow(6) | sr.SlidingWindow(40, 40, 4),
    "mixture with overlap": lambda case: sr.Causal() + sr.SlidingWindow(6, 2) + sr.Full(),
    "branch twice": lambda case: sr.LongNet((16, 16, 32), (2, 2, 1)),
    "mixture under masks": lambda case: (
        sr.LongNet((8, 30), (1, 3)) & sr.Causal() & sr.KeyPadding(_paddings(case))
    ),
    "a pattern of each head": lambda case: sr.PerHead(_of_heads(case, sr.SlidingWindow(5, 2))),
    "a mixture of each head": lambda case: sr.PerHead(
        _of_heads(case, sr.Causal(), sr.LongNet((8, 30), (1, 3)), sr.SlidingWindow(20, 20, 3))
    ),
    "nothing": lambda case: sr.GlobalTokens(0),
}
