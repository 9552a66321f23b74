"""`register`, `apply`, `using`, `explain`: sparse patterns for models of transformers."""

import functools
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from transformers import AttentionInterface, AutoModelForCausalLM, PreTrainedModel
from transformers.masking_utils import AttentionMaskInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ....checks import check_module, check_pattern
from ....distributed.heads import world_of
from ....distributed.plan import RingPlan
from ....functional import explain as explain_call
from ....ground.arguments import shortened
from ....ground.keywords import with_hints
from ....patterns.algebra import Pattern
from ....patterns.expression import parse
from ....patterns.packed_tree import PackedTree
from ....patterns.positions import Full
from ....patterns.tree import Tree
from ..call import calls
from ..call.attention import attention_function
from ..call.masks import mask_interface, watch_requests
from ..call.seen import watch_crops
from ..families import CONVERTED_NAMES
from ..name import NAME, PAGED
from . import adapters, config, indexers


@with_hints()
def register() -> None:
    """Registers `attn_implementation="sparsering"` with transformers; repeated calls are harmless.

    A model with this implementation attends over its own mask and skips tiles that the mask hides.
    It supports windows, chunks, padding on any side, packed documents, caches, softcap, sinks, T5's
    biases and dropout. After registration transformers also warns if a model ignores the pattern
    that `apply` stored in its config. `set_attn_implementation` gives a model a config of its own.

    Example:
        >>> register()
        >>> model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="sparsering")
    """
    AttentionInterface.register(NAME, attention_function)
    _take_patch_of_kvpress()
    AttentionMaskInterface.register(NAME, mask_interface)
    watch_requests()
    watch_crops()
    adapters.watch_adapters(_give)
    check = PreTrainedModel._check_and_adjust_attn_implementation
    if not hasattr(check, NAME):
        PreTrainedModel._check_and_adjust_attn_implementation = _with_warning(check)
        PreTrainedModel.post_init = _with_indexers(PreTrainedModel.post_init)


def _take_patch_of_kvpress() -> None:
    """Wraps "sparsering" as kvpress wraps all attention that is registered when it is imported.

    The wrapper hides the keys that a press dropped for single heads. Such keys stay in the cache,
    so without it a model would go on to see them, and nothing would tell.
    """
    patch = sys.modules.get("kvpress.attention_patch")
    if patch is not None and ALL_ATTENTION_FUNCTIONS[NAME] is attention_function:
        ALL_ATTENTION_FUNCTIONS[NAME] = patch.attention_patch(attention_function)


def _with_warning(check: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps the method of transformers that sets a model's attention, to prepare the model.

    For "sparsering" it adds the hooks that calls need. For another implementation it warns if the
    config stores a pattern, which would have no effect.
    """

    @functools.wraps(check)
    def checked(self: Any, *arguments: Any, **options: Any) -> Any:
        is_built = bool(self._modules)
        if not is_built:
            config.notice_new_model(self.config)
        if (implementation := check(self, *arguments, **options)) == NAME:
            calls.remember_positions(self, indexers.watch)
            if is_built:
                config.separate(self)
                indexers.watch(self)
        if (texts := config.stored_text(self.config)) is not None:
            config.parse_in_advance(texts)
            if implementation not in (NAME, PAGED):
                warnings.warn(
                    f"the config of this {type(self).__name__} holds the pattern {_line(texts)}, "
                    f"which {implementation!r} attention does not follow; load it with "
                    f'attn_implementation="{NAME}"',
                    stacklevel=4,
                )
        return implementation

    setattr(checked, NAME, True)
    return checked


def _with_indexers(post_init: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps `post_init`, which ends the building of a model, to replace its indexers' methods.

    The first call of the model would be too late, because torch.compile may trace it.
    """

    @functools.wraps(post_init)
    def prepared(self: Any, *arguments: Any, **options: Any) -> None:
        post_init(self, *arguments, **options)
        if getattr(self.config, "_attn_implementation", None) == NAME:
            indexers.watch(self)

    return prepared


@with_hints()
def apply(model: Any, pattern: config.Patterns) -> None:
    """Lets a model's layers attend over a pattern, in place of their own window or chunk.

    The model's mask still applies: causality, padding and documents. Positions count from each
    row's first token that is not padding, and restart in each document. Cross attention does not
    change. The config stores the pattern as text. So copies of the model keep the pattern, and so
    does a model that is saved and loaded again with `attn_implementation="sparsering"`. The model
    gets a config of its own first: other models of the config object that it was made of, and that
    object, do not change (`model.config` is then another object). `using` and `parallelize` do so
    too.

    Args:
        model: a model whose family uses transformers' attention interface, or a wrapper of it, as
            those of peft, DDP, FSDP, accelerate and `torch.compile`.
        pattern: one for all layers, or {layer index or layer type: pattern}, where an index
            overrides a type; layers that are not named keep their own mask. The types are in
            `config.layer_types`, for example "sliding_attention" and "full_attention".

    Raises: NotImplementedError for a family that does not use the interface. ValueError for a key
        that names no layer, or a pattern that cannot be written as text.

    Example:
        >>> apply(model, Causal() & (SlidingWindow(511) | GlobalTokens(4, rows=False)))
    """
    model = config.model_inside(model)
    modules = _checked_modules(model, pattern, "apply")
    texts = config.text_of(pattern)
    config.parse_in_advance(texts)
    register()
    config.switch(model, modules, "apply")
    for module in (model, *modules):
        setattr(module.config, NAME, texts)


def load(path: Any, cls: Any = AutoModelForCausalLM, **options: Any) -> Any:
    """Loads a saved model, or an adapter, with the patterns that `apply` gave it.

    The model has "sparsering" attention. A folder of an adapter is loaded on its base model.

    Args:
        path: folder or name, as for `cls.from_pretrained`.
        cls: the class that loads it, such as `AutoModel`.
        options: further arguments of `cls.from_pretrained`.

    Returns: the model, in eval mode.

    Raises: ValueError for another attn_implementation, or a stored pattern that names no layer or
        cannot be read; NotImplementedError if the model's layers would not follow it.

    Example:
        >>> apply(model, SlidingWindow(511) | GlobalTokens(4, rows=False))
        >>> model.save_pretrained("tuned")
        >>> model = load("tuned")
    """
    if (given := options.setdefault("attn_implementation", NAME)) != NAME:
        raise ValueError(
            f'load runs attn_implementation="{NAME}", got {given!r}; leave it out, or call '
            f"{getattr(cls, '__name__', 'the class')}.from_pretrained"
        )
    register()
    model = cls.from_pretrained(path, **options)
    inside = config.model_inside(model)
    texts = config.stored_text(inside.config)
    layers: Any = _by_layer(texts) if isinstance(texts, Mapping) else {}
    config.switch(inside, _checked_modules(inside, layers, "load"), "load")
    return model


def _give(model: Any, texts: config.Texts) -> None:
    """Applies a pattern that was saved with an adapter to the model that loads it."""
    if isinstance(texts, str):
        apply(model, parse(texts))
    else:
        apply(model, {layer: parse(text) for layer, text in _by_layer(texts).items()})


def _by_layer(texts: Mapping[str, str]) -> dict[int | str, str]:
    """Converts keys of stored texts: an index becomes an int, a layer type stays text."""
    return {int(key) if key.isdigit() else key: text for key, text in texts.items()}


def _checked_modules(model: Any, pattern: config.Patterns, verb: str) -> list[Any]:
    """Returns a model's attention modules; an error if the pattern cannot reach any of them.

    Raises: NotImplementedError if there are none; ValueError if a key of `pattern` names no layer.
    """
    check_module("model", model)
    modules = list(config.attention_modules(model))
    if not [x for x in modules if verb == "load" or config.may_be_self_attention(x)]:
        raise NotImplementedError(
            f"{type(model).__name__} computes attention in its own classes and does not ask "
            "transformers' attention interface, so a pattern would have no effect; use a family "
            f"for which attn_implementation can be set, or hf.convert(model) ({CONVERTED_NAMES})"
        )
    numbers = {getattr(module, "layer_idx", None) for module in modules}
    indices = [index for index in numbers if isinstance(index, int)]
    kinds = {kind for x in modules for kind in config.types_of(x.config) or ["full_attention"]}
    for key in pattern if isinstance(pattern, Mapping) else ():
        if key not in (indices if type(key) is int else kinds):
            span = f"0 to {max(indices)}" if indices else "none, as this family has no layer_idx"
            raise ValueError(
                f"{verb} needs layer indices ({span}) or layer types ({', '.join(sorted(kinds))}), "
                f"got {key!r}; pass a single pattern for all layers"
            )
    return modules


@with_hints()
@contextmanager
def using(model: Any, pattern: config.Patterns | PackedTree) -> Iterator[None]:
    """Lets a model's layers attend over exactly this pattern, for the calls in a `with` block.

    The pattern replaces the whole mask of these layers: causality, window, chunks, padding and
    documents. Positions are token indices of a row. Cross attention does not change, nor what else
    the model does with `attention_mask` and `position_ids`, such as rotary positions.

    In nested blocks for one model only the innermost applies. Each thread has its own blocks. A
    backward pass, in the block or after it, has the pattern of its forward pass.

    Args:
        model: a model whose family uses transformers' attention interface. If it runs another
            implementation, it runs "sparsering" until the block ends. With gradient checkpointing
            it keeps "sparsering" after the block, because the backward pass runs layers again.
        pattern: one for all layers, or {layer index or layer type: pattern}, where an index
            overrides a type; layers that are not named keep their own mask. Unlike those of
            `apply`, patterns may have tensors or functions, as `SelectedBlocks` and `MaskMod` do.
            Or a tree of `pack_tree`: each layer has its own mask, such as a window, along paths.

    Returns: a context manager, which also decorates a function.

    Raises: ValueError for a key that names no layer and, when the model is called, for a cache
        with earlier tokens. NotImplementedError for a family that does not use the interface.

    Example:
        >>> with using(model, Causal() & Documents((700, 324))):
        ...     out = model(tokens, position_ids=positions)
    """
    if isinstance(pattern, PackedTree):
        pattern = _along_paths(pattern, config.decoder_config(model))
    model = config.model_inside(model)
    modules = _checked_modules(model, pattern, "using")
    for part in pattern.values() if isinstance(pattern, Mapping) else [pattern]:
        check_pattern(part)
    own = {id(x): x for x in modules if config.may_be_self_attention(x)}
    found = {key: config.of_layer(pattern, *config.place_of(x)) for key, x in own.items()}
    patterns = {key: part for key, part in found.items() if part is not None}
    calls.used_modules.update(own.values())
    register()
    calls.remember_blocks(model)
    held = config.hold(model, modules, "using")
    block = calls.UsingBlock(patterns, frozenset(own), calls.backward_task())
    calls.thread.blocks = (*calls.thread.blocks, block)
    try:
        yield
    finally:
        calls.thread.blocks = tuple(x for x in calls.thread.blocks if x is not block)
        if calls.runs_layers_again(model):
            config.switch(model, modules, "using")
        config.release(held)


def _along_paths(tree: PackedTree, decoder: Any) -> dict[int | str, Pattern]:
    """Returns each layer's own window or chunk, applied along the paths of a packed tree.

    Distances are then differences of depth in the tree, not of position in the row.
    """
    own = config.layer_patterns(decoder)
    if None in own:
        kind = config.types_of(decoder)[own.index(None)]
        raise NotImplementedError(
            f"using takes a PackedTree where layers are full, windows or chunks, got {kind!r}; "
            "pass {layer type: Tree(lengths, parents, pattern)}"
        )
    along = {part: Tree(tree.lengths, tree.parents, part) for part in own}  # type: ignore[arg-type]
    return {index: along[part] for index, part in enumerate(own)}


@with_hints()
def explain(model: Any) -> str:
    """Describes each layer in a line: index, pattern, backend, and the most keys that it caches.

    After a call that ranks share (`parallelize`), a line also says the ranks, the sharding, and the
    bytes and the tokens per kv head (the halo) that the rank with most of them receives in a
    forward pass of a row of that length. Padding and documents may make it less. In a `using`
    block, a layer has the block's pattern and no cache.

    Returns: one line per layer. If the model has another attn_implementation, a single line names
        that implementation and any pattern that the model's config stores.
    """
    model = config.model_inside(model)
    decoder = config.decoder_config(model)
    if (implementation := decoder._attn_implementation) != NAME:
        texts = config.stored_text(decoder)
        note = f"; the pattern {_line(texts)} in its config is not in force" if texts else ""
        return f"{type(model).__name__} runs {implementation!r}, not {NAME!r}{note}"
    causal = is_causal(model)
    heads, kv_heads, head_dim = config.heads_of(decoder)
    weight = next(model.parameters())  # may be FSDP2's DTensor: only read its attributes
    like = {"dtype": weight.dtype, "device": weight.device}
    query, key = (torch.zeros(1, n, 16, head_dim, **like) for n in (heads, kv_heads))
    backend = explain_call(query, key, key, Full()).split(",")[0].removeprefix("runs: ")
    lines = []
    used = _used_patterns(model)
    for index, pattern in enumerate(patterns_of(model)):
        bound = "none"
        if causal and pattern is not None and index not in used:
            most = pattern.cache_bound(num_heads=heads, num_kv_heads=kv_heads)
            bound = "grows without end" if most is None else f"{most} keys"
        text = "the model's own" if pattern is None else shortened(str(pattern), 120)
        line = f"{index}: {text}; {backend}; cache: {bound}"
        lines.append(line + _traffic(calls.shared_calls.get(model), index, pattern))
    return "\n".join(lines)


def _traffic(shared: calls.SharedCall | None, index: int, pattern: Pattern | None) -> str:
    """Describes the bytes that ranks receive for a layer in a shared call; "" without one."""
    if shared is None or shared.group is None or (ranks := shared.group.size()) == 1:
        return ""
    text = f"; {ranks} ranks, {shortened(shared.sharding)}"
    if pattern is None or index not in shared.shapes:
        return text
    heads, kv_heads, *dims, dtype = shared.shapes[index]
    counts = {"num_heads": heads, "num_kv_heads": kv_heads}
    world = world_of(shared.place)
    plan = RingPlan.build(pattern, shared.length, world, sharding=shared.sharding, **counts)
    sizes: dict[str, Any] = {"head_dim": dims, "dtype": dtype}
    most = max(plan.bytes_received(rank, **sizes) for rank in range(ranks))
    halo = max(plan.tokens_received(rank) for rank in range(ranks)) / kv_heads
    return f"{text}: {most:,} bytes, halo {halo:,.0f} tokens of {shared.length:,}"


def is_causal(model: Any) -> bool:
    """Whether the model's self-attention hides later tokens."""
    own = filter(config.may_be_self_attention, config.attention_modules(model))
    return any(getattr(x, "is_causal", True) or getattr(x, "is_decoder", False) for x in own)


def patterns_of(model: Any) -> list[Pattern | None]:
    """Returns each layer's pattern: of an open `using` block, of `apply`, or of the model.

    It is None for a layer whose mask is not known as a pattern.
    """
    patterns = config.layer_patterns(config.decoder_config(model), is_causal(model))
    used = _used_patterns(model)
    return [used.get(index, pattern) for index, pattern in enumerate(patterns)]


def _used_patterns(model: Any) -> dict[int, Pattern]:
    """Returns {layer index: pattern} of open `using` blocks."""
    patterns = {}
    for number, module in enumerate(config.attention_modules(model)):
        index = getattr(module, "layer_idx", None)
        if (pattern := calls.used_pattern(module, calls.thread.blocks)) is not None:
            patterns[index if isinstance(index, int) else number] = pattern
    return patterns


def _line(texts: config.Texts) -> str:
    return texts if isinstance(texts, str) else ", ".join(f"{k}: {v}" for k, v in texts.items())
