"""`DocumentBlocks`: spreads packed tokens so that each document begins at a block of keys."""

from typing import Any

import torch
from torch import Tensor

from ..checks import check_tensor
from ..ground.arguments import checked_integer, per_entry
from ..ground.keywords import class_with_hints
from ..patterns.positions import Documents, Lengths


@class_with_hints
class DocumentBlocks:
    """Moves the tokens of packed documents apart, so that each document begins a block of keys.

    Blocks that begin where documents do give a packed document the scores, the choice and the
    attention that it has alone. Empty places fill up the last block of each document.

    Args:
        lengths: of the documents, in tokens, as for `Documents`: ints for all batch entries, ints
            for each entry, or an int64 tensor [n] or [B, n]. Padding is a document of its own.
        block_size: keys in a block.

    Attributes:
        valid: bool [M], or [B, M] if entries have lengths of their own; False at empty places.
        num_tokens, num_places: N and M.
        bounds: `first` and `stop`, int64 [B or 1, M]: where the document of each place begins, and
            where its last block ends.

    Raises: ValueError if an argument is invalid, or batch entries have unlike numbers of tokens.

    Cost: M is at most N + documents x (block_size - 1). The host waits once for tensors of lengths.

    Example:
        >>> blocks = DocumentBlocks((100, 156), 64)
        >>> q, k, v = (blocks.arrange(x) for x in (query, key, value))
        >>> scores = block_scores(q, k, 64, valid=blocks.valid, **blocks.bounds)
        >>> chosen = select_blocks(scores, 4, block_size=64, **blocks.bounds)
        >>> pattern = SelectedBlocks(chosen, 64, 1) & Causal() & KeyMask(blocks.valid)
        >>> out = blocks.restore(attention(q, k, v, pattern))
    """

    def __init__(self, lengths: Lengths, block_size: int) -> None:
        size = self.block_size = checked_integer("block_size", block_size, 1)
        given = Documents(lengths).lengths
        device = lengths.device if isinstance(lengths, Tensor) else torch.device("cpu")
        if isinstance(given, Tensor):
            rows = given if given.dim() == 2 else given[None]
        else:
            nested: Any = given if per_entry(given) else (given,)
            most = max(len(row) for row in nested)
            rows = torch.tensor([[*row, *[0] * (most - len(row))] for row in nested])
        rows = rows.to(device, torch.int64)
        counts = sorted(set(rows.sum(1).tolist()))
        if len(counts) != 1:
            raise ValueError(
                f"lengths must sum to one number of tokens in all batch entries, got sums {counts};"
                " name the padding of an entry as a document of its own"
            )
        ends = rows.cumsum(1)
        block_ends = (-(-rows // size) * size).cumsum(1)
        starts = torch.cat((torch.zeros_like(block_ends[:, :1]), block_ends[:, :-1]), 1)
        self.num_tokens = counts[0]
        token = torch.arange(self.num_tokens, device=device).expand(len(rows), -1).contiguous()
        document = torch.searchsorted(ends, token, right=True)
        self._place = token + (starts - ends + rows).gather(1, document)  # [B or 1, N]
        places = int(block_ends[:, -1].max()) if rows.shape[1] else 0
        place = torch.arange(places, device=device).expand(len(rows), -1).contiguous()
        document = torch.searchsorted(block_ends, place, right=True).clamp(max=rows.shape[1] - 1)
        self.bounds = {
            "first": starts.gather(1, document),
            "stop": block_ends.gather(1, document),
        }
        valid = torch.zeros(len(rows), places, dtype=torch.bool, device=device)
        valid = valid.scatter(1, self._place, True)
        self.num_places = places
        self.valid = valid[0] if len(rows) == 1 else valid

    def arrange(self, x: Tensor) -> Tensor:
        """Moves tokens [B, H, N, D] to their places [B, H, M, D]; empty places are 0."""
        index = self._index(x, self.num_tokens)
        places = (*x.shape[:2], self.num_places, x.shape[3])
        return x.new_zeros(places).scatter(2, index, x)

    def restore(self, x: Tensor) -> Tensor:
        """Moves places [B, H, M, D] back to tokens [B, H, N, D]."""
        return x.gather(2, self._index(x, self.num_places))

    def _index(self, x: Tensor, tokens: int) -> Tensor:
        """Returns the place of each token, expanded to [B, H, N, D], for `gather` and `scatter`."""
        check_tensor("x", x, f"[batch, heads, {tokens}, head dim]")
        batch = len(self._place)
        if x.dim() != 4 or x.shape[2] != tokens or batch not in (1, len(x)):
            raise ValueError(
                f"x must be [{'B' if batch == 1 else batch}, H, {tokens}, D], got "
                f"{tuple(x.shape)}; these lengths have {self.num_tokens} tokens at "
                f"{self.num_places} places"
            )
        index = self._place.to(x.device)[:, None, :, None]
        return index.expand(len(x), x.shape[1], -1, x.shape[3])
