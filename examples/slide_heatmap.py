"""Draws where an encoder's class token looks, as a heat map over a slide.

    python examples/slide_heatmap.py --out heatmap.png

Slides are made up: tissue on a grid, each tile a vector of noise; half of the slides have a small
lesion, whose tiles lean one way. The encoder is told only which slides have one. `key_mass` then
tells, without holding any attention weights, what each tile receives.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import sparsering as sr
from sparsering.cli.argument_types import positive
from sparsering.ground.commands import install
from sparsering.mistakes import OneLineParser, one_line_errors
from sparsering.models import LongNetEncoder

with one_line_errors("slide_heatmap", install=install("plots")):
    from matplotlib.figure import Figure

SIDE, CHANNELS, LEAN = 24, 16, 3.0
PATTERN = sr.LongNet((64, 256, 1024), (1, 2, 4)) + sr.GlobalTokens(1)  # the class token sees all


def slide(lesion: bool, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """Tiles [N, CHANNELS], their rows and columns [N, 2], and which are of the lesion."""
    grid = torch.cartesian_prod(torch.arange(SIDE), torch.arange(SIDE))
    centre = SIDE * (0.4 + 0.2 * torch.rand(2, generator=generator))
    tissue = ((grid - centre) ** 2).sum(1) < (0.45 * SIDE) ** 2
    grid = grid[tissue]
    spot = grid[torch.randint(len(grid), (), generator=generator)]
    sick = ((grid - spot) ** 2).sum(1) < (0.12 * SIDE) ** 2
    tiles = torch.randn(len(grid), CHANNELS, generator=generator)
    if lesion:
        tiles[sick, 0] += LEAN
    return tiles, grid, sick & lesion


def trained(steps: int, generator: torch.Generator) -> LongNetEncoder:
    """An encoder whose class token tells slides with a lesion."""
    model = LongNetEncoder(
        PATTERN, in_width=CHANNELS, width=32, num_layers=2, num_heads=2, axes=2, rope_base=100.0
    )
    readout = nn.Linear(32, 1)
    parameters = [*model.parameters(), *readout.parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=2e-3)
    cooling = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.02, steps)
    recent = 0.7  # running mean, of a coin toss
    for step in range(1, steps + 1):
        loss = torch.zeros(())
        for lesion in (False, True, False, True):
            tiles, grid, _ = slide(lesion, generator)
            told = readout(model(tiles[None], grid)[:, 0])[0, 0]
            loss = loss + F.binary_cross_entropy_with_logits(told, torch.tensor(float(lesion))) / 4
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        cooling.step()
        recent = 0.95 * recent + 0.05 * loss.item()
        if step % 50 == 0 or step == steps:
            print(f"step {step}: loss {recent:.3f}")
    return model


@torch.no_grad()
def heat(model: LongNetEncoder, tiles: Tensor, grid: Tensor) -> Tensor:
    """[layers, N]: what each tile receives of the class token's attention, mean over heads."""
    found = []

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        out, lse = sr.attention(query, key, value, PATTERN, return_lse=True)
        first = query[:, :, :1], key, PATTERN, lse[:, :, :1]
        found.append(sr.key_mass(*first, q_start=0).mean(1)[0, 1:])
        return out

    model(tiles[None], grid, attend=attend)
    return torch.stack(found)


def draw(maps: Tensor, grid: Tensor, sick: Tensor) -> Figure:
    """The slide, and the map of each layer; white is no tissue."""
    figure = Figure(figsize=(3.2 * (len(maps) + 1), 3.7), layout="constrained")
    axes = figure.subplots(1, len(maps) + 1)
    names = ["lesion (never told)", *(f"layer {i + 1}" for i in range(len(maps)))]
    for panel, name, values in zip(axes, names, [sick.float(), *maps], strict=True):
        image = torch.full((SIDE, SIDE), torch.nan)
        image[grid[:, 0], grid[:, 1]] = values
        panel.imshow(image.numpy(), cmap="magma", vmin=0)
        panel.set(title=name, xticks=[], yticks=[])
    return figure


def main(arguments: list[str] | None = None) -> float:
    """Trains, draws, and returns how much more a lesion's tile receives than another, at most."""
    parser = OneLineParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", default="heatmap.png", help="picture to write")
    parser.add_argument(
        "--steps", type=positive, default=300, help="training steps of four slides each"
    )
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    Figure().savefig(options.out)  # a picture that cannot be written is an error before training
    torch.manual_seed(options.seed)
    generator = torch.Generator().manual_seed(options.seed)
    model = trained(options.steps, generator).eval()
    tiles, grid, sick = slide(True, generator)
    maps = heat(model, tiles, grid)
    draw(maps, grid, sick).savefig(options.out, dpi=120)
    ratio = (maps[:, sick].mean(1) / maps[:, ~sick].mean(1)).max().item()
    print(f"a tile of the lesion receives {ratio:.1f} times what another does -> {options.out}")
    return ratio


if __name__ == "__main__":
    with one_line_errors("slide_heatmap"):
        main()
