"""Prov-GigaPath's slide encoder: its weights, slides of unlike sizes in a call, heat maps of tiles.

    model = gigapath.load("slide_encoder.pth")
    found = model.embed([tiles, others], [coords, other_coords], heat="class")
    found.slide                                    # [2, 768]
    found.heat[0]                                  # [12, n]: what each tile receives in each layer

Slides are computed one after another, so none needs padding, and each has the result that it has
alone. No attention weights are stored, and no CUDA, flash-attn or half precision is needed.

`encoder` has the model, and `layers` its blocks. `slides` checks the tiles and coords of a call,
`grid` gives each tile its cell, and `weights` reads checkpoints.
"""

from .encoder import LEAST_ROWS, SlideEmbedding, SlideEncoder
from .weights import ARCHITECTURES, FILE, load, segment_lengths

__all__ = [
    "ARCHITECTURES",
    "FILE",
    "LEAST_ROWS",
    "SlideEmbedding",
    "SlideEncoder",
    "load",
    "segment_lengths",
]
