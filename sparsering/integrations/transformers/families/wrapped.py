"""`Wrapped`: a method of a class of a family, and what runs in its place."""

from collections.abc import Callable
from typing import Any, NamedTuple


class Wrapped(NamedTuple):
    """A method of a family's class, and what runs in its place under "sparsering"."""

    method: str
    runs: Callable[..., Any]  # gets the method, the module and the method's arguments
    finds_keys_of_ranks: bool = True
    own_in_graphs: bool = True  # whether a compiled graph has the family's own method instead
