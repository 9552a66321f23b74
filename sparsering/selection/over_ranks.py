"""Helps calls that several ranks make together, each with its own tokens.

`distributed` is slow to import, so that `import sparsering` must not load it. The functions here
import it when they are called.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate

import torch.distributed as dist
from torch import Tensor

from ..checks import check_group


@contextmanager
def checks_of_a_rank(group: dist.ProcessGroup, query: Tensor) -> Iterator[None]:
    """Tells the other ranks if the `with` body raises on this one, so that they raise, too."""
    from ..distributed.agreement import report_failure

    try:
        check_group(group)
        yield
    except Exception:
        report_failure(group, None, query)
        raise


def check_own_tokens(call: str, queries: int, keys: int, q_start: int | None) -> None:
    """Raises ValueError unless queries and keys are of the same tokens, and q_start is left out."""
    if q_start is not None:
        raise ValueError(
            f"{call} over ranks counts positions from the first token of rank 0, got a q_start; "
            "leave it out"
        )
    if queries != keys:
        raise ValueError(
            f"{call} over ranks needs queries and keys of the same tokens, got {queries} queries "
            f"and {keys} keys; shard both alike"
        )


def agreed(
    call: str, group: dist.ProcessGroup, query: Tensor, common: dict[str, object], *own: int
) -> list[tuple[int, ...]]:
    """Compares `common` among ranks; returns the integers `own` of all ranks, or raises on all.

    Returns: for each number in `own`, the numbers of all ranks.
    """
    from ..distributed.agreement import agree_on_batch, digests_of
    from ..distributed.exchange import Exchange

    exchange = Exchange(group, None, query.device)
    with exchange.break_on_error():
        return agree_on_batch(exchange, call, digests_of(common), own, hidden=tuple(common))


def first_rows(counts: Sequence[int]) -> list[int]:
    """Returns the position of each rank's first token, from each rank's number of tokens."""
    return [0, *accumulate(counts)][:-1]


def of_all_ranks(own: Tensor, counts: Sequence[int], group: dist.ProcessGroup, name: str) -> Tensor:
    """Gathers rows [B, n, ...] of all ranks to [B, N, ...], differentiable.

    Errors have the `name`.
    """
    from ..distributed.fetching import fetched

    owned = [(start, start + n) for start, n in zip(first_rows(counts), counts, strict=True)]
    return fetched(own, owned, [(0, sum(counts))] * len(counts), group, name)
