"""Indexers of models that choose keys for each query, in memory without a tensor of all pairs.

transformers' indexers score all pairs, and some families then build a mask of all pairs. Under
"sparsering" scores are computed for some queries at a time, and lists take the place of masks.
"""

import inspect
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from functools import partial, wraps
from types import SimpleNamespace
from typing import Any, NamedTuple
from weakref import WeakSet

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

from ...distributed.fetching import fetched
from ...ground.arguments import is_shape_alone
from ...patterns.algebra import Mask
from ...patterns.positions import Full
from ...patterns.selected import SelectedBlocks, has_lists
from ...selection.indexer import top_tokens
from .calls import SharedCall, thread
from .config import NAME
from .content_blocks import best_blocks, content_blocks
from .moving import keys_so_far, own_spans
from .shared_entries import EntriesOfRanks

_AT_A_TIME = 1 << 22  # scores in memory at a time
_watched: WeakSet[Any] = WeakSet()
_BY_ROW = {"matmul", "mul", "relu", "masked_fill", "add", "squeeze", "sum", "bitwise_not"}


class _Now(threading.local):
    def __init__(self) -> None:
        self.listed: list[Tensor] | None = None  # collects what a compressor's indexer lists
        self.chosen: Chosen | None = None  # the entries of the layer that attends next


_now = _Now()


class Chosen(NamedTuple):
    """The keys that each query sees; where a family builds a mask of them, it stands for it."""

    indices: Tensor  # int64 [B, H or 1, N, k] blocks of keys; -1: none
    block_size: int = 1
    entries: int = 0  # keys behind the tokens, whose lists are joined to the model's own mask

    def mask(self, q_start: int, tokens: int = 0) -> Mask:
        """Returns the mask of the queries from q_start on; listed entries are behind `tokens`."""
        if is_shape_alone(self.indices):  # no shape depends on which keys were chosen
            return Full()
        blocks = self.indices.long()
        if self.entries:
            blocks = torch.where(blocks < 0, -1, blocks + tokens)
        return SelectedBlocks(blocks, self.block_size, 1, q_start)

    def of_rank(self, shared: SharedCall) -> SelectedBlocks:
        """Returns the mask of this rank's own queries; listed entries count from the first.

        Of large blocks it is the mask of all queries, which ring attention needs.
        """
        own = self.indices[:, :, : shared.num_tokens].long()
        first = 0 if self.entries or not shared.num_tokens else int(shared.tokens[0])
        found = SelectedBlocks(own, self.block_size, 1, first)
        if has_lists(found):
            return found
        spans = own_spans(shared)
        wanted = [(0, shared.length)] * len(spans)
        table = fetched(own.transpose(1, 2), spans, wanted, shared.group, "chosen blocks")
        return replace(found, indices=table.transpose(1, 2), first_row=0)


class UnchosenBlocks(NamedTuple):
    """Queries and keys of MiniMax-M3's indexer, which does not get the model's mask to choose."""

    indexer: Any
    query: Tensor  # [B, H, N, D]
    key: Tensor  # [B, 1, M, D]

    def choose(self, mask: Any, shared: SharedCall | None = None) -> Chosen:
        """Returns the best blocks of visible keys; blocks begin at a document's first token."""
        (batch, _, queries, _), size = self.query.shape, int(self.indexer.block_size)
        key, first = self.key[:, 0], None
        if shared is not None:
            key, first, queries = keys_so_far(key, shared), int(shared.tokens[0]), shared.length
        found = content_blocks(mask, batch, queries, size, self.query.device)
        counts = self.indexer.topk_blocks, self.indexer.local_blocks, _AT_A_TIME
        return Chosen(*best_blocks(self.query, key, found, *counts, first))


def chosen_keys(
    module: Any, mask: Any, indices: Tensor | None, block_indices: Tensor | UnchosenBlocks | None
) -> Chosen | UnchosenBlocks | None:
    """Returns what a layer's indexer or compressor has chosen in this call, or None."""
    if isinstance(mask, Chosen):
        return mask
    for name, listed in (("indices", indices), ("block_indices", block_indices)):
        if listed is not None and not hasattr(module, "indexer"):
            raise NotImplementedError(
                f'"sparsering" attention takes {name} from a layer with an indexer, got them for '
                f"{type(module).__name__}, which has none; write them as a pattern for hf.using, "
                "such as SelectedBlocks(indices, block_size)"
            )
    if indices is not None:
        return Chosen(indices[:, None])  # [B, N, k] -> [B, 1, N, k]
    if isinstance(block_indices, UnchosenBlocks):
        return block_indices
    if block_indices is not None:
        if (
            getattr(mask, "valid_keys", None) is not None
            or getattr(mask, "documents", None) is not None
        ):
            raise NotImplementedError(
                f"{type(module).__name__} inside torch.compile counts blocks from a row's first "
                "place, got a mask with padding or documents; leave attention_mask and "
                "position_ids out where nothing is padded, or call the model without compile"
            )
        return Chosen(block_indices, int(module.indexer.block_size))
    if getattr(module, "compressor", None) is None:
        return None
    # The compressor runs outside of compiled graphs, which cannot trace a `threading.local`.
    return _uncompiled(_take) if torch.compiler.is_compiling() else _take()


def _take() -> Chosen | None:
    """Returns the entries that this thread's last compressor has chosen, once."""
    chosen, _now.chosen = _now.chosen, None
    return chosen


class Rows:
    """A tensor [B, N, ...] that is computed for some queries at a time.

    Operations that keep queries apart give `Rows`; `topk` and others give the whole result.
    """

    def __init__(self, of: Callable[[slice], Tensor], queries: int, cells: int = 0) -> None:
        first = of(slice(0, 1))
        self.of, self.queries, self.cells = of, queries, max(cells, first.numel())
        self.shape = torch.Size((len(first), queries, *first.shape[2:]))
        self.dtype, self.device = first.dtype, first.device

    def __getattr__(self, name: str) -> Callable[..., Any]:
        method = getattr(Tensor, name)
        return lambda *args, **options: self.__torch_function__(method, (), (self, *args), options)

    def __mul__(self, other: Any) -> Any:
        return torch.mul(self, other)  # type: ignore[arg-type]

    def __invert__(self) -> Any:
        return torch.bitwise_not(self)  # type: ignore[arg-type]

    @classmethod
    @torch.no_grad()
    def __torch_function__(
        cls, function: Any, _: Any, args: tuple[Any, ...], options: dict[str, Any] | None = None
    ) -> Any:
        lazy = [x for x in args if isinstance(x, Rows)]
        queries, cells = lazy[0].queries, max(x.cells for x in lazy)

        def of(part: slice) -> Any:
            return function(*(_rows(x, part, queries) for x in args), **(options or {}))

        if function.__name__ in _BY_ROW:
            return Rows(of, queries, cells)
        if function is Tensor.topk:
            one = of(slice(0, 1))  # results of parts, kept one by one, would fragment the heap
            whole = [x.new_empty(len(x), queries, *x.shape[2:]) for x in one]
            for part in args[0].parts():
                for to, x in zip(whole, of(part), strict=True):
                    to[:, part] = x
            return torch.return_types.topk((whole[0], whole[1]))
        return of(slice(0, queries))

    def parts(self) -> list[slice]:
        step = max(1, _AT_A_TIME // max(1, self.cells))
        return [slice(x, min(x + step, self.queries)) for x in range(0, self.queries, step)]


def _rows(x: Any, part: slice, queries: int) -> Any:
    if isinstance(x, Rows):
        return x.of(part)
    return x[:, part] if isinstance(x, Tensor) and x.dim() > 2 and x.shape[1] == queries else x


class _InParts(TorchFunctionMode):
    """Makes the product of index queries [B, N, H, D] with all keys [B, 1, D, M] `Rows`."""

    def __torch_function__(
        self, function: Any, _: Any, args: Any = (), options: dict[str, Any] | None = None
    ) -> Any:
        if function is torch.matmul and all(isinstance(x, Tensor) and x.dim() == 4 for x in args):
            query, key = args
            pairs = query[..., 0].numel() * key.shape[3]
            if key.shape[1] == 1 < query.shape[1] and pairs > _AT_A_TIME:
                return Rows(partial(_products, query, key[:, 0]), query.shape[1])
        return function(*args, **(options or {}))


def _products(query: Tensor, key: Tensor, part: slice) -> Tensor:
    """Multiplies some queries [B, N, H, D] with all keys [B, D, M], as one matrix of a batch."""
    some = query[:, part]  # [B, n, H, D]
    products = torch.matmul(some.flatten(1, 2), key)  # [B, n * H, M]
    return products.unflatten(1, some.shape[1:3])  # [B, n, H, M]


def watch(model: Any) -> None:
    """Lets the indexers of a model run as this module says; cheap after the first call.

    It comes before a model's first call too, which torch.compile may trace.
    """
    if torch.compiler.is_compiling() or model in _watched:
        return
    _watched.add(model)
    for part in model.modules():  # models in it come later: an indexer has the innermost's config
        for module in part.modules() if isinstance(part, PreTrainedModel) else ():
            if (wrapped := _wrapped_of(module)) is None:
                continue
            module._sparsering_config = part.config  # names the attention that runs
            own = getattr(type(module), wrapped.method)
            if not hasattr(own, NAME):
                setattr(type(module), wrapped.method, _under_our_name(own, wrapped))


def _under_our_name(own: Callable[..., Any], wrapped: "_Wrapped") -> Callable[..., Any]:
    @wraps(own)
    def method(module: Any, *args: Any, **options: Any) -> Any:
        config = getattr(module, "_sparsering_config", None)
        if getattr(config, "_attn_implementation", "") != NAME:
            return own(module, *args, **options)
        if not torch.compiler.is_compiling():
            return wrapped.runs(own, module, *args, **options)
        if wrapped.own_in_graphs and thread.shared is None:
            return own(module, *args, **options)
        return _uncompiled(wrapped.runs, own, module, *args, **options)

    setattr(method, NAME, True)
    return method


@torch.compiler.disable
def _uncompiled(function: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """Calls a function outside of a compiled graph, which breaks there.

    The function sends messages to other ranks, or the sizes of its results depend on tokens.
    """
    return function(*args, **options)


class _KeysOfRanks:
    """Stands for the layer of a cache in an indexer: the "cached" keys are of earlier ranks."""

    def __init__(self, shared: SharedCall) -> None:
        self.shared = shared
        self.keys = torch.empty(0)

    def get_seq_length(self) -> int:
        """Returns the number of tokens up to this rank's last one."""
        return int(self.shared.tokens[-1]) + 1

    def update_indexer(self, keys: Tensor, _: int) -> Tensor:
        """Returns the keys [B, N, D] of the whole row, from this rank's [B, n, D]."""
        self.keys = keys_so_far(keys, self.shared)
        return self.keys


def _in_parts(own: Callable[..., Any], indexer: Any, *args: Any, **options: Any) -> Any:
    """Runs an indexer with `Rows` of scores; keeps its lists for a compressor (DeepSeek-V4)."""
    if thread.shared is not None and _now.listed is None:  # else the compressor has its keys
        given = inspect.signature(own).bind(indexer, *args, **options)
        keys = _KeysOfRanks(thread.shared)
        given.arguments["past_key_values"] = SimpleNamespace(
            layers={indexer.layer_idx: keys}, update_indexer=keys.update_indexer
        )
        mask = given.arguments["attention_mask"]
        if isinstance(mask, Tensor) and mask.dim() == 2:  # of padding (GLM-5)
            given.arguments["attention_mask"] = _own_padding(mask, thread.shared)
        indexer, *args = given.args  # type: ignore[assignment]
        options = given.kwargs
    with _InParts():
        listed = own(indexer, *args, **options)
    if _now.listed is not None:
        _now.listed.append(listed)
    return listed


def _own_padding(mask: Tensor, shared: SharedCall) -> Tensor:
    """Returns which of this rank's tokens are not padding, bool [B, n].

    GLM-5's mask is of the last n tokens of the row, or without padding of no matter which.
    """
    if shared.valid is None:
        return torch.ones_like(mask)
    return shared.valid.index_select(1, shared.tokens).to(mask.dtype)


def _compress(own: Callable[..., Any], compressor: Any, *args: Any, **options: Any) -> Any:
    """Runs DeepSeek-V4's compressor; keeps which of its entries each query sees."""
    _now.listed, _now.chosen = [], None
    if (shared := thread.shared) is not None:
        given = inspect.signature(own).bind(compressor, *args, **options)
        layers = {given.arguments["layer_idx"]: EntriesOfRanks(compressor, shared)}
        given.arguments["past_key_values"] = SimpleNamespace(layers=layers)
        compressor, *args = given.args  # type: ignore[assignment]
        options = given.kwargs
    try:
        keys, bias = own(compressor, *args, **options)
        listed = _now.listed
    finally:
        _now.listed = None
    if (entries := keys.shape[2]) and not listed:  # no indexer; a single query sees all entries
        place = torch.arange(entries, device=keys.device)[None, None]  # [1, 1, entries]
        if shared is not None:  # a single query may be one of many
            closed = (given.arguments["position_ids"] + 1) // compressor.compress_rate
            bias = torch.where(place < closed[..., None], 0, -1)[:, None]
        listed = [place if bias is None else torch.where(bias[:, 0] == 0, place, -1)]
    if entries:
        _now.chosen = Chosen(listed[0][:, None], entries=entries)
    return keys, bias


def _as_lists(_: Any, __: Any, topk_indices: Tensor, *___: Any, **____: Any) -> Chosen:
    """Takes the place of GLM-5's mask of all pairs, whose lists hold causality and padding."""
    return Chosen(topk_indices[:, None])


@torch.no_grad()
def _pooled(
    _: Any,
    indexer: Any,
    hidden_states: Tensor,
    position_embeddings: tuple[Tensor, Tensor],
    attention_mask: Any,
    past_key_values: Any,
) -> Chosen:
    """Computes the lists of Qwen 4's indexer, which transformers computes query by query.

    A document's visible tokens are cut into blocks of `compress_ratio`. A query sees the whole
    blocks before it with the best mean keys, and the tokens behind its last whole block.
    """
    (batch, queries, _), size = hidden_states.shape, indexer.compress_ratio
    heads, dim = indexer.index_n_heads, indexer.index_head_dim
    rotate = sys.modules[type(indexer).__module__].apply_rotary_pos_emb
    cos, sin = position_embeddings
    # query [B, N, H * D], key [B, N, D]
    query, key = indexer.index_qk_proj(hidden_states).split((heads * dim, dim), -1)
    query = indexer.q_layernorm(query.unflatten(-1, (heads, dim)))  # [B, N, H, D]
    query = rotate(query, cos=cos[:, -queries:], sin=sin[:, -queries:], unsqueeze_dim=2)
    first_query, length = None, queries
    if (shared := thread.shared) is not None:
        first_query, length = int(shared.tokens[0]), shared.length
        cos, sin = (x.expand(batch, -1, -1) for x in (cos, sin))
        widths = dim, cos.shape[2], sin.shape[2]
        of_row = keys_so_far(torch.cat((key, cos, sin), 2), shared)
        key, cos, sin = of_row.split(widths, 2)  # [B, M, D] each
    elif past_key_values is not None:
        key = past_key_values.update_indexer(key, indexer.layer_idx)  # [B, M, D], cached ones too
    found = content_blocks(attention_mask, batch, length, size, key.device)
    valid, place, outside = found.valid, found.place, found.outside  # [B, M] each
    in_order = found.in_order  # [B, M]
    tokens, starts = found.tokens, found.starts  # [B, blocks, size] and [B, blocks]
    length, inside = valid.shape[1], torch.arange(size, device=key.device)
    entry = torch.arange(batch, device=key.device)[:, None, None]  # [B, 1, 1]
    of_block = key[entry, tokens]  # [B, blocks, size, D]
    pooled = indexer.k_layernorm(of_block.float().mean(2).to(key.dtype))  # [B, blocks, D]
    # the rotary position of a block is that of its first token: [B, blocks, D]
    cos, sin = (x.expand(batch, -1, -1)[entry[..., 0], starts] for x in (cos, sin))
    pooled = rotate(pooled[:, :, None], cos=cos, sin=sin, unsqueeze_dim=2)[:, :, 0]
    first_query = length - queries if first_query is None else first_query
    own = slice(first_query, first_query + queries)
    seen = (place - outside + valid)[:, own]  # [B, N] visible tokens of the query's document
    whole, first = seen // size, found.blocks_outside[:, own]  # [B, N] blocks
    weight = query.new_ones(batch, queries, heads)
    listed = top_tokens(
        query.transpose(1, 2),
        pooled,
        weight,
        indexer.block_topk,
        causal=False,
        first=first,
        stop=first + whole,
    )[:, 0]  # [B, N, k] blocks
    of_listed = tokens[entry, listed.clamp(min=0)]  # [B, N, k, size]
    listed = torch.where(listed[..., None] < 0, -1, of_listed).flatten(2)  # [B, N, k * size]
    behind = whole[..., None] * size + inside[:-1]  # [B, N, size - 1] after the whole blocks
    place = (outside[:, own, None] + behind).clamp(max=length - 1)
    tail = torch.where(behind < seen[..., None], in_order[entry, place], -1)
    return Chosen(torch.cat((listed, tail), 2)[:, None])  # [B, 1, N, k * size + size - 1]


@torch.no_grad()
def _not_yet_chosen(
    _: Any,
    indexer: Any,
    hidden_states: Tensor,
    position_embeddings: tuple[Tensor, Tensor],
    past_key_values: Any,
    __: Tensor,
) -> UnchosenBlocks:
    """Computes the queries and keys of MiniMax-M3's indexer."""
    rotate = sys.modules[type(indexer).__module__].apply_rotary_pos_emb
    # query [B, H, N, D], key [B, 1, N, D]
    query, key = (
        norm(layer(hidden_states).unflatten(-1, (-1, indexer.head_dim))).transpose(1, 2)
        for layer, norm in ((indexer.q_proj, indexer.q_norm), (indexer.k_proj, indexer.k_norm))
    )
    query, key = rotate(query, key, *(x[..., : indexer.head_dim] for x in position_embeddings))
    if past_key_values is not None:
        key = past_key_values.layers[indexer.layer_idx].update_index(key)  # [B, 1, M, D]
    return UnchosenBlocks(indexer, query, key)


class _Wrapped(NamedTuple):
    """A method of a family's class, and what runs in its place under "sparsering"."""

    method: str
    runs: Callable[..., Any]  # gets the method, the module and the method's arguments
    finds_keys_of_ranks: bool = True
    own_in_graphs: bool = True  # whether a compiled graph has the family's own method instead


_INDEXER = _Wrapped("forward", _in_parts)
_COMPRESSOR = _Wrapped("forward", _compress, own_in_graphs=False)
_WRAPPED: dict[str, _Wrapped] = {
    # by the name of a class of transformers
    "DeepseekV32Indexer": _INDEXER,
    "AXK2Indexer": _INDEXER,
    "Dots3NoteTextIndexer": _INDEXER,
    "Glm5NextTextIndexer": _INDEXER,
    "GlmMoeDsaIndexer": _INDEXER,
    "HYV4Indexer": _INDEXER,
    "MistralLarge4TextIndexer": _INDEXER._replace(finds_keys_of_ranks=False),
    "DeepseekV4Indexer": _INDEXER,
    "DeepseekV4CSACompressor": _COMPRESSOR,
    "DeepseekV4HCACompressor": _COMPRESSOR,
    "Glm5NextTextAttention": _Wrapped("build_attention_mask_from_topk", _as_lists),
    "MiniMaxM3VLIndexer": _Wrapped("forward", _not_yet_chosen),
    "Qwen4ExpTextQSAIndexer": _Wrapped("forward", _pooled, own_in_graphs=False),
}


def lists_keys(model: Any) -> bool:
    """Whether layers of a model choose keys for each query."""
    return any(_wrapped_of(module) is not None for module in model.modules())


def is_other_indexer(module: Any) -> bool:
    """Whether a module chooses keys among those of its own rank only."""
    if (wrapped := _wrapped_of(module)) is not None:
        return not wrapped.finds_keys_of_ranks
    return type(module).__name__.endswith(("Indexer", "Compressor"))


def _wrapped_of(module: Any) -> _Wrapped | None:
    """Returns what this file runs for a module of the family, or of a user's class on top of it."""
    names = (kind.__name__ for kind in type(module).__mro__)
    return next((_WRAPPED[name] for name in names if name in _WRAPPED), None)
