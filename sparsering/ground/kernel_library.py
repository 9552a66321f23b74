"""The operators of the compiled CPU kernel, for code that can also do without them.

The backend `cpu` compiles and loads the library. Layouts and caches get its operators here; without
them they compute with torch.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch._C import _len_torch_dispatch_stack

from .namespace import CPU_NAMESPACE


def kernel_operators() -> Any:
    """Returns the operators of the compiled kernel, or None.

    None if its library does not exist yet, or a torch mode (tracing, fake tensors) is active.
    """
    if _len_torch_dispatch_stack():
        return None
    while load_existing_kernel:  # runs once per process; the CPU backend fills the list
        load_existing_kernel.pop()()
    return loaded_operators()


def loaded_operators() -> Any:
    """Returns the operators of the compiled kernel if this process has loaded them, else None."""
    # Attributes of `torch.ops` take a lock, which a forked process may inherit held.
    operators = vars(torch.ops).get(CPU_NAMESPACE)
    return operators if operators is not None and "table" in vars(operators) else None


load_existing_kernel: list[Callable[[], None]] = []
"""Loads the CPU backend's library if it exists, without compiling it; empty after the first use."""
