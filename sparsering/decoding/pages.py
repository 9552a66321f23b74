"""Attention of several requests at once over keys in pages of one tensor, which are read in place.

work = work_of_pages(query, key, q_lengths, kv_lengths, rows, ends, reach)
out = attend_pages(query, key, value, work, scale=scale)  # each layer with equal lengths
"""

from typing import Any

import torch
from torch import Tensor

from ..call import frame_of
from ..ground.once import one_thread
from ..kernels.backends import choose, form_for_mode
from ..layouts.pages import Reach as Reach
from ..layouts.pages import layout_of_pages
from ..route.work import Work
from .steps import run_backend


def work_of_pages(
    query: Tensor,
    key: Tensor,
    q_lengths: list[int],
    kv_lengths: list[int],
    rows: Tensor,
    ends: Tensor,
    reach: Reach,
) -> Work:
    """Builds the work of a call; calls with tensors of equal shapes and these requests share it.

    Args:
        query: [1, Hq, queries, D], of all requests end to end.
        key: [1, Hkv, rows, D], which holds the requests' keys anywhere.
        q_lengths, kv_lengths: queries and keys of each request; its last query is at its last key.
        rows: int64 [keys], where each key lies in `key`, requests end to end, in order.
        ends: int64 [requests], position of the last token of each request.
        reach: which keys of its request a query sees; `Reach.of(pattern)` returns it.
    """
    device, host = query.device, torch.device("cpu")
    requests = q_lengths, kv_lengths, rows.to(host), ends.to(host)
    with one_thread():  # tensors are too small for more
        layout = layout_of_pages(frame_of(query, key, 0), *requests, reach)
    return Work(layout=layout if device == host else layout.on_gpu(device))


def attend_pages(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    work: Work,
    *,
    scale: float,
    backend: str | None = None,
    **options: Any,
) -> Tensor:
    """Computes attention over the pages of a work: [1, Hq, queries, Dv].

    Args:
        query, key, value: as in `work_of_pages`; rows of keys that no request has are not read.
        backend: default the first that can run the call.
        options: fields of `Problem`, such as softcap and sink; None if not in use.
    """
    in_use = {name: x for name, x in options.items() if x is not None}
    form = form_for_mode(choose(backend, (query, key, value), in_use))
    return run_backend(form, work.problem(query, key, value, scale, **in_use))[0]
