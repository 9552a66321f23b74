"""Checks on this GPU that `batch_invariant` keeps a row's bits in any company."""

from collections.abc import Iterator

import torch
from torch import Tensor

import sparsering as sr

from ..measure import Row
from .correctness import DTYPES
from .device import GPU, inputs, refuse, sized, synchronize


def company(dtype: str) -> Iterator[Row]:
    """Compares bits of whole rows with those of other batches, heads, chunks, tokens, documents."""
    heads, kv_heads, length, width, before = sized((8, 2, 1200, 128, 333), (4, 2, 90, 16, 21))
    kind = DTYPES[dtype] if GPU else torch.float32
    patterns = {
        "causal": sr.Causal(),
        "window": sr.Causal() & sr.SlidingWindow(sized(500, 40)),
        "longnet": sr.LongNet(sized((256, 1024), (32, 64)), (1, 4)) & sr.Causal(),
    }
    for name, pattern in patterns.items():
        args = inputs(heads, length, width, kind, kv_heads=kv_heads)
        with sr.batch_invariant():
            whole = _rows(args, pattern)
            for case, found, wanted in _in_company(args, pattern, whole, before):
                equal = all(torch.equal(x, y) for x, y in zip(found, wanted, strict=False))
                if not equal and GPU:  # NumPy's products, in a rehearsal, depend on a row's place
                    refuse(f"{name} in {dtype}: {case} has other bits than whole rows")
                yield {"pattern": name, "dtype": dtype, "case": case, "bits_equal": equal}


def _in_company(
    args: list[Tensor], pattern: sr.Pattern, whole: list[Tensor], before: int
) -> Iterator[tuple[str, list[Tensor], list[Tensor]]]:
    """Yields cases: a name, results, and the rows of `whole` that must equal them."""
    heads, length, width = args[0].shape[1:]
    kv_heads = args[1].shape[1]
    group, kind = heads // kv_heads, args[0].dtype
    other = inputs(heads, length, width, kind, kv_heads=kv_heads, seed=1)
    batch = [torch.cat((y, x, y)) for x, y in zip(args, other, strict=True)]
    yield "a batch", [x[1:2] for x in _rows(batch, pattern)], whole
    few = [args[0][:, :group], *(x[:, :1] for x in args[1:])]
    yield "one kv head", _rows(few, pattern), [
        whole[0][:, :group], whole[1][:, :group], *(x[:, :1] for x in whole[2:])
    ]  # fmt: skip
    for begin, end in ((0, 1), (length // 2, length // 2 + 1), (length - 1, length),
                       (length // 3, length // 2 + 7), (3, length)):  # fmt: skip
        part = [args[0][:, :, begin:end], *(x[:, :, :end] for x in args[1:])]
        out = sr.attention(*part, pattern, q_start=begin, backend="triton")
        yield f"queries {begin} to {end}", [out], [whole[0][:, :, begin:end]]
    both = [torch.cat((y[:, :, :before], x), 2) for x, y in zip(args, other, strict=True)]
    packed = _rows(both, sr.Packed((before, length), pattern))
    yield "a document behind another", [x[:, :, before:] for x in packed], whole
    if str(pattern) == str(sr.Causal()):
        cache, rows, begin = sr.KVCache(pattern, 1, kv_heads, width, num_heads=heads), [], 0
        for end in (length // 2, length // 2 + 1, length // 2 + 10, length):
            rows.append(cache.attend(*(x[:, :, begin:end] for x in args), backend="triton"))
            begin = end
        yield "a cache", [torch.cat(rows, 2)], whole


def _rows(args: list[Tensor], pattern: sr.Pattern) -> list[Tensor]:
    """Returns out, lse and gradients; the gradient of a row's out follows from the row alone."""
    own = [x.detach().requires_grad_() for x in args]
    out, lse = sr.attention(*own, pattern, backend="triton", return_lse=True)
    weight = torch.sin(1.3 * torch.arange(out.shape[-1], device=out.device)).to(out.dtype)
    grads = torch.autograd.grad([out, lse], own, [out.detach() * weight, torch.ones_like(lse)])
    synchronize()
    return [out.detach(), lse.detach(), *grads]
