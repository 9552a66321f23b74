"""Key masks, which hide single keys from all queries, such as padding.

Key masks do not depend on queries, so layouts can ignore them: `without_key_masks` splits them off
a pattern, and `key_mask` combines them in one tensor, an input of the kernels.
"""

from dataclasses import dataclass
from functools import reduce
from typing import ClassVar

import torch
from torch import Tensor

from ..ground.arguments import freeze_lengths, same_lengths, same_tensor
from ..ground.keywords import class_with_hints
from ..ground.streams import capturing, moved
from .algebra import And, Frame, Mask, Mixture, Pattern
from .blocks import TensorMask
from .positions import GlobalTokens, intersection


@class_with_hints
@dataclass(frozen=True, repr=False, eq=False)
class KeyPadding(Mask):
    """A query of a batch entry sees the first `lengths[batch]` keys; the other keys are padding.

    `lengths`: a sequence of ints, or an int64 tensor [B], which is data of compiled functions.

    Example: `Causal() & KeyPadding((100, 256))` for a batch of two, padded on the right.
    """

    lengths: tuple[int, ...] | Tensor

    def _validate(self) -> None:
        freeze_lengths(self, "lengths", nested=False)

    def at(self, batch: int, head: int, frame: Frame) -> Mask:
        return GlobalTokens(int(self.lengths[batch]), rows=False)

    def num_batches(self) -> int | None:
        return len(self._given_or_own("lengths"))


@class_with_hints
@dataclass(frozen=True, repr=False, eq=False)
class KeyMask(TensorMask):
    """A query sees the keys where `valid` is True: any key may be padding.

    Create the mask once and reuse it: caches compare tensors on a GPU by identity, not by content.

    Args:
        valid: bool [Nk], or [B, Nk] for each batch entry; copied. It may be on any device.

    Example: `Causal() & KeyMask(token_ids != padding_id)`.
    """

    valid: Tensor
    table_dims: ClassVar[tuple[int, ...]] = (1, 2)
    asks_frame = False

    def _validate(self) -> None:
        valid = self.valid
        if isinstance(valid, Tensor) and valid.dtype != torch.bool:
            raise TypeError(
                "KeyMask needs a bool tensor, True where a key may be attended, got "
                f"{valid.dtype}; convert ones and zeros by .bool(), zeros and -inf by == 0"
            )
        if isinstance(valid, Tensor) and valid.dim() not in self.table_dims:
            shape = tuple(valid.shape)
            way_out = "Dense(mask) takes a mask of pairs [Nq, Nk]"
            if valid.dim() == 4 and shape[1:3] == (1, 1):
                way_out = "index it by [:, 0, 0]"
            raise ValueError(f"KeyMask needs [Nk] or [B, Nk], got shape {shape}; {way_out}")
        super()._validate()

    def at(self, batch: int, head: int, frame: Frame) -> Mask:
        if self.valid.dim() == 1 and self.valid.device.type == "cpu":
            return self
        return KeyMask((self.valid[batch] if self.valid.dim() == 2 else self.valid).cpu())

    def num_batches(self) -> int | None:
        return self.valid.shape[0] if self.valid.dim() == 2 else None

    def num_tables(self, frame: Frame) -> int:
        return 1

    @property
    def own_length(self) -> int:
        return self.valid.shape[-1]

    def check(self, frame: Frame) -> None:
        if self.valid.shape[-1] != frame.kv_len:
            raise ValueError(
                f"KeyMask must have a bool for each of {frame.kv_len} keys, got shape "
                f"{tuple(self.valid.shape)}; pad it with False, or slice it like the keys"
            )

    def holds(self, p: Tensor, k: Tensor, frame: Frame) -> Tensor:
        if not (length := len(self.valid)):
            return (p != p) | (k != k)
        return self.valid[k.clamp(0, length - 1)] & (k >= 0) & (k < length) | (p != p)


KeyMasks = tuple[KeyMask | KeyPadding, ...]


def without_key_masks(pattern: Pattern) -> tuple[Pattern, KeyMasks]:
    """Splits key masks off that every branch has, and returns (the rest of the pattern, key masks).

    Returns (pattern, ()) if branches have different key masks. Never waits for a GPU.
    """
    if "_without_key_masks" in vars(pattern):
        return vars(pattern)["_without_key_masks"]
    split = _without_key_masks(pattern)
    # A pattern that refers to itself would live until a garbage collection.
    itself = any(mask is pattern for mask in split[1])
    if split[1] and not itself and not torch.compiler.is_compiling():
        object.__setattr__(pattern, "_without_key_masks", split)
    return split


def _without_key_masks(pattern: Pattern) -> tuple[Pattern, KeyMasks]:
    """Computes the result of `without_key_masks`, which caches it in the pattern."""
    rests: list[Mask] = []
    common: KeyMasks = ()
    for branch in pattern.branches:
        parts = branch.masks if isinstance(branch, And) else (branch,)
        masks = tuple(part for part in parts if isinstance(part, KeyMask | KeyPadding))
        if not masks or (common and not _same_masks(masks, common)):
            return pattern, ()
        common = masks
        others = [part for part in parts if not isinstance(part, KeyMask | KeyPadding)]
        rests.append(intersection(others))
    return Mixture(tuple(rests)) if isinstance(pattern, Mixture) else rests[0], common


def _same_masks(some: KeyMasks, others: KeyMasks) -> bool:
    """Whether two tuples of key masks hold equal masks, in any order."""
    pairs = (some, others), (others, some)
    return all(any(_same(a, b) for b in right) for left, right in pairs for a in left)


def _same(a: KeyMask | KeyPadding, b: KeyMask | KeyPadding) -> bool:
    """Whether two key masks are equal.

    On a GPU only if identical, since comparing would wait for it.
    """
    if isinstance(a, KeyMask) and isinstance(b, KeyMask):
        if a.valid is b.valid or torch.compiler.is_compiling() or a.valid.device.type != "cpu":
            return a.valid is b.valid
        return same_tensor(a.valid, b.valid)
    if isinstance(a, KeyPadding) and isinstance(b, KeyPadding):
        return same_lengths(a.lengths, b.lengths)
    return False


def key_mask(masks: KeyMasks, kv_len: int, device: torch.device) -> Tensor:
    """Returns bool [B or 1, kv_len] on `device`: True where no key mask hides the key."""
    return reduce(torch.logical_and, [_valid_keys(mask, kv_len, device) for mask in masks])


def _valid_keys(mask: KeyMask | KeyPadding, kv_len: int, device: torch.device) -> Tensor:
    """Returns bool [B or 1, kv_len] on `device`: True where one key mask does not hide the key."""
    if isinstance(mask, KeyMask):
        valid = mask.valid if mask.valid.dim() == 2 else mask.valid[None]
        return valid if valid.device == device else moved(valid, device)
    numbers = mask.lengths
    if device.type == "cpu":
        lengths = torch.tensor(numbers, dtype=torch.int64)
    elif torch.compiler.is_compiling() or device.type != "cuda" or capturing(device):
        # `full` writes on the device; a copy from the host would break a captured graph.
        filled = [torch.full((1,), x, dtype=torch.int64, device=device) for x in numbers]
        lengths = torch.cat(filled) if filled else torch.zeros(0, device=device)
    else:
        lengths = moved(torch.tensor(numbers, dtype=torch.int64), device)
    return torch.arange(kv_len, device=device) < lengths[:, None]
