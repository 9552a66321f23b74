"""`pack_tree` against a trie of plain dicts."""

import random

import pytest
import torch
from torch import Tensor

import sparsering as sr


def trie(rows: list[list[int]]) -> tuple:
    """Returns the fields of a PackedTree but its pattern, as lists; works token by token."""
    children: dict[tuple, list[int]] = {}
    passing: dict[tuple, int] = {}
    for row in rows:
        for depth, token in enumerate(row):
            before = tuple(row[:depth])
            if token not in children.setdefault(before, []):
                children[before].append(token)
            path = (*before, token)
            passing[path] = passing.get(path, 0) + 1
    tokens, positions, previous, counts, lengths, parents, place = [], [], [], [], [], [], {}
    pending = [((token,), -1) for token in reversed(children[()])]
    while pending:
        path, parent = pending.pop()
        before = path[:-1]
        node = parent
        if not before or len(children[before]) > 1:
            node = len(lengths)
            lengths.append(0)
            parents.append(parent)
        lengths[node] += 1
        place[path] = len(tokens)
        tokens.append(path[-1])
        positions.append(len(before))
        previous.append(place.get(before, -1))
        counts.append(passing[path])
        pending += [((*path, token), node) for token in reversed(children.get(path, []))]
    paths = [[place[tuple(row[: i + 1])] for i in range(len(row))] for row in rows]
    return tokens, positions, previous, counts, tuple(lengths), tuple(parents), paths


def fields(tree: sr.PackedTree) -> tuple:
    lists = (x.tolist() for x in (tree.tokens, tree.position_ids, tree.previous, tree.counts))
    return (*lists, tree.lengths, tree.parents, [path.tolist() for path in tree.paths])


def drawn(rng: random.Random) -> list[list[int]]:
    size = rng.choice((1, 2, 2, 3))
    return [
        [rng.randrange(size) for _ in range(rng.randint(1, 9))] for _ in range(rng.randint(1, 8))
    ]


def test_the_trie_of_random_sequences():
    rng = random.Random(1)
    for _ in range(400):
        rows = drawn(rng)
        tree = sr.pack_tree([torch.tensor(row) for row in rows])
        assert fields(tree) == trie(rows), rows
        assert tree.pattern == sr.Tree(tree.lengths, tree.parents)
        for row, path in zip(rows, tree.paths, strict=True):
            assert tree.tokens[path].tolist() == row


def test_the_loss_of_all_sequences():
    """The summed loss of a model that sees the tokens before, from one pass over the tree."""
    torch.manual_seed(0)
    prompt = torch.randint(9, (12,))
    rows = [torch.cat([prompt, torch.randint(9, (n,))]) for n in (5, 1, 7)]
    rows += [torch.cat([rows[2][:15], torch.randint(9, (4,))])]  # three levels
    table = torch.randn(9, 2, 16, dtype=torch.float64, requires_grad=True)
    head = torch.randn(32, 9, dtype=torch.float64, requires_grad=True)

    def logits(tokens: Tensor, pattern: sr.Pattern) -> Tensor:
        x = table[tokens].permute(1, 0, 2)[None]
        return sr.attention(x, x, x, pattern)[0].permute(1, 0, 2).flatten(1) @ head

    tree = sr.pack_tree(rows)
    scores = logits(tree.tokens, tree.pattern)
    nll = -scores.log_softmax(-1)[tree.previous, tree.tokens]
    packed = (tree.counts * nll)[tree.previous >= 0].sum()
    alone = torch.zeros((), dtype=torch.float64)
    for row in rows:
        alone = alone - logits(row, sr.Causal()).log_softmax(-1)[:-1].gather(1, row[1:, None]).sum()
    torch.testing.assert_close(packed, alone, rtol=1e-12, atol=0)
    grads = [torch.autograd.grad(loss, [table, head]) for loss in (packed, alone)]
    for got, wanted in zip(*grads, strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-10, atol=1e-10)


def test_thousands_of_nested_prefixes_and_long_rows():
    row = torch.arange(3000)
    tree = sr.pack_tree([row[: i + 1] for i in range(3000)])
    assert tree.lengths == (3000,)
    assert torch.equal(tree.counts, 3000 - row)
    rows = [torch.cat([row, torch.tensor([i])]) for i in range(50)]
    assert sr.pack_tree(rows).lengths == (3000, *[1] * 50)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([], "at least one tensor"),
        (torch.tensor([1, 2]), "a list of at least one tensor"),
        (
            [torch.tensor([1]), torch.tensor([], dtype=torch.int64)],
            r"torch.int64 \(0,\) for sequence 1",
        ),
        ([torch.tensor([1.0])], "torch.float32"),
        ([torch.tensor([[1]])], r"\(1, 1\) for sequence 0"),
        ([[1, 2]], "got list for sequence 0"),
    ],
)
def test_what_are_no_sequences(given, message):
    with pytest.raises(ValueError, match=message):
        sr.pack_tree(given)


def test_a_printed_tree_is_a_line():
    tree = sr.pack_tree([torch.tensor([1, 2, 3]), torch.tensor([1, 2, 4, 5])])
    assert str(tree) == repr(tree) == "<PackedTree of 2 sequences: 5 tokens in 3 nodes>"
