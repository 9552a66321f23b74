"""Heads for which a mask_mod computes equal numbers count as one, and no other head does."""

import pytest
import torch

import sparsering as sr

FLAG = torch.tensor([True, False, True])
TABLE = torch.tensor([[0, 1], [1, 0], [0, 1]])
FUNCTIONS = {
    "a flag of the kv head": (
        lambda b, h, q, k: (k <= q) & (FLAG[h // 2] | (q - k < 4)),
        (0, 0, 2, 2, 0, 0),
    ),
    "the head itself": (lambda b, h, q, k: (q + h) % 3 == k % 3, (0, 1, 2, 3, 4, 5)),
    "a width": (lambda b, h, q, k: q - k < FLAG[h // 2] * 4 + 3, (0, 0, 2, 2, 0, 0)),
    "a row of a table": (lambda b, h, q, k: TABLE[h // 2][(q + k) % 2] > 0, (0, 1, 2, 3, 4, 5)),
    "two flags": (
        lambda b, h, q, k: (FLAG[h // 2] & (q > k)) | ((h % 2 == 0) & (q == k)),
        (0, 1, 2, 3, 0, 1),
    ),
    "a choice by where": (
        lambda b, h, q, k: torch.where(h < 2, q >= k, q - k < 4),
        (0, 0, 2, 2, 2, 2),
    ),
    "the head alone": (lambda b, h, q, k: FLAG[h // 2], (0, 0, 2, 2, 0, 0)),
    "a flag and the head": (
        lambda b, h, q, k: FLAG[h // 2] & ((q + h) % 2 == 0),
        (0, 1, 2, 3, 4, 5),
    ),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_alike_heads_are_found_and_each_head_has_its_own_pairs(name):
    function, alike = FUNCTIONS[name]
    pattern = sr.from_mask_mod(function)
    frame = sr.patterns.algebra.Frame(12, 12, 6, 3, 0)
    assert tuple(pattern.at(0, head, frame).head for head in range(6)) == alike
    index = [torch.tensor(i) for i in range(12)]
    by_hand = torch.tensor(
        [
            [[bool(function(index[0], index[h], q, k)) for k in index] for q in index]
            for h in range(6)
        ]
    )
    assert torch.equal(pattern.to_dense(12, num_heads=6, num_kv_heads=3), by_hand)


def test_tables_are_as_many_as_heads_differ():
    frame = sr.patterns.algebra.Frame(12, 12, 6, 3, 0)
    of_kv_head, of_head = (
        sr.from_mask_mod(FUNCTIONS[name][0]) for name in ("a flag of the kv head", "two flags")
    )
    assert of_kv_head.num_tables(frame) == 3
    assert of_kv_head.num_tables(frame._replace(num_kv_heads=6)) == 6
    assert of_kv_head.num_tables(frame._replace(num_kv_heads=2)) == 6  # a group has two masks
    assert of_head.num_tables(frame) == 6
    one = torch.ones(6, dtype=torch.bool)
    assert sr.from_mask_mod(lambda b, h, q, k: one[h] & (q >= k)).num_tables(frame) == 1


def test_a_layout_evaluates_alike_heads_once(monkeypatch):
    from sparsering.patterns import mask_mod

    sizes = []
    over_pairs = mask_mod._over_pairs

    def counted(function, at, row, column):
        sizes.append(int(at[1]))
        return over_pairs(function, at, row, column)

    monkeypatch.setattr(mask_mod, "_over_pairs", counted)
    flag = torch.arange(8) < 4
    pattern = sr.from_mask_mod(lambda b, h, q, k: (k <= q) & (flag[h] | (q - k < 9)))
    layout = pattern.layout(100, num_heads=8, block_size=16)
    assert set(sizes) == {0, 4}
    expected = sum(
        int(
            pattern.at(0, h, layout.frame)
            .holds(torch.arange(100)[:, None], torch.arange(100)[None], layout.frame)
            .sum()
        )
        for h in range(8)
    )
    assert layout.num_pairs == expected / 8
