"""`pack_tree`: sequences with equal prefixes as one tree, in which each prefix is stored once."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..ground.arguments import INTEGERS, kind_of
from ..ground.keywords import class_with_hints, with_hints
from .tree import Tree


@class_with_hints
class PackedTree(NamedTuple):
    """Sequences packed as a tree of T tokens; tensors are int64 on the device of the sequences.

    Attributes:
        tokens: [T] tokens, node after node, depth first.
        position_ids: [T] depth of each token: its place in the sequences that have it.
        previous: [T] index of the token before it on its path, -1 for the first of a root.
        counts: [T] number of sequences that pass through the token.
        lengths, parents: the nodes, as `Tree` takes them.
        pattern: `Tree(lengths, parents)`, causal along each path.
        paths: for each sequence the indices of its tokens: `tokens[paths[i]]` equals sequence i.
    """

    tokens: Tensor
    position_ids: Tensor
    previous: Tensor
    counts: Tensor
    lengths: tuple[int, ...]
    parents: tuple[int, ...]
    pattern: Tree
    paths: list[Tensor]

    def __repr__(self) -> str:
        sizes = f"{len(self.tokens):,} tokens in {len(self.lengths):,} nodes"
        return f"<PackedTree of {len(self.paths):,} sequences: {sizes}>"


@with_hints()
def pack_tree(sequences: Sequence[Tensor]) -> PackedTree:
    """Packs sequences of tokens as a tree, so that a common prefix is computed once.

    The sum of `counts[t] * nll(logits[previous[t]], tokens[t])` over all t with `previous[t] >= 0`
    is the loss of all sequences, summed over their tokens but each first one.

    Args:
        sequences: 1-D tensors of integers, at least one token each. Equal sequences, and one that
            is a prefix of another, add no tokens.

    Returns: the tree; nodes are in depth-first order, children in the order of the sequences. A
        node ends where sequences differ, not where one ends.

    Raises: ValueError for no sequence, an empty one, other dims, dtypes or several devices.

    Cost: O(tokens of all sequences), and a comparison for each node and sequence in it.

    Example:
        >>> tree = pack_tree([torch.tensor([1, 2, 3]), torch.tensor([1, 2, 4, 5])])
        >>> tree.tokens.tolist(), tree.lengths, tree.parents
        ([1, 2, 3, 4, 5], (2, 1, 2), (-1, 0, 0))
    """
    rows = _checked(sequences)
    device, sizes = sequences[0].device, [len(row) for row in rows]
    lengths: list[int] = []
    parents: list[int] = []
    starts: list[int] = []
    parts: list[list[tuple[int, int]]] = [[] for _ in rows]  # (node, tokens) of each sequence
    columns: list[list[Tensor]] = [[], [], [], []]
    total = 0
    # Each item is (sequences with equal tokens up to and including `depth`, depth, parent node).
    pending = [(group, 0, -1) for group in reversed(_by_next_token(rows, range(len(rows)), 0))]
    while pending:
        group, depth, parent = pending.pop()
        longest = max(group, key=sizes.__getitem__)
        end = sizes[longest]
        for i in group:
            end = min(end, _agreement(rows[longest], rows[i], depth, end))
        node, length = len(lengths), end - depth
        last = starts[parent] + lengths[parent] - 1 if parent >= 0 else -1
        lengths.append(length)
        parents.append(parent)
        starts.append(total)
        for i in group:
            parts[i].append((node, min(end, sizes[i]) - depth))
        here = torch.arange(total, total + length)
        passing = torch.tensor([min(end, sizes[i]) - depth for i in group])
        counts = torch.bincount(passing, minlength=length + 1).flip(0).cumsum(0).flip(0)[1:]
        previous = torch.cat((torch.tensor([last]), here[:-1]))
        of_node = rows[longest][depth:end], torch.arange(depth, end), previous, counts
        for column, values in zip(columns, of_node, strict=True):
            column.append(values)
        total += length
        longer = [i for i in group if sizes[i] > end]
        pending += [(x, end, node) for x in reversed(_by_next_token(rows, longer, end))]
    ranges = ([torch.arange(starts[i], starts[i] + n) for i, n in of_row] for of_row in parts)
    paths = [torch.cat(of_row).to(device) for of_row in ranges]
    tokens, positions, previous, counts = (torch.cat(column).to(device) for column in columns)
    nodes = tuple(lengths), tuple(parents)
    return PackedTree(tokens, positions, previous, counts, *nodes, Tree(*nodes), paths)


def _agreement(longest: Tensor, other: Tensor, depth: int, end: int) -> int:
    """Returns the first place from `depth` to `end` at which two sequences [n] differ.

    It is `end` if they agree up to there, or if `other` ends before.
    """
    stop = min(end, len(other))
    differs = torch.nonzero(longest[depth:stop] != other[depth:stop])
    return depth + int(differs[0]) if len(differs) else end


def _by_next_token(rows: list[Tensor], group: Sequence[int], depth: int) -> list[list[int]]:
    """Divides a group of sequences by their token at `depth`, in order of first appearance."""
    groups: dict[int, list[int]] = {}
    for i in group:
        groups.setdefault(int(rows[i][depth]), []).append(i)
    return list(groups.values())


def _checked(sequences: Sequence[Tensor]) -> list[Tensor]:
    """Returns the sequences as int64 tensors [n] on the CPU; ValueError says which one is wrong."""
    given: object = sequences
    if not isinstance(given, list | tuple) or not given:
        raise ValueError(
            "pack_tree needs a list of at least one tensor of tokens, got "
            f"{given if given == [] else kind_of(given)}; for example "
            "[torch.tensor([1, 2, 3])]"
        )
    for number, row in enumerate(sequences):
        fits = isinstance(row, Tensor) and row.dtype in INTEGERS and row.dim() == 1 and len(row)
        if not fits or row.device != sequences[0].device:
            raise ValueError(
                "pack_tree needs 1-D tensors of at least one integer, all on one device, got "
                f"{kind_of(row)} for sequence {number}; torch.tensor(ids) makes one of a list"
            )
    return [row.detach().to("cpu", torch.int64) for row in sequences]
