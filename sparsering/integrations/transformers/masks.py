"""`ModelMask`: a compact description of a model's mask, in place of an N x N tensor.

transformers asks a mask interface for a mask once per step and kind of layer, and passes the result
through the model to the attention function. Our result names the pattern, the position of the first
query, and the real keys; nothing in it is as large as the number of pairs.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor
from transformers import masking_utils

from ...patterns.algebra import Mask
from ...patterns.keys import KeyMask
from ...patterns.positions import Causal, Dilated, Full, SlidingWindow
from .mask_kind import MaskKind, recognise, recognise_inside_compile, runs_by_neighbours
from .runs import SameRun, common_runs, several_runs

Inputs = tuple[Tensor, Tensor, Tensor]


@dataclass(eq=False, repr=False)
class ModelMask:
    """Describes the mask of one step; key positions count from the step's first key.

    Attributes:
        shape: (batch, 1, queries, keys), the shape of the tensor that it replaces.
        q_start: position of the first query among the keys: an int, or a tensor of a static cache.
        kv_start: number of keys that a cache dropped before the first one.
        kind: the kind of mask; None if it is not recognised: then `dense` builds the mask.
        documents: [B or 1, keys] numbers of packed documents; None if there is only one.
        runs: [B or 1, keys] numbers of documents and chunks together; None if there is only one.
        padding: [B, all keys] True where a token is real; None if all are.
        dense: builds transformers' own mask, bool [B, 1, queries, keys].
        visible: [B, keys] True where a single query sees a key; set if `q_start` is a tensor.
        packing_checked: the search for lost packing runs once per step.
    """

    ndim = 4
    dtype = torch.bool
    requires_grad = False

    shape: tuple[int, int, int, int]
    q_start: int | Tensor
    kv_start: int
    kind: MaskKind | None
    documents: Tensor | None
    runs: Tensor | None
    padding: Tensor | None
    dense: Callable[[], Tensor]
    visible: Tensor | None = None
    packing_checked: bool = False

    def __repr__(self) -> str:
        batch, _, q_len, kv_len = self.shape
        return f"<ModelMask of {batch} x {q_len} queries, {kv_len} keys: {self.kind}>"

    def dim(self) -> int:
        return 4

    def size(self, dim: int | None = None) -> Any:
        return self.shape if dim is None else self.shape[dim]

    def contiguous(self) -> "ModelMask":
        return self

    def to(self, *_: object, **__: object) -> "ModelMask":
        return self

    @classmethod
    def __torch_function__(cls, function: Any, *_: object, **__: object) -> None:
        _refuse(getattr(function, "__name__", "an operation of torch"))

    def valid(self, kv_len: int) -> Tensor | None:
        """Returns [B, kv_len], True where a key is real; None if all are."""
        if self.padding is None:
            return None
        valid = self.padding[:, self.kv_start : self.kv_start + kv_len]
        return None if not torch.compiler.is_compiling() and bool(valid.all()) else valid

    def pattern(self, q_start: int, kv_len: int) -> Mask:
        """Returns the model's own pattern over the first `kv_len` keys; needs a recognised kind."""
        assert self.kind is not None
        mask = _of_distances(self.kind)
        valid, runs = self.valid(kv_len), self.runs
        if runs is not None and self.shape[2] == 1 and not torch.compiler.is_compiling():
            own_run = runs[:, :kv_len] == runs[:, q_start : q_start + 1]  # of the only query
            valid = own_run if valid is None else valid & own_run
        elif runs is not None:
            mask = mask & SameRun(runs[:, :kv_len])
        return mask if valid is None else mask & KeyMask(valid)

    def own_causal(self) -> Mask | None:
        """Returns the causal pattern of real tokens, without documents; None if it has none."""
        if self.kind is None or not self.kind.causal:
            return None
        if not self.kind.chunks:
            return _of_distances(self.kind)
        (size, *_), *others = self.kind.chunks
        return None if others else Dilated(size, 1) & Causal()

    def with_documents(self, ids: Tensor) -> "ModelMask":
        """Returns this mask restricted to documents, given by their numbers [1, keys]."""
        documents = ids if self.documents is None else common_runs(ids, self.documents)
        runs = documents if self.runs is None else common_runs(documents, self.runs)
        place = self.shape, self.q_start, self.kv_start
        return ModelMask(*place, self.kind, documents, runs, self.padding, self.dense, self.visible)


def _of_distances(kind: MaskKind) -> Mask:
    if kind.causal:
        return Causal() if kind.left is None else SlidingWindow(kind.left)
    if kind.left is None and kind.right is None:
        return Full()
    return SlidingWindow(kind.left, kind.right)


def _refuse(name: str, *_: object) -> NoReturn:
    """Raises NotImplementedError for an operation of torch, or of Python, on a mask."""
    raise NotImplementedError(
        f"this model uses its attention mask as a tensor ({name}) inside its own attention, and "
        '"sparsering" has no mask of all pairs; load it with attn_implementation="sdpa"'
    )


for _name in ("add", "radd", "sub", "mul", "rmul", "and", "rand", "or", "ror", "invert", "getitem"):
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
    """Builds the `ModelMask` of a step, with the arguments of transformers' mask interfaces.

    Args:
        attention_mask: [B, N] True where a token is real, N as long as the keys or shorter; or an
            earlier result of this function, which transformers passes back with a static cache.

    Returns: the mask, never None: for None an attention function would have to guess the mask.
    """
    if isinstance(attention_mask, ModelMask):
        return attention_mask
    if isinstance(q_offset, Tensor):
        q_offset = q_offset.clone()  # a static cache advances it before the layer attends
    padding = _padding(attention_mask, kv_length + kv_offset)
    keys = {"batch_size": batch_size, "kv_length": kv_length, "kv_offset": kv_offset}
    dense = partial(
        masking_utils.sdpa_mask,
        **keys,
        q_length=q_length,
        q_offset=q_offset,
        mask_function=mask_function,
        attention_mask=attention_mask,
        device=device,
        use_vmap=keywords.get("use_vmap", False),
        allow_is_causal_skip=False,
        allow_is_bidirectional_skip=False,
    )
    visible = dense()[:, 0, 0] if isinstance(q_offset, Tensor) and q_length == 1 else None
    if torch.compiler.is_compiling():
        kind = recognise_inside_compile(mask_function, local_size, config, keywords)
        documents = runs = None
        may_be_packed = attention_mask is None and q_length == kv_length
        if kind is not None and (kind.has_chunks or (may_be_packed and kind.is_joined)):
            runs = runs_by_neighbours(mask_function, **keys, device=device)
            documents = None if kind.has_chunks else runs
    else:
        kind = recognise(mask_function)
        documents, runs = (None, None) if kind is None else _runs(kind, **keys, device=device)
    shape = (batch_size, 1, q_length, kv_length)
    q_start = q_offset - kv_offset
    return ModelMask(shape, q_start, kv_offset, kind, documents, runs, padding, dense, visible)


def _padding(attention_mask: Tensor | None, length: int) -> Tensor | None:
    """Returns [B, length], True where a token is real; None if all are known to be real."""
    if attention_mask is None:
        return None
    if attention_mask.dim() != 2:
        raise ValueError(
            "attention_mask must be [batch, tokens], or a bool or float mask [batch, 1, queries, "
            f"keys], got shape {tuple(attention_mask.shape)}; index or unsqueeze it"
        )
    if (missing := length - attention_mask.shape[1]) > 0:
        attention_mask = torch.nn.functional.pad(attention_mask, (0, missing))
    if not torch.compiler.is_compiling() and bool(attention_mask.all()):
        return None
    return attention_mask


def _runs(
    kind: MaskKind, batch_size: int, kv_length: int, kv_offset: int, device: Any
) -> tuple[Tensor | None, Tensor | None]:
    """Numbers documents, and documents with chunks: [B or 1, keys]; None for a single run."""
    chunks = []
    for size, padding, positions in kind.chunks:
        if positions is None:
            positions = torch.arange(kv_offset, kv_offset + kv_length, device=device)[None]
        chunks.append((positions - padding[:batch_size, None]) // size)
    return several_runs(*kind.documents), several_runs(*kind.documents, *chunks)
