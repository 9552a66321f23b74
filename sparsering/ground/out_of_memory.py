"""Recognizes out-of-memory errors, and frees memory before a second try."""

import gc
import re

import torch

_TEXTS = re.compile("not enough memory|out of memory|bad_alloc|an't allocate memory")


def ran_out_of_memory(error: BaseException) -> bool:
    """Whether an error of torch, of a compiled kernel or of Python says that memory ran out."""
    known = isinstance(error, MemoryError | torch.OutOfMemoryError)
    return known or (isinstance(error, RuntimeError) and bool(_TEXTS.search(str(error))))


def return_memory() -> None:
    """Frees what a failed call left behind, and memory that torch keeps for later."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
