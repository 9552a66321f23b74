"""Prov-GigaPath's slide encoder: checkpoints of its names, and a dense oracle of one slide."""

import argparse
from functools import cache

import numpy
import pytest
import torch
from oracles import gigapath_oracle as oracle
from torch import Tensor

from sparsering.integrations.gigapath import encoder
from sparsering.models import gigapath

SEGMENTS, RATES = (16, 36, 80), (1, 2, 4)  # tiny ones; 36 and 80 are not powers of 2
SIZES = {"num_heads": 4, "segment_lengths": SEGMENTS, "dilation_rates": RATES}
HOW = {"num_heads": 4, "segments": list(SEGMENTS), "rates": list(RATES)}
LENGTHS = (7, 61, 30, 100)  # within a segment, ragged, and several of the longest


@cache
def drawn(number: int) -> tuple[Tensor, Tensor]:
    """Tiles float64 [n, 24] and coords int64 [n, 2] of a slide."""
    generator = torch.Generator().manual_seed(100 + number)
    n = LENGTHS[number]
    cells = torch.randperm(400, generator=generator)[:n]
    coords = 256 * torch.stack((cells // 20, cells % 20), 1)
    return torch.randn(n, 24, generator=generator, dtype=torch.float64), coords


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "slide_encoder.pth"
    torch.save(oracle.checkpoint_of(), path)
    return path


def loaded(file, **options):
    return gigapath.load(file, **{**SIZES, "dtype": torch.float64, **options})


def expected(number: int, **options):
    state = {k: x.double() for k, x in oracle.checkpoint_of()["model"].items()}
    return oracle.encoded(state, *drawn(number), **{**HOW, **options})


def assert_near(a: Tensor, b: Tensor, tolerance: float = 1e-11) -> None:
    torch.testing.assert_close(a.double(), b.double(), rtol=tolerance, atol=tolerance)


@pytest.mark.covering(2)
@pytest.mark.parametrize("zero_padding", ["torchscale", "exact"])
@pytest.mark.parametrize("global_pool", [False, True])
@pytest.mark.parametrize("number", range(len(LENGTHS)))
def test_a_slide_is_that_of_the_contract(file, number, global_pool, zero_padding):
    model = loaded(file, global_pool=global_pool, zero_padding=zero_padding)
    zeros = zero_padding == "torchscale"
    slide, layers, weights = expected(number, zeros=zeros, global_pool=global_pool)
    found = model.embed(*drawn(number))
    assert found.slide.shape == (1, 32) and found.layers.shape == (4, 1, 32)
    assert found.heat is None
    assert_near(found.slide[0], slide)
    assert_near(found.layers[:, 0], torch.stack(layers))
    heat = torch.stack(weights).mean(1)  # [layers, N, N], over heads
    for asked, rows in (("class", heat[:, 0]), ("all", heat.sum(1))):
        again = model.embed(*drawn(number), heat=asked)
        assert_near(again.slide, found.slide)
        assert_near(again.heat[0], rows[:, 1:])


def padded(fill: float):
    """All slides as a padded batch [B, N, 24], [B, N, 2], whose padding would show."""
    most = max(LENGTHS)
    tiles, coords = torch.full((4, most, 24), fill).double(), torch.full((4, most, 2), -1)
    for number, n in enumerate(LENGTHS):
        tiles[number, :n], coords[number, :n] = drawn(number)
    return tiles, coords


@pytest.mark.parametrize("heat", ["class", "all"])
@pytest.mark.parametrize("form", ["list", "padded"])
def test_each_slide_of_a_batch_is_the_slide_alone(file, form, heat):
    model = loaded(file)
    tiles, coords = zip(*map(drawn, range(4)), strict=True)
    options = {"heat": heat}
    if form == "padded":
        tiles, coords = padded(torch.nan)
        options["lengths"] = torch.tensor(LENGTHS)
    found = model.embed(tiles, coords, **options)
    assert found.slide.shape == (4, 32) and found.layers.shape == (4, 4, 32)
    for number, n in enumerate(LENGTHS):
        slide, layers, weights = expected(number)
        assert_near(found.slide[number], slide)
        assert_near(found.layers[:, number], torch.stack(layers))
        received = torch.stack(weights).mean(1)
        received = received[:, 0] if heat == "class" else received.sum(1)
        assert found.heat[number].shape == (3, n)
        assert_near(found.heat[number], received[:, 1:])


def test_gradients_are_those_of_the_contract(file):
    model = loaded(file, checkpoint_layers=True).requires_grad_()
    tiles = [drawn(number)[0].clone().requires_grad_() for number in (1, 2)]
    coords = [drawn(number)[1] for number in (1, 2)]
    sent = torch.randn(2, 32, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    model(tiles, coords, heat="class").slide.backward(sent)
    state = oracle.checkpoint_of()["model"]
    state = {k: x.double().requires_grad_() for k, x in state.items()}
    for x, c, s in zip(tiles, coords, sent, strict=True):
        theirs = x.detach().requires_grad_()
        oracle.encoded(state, theirs, c, **HOW)[0].backward(s)
        assert_near(x.grad, theirs.grad, 1e-10)
    for name, parameter in model.named_parameters():
        assert_near(parameter.grad, state[name].grad, 1e-9)
        assert parameter.grad.any() or name == "patch_embed.proj.bias"


@pytest.mark.parametrize("how", ["bfloat16", "float32", "autocast"])
def test_other_dtypes(file, how):
    dtype = torch.bfloat16 if how == "bfloat16" else torch.float32
    model = loaded(file, dtype=dtype)
    tiles, coords = drawn(1)
    tiles = tiles.half()  # as extractors store them
    with torch.autocast("cpu", torch.bfloat16, enabled=how == "autocast"):
        found = model.embed(tiles, coords, heat="class")
    state = {k: x.double() for k, x in oracle.checkpoint_of()["model"].items()}
    slide, _, weights = oracle.encoded(state, tiles.double(), coords, **HOW)
    tolerance = {"bfloat16": 0.03, "float32": 3e-6, "autocast": 0.03}[how]
    assert (found.slide[0].double() - slide).norm() < tolerance * slide.norm()
    assert found.heat[0].dtype == torch.float32
    heat = torch.stack(weights)[:, :, 0, 1:].mean(1)
    assert (found.heat[0].double() - heat).norm() < tolerance * heat.norm()


def test_training_alone_drops_channels_and_paths(file):
    model = loaded(file, dropout=0.3, drop_path=0.5)
    slide = expected(1)[0]
    assert_near(model(*drawn(1)).slide[0], slide)
    model.train()
    torch.manual_seed(0)
    first, second = model(*drawn(1)).slide, model(*drawn(1)).slide
    assert (first - second).abs().max() > 0.01
    model.layers[0].eval()
    assert_near(model.embed(*drawn(1)).slide[0], slide)  # which embeds without dropout
    assert model.training and model.layers[1].training and not model.layers[0].training


@pytest.mark.covering(1)
@pytest.mark.parametrize("global_pool", [False, True])
@pytest.mark.parametrize("heat", ["class", "all"])
def test_out_of_memory_is_answered_by_fewer_rows(file, heat, global_pool, monkeypatch):
    """Linear layers refuse more than 20 rows; the results stay those of the whole."""
    monkeypatch.setattr(encoder, "LEAST_ROWS", 4)
    model = loaded(file, global_pool=global_pool)
    most, tried = 20, []

    def refuse(module, inputs):
        tried.append(len(inputs[0]))
        if tried[-1] > most:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    for module in model.modules():
        if isinstance(module, torch.nn.Linear):
            module.register_forward_pre_hook(refuse)
    tiles, coords = zip(*map(drawn, range(4)), strict=True)
    found = model.embed(tiles, coords, heat=heat)
    assert max(tried) == 61 and min(tried) < 20  # the slide of 100 begins with parts
    for number in range(4):
        slide, layers, weights = expected(number, global_pool=global_pool)
        assert_near(found.slide[number], slide)
        assert_near(found.layers[:, number], torch.stack(layers))
        received = torch.stack(weights).mean(1)
        received = received[:, 0] if heat == "class" else received.sum(1)
        assert_near(found.heat[number], received[:, 1:])
    most = 3
    tried.clear()
    with pytest.raises(torch.OutOfMemoryError):
        model.embed(tiles[0], coords[0])
    assert tried == [7, 4]  # not fewer


def test_other_errors_are_not_tried_again(file):
    model, calls = loaded(file), []

    def fail(module, inputs):
        calls.append(1)
        raise RuntimeError("a hook of yours failed")

    model.norm.register_forward_pre_hook(fail)
    with pytest.raises(RuntimeError, match="of yours"):
        model.embed(*drawn(1))
    assert len(calls) == 1


def test_names_and_shapes_of_the_published_sizes():
    """86 million parameters, of 12 layers of 768 channels; names as torchscale's."""
    with torch.device("meta"):
        model = gigapath.SlideEncoder(**gigapath.ARCHITECTURES["gigapath_slide_enc12l768d"])
        state = {k: list(x.shape) for k, x in model.state_dict().items()}
    tiny = oracle.checkpoint_of(depth=12)["model"]
    assert set(state) == set(tiny)
    scaled = {32: 768, 128: 3072, 24: 1536, 1: 1}
    assert state == {k: [scaled[n] for n in x.shape] for k, x in tiny.items()}
    assert str(model.pattern).startswith("LongNet((1024, 5792, 32768, 185363, 1048576)")


def test_segment_lengths_follow_the_largest_slide():
    assert gigapath.segment_lengths() == (1024, 5792, 32768, 185363, 1048576)
    assert gigapath.segment_lengths(65536) == (1024, 2896, 8192, 23170, 65536)
    assert gigapath.segment_lengths(100_000, 512) == (1024, 2435, 5792, 13777, 32768)
    with pytest.raises(ValueError, match=r"1024 tiles or more, got 961; .* 8192 pixels"):
        gigapath.segment_lengths(8191)


def test_a_position_is_that_of_the_cell(file):
    """Also for float pixels, other tile sizes, and what a grid of other size would wrap."""
    model = loaded(file)
    tiles, coords = drawn(2)
    same = model.embed(tiles, coords).slide
    assert_near(model.embed(tiles, coords.double() + 255.5).slide, same)
    assert_near(model.embed(tiles, 2 * coords + 511, tile_size=512).slide, same)
    assert_near(model.embed(tiles, coords // 256, tile_size=1).slide, same)
    assert (model.embed(tiles, coords.flip(1)).slide - same).abs().max() > 1e-3


def test_folders_and_other_ways_of_saving(file, tmp_path):
    state = torch.load(file)["model"]
    right = loaded(file).embed(*drawn(0)).slide
    assert_near(loaded(tmp_path).embed(*drawn(0)).slide, right)
    snapshot = tmp_path / "hub" / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (snapshot / "slide_encoder.pth").symlink_to(file)
    assert_near(loaded(tmp_path / "hub").embed(*drawn(0)).slide, right)
    bare = tmp_path / "bare.pth"
    position = {"pos_embed": torch.zeros(1, 401, 32)}
    torch.save({**state, **position}, bare)
    assert_near(loaded(bare).embed(*drawn(0)).slide, right)
    trained = tmp_path / "trained.pth"
    inside = {f"slide_encoder.{k}": x for k, x in state.items()}
    inside["classifier.0.weight"] = torch.zeros(2, 32)
    torch.save({"model": inside, "args": argparse.Namespace(lr=1)}, trained)
    with pytest.warns(UserWarning, match=r"1 tensors .* such as classifier.0.weight"):
        assert_near(loaded(trained).embed(*drawn(0)).slide, right)
    model = loaded(file)
    torch.save({"model": model.state_dict()}, bare)
    assert_near(loaded(bare).embed(*drawn(0)).slide, right)


def test_files_that_do_not_fit(file, tmp_path):
    with pytest.raises(FileNotFoundError, match="hf download prov-gigapath/prov-gigapath"):
        loaded(tmp_path / "nowhere")
    state, other = torch.load(file)["model"], tmp_path / "other.pth"
    for change, message in (
        ({"norm.bias": None}, r"must have norm.bias \[32\], got 1 missing"),
        ({"norm.bias": torch.zeros(3)}, r"must have norm.bias \[32\], got \[3\]"),
        ({"cls_token": None}, "one tensor named cls_token, got 0"),
        ({"patch_embed.proj.weight": None}, "must have a matrix patch_embed.proj.weight"),
    ):
        changed = {**state, **change}
        torch.save({"model": {k: x for k, x in changed.items() if x is not None}}, other)
        with pytest.raises(ValueError, match=message):
            loaded(other)
    other.write_bytes(b"no checkpoint")
    with pytest.raises(ValueError, match=r"must be a file of torch.save with tensors alone"):
        loaded(other)
    with pytest.raises(TypeError, match="SlideEncoder has no option global_poll"):
        loaded(file, global_poll=True)


def test_slides_that_do_not_fit(file):
    model = loaded(file)
    tiles, coords = drawn(1)
    for arguments, options, message in (
        ((tiles[:, :5], coords), {}, r"slide 0 must have floating point tiles \[n, 24\]"),
        ((tiles.long(), coords), {}, r"got int64 \[61, 24\].*tiles.float\(\) converts them"),
        ((tiles, coords[:9]), {}, r"coords \[n, 2\], got .* int64 \[9, 2\]"),
        (([tiles], [coords] * 2), {}, "got 1 tensors of tiles and 2 of coords"),
        (([], []), {}, "at least one slide"),
        ((tiles[0], coords), {}, "tiles must be a tensor of one slide"),
        (([tiles, tiles[:0]], [coords, coords[:0]]), {}, "slide 1 has no tiles"),
        ((tiles, coords - 1), {}, "from 0 to 999, got -1 to 18 in slide 0"),
        ((tiles, coords * 100), {}, "coords // tile_size must be from 0 to 999, got 0 to"),
        ((tiles, torch.full((61, 2), torch.nan)), {}, "coords // tile_size must be"),
        ((tiles, coords), {"tile_size": 0}, "tile_size must be above 0"),
        ((tiles, coords), {"heat": True}, 'heat must be None, "class" or "all", got True'),
        ((tiles, coords), {"lengths": [62]}, r"lengths must be 1 integers, .* got \[62\]"),
        ((tiles, coords), {"lengths": [0]}, r"lengths must be 1 integers, .* got \[0\]"),
    ):
        with pytest.raises(ValueError, match=message):
            model.embed(*arguments, **options)
    with pytest.warns(UserWarning, match="lie in one cell of 256 pixels"):
        model.embed(tiles, coords // 256)


def test_rows_that_torchscale_misplaces_are_refused(file):
    model = gigapath.load(file, num_heads=4, segment_lengths=(16, 30), dilation_rates=(1, 4))
    with pytest.raises(ValueError, match="misplaces rows"):
        model.embed(drawn(1)[0], drawn(1)[1])


def test_arguments_that_do_not_fit():
    for options, message in (
        ({"width": 30, "num_heads": 2}, "width must be a multiple of 4"),
        ({"drop_path": 1.0}, "drop_path must be at least 0 and below 1"),
        ({"zero_padding": "none"}, "zero_padding must be"),
        ({"num_heads": 7}, "embed_dim must be a multiple of num_heads"),
    ):
        with pytest.raises(ValueError, match=message):
            gigapath.SlideEncoder(**options)


def grid(spacing, rows=9, columns=8):
    return spacing * torch.cartesian_prod(torch.arange(rows), torch.arange(columns))


@pytest.mark.parametrize(
    ("coords", "tile_size", "message"),
    [
        (
            grid(512),
            1013,
            r"slide 0 has tiles 512 apart, got tile_size=1013, so 72 tiles share 20 ",
        ),
        (grid(512), 256, r"512 apart, got tile_size=256, .* have gaps; pass tile_size=512"),
        (grid(640), 512, r"640 apart, got tile_size=512, .* have gaps"),
        (grid(512) * 0.2525, 512, r"129.28 apart, got tile_size=512, so 72 tiles share 6 cells"),
        (grid(256)[::2], 200, r"256 apart, got tile_size=200"),
        (grid(512).repeat(2, 1), 512, r"144 tiles in 72 cells of tile_size=512 pixels"),
        (grid(1013), 1013.4, r"has tiles 1013 apart, got tile_size=1013.4, so 72 tiles share 56"),
        (grid(512, 3, 2), 1013, r"6 tiles in 2 cells of tile_size=1013"),
    ],
)
def test_tiles_of_another_spacing_are_told(file, coords, tile_size, message):
    model, tiles = loaded(file), torch.randn(len(coords), 24)
    with pytest.warns(UserWarning, match=message) as told:
        model.embed(tiles, coords, tile_size=tile_size)
    assert len(told) == 1


def test_tiles_of_this_spacing_are_not_told(file):
    """Nor few tiles, some of a large grid, and pieces of tissue whose grids begin elsewhere."""
    model = loaded(file)
    some = grid(256, 60, 60)[torch.randperm(3600)[:90]]
    pieces = torch.cat((grid(256), grid(256) + torch.tensor([9 * 256 - 37, 101])))
    for coords in (grid(256), grid(256)[::3], some, pieces, grid(256)[:2], grid(1024, 2, 3)):
        model.embed(torch.randn(len(coords), 24), coords)
    model.embed(torch.randn(400, 24), grid(1013, 20, 20) + 100, tile_size=1013.4)


def test_arrays_are_answered_by_from_numpy():
    model = gigapath.SlideEncoder(in_width=8, width=16, num_layers=1, num_heads=2)
    tiles, coords = numpy.zeros((30, 8), numpy.float32), numpy.zeros((30, 2))
    with pytest.raises(ValueError, match=r"tiles must be .* got a ndarray; torch.from_numpy\(x\)"):
        model.embed(tiles, coords)
    with pytest.raises(ValueError, match=r"coords must be .* got a ndarray; torch.from_numpy\(x\)"):
        model(torch.from_numpy(tiles), coords)
    with pytest.raises(ValueError, match=r"got a list with a ndarray; \[torch.from_numpy"):
        model.embed([tiles], [coords])
    with pytest.raises(ValueError, match="got a list with a ndarray"):
        model.embed([torch.from_numpy(tiles), tiles], [coords, coords])
    with pytest.raises(ValueError, match=r"got None; put the slides' tensors into a list"):
        model.embed(None, coords)


def test_a_call_trains_in_train_mode_and_embed_does_not():
    model = gigapath.SlideEncoder(
        in_width=8, width=16, num_layers=2, num_heads=2, checkpoint_layers=True
    ).train()
    tiles, coords = torch.randn(30, 8), 256.0 * torch.cartesian_prod(*2 * [torch.arange(6)])[:30]
    assert not model.embed(tiles, coords).slide.requires_grad
    model(tiles, coords).slide.square().sum().backward()
    assert all(x.grad is not None and x.grad.isfinite().all() for x in model.parameters())
