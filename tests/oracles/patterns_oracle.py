"""The meaning of every pattern in plain Python: one integer comparison at a time, no tensors.

`kinds` has the rules and the form of a spec. `build(spec)` calls the library; `counts(spec, ...)`
evaluates the rules for each (batch entry, head, query, key).
"""

from typing import Any

import torch
from torch import Tensor

import sparsering as sr
from oracles.kinds import KINDS, OPERATORS, Place, Spec, pair_count, parts_of, with_parts


def counts(
    spec: Spec,
    q_len: int,
    kv_len: int | None = None,
    *,
    num_heads: int = 1,
    num_kv_heads: int | None = None,
    q_start: int | None = None,
    batch: int = 1,
) -> Tensor:
    """Computes int64 counts [batch, num_heads, q_len, kv_len] of the spec, pair by pair."""
    kv_len = q_len if kv_len is None else kv_len
    num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
    q_start = kv_len - q_len if q_start is None else q_start
    out = torch.zeros(batch, num_heads, q_len, kv_len, dtype=torch.int64)
    for b in range(batch):
        for h in range(num_heads):
            rows = []
            for i in range(q_len):
                at = Place(i, b, h, num_heads, num_kv_heads, kv_len)
                rows.append([pair_count(spec, at, q_start + i, k) for k in range(kv_len)])
            if q_len:
                out[b, h] = torch.tensor(rows, dtype=torch.int64).view(q_len, kv_len)
    return out


def leaves(spec: Spec) -> list[Spec]:
    """Returns the constructor calls of a spec, with those inside `Packed`, `Tree`, `PerHead`."""
    inside = [leaf for part in parts_of(spec) for leaf in leaves(part)]
    return inside if spec[0] in OPERATORS else [spec, *inside]


def is_mixture(spec: Spec) -> bool:
    """Whether the spec has the form of a mixture, even if all its counts are 0 or 1."""
    return KINDS[spec[0]].is_mixture or any(map(is_mixture, parts_of(spec)))


def is_batched(spec: Spec) -> bool:
    """Whether the pairs may differ between batch entries, so that `to_dense` is [B, H, Nq, Nk]."""
    return any(KINDS[name].batched(*args) for name, *args in leaves(spec))


def build(spec: Spec) -> Any:
    """Builds the library's pattern of a spec, by the constructor or operator of that name."""
    name, *args = with_parts(spec, tuple(map(build, parts_of(spec))))
    kind = KINDS[name]
    return (kind.build or getattr(sr, kind.public))(*args)


def matrix(drawing: str) -> Tensor:
    """Parses drawn counts [B, H, Nq, Nk]: `.` is 0, `|` separates heads, `---` batch entries.

    >>> matrix('''
    ...     1 . | 2 1
    ...     1 1 | . .
    ... ''').tolist()
    [[[[1, 0], [1, 1]], [[2, 1], [0, 0]]]]
    """
    rows = [line.replace(" ", "").replace(".", "0") for line in drawing.split("\n")]
    batches: list[list[list[list[int]]]] = [[]]
    for row in filter(None, rows):
        if set(row) == {"-"}:
            batches.append([])
        else:
            batches[-1].append([[int(count) for count in head] for head in row.split("|")])
    return torch.tensor(batches).transpose(1, 2).contiguous()  # drawn [B, Nq, H, Nk]
