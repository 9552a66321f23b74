"""Runs a whole call by another library's attention, which reads no layout."""

from collections.abc import Callable

from torch import Tensor

from ...call import Call
from ...checks import check_batch, refuse_forward_mode
from ...patterns.algebra import check_fits


def run_whole(
    name: str,
    refuses: Callable[[Call], list[str]],
    attention: Callable[[Call], tuple[Tensor, Tensor]],
    call: Call,
    _: object = None,
) -> tuple[Tensor, Tensor]:
    """Computes (out, lse) of a call by `attention`, unless `refuses` returns reasons.

    Then it raises NotImplementedError with them; `name` is the backend's name for the message.
    """
    assert not call.options.in_use, f"{name} computes no {sorted(call.options.in_use)}"
    refuse_forward_mode(name, *call.inputs)
    check_batch(call.pattern, len(call.query))
    check_fits(call.pattern, call.frame)
    if refused := refuses(call):
        raise NotImplementedError(f"{name}: {'; '.join(refused)}; leave out backend=")
    return attention(call)
