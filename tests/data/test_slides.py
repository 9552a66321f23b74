"""Files of a slide's tiles, as .pt and as .h5."""

import os
import pickle
import sys
from fractions import Fraction

import numpy
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


MEAN = "must have features"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ([1, 2], rf"{MEAN} .* got list; write it by save_slide"),
        (torch.zeros(3, 4), rf"{MEAN} .* got Tensor"),
        ({1: 2}, rf"{MEAN} .* got \[1\]"),
        ({"features": [1.0], "coords": torch.zeros(1, 2)}, "got list and Tensor"),
        ({"features": torch.ones(2, 3).long(), "coords": torch.zeros(2, 2)}, "got int64 and float"),
        ({"features": torch.ones(2, 3), "coords": torch.zeros(2, 2).bool()}, "float32 and bool"),
        (
            {"features": Fraction(1, 3)},
            r"torch.save with tensors alone, got an object of fractions",
        ),
    ],
)
def test_pt_files_of_another_kind(content, message, tmp_path):
    torch.save(content, tmp_path / "slide.pt")
    with pytest.raises(ValueError, match=message):
        read_slide(tmp_path / "slide.pt")


@pytest.mark.parametrize("size", [None, "wide", 0, -256, float("nan"), torch.ones(2), [512]])
def test_tile_sizes_that_are_no_positive_number(size, tmp_path):
    tiles = {"features": torch.zeros(3, 4), "coords": torch.zeros(3, 2)}
    torch.save({**tiles, "tile_size": size}, tmp_path / "slide.pt")
    with pytest.raises(ValueError, match=r"must have a positive number as tile_size, .* got "):
        read_slide(tmp_path / "slide.pt")
    torch.save({**tiles, "tile_size": torch.tensor([512])}, tmp_path / "slide.pt")
    assert read_slide(tmp_path / "slide.pt").tile_size == 512


class Code:
    """Makes a folder where it is unpickled."""

    def __init__(self, folder):
        self.folder = folder

    def __reduce__(self):
        return os.mkdir, (str(self.folder),)


@pytest.mark.parametrize("write", ["pickle", "torch", "empty", "text", "half"])
def test_files_whose_code_does_not_run(write, tmp_path):
    path, trap = tmp_path / "slide.pt", tmp_path / "ran"
    if write in ("torch", "half"):
        torch.save({"features": Code(trap)}, path)
    content = {
        "pickle": lambda: pickle.dumps(Code(trap)),
        "torch": path.read_bytes,
        "empty": bytes,
        "text": lambda: b"no tensors",
        "half": lambda: path.read_bytes()[:300],
    }[write]()
    path.write_bytes(content)
    with pytest.raises(
        ValueError, match=r"torch.save with tensors alone, got an? .*save_slide$"
    ) as e:
        read_slide(path)
    assert "weights_only" not in str(e.value) and not trap.exists()
    assert ("an empty file" in str(e.value)) == (write == "empty")
    assert ("mkdir in it" in str(e.value)) == (write == "torch")


def test_h5_files_of_another_kind(tmp_path):
    h5py = pytest.importorskip("h5py")
    path = tmp_path / "slide.h5"
    for content in (b"", b"no tables"):
        path.write_bytes(content)
        with pytest.raises(ValueError, match=r"must be a whole HDF5 file, got: .*save_slide$"):
            read_slide(path)
    tiles, coords = torch.ones(3, 4).numpy(), torch.arange(6).view(3, 2).numpy()
    for features, places, size, message in (
        (None, coords, 512, r"must have features .* got \['coords', 'patch_size_level0'\]"),
        (["a", "b", "c"], coords, 512, "got Dataset and Tensor"),
        (1.0, coords, 512, "got Dataset and Tensor"),
        (tiles, coords[:2], 512, r"got \[3, 4\] and \[2, 2\]"),
        (tiles, coords, "wide", "positive number as patch_size_level0"),
        (tiles, coords, [1, 2], "positive number as patch_size_level0"),
    ):
        with h5py.File(path, "w") as file:
            if features is not None:
                file["features"] = features
            file["coords"] = places
            file["coords"].attrs["patch_size_level0"] = size
        with pytest.raises(ValueError, match=message):
            read_slide(path)
    with h5py.File(path, "w") as file:  # as another machine may write it
        file["features"], file["coords"] = tiles.astype(">f4"), coords.astype("uint32")
        file["coords"].attrs["patch_size_level0"] = [512]
    found = read_slide(path)
    assert torch.equal(found.features, torch.ones(3, 4)) and found.tile_size == 512
    assert found.coords.dtype == torch.int64 and found.coords.tolist() == coords.tolist()


def test_arrays_are_refused_before_anything_is_written(tmp_path):
    slide = Slide(numpy.zeros((3, 4), numpy.float32), numpy.zeros((3, 2)))
    with pytest.raises(ValueError, match=r"features must be a tensor \[n, C\], got a ndarray"):
        save_slide(tmp_path / "slide.pt", slide)
    assert not list(tmp_path.iterdir())
