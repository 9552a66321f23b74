"""`MaskKind`: recognises transformers' mask functions, so that no pair is evaluated by itself.

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
class MaskKind:
    """Describes the pairs that a mask function lets attend.

    Attributes:
        causal: True if no query sees later keys.
        left, right: number of visible keys before and after the query; None for all.
        chunks: (size, left padding of each row [B], positions [B, N] or None for indices).
        documents: numbers of documents [B, N].
        is_joined: inside compile: several functions are joined, and some may be documents.
        has_chunks: inside compile: the mask has chunks, from which documents cannot be separated.
    """

    causal: bool = False
    left: int | None = None
    right: int | None = None
    chunks: list[tuple[int, Tensor, Tensor | None]] = field(default_factory=list)
    documents: list[Tensor] = field(default_factory=list)
    is_joined: bool = False
    has_chunks: bool = False

    def narrow(self, left: int, right: int | None = None) -> None:
        """Narrows the window to at most `left` keys before the query and `right` after it."""
        self.left = left if self.left is None else min(self.left, left)
        if right is not None:
            self.right = right if self.right is None else min(self.right, right)


def recognise(mask_function: MaskFunction) -> MaskKind | None:
    """Returns the kind of a mask function; None if some part of it is not recognised."""
    kind = MaskKind()
    return kind if _add(mask_function, None, kind) else None


def _add(function: MaskFunction, positions: Tensor | None, kind: MaskKind) -> bool:
    """Adds a function of indices, or of `positions`, to `kind`; False if it is not recognised."""
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


def recognise_inside_compile(
    mask_function: MaskFunction, local_size: int | None, config: Any, keywords: dict[str, Any]
) -> MaskKind | None:
    """Returns the kind of mask by the arguments of its request, which do not say where runs end.

    `keywords`: the keywords that only some of transformers' functions pass to a mask interface.
    """
    if mask_function is _CAUSAL:
        return MaskKind(causal=True)
    if mask_function is _BIDIRECTIONAL:
        return MaskKind()
    if keywords.get("use_vmap") or mask_function.__code__ is not _AND:
        return None  # the model adds a mask function of its own
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
    """Numbers the runs [B, Nk]: a run begins where a token does not see its predecessor."""
    batch = torch.arange(batch_size, device=device)[:, None, None, None]
    head = torch.zeros(1, 1, 1, 1, dtype=torch.int64, device=device)
    key = torch.arange(kv_length, device=device)[None, None, None] + kv_offset
    sees_previous = mask_function(batch, head, key, (key - 1).clamp(min=0))
    begins = ~sees_previous.expand(batch_size, 1, 1, kv_length)[:, 0, 0]
    return torch.nn.functional.pad(begins[:, 1:], (1, 0)).cumsum(1)
