"""`ModelMask`: a compact description of a model's mask, in place of an N x N tensor.

transformers asks a mask interface for a mask once per step and kind of layer, and passes the result
through the model to the attention function. Our result names the pattern, the position of the first
query, and the real keys; nothing in it is as large as the number of pairs.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import masking_utils

from ...patterns.algebra import Mask
from ...patterns.keys import KeyMask
from ...patterns.positions import Causal, Dilated, Full, SlidingWindow
from .reading import Said, read, read_inside_compile, runs_by_neighbours
from .runs import SameRun, joined


class ModelMask:
    """Describes the mask of one step; key positions count from the step's first key.

    Attributes:
        shape: (batch, 1, queries, keys), the shape of the tensor that it replaces.
        q_start: position of the first query among the keys: an int, or a tensor of a static cache.
        kv_start: number of keys that a cache dropped before the first one.
        said: the kind of mask; None if it is not recognised: then `dense` builds the mask.
        documents: [B or 1, keys] numbers of packed documents; None if there is only one.
        runs: [B or 1, keys] numbers of documents and chunks together; None if there is only one.
        padding: [B, all keys] True where a token is real; None if all are.
        last_sees: [B, keys] True where a single query sees a key; set if `q_start` is a tensor.
    """

    ndim = 4
    dtype = torch.bool
    requires_grad = False

    def __init__(
        self,
        shape: tuple[int, int, int, int],
        q_start: int | Tensor,
        kv_start: int,
        said: Said | None,
        documents: Tensor | None,
        runs: Tensor | None,
        padding: Tensor | None,
        dense: Callable[[], Tensor],
        last_sees: Tensor | None = None,
    ) -> None:
        self.shape = shape
        self.q_start = q_start
        self.kv_start = kv_start
        self.said = said
        self.documents = documents
        self.runs = runs
        self.padding = padding
        self.dense = dense
        self.last_sees = last_sees
        self.checked = False  # the search for ignored packing runs once per step
        self.results: dict[Any, Any] = {}  # results that the layers share through `once`

    def __repr__(self) -> str:
        batch, _, q_len, kv_len = self.shape
        return f"<ModelMask of {batch} x {q_len} queries, {kv_len} keys: {self.said}>"

    def dim(self) -> int:
        return 4

    def size(self, dim: int | None = None) -> Any:
        return self.shape if dim is None else self.shape[dim]

    def contiguous(self) -> "ModelMask":
        return self

    def to(self, *_: object, **__: object) -> "ModelMask":
        return self

    @classmethod
    def __torch_function__(cls, function: Any, *_: object, **__: object) -> Any:
        raise _refusal(getattr(function, "__name__", "an operation of torch"))

    def valid(self, kv_len: int) -> Tensor | None:
        """Returns [B, kv_len], True where a key is real; None if all are."""
        if self.padding is None:
            return None
        valid = self.padding[:, self.kv_start : self.kv_start + kv_len]
        return None if not torch.compiler.is_compiling() and bool(valid.all()) else valid

    def pattern(self, q_start: int, kv_len: int) -> Mask:
        """Returns the model's own pattern over the first `kv_len` keys; needs a recognised kind."""
        assert self.said is not None
        mask = _of_distances(self.said)
        valid, runs = self.valid(kv_len), self.runs
        if runs is not None and self.shape[2] == 1 and not torch.compiler.is_compiling():
            same = runs[:, :kv_len] == runs[:, q_start : q_start + 1]  # one query needs no runs
            valid = same if valid is None else valid & same
        elif runs is not None:
            mask = mask & SameRun(runs[:, :kv_len])
        return mask if valid is None else mask & KeyMask(valid)

    def own_causal(self) -> Mask | None:
        """Returns the causal pattern of real tokens, without documents; None if it has none."""
        said = self.said
        if said is None or not said.causal:
            return None
        chunks = [size for size, _, _ in said.chunks]
        if chunks:
            return Dilated(chunks[0], 1) & Causal() if len(chunks) == 1 else None
        return _of_distances(said)

    def with_documents(self, ids: Tensor) -> "ModelMask":
        """Returns this mask restricted to documents, given by their numbers [1, keys]."""
        documents = ids if self.documents is None else joined(ids, self.documents)
        runs = documents if self.runs is None else joined(documents, self.runs)
        rest = self.padding, self.dense, self.last_sees
        place = self.shape, self.q_start, self.kv_start
        return ModelMask(*place, self.said, documents, runs, *rest)

    def once(self, what: Any, make: Callable[[], Any]) -> Any:
        """Returns `make()`, computed once for all layers that share the mask."""
        if torch.compiler.is_compiling():
            return make()
        if what not in self.results:
            self.results[what] = make()
        return self.results[what]


def _of_distances(said: Said) -> Mask:
    if said.causal:
        return Causal() if said.left is None else SlidingWindow(said.left)
    if said.left is None and said.right is None:
        return Full()
    return SlidingWindow(said.left, said.right)


def _refusal(name: str) -> NotImplementedError:
    return NotImplementedError(
        f"this model uses its attention mask as a tensor ({name}) inside its own attention, and "
        '"sparsering" has no mask of all pairs; load it with attn_implementation="sdpa"'
    )


def _refuse(name: str) -> Callable[..., Any]:
    def refused(self: ModelMask, *_: object) -> Any:
        raise _refusal(name)

    return refused


for _name in ("add", "radd", "sub", "mul", "rmul", "and", "rand", "or", "ror", "invert", "getitem"):
    setattr(ModelMask, f"__{_name}__", _refuse(f"__{_name}__"))


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
    dense = partial(
        _dense,
        batch_size=batch_size,
        q_length=q_length,
        kv_length=kv_length,
        q_offset=q_offset,
        kv_offset=kv_offset,
        mask_function=mask_function,
        attention_mask=attention_mask,
        device=device,
        use_vmap=keywords.get("use_vmap", False),
    )
    last_sees = dense()[:, 0, 0] if isinstance(q_offset, Tensor) and q_length == 1 else None
    keys = {"batch_size": batch_size, "kv_length": kv_length, "kv_offset": kv_offset}
    if torch.compiler.is_compiling():
        said = read_inside_compile(mask_function, local_size, config, keywords)
        documents = runs = None
        may_be_packed = attention_mask is None and q_length == kv_length
        if said is not None and (said.chunked or (may_be_packed and said.joined)):
            runs = runs_by_neighbours(mask_function, **keys, device=device)
            documents = None if said.chunked else runs
    else:
        said = read(mask_function)
        documents, runs = (None, None) if said is None else _runs(said, **keys, device=device)
    shape = (batch_size, 1, q_length, kv_length)
    q_start = q_offset - kv_offset
    return ModelMask(shape, q_start, kv_offset, said, documents, runs, padding, dense, last_sees)


def _dense(**arguments: Any) -> Tensor:
    """Returns transformers' own dense mask, bool [B, 1, Nq, Nk]."""
    skip = {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
    dense: Tensor = masking_utils.sdpa_mask(**arguments, **skip)
    return dense


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
    said: Said, batch_size: int, kv_length: int, kv_offset: int, device: Any
) -> tuple[Tensor | None, Tensor | None]:
    """Numbers documents, and documents with chunks: [B or 1, keys]; None for a single run."""
    documents = list(said.documents)
    chunks = []
    for size, padding, positions in said.chunks:
        if positions is None:
            positions = torch.arange(kv_offset, kv_offset + kv_length, device=device)[None]
        chunks.append((positions - padding[:batch_size, None]) // size)
    return _several(documents), _several(documents + chunks)


def _several(ids: list[Tensor]) -> Tensor | None:
    """Numbers the runs in which all ids stay constant; None for a single run."""
    if not ids:
        return None
    runs = joined(*ids)
    return runs if bool(runs[:, -1:].any()) else None
