"""`Wrapped` and `Converted`: a method or a class of a family, and what runs in its place."""

from collections.abc import Callable
from typing import Any, NamedTuple, NoReturn

from torch import nn


class Wrapped(NamedTuple):
    """A method of a family's class, and the function that replaces it under "sparsering"."""

    method: str
    runs: Callable[..., Any]  # gets the method, the module and the method's arguments
    finds_keys_of_ranks: bool = True  # whether it can choose keys that other ranks own
    own_in_graphs: bool = True  # whether a compiled graph has the family's own method instead


class Converted(NamedTuple):
    """The class that `convert` gives to a family's modules, which keep their parameters."""

    family: str
    runs: type[nn.Module]


def refuse_weights() -> NoReturn:
    """Raises NotImplementedError: a call of a converted module asks for attention weights."""
    raise NotImplementedError(
        "a converted model gives no attention weights, got output_attentions=True; leave it out"
    )
