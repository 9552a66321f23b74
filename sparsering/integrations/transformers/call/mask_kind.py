"""`MaskKind`: recognizes transformers' mask functions, so that they need not run for each pair.

A mask function is `(batch, head, query, key) -> bool`; `and_masks` joins several. The code object
of a function tells what it is, and its closure holds the parameters. torch.compile cannot read
closures. There, other arguments of `mask_interface` tell the kind, and a document or chunk begins
where a key does not see the key before it.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import masking_utils

from .shapes import is_true

MaskFunction = Callable[..., Any]

_CAUSAL: MaskFunction = masking_utils.causal_mask_function
_BIDIRECTIONAL: MaskFunction = masking_utils.bidirectional_mask_function
_NOTHING = torch.zeros(1, 1, dtype=torch.int64)


# The code objects of the mask functions that transformers' factories make
_AND = masking_utils.and_masks(_CAUSAL).__code__
_OR = masking_utils.or_masks(_CAUSAL).__code__
_WINDOW = masking_utils.sliding_window_overlay(1).__code__
_BOTH_WAYS = masking_utils.sliding_window_bidirectional_overlay(1).__code__
_BLOCKS = masking_utils.blockwise_overlay(_NOTHING).__code__
_CHUNKS = masking_utils.chunked_overlay(1, _NOTHING[0]).__code__
_PACKED = masking_utils.packed_sequence_mask_function(_NOTHING).__code__
_REMAPPED = masking_utils.remap_positions_for_packed_sequence(_CAUSAL, _NOTHING).__code__


@dataclass
class MaskKind:
    """Describes which pairs attend: causality, window, chunks and documents of a mask function."""

    causal: bool = False
    left: int | None = None  # number of visible keys before the query; None for all
    right: int | None = None  # number of visible keys after the query; None for all
    # (tokens per chunk, left padding [B], positions [B, N] of tokens or None for their indices)
    chunks: list[tuple[int, Tensor, Tensor | None]] = field(default_factory=list)
    documents: list[Tensor] = field(default_factory=list)  # each token's document index, [B, N]
    # Set only inside torch.compile:
    is_joined: bool = False  # made by `and_masks`, from functions that may separate documents
    has_chunks: bool = False  # has chunks, whose borders cannot be distinguished from documents'

    def narrow(self, left: int, right: int | None = None) -> None:
        """Limits what queries see to `left` keys before and `right` keys after their position."""
        self.left = left if self.left is None else min(self.left, left)
        if right is not None:
            self.right = right if self.right is None else min(self.right, right)


def recognise(mask_function: MaskFunction) -> MaskKind | None:
    """Returns what a mask function of transformers means; None if a part of it is unknown."""
    kind = MaskKind()
    return kind if _add(mask_function, None, kind) else None


def _add(function: MaskFunction, positions: Tensor | None, kind: MaskKind) -> bool:
    """Adds what one mask function means to `kind`; returns False if it is unknown.

    `positions` [B, N] restart in each document, for chunks that do; None if they do not.
    """
    if function is _CAUSAL:
        kind.causal = True
        return True
    if function is _BIDIRECTIONAL:
        return True
    code = getattr(function, "__code__", None)
    cells = getattr(function, "__closure__", None) or ()
    names = code.co_freevars if code else ()
    closure = {name: cell.cell_contents for name, cell in zip(names, cells, strict=False)}
    if code is _AND:
        return all(_add(part, positions, kind) for part in closure["mask_functions"])
    if code is _OR:  # adds blocks of image tokens that see each other; only known without images
        rest = [part for part in closure["mask_functions"] if not _has_no_blocks(part)]
        return len(rest) == 1 and _add(rest[0], positions, kind)
    if code is _WINDOW and closure["sliding_window"] > 0:
        kind.narrow(closure["sliding_window"] - 1)
    elif code is _BOTH_WAYS:
        kind.narrow(closure["sliding_window"], closure["sliding_window"])
    elif code is _CHUNKS:
        kind.chunks.append((closure["chunk_size"], closure["left_padding"], positions))
    elif code is _PACKED:
        kind.documents.append(closure["packed_sequence_mask"])
    elif code is _REMAPPED and positions is None:
        return _add(closure["mask_function"], closure["position_ids"], kind)
    else:
        return False
    return True


def _has_no_blocks(function: MaskFunction) -> bool:
    """Whether a function is for tokens of images, and this call has no image."""
    is_blocks = getattr(function, "__code__", None) is _BLOCKS
    ids = function.__closure__[0].cell_contents if is_blocks else _NOTHING  # type: ignore[index]
    return is_blocks and is_true((ids < 0).all(), True)


def recognise_inside_compile(
    mask_function: MaskFunction, local_size: int | None, config: Any, keywords: dict[str, Any]
) -> MaskKind | None:
    """Returns a mask's kind from `mask_interface`'s other arguments, or None; for torch.compile."""
    if mask_function is _CAUSAL:
        return MaskKind(causal=True)
    if mask_function is _BIDIRECTIONAL:
        return MaskKind()
    if keywords.get("use_vmap") or mask_function.__code__ is not _AND:
        return None  # the model has added a function of its own
    kind = MaskKind(causal="allow_is_bidirectional_skip" not in keywords, is_joined=True)
    if local_size is None:
        return kind
    window = getattr(config, "sliding_window", None)
    chunk = getattr(config, "attention_chunk_size", None)
    if window == chunk or local_size not in (window, chunk) or local_size < 1:
        return None
    if local_size == chunk:
        kind.has_chunks = True
    elif kind.causal:
        kind.narrow(local_size - 1)
    else:
        kind.narrow(local_size, local_size)
    return kind


def runs_by_neighbours(
    mask_function: MaskFunction, batch_size: int, kv_length: int, kv_offset: int, device: Any
) -> Tensor:
    """Returns document or chunk numbers [B, Nk]; one begins where a key does not see the last key.

    A document or chunk starts at a key that does not see its predecessor. It is for torch.compile.
    """
    batch = torch.arange(batch_size, device=device)[:, None, None, None]
    head = torch.zeros(1, 1, 1, 1, dtype=torch.int64, device=device)
    key = torch.arange(kv_length, device=device)[None, None, None] + kv_offset
    sees_previous = mask_function(batch, head, key, (key - 1).clamp(min=0))
    begins = ~sees_previous.expand(batch_size, 1, 1, kv_length)[:, 0, 0]
    return torch.nn.functional.pad(begins[:, 1:], (1, 0)).cumsum(1)
