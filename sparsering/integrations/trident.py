"""Prov-GigaPath's slide encoder for TRIDENT, which then needs neither flash-attn nor CUDA.

    from sparsering.integrations import trident
    from sparsering.models import gigapath

    encoder = trident.SlideEncoder(gigapath.load("slide_encoder.pth", global_pool=True))
    processor.run_slide_feature_extraction_job(slide_encoder=encoder, ...)

TRIDENT is not imported. It accepts any module that it can call like its own encoders, and that has
their attributes.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ..ground.arguments import checked_integer, shortened
from ..ground.keywords import class_with_hints
from . import gigapath

__all__ = ["SlideEncoder"]


@class_with_hints
class SlideEncoder(nn.Module):
    """Encodes slides for TRIDENT by a model of `gigapath.load`, in its dtype.

    Args:
        model: the slide encoder. TRIDENT's own GigaPath pools all tiles: load it with
            global_pool=True for the same vectors.
        layer: which of `SlideEmbedding.layers` is a slide's vector; TRIDENT takes the 11th of 12.
            None: the slide's vector after the last norms.

    Raises: ValueError if an argument is invalid.

    Example:
        >>> encoder = SlideEncoder(gigapath.load("slide_encoder.pth", global_pool=True))
        >>> encoder({"features": tiles, "coords": coords, "attributes": {}})  # [1, 768]
    """

    enc_name = "gigapath"
    """TRIDENT looks up by this name which tile encoder belongs to a slide encoder."""

    def __init__(self, model: gigapath.SlideEncoder, *, layer: int | None = 11) -> None:
        super().__init__()
        if not isinstance(model, gigapath.SlideEncoder):
            raise ValueError(
                f"model must be a gigapath.SlideEncoder, got {shortened(repr(model))}; "
                "sparsering.models.gigapath.load reads one"
            )
        most = len(model.layers)
        self.layer = None if layer is None else checked_integer("layer", layer, 0, most)
        self.model = model
        self.embedding_dim = model.cls_token.shape[-1]

    @property
    def precision(self) -> torch.dtype:
        """The weights' dtype; TRIDENT turns autocast on for all but float32."""
        return self.model.cls_token.dtype

    def forward(self, batch: Mapping[str, Any], device: str | torch.device | None = None) -> Tensor:
        """Encodes the slides of a batch of TRIDENT.

        Args:
            batch: "features" [B, n, C], "coords" [B, n, 2] in pixels of level 0, and optionally
                "attributes", whose "patch_size_level0" is the side of a tile there, default 256.
            device: ignored; the model runs where its weights are, to which TRIDENT has moved them.

        Returns: [B, width].

        Raises: ValueError as `gigapath.SlideEncoder.embed`.
        """
        size = dict(batch.get("attributes") or {}).get("patch_size_level0", 256)
        with torch.autocast(self.model.cls_token.device.type, enabled=False):
            found = self.model.embed(batch["features"], batch["coords"], tile_size=float(size))
        return found.slide if self.layer is None else found.layers[self.layer]
