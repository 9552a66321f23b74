"""An encoder for TRIDENT, called as TRIDENT calls its own.

TRIDENT is on no package index, and asks for transformers below 5, so `extracted` says what it does.
"""

import numpy as np
import pytest
import torch
from oracles import gigapath_oracle as oracle

from sparsering.integrations import trident
from sparsering.models import gigapath

HOW = {"segments": [16, 40], "rates": [1, 2], "num_heads": 4}


@torch.inference_mode()
def extracted(encoder: torch.nn.Module, features: torch.Tensor, coords: torch.Tensor, size: int):
    """TRIDENT's contract: what `extract_slide_features` of TRIDENT 0.3.0 does, in its order.

    Read at commit a91fa84. The arrays are those of an .h5 file, whose attributes are NumPy's.
    """
    device = "cpu"
    encoder.to(device)
    encoder.eval()
    features = torch.from_numpy(features.numpy()).float().to(device).unsqueeze(0)
    coords = torch.from_numpy(coords.numpy()).to(device)
    if torch.is_floating_point(coords):
        coords = torch.round(coords)
    coords = coords.to(torch.int64).unsqueeze(0)
    attributes = {"patch_size": np.int64(256), "name": "slide", "savetodir": "."}
    attributes["patch_size_level0"] = int(np.int64(size))
    batch = {"features": features, "coords": coords, "attributes": attributes}
    precision = getattr(encoder, "precision", torch.float32)
    with torch.autocast(device_type=device.split(":")[0], enabled=precision != torch.float32):
        found = encoder(batch, device)
    return found.float().cpu().numpy().squeeze()


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
    given = coords if dtype == torch.float32 else coords + 0.25  # which TRIDENT rounds
    found = torch.from_numpy(extracted(encoder, features, given, 512))
    tolerance = 3e-6 if dtype == torch.float32 else 0.03
    assert (found - expected).norm() < tolerance * expected.norm()


def test_arguments_that_do_not_fit(model):
    with pytest.raises(ValueError, match=r"layer must be .*3"):
        trident.SlideEncoder(model)  # of 3 layers, not 12
    with pytest.raises(ValueError, match=r"model must be a gigapath.SlideEncoder"):
        trident.SlideEncoder(torch.nn.Linear(2, 2))
