"""Measures LTX-2's video decoder of diffusers: its attention of 11 x 11 x 11, and a whole decode.

    python -m benchmarks.video --out benchmarks/records

`video.json`, float32, random weights of the true widths:

- "attention": one module of the last stage (256 channels, 4 heads, windows of 11 x 11 x 11), with
  projections, rotations and all, on the grid of 17 frames of 256 x 256 (17 x 64 x 64 tokens), and
  on smaller ones, of which one with backward.
- "decoder": the whole decoder, for 17 frames of 256 x 256, forward, once in a fresh process.

The ways: "sparsering" is `integrations.diffusers.use`. "sdpa in boxes" computes the same exactly,
as one would write it by hand: a box of queries attends to the box of keys that holds their
windows, with a mask, box after box. "diffusers" is the processor that diffusers has for a CPU,
FlexAttention without its compiler: it holds all scores [heads, N, N], which fits the small grid
alone, and has no backward. Calls run in turns; peaks are of fresh processes, beyond weights and
inputs. Errors are those of some rows against float64 from each query's window, relative to the
largest exact number.
"""

import argparse
import time
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from diffusers import LTX2VideoDiffusionDecoderModel
from diffusers.models.autoencoders.ltx2_diffusion_decoder import LTX2VideoVaeNeighborhoodAttention
from torch import Tensor

from sparsering.integrations import diffusers

from .measure import (
    Row,
    give_back_freed,
    interleaved_times,
    peak_and_figures,
    spread_of,
    write_record,
)
from .neighbourhoods import first_keys

WIDTH, HEADS, WINDOW, ROUNDS = 256, 4, 11, 2
SMALL, MIDDLE, LARGE = (11, 24, 24), (17, 32, 32), (17, 64, 64)
BOX = (17, 8, 8)  # the fastest of those tried; keys of 17 x 18 x 18
LATENT = (3, 8, 8)  # of 17 frames of 256 x 256


class InBoxes:
    """A processor of diffusers that attends by sdpa, a box of queries at a time."""

    def __call__(self, attn: Any, hidden_states: Tensor, block_mask: Any = None) -> Tensor:
        """Returns the attention of tokens [B, T, H, W, C], projected."""
        query, key, value = (x.movedim(4, 1) for x in attn.project_qkv(hidden_states))
        out = torch.empty_like(query)  # [B, heads, T, H, W, D]
        dims = [
            list(_spans(n, box, width))
            for n, box, width in zip(query.shape[2:5], BOX, attn.kernel_size, strict=True)
        ]
        for box in product(*dims):
            rows, keys, masks = zip(*box, strict=True)
            own, seen = (..., *rows, slice(None)), (..., *keys, slice(None))
            t, h, w = masks
            mask = t[:, None, None, :, None, None] & h[:, None, None, :, None] & w[:, None, None]
            mask = mask.flatten(3).flatten(0, 2)
            part = F.scaled_dot_product_attention(
                *(x.flatten(2, 4) for x in (query[own], key[seen], value[seen])), mask, scale=1.0
            )
            out[own] = part.view_as(out[own])
        return attn.to_out[0](out.movedim(1, 4).reshape(hidden_states.shape))


def _spans(size: int, box: int, width: int) -> Iterator[tuple[slice, slice, Tensor]]:
    """Yields a dim's queries, the keys that they see, and which: bool [queries, keys]."""
    for begin in range(0, size, box):
        rows = torch.arange(begin, min(begin + box, size))
        first = first_keys(rows, size, width // 2)
        low, high = int(first[0]), int(first[-1]) + width
        keys = torch.arange(low, high)
        seen = (keys >= first[:, None]) & (keys < first[:, None] + width)
        yield slice(begin, begin + len(rows)), slice(low, high), seen


def in_boxes(model: Any) -> Any:
    """Gives every attention of a model the processor by boxes."""
    for module in model.modules():
        if isinstance(module, LTX2VideoVaeNeighborhoodAttention):
            module.set_processor(InBoxes())
    return model


WAYS: dict[str, Callable[[Any], Any]] = {
    "sparsering": diffusers.use,
    "sdpa in boxes": in_boxes,
    "diffusers": lambda model: model,
}


def attention_of(way: str) -> Any:
    """Makes a module of the last stage."""
    torch.manual_seed(0)
    return WAYS[way](LTX2VideoVaeNeighborhoodAttention(WIDTH, (WINDOW,) * 3, WIDTH // HEADS))


def tokens_of(grid: tuple[int, ...]) -> Tensor:
    """Draws the module's input [1, T, H, W, C], the same at every call."""
    return torch.randn(1, *grid, WIDTH, generator=torch.Generator().manual_seed(0))


def step(module: Any, tokens: Tensor, backward: bool) -> Tensor:
    """Returns the output, and with `backward` runs a backward pass to weights and tokens."""
    if not backward:
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # diffusers' own is not compiled
            return module(tokens)
    out = module(tokens.requires_grad_())
    out.sum().backward()
    return out.detach()


def decoder_of(way: str) -> Any:
    """Makes the whole decoder."""
    torch.manual_seed(0)
    return WAYS[way](LTX2VideoDiffusionDecoderModel()).eval()


@torch.no_grad()
def decode(model: Any) -> Tensor:
    """Decodes one video of 17 frames, [1, 3, 17, 256, 256]."""
    generator = torch.Generator().manual_seed(0)
    latent = torch.randn(1, 128, *LATENT, generator=generator)
    return model.decode(latent, generator=generator).sample


def error_of(out: Tensor, tokens: Tensor, number: int = 64) -> float:
    """Error of some rows of a module's output, with all that comes after the attention."""
    module, grid = attention_of("diffusers").double(), tokens.shape[1:4]
    with torch.no_grad():
        query, key, value = module.project_qkv(tokens.detach().double())
        errors, largest = [], 0.0
        for place in torch.linspace(0, torch.Size(grid).numel() - 1, number).long():
            at = [int(x) for x in torch.unravel_index(place, grid)]
            first = [
                int(first_keys(torch.tensor(x), n, WINDOW // 2))
                for x, n in zip(at, grid, strict=True)
            ]
            seen = (0, *(slice(x, x + WINDOW) for x in first))
            weight = torch.einsum("hd,khd->hk", query[(0, *at)], key[seen].flatten(0, 2)).softmax(1)
            row = torch.einsum("hk,khd->hd", weight, value[seen].flatten(0, 2)).flatten()
            row = module.to_out[0](row)
            errors.append(float((out[(0, *at)] - row).abs().max()))
            largest = max(largest, float(row.abs().max()))
    return max(errors) / largest


def _one_attention(way: str, grid: tuple[int, ...], backward: bool) -> Iterator[Any]:
    module, tokens = attention_of(way), tokens_of(grid)
    step(module, tokens_of((11, 11, 11)), backward)
    give_back_freed()
    yield
    step(module, tokens, backward)
    yield
    yield None


def _one_decode(way: str) -> Iterator[Any]:
    model = decoder_of(way)
    give_back_freed()
    yield
    begin = time.perf_counter()
    video = decode(model)
    took = time.perf_counter() - begin
    yield
    yield took, video[..., ::8, ::8].tolist()


def attention_rows(grid: tuple[int, ...], backward: bool, rounds: int) -> list[Row]:
    """Measures one module's ways on a grid."""
    ways = [way for way in WAYS if way != "diffusers" or (grid == SMALL and not backward)]
    modules, tokens = {way: attention_of(way) for way in ways}, tokens_of(grid)
    results = {way: step(modules[way], tokens, backward) for way in ways}
    calls = {way: partial(step, modules[way], tokens, backward) for way in ways}
    times = interleaved_times(calls, rounds, warm=True)
    found = []
    for way in ways:
        error = error_of(results[way], tokens)
        if not error < 1e-4:
            raise RuntimeError(f"{way} is wrong by {error}")
        peak = peak_and_figures(_one_attention, way, grid, backward)[0]
        row: Row = {"what": "attention", "way": way, "grid": list(grid), "backward": backward}
        found.append(row | {"peak_mb": peak / 1e6, **spread_of(times[way]), "error": error})
    return found


def decoder_rows() -> list[Row]:
    """Measures the whole decoder."""
    ways = ["sparsering", "sdpa in boxes"]
    found = {way: peak_and_figures(_one_decode, way) for way in ways}
    ours, other = (torch.tensor(found[way][1][1]) for way in ways)
    apart = float((ours - other).abs().max() / other.abs().max())
    return [
        {"what": "decoder", "way": way, "video": [17, 256, 256], "apart": apart}
        | {"peak_mb": peak / 1e6, "ms": took * 1e3}
        for way, (peak, (took, _)) in found.items()
    ]


def main() -> None:
    """Writes the record."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.video", description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder of the record")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    arguments = parser.parse_args()
    cases = [(SMALL, False), (MIDDLE, True), (LARGE, False)]
    rows = [row for case in cases for row in attention_rows(*case, arguments.rounds)]
    write_record(arguments.out, "video", rows)
    write_record(arguments.out, "video", rows + decoder_rows())


if __name__ == "__main__":
    main()
