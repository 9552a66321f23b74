"""`ModelMask`: a compact description of a model's mask, in place of an N x N tensor.

transformers calls a mask interface once per step and layer type, and passes the result through the
model to the attention function. `SameRun` and `InRuns` are masks of its documents and chunks, given
as a tensor of run indices. A run is a range of tokens with equal indices. The operator gets the
tensor, also under torch.compile, and replaces `SameRun` by `Documents` and `InRuns` by `Packed`.
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial, reduce
from typing import Any, ClassVar, NoReturn

import torch
from torch import Tensor
from transformers import masking_utils
from transformers.cache_utils import Cache, DynamicLayer

from ....ground.arguments import is_shape_alone
from ....patterns.algebra import Frame, Mask, Mixture, Pattern
from ....patterns.blocks import TensorMask
from ....patterns.expression import add_constructor
from ....patterns.keys import KeyMask
from ....patterns.positions import Causal, Dilated, Documents, Full, Packed, SlidingWindow
from ..families import PARTS_OF_MASKS
from ..name import NAME
from .calls import PLAIN_CALL, CallState, MaskRequest, call_state, packing, replacement, thread
from .chosen import Chosen
from .mask_kind import MaskKind, recognise, recognise_inside_compile, runs_by_neighbours
from .once import once
from .rows import Rows
from .seen import own_cache, seen_tokens
from .shapes import is_true

# Arguments of a call that hide where documents begin, in the words of a warning.
_HIDES_DOCUMENTS = {
    "past_key_values": "a cache",
    "cache": "a cache",
    "attention_mask": "an attention_mask",
}
Inputs = tuple[Tensor, Tensor, Tensor]  # query, key, value
Options = dict[str, Any]  # of a call of `attention`


@dataclass(frozen=True, repr=False, eq=False)
class SameRun(TensorMask):
    """Mask of pairs in one run of equal `ids`, such as a document or chunk."""

    ids: Tensor  # int64 [B or 1, Nk]; a new run begins where neighbors differ
    dtype: ClassVar[torch.dtype] = torch.int64
    table_dims: ClassVar[tuple[int, ...]] = (2,)

    def lengths_of(self, batch: int) -> tuple[int, ...]:
        ids = self.ids[batch if len(self.ids) > 1 else 0].cpu()
        return tuple(ids.unique_consecutive(return_counts=True)[1].tolist())

    def num_batches(self) -> int | None:
        return len(self.ids) if len(self.ids) != 1 else None

    def check(self, frame: Frame) -> None:
        if self.ids.shape[1] != frame.kv_len:
            raise ValueError(
                f"{type(self).__name__} must number the runs of {frame.kv_len} keys, got shape "
                f"{tuple(self.ids.shape)}; slice it to that length"
            )

    def at(self, batch: int, head: int, frame: Frame) -> Mask:
        return Documents(self.lengths_of(batch))

    @property
    def run_ids(self) -> Tensor | None:
        return self.ids


@dataclass(frozen=True, repr=False, eq=False)
class InRuns(SameRun):
    """Applies `pattern` within each run of equal `ids`, where positions count from 0."""

    pattern: Mask

    def __new__(cls, ids: Tensor, pattern: Pattern) -> Any:
        if isinstance(pattern, Mixture):
            return Mixture(tuple(cls(ids, mask) for mask in pattern.branches))
        return super().__new__(cls)

    def num_tables(self, frame: Frame) -> int:
        return self.pattern.num_tables(frame)

    def check(self, frame: Frame) -> None:
        super().check(frame)
        self.pattern.check(frame)

    def at(self, batch: int, head: int, frame: Frame) -> Mask:
        return Packed(self.lengths_of(batch), self.pattern.at(batch, head, frame))

    @property
    def run_ids(self) -> Tensor | None:
        return None


add_constructor("SameRun", SameRun)
add_constructor("InRuns", InRuns)


def common_runs(*ids: Tensor) -> Tensor:
    """Numbers runs [B or 1, Nk]; a new one begins where any of the given ids changes."""
    starts = reduce(torch.logical_or, (x[:, 1:] != x[:, :-1] for x in ids))
    return torch.nn.functional.pad(starts, (1, 0)).cumsum(1)


def several_runs(*ids: Tensor) -> Tensor | None:
    """Returns `common_runs(*ids)`, or None if there is only one run, so no mask is needed."""
    if not ids:
        return None
    runs = common_runs(*ids)
    return runs if torch.compiler.is_compiling() or is_true(runs[:, -1:].any(), False) else None


@dataclass(eq=False, repr=False)
class ModelMask:
    """Describes the attention mask of one forward pass; position 0 is its first key."""

    ndim = 4
    dtype = torch.bool
    requires_grad = False

    shape: tuple[int, int, int, int]  # (batch, 1, queries, keys)
    q_start: int | Tensor  # position of the first query; a tensor with a static cache
    kv_start: int  # number of earlier keys that the cache has dropped
    kind: MaskKind | None  # None if unknown; then only `dense` describes the mask
    documents: Tensor | None  # [B or 1, keys] each token's document index; None if only one
    runs: Tensor | None  # [B or 1, keys] index of the document, or of its chunk; None if only one
    valid_keys: Tensor | None  # [B, dropped + other keys] False for padding; None if no padding
    dense: Callable[..., Tensor]  # (first, stop) -> transformers' own mask of these queries,
    # bool [B, 1, queries, keys]; all queries by default
    visible: Tensor | None = None  # [B, keys] keys that a single query sees, if q_start is a tensor
    position_ids: Tensor | None = None  # of the model's call
    hides_documents: tuple[str, ...] = ()  # arguments of that call that hide its documents
    layer_keys: tuple[int, ...] | None = None  # each layer's number of keys, if the numbers differ
    cache: Cache | None = None  # that the new keys are added to, if a call may check its keys
    seen: int | None = None  # `seen_tokens` of that cache before this call
    packing_checked: bool = False  # so that packed documents cause one warning per forward pass
    state: CallState = PLAIN_CALL

    @property
    def first_query(self) -> int:
        """Position of the first query; if q_start holds no value, the queries are the last keys."""
        q_len, kv_len = self.shape[2:]
        return kv_len - q_len if is_shape_alone(self.q_start) else int(self.q_start)

    @property
    def device(self) -> NoReturn:
        """Raises NotImplementedError: a mask has no tensor of its own."""
        _refuse("device")

    def __repr__(self) -> str:
        batch, _, q_len, kv_len = self.shape
        return f"<ModelMask of {batch} x {q_len} queries, {kv_len} keys: {self.kind}>"

    def dim(self) -> int:
        return 4

    def size(self, dim: int | None = None) -> Any:
        return self.shape if dim is None else self.shape[dim]

    def to(self, *_: object, **__: object) -> "ModelMask":
        return self

    contiguous = to

    @classmethod
    def __torch_function__(cls, function: Any, *_: object, **__: object) -> None:
        _refuse(getattr(function, "__name__", "an operation of torch"))

    def valid(self, kv_len: int) -> Tensor | None:
        """Returns [B, kv_len], False for padding keys; None if no key is padding."""
        if self.valid_keys is None:
            return None
        valid = self.valid_keys[:, self.kv_start : self.kv_start + kv_len]
        return None if not torch.compiler.is_compiling() and is_true(valid.all(), True) else valid

    def pattern(self, q_start: int, kv_len: int, hidden: int = 0) -> Mask:
        """Returns the mask as a pattern over the first `kv_len` keys; needs a known `kind`.

        The pattern has `hidden` more keys behind these, which no query sees. The mask must then be
        causal.
        """
        assert self.kind is not None
        mask = _of_distances(self.kind)
        valid, runs = self.valid(kv_len), self.runs
        if runs is not None and self.shape[2] == 1 and not torch.compiler.is_compiling():
            own_run = runs[:, :kv_len] == runs[:, q_start : q_start + 1]  # True in the query's run
            valid = own_run if valid is None else valid & own_run
        elif runs is not None:
            mask = mask & SameRun(torch.nn.functional.pad(runs[:, :kv_len], (0, hidden), value=-1))
        if valid is not None:
            mask = mask & KeyMask(torch.nn.functional.pad(valid, (0, hidden)))
        return mask

    def __getitem__(self, index: Any) -> "ModelMask | Rows | Tensor":
        """Returns the part that some family's code reads by this index; else raises an error."""
        for taken in PARTS_OF_MASKS:
            if (part := taken(self, index)) is not None:
                return part
        return _refuse("__getitem__")

    def rows(self) -> "Rows | Tensor":
        """Returns the mask of this rank's queries, bool [B, Nq, Nk], built for some at a time."""
        first, queries = 0, self.shape[2]
        if (shared := self.state.shared) is not None:  # the mask is of all ranks' queries
            first, queries = int(shared.tokens[0]), len(shared.tokens)
        if torch.compiler.is_compiling():
            return self.dense(first, first + queries)[:, 0]
        return Rows(lambda part: self.dense(first + part.start, first + part.stop)[:, 0], queries)

    def of_last(self, queries: int) -> "ModelMask":
        """Returns the mask of the last `queries` queries."""
        batch, heads, q_len, kv_len = self.shape
        if (begin := q_len - queries) == 0:
            return self
        shape, q_start = (batch, heads, queries, kv_len), self.q_start + begin

        def dense(first: int = 0, stop: int = queries) -> Tensor:
            return self.dense(begin + first, begin + stop)

        return replace(self, shape=shape, q_start=q_start, dense=dense)

    def __and__(self, other: Any) -> Chosen:
        """Returns an indexer's lists unchanged, since they respect this mask already."""
        return other if isinstance(other, Chosen) else _refuse("__and__")

    def of_layer(self, module: Any, kv_len: int) -> "ModelMask":
        """Returns the mask of a layer whose cache holds another number of keys than the mask has.

        The new tokens are the last of these keys, and see all older keys.

        Raises: NotImplementedError for a mask that depends on the positions of the older keys.
        """
        batch, heads, q_len, own_len = self.shape
        index = getattr(module, "layer_idx", None)
        if self.layer_keys is None or index is None or self.layer_keys[index] != kv_len:
            return self
        plain = MaskKind(causal=True)
        if self.kind != plain or self.runs is not None or self.valid_keys is not None:
            raise NotImplementedError(
                f"layer {index} holds {kv_len - q_len} keys and the mask is for "
                f"{own_len - q_len}, so keys were dropped by layer; the model's mask has windows, "
                "padding or documents, by positions that the kept keys no longer have: drop "
                'equally many in each layer, or load the model with attn_implementation="sdpa"'
            )

        def of_layer() -> ModelMask:
            return replace(
                self,
                shape=(batch, heads, q_len, kv_len),
                q_start=kv_len - q_len,
                dense=partial(self._causal_rows, kv_len),
            )

        return once(self, ("layer", kv_len), of_layer)

    def _causal_rows(self, kv_len: int, first: int = 0, stop: int | None = None) -> Tensor:
        """Returns the causal mask of queries [first, stop), bool [B, 1, n, kv_len]."""
        query = torch.arange(self.shape[2])[first:stop] + kv_len - self.shape[2]
        rows = query[:, None] >= torch.arange(kv_len)
        return rows.expand(self.shape[0], 1, -1, -1)

    def own_causal(self) -> Mask | None:
        """Returns a causal mask as a pattern, without padding and documents.

        It is None for a mask that is not causal, or that has several chunks.
        """
        if self.kind is None or not self.kind.causal:
            return None
        if not self.kind.chunks:
            return _of_distances(self.kind)
        (size, *_), *others = self.kind.chunks
        return None if others else Dilated(size, 1) & Causal()

    def with_documents(self, ids: Tensor) -> "ModelMask":
        """Returns a copy without pairs of two documents; ids [1, keys] are document indices."""
        documents = ids if self.documents is None else common_runs(ids, self.documents)
        runs = documents if self.runs is None else common_runs(documents, self.runs)

        def dense(first: int = 0, stop: int | None = None) -> Tensor:
            return self.dense(first, stop) & (ids[:, None, first:stop, None] == ids[:, None, None])

        return replace(self, documents=documents, runs=runs, dense=dense)


def _of_distances(kind: MaskKind) -> Mask:
    """Returns the part of a mask that depends on distances as a pattern: causality, window."""
    if kind.causal:
        return Causal() if kind.left is None else SlidingWindow(kind.left)
    if kind.left is None and kind.right is None:
        return Full()
    return SlidingWindow(kind.left, kind.right)


def _refuse(name: str, *_: object) -> NoReturn:
    """Raises NotImplementedError, because a model used the mask as if it were a tensor."""
    raise NotImplementedError(
        f"this model uses its attention mask as a tensor ({name}) inside its own attention, but "
        '"sparsering" builds no mask of all pairs; load it with attn_implementation="sdpa"'
    )


for _name in ("add", "radd", "sub", "mul", "rmul", "rand", "or", "ror", "invert"):
    setattr(ModelMask, f"__{_name}__", staticmethod(partial(_refuse, f"__{_name}__")))


def mask_interface(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] = masking_utils.causal_mask_function,
    attention_mask: Tensor | ModelMask | None = None,
    local_size: int | None = None,
    config: Any = None,
    device: torch.device | str = "cpu",
    **keywords: Any,
) -> ModelMask:
    """Builds the mask of a forward pass for transformers, in place of an N x N tensor."""
    if isinstance(attention_mask, ModelMask):  # built in advance, for a static cache
        return attention_mask
    request, packing().request = packing().request or MaskRequest(), None
    own_function, separate = mask_function, None
    if request.may_be_packed and q_length == kv_length:
        separate = _within_documents(request.position_ids, batch_size, q_length, device)
    if separate is not None:
        mask_function = masking_utils.and_masks(mask_function, separate)
    if isinstance(q_offset, Tensor):
        q_offset = q_offset.clone()  # a static cache changes it in place before the layer attends
    valid_keys = _valid_keys(attention_mask, kv_length + kv_offset)
    keys = {"batch_size": batch_size, "kv_length": kv_length, "kv_offset": kv_offset}

    def dense(first: int = 0, stop: int | None = None) -> Tensor:
        return masking_utils.sdpa_mask(
            batch_size=batch_size,
            q_length=(stop or q_length) - first,
            kv_length=kv_length,
            q_offset=q_offset + first,
            kv_offset=kv_offset,
            mask_function=mask_function,
            attention_mask=attention_mask,
            allow_is_causal_skip=False,
            allow_is_bidirectional_skip=False,
            use_vmap=keywords.get("use_vmap", False),
            device=device,
        )

    visible = dense()[:, 0, 0] if isinstance(q_offset, Tensor) and q_length == 1 else None
    if torch.compiler.is_compiling():
        kind = recognise_inside_compile(own_function, local_size, config, keywords)
        if kind is not None and separate is not None:
            kind.is_joined = True
        documents = runs = None
        may_be_packed = attention_mask is None and q_length == kv_length
        if kind is not None and (kind.has_chunks or (may_be_packed and kind.is_joined)):
            runs = runs_by_neighbours(mask_function, **keys, device=device)
            documents = None if kind.has_chunks else runs
    else:
        kind = recognise(mask_function)
        documents, runs = (None, None) if kind is None else _runs(kind, **keys, device=device)
    return ModelMask(
        shape=(batch_size, 1, q_length, kv_length),
        q_start=q_offset - kv_offset,
        kv_start=kv_offset,
        kind=kind,
        documents=documents,
        runs=runs,
        valid_keys=valid_keys,
        dense=dense,
        visible=visible,
        position_ids=request.position_ids,
        hides_documents=request.hides_documents,
        layer_keys=request.layer_keys,
        cache=request.cache,
        seen=seen_tokens(request.cache),
        packing_checked=request.is_cross,  # cross attention has no packed documents to warn of
        state=call_state(),
    )


def document_starts(ids: Tensor | None, batch: int, length: int) -> Tensor | None:
    """Returns where position_ids begin a new document, bool [B or 1, N - 1] for tokens 1, 2, ...

    Ids of text [B or 1, N] restart there. If they have four planes [4, B or 1, N], the first holds
    the positions in the text. Three planes [3, B or 1, N], of time, height and width, may repeat or
    fall within an image or a video. There a document begins at a token whose three positions are
    the same number, if no earlier token of the row has a smaller one. The result is None for ids of
    another shape.
    """
    if ids is None or ids.dim() not in (2, 3) or ids.shape[-1] != length:
        return None
    if ids.shape[-2] not in (1, batch):
        return None
    if ids.dim() == 3 and len(ids) == 3:
        lowest = ids[0].cummin(1).values[:, :-1]
        return (ids[:, :, 1:] == ids[0, :, 1:]).all(0) & (ids[0, :, 1:] <= lowest)
    if ids.dim() == 3 and len(ids) != 4:
        return None
    text = ids if ids.dim() == 2 else ids[0]
    return text[:, 1:] <= text[:, :-1]


def _within_documents(
    ids: Tensor | None, batch: int, length: int, device: Any
) -> Callable[..., Any] | None:
    """Returns a mask function that separates the documents of position_ids.

    None for one document.
    """
    starts = document_starts(ids, batch, length)
    if starts is None or (not torch.compiler.is_compiling() and not is_true(starts.any(), False)):
        return None
    documents = torch.nn.functional.pad(starts, (1, 0)).cumsum(1).to(device)
    return masking_utils.packed_sequence_mask_function(documents.expand(batch, -1))


def watch_requests() -> None:
    """Patches transformers so that `mask_interface` learns a call's position_ids and cache.

    If ranks share the call, transformers then builds masks for the tokens of the whole batch.
    """
    preprocess = masking_utils._preprocess_mask_arguments
    if hasattr(preprocess, NAME):
        return
    names = inspect.signature(preprocess).parameters
    embeds_name = next(name for name in names if name.endswith("embeds"))

    def watch(given: dict[str, Any]) -> None:
        now = packing()
        now.request = None
        ids = now.running[-1][1] if now.running else None
        hidden = [x for name, x in _HIDES_DOCUMENTS.items() if given.get(name) is not None]
        # If the call passes position_ids on, transformers looks for documents itself.
        is_fresh = not hidden and given.get("position_ids") is None
        if (shared := thread.shared) is not None:
            embeds, ids = given[embeds_name], shared.position_ids
            given[embeds_name] = embeds.new_empty(1, 1, 1).expand(len(embeds), shared.length, 1)
            if given.get("position_ids") is not None:
                given["position_ids"] = ids
        is_cross = given.get("encoder_hidden_states") is not None
        if given["config"]._attn_implementation == NAME:
            cache = None if is_cross else given.get("past_key_values")
            now.request = MaskRequest(
                position_ids=ids,
                may_be_packed=is_fresh and not is_cross,
                is_cross=is_cross,
                hides_documents=tuple(dict.fromkeys(hidden)),
                layer_keys=_keys_of_layers(cache, given[embeds_name].shape[1]),
                cache=own_cache(cache),
            )

    masking_utils._preprocess_mask_arguments = replacement(preprocess, watch)


def _keys_of_layers(cache: Any, new: int) -> tuple[int, ...] | None:
    """Returns each layer's number of keys with `new` ones; None if all layers have equally many.

    They differ after another library, such as kvpress, has dropped keys of single layers.
    """
    layers = getattr(cache, "layers", ())
    if torch.compiler.is_compiling() or any(type(layer) is not DynamicLayer for layer in layers):
        return None
    counts = tuple(layer.get_seq_length() + new for layer in layers)
    return counts if len(set(counts)) > 1 else None


def _valid_keys(attention_mask: Tensor | None, length: int) -> Tensor | None:
    """Returns the mask padded to [B, length], False for padding; None if no token is padding."""
    if attention_mask is None:
        return None
    if attention_mask.dim() != 2:
        raise ValueError(
            "attention_mask must be [batch, tokens], or a bool or float mask [batch, 1, queries, "
            f"keys], got shape {tuple(attention_mask.shape)}; index or unsqueeze the mask"
        )
    if (missing := length - attention_mask.shape[1]) > 0:
        attention_mask = torch.nn.functional.pad(attention_mask, (0, missing))
    is_full = not torch.compiler.is_compiling() and is_true(attention_mask.all(), True)
    return None if is_full else attention_mask


def _runs(
    kind: MaskKind, batch_size: int, kv_length: int, kv_offset: int, device: Any
) -> tuple[Tensor | None, Tensor | None]:
    """Returns the fields `documents` and `runs` of `ModelMask`, [B or 1, keys] or None each."""
    chunks = []
    for size, padding, positions in kind.chunks:
        if positions is None:
            positions = torch.arange(kv_offset, kv_offset + kv_length, device=device)[None]
        chunks.append((positions - padding[:batch_size, None]) // size)
    return several_runs(*kind.documents), several_runs(*kind.documents, *chunks)
