"""Takes models with sparse attention to where no Python runs: ONNX, ExecuTorch, AOTInductor.

    program = torch.export.export(model, inputs)
    program = program.run_decompositions(sparsering.export.decompositions())

docs/export.md has a model through each exporter.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor

from .ground.keywords import with_hints
from .ground.namespace import NAMESPACE
from .ground.numerics import without_autocast
from .kernels.over_tables import ListedBlocks, TableCall, attend_by_tables
from .patterns.positions import Full
from .route.exported import ExportedTables, taken_apart
from .route.operators import named, parsed_call

__all__ = ["decompositions"]

_TRAINING = (
    "a training graph keeps our operators; export the model inside torch.no_grad(), after .eval()"
)
_SECOND = (
    "a program carries no forward-mode or second derivatives; compute them in Python, by torch.func"
)
_DENSE = (
    "backend='reference' computes all pairs by an operator in Python; leave out backend= when the "
    "model is exported"
)
_RINGS = "ranks exchange keys in Python; export the model of one process, without a group"
_REFUSED = {
    "attention_backward": _TRAINING,
    "attention_tangent": _SECOND,
    "attention_backward_tangent": _SECOND,
    **{
        f"{ring}{part}": _RINGS
        for ring in ("ring_attention", "simulate_ring")
        for part in ("", "_backward", "_tangent", "_backward_tangent")
    },
    "slot_mass": (
        "the mass of a selection's slots trains a scorer; export the model without its loss"
    ),
    "cached_attention": (
        "a KVCache keeps its keys in Python; export a step over a buffer of a fixed length "
        "instead: attention(query, keys, values, KeyMask(filled), q_start=0)"
    ),
    "pair_counts": _DENSE,
    "places_of_pairs": _DENSE,
    "distances": _DENSE,
}
"""Why an operator of the library is in no program without Python, and what to do."""


@with_hints()
def decompositions() -> dict[Any, Callable[..., Any]]:
    """Returns what each operator of the library becomes in a program without Python.

    For `ExportedProgram.run_decompositions`. Attention becomes operators of aten over tables, which
    `torch.export` has stored in the program: products of gathered tiles, a softmax, and a merge.
    Their number does not depend on the length. Results are those of the model within rounding;
    half precision is summed in float32. What a program cannot carry raises an error by name.

    Returns: functions by operator, for the library's operators alone. Others of a program, such as
        `aten.linear`, stay. To decompose both, join tables:
        `table = torch.export.default_decompositions(); table.update(decompositions())`.

    Raises: NotImplementedError, when a program is decomposed, for an operator of training, of a
        ring, of a `KVCache` or of `backend="reference"`; for dropout; for a length that the program
        takes when it runs; and for a pattern that the program computes, but for masks of keys.

    Cost: memory for the scores of all pairs in visited tiles, of all heads of a layer at once.

    Example:
        >>> program = torch.export.export(model, (tokens,))
        >>> program = program.run_decompositions(sparsering.export.decompositions())
        >>> torch.onnx.export(program, (), "model.onnx")
    """
    ours = getattr(torch.ops, NAMESPACE)
    refused = {
        getattr(ours, name).default: partial(_refuse, name, why)
        for name, why in _REFUSED.items()
        if hasattr(ours, name)  # those of rings exist once their module is imported
    }
    return {ours.attention.default: _attention, **refused}


def _refuse(name: str, why: str, *_: Any, **__: Any) -> NoReturn:
    raise NotImplementedError(f"{NAMESPACE}::{name} cannot leave Python: {why}")


def _attention(*arguments: Any) -> tuple[Tensor, Tensor]:
    """Computes the operator `attention` by its tables; the arguments are those of its schema."""
    given = named(arguments)
    pattern = given["pattern"]
    if given["dropout_p"] is not None:
        _refuse("attention", "dropout is drawn in training; call model.eval() before the export")
    tables = ExportedTables.from_operands(given["tensors"], pattern)
    if tables is None:
        _refuse(
            "attention",
            f"the program has no tables of the pattern {pattern}, since its lengths or its tensors "
            "are known only when it runs; export one program for each length, with patterns that "
            "are made before the call, a model of transformers inside hf.using(model, pattern); "
            "masks of keys, ids of documents beside windows, and the numbers of one SelectedBlocks "
            "in a branch may be inputs",
        )
    query, key = given["query"], given["key"]
    call = TableCall(
        query=query,
        key=key,
        value=given["value"],
        scale=given["scale"],
        q_start=given["q_start"],
        key_mask=tables.key_mask(key.shape[2]),
        runs=tables.runs(),
        **{name: given[name] for name in ("softcap", "distance_bias", "block_bias", "sink")},
    )
    with without_autocast(query):
        lists = _lists(arguments) if tables.has_lists else []
        return attend_by_tables(call, tables.tiles, lists)


def _lists(arguments: tuple[Any, ...]) -> list[ListedBlocks]:
    """Returns the blocks that the selections of a call list, a selection for each branch."""
    call, _ = parsed_call(arguments)
    parts = taken_apart(call, has_lists=True)
    assert parts is not None  # or the call would have no tables
    found, frame = [], call.frame
    for source in parts.lists:
        if source is None:
            continue
        selection, limit = source.selection, source.limit
        size = selection.row_size
        first, last = frame.q_start // size, (frame.q_start + frame.q_len - 1) // size
        blocks = selection.indices.view(
            (1,) * (4 - selection.indices.dim()) + selection.indices.shape
        )
        bias = call.options["slot_bias"]
        if bias is not None:
            bias = bias.unflatten(2, blocks.shape[2:])
            bias = bias.narrow(2, first - selection.first_row, last - first + 1)
        found.append(
            ListedBlocks(
                blocks=blocks.narrow(2, first - selection.first_row, last - first + 1),
                block_size=selection.block_size,
                row_size=size,
                first=first * size,
                holds=partial((Full() if limit is None else limit).holds, frame=frame),
                slot_bias=bias,
            )
        )
    return found
