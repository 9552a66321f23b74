"""The meaning of every pattern in plain Python: one integer comparison at a time, no tensors.

A *spec* is a nested tuple that reads like the constructor call: `("SlidingWindow", 4, 0, 2)`,
`("&", ("Causal",), ("Documents", (3, 4)))`. `build(spec)` calls the library; `counts(spec, ...)`
evaluates the rules below for each (batch entry, head, query, key). The rules come from the table
of the contract, not from the library's code.
"""

import functools
import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

Spec = tuple[Any, ...]

OPERATORS = ("&", "|", "+", "-")


@dataclass(frozen=True)
class Place:
    """Everything that a rule may read besides the two positions of a pair."""

    row: int  # index of the query, which `Dense` and `MaskMod` read
    batch: int
    head: int  # query head
    num_heads: int
    num_kv_heads: int
    kv_len: int  # inside `Packed`: the length of the document

    @property
    def kv_head(self) -> int:
        return self.head // (self.num_heads // self.num_kv_heads)


def block_of(p: int, block_size: int) -> int | None:
    """Number of the block with a position; None for a negative position."""
    return p // block_size if p >= 0 else None


def full(at: Place, p: int, k: int) -> int:
    return 1


def causal(at: Place, p: int, k: int) -> int:
    return k <= p


def pooled_causal(at: Place, p: int, k: int, size: int, stride: int) -> int:
    return p >= k * stride + size - 1


def sliding_window(
    at: Place, p: int, k: int, left: int | None, right: int | None = 0, dilation: int = 1
) -> int:
    if left is not None and k < p - left:
        return 0
    if right is not None and k > p + right:
        return 0
    return (p - k) % dilation == 0


def global_tokens(
    at: Place, p: int, k: int, count: int, rows: bool = True, columns: bool = True
) -> int:
    return (rows and 0 <= p < count) or (columns and k < count)


def dilated(
    at: Place, p: int, k: int, segment_length: int, dilation_rate: int, offset: Any = "head"
) -> int:
    if offset == "head":
        residue = at.kv_head % dilation_rate
    elif offset == "block":
        heads_per_residue = -(-at.num_kv_heads // dilation_rate)
        residue = at.kv_head // heads_per_residue
    elif isinstance(offset, tuple):
        residue = offset[at.kv_head] % dilation_rate
    else:
        residue = offset % dilation_rate
    if p // segment_length != k // segment_length:
        return 0
    on_grid = [(x % segment_length) % dilation_rate == residue for x in (p, k)]
    return all(on_grid)


def longnet(
    at: Place,
    p: int,
    k: int,
    segment_lengths: tuple[int, ...],
    dilation_rates: tuple[int, ...],
    offset: Any = "head",
) -> int:
    branches = zip(segment_lengths, dilation_rates, strict=True)
    return sum(bool(dilated(at, p, k, w, r, offset)) for w, r in branches)


def block_dilated(at: Place, p: int, k: int, rates: tuple[int, ...], block_size: int) -> int:
    b, key_block = block_of(p, block_size), k // block_size
    return b is not None and (b == key_block or abs(b - key_block) in rates)


def block_window(at: Place, p: int, k: int, radius: int, block_size: int) -> int:
    b = block_of(p, block_size)
    return b is not None and abs(b - k // block_size) <= radius


def block_causal(at: Place, p: int, k: int, block_size: int) -> int:
    b = block_of(p, block_size)
    return b is not None and k // block_size <= b


def causal_blocks(at: Place, p: int, k: int, sizes: tuple) -> int:
    """Blocks of unlike sizes, written out token by token."""
    if p < 0:
        return 0
    blocks = [i for i, size in enumerate(documents_of(at, sizes)) for _ in range(size)]
    return k < len(blocks) and (p >= len(blocks) or blocks[k] <= blocks[p])


def block_diffusion(at: Place, p: int, k: int, n: int, block_size: int) -> int:
    """Noisy tokens 0 .. n - 1 in blocks, then the clean ones; as in the paper's three parts."""
    if p < 0:
        return 0
    (q_clean, b), (k_clean, b_of_k) = ((x >= n, x % n // block_size) for x in (p, k))
    own_block = b == b_of_k and q_clean == k_clean
    earlier_clean = b > b_of_k and k_clean and not q_clean
    clean_causal = b >= b_of_k and k_clean and q_clean
    return own_block or earlier_clean or clean_causal


def neighbourhood(
    at: Place, p: int, k: int, shape: tuple[int, ...], radius: Any, dilation: Any = 1
) -> int:
    """Reads NATTEN's semantics dim by dim, from the fastest."""
    if not 0 <= p < math.prod(shape) or k >= math.prod(shape):
        return 0
    for dim in range(len(shape))[::-1]:
        n = shape[dim]
        (p, i), (k, j) = divmod(p, n), divmod(k, n)
        r, d = (x[dim] if isinstance(x, tuple) else x for x in (radius, dilation))
        first = window_start(i, n, 2 * r + 1, d)
        if j not in range(first, first + (2 * r + 1) * d, d):
            return 0
    return 1


def window_start(index: int, length: int, kernel: int, dilation: int) -> int:
    """First key of a window; the function of NATTEN's reference kernels (get_window_start)."""
    radius = kernel // 2
    first = index - radius * dilation
    if first < 0:
        return index % dilation
    if index + radius * dilation >= length:
        residue, whole = index % dilation, length // dilation * dilation
        rest = length - whole
        if residue < rest:
            return length - rest + residue - 2 * radius * dilation
        return whole + residue - kernel * dilation
    return first


def chunked_causal(at: Place, p: int, k: int, size: int) -> int:
    return p // size == k // size and k <= p


def hierarchical(at: Place, p: int, k: int, levels: tuple, block_size: int) -> int:
    b = block_of(p, block_size)
    if b is None:
        return 0
    for stride, window in levels:
        if b % max(1, stride // block_size) != 0:
            continue
        if window is None or abs(b - k // block_size) <= (window // block_size) // 2:
            return 1
    return 0


def document_of(x: int, lengths: tuple[int, ...]) -> tuple[int, int] | None:
    """(number, first position) of the document with position `x`; None if there is none."""
    first = 0
    for number, length in enumerate(lengths):
        if first <= x < first + length:
            return number, first
        first += length
    return None


def documents_of(at: Place, lengths: tuple) -> tuple[int, ...]:
    """Document lengths of the batch entry, or those that all entries share."""
    return lengths[at.batch] if lengths and isinstance(lengths[0], tuple) else lengths


def documents(at: Place, p: int, k: int, lengths: tuple) -> int:
    lengths = documents_of(at, lengths)
    found = document_of(p, lengths)
    return found is not None and found == document_of(k, lengths)


def packed(at: Place, p: int, k: int, lengths: tuple, inner: Spec) -> int:
    lengths = documents_of(at, lengths)
    found = document_of(p, lengths)
    if found is None or found != document_of(k, lengths):
        return 0
    number, first = found
    inside = Place(at.row, at.batch, at.head, at.num_heads, at.num_kv_heads, lengths[number])
    return pair_count(inner, inside, p - first, k - first)


def path_of(node: int, parents: tuple[int, ...]) -> list[int]:
    """Nodes from the root to a node."""
    return [] if node < 0 else [*path_of(parents[node], parents), node]


def depth_in_tree(x: int, lengths: tuple[int, ...], parents: tuple[int, ...]) -> int:
    """Tokens before token `x` on its path; positions outside count on from the nearest node."""
    inside = min(max(x, 0), sum(lengths) - 1)
    node, first = document_of(inside, lengths)
    return sum(lengths[i] for i in path_of(node, parents)[:-1]) + x - first


def tree(at: Place, p: int, k: int, lengths: tuple, parents: tuple, *rest: Any) -> int:
    """Reads `("Tree", lengths, parents, inner)`, or with the length of `inner` before it."""
    *length, inner = rest
    lengths, parents = documents_of(at, lengths), documents_of(at, parents)
    found = document_of(p, lengths), document_of(k, lengths)
    if None in found or found[1][0] not in path_of(found[0][0], parents):
        return 0
    depths = (depth_in_tree(x, lengths, parents) for x in (p, k))
    return pair_count(inner, replace(at, kv_len=length[0]) if length else at, *depths)


def per_head(at: Place, p: int, k: int, specs: tuple) -> int:
    return pair_count(specs[at.kv_head], at, p, k)


def key_padding(at: Place, p: int, k: int, lengths: tuple[int, ...]) -> int:
    return k < lengths[at.batch]


def key_mask(at: Place, p: int, k: int, valid: Any) -> int:
    return (valid[at.batch] if table_depth(valid) == 2 else valid)[k]


def table_depth(table: Any) -> int:
    if not isinstance(table, tuple):
        return 0
    return 1 + table_depth(table[0]) if table else 1


def head_of_table(at: Place, num_tables: int) -> int:
    """Number of the table, of 1, Hkv or Hq tables, that a query head reads."""
    return {1: 0, at.num_kv_heads: at.kv_head, at.num_heads: at.head}[num_tables]


def blocks(at: Place, p: int, k: int, active: Any, block_size: int) -> int:
    b = block_of(p, block_size)
    if b is None:
        return 0
    if table_depth(active) == 4:
        active = active[at.batch]
    if table_depth(active) == 3:
        active = active[head_of_table(at, len(active))]
    return active[b][k // block_size]


def dense(at: Place, p: int, k: int, mask: Any) -> int:
    if table_depth(mask) == 3:
        mask = mask[head_of_table(at, len(mask))]
    return mask[at.row][k]


def selected_blocks(
    at: Place, p: int, k: int, indices: Any, block_size: int, query_block: int, first_row: int
) -> int:
    if p < 0:
        return 0
    depth = table_depth(indices)
    if depth == 4:
        indices = indices[at.batch if len(indices) > 1 else 0]
    if depth >= 3:
        indices = indices[head_of_table(at, len(indices))]
    return k // block_size in indices[p // query_block - first_row]


MASK_MODS = {  # FlexAttention's mask functions take query indices; they also work on plain ints
    "near": "lambda b, h, q, k: abs(q - k) < 4",
    "of heads": "lambda b, h, q, k: (q + h) % 3 == k % 3",
    "of entries": "lambda b, h, q, k: (q + k + b) % 4 != 0",
}


def mask_mod(at: Place, p: int, k: int, name: str, batch: int | None) -> int:
    return eval(MASK_MODS[name])(at.batch, at.head, at.row, k)


RULES = {
    "Full": full,
    "Causal": causal,
    "SlidingWindow": sliding_window,
    "PooledCausal": pooled_causal,
    "GlobalTokens": global_tokens,
    "Dilated": dilated,
    "LongNet": longnet,
    "BlockDilated": block_dilated,
    "BlockWindow": block_window,
    "BlockCausal": block_causal,
    "CausalBlocks": causal_blocks,
    "BlockDiffusion": block_diffusion,
    "Neighbourhood": neighbourhood,
    "ChunkedCausal": chunked_causal,
    "Hierarchical": hierarchical,
    "Documents": documents,
    "Packed": packed,
    "Tree": tree,
    "PerHead": per_head,
    "KeyPadding": key_padding,
    "KeyMask": key_mask,
    "Blocks": blocks,
    "Dense": dense,
    "SelectedBlocks": selected_blocks,
    "MaskMod": mask_mod,
}


def pair_count(spec: Spec, at: Place, p: int, k: int) -> int:
    """Multiplicity of the pair of query position `p` and key position `k` in the pattern."""
    name, *args = spec
    if name == "+":
        return pair_count(args[0], at, p, k) + pair_count(args[1], at, p, k)
    if name == "&":  # one side is a mask (0 or 1), so a mixture's pair keeps its count or vanishes
        return pair_count(args[0], at, p, k) * pair_count(args[1], at, p, k)
    if name == "-":
        return pair_count(args[0], at, p, k) * (1 - pair_count(args[1], at, p, k))
    if name == "|":
        return max(pair_count(args[0], at, p, k), pair_count(args[1], at, p, k))
    return int(RULES[name](at, p, k, *args))


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
    name, *args = spec
    if name in OPERATORS:
        return leaves(args[0]) + leaves(args[1])
    if name == "PerHead":
        return [spec, *(leaf for part in args[0] for leaf in leaves(part))]
    return [spec, *leaves(args[-1])] if name in ("Packed", "Tree") else [spec]


def is_mixture(spec: Spec) -> bool:
    """Whether the spec has the form of a mixture, even if all its counts are 0 or 1."""
    name, *args = spec
    if name in ("Packed", "Tree"):
        return is_mixture(args[-1])
    if name == "PerHead":
        return any(map(is_mixture, args[0]))
    return name in ("+", "LongNet") or (name in OPERATORS and any(map(is_mixture, args)))


def is_batched(spec: Spec) -> bool:
    """Whether the pairs may differ between batch entries, so that `to_dense` is [B, H, Nq, Nk]."""
    depth_of_batch = {"Documents": 2, "CausalBlocks": 2, "Packed": 2, "Tree": 2}
    depth_of_batch |= {"KeyMask": 2, "Blocks": 4, "SelectedBlocks": 4}
    return any(
        name == "KeyPadding"
        or (name == "MaskMod" and rest[1] is not None)
        or (name in depth_of_batch and table_depth(rest[0]) == depth_of_batch[name])
        for name, *rest in leaves(spec)
    )


def build(spec: Spec) -> Any:
    """Builds the library's pattern of a spec, by the constructor or operator of that name."""
    import sparsering as sr  # imported here, to test the oracle without the library

    name, *args = spec
    if name == "&":
        return build(args[0]) & build(args[1])
    if name == "|":
        return build(args[0]) | build(args[1])
    if name == "+":
        return build(args[0]) + build(args[1])
    if name == "-":
        return build(args[0]) - build(args[1])
    if name in ("Packed", "Tree"):
        lengths, *between, inner = args
        if len(between) == 2:  # the length for which the pattern of a `Tree` holds
            return sr.Tree(lengths, between[0], build(inner), length=between[1])
        return getattr(sr, name)(lengths, *between, build(inner))
    if name == "PerHead":
        return sr.PerHead(tuple(map(build, args[0])))
    if name in ("Blocks", "Dense", "KeyMask"):
        args[0] = torch.tensor(args[0], dtype=torch.bool)
    if name == "SelectedBlocks":
        args[0] = torch.tensor(args[0], dtype=torch.int64)
    if name == "MaskMod":
        return _mask_mod(*args)
    if name == "CausalBlocks":
        return sr.BlockCausal(*args)
    return getattr(sr, name)(*args)


@functools.cache
def _mask_mod(name: str, batch: int | None) -> Any:
    import sparsering as sr

    return sr.from_mask_mod(eval(MASK_MODS[name]), batch_size=batch)


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
