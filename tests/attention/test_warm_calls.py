"""How many functions of the package a call enters that has been made before.

A pattern is taken apart once, and a decision made once, for each kind of call. What is counted here
is what each further call pays in Python.
"""

import re
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import sparsering as sr

PACKAGE = Path(sr.__file__).parent
TOKENS = 512
SPARSE = sr.LongNet((128, 512), (1, 2))
HIDDEN = sr.KeyMask(torch.arange(TOKENS) % 7 != 3)
LISTS = sr.SelectedBlocks(
    torch.randint(0, TOKENS, (1, 2, TOKENS, 16), generator=torch.Generator().manual_seed(3)), 1, 1
)


def drawn(tokens: int = TOKENS, learns: bool = False) -> list[Tensor]:
    own = torch.Generator().manual_seed(0)
    return [
        torch.randn(1, heads, tokens, 32, generator=own).requires_grad_(learns)
        for heads in (4, 2, 2)
    ]


def entered(call: Callable[[], Any]) -> Counter[tuple[str, str]]:
    """(file, function) of the package, each time that a warm call enters it or a goes on."""
    for _ in range(3):
        call()
    found: Counter[tuple[str, str]] = Counter()

    def count(frame: Any, event: str, argument: object) -> None:
        path = Path(frame.f_code.co_filename)
        if event == "call" and path.is_relative_to(PACKAGE):
            found[str(path.relative_to(PACKAGE)), frame.f_code.co_name] += 1

    sys.setprofile(count)
    try:
        call()
    finally:
        sys.setprofile(None)
    return found


@pytest.mark.parametrize(
    ("most", "pattern", "options", "learns"),
    [
        (28, SPARSE, {}, False),
        (50, SPARSE, {"softcap": 30.0}, False),
        (60, HIDDEN, {}, False),
        (110, LISTS, {}, False),
        (70, SPARSE, {}, True),
        (90, SPARSE & sr.Causal() & HIDDEN, {}, False),
    ],
    ids=["bare", "softcap", "key mask", "lists", "gradients", "joined"],
)
def test_a_warm_call_enters_few_functions(most, pattern, options, learns):
    args = drawn(learns=learns)
    found = entered(lambda: sr.attention(*args, pattern, **options))
    assert found.total() <= most, found
    assert sum(n for (_, name), n in found.items() if name == "has_lists") <= 1
    assert not [file for file, _ in found if file == "ground/keywords.py"]


def test_a_step_of_a_cache_enters_few_functions():
    cache = sr.KVCache(sr.SlidingWindow(64, 0), 1, num_heads=4, num_kv_heads=2, head_dim=32)
    cache.attend(*drawn(80))
    step = drawn(1)
    found = entered(lambda: cache.attend(*step))
    assert found.total() <= 38, found


def test_work_alone_makes_problems():
    makers = {
        str(path.relative_to(PACKAGE))
        for path in PACKAGE.rglob("*.py")
        if re.search(r"\bProblem\(", path.read_text().replace("class Problem(", ""))
    }
    assert makers == {"route/work.py", "kernels/tune.py"}
