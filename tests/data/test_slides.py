"""Files of a slide's tiles, as .pt and as .h5."""

import sys

import pytest
import torch

from sparsering.data.slides import Slide, read_slide, save_slide

ENDINGS = ["pt", "h5"]


def drawn(dtype=torch.float16) -> Slide:
    features = torch.randn(9, 4, generator=torch.Generator().manual_seed(0)).to(dtype)
    return Slide(features=features, coords=512 * torch.arange(18).view(9, 2), tile_size=512)


@pytest.mark.parametrize("ending", ENDINGS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.bfloat16])
def test_a_slide_is_read_as_it_was_written(ending, dtype, tmp_path):
    if ending == "h5":
        pytest.importorskip("h5py")
    slide, path = drawn(dtype), tmp_path / f"slide.{ending}"
    save_slide(path, slide)
    found = read_slide(path)
    assert torch.equal(found.features.float(), slide.features.float())
    assert found.features.is_floating_point()
    assert torch.equal(found.coords, slide.coords) and found.coords.dtype == torch.int64
    assert found.tile_size == 512


def test_a_batch_of_one_and_no_tile_size(tmp_path):
    path = tmp_path / "slide.pt"
    torch.save({"features": torch.ones(1, 3, 4), "coords": torch.zeros(3, 2)}, path)
    found = read_slide(path)
    assert found.features.shape == (3, 4) and found.tile_size == 256
    h5py = pytest.importorskip("h5py")
    with h5py.File(tmp_path / "slide.h5", "w") as file:
        file["features"], file["coords"] = torch.ones(1, 3, 4).numpy(), torch.zeros(3, 2).numpy()
    found = read_slide(tmp_path / "slide.h5")
    assert found.features.shape == (3, 4) and found.tile_size == 256


def test_files_that_do_not_fit(tmp_path, monkeypatch):
    with pytest.raises(ValueError, match=r"path must end in .h5 or .pt, got slide.npz"):
        save_slide(tmp_path / "slide.npz", drawn())
    with pytest.raises(FileNotFoundError, match="expected a file of a slide's tiles"):
        read_slide(tmp_path / "slide.pt")
    torch.save({"tiles": torch.ones(2, 3)}, tmp_path / "slide.pt")
    with pytest.raises(ValueError, match=r"must have features .* got \['tiles'\]"):
        read_slide(tmp_path / "slide.pt")
    torch.save({"features": torch.ones(2, 3), "coords": torch.ones(3, 2)}, tmp_path / "slide.pt")
    with pytest.raises(ValueError, match=r"got \[2, 3\] and \[3, 2\]"):
        read_slide(tmp_path / "slide.pt")
    monkeypatch.setitem(sys.modules, "h5py", None)
    with pytest.raises(ImportError, match=r"need h5py; .*install 'sparsering\[slides\]'"):
        save_slide(tmp_path / "slide.h5", drawn())
