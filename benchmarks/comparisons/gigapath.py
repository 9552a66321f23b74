"""An encoder as large as Prov-GigaPath: time, memory and error at the lengths of slides."""

import time
from collections.abc import Iterator

import torch
from torch import Tensor

from sparsering.functional import attention
from sparsering.models.encoder import LongNetEncoder
from sparsering.patterns.positions import LongNet

from ..measure import Row, available_bytes, peak_and_figures, sampled_error

WIDTH, HEADS, TILE_WIDTH = 768, 16, 1536
SEGMENTS, RATES = (1024, 5792, 32768, 185363, 1048576), (1, 2, 4, 8, 16)
MOST_TRAINED = 10_000  # tiles; training on more takes many minutes
PATTERN = LongNet(SEGMENTS, RATES, offset="block")


def gigapath(quick: bool) -> list[Row]:
    """12 layers, 16 heads of 48, float32, at 10,000 and 45,680 tiles, each in a fresh process.

    Training recomputes each layer in backward; it is measured at 10,000 tiles if memory suffices.
    """
    layers = 2 if quick else 12
    return [_row(tiles, layers) for tiles in ((300, 1100) if quick else (10_000, 45_680))]


def _row(tiles: int, layers: int) -> Row:
    threads, rows = torch.get_num_threads(), 4
    peak, (ms, error) = peak_and_figures(encoded, tiles, layers, threads, False, rows)
    row: Row = {
        "case": "encoder", "pattern": str(PATTERN), "dtype": "float32", "tiles": tiles,
        "layers": layers, "width": WIDTH, "heads": HEADS, "head_dim": WIDTH // HEADS,
        "forward_ms": ms, "forward_peak_mb": peak / 2**20, "error": error,
        "training_ms": None, "training_peak_mb": None,
    }  # fmt: skip
    if tiles <= MOST_TRAINED and training_bytes(tiles, layers) < available_bytes():
        peak, (ms, _) = peak_and_figures(encoded, tiles, layers, threads, True, rows)
        row |= {"training_ms": ms, "training_peak_mb": peak / 2**20}
    return row


def training_bytes(tiles: int, layers: int) -> int:
    """Estimates the bytes of training: states between layers and inside one, and gradients.

    At 10,000 tiles and 12 layers it returns 3.2 GB; 2.9 GB were measured.
    """
    of_state = 4 * WIDTH * (tiles + 1)
    return (layers + 80) * of_state + 4 * layers * 12 * WIDTH**2


def encoded(
    tiles: int, layers: int, threads: int, trains: bool, rows: int
) -> Iterator[tuple[float, float | None] | None]:
    """Runs a pass for `peak_and_figures`; yields (milliseconds, error of some rows) at the end."""
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    model = LongNetEncoder(
        PATTERN, in_width=TILE_WIDTH, width=WIDTH, num_layers=layers, num_heads=HEADS, axes=2,
        checkpoint_layers=True,
    )  # fmt: skip
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("out.weight", "down.weight")):
                parameter.normal_(std=0.02)
    x = torch.randn(1, tiles, TILE_WIDTH)
    side = int(tiles**0.5) + 1
    grid = torch.stack((torch.arange(tiles) // side, torch.arange(tiles) % side), -1)
    queries = torch.randn(1, HEADS, tiles + 1, WIDTH // HEADS)
    attention(queries, queries, queries, PATTERN)  # builds the layout and compiles the kernel
    del queries
    yield None
    start = time.perf_counter()
    with torch.set_grad_enabled(trains):
        out = model(x, grid)
        if trains:
            out[:, 0].square().mean().backward()
    ms = (time.perf_counter() - start) * 1e3
    yield None
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    if trains and not all(grad.isfinite().all() for grad in grads):
        raise RuntimeError("a gradient is no number")
    yield ms, None if trains else _error(model, x, grid, rows)


@torch.no_grad()
def _error(model: LongNetEncoder, x: Tensor, grid: Tensor, rows: int) -> float:
    """Error of the first block's attention, in some rows."""
    worst = 0.0

    def measured(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        nonlocal worst
        out = model.attend(query, key, value)
        worst = sampled_error(out, query, key, value, PATTERN, rows)
        return out

    model.blocks = model.blocks[:1]
    model(x, grid, attend=measured)
    return worst
