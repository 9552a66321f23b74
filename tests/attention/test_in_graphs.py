"""Each choice of a backend is traced into one graph under checkpoint, `torch.cond` and `vmap`."""

import importlib
import pkgutil
from itertools import product

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import sparsering as sr

LENGTH = 64
PATTERNS = {
    "causal": sr.Causal(),
    "LongNet": sr.LongNet((16, 32), (1, 2)) & sr.Causal(),
    "key mask": sr.Causal() & sr.KeyMask(torch.arange(LENGTH) > 3),
    "blocks": sr.SelectedBlocks(torch.arange(8).view(1, 4, 2) % 4, 16),
    "lists": sr.SelectedBlocks(torch.arange(256).view(1, LENGTH, 4) % 61, 1) & sr.Causal(),
}
TRANSFORMS = {
    "checkpoint": lambda layer: lambda x: checkpoint(layer, x, use_reentrant=False),
    "cond": lambda layer: lambda x: torch.cond(x.sum() > 0, layer, lambda y: y * 2.0, (x,)),
    "vmap": lambda layer: lambda x: torch.vmap(layer)(x[None]).squeeze(0),
}
DTYPES = (torch.float64, torch.float32, torch.bfloat16)


def calls():
    """Yields (pattern, backend, dtype, transform); a few are fast tests."""
    for name, backend, dtype in product(PATTERNS, (None, "cpu", "gather", "reference"), DTYPES):
        for transform in TRANSFORMS:
            fast = backend is None and (name, dtype) in (
                ("causal", torch.float64),
                ("causal", torch.float32),
                ("lists", torch.float64),
            )
            if (backend, dtype) != ("cpu", torch.float64):
                call = (name, backend, dtype, transform)
                yield pytest.param(*call, marks=() if fast else pytest.mark.slow)


@pytest.fixture(autouse=True)
def triton_is_a_choice(monkeypatch):
    """The default choice then looks at `triton` too, which it skips while the interpreter runs."""
    monkeypatch.setenv("TRITON_INTERPRET", "0")


@pytest.mark.parametrize(("name", "backend", "dtype", "transform"), list(calls()))
def test_one_graph_with_the_results_of_eager(name, backend, dtype, transform):
    """Under checkpoint, a list that a constant of the graph shared was an unsafe side effect."""

    def layer(x):
        return sr.attention(x, 1.5 * x, x + 1, PATTERNS[name], backend=backend, q_start=0)

    query = torch.rand(1, 2, LENGTH, 16, dtype=dtype, requires_grad=True)
    torch._dynamo.reset()
    compiled = torch.compile(TRANSFORMS[transform](layer), fullgraph=True, backend="aot_eager")
    results = []
    for out in (compiled(query), layer(query)):
        results.append((out, *torch.autograd.grad(out.float().pow(2).sum(), query)))
    for ours, eager in zip(*results, strict=True):
        assert torch.equal(ours, eager)


def test_constants_of_graphs_are_immutable():
    """A graph shares a constant with later calls, so none may be a list, a set or a dict."""
    found = {}
    package = pkgutil.walk_packages(sr.__path__, "sparsering.")
    for name in (info.name for info in package if info.name.startswith("sparsering.kernels")):
        if ".triton." in name and name != "sparsering.kernels.triton.call":
            continue  # kernels that need the package triton
        for value in vars(importlib.import_module(name)).values():
            if getattr(value, "_dynamo_marked_constant", False):
                found[value.__qualname__] = value
    assert set(found) >= {"build_failure", "_machine_reasons", "interpreting"}
    for name, function in found.items():
        result = function((None,)) if name == "_machine_reasons" else function()
        hash(result)
