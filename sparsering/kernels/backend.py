"""`Backend`: a row of the table in backends.py."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor

from ..call import Call
from ..layouts.layout import BlockLayout
from .parts import Backward, Forward, run_parts
from .problem import Gradients, Problem


def _reads_no_layout(problem: Problem, *results: Tensor) -> Any:
    raise NotImplementedError("this backend reads no layout; name another one, or none")


class Backend(NamedTuple):
    """The functions of a backend, and the calls that they can run."""

    # Lists why the backend cannot run on query, key and value, or, without them, on this machine.
    reasons: Callable[..., list[str]]
    # Computes (out, lse) of a call. The second argument returns its parts; a backend that reads no
    # layout does not ask for them.
    run: Callable[[Call, Callable[[], Any]], tuple[Tensor, Tensor]]
    extras: frozenset[str]  # options of a call, such as softcap or sink, that it computes
    forward: Forward = _reads_no_layout  # computes (out, lse) over a layout, in an operator
    backward: Backward = _reads_no_layout
    package: str = ""  # that it needs; the pip extra with the backend's name has it
    # Sums each block's attention weights, times a factor per query: [B, Hq, blocks]. If it is None,
    # callers take these sums from the gradient of a block bias.
    entry_mass: Callable[[Problem, Tensor, Tensor], Tensor] | None = None
    # As `forward`; it first stores new keys and values, from their first rows on, in the problem's.
    forward_after: Callable[..., tuple[Tensor, Tensor]] | None = None
    # Builds the layout of selected blocks from a pattern, a frame, a block size and a device;
    # returns None for patterns that it does not support.
    selected_layout: Callable[..., BlockLayout | None] | None = None
    runs_lists: bool = False  # True if it computes `Problem.lists`
    # As `reasons`, for a pattern that is nothing but lists of single keys; None: they are the same.
    list_reasons: Callable[..., list[str]] | None = None
    only_named: bool = False  # True if it runs only calls that name it
    # Lists why a library cannot run a call; None for backends that run every pattern.
    refuses: Callable[[Call], list[str]] | None = None
    returns_lse: bool = True  # False if its lse is an empty tensor
    is_invariant: bool = False  # True if rows have the same bits in any company
    # Name of the backend whose form for `batch_invariant` this is. No call names a form.
    form_of: str = ""
    # Keys that a form adds up in one step: its tiles have as many, or twice as many. 0: any number.
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
    """Returns a backend that computes each call by layouts; `more`: further fields of it."""
    return Backend(
        reasons=reasons,
        run=partial(run_parts, forward),
        extras=extras,
        forward=forward,
        backward=backward,
        **more,
    )
