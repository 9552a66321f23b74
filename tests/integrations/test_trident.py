"""An encoder for TRIDENT, called as TRIDENT calls its own."""

import pytest
import torch
from oracles import gigapath_oracle as oracle

from sparsering.integrations import trident
from sparsering.models import gigapath

HOW = {"segments": [16, 40], "rates": [1, 2], "num_heads": 4}


def extracted(encoder: torch.nn.Module, features: torch.Tensor, coords: torch.Tensor, size: int):
    """TRIDENT's contract: what it does with a slide encoder, in its order."""
    encoder.to("cpu")
    encoder.eval()
    batch = {
        "features": features.float()[None],
        "coords": coords[None],
        "attributes": {"patch_size_level0": size},
    }
    half = getattr(encoder, "precision", torch.float32) != torch.float32
    with torch.autocast("cpu", enabled=half):
        return encoder(batch, "cpu").float().cpu().numpy().squeeze()


@pytest.fixture
def model(tmp_path):
    torch.save(oracle.checkpoint_of(), tmp_path / "slide_encoder.pth")
    lengths = {"segment_lengths": (16, 40), "dilation_rates": (1, 2)}
    return gigapath.load(tmp_path, num_heads=4, global_pool=True, **lengths)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("layer", [2, None])
def test_it_encodes_as_the_contract_says(model, layer, dtype):
    generator = torch.Generator().manual_seed(0)
    features, cells = torch.randn(70, 24, generator=generator), torch.randperm(400)[:70]
    coords = 512 * torch.stack((cells // 20, cells % 20), 1)
    encoder = trident.SlideEncoder(model.to(dtype), layer=layer)
    assert (encoder.enc_name, encoder.precision, encoder.embedding_dim) == ("gigapath", dtype, 32)
    state = {k: x.double() for k, x in oracle.checkpoint_of()["model"].items()}
    more = {"tile_size": 512, "global_pool": True}
    slide, layers, _ = oracle.encoded(state, features.double(), coords, **HOW, **more)
    expected = slide if layer is None else layers[layer]
    found = torch.from_numpy(extracted(encoder, features, coords, 512))
    tolerance = 3e-6 if dtype == torch.float32 else 0.03
    assert (found - expected).norm() < tolerance * expected.norm()


def test_arguments_that_do_not_fit(model):
    with pytest.raises(ValueError, match=r"layer must be .*3"):
        trident.SlideEncoder(model)  # of 3 layers, not 12
    with pytest.raises(ValueError, match=r"model must be a gigapath.SlideEncoder"):
        trident.SlideEncoder(torch.nn.Linear(2, 2))
