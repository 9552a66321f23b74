"""Recognises the mask functions of transformers, so that nothing is evaluated pair by pair.

transformers builds a mask from functions of indices, `(batch, head, query, key) -> bool`, joined by
`and_masks`. They are recognised by their code, and their closures hold the parameters. Inside
torch.compile closures cannot be read. There the kind of mask follows from the arguments of the
request, and the ends of runs from evaluating the function for neighbouring tokens.
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
    """Returns the code of a transformers factory's functions; None if the factory is missing."""
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
    """Describes a mask function.

    Attributes:
        causal: True if no query sees later keys.
        left, right: number of visible keys before and after the query; None for all.
        chunks: (size, left padding of each row [B], positions [B, N] or None for indices).
        documents: numbers of documents [B, N].
        joined: inside compile: several functions are joined, and some may be documents.
        chunked: inside compile: the mask has chunks, from which documents cannot be separated.
    """

    causal: bool = False
    left: int | None = None
    right: int | None = None
    chunks: list[tuple[int, Tensor, Tensor | None]] = field(default_factory=list)
    documents: list[Tensor] = field(default_factory=list)
    joined: bool = False
    chunked: bool = False

    def within(self, left: int, right: int | None = None) -> None:
        """Narrows the window to at most `left` keys before the query and `right` after it."""
        self.left = left if self.left is None else min(self.left, left)
        if right is not None:
            self.right = right if self.right is None else min(self.right, right)


def read(mask_function: MaskFunction) -> Said | None:
    """Reads a mask function; returns None if some part of it is not recognised."""
    said = Said()
    return said if _collect(mask_function, None, said) else None


def _collect(function: MaskFunction, positions: Tensor | None, said: Said) -> bool:
    """Adds a function of indices, or of `positions`, to `said`; False if it is not recognised."""
    if function is _CAUSAL:
        said.causal = True
        return True
    if function is _BIDIRECTIONAL:
        return True
    code = getattr(function, "__code__", None)
    cells = getattr(function, "__closure__", None) or ()
    captured = (
        dict(zip(code.co_freevars, (x.cell_contents for x in cells), strict=True)) if code else {}
    )
    if code is _AND:
        return all(_collect(part, positions, said) for part in captured["mask_functions"])
    if code is _WINDOW and captured["sliding_window"] > 0:
        said.within(captured["sliding_window"] - 1)
    elif code is _BOTH_WAYS:
        said.within(captured["sliding_window"], captured["sliding_window"])
    elif code is _CHUNKS:
        said.chunks.append((captured["chunk_size"], captured["left_padding"], positions))
    elif code is _PACKED:
        said.documents.append(captured["packed_sequence_mask"])
    elif code is _REMAPPED and positions is None:
        return _collect(captured["mask_function"], captured["position_ids"], said)
    else:
        return False
    return True


def read_inside_compile(
    mask_function: MaskFunction, local_size: int | None, config: Any, keywords: dict[str, Any]
) -> Said | None:
    """Reads a mask from the arguments of its request, which do not say where runs end.

    `keywords`: the keywords that only some of transformers' functions pass to a mask interface.
    """
    if mask_function is _CAUSAL:
        return Said(causal=True)
    if mask_function is _BIDIRECTIONAL:
        return Said()
    if keywords.get("use_vmap") or mask_function.__code__ is not _AND:
        return None  # the model adds a mask function of its own
    said = Said(causal="allow_is_bidirectional_skip" not in keywords, joined=True)
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
    """Numbers the runs [B, Nk]: a run begins where a token does not see its predecessor."""
    batch = torch.arange(batch_size, device=device)[:, None, None, None]
    key = torch.arange(kv_length, device=device) + kv_offset
    before = (key - 1).clamp(min=0)
    head = torch.zeros(1, 1, 1, 1, dtype=torch.int64, device=device)
    sees_previous = mask_function(batch, head, key[None, None, None], before[None, None, None])
    begins = ~sees_previous.expand(batch_size, 1, 1, kv_length)[:, 0, 0]
    return torch.cat((torch.zeros_like(begins[:, :1]), begins[:, 1:]), 1).cumsum(1)
