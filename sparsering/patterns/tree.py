"""Trees of tokens: prompts that several answers share, and drafts of speculative decoding."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from ..ground.arguments import MOST_TOKENS, checked_integer, freeze_lengths, per_entry, shortened
from ..ground.keywords import class_with_hints
from ..ground.once import once
from .algebra import And, Frame, Mask, Mixture, Not, Or, Pattern, parts_of
from .blocks import RandomBlocks
from .positions import Causal, Lengths, Packed, SlidingWindow, _InDocuments, check_inner, entries_of
from .selected import SelectedBlocks

Parents = tuple[int, ...] | tuple[tuple[int, ...], ...] | Tensor
"""Parents of nodes: one tuple for all batch entries, one tuple per entry, or an int64 tensor."""


class Nodes(NamedTuple):
    """Nodes of a tree that have at least one token; tensors are int64 [nodes] unless stated.

    Under a causal pattern, an only child whose tokens directly follow those of its parent is merged
    into the parent, so that a long chain is one node.
    """

    start: Tensor  # [nodes + 1] first token of each node; the last item is the number of tokens
    depth: Tensor  # number of tokens above the node's first token, on its path from the root
    enter: Tensor  # the node's number in depth-first order
    leave: Tensor  # descendants have the depth-first numbers enter + 1 to leave - 1
    last: Tensor  # largest node index among the node and its descendants
    longest: int  # most tokens on any path
    parent: Tensor  # the parent, which comes before its node; -1 for a root
    jump: Tensor  # a farther ancestor, or -1; any ancestor is O(log nodes) parents and jumps away

    @classmethod
    def of(cls, lengths: Sequence[int], parents: Sequence[int], causal: bool) -> "Nodes":
        """Builds the nodes from token counts and parents; drops nodes without tokens.

        If `causal`, it also merges chains (see the class). Cost: O(nodes).
        """
        above: list[int] = []  # nearest ancestor with tokens, or -1
        for parent in parents:
            above.append(parent if parent < 0 or lengths[parent] else above[parent])
        children = Counter(up for up, length in zip(above, lengths, strict=True) if length)
        number, latest = {-1: -1}, -2  # `latest`: the latest node with tokens
        size: list[int] = []
        depth: list[int] = []
        parent_of: list[int] = []
        for i, (up, length) in enumerate(zip(above, lengths, strict=True)):
            if not length:
                continue
            if causal and up == latest and children[up] == 1:
                number[i] = number[up]
                size[-1] += length
            else:
                number[i], place = len(size), number[up]
                depth.append(depth[place] + size[place] if place >= 0 else 0)
                parent_of.append(place)
                size.append(length)
            latest = i
        count, last = [1] * len(size), list(range(len(size)))
        for i in reversed(range(len(size))):
            if (place := parent_of[i]) >= 0:
                count[place] += count[i]
                last[place] = max(last[place], last[i])
        # `free` has the next number that a child of each node gets; its last item is for roots.
        free, enter = [0] * (len(size) + 1), []
        for i, place in enumerate(parent_of):
            enter.append(free[place])
            free[place] += count[i]
            free[i] = enter[i] + 1
        longest = max(map(int.__add__, depth, size), default=0)
        start = torch.tensor([0, *size]).cumsum(0)
        level, jump = [-1], [-1]  # item i + 1 is for node i; item 0 is for the parent of roots, -1
        for place in parent_of:
            far = jump[place + 1]
            farther = jump[far + 1]
            equal = level[place + 1] - level[far + 1] == level[far + 1] - level[farther + 1]
            jump.append(farther if equal else place)
            level.append(level[place + 1] + 1)
        columns = (depth, enter, list(map(int.__add__, enter, count)), last, parent_of, jump[1:])
        depths, enters, leaves, lasts, parents_of, jumps = (
            torch.tensor(x, dtype=torch.int64) for x in columns
        )
        return cls(
            start=start,
            depth=depths,
            enter=enters,
            leave=leaves,
            last=lasts,
            longest=longest,
            parent=parents_of,
            jump=jumps,
        )

    def of_token(self, token: Tensor) -> Tensor:
        """Returns the node that each token lies in.

        For one outside the tree, the first or last node.
        """
        node = torch.searchsorted(self.start, token, right=True) - 1
        return node.clamp(0, max(0, len(self.depth) - 1))

    def depth_of(self, token: Tensor) -> Tensor:
        """Returns each token's depth: the number of tokens before it on its path from the root."""
        if not len(self.depth):
            return token
        return token + (self.depth - self.start[:-1])[self.of_token(token)]

    def nearest(self, node: Tensor, most: Tensor) -> Tensor:
        """Returns for each node [n] the first, from it up to the root, with index <= `most` [n].

        The result is -1 if there is none. Layouts call it to skip nodes after the last visible one.
        """
        node = node.clone()
        pending = torch.nonzero(node > most)[:, 0]
        while len(pending):
            here, bound = node[pending], most[pending]
            far = self.jump[here]
            node[pending] = here = torch.where(far > bound, far, self.parent[here])
            pending = pending[here > bound]
        return node

    def sees(self, query: Tensor, key: Tensor) -> Tensor:
        """Whether the node `key` is the node `query` itself or one of its ancestors."""
        enter = self.enter[query]
        return (self.enter[key] <= enter) & (enter < self.leave[key])


@class_with_hints
@dataclass(frozen=True, repr=False, eq=False)
class Tree(_InDocuments):
    """A pattern along each path of a tree, whose nodes are ranges of tokens, packed end to end.

    Node i has `lengths[i]` tokens and hangs below node `parents[i]` < i, or is a root (-1). The
    depth of a token is the number of tokens before it on its path from the root. Token p sees token
    k if k's node is p's own or one of its ancestors, and `pattern` holds for (depth of p, depth of
    k), `Causal()` by default. So siblings do not see each other, and `Tree(n, (-1,) * len(n),
    pattern)` has the pairs of `Packed(n, pattern)`. Tree of a mixture is a mixture.

    `lengths` sum to Nk and may be 0; both sequences are for all batch entries, or both have one
    sequence per batch entry, or are tensors of such shapes, as in `Documents`. Distances
    (`distance_bias`) are of depths; dropout counts tokens. A mask of `pattern` that reads lengths
    gets `length`, by default the longest path's.

    Raises: ValueError for a parent that does not come before its node, and, without `length`, for a
    pattern that is bound to a length or to query rows of its own.

    Example: `Tree((4096, 512, 512), (-1, 0, 0))` is a prompt of 4,096 tokens and two answers.
    """

    lengths: Lengths
    parents: Parents
    pattern: Mask = None  # type: ignore[assignment]  # for Causal(), which no compiler takes here
    length: int | None = None

    def __new__(
        cls,
        lengths: Lengths,
        parents: Parents,
        pattern: Pattern | None = None,
        length: int | None = None,
    ) -> Any:
        if isinstance(pattern, Mixture):  # Tree of a mixture is a mixture
            return Mixture(tuple(cls(lengths, parents, mask, length) for mask in pattern.branches))
        return super().__new__(cls)

    def _validate(self) -> None:
        if cast(Any, self.pattern) is None:
            object.__setattr__(self, "pattern", Causal())
        check_inner("Tree", self.pattern)
        bound = [mask for mask in parts_of(self.pattern) if _is_bound(mask)]
        if self.length is not None:
            object.__setattr__(self, "length", checked_integer("length", self.length, 0))
        elif bound:
            raise ValueError(
                f"the pattern of a Tree must hold along paths of any length, got {bound[0]}; join "
                "it to the Tree by &, or give the Tree the length for which it holds"
            )
        super()._validate()
        nested = per_entry(self.lengths)
        freeze_lengths(self, "parents", -MOST_TOKENS, nested)
        if isinstance(self.lengths, Tensor) or isinstance(self.parents, Tensor):
            return  # a compiler traces: the operator checks the numbers
        if nested and not per_entry(self.parents):
            raise ValueError(
                "Tree lengths and parents must both have one sequence per batch entry or both "
                f"none, got lengths for {len(self.lengths)} entries; nest the parents too"
            )
        parents = entries_of(self.parents)
        if len(parents) != len(self.entries):
            raise ValueError(
                "Tree needs parents for as many batch entries as lengths, got "
                f"{len(parents)} and {len(self.entries)}; give each entry both"
            )
        for number, (lengths, above) in enumerate(zip(self.entries, parents, strict=True)):
            of = f" of batch entry {number}" if nested else ""
            if len(lengths) != len(above):
                raise ValueError(
                    f"Tree needs a parent for each node{of}, got {len(lengths)} lengths and "
                    f"{len(above)} parents; a root has parent -1"
                )
            for node, parent in enumerate(above):
                if not -1 <= parent < node:
                    raise ValueError(
                        f"each parent in a Tree must come before its node, got parent {parent} of "
                        f"node {node}{of}; list nodes from the roots down, a root has parent -1"
                    )

    @once
    def nodes(self) -> Nodes:
        """The nodes that have tokens.

        Only if `lengths` is one tuple of ints, shared by batch entries.
        """
        nodes = Nodes.of(self.lengths, self.parents, _is_causal(self.pattern))  # type: ignore[arg-type]
        if self.length is not None and nodes.longest > self.length:
            least = f"of at least {nodes.longest}, for its longest path"
            raise ValueError(f"Tree needs a length {least}, got {self.length}; pass a larger one")
        return nodes if self.length is None else nodes._replace(longest=self.length)

    @once
    def nodes_of_entries(self) -> tuple[Nodes, ...]:
        """The nodes of each batch entry's tree.

        A tuple of one if all batch entries share a tree.
        """
        if not per_entry(self.lengths):
            return (self.nodes,)
        causal = _is_causal(self.pattern)
        of_entries = zip(self.entries, entries_of(self.parents), strict=True)
        return tuple(Nodes.of(lengths, parents, causal) for lengths, parents in of_entries)

    def depths_of(self, token: Tensor) -> Tensor:
        """Returns the depths of tokens in each batch entry's tree: [B or 1, *token.shape]."""
        return torch.stack([nodes.depth_of(token) for nodes in self.nodes_of_entries])

    def at(self, batch: int, head: int, frame: Frame) -> Mask:
        inner = self.pattern.at(batch, head, frame)
        if per_entry(self.lengths):
            own, above = self.entries[batch], self.parents[batch]
            return replace(self, lengths=own, parents=above, pattern=inner)  # type: ignore[arg-type]
        return self if inner is self.pattern else replace(self, pattern=inner)

    def _frames(self, frame: Frame) -> Iterator[Frame]:
        longest = frame.kv_len if self.length is None else self.length
        yield frame.of_document(longest, longest)

    def _components(self) -> tuple[Mask, ...]:
        return (self.pattern,)

    def _values(self, as_data: bool = False) -> Iterator[Any]:
        return (x for x in super()._values(as_data) if x is not None)

    def holds(self, p: Tensor, k: Tensor, frame: Frame) -> Tensor:
        nodes = self.nodes
        inside = (p >= 0) & (k >= 0) & (p < nodes.start[-1]) & (k < nodes.start[-1])
        if not len(nodes.depth):
            return inside
        inside = inside & nodes.sees(nodes.of_token(p), nodes.of_token(k))
        most = max(0, int(nodes.start[-1]) - 1)
        p, k = (nodes.depth_of(x.clamp(0, most)) for x in (p, k))
        return inside & self.pattern.holds(p, k, frame.of_document(nodes.longest, nodes.longest))


def common_tree(pattern: Pattern) -> Tree | None:
    """Returns the one tree that all branches of a pattern share; None if there is none.

    Its lengths and parents may be nested, one tree for each batch entry.
    """
    found = [list(_trees(branch)) for branch in pattern.branches]
    if not all(found):
        return None
    if (first := found[0][0]) is None:
        return None
    for tree in chain(*found):
        if tree is None or tree.lengths != first.lengths or tree.parents != first.parents:
            return None
    return first


def check_distances(pattern: Pattern) -> None:
    """Raises ValueError if no single tree gives a pattern's distances, or an order moves documents.

    A traced call checks later.
    """
    if torch.compiler.is_compiling():
        return
    for part in parts_of(pattern):
        if part.moves_tokens and any(isinstance(x, Packed | Tree) for x in parts_of(part)):
            raise ValueError(
                "a distance_bias counts places, which Rearranged moves out of documents and trees, "
                f"got {shortened(str(pattern))}; remove the distance_bias, or the rearrangement"
            )
    if common_tree(pattern) is None and has_tree(pattern):
        raise ValueError(
            "a distance_bias with a Tree needs the same one Tree in every branch, since distances "
            f"are of depths, got {shortened(str(pattern))}; call attention for each tree alone"
        )


def distance_positions(pattern: Pattern, frame: Frame) -> tuple[Tensor, Tensor]:
    """Returns positions whose differences are the distances of a bias; in a tree, these are depths.

    Returns: positions of queries [B or 1, Nq] and of keys [B or 1, Nk].
    """
    query, key, _ = pattern.coordinates(frame)
    if (tree := common_tree(pattern)) is not None:
        return tree.depths_of(query), tree.depths_of(key)
    return query[None], key[None]


def has_tree(pattern: Pattern) -> bool:
    """Whether a pattern has a Tree in any part."""
    return any(any(True for _ in _trees(branch)) for branch in pattern.branches)


def _trees(mask: Mask) -> Iterator[Tree | None]:
    """Yields the trees in a mask; None for one inside documents, because depths restart there."""
    if isinstance(mask, Tree):
        yield mask
        return
    combines = isinstance(mask, And | Or | Not)
    for part in mask._components():
        for tree in _trees(part):
            yield tree if combines else None


def _is_causal(mask: Mask) -> bool:
    """Whether a mask hides all later keys, as far as its classes show; other masks give False."""
    match mask:
        case And(masks) | Or(masks):
            return (any if isinstance(mask, And) else all)(map(_is_causal, masks))
        case SlidingWindow(_, right, _):
            return right is not None and right <= 0
    return isinstance(mask, Causal)


def _is_bound(mask: Pattern) -> bool:
    if isinstance(mask, _InDocuments | RandomBlocks | SelectedBlocks):
        return True
    return len(mask._components()) == 0 and mask.own_length is not None
