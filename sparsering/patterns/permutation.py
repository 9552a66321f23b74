"""Seeded permutations of [0, n) and their inverses, computed element by element, without a table.

A Feistel network of four rounds permutes [0, 4^h), where 4^h is the least power of 4 from n up; it
is repeated until its result is below n. `RandomBlocks` gives each query block a permutation: the
images of 0 to c - 1 are its c random key blocks. So a key block is chosen if its inverse image is
below c.
"""

import torch
from torch import Tensor

from ..rows import SPLITMIX

_ROUNDS = 4


def permute(index: Tensor, size: Tensor, key: Tensor) -> Tensor:
    """Returns the image of `index` in the permutation of [0, size) with seed `key`."""
    return _walk(index, size, key, inverse=False)


def unpermute(image: Tensor, size: Tensor, key: Tensor) -> Tensor:
    """Returns the index that `permute` maps to `image`."""
    return _walk(image, size, key, inverse=True)


def _walk(value: Tensor, size: Tensor, key: Tensor, inverse: bool) -> Tensor:
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
    """Runs the rounds; the inverse runs them in reverse order, on swapped halves."""
    half_mask = (1 << half_bits) - 1
    left, right, rounds = value >> half_bits, value & half_mask, range(_ROUNDS)
    if inverse:
        left, right, rounds = right, left, rounds[::-1]
    for number in rounds:
        left, right = right, left ^ (_scramble(right, key, number) & half_mask)
    if inverse:
        left, right = right, left
    return (left << half_bits) | right


def _scramble(half: Tensor, key: Tensor, number: int) -> Tensor:
    """Feistel round function of round `number`; equal rounds would bias small permutations."""
    state = (key ^ (number << 40)) * SPLITMIX[1] + half * SPLITMIX[0]
    for multiplier in SPLITMIX:
        state = (state ^ (state >> 29)) * multiplier
    return state ^ (state >> 32)
