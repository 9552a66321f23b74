"""Attention with the extras of a call, by their formulas, in dense float64.

Only patterns and `dropout_kept` come from the library. Each branch of a mixture has a table of its
own, since dropout treats branches separately.
"""

from typing import Any

import torch
from torch import Tensor

import sparsering as sr
from oracles.attention_oracle import Case, dense_attention

SEED = 11
ALL = "softcap distance_bias sink_of_rows dropout"  # for `extras_of`


def kept_by_formula(seed: int, p: float, batch: int, head: int, query: int, key: int, branch: int):
    """Whether dropout keeps a pair: the hash in Python's integers."""
    whole, word = 2**64 - 1, 2**32 - 1

    def signed_shift(x: int, bits: int) -> int:
        return (x - 2**64 if x >> 63 else x) >> bits & whole

    state = 0
    for part in (seed, batch):
        state = (part + state * 31 + 0x9E3779B9) & whole
        for multiplier, shift in ((0xBF58476D1CE4E5B9, 30), (0x94D049BB133111EB, 27)):
            state = (state ^ signed_shift(state, shift)) * multiplier & whole
        state = (state ^ signed_shift(state, 31)) & whole
    state &= 2**62 - 1

    def mixed(x: int) -> int:
        x = (x ^ x >> 16) * 0x21F0AAAD & word
        x = (x ^ x >> 15) * 0xD35A2D97 & word
        return x ^ x >> 15

    a, b = state & word, state >> 32
    for part in (head, branch, query):
        a = mixed(((a ^ part & word) + 0x9E3779B9) & word)
        b = mixed(((b ^ part & word) + 0x7F4A7C15) & word)
    x = key * 0x9E3779B1 & word ^ a
    x = (x ^ x >> 16) * 0x21F0AAAD & word
    x = ((x ^ x >> 15) + b) * 0xD35A2D97 & word
    return (x - 2**32 if x >> 31 else x) >= min(round(p * 2**32), word) - 2**31


def branches_of(pattern: sr.Pattern, batch: int, **heads: Any) -> Tensor:
    """Returns the pairs of each branch of a pattern, [branches, B, H, Nq, Nk]."""
    shape = (batch, heads["num_heads"], heads["q_len"], heads["kv_len"])
    return torch.stack([branch.to_dense(**heads).expand(shape) for branch in pattern.branches])


def attend_with_extras(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    branches: Tensor,
    *,
    q_start: int,
    scale: float | None = None,
    bias: Tensor | None = None,
    softcap: float | None = None,
    distance_bias: Tensor | None = None,
    sink: Tensor | None = None,
    dropout_p: float = 0.0,
    dropout_seed: int = 0,
) -> tuple[Tensor, Tensor]:
    """Computes (out, lse) in float64; `bias` [branches or 1, B, H, Nq, Nk] is the blocks' bias."""
    batch, heads, q_len, _ = query.shape
    count = len(branches)  # each of which is one copy of all keys
    p, j = torch.arange(q_start, q_start + q_len)[:, None], torch.arange(key.shape[2])
    of_pair = torch.zeros(branches.shape, dtype=torch.float64)
    if distance_bias is not None:
        table, radius = distance_bias.double(), distance_bias.shape[1] // 2
        rows = [row[(j - p).clamp(-radius, radius) + radius] for row in table]
        of_pair = of_pair + torch.stack(rows)
    if bias is not None:
        of_pair = of_pair + bias.double()
    factor = None
    if dropout_p:
        shape = torch.arange(count).view(-1, 1, 1, 1, 1)
        entry = torch.arange(batch).view(-1, 1, 1, 1)
        head = torch.arange(heads).view(-1, 1, 1)
        kept = sr.dropout_kept(dropout_seed, dropout_p, entry, head, p, j, shape)
        factor = beside(kept.double() / (1 - dropout_p))
    if sink is not None and sink.dim() == 1:
        sink = sink[None, :, None]
    return dense_attention(
        query.double(),
        *(torch.cat([x.double()] * count, 2) for x in (key, value)),
        beside(branches),
        scale=scale,
        softcap=softcap,
        bias=beside(of_pair),
        sink=sink,
        factor=factor,
    )


def beside(x: Tensor) -> Tensor:
    """Turns [branches, B, H, Nq, Nk] into [B, H, Nq, branches * Nk]."""
    return x.movedim(0, -2).flatten(-2)


def extras_of(case: Case, names: str, dtype: torch.dtype = torch.float64) -> dict[str, Any]:
    """Draws the arguments that `names` lists, as in "softcap sink"."""
    heads, made = case.num_heads, {}
    for name in names.split():
        if name == "softcap":
            made["softcap"] = 0.7
        elif name == "distance_bias":
            made["distance_bias"] = torch.randn(heads, 2 * 17 + 1, dtype=dtype)
        elif name == "far_distance_bias":
            made["distance_bias"] = torch.randn(1, 2 * 200 + 1, dtype=dtype)
        elif name == "sink":
            made["sink"] = torch.randn(heads, dtype=dtype)
        elif name == "sink_of_rows":
            made["sink"] = torch.randn(case.batch, heads, case.q_len, dtype=dtype)
        elif name == "sink_of_entries":
            made["sink"] = torch.randn(case.batch, heads, 1, dtype=dtype)
        else:
            assert name == "dropout"
            made |= {"dropout_p": 0.3, "dropout_seed": SEED}
    return {k: x.requires_grad_() if isinstance(x, Tensor) else x for k, x in made.items()}


def expected_of(pattern, case: Case, x: tuple[Tensor, ...], options: dict[str, Any], **more: Any):
    """Computes (out, lse) of a call by the formulas of its options."""
    heads = {**case.heads, "q_start": case.kv_len - case.q_len}
    branches = branches_of(pattern, case.batch, **heads)
    return attend_with_extras(*x, branches, q_start=heads["q_start"], **options, **more)
