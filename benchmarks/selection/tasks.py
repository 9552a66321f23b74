"""Data: flagged facts, associative recall, and the standard library's sources as bytes."""

import hashlib
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Generator, Tensor

FACTS, VALUES, QUERIES = 16, 32, 64  # facts of a block, value tokens, queries of a sequence


def generator(seed: int) -> Generator:
    """Random numbers of their own."""
    return torch.Generator().manual_seed(seed)


@dataclass(frozen=True)
class Facts:
    """A batch of flagged facts: in each block, one fact that a question may be about.

    Attributes:
        keys, values: int64 [B, N], a fact each.
        flags: bool [B, N], one to a block.
        questions: int64 [B, 64], the key of a flagged fact each.
        answers: int64 [B, 64], its value.
        blocks: int64 [B, 64], the block that it lies in.
    """

    keys: Tensor
    values: Tensor
    flags: Tensor
    questions: Tensor
    answers: Tensor
    blocks: Tensor


def flagged_facts(batch: int, blocks: int, num_keys: int, random: Generator) -> Facts:
    """Flagged keys differ within a sequence; the others are uniform, so that they repeat them.

    Whoever looks at keys alone finds a flagged one in about every block that has it: what matters
    is the one flag among 16 facts, which no mean over a block shows.
    """
    tokens = blocks * FACTS
    keys = torch.randint(num_keys, (batch, tokens), generator=random)
    values = torch.randint(VALUES, (batch, tokens), generator=random)
    places = torch.randint(FACTS, (batch, blocks), generator=random)
    places = places + FACTS * torch.arange(blocks)
    different = torch.rand(batch, num_keys, generator=random).argsort(1)[:, :blocks]
    keys.scatter_(1, places, different)
    flags = torch.zeros(batch, tokens, dtype=torch.bool).scatter_(1, places, True)
    chosen = torch.randint(blocks, (batch, QUERIES), generator=random)
    at = places.gather(1, chosen)
    return Facts(keys, values, flags, keys.gather(1, at), values.gather(1, at), chosen)


@dataclass(frozen=True)
class Pairs:
    """A batch of associative recall: pairs of key and value first, then each key once more.

    Attributes:
        tokens: int64 [B, N].
        targets: int64 [B, N], the value at a key's second place, else -1.
        distances: int64 [B, N], tokens back to the value, else 0.
    """

    tokens: Tensor
    targets: Tensor
    distances: Tensor


def recall_pairs(batch: int, tokens: int, pairs: int, vocabulary: int, random: Generator) -> Pairs:
    """MQAR (Arora et al., Zoology, 2312.04927) with uniform gaps, and fill that is no key.

    The first quarter of the vocabulary are keys, the second one values, the rest fills the gaps.
    """
    quarter = vocabulary // 4
    keys = torch.rand(batch, quarter, generator=random).argsort(1)[:, :pairs]
    values = torch.randint(quarter, 2 * quarter, (batch, pairs), generator=random)
    text = torch.randint(2 * quarter, vocabulary, (batch, tokens), generator=random)
    text[:, : 2 * pairs : 2], text[:, 1 : 2 * pairs : 2] = keys, values
    places = torch.rand(batch, tokens - 2 * pairs, generator=random).argsort(1)[:, :pairs]
    places = places + 2 * pairs
    text.scatter_(1, places, keys)
    targets = torch.full_like(text, -1).scatter_(1, places, values)
    back = places - (1 + 2 * torch.arange(pairs))
    return Pairs(text, targets, torch.zeros_like(text).scatter_(1, places, back))


@dataclass(frozen=True)
class Sources:
    """The standard library's sources, whole packages held out.

    Attributes:
        train, held_out: uint8 [bytes], files joined by a zero byte.
        packages: names of those held out.
        fingerprint: sha256 over the sorted files' names and bytes.
    """

    train: Tensor
    held_out: Tensor
    packages: tuple[str, ...]
    fingerprint: str


def standard_library(held_out: tuple[str, ...] = ("asyncio", "email", "unittest")) -> Sources:
    """Every `.py` of the running interpreter's library, without what is installed into it."""
    root = Path(sysconfig.get_path("stdlib"))
    files = {
        path.relative_to(root).as_posix(): path
        for path in root.rglob("*.py")
        if not {"site-packages", "dist-packages", "__pycache__"} & set(path.parts)
    }
    digest, sides = hashlib.sha256(), ([], [])
    for name in sorted(files):
        content = files[name].read_bytes()
        digest.update(name.encode() + b"\0" + content + b"\0")
        sides[name.split("/")[0] in held_out].append(content)
    train, rest = (
        torch.frombuffer(bytearray(b"\0".join(side)), dtype=torch.uint8) for side in sides
    )
    return Sources(train, rest, held_out, digest.hexdigest())


def windows(text: Tensor, tokens: int, batch: int, random: Generator) -> tuple[Tensor, Tensor]:
    """Bytes int64 [B, N] from random places of a text, and the bytes after each."""
    starts = torch.randint(len(text) - tokens, (batch, 1), generator=random)
    pieces = text[starts + torch.arange(tokens + 1)].long()
    return pieces[:, :-1], pieces[:, 1:]


def far_copies(tokens: Tensor, beyond: int, width: int = 12) -> Tensor:
    """Where the `width` bytes up to here occurred before, but only more than `beyond` back.

    Args:
        tokens: int64 [B, N].
        beyond: tokens.

    Returns: bool [B, N]: the byte that follows is one that only a far look can copy.
    """
    copies = torch.zeros_like(tokens, dtype=torch.bool)
    for row, line in enumerate(tokens.tolist()):
        latest: dict[tuple[int, ...], int] = {}
        for end in range(width, len(line) + 1):
            words = tuple(line[end - width : end])
            copies[row, end - 1] = words in latest and end - latest[words] > beyond
            latest[words] = end
    return copies
