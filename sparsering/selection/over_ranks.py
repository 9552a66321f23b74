"""Calls that several ranks make together, each with its own tokens: checks, and rows of all ranks.

`distributed` is slow to import, and `import sparsering` must not load it: functions here do.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate

import torch.distributed as dist
from torch import Tensor

from ..checks import check_group


@contextmanager
def checks_of_a_rank(group: dist.ProcessGroup, query: Tensor) -> Iterator[None]:
    """Makes the other ranks raise, too, if this rank's checks in the `with` body do."""
    from ..distributed.agreement import report_failure

    try:
        check_group(group)
        yield
    except Exception:
        report_failure(group, None, query)
        raise


def check_own_tokens(call: str, queries: int, keys: int, q_start: int | None) -> None:
    """Raises ValueError if a rank's queries and keys are not of the same tokens."""
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
    """Checks that ranks pass equal values in `common`, by name; raises on all if they do not.

    Returns: for each number in `own`, those of all ranks.
    """
    from ..distributed.agreement import agree_on_batch, digests_of
    from ..distributed.exchange import Exchange

    exchange = Exchange(group, None, query.device)
    with exchange.break_on_error():
        return agree_on_batch(exchange, call, digests_of(common), own, hidden=tuple(common))


def first_rows(counts: Sequence[int]) -> list[int]:
    """Returns the position of each rank's first token, given the tokens of each rank."""
    return [0, *accumulate(counts)][:-1]


def of_all_ranks(own: Tensor, counts: Sequence[int], group: dist.ProcessGroup, name: str) -> Tensor:
    """Returns the rows of all ranks of `own` [B, n, ...], differentiable; `name` is for errors."""
    from ..distributed.fetching import fetched

    owned = [(start, start + n) for start, n in zip(first_rows(counts), counts, strict=True)]
    return fetched(own, owned, [(0, sum(counts))] * len(counts), group, name)
