"""`selection_loss`: trains a block scorer on the exact softmax mass of the blocks."""

import torch
import torch.distributed as dist
from torch import Tensor

from ..checks import check_tensor
from ..ground.keywords import with_hints
from ..ground.numerics import sum_dtype
from ..ground.rows import first_in_row
from .over_ranks import agreed, checks_of_a_rank


@with_hints()
def selection_loss(
    scores: Tensor,
    mass: Tensor,
    indices: Tensor | None = None,
    *,
    row_weight: Tensor | None = None,
    group: dist.ProcessGroup | None = None,
) -> Tensor:
    """Computes the KL divergence of attention mass from the softmax of scores, both over blocks.

    `L = sum_r w_r KL(p_r || softmax(s_r)) / sum_r w_r` with `p_r = mass_r / sum(mass_r)`; a row r
    is a group of queries that choose the same blocks. The gradient of s_r is
    `w_r (softmax(s_r) - p_r) / sum_r w_r`. Indices that are -1 or repeat a block, and blocks of
    score -inf, get no gradient, and their mass does not count. No gradient reaches the mass or the
    weights. A row without mass has weight 0. If all weights are 0, the loss and gradients are 0.

    Two stages train a scorer. While attention is dense, pass the mass of every block and no
    indices: the scorer learns where attention looks. Once attention is sparse, pass the indices and
    the `block_mass` of their blocks: the loss then compares shares among the selected blocks. The
    mass must come from the whole softmax of the attention: if a window or pooled keys share that
    softmax, give `block_mass` the joint lse.

    Args:
        scores: [B, H, R, Nb], -inf for blocks that a row does not see; differentiable.
        mass: [B, H or a multiple, R, m], not negative; heads that share a kv head are summed.
            m = Nb without indices, else the number of blocks that each row lists.
        indices: int64 [R, m], [H or 1, R, m] or [B or 1, H or 1, R, m], the blocks; default all.
        row_weight: w, at least 0, broadcasts to [B, H, R]; default 1.
        group: ranks of which each passes its own rows. Each gets its part: the sum over ranks is
            the loss of one process, and the sum of gradients its gradient.

    Returns: 0-d, float32 (float64 for float64 scores), in nats; at least 0.

    Raises: ValueError for invalid shapes. Over ranks, RingMismatchError (a ValueError) on all if
        one raised, and RingError if a peer died.

    Cost: O(B H R m) time and memory.

    Example:
        >>> mass = block_mass(query, key, pattern, lse)
        >>> loss = task_loss + selection_loss(scores, mass, pattern.indices)

    Source: DeepSeek-V3.2 (arXiv 2512.02556), equations 3 and 4.
    """
    if group is None or group.size() == 1:
        total, weight = _summed(scores, mass, indices, row_weight)
    else:
        total, weight = _summed_over_ranks(scores, mass, indices, row_weight, group)
    return total / torch.where(weight > 0, weight, 1.0)


def _summed_over_ranks(
    scores: Tensor,
    mass: Tensor,
    indices: Tensor | None,
    row_weight: Tensor | None,
    group: dist.ProcessGroup,
) -> tuple[Tensor, Tensor]:
    """Returns (this rank's sum of weighted row divergences, the weights of all ranks' rows)."""
    with checks_of_a_rank(group, scores):
        total, weight = _summed(scores, mass, indices, row_weight)
    common: dict[str, object] = {"dtype": scores.dtype, "weights": row_weight is None}
    bits = int(weight.double().view(torch.int64))  # messages hold integers only
    (of_ranks,) = agreed("selection_loss", group, scores, common, bits)
    weights = torch.tensor(of_ranks, device=weight.device).view(torch.float64)
    return total, weights.sum().to(weight.dtype)


def _summed(
    scores: Tensor, mass: Tensor, indices: Tensor | None, row_weight: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Returns (sum of the rows' divergences times their weights, sum of the weights)."""
    check_tensor("scores", scores, "[B, H, R, Nb]")
    if scores.dim() != 4 or not scores.is_floating_point():
        raise ValueError(
            f"scores must be floating point [B, H, R, Nb], got {scores.dtype} "
            f"{tuple(scores.shape)}; block_scores and BlockScorer return them"
        )
    dtype = sum_dtype(scores)
    batch, heads, rows, blocks = scores.shape
    mass = checked_mass(mass, heads, rows).to(dtype)
    for name, x in (("mass", mass), ("indices", indices), ("row_weight", row_weight)):
        if isinstance(x, Tensor) and x.device != scores.device:
            raise ValueError(
                f"{name} must be on the device of the scores, {scores.device}, got {x.device}; "
                "move it with .to()"
            )
    if mass.shape[0] != batch or (indices is None and mass.shape[3] != blocks):
        raise ValueError(
            f"mass must have the {batch} batch entries and {blocks} blocks of the scores, got "
            f"{tuple(mass.shape)}; if it has selected blocks only, pass their indices"
        )
    score = scores.to(dtype)
    if not blocks:
        return score.sum(), score.new_zeros(())
    listed = torch.ones_like(score, dtype=torch.bool)
    if indices is not None:
        indices = checked_slots(indices, mass.shape)
        listed = first_in_row(indices, blocks)
        score = score.gather(3, torch.where(listed, indices, 0))
    listed = listed & (score != -torch.inf)
    log_share = torch.where(listed, score, torch.finfo(dtype).min).log_softmax(3)
    mass = torch.where(listed, mass, 0.0)
    total = mass.sum(3)
    share = mass / torch.where(total > 0, total, 1.0)[..., None]
    divergence = (share.xlogy(share) - share * torch.where(listed, log_share, 0.0)).sum(3)
    weight = (total > 0).to(dtype)
    if row_weight is not None:
        check_tensor("row_weight", row_weight, "[rows]")
        sizes = zip(row_weight.shape[::-1], weight.shape[::-1], strict=False)
        if row_weight.dim() > 3 or not all(n in (1, m) for n, m in sizes):
            raise ValueError(
                f"row_weight must broadcast to {tuple(weight.shape)}, one for each row of the "
                f"scores, got {tuple(row_weight.shape)}; add a missing dim with unsqueeze()"
            )
        weight = weight * row_weight.detach().to(dtype)
    return (weight * divergence).sum(), weight.sum()


def listed_blocks(indices: Tensor, num_blocks: int) -> Tensor:
    """Marks the key blocks that each row lists: bool [B or 1, H or 1, R, num_blocks].

    `indices` [R, k], [H, R, k] or [B, H, R, k] has the k blocks of each row; numbers outside 0 to
    num_blocks - 1 are ignored.
    """
    indices = indices.view((1,) * (4 - indices.dim()) + indices.shape)
    valid = (indices >= 0) & (indices < num_blocks)
    mask = indices.new_zeros(*indices.shape[:3], num_blocks + 1, dtype=torch.bool)
    return mask.scatter(3, torch.where(valid, indices, num_blocks), True)[..., :num_blocks]


def checked_mass(mass: Tensor, heads: int, rows: int) -> Tensor:
    """Checks masses [B, heads * G, rows, slots], and sums the G query heads that share a choice."""
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
    """Expands indices to `shape` [B, H, R, m]; ValueError if they do not broadcast to that."""
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
