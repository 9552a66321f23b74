"""Feeds a tensor's bytes to a hash of `hashlib`, without numpy, which torch does not require."""

import ctypes
from typing import Any, Protocol

from torch import Tensor


class Hash(Protocol):
    """A hash object of `hashlib`."""

    def update(self, data: Any, /) -> None:
        """Adds bytes."""


def add_bytes(state: Hash, x: Tensor) -> None:
    """Adds a tensor's bytes in row-major order to a hash; copies only from a GPU or if strided."""
    x = x.detach().cpu().contiguous()
    if x.nbytes:  # x lives until the hash has read its memory
        state.update((ctypes.c_ubyte * x.nbytes).from_address(x.data_ptr()))
