"""Groups the documents of packed or padded rows by length, so that a layer computes each alone."""

from typing import Any

import torch
from torch import Tensor

from ..checks import check_tensor, refuse_meta
from ..patterns.positions import Documents, Lengths


@torch.compiler.disable
def documents_by_length(
    documents: Lengths | None, valid: Tensor | None, shape: tuple[int, int], device: torch.device
) -> list[Tensor]:
    """Returns, for each length of document, the token indices of all such documents, [n, length].

    Args:
        documents: lengths as for `Documents`; None for one document in each batch entry.
        valid: bool [B, N], False for tokens that are in no document; None if all are in one.
        shape: B and N.

    Returns: for each length n, int64 [documents, n] of places entry * N + token. The host waits for
        a GPU's `valid`.

    Raises: ValueError if the lengths do not sum to N, or an argument does not fit B.
    """
    batch, tokens = shape
    entries: Any = ((tokens,),) if documents is None else Documents(documents).entries
    totals = sorted({sum(entry) for entry in entries})
    if totals not in ([tokens], []) or len(entries) not in (1, batch):
        raise ValueError(
            f"documents must be lengths that sum to {tokens} tokens, the same or for each of "
            f"{batch} batch entries, got sums {totals} of {len(entries)} entries; padding is a "
            "document of its own, or False in valid"
        )
    exists = torch.ones(batch, tokens, dtype=torch.bool)
    if valid is not None:
        check_tensor("valid", valid, f"[{batch}, {tokens}]")
        if valid.dtype != torch.bool or tuple(valid.shape) != (batch, tokens):
            raise ValueError(
                f"valid must be bool [{batch}, {tokens}], False for padding, got {valid.dtype} "
                f"{tuple(valid.shape)}; valid.bool() converts ones and zeros"
            )
        refuse_meta(valid, named="valid")
        exists = valid.detach().cpu()
    place = torch.arange(batch * tokens).view(batch, tokens)
    found: dict[int, list[Tensor]] = {}
    for number in range(batch):
        lengths = entries[number if len(entries) > 1 else 0]
        parts = zip(place[number].split(lengths), exists[number].split(lengths), strict=True)
        for part, there in parts:
            document = part[there]
            found.setdefault(len(document), []).append(document)
    return [torch.stack(found[n]).to(device) for n in sorted(found) if n]
