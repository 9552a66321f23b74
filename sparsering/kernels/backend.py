"""`Backend`: what the table in backends.py stores for each backend."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..call import Call
from ..layouts.layout import BlockLayout
from ..layouts.lists import ListKeys, Lists
from .parts import Backward, Forward, run_parts
from .problem import Gradients, Problem
from .second_order import SecondOrder


def _reads_no_layout(problem: Problem, *results: Tensor) -> Any:
    raise NotImplementedError("this backend reads no layout; name another one, or none")


class Backend(NamedTuple):
    """The functions of a backend, and the calls that they can run."""

    # Lists why the backend cannot run on (query, key, value); without arguments, on this machine.
    reasons: Callable[..., list[str]]
    # Computes (out, lse) of a call. The second argument returns the call's parts (parts.py), which
    # take time to build; a backend that reads no layout does not call it.
    run: Callable[[Call, Callable[[], Any]], tuple[Tensor, Tensor]]
    extras: frozenset[str]  # options of a call, such as softcap or sink, that it computes
    forward: Forward = _reads_no_layout  # computes (out, lse) over a layout, in an operator
    backward: Backward = _reads_no_layout
    second_order: SecondOrder | None = None  # None if it has first derivatives alone
    package: str = ""  # the package that it needs, which the pip extra of its name installs
    # Sums each block's attention weights, times a factor per query: [B, Hq, blocks]. If it is None,
    # callers take these sums from the gradient of a block bias.
    entry_mass: Callable[[Problem, Tensor, Tensor], Tensor] | None = None
    # Like `forward`, but first writes new keys and values into the problem's, for a cache's step.
    forward_after: Callable[..., tuple[Tensor, Tensor]] | None = None
    # Builds the layout of selected blocks from a pattern, a frame, a block size and a device;
    # returns None for patterns that it does not support.
    selected_layout: Callable[..., BlockLayout | None] | None = None
    runs_lists: bool = False  # True if it computes `Problem.lists`
    # Lists the keys of a selection in the order that its kernels read; None if they read any order.
    list_keys: ListKeys | None = None
    # Brings `Lists` of so many keys to a device, in that order.
    ready_lists: Callable[[Lists, int, torch.device], Lists] | None = None
    lacks_over_lists: frozenset[str] = frozenset()  # of its `extras`, those that tiles alone have
    # Replaces `reasons` for patterns that are only lists of single keys; None if they are the same.
    list_reasons: Callable[..., list[str]] | None = None
    only_named: bool = False  # True if it runs only calls that name it
    # Lists why a library cannot run a call; None for backends that run every pattern.
    refuses: Callable[[Call], list[str]] | None = None
    returns_lse: bool = True  # False if its lse is an empty tensor
    is_invariant: bool = False  # True if a row's bits do not depend on the rest of the call
    # Name of the backend that this one replaces under `batch_invariant`. No call names a form.
    form_of: str = ""
    # Keys that a form adds up in one step; its tiles must have as many or twice as many. 0: any.
    keys_of_step: int = 0

    @property
    def reads_layouts(self) -> bool:
        """True if it computes a `Problem`, forward and backward; its calls are operators then."""
        return self.forward is not _reads_no_layout


def over_layouts(
    reasons: Callable[..., list[str]],
    forward: Forward,
    backward: Callable[..., Gradients],
    extras: frozenset[str],
    **more: Any,
) -> Backend:
    """Builds a `Backend` that runs calls over layouts; `more` are further fields, by name."""
    return Backend(
        reasons=reasons,
        run=partial(run_parts, forward),
        extras=extras,
        forward=forward,
        backward=backward,
        **more,
    )
