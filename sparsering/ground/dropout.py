"""Dropout by hashing: a weight's seed and position decide whether it is kept, in every kernel.

Each row of scores (seed, batch entry, query head, branch of a mixture, query position) hashes to
two 32-bit words a and b. A key position k then gives

    x = (k * 0x9E3779B1) ^ a
    x = (x ^ (x >> 16)) * 0x21F0AAAD
    x = ((x ^ (x >> 15)) + b) * 0xD35A2D97

modulo 2^32, and the pair is kept if x, as a signed number, is at least round(p * 2^32) - 2^31.
Besides the product with k, which rows share, this takes two multiplications per pair; Philox takes
twenty. With one multiplication less, or if the key is not multiplied first, neighboring pairs are
dependent; `tests/attention/test_dropout.py` measures that. A row repeats after 2^32 keys. Two rows
share both words with probability 2^-64.

Source: the multipliers and shifts are those of hash-prospector's two-round 32-bit hash
(https://github.com/skeeto/hash-prospector), 0x9E3779B1 is 2^32 over the golden ratio.
"""

from numbers import Real

import torch
from torch import Tensor

from .arguments import index_of, shortened
from .keywords import with_hints
from .rows import mix

KEY_MULTIPLIER = 0x9E3779B1 - (1 << 32)  # constants are written as signed int32
MULTIPLIERS = (0x21F0AAAD, 0xD35A2D97 - (1 << 32))
ADDENDS = (0x9E3779B9 - (1 << 32), 0x7F4A7C15)  # for the words a and b


def batch_seeds(seed: Tensor, batch: int, device: torch.device | None = None) -> Tensor:
    """Derives an int64 seed for each batch entry, [batch], on a device (default: the seed's).

    A seed on the CPU needs no copy to a GPU, because kernels get it as a number.
    """
    return mix(seed, torch.arange(batch, device=seed.device if device is None else device))


def seeds_of_heads(seed: Tensor, first: int) -> Tensor:
    """Returns seeds with which head j drops what head `first + j` drops with `seed`.

    It holds for groups of 1, 2, 4, 8, ... heads that begin at a multiple of their number: there
    `first + j` is `first ^ j`, and the hash begins with `word ^ head`.
    """
    return seed ^ (first << 32 | first)


def drawn_seed(like: Tensor) -> Tensor:
    """Draws a seed for dropout, int64 [], from torch's generator of the tensor's device."""
    return torch.randint(2**62, (), device=like.device)


def kept_pairs(
    seed: Tensor, p: float, head: Tensor | int, query: Tensor, key: Tensor, branch: Tensor | int = 0
) -> Tensor:
    """Returns bool, True where dropout keeps the weight of a pair; all arguments but p broadcast.

    Args:
        seed: int64, of the batch entry.
        p: probability that a weight is dropped.
        head: query head.
        query, key: int64 absolute positions, under `Packed` too.
        branch: index of the mask in a mixture.
    """
    a, b = _words(seed, head, branch, query)
    x = key.int() * KEY_MULTIPLIER ^ a
    x = (x ^ _shifted(x, 16)) * MULTIPLIERS[0]
    x = ((x ^ _shifted(x, 15)) + b) * MULTIPLIERS[1]
    return x >= threshold(p)


def threshold(p: float) -> int:
    """Returns the least hash, as a signed 32-bit number, at which dropout p keeps a pair."""
    return min(round(p * 2**32), 2**32 - 1) - 2**31


def _words(
    seed: Tensor, head: Tensor | int, branch: Tensor | int, query: Tensor
) -> tuple[Tensor, Tensor]:
    """Hashes a row of scores to the two 32-bit words a and b that the module's docstring uses."""
    words = []
    for word, addend in zip((seed & 0xFFFFFFFF, seed >> 32), ADDENDS, strict=True):
        x = word.int()
        for part in (head, branch, query):
            x = (x ^ (part.int() if isinstance(part, Tensor) else part)) + addend
            x = (x ^ _shifted(x, 16)) * MULTIPLIERS[0]
            x = (x ^ _shifted(x, 15)) * MULTIPLIERS[1]
            x = x ^ _shifted(x, 15)
        words.append(x)
    return words[0], words[1]


def _shifted(x: Tensor, bits: int) -> Tensor:
    """Shifts int32 right by `bits` and fills with zeros; `>>` would repeat the sign bit."""
    return (x >> bits) & ((1 << (32 - bits)) - 1)


@with_hints()
def dropout_kept(
    seed: int | Tensor,
    p: float,
    batch: int | Tensor,
    head: int | Tensor,
    query_positions: int | Tensor,
    key_positions: int | Tensor,
    branch: int | Tensor = 0,
) -> Tensor:
    """Whether `attention(dropout_p=p, dropout_seed=seed)` keeps the weights of pairs.

    Args:
        seed: int, or int64 tensor without dims.
        p: share of the weights that is dropped, 0 <= p < 1.
        batch, head: index of the batch entry, and of the query head.
        query_positions, key_positions: absolute positions.
        branch: index of the branch of a mixture. This and the four arguments before it are ints or
            int64 tensors, and broadcast.

    Returns: bool, of the broadcast shape.

    Raises: ValueError for a p out of range or a seed that is no int64.
    """
    seed = checked_seed(seed)
    checked_probability(p)
    places = {"batch": batch, "head": head, "query_positions": query_positions}
    places |= {"key_positions": key_positions, "branch": branch}
    numbers = {name: _checked_numbers(name, x) for name, x in places.items()}
    try:
        entry, head, query, key, branch = torch.broadcast_tensors(*numbers.values())
    except RuntimeError:
        shapes = ", ".join(f"{name} {tuple(x.shape)}" for name, x in numbers.items())
        raise ValueError(
            f"positions must broadcast, got {shapes}; add dims by x[:, None]"
        ) from None
    return kept_pairs(mix(seed, entry), float(p), head, query, key, branch)


def checked_probability(p: object) -> float:
    """Returns p, the share to drop, as a float; raises ValueError unless 0 <= p < 1."""
    number = isinstance(p, Real) and not isinstance(p, bool)
    if not number or not 0 <= p < 1:  # type: ignore[operator]
        got = "a tensor" if isinstance(p, Tensor) else shortened(repr(p))
        raise ValueError(f"dropout_p must be a number with 0 <= p < 1, got {got}; 0.0 drops none")
    return float(p)  # type: ignore[arg-type]


def checked_seed(seed: object) -> Tensor:
    """Returns a seed as an int64 tensor without dims; ValueError if it is no 64-bit integer."""
    if (number := _as_int64(seed)) is not None and not number.dim():
        return number
    got = shortened(repr(seed))
    if isinstance(seed, Tensor):
        shape = "" if seed.is_nested else f", of shape {tuple(seed.shape)}"
        got = f"a tensor of {seed.dtype}{shape}"
    raise ValueError(
        f"dropout_seed must be an int of 64 bits or an int64 tensor without dims, got {got}; "
        "None draws one"
    )


def _checked_numbers(name: str, x: object) -> Tensor:
    if (numbers := _as_int64(x)) is not None:
        return numbers
    got = f"a {x.dtype} tensor on {x.device}" if isinstance(x, Tensor) else shortened(repr(x))
    raise ValueError(
        f"{name} must be an int or a dense int64 tensor of numbers, got {got}; cast with .long()"
    )


def _as_int64(x: object) -> Tensor | None:
    """Returns an int64 tensor unchanged, a 64-bit integer as a tensor, other values as None."""
    if isinstance(x, Tensor):
        return x if x.dtype == torch.int64 and not (x.is_nested or x.is_meta) else None
    number = index_of(x)
    fits = number is not None and -(2**63) <= number < 2**63
    return torch.tensor(number, device="cpu") if fits else None
