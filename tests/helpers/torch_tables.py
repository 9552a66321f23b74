"""Layouts whose tables torch's operators make, with the compiled kernel hidden."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from torch import Tensor

import sparsering as sr
from sparsering.layouts import bitmaps, lower, tiles
from sparsering.layouts import compile as compiler


@contextmanager
def only_torch() -> Iterator[None]:
    """Hides the compiled kernel from the layouts that are built in the block."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (bitmaps, tiles, lower):
            patch.setattr(module, "kernel_operators", lambda: None)
        yield


@contextmanager
def evaluations() -> Iterator[list[int]]:
    """Lists how many pairs of tiles each evaluation of a mask has, in layouts of the block."""
    counts: list[int] = []
    evaluate = compiler.evaluate

    def counted(mask: sr.Mask, pairs: tiles.TilePairs, *rest: Any) -> Tensor:
        counts.append(len(pairs))
        return evaluate(mask, pairs, *rest)

    with only_torch(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(compiler, "evaluate", counted)
        yield counts
