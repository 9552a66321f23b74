"""What a mask function of transformers says: which of its closures it is, and of what.

transformers builds a mask from functions of indices, `(batch, head, query, key) -> bool`, joined by
`and_masks`. They are recognised by their code, so that nothing is evaluated pair by pair. Inside
torch.compile closures cannot be looked into; what kind of mask it is then follows from how it was
asked for, and where runs of tokens end from what it says of neighbours.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import masking_utils

MaskFunction = Callable[..., Any]

_CAUSAL: MaskFunction = masking_utils.causal_mask_function
_BIDIRECTIONAL: MaskFunction = masking_utils.bidirectional_mask_function
_NOTHING = torch.zeros(1, 1, dtype=torch.int64)


def _code_of(factory: str, *arguments: Any) -> Any:
    """The code of the functions that a factory of transformers makes; None where it has none."""
    make = getattr(masking_utils, factory, None)
    return None if make is None else make(*arguments).__code__


_AND = _code_of("and_masks", _CAUSAL)
_WINDOW = _code_of("sliding_window_overlay", 1)
_BOTH_WAYS = _code_of("sliding_window_bidirectional_overlay", 1)
_CHUNKS = _code_of("chunked_overlay", 1, _NOTHING[0])
_PACKED = _code_of("packed_sequence_mask_function", _NOTHING)
_REMAPPED = _code_of("remap_positions_for_packed_sequence", _CAUSAL, _NOTHING)


@dataclass
class Said:
    """What a mask function says.

    Attributes:
        causal: keys after the query are not seen.
        left, right: keys before and after the query that are, None for all.
        chunks: (size, first token of each row [B], positions [B, N] or None for indices).
        documents: numbers of documents [B, N].
        joined: of several functions, inside compile: some may be of documents.
        chunked: chunks may be among them, and cannot be told from documents.
    """

    causal: bool = False
    left: int | None = None
    right: int | None = None
    chunks: list[tuple[int, Tensor, Tensor | None]] = field(default_factory=list)
    documents: list[Tensor] = field(default_factory=list)
    joined: bool = False
    chunked: bool = False

    def within(self, left: int, right: int | None = None) -> None:
        """Takes a window into account."""
        self.left = left if self.left is None else min(self.left, left)
        if right is not None:
            self.right = right if self.right is None else min(self.right, right)


def read(mask_function: MaskFunction) -> Said | None:
    """What a mask function says; None where some part of it is not one that is known."""
    said = Said()
    return said if _collect(mask_function, None, said) else None


def _collect(function: MaskFunction, positions: Tensor | None, said: Said) -> bool:
    """Adds what a function says of indices, or of `positions`; False where it is not known."""
    if function is _CAUSAL:
        said.causal = True
        return True
    if function is _BIDIRECTIONAL:
        return True
    code = getattr(function, "__code__", None)
    cells = getattr(function, "__closure__", None) or ()
    held = (
        dict(zip(code.co_freevars, (x.cell_contents for x in cells), strict=True)) if code else {}
    )
    if code is _AND:
        return all(_collect(part, positions, said) for part in held["mask_functions"])
    if code is _WINDOW and held["sliding_window"] > 0:
        said.within(held["sliding_window"] - 1)
    elif code is _BOTH_WAYS:
        said.within(held["sliding_window"], held["sliding_window"])
    elif code is _CHUNKS:
        said.chunks.append((held["chunk_size"], held["left_padding"], positions))
    elif code is _PACKED:
        said.documents.append(held["packed_sequence_mask"])
    elif code is _REMAPPED and positions is None:
        return _collect(held["mask_function"], held["position_ids"], said)
    else:
        return False
    return True


def read_inside_compile(
    mask_function: MaskFunction, local_size: int | None, config: Any, asked: dict[str, Any]
) -> Said | None:
    """The same from how a mask was asked for; where its runs end is not among it.

    `asked`: the keywords that only some of transformers' functions pass to a mask interface.
    """
    if mask_function is _CAUSAL:
        return Said(causal=True)
    if mask_function is _BIDIRECTIONAL:
        return Said()
    if asked.get("use_vmap") or mask_function.__code__ is not _AND:
        return None  # joined with a function of a model's own
    said = Said(causal="allow_is_bidirectional_skip" not in asked, joined=True)
    if local_size is None:
        return said
    window = getattr(config, "sliding_window", None)
    chunk = getattr(config, "attention_chunk_size", None)
    if window == chunk or local_size not in (window, chunk) or local_size < 1:
        return None
    if local_size == chunk:
        said.chunked = True
        return said
    if said.causal:
        said.within(local_size - 1)
    else:
        said.within(local_size, local_size)
    return said


def runs_by_neighbours(
    mask_function: MaskFunction, batch_size: int, kv_length: int, kv_offset: int, device: Any
) -> Tensor:
    """[B, Nk] numbers of runs: one begins where a token does not see the one before it."""
    batch = torch.arange(batch_size, device=device)[:, None, None, None]
    key = torch.arange(kv_length, device=device) + kv_offset
    before = (key - 1).clamp(min=0)
    head = torch.zeros(1, 1, 1, 1, dtype=torch.int64, device=device)
    seen = mask_function(batch, head, key[None, None, None], before[None, None, None])
    begins = ~seen.expand(batch_size, 1, 1, kv_length)[:, 0, 0]
    return torch.cat((torch.zeros_like(begins[:, :1]), begins[:, 1:]), 1).cumsum(1)
