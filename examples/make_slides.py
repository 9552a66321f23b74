"""Makes up slides of tiles, in the files that extractors of features write.

    python examples/make_slides.py
    python examples/make_slides.py --ending h5 --count 8 --width 1536

Each slide is tissue on a grid, of its own size and form; a tile's features are noise. Half of the
slides have a lesion, whose tiles lean one way. OUT/labels.json says which. A file has "features"
[n, width] and "coords" [n, 2] in pixels, with the tile's side as "patch_size_level0". The ending h5
needs the package h5py; pt is the default and needs none.
"""

import json
from pathlib import Path

import torch
from torch import Tensor

from sparsering.cli.argument_types import positive
from sparsering.data.slides import Slide, save_slide
from sparsering.ground.files import replace_file
from sparsering.mistakes import OneLineParser, one_line_errors

LEAN, TILE = 3.0, 512


def drawn(lesion: bool, side: int, width: int, generator: torch.Generator) -> tuple[Slide, Tensor]:
    """A slide of at most side x side tiles, and which of its tiles are of the lesion."""
    grid = torch.cartesian_prod(torch.arange(side), torch.arange(side))
    centre = side * (0.4 + 0.2 * torch.rand(2, generator=generator))
    stretch = 0.7 + 0.6 * torch.rand(2, generator=generator)
    grid = grid[(((grid - centre) * stretch) ** 2).sum(1) < (0.45 * side) ** 2]
    spot = grid[torch.randint(len(grid), (), generator=generator)]
    sick = (((grid - spot) ** 2).sum(1) < (0.15 * side) ** 2) & lesion
    features = torch.randn(len(grid), width, generator=generator)
    features[sick, 0] += LEAN
    return Slide(features=features.half(), coords=TILE * grid, tile_size=TILE), sick


def main(arguments: list[str] | None = None) -> int:
    """Writes the slides; returns their number of tiles."""
    parser = OneLineParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("runs/slides"), help="folder to write")
    parser.add_argument("--count", type=positive, default=160, help="slides")
    parser.add_argument("--side", type=positive, default=24, help="tiles along the largest slide")
    parser.add_argument("--width", type=positive, default=32, help="features of a tile")
    parser.add_argument("--ending", choices=("pt", "h5"), default="pt", help="of the files")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    labels_file = options.out / "labels.json"
    if labels_file.exists():
        raise ValueError(f"{options.out} has slides, which is not overwritten; pass another --out")
    options.out.mkdir(parents=True, exist_ok=True)
    generator = torch.Generator().manual_seed(options.seed)
    labels, tiles = {}, 0
    for number in range(options.count):
        half = max(1, options.side // 2)
        side = int(torch.randint(half, options.side + 1, (), generator=generator))
        name, lesion = f"slide-{number:03}.{options.ending}", number % 2 == 1
        slide, _ = drawn(lesion, side, options.width, generator)
        save_slide(options.out / name, slide)
        labels[name] = int(lesion)
        tiles += len(slide.features)
    replace_file(labels_file, json.dumps(labels, indent=1).encode())
    print(f"{options.count} slides with {tiles} tiles -> {options.out}")
    return tiles


if __name__ == "__main__":
    with one_line_errors("make_slides"):
        main()
