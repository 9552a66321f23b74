"""`once`: results that the layers of one forward pass share."""

from collections.abc import Callable
from typing import Any

import torch


def once(shared: Any, name: Any, compute: Callable[[], Any]) -> Any:
    """Computes a result once per forward pass, and stores it on `shared`, a mask or bias."""
    if torch.compiler.is_compiling():
        return compute()
    results = vars(shared).setdefault("_sparsering_results", {})
    if name not in results:
        results[name] = compute()
    return results[name]
