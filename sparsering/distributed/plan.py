"""Plans of ring attention: which keys each rank needs from each other rank.

    plan = RingPlan.build(LongNet((2048, 32768), (1, 4)) & Causal(), 1 << 20, 64)
    plan.tokens_received(3), plan.load(3)

A plan is computed from the pattern alone. It needs no processes, and all ranks get equal plans.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.profiler import record_function

from ..checks import check_pattern
from ..ground.arguments import (
    checked_dtype,
    checked_flag,
    checked_integer,
    checked_integers,
    shortened,
)
from ..ground.keywords import class_with_hints
from ..ground.numerics import sum_dtype
from ..ground.once import once
from ..layouts.cache import layout_cache
from ..layouts.compile import checked_block_size, default_block_size
from ..layouts.lists import tiles_of
from ..layouts.terms import distinct_heads, distinct_kv_heads
from ..layouts.tiles import Ranges
from ..patterns.algebra import Frame, Pattern, check_fits
from .listed import listed, united
from .needs import Cut, FineVisits, TokenRanges, count_pairs, cut, needed_keys
from .sharding import check_sharding, num_tokens, overlap, owned_ranges
from .travellers import Traveller, choose_travellers, global_rows
from .wire import wire_format

if TYPE_CHECKING:
    from .mesh_plan import MeshPlan

PAIRS_PER_TOKEN = 2048
"""Number of (query, key) pairs that a rank is assumed to compute while it receives one token. GPUs
compute about 1,000 (NVLink) to 10,000 (network), processes on one CPU about 250.
"""
_CHUNKS_PER_RANK = 8


@class_with_hints
@dataclass(frozen=True, eq=False, repr=False)
class RingPlan:
    """Says which keys each rank needs from each other rank, for a pattern, length and sharding.

    Attributes:
        pattern, frame: the pattern, and the lengths and numbers of heads of the call.
        block_size: tokens per tile.
        sharding: which rank owns which tokens: "contiguous", "zigzag" or "chunks:...".
        ranges: each rank's tokens, as ascending ranges of positions.
        needs: tokens whose keys are sent. Kv heads with equal masks share an item. In an item, set
            receiver * world_size + sender has the tokens that `sender` sends to `receiver`.
        need_of: index into `needs`, by [batch entry][kv head]; one row if batch entries are alike.
        travellers: query rows that are sent to the ranks that own the keys, to save bytes.
        own_rows: True if lists have the rows of one rank, whose part of the plan alone is known.
    """

    pattern: Pattern
    frame: Frame
    world_size: int
    block_size: int
    sharding: str
    ranges: tuple[Ranges, ...]
    needs: tuple[TokenRanges, ...]
    need_of: tuple[tuple[int, ...], ...]
    travellers: tuple[Traveller, ...]
    own_rows: bool = False

    @classmethod
    def build(
        cls,
        pattern: Pattern,
        seq_len: int,
        world_size: int | tuple[int, int],
        *,
        num_heads: int = 1,
        num_kv_heads: int | None = None,
        block_size: int = 128,
        sharding: str = "contiguous",
    ) -> Any:  # a `RingPlan`, or a `MeshPlan`
        """Builds the plan of a pattern, length and number of ranks.

        Later calls find it in the cache.

        Args:
            pattern: a mask or a mixture, for queries and keys at positions 0 ... seq_len - 1.
            seq_len: tokens of the whole sequence.
            world_size: number of ranks; or (h, p), for a mesh of heads and tokens.
            num_heads: number of query heads; changes the loads, and the traffic of query rows.
            num_kv_heads: key/value heads, default `num_heads`.
            block_size: tokens per tile of the ranks' layouts; it does not change loads or traffic.
            sharding: "contiguous", "zigzag", "chunks:...", "balanced" (cuts equal chunks, and gives
                them to ranks by cost), or "auto": the cheapest of contiguous, zigzag and balanced.
                The `cost` of a sharding is that of its busiest rank.

        Returns: for a mesh, a `MeshPlan`, which has the methods of a `RingPlan`.

        Raises: ValueError if the pattern is for another length, or an argument is out of range.

        Cost: grows with the borders of visited areas; 2^20 tokens over 64 ranks take under 1 s.
        """
        frame, block_size = _checked(pattern, seq_len, num_heads, num_kv_heads, block_size)
        if isinstance(world_size, tuple | list):
            from .mesh_plan import build_mesh_plan  # which imports this module

            shape = checked_integers("world_size", world_size, 1)
            if len(shape) != 2:
                raise ValueError(
                    "world_size must be a number of ranks, or (heads, tokens) for a mesh, got "
                    f"{shortened(repr(world_size))}; give a mesh two numbers"
                )
            return build_mesh_plan(
                pattern, frame, (shape[0], shape[1]), block_size=block_size, sharding=sharding
            )
        world_size = checked_integer("world_size", world_size, 1)
        check_sharding(sharding, world_size)
        if sharding in ("auto", "balanced"):
            reduced = frame
            if pattern.num_tables(frame) <= frame.num_kv_heads:
                # query heads of one kv head have equal masks, so one of them is enough
                reduced = frame._replace(num_heads=frame.num_kv_heads)
            sharding = _choose_sharding(pattern, reduced, world_size, block_size, sharding)
        return _plan(pattern, frame, world_size, block_size, sharding)

    @classmethod
    def best(
        cls,
        pattern: Pattern,
        seq_len: int,
        ranks: int,
        *,
        num_heads: int,
        num_kv_heads: int | None = None,
        block_size: int = 128,
        sharding: str = "auto",
    ) -> "MeshPlan":
        """Chooses how many ranks share heads, and how many tokens, for a number of ranks.

        Args:
            ranks: number of ranks; every (h, p) with h * p ranks is tried whose h divides the
                query heads.
            pattern, seq_len, num_heads, num_kv_heads, block_size, sharding: as for `build`.

        Returns: the plan whose busiest rank has the least predicted cost by loads and bytes. Its
            `shape` is (h, p), and its `reason` has the costs of all.

        Raises: ValueError as `build`.

        Example:
            >>> RingPlan.best(Causal(), 1 << 17, 8, num_heads=32, num_kv_heads=8).shape
            (8, 1)
        """
        frame, block_size = _checked(pattern, seq_len, num_heads, num_kv_heads, block_size)
        from .mesh_plan import best_mesh  # which imports this module

        ranks = checked_integer("ranks", ranks, 1)
        return best_mesh(pattern, frame, ranks, block_size=block_size, sharding=sharding)

    def __repr__(self) -> str:
        ranks = f"{self.frame.q_len} tokens over {self.world_size} ranks"
        return f"<RingPlan {shortened(str(self.pattern))}, {ranks}, {shortened(self.sharding)}>"

    def tokens_received(self, rank: int) -> int | float:
        """Number of (token, kv head) pairs that a rank receives in forward per batch entry."""
        rank = checked_integer("rank", rank, 0, self.world_size - 1)
        return whole(int(self.tokens[rank].sum()) / len(self.need_of))

    def bytes_received(
        self,
        rank: int,
        *,
        head_dim: int | tuple[int, int],
        dtype: torch.dtype,
        num_kv_heads: int | None = None,
        compression: str | None = None,
        backward: bool = False,
    ) -> int | float:
        """Bytes of tensors that a rank receives in a forward or a backward pass, per batch entry.

        It counts keys and values, and in a backward pass the gradients of the rank's keys and
        values that return, in float32 (float64 for float64). If query rows are sent to other ranks,
        it also counts these rows, and the results (backward: gradients) that return for them.

        Args:
            head_dim: D, or (D, Dv).
            dtype: dtype of query, key and value.
            num_kv_heads: default the plan's; another only if all heads have one pattern.
            compression: the format in which keys and values are sent, as for `ring_attention`.
            backward: count the backward pass instead of the forward pass.
        """
        rank = checked_integer("rank", rank, 0, self.world_size - 1)
        if checked_dtype("dtype", dtype) is None:
            raise TypeError("dtype must be a torch.dtype, got None; for example torch.float32")
        backward = checked_flag("backward", backward)
        planned = self.frame.num_kv_heads
        kv_heads = planned if num_kv_heads is None else num_kv_heads
        kv_heads = checked_integer("num_kv_heads", kv_heads, 0)
        if kv_heads != planned and any(len(set(row)) > 1 for row in self.need_of):
            raise ValueError(
                f"num_kv_heads must be the plan's {planned} for a pattern that differs by head, "
                f"got {kv_heads}; build the plan with num_kv_heads={kv_heads}"
            )
        d, dv = checked_widths(head_dim)
        exact = sum_dtype(dtype).itemsize
        tokens = self.tokens.sum(1)[rank].item() * wire_format(compression, dtype).row_bytes(d, dv)
        sent, returned = d * dtype.itemsize, (dv + 1) * exact  # q is sent; out and lse return
        if backward:
            tokens += self.tokens.sum(0)[rank].item() * (d + dv) * exact
            sent, returned = (d + dv + 2) * exact, d * exact  # sends q, dO, lse, delta; dQ returns
        total = tokens / len(self.need_of) * kv_heads / max(1, planned)
        num_heads = self.frame.num_heads * kv_heads // max(1, planned)
        for traveller in self.travellers:
            count = num_tokens(traveller.rows) * num_heads
            if rank in traveller.hosts:
                total += count * sent
            if rank == traveller.owner:
                total += count * returned * len(traveller.hosts)
        return whole(total)

    def load(self, rank: int) -> int | float:
        """Number of (query, key) pairs that a rank computes in a forward pass.

        A pair in several branches counts several times. Sum over heads, mean over batch entries.
        """
        rank = checked_integer("rank", rank, 0, self.world_size - 1)
        return whole(self.loads[rank].item())

    @once
    def tokens(self) -> Tensor:
        """Number of (token, kv head) pairs to send, [receiver, sender], of all batch entries."""
        world = self.world_size
        sizes = [runs.sizes(world**2).view(world, world) for runs in self.needs]
        zeros = torch.zeros(world, world, dtype=torch.int64)
        return sum((sizes[number] for row in self.need_of for number in row), zeros)

    @once
    def loads(self) -> Tensor:
        """The `load` of each rank, float64 [world size]."""
        return self._loads(None)

    def _loads(self, shared: FineVisits | None) -> Tensor:
        """Computes `loads`; `shared` has the visits of several shardings, which saves time."""
        world = self.world_size
        travellers = [(t.owner, t.rows) for t in self.travellers]
        sides = cut(self.ranges, travellers), cut(self.ranges)
        loads = torch.zeros(world, dtype=torch.float64)
        tiles = tiles_of(self.pattern)
        for branches, heads in distinct_heads(tiles, self.frame).items():
            labels = world + len(travellers)
            if shared is None:
                pairs = count_pairs(list(branches), self.frame, *sides, world, labels).double()
            else:
                pairs = shared.count_pairs(branches, *sides, world, labels).double()
            loads += (pairs[:world].sum(1) + pairs[world:].sum(0)) * len(heads)
        loads /= tiles.num_batches() or 1
        if (of_lists := listed(self.pattern, self.frame, *sides, world)) is not None:
            loads += of_lists.pairs[:world].sum(1) + of_lists.pairs[world:].sum(0)
        return loads

    @once
    def answer_rounds(self) -> tuple[tuple[int, ...], ...]:
        """Rounds in which results of query rows return to the rows' owners, as tuples of distances.

        A round is a tuple of offsets s: rank r receives from the ranks (r + s) % world_size. In a
        round, a rank receives at most as many rows as the largest shard has, or a single message.
        """
        world = self.world_size
        rows = [0] * world
        for traveller in self.travellers:
            rows[traveller.owner] += num_tokens(traveller.rows)
        offsets = sorted({(h - t.owner) % world for t in self.travellers for h in t.hosts})
        size = max(1, max(map(num_tokens, self.ranges)) // max(1, *rows))
        return tuple(tuple(offsets[i : i + size]) for i in range(0, len(offsets), size))

    @once
    def rounds(self) -> tuple[tuple[int, ...], ...]:
        """Rounds in which keys are sent, as tuples of distances between receiver and sender.

        A round is a tuple of offsets s: rank r receives from the ranks (r - s) % world_size. In a
        round, a rank receives at most as many keys as the largest shard has, or a single message.
        """
        world = self.world_size
        size = max(num_tokens(ranges) for ranges in self.ranges)
        limit = size * self.frame.num_kv_heads * len(self.need_of)
        ranks = torch.arange(world)
        rounds: list[tuple[int, ...]] = []
        received, sent = torch.zeros(world), torch.zeros(world)
        for offset in range(1, world):
            arrives = self.tokens[ranks, (ranks - offset) % world]
            if not arrives.any():
                continue
            leaves = arrives[(ranks + offset) % world]
            received, sent = received + arrives, sent + leaves
            if rounds and max(received.max(), sent.max()) <= limit:
                rounds[-1] = (*rounds[-1], offset)
            else:
                rounds.append((offset,))
                received, sent = arrives, leaves
        return tuple(rounds)

    def senders(self, rank: int, number: int) -> list[int]:
        """Ranks that send keys to `rank` in a round, in the order in which rows are stored."""
        peers = [(rank - offset) % self.world_size for offset in self.rounds[number]]
        return [sender for sender in peers if self.tokens[rank, sender]]

    def receivers(self, rank: int, number: int) -> list[int]:
        """Ranks to which `rank` sends keys in round `number`."""
        peers = [(rank + offset) % self.world_size for offset in self.rounds[number]]
        return [receiver for receiver in peers if self.tokens[receiver, rank]]

    def message_rows(self, receiver: int, sender: int, batch: int) -> int:
        """Number of key and value rows that a sender sends to a receiver, for `batch` sequences."""
        return int(self.tokens[receiver, sender]) * batch // len(self.need_of)

    def tokens_of(self, receiver: int, sender: int, batch: int, kv_head: int) -> Tensor:
        """Tokens whose keys a sender sends to a receiver for one kv head, in sending order."""
        needs = self.needs[self.need_of[batch if len(self.need_of) > 1 else 0][kv_head]]
        return needs.of(receiver * self.world_size + sender)

    def hosts_of(self, rank: int) -> list[int]:
        """Ranks to which a rank sends some of its query rows, ascending."""
        return sorted({host for t in self.travellers if t.owner == rank for host in t.hosts})

    def rows_of(self, owner: int, host: int | None = None) -> Ranges:
        """Positions of the query rows that `owner` sends to `host`, or to any rank if None."""
        travellers = [t for t in self.travellers if t.owner == owner]
        return [row for t in travellers if host is None or host in t.hosts for row in t.rows]

    def guests_of(self, host: int) -> Ranges:
        """Positions of the query rows that other ranks send to rank `host`, ascending."""
        return sorted(row for t in self.travellers if host in t.hosts for row in t.rows)

    @once
    def alike(self) -> bool:
        """Whether all batch entries and kv heads need the same tokens from other ranks."""
        return len({number for row in self.need_of for number in row}) == 1

    @property
    def cost(self) -> float:
        """Predicted cost of the busiest rank: pairs per head, plus 2,048 per received token."""
        received = self.tokens.sum(1) / len(self.need_of) / max(1, self.frame.num_kv_heads)
        pairs = self.loads / max(1, self.frame.num_heads)
        return float(f"{float((pairs + PAIRS_PER_TOKEN * received).max()):.6g}")

    @property
    def is_even(self) -> bool:
        """True if ranks receive nothing and have equal loads, so that no sharding can cost less."""
        return self.cost == float(f"{float(self.loads.mean() / max(1, self.frame.num_heads)):.6g}")


def _checked(
    pattern: object, seq_len: object, heads: object, kv_heads: object, block_size: object
) -> tuple[Frame, int]:
    """Checks what every plan is built from; returns the frame and the block size."""
    check_pattern(pattern)
    assert isinstance(pattern, Pattern)
    length = checked_integer("seq_len", seq_len, 0)
    frame = Frame.build(length, length, heads, kv_heads, 0)  # type: ignore[arg-type]
    if frame.num_heads and not frame.num_kv_heads:
        raise ValueError(
            f"num_kv_heads must be at least 1, got 0 with {frame.num_heads} query heads; leave "
            "it out for one kv head per query head"
        )
    check_fits(pattern, frame)
    return frame, checked_block_size(block_size)


def checked_widths(head_dim: int | tuple[int, int]) -> tuple[int, int]:
    """Returns (D, Dv) of D or (D, Dv); raises ValueError unless they are integers from 0 on."""
    widths = head_dim if isinstance(head_dim, tuple | list) else (head_dim, head_dim)
    if len(widths) != 2:
        raise ValueError(f"head_dim must be D or (D, Dv), got {shortened(repr(head_dim))}")
    d, dv = checked_integers("head_dim", widths, 0)
    return d, dv


def default_plan(pattern: Pattern, seq_len: int, world_size: Any, **options: Any) -> Any:
    """Builds a plan for the default block size of `attention`; options are those of `build`."""
    size = default_block_size(tiles_of(pattern), seq_len)
    return RingPlan.build(pattern, seq_len, world_size, block_size=size, **options)


def _plan(
    pattern: Pattern,
    frame: Frame,
    world: int,
    block_size: int,
    sharding: str,
    shared: FineVisits | None = None,
) -> RingPlan:
    """Builds a plan for a sharding without "auto", or returns it from the cache."""
    key = (pattern, frame, world, block_size, sharding)

    def build() -> RingPlan:
        ranges = owned_ranges(sharding, frame.kv_len, world)
        rows = global_rows(pattern, frame)
        candidates: list[tuple[int, Ranges]] = [
            (rank, [row]) for rank, owned in enumerate(ranges) for row in overlap(owned, rows)
        ]
        sides = cut(ranges, candidates), cut(ranges)
        needs, need_of = _needs(pattern, frame, *sides, world, shared)
        travellers: tuple[Traveller, ...] = ()
        if candidates:
            uses = [sum(row.count(number) for row in need_of) for number in range(len(needs))]
            most = max(map(num_tokens, ranges))
            travellers, needs = choose_travellers(needs, uses, candidates, frame, world, most)
        return RingPlan(*key, ranges, tuple(needs), tuple(map(tuple, need_of)), travellers)

    with record_function("sparsering::plan"):
        plan = layout_cache.keep(("plan", *key), build)
    if shared is not None and RingPlan.loads.stored(plan) is None:
        RingPlan.loads.store(plan, plan._loads(shared))
    return plan


def _needs(
    pattern: Pattern, frame: Frame, queries: Cut, keys: Cut, world: int, shared: FineVisits | None
) -> tuple[list[TokenRanges], list[list[int]]]:
    """Returns which keys each group of query rows needs: fields `needs`, `need_of` of a plan."""
    tiles = tiles_of(pattern)
    of_tiles = [[0] * frame.num_kv_heads for _ in range(tiles.num_batches() or 1)]
    in_tiles: list[TokenRanges] = []
    for masks, places in distinct_kv_heads(tiles, frame).items():
        for batch, head in places:
            of_tiles[batch][head] = len(in_tiles)
        if shared is None:
            in_tiles.append(needed_keys(list(masks), frame, queries, keys, world))
        else:
            in_tiles.append(shared.needed_keys(masks, queries, keys, world))
    if not in_tiles:  # there are no heads or no batch entries
        in_tiles.append(needed_keys([], frame, queries, keys, world))
    if (of_lists := listed(pattern, frame, queries, keys, world)) is None:
        return in_tiles, of_tiles
    in_lists = [[needs] for needs in of_lists.needs]
    return united(in_tiles, of_tiles, in_lists, of_lists.need_of, frame.kv_len)


def _choose_sharding(pattern: Pattern, frame: Frame, world: int, block_size: int, name: str) -> str:
    """Returns the sharding that "auto" or "balanced" (`name`) means here, by `RingPlan.cost`."""

    def choose() -> str:
        if world == 1:
            return "contiguous"
        of_chunks = owned_ranges("contiguous", frame.kv_len, _CHUNKS_PER_RANK * world)
        shardings = [of_chunks]
        if name == "auto":
            shardings += [owned_ranges(x, frame.kv_len, world) for x in ("contiguous", "zigzag")]
        tiles = tiles_of(pattern)
        masks = dict.fromkeys(mask for masks in distinct_heads(tiles, frame) for mask in masks)
        shared = FineVisits(masks, frame, shardings, global_rows(pattern, frame))
        even = _balanced(pattern, frame, world, shared)
        if name == "balanced":
            return even
        plans = []
        for sharding in ("contiguous", "zigzag", even):
            plans.append(_plan(pattern, frame, world, block_size, sharding, shared))
            if sharding == "contiguous" and plans[0].is_even:
                break
        return min(plans, key=lambda plan: plan.cost).sharding

    return layout_cache.keep(("sharding", pattern, frame, world, name), choose)


def _balanced(pattern: Pattern, frame: Frame, world_size: int, shared: FineVisits) -> str:
    """Assigns 8 chunks to each rank, so that loads are even and few tokens move: "chunks:0,2,...".

    It assigns the chunks with the most pairs first. A chunk goes to the rank with the least cost:
    the pairs that the rank has so far, minus the cost of the tokens that the chunk and the rank's
    chunks need from each other, because these need not be sent within a rank.
    """
    if frame.kv_len < _CHUNKS_PER_RANK * world_size:
        return "contiguous"
    chunks = _CHUNKS_PER_RANK * world_size
    pieces = cut(owned_ranges("contiguous", frame.kv_len, chunks))
    load = torch.zeros(chunks, dtype=torch.float64)
    tokens = torch.zeros(chunks, chunks, dtype=torch.float64)
    tiles = tiles_of(pattern)
    for branches, places in distinct_heads(tiles, frame).items():
        load += shared.count_pairs(branches, pieces, pieces, chunks, chunks).sum(1) * len(places)
        runs = shared.needed_keys(branches, pieces, pieces, chunks)
        tokens += runs.sizes(chunks * chunks).view(chunks, chunks) * len(places)
    if (of_lists := listed(pattern, frame, pieces, pieces, chunks)) is not None:
        load += of_lists.pairs.sum(1) * len(of_lists.need_of)
        for item in (item for row in of_lists.need_of for item in row):
            tokens += of_lists.needs[item].sizes(chunks * chunks).view(chunks, chunks)
    tokens = tokens + tokens.T
    # together[chunk, rank]: tokens that stay on the rank if it gets the chunk
    together = torch.zeros(chunks, world_size, dtype=torch.float64)
    sums, room = torch.zeros(world_size, dtype=torch.float64), [_CHUNKS_PER_RANK] * world_size
    owners = [0] * chunks
    for chunk in load.argsort(descending=True, stable=True).tolist():
        cost = sums - PAIRS_PER_TOKEN * together[chunk]
        cost[torch.tensor(room) == 0] = torch.inf
        rank = int(cost.argmin())
        owners[chunk], room[rank] = rank, room[rank] - 1
        sums[rank] += load[chunk]
        together[:, rank] += tokens[:, chunk]
    return "chunks:" + ",".join(map(str, owners))


def whole(number: float) -> int | float:
    """Returns a number without a fraction as an int."""
    return int(number) if float(number).is_integer() else number
