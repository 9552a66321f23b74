"""`using`: a pattern for the calls of a model in a block of code."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from ...checks import check_pattern
from ...patterns.algebra import Pattern
from .apply import check_keys, checked_modules, register
from .calls import (
    UsingBlock,
    backward_task,
    remember_blocks,
    runs_layers_again,
    thread,
    used_modules,
)
from .config import Patterns, is_cross_attention, place_of
from .implementation import hold, release, switch


@contextmanager
def using(model: Any, pattern: Patterns) -> Iterator[None]:
    """Lets a model's layers attend over exactly this pattern, for the calls in a `with` block.

    The pattern replaces the whole mask of these layers: causality, window, chunks, padding and
    documents. Positions are token indices of a row. Whatever else the model does with
    `attention_mask` and `position_ids`, such as rotary positions, does not change, and neither
    does cross attention.

    In nested blocks for one model only the innermost applies. Each thread has its own blocks. A
    backward pass, in the block or after it, has the pattern of its forward pass.

    Args:
        model: a model whose family uses transformers' attention interface. If it runs another
            implementation, it runs "sparsering" until the block ends. With gradient checkpointing
            it keeps "sparsering" after the block, because the backward pass runs layers again.
        pattern: one for all layers, or {layer index or layer type: pattern}, where an index
            overrides a type; layers that are not named keep their own mask. Unlike those of
            `apply`, patterns may have tensors or functions, as `SelectedBlocks` and `MaskMod` do.

    Returns: a context manager, which also decorates a function.

    Raises: ValueError for a key that names no layer and, when the model is called, for a cache
        with earlier tokens. NotImplementedError for a family that does not use the interface.

    Example:
        >>> with using(model, Causal() & Documents((700, 324))):
        ...     out = model(tokens, position_ids=positions)
    """
    modules = checked_modules(model)
    if isinstance(pattern, Mapping):
        check_keys(pattern, modules, "using")
    for part in pattern.values() if isinstance(pattern, Mapping) else [pattern]:
        check_pattern(part)
    own = {id(x): x for x in modules if not is_cross_attention(x)}
    found = {key: _pattern_for(x, pattern) for key, x in own.items()}
    patterns = {key: part for key, part in found.items() if part is not None}
    used_modules.update(own.values())
    register()
    remember_blocks(model)
    held = hold(model, modules, "using")
    block = UsingBlock(patterns, frozenset(own), backward_task())
    thread.blocks = (*thread.blocks, block)
    try:
        yield
    finally:
        thread.blocks = tuple(x for x in thread.blocks if x is not block)
        if runs_layers_again(model):
            switch(model, modules, "using")
        release(held)


def _pattern_for(module: Any, patterns: Patterns) -> Pattern | None:
    if not isinstance(patterns, Mapping):
        return patterns
    index, kind = place_of(module)
    return patterns.get(index, patterns.get(kind))  # type: ignore[arg-type]
