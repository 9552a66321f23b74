"""Checks the indices [.., R, k] of selected blocks, and marks the key blocks of each of R rows."""

import torch
from torch import Tensor

from ..checks import check_tensor
from ..numerics import sum_dtype


def listed_blocks(indices: Tensor, num_blocks: int) -> Tensor:
    """Marks the key blocks that each row of indices lists: bool [B or 1, H or 1, R, num_blocks]."""
    indices = indices.view((1,) * (4 - indices.dim()) + indices.shape)
    valid = (indices >= 0) & (indices < num_blocks)
    mask = indices.new_zeros(*indices.shape[:3], num_blocks + 1, dtype=torch.bool)
    return mask.scatter(3, torch.where(valid, indices, num_blocks), True)[..., :num_blocks]


def checked_mass(mass: Tensor, heads: int, rows: int) -> Tensor:
    """Checks masses of slots [B, heads * G, rows, slots]; sums them over groups of G heads."""
    check_tensor("mass", mass, "[batch, heads, rows, slots]")
    group = mass.shape[1] // max(1, heads) if mass.dim() == 4 else 0
    fits = mass.dim() == 4 and mass.is_floating_point() and mass.shape[1:3] == (group * heads, rows)
    if not fits or (heads and not group):
        raise ValueError(
            f"mass must be floating point [B, a multiple of {heads} heads, {rows} rows, slots], "
            f"got {mass.dtype} {tuple(mass.shape)}; block_mass returns it for the same selection"
        )
    return mass.detach().unflatten(1, (heads, group)).sum(2, dtype=sum_dtype(mass))


def checked_slots(indices: Tensor, shape: torch.Size) -> Tensor:
    """Expands indices to `shape`, [B, H, R, m]; ValueError if they do not broadcast to it."""
    check_tensor("indices", indices, "[..., rows, slots]")
    fits = indices.dtype == torch.int64 and 2 <= indices.dim() <= 4
    fits = fits and indices.shape[-2:] == shape[-2:]
    outer = indices.shape[:-2][::-1] if fits else ()
    fits = fits and all(n in (1, m) for n, m in zip(outer, shape[:-2][::-1], strict=False))
    if not fits:
        raise ValueError(
            f"indices must be int64 that broadcast to the shape of mass, {tuple(shape)}, got "
            f"{indices.dtype} {tuple(indices.shape)}; pass the indices of the SelectedBlocks "
            "whose mass was computed"
        )
    return indices.expand(shape)
