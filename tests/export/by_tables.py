"""Calls as an exported program computes them: by tables, in operators of torch alone."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import sparsering as sr
from sparsering.export import decompositions
from sparsering.route.decision import checked_call
from sparsering.route.exported import exported_tables

ATTENTION = torch.ops.sparsering.attention.default


def attend_by_tables(
    query: Tensor, key: Tensor, value: Tensor, pattern: sr.Pattern, **options: Any
) -> tuple[Tensor, Tensor]:
    """Runs the decomposition of `attention` on tensors with numbers, without an export."""
    call = checked_call((query, key, value), pattern, **options)
    text, own = pattern.operands
    given = {
        **call._asdict(),
        **call.options.in_use,
        "pattern": text,
        "tensors": [*(own or [torch.zeros(0)]), *exported_tables(call).operands()],
        "backend": "cpu",
    }
    arguments = [given.get(x.name) for x in ATTENTION._schema.arguments]
    out, lse = decompositions()[ATTENTION](*arguments)
    return out, lse


class Calls(torch.nn.Module):
    """A module of one function."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *inputs: Tensor) -> Any:
        return self.function(*inputs)


def exported(module: torch.nn.Module, inputs: tuple[Tensor, ...], **options: Any) -> Any:
    """Exports a module and decomposes our operators; asserts that all operators are of aten."""
    with torch.no_grad():
        program = torch.export.export(module, inputs, **options)
    program = program.run_decompositions(decompositions())
    assert not (found := others(program)), found
    return program


def others(program: Any) -> set[str]:
    """Returns the operators of a program that are not of aten."""
    nodes = (node for part in program.graph_module.modules() for node in part.graph.nodes)
    targets = {node.target for node in nodes if node.op == "call_function"}
    # operators of Python compute with sizes, and take results apart
    found = [x for x in targets if getattr(x, "__module__", "") != "_operator"]
    names = {x.name() if isinstance(x, torch._ops.OpOverload) else x.__name__ for x in found}
    return {name for name in names if not name.startswith("aten::")}
