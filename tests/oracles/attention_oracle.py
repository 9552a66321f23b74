"""Attention by definition, one query at a time; cases, inputs and patterns for operator tests.

`attend_by_rows` repeats each key as often as the pattern counts it and takes one softmax over that
list: no mask, no log of a count, no -inf. `dense_attention` is the softmax over all pairs at once,
with all options of a call. Neither shares code with the library. `PATTERNS`
has the patterns of `kinds` as functions of a `Case`.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import sparsering as sr
from oracles.kinds import KINDS, Scene, lengths_and_heads


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
    def of(cls, scene: Scene, head_dim: int, value_dim: int, block_size: int | None) -> "Case":
        """Builds a case from a drawn scene and widths."""
        sizes = scene.batch, scene.num_heads, scene.num_kv_heads, scene.q_len, scene.kv_len
        return cls(*sizes, head_dim, value_dim, block_size, scene.q_start)

    @property
    def heads(self) -> dict[str, Any]:
        """Keyword arguments of `to_dense` and `layout`."""
        return lengths_and_heads(self)

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


def dense_scores(
    query: Tensor,
    key: Tensor,
    pairs: Tensor,
    *,
    scale: float | None = None,
    softcap: float | None = None,
    change: Callable[[Tensor], Tensor] | None = None,
    bias: Tensor | None = None,
) -> Tensor:
    """Computes the scores [.., Hq, Nq, Nk] of a softmax, -inf where there is no pair.

    Args:
        query: [B, Hq, Nq, D]; key: [B, Hkv, Nk, D]. Sums are in their dtype.
        pairs: bool, or counts of a mixture, broadcastable to the scores.
        change: maps all scaled scores, before the bias.
        bias: added to each pair, broadcastable to the scores.
    """
    key = key.repeat_interleave(query.shape[1] // key.shape[1], 1)
    scale = query.shape[3] ** -0.5 if scale is None else scale
    score = query @ key.mT * scale
    if softcap is not None:
        score = softcap * torch.tanh(score / softcap)
    if change is not None:
        score = change(score)
    if bias is not None:
        score = score + bias.to(query.dtype)
    if pairs.dtype != torch.bool:
        score = score + pairs.to(query.dtype).log()
    return score.masked_fill(pairs == 0, -torch.inf)


def dense_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    pairs: Tensor,
    *,
    sink: Tensor | None = None,
    factor: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor, Tensor]:
    """Computes (out, lse) of attention over a mask, all pairs at once; differentiable.

    Plain scores, softmax and matmul in the inputs' dtype; double them for an exact result.

    Args:
        value: [B, Hkv, Nk, Dv]; query, key, pairs and options as of `dense_scores`.
        sink: logits of a key whose value is 0, broadcastable to [B, Hq, Nq].
        factor: of each weight after the softmax, such as dropout's, broadcastable to the scores.
    """
    score = dense_scores(query, key, pairs, **options)
    if sink is not None:
        column = sink.to(score.dtype).expand(score.shape[:-1])
        score = torch.cat((score, column[..., None]), -1)
    empty = (score == -torch.inf).all(-1, keepdim=True)
    score = score.masked_fill(empty, 0.0)
    weights = torch.where(empty, 0.0, score.softmax(-1))[..., : key.shape[2]]
    lse = torch.where(empty[..., 0], -torch.inf, score.logsumexp(-1))
    if factor is not None:
        weights = weights * factor
    return weights @ value.repeat_interleave(query.shape[1] // value.shape[1], 1), lse


def dense_weights(query: Tensor, key: Tensor, pairs: Tensor, **options: Any) -> Tensor:
    """Computes the softmax weights [B, Hq, Nq, Nk], 0 in rows without pairs."""
    identity = torch.eye(key.shape[2], dtype=key.dtype).expand(*key.shape[:3], -1)
    return dense_attention(query, key, identity, pairs, **options)[0]


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


PATTERNS: dict[str, Callable[[Case], sr.Pattern]] = {
    name: make for kind in KINDS.values() for name, make in kind.cases.items()
} | {"nothing": lambda case: sr.GlobalTokens(0)}
