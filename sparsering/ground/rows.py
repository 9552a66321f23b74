"""Operations on rows of integers: expanding counts, numbering distinct rows, hashing."""

from typing import Any

import torch
from torch import Tensor

SPLITMIX = (-4658895280553007687, -7723592293110705685)  # splitmix64's multipliers, as int64


def expand_counts(count: Tensor) -> tuple[Tensor, Tensor]:
    """Returns each item's row and its index in the row, if row i has `count[i]` items."""
    row = torch.arange(len(count), device=count.device).repeat_interleave(count)
    return row, torch.arange(len(row), device=count.device) - (count.cumsum(0) - count)[row]


def number_rows(columns: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Numbers the distinct rows of a table, given its columns, in sorted order.

    Returns: the number of each row; for each number, the index of one of its rows.
    """
    group = torch.zeros_like(columns[0])
    for column in columns:
        if (column != column[0]).any():
            _, rank = column.unique(return_inverse=True)
            _, group = (group * (int(rank.max()) + 1) + rank).unique(return_inverse=True)
    first = torch.zeros(int(group.max()) + 1, dtype=torch.int64, device=group.device)
    first[group] = torch.arange(len(group), device=group.device)
    return group, first


def first_in_row(numbers: Tensor, stop: int) -> Tensor:
    """Returns bool [..., k], True at the first of equal numbers in a row, if it is in [0, stop)."""
    ordered, order = numbers.sort(dim=-1, stable=True)
    repeated = torch.zeros_like(ordered, dtype=torch.bool)
    repeated[..., 1:] = ordered[..., 1:] == ordered[..., :-1]
    repeated = torch.zeros_like(repeated).scatter(-1, order, repeated)
    return (numbers >= 0) & (numbers < stop) & ~repeated


def distinct_in_rows(numbers: Tensor, stop: int) -> tuple[Tensor, Tensor, Tensor]:
    """Sorts rows of integers [..., k]; numbers outside [0, stop) and repeats are left out.

    Returns: the numbers of each row, ascending, and -1 behind them, [..., k]; how many they are,
    int32 [...]; for each of them its index in the row, int64 [..., k], that of the first of equal
    numbers, and 0 behind them.
    """
    length, last = numbers.shape[-1], torch.iinfo(numbers.dtype).max
    inside = (numbers >= 0) & (numbers < stop)
    ordered, index = torch.where(inside, numbers, last).sort(dim=-1, stable=True)
    first = ordered < last
    first[..., 1:] &= ordered[..., 1:] != ordered[..., :-1]
    place = first.cumsum(-1)
    counts = first.sum(-1, dtype=torch.int32)
    place = torch.where(first, place - 1, length)  # one column more takes what is left out
    of_place = index.new_zeros(*index.shape[:-1], length + 1).scatter_(-1, place, index)
    of_place = of_place[..., :length].contiguous()
    exists = torch.arange(length, device=numbers.device) < counts[..., None]
    return torch.where(exists, numbers.gather(-1, of_place), -1), counts, of_place


def distinct_rows(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the distinct rows of a byte matrix, and for each row its index among them."""
    words = rows.view(torch.int64) if rows.shape[1] % 8 == 0 else rows.long()
    words = words * SPLITMIX[0]  # sums of plain words are often equal: bitmaps are regular
    digest = ((words ^ (words >> 31)) * mix(torch.arange(words.shape[1]))).sum(1)
    _, rank = digest.unique(return_inverse=True)
    first = torch.zeros(int(rank.max()) + 1 if len(rank) else 0, dtype=torch.int64)
    first[rank.flip(0)] = torch.arange(len(rank)).flip(0)
    if not torch.equal(rows[first][rank], rows):  # two different rows have the same hash
        distinct, rank = rows.unique(dim=0, return_inverse=True)
        return distinct, rank
    return rows[first], rank


def mix(*parts: int | Tensor) -> Tensor:
    """Hashes a tuple of ints, or of integer tensors that broadcast, to int64 in [0, 2^62)."""
    plain = all(type(part) is int for part in parts)  # Python ints take a tenth of the time

    def wrapped(x: Any) -> Any:
        return (x + 2**63) % 2**64 - 2**63 if plain else x

    state: Any = 0
    for part in parts:
        number: Any = part if plain else torch.as_tensor(part).long()
        if isinstance(state, Tensor) and state.is_cuda and number.dim():
            state = state.to(number.device)  # torch itself moves only CPU scalars
        state = wrapped(number + state * 31 + 0x9E3779B9)
        for multiplier, shift in zip(SPLITMIX, (30, 27), strict=True):
            state = wrapped((state ^ (state >> shift)) * multiplier)
        state = state ^ (state >> 31)
    return torch.as_tensor(state) & (2**62 - 1)


def permute(value: Tensor, size: Tensor, key: Tensor, inverse: bool = False) -> Tensor:
    """Maps numbers in [0, size) by a random permutation that the seed `key` determines.

    With `inverse`, the inverse permutation.

    A Feistel network permutes [0, 4^h), the smallest such range that covers size; it is applied
    again until the result is below size. Arguments broadcast.
    """
    every = torch.broadcast_tensors(value, size, key)
    value, size, key = (x.flatten() for x in every)
    half_bits = torch.ones_like(size)  # smallest h >= 1 with 4^h >= size
    while (small := (1 << (2 * half_bits)) < size).any():
        half_bits = half_bits + small
    image = _network(value, half_bits, key, inverse)
    while len(outside := torch.nonzero(image >= size)[:, 0]):
        image[outside] = _network(image[outside], half_bits[outside], key[outside], inverse)
    return image.view(every[0].shape)


def _network(value: Tensor, half_bits: Tensor, key: Tensor, inverse: bool) -> Tensor:
    """Permutes numbers of 2 * half_bits bits by four Feistel rounds, as `permute` needs.

    The inverse runs the rounds in reverse order, on swapped halves.
    """
    half_mask = (1 << half_bits) - 1
    left, right, rounds = value >> half_bits, value & half_mask, range(4)
    if inverse:
        left, right, rounds = right, left, rounds[::-1]
    for number in rounds:
        left, right = right, left ^ (_scramble(right, key, number) & half_mask)
    if inverse:
        left, right = right, left
    return (left << half_bits) | right


def _scramble(half: Tensor, key: Tensor, number: int) -> Tensor:
    """Hashes one half of each number's bits with the key, for round `number` of a Feistel network.

    It depends on `number`, because equal rounds would bias small permutations.
    """
    state = (key ^ (number << 40)) * SPLITMIX[1] + half * SPLITMIX[0]
    for multiplier in SPLITMIX:
        state = (state ^ (state >> 29)) * multiplier
    return state ^ (state >> 32)
