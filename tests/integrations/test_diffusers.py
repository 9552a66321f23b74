"""diffusers' models over a `Neighbourhood`: their own processors' results, at the windows' cost."""

import copy

import pytest
import torch
from torch import Tensor

pytest.importorskip("diffusers")

from diffusers import LTX2VideoDiffusionDecoderModel
from diffusers.models.autoencoders import ltx2_diffusion_decoder as ltx

from sparsering.integrations import diffusers

# diffusers' own processor is FlexAttention, which is not compiled here, and holds all scores.
pytestmark = pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
KERNELS = ((3, 3, 3), (3, 3, 3), (1, 3, 3), (3, 5, 5))  # of each stage but the last


def decoder() -> LTX2VideoDiffusionDecoderModel:
    sizes = {"latent_channels": 4, "patch_size": 2, "decoder_head_dim": 8, "decoder_t_emb_dim": 16}
    stages = {
        "decoder_stage_channels": (64, 32, 16, 16, 8),
        "decoder_stage_depths": (2, 1, 1, 1, 1),
        "decoder_stage_kernels": KERNELS,
        "decoder_stage5_kernel": (3, 5, 5),
        "decoder_upsample_strides": ((1, 2, 2), (2, 1, 1), (2, 1, 1), (2, 1, 1)),
    }
    torch.manual_seed(0)
    return LTX2VideoDiffusionDecoderModel(**sizes, **stages)


def decoded(model: LTX2VideoDiffusionDecoderModel, latent: Tensor) -> Tensor:
    return model.decode(latent, generator=torch.Generator().manual_seed(0)).sample


def module_of(kernel: tuple[int, int, int]) -> ltx.LTX2VideoVaeNeighborhoodAttention:
    torch.manual_seed(0)
    return ltx.LTX2VideoVaeNeighborhoodAttention(16, kernel, head_dim=8)


def windows(grid: tuple[int, ...], kernel: tuple[int, ...]) -> Tensor:
    """Pairs, bool [N, N]: windows of `kernel` tokens, shifted inwards at borders."""
    mask = torch.ones(1, 1, dtype=torch.bool)
    for size, width in zip(grid, kernel, strict=True):
        own = torch.zeros(size, size, dtype=torch.bool)
        for place in range(size):
            first = min(max(place - width // 2, 0), size - width)
            own[place, first : first + width] = True
        mask = torch.kron(mask.byte(), own.byte()).bool()
    return mask


def dense(module: ltx.LTX2VideoVaeNeighborhoodAttention, tokens: Tensor) -> Tensor:
    """Softmax over all pairs of the windows, in the module's dtype."""
    q, k, v = (x.flatten(1, 3).transpose(1, 2) for x in module.project_qkv(tokens))
    mask = windows(tuple(tokens.shape[1:4]), module.kernel_size)
    weight = (q @ k.mT).masked_fill(~mask, -torch.inf).softmax(-1)
    return module.to_out[0]((weight @ v).transpose(1, 2).reshape(tokens.shape))


def gradients(out: Tensor, module: torch.nn.Module, tokens: Tensor) -> list[Tensor]:
    sent = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(out.dtype)
    return list(torch.autograd.grad(out, [tokens, *module.parameters()], sent))


def error(found: Tensor, right: Tensor) -> float:
    """Distance relative to the largest right number, or to 1: the bias of keys has gradient 0."""
    found, right = found.detach().double(), right.detach()
    return float((found - right).abs().max() / right.abs().max().clamp(min=1))


CASES = [
    ((5, 7, 6), (3, 5, 3)),
    ((4, 6, 8), (2, 4, 6)),  # even windows look one token further back
    ((4, 5, 6), (4, 1, 6)),  # windows as wide as the grid
]
TILES = [None, (2, 3, 4)]


@pytest.fixture
def tiled(request, monkeypatch):
    """The order of tokens: tiles pay on large grids alone, and are as right on small ones."""
    monkeypatch.setattr(diffusers, "chosen_tile", lambda grid, window: request.param)


@pytest.mark.parametrize("tiled", TILES, indirect=True)
@pytest.mark.parametrize(("grid", "kernel"), CASES)
def test_outputs_and_gradients_are_those_of_dense_softmax(grid, kernel, tiled):
    module = diffusers.use(module_of(kernel))
    tokens = torch.randn(2, *grid, 16, requires_grad=True)
    exact, double = copy.deepcopy(module).double(), tokens.detach().double().requires_grad_()
    out, right = module(tokens), dense(exact, double)
    assert error(out, right) < 2e-6
    for a, b in zip(gradients(out, module, tokens), gradients(right, exact, double), strict=True):
        assert error(a, b) < 1e-5, a.shape


def test_large_windows_on_large_grids_are_computed_in_tiles():
    assert diffusers.chosen_tile((17, 64, 64), (11, 11, 11)) == (5, 5, 5)
    assert diffusers.chosen_tile((17, 32, 32), (3, 5, 5)) is None
    assert diffusers.chosen_tile((5, 16, 16), (3, 7, 7)) is None
    assert diffusers.chosen_tile((11, 11, 11), (11, 11, 11)) is None


def test_a_decoder_decodes_the_same_video_and_is_given_back():
    model, latent = decoder(), torch.randn(1, 4, 2, 3, 3)
    names, processors = list(model.state_dict()), model.attn_processors
    with torch.no_grad():
        before = decoded(model, latent)
        assert diffusers.use(model) is model and diffusers.use(model) is model
        kinds = {type(x) for x in model.attn_processors.values()}
        after = decoded(model, latent)
        assert kinds == {diffusers.NeighbourhoodProcessor}
        assert error(after, before.double()) < 1e-5
    assert list(model.state_dict()) == names
    assert diffusers.use(model, False) is model and diffusers.use(model, False) is model
    assert model.attn_processors == processors


def test_a_decoder_has_gradients():
    model, latent = diffusers.use(decoder()), torch.randn(1, 4, 2, 3, 3, requires_grad=True)
    exact, double = copy.deepcopy(model).double(), latent.detach().double().requires_grad_()
    for module in exact.modules():
        if isinstance(module, ltx.LTX2VideoVaeNeighborhoodAttention):
            module.set_processor(lambda attn, tokens, block_mask=None: dense(attn, tokens))
    noise = torch.randn(1, 3, 9, 12, 12)

    def loss(model: LTX2VideoDiffusionDecoderModel, latent: Tensor) -> Tensor:
        core = model.decoder
        context = core.forward_stage_4(core.forward_stages_1_to_3(latent))
        return core.denoise(context, noise.to(latent), 1).square().mean()

    ours, right = loss(model, latent), loss(exact, double)
    assert error(ours, right) < 1e-5
    found, expected = (torch.autograd.grad(x, y)[0] for x, y in ((ours, latent), (right, double)))
    assert float((found - expected).norm() / expected.norm()) < 1e-4


def test_tiled_decoding_runs_as_before():
    model, latent = decoder(), torch.randn(1, 4, 2, 8, 3)
    model.spatial_compression_ratio = 4
    model.enable_tiling(tile_sample_min_height=20, tile_sample_stride_height=16)
    with torch.no_grad():
        before = decoded(model, latent)
        assert error(decoded(diffusers.use(model), latent), before.double()) < 1e-5


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("tiled", TILES, indirect=True)
def test_half_precision_is_as_good_as_dense(tiled, dtype):
    grid, kernel = CASES[0]
    module = diffusers.use(module_of(kernel).to(dtype))
    tokens = torch.randn(1, *grid, 16).to(dtype)
    with torch.no_grad():
        right = dense(copy.deepcopy(module).double(), tokens.double())
        eager = error(dense(module, tokens), right)
        assert error(module(tokens), right) < 2 * eager + 1e-3


def test_small_grids_are_treated_as_in_diffusers():
    module, tokens = module_of((5, 3, 3)), torch.randn(1, 3, 4, 4, 16)
    with torch.no_grad():
        right = module.processor(module, tokens)  # which cuts windows to the grid
        diffusers.use(module)
        assert error(module.processor(module, tokens), right.double()) < 1e-5
        with pytest.raises(ValueError, match="at least its kernel size"):
            module(tokens)


def test_it_compiles_in_one_graph():
    module, tokens = diffusers.use(module_of((3, 5, 3))), torch.randn(1, 5, 7, 6, 16)
    with torch.no_grad():
        compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
        assert error(compiled(tokens), module(tokens).double()) < 1e-6


def test_another_model_is_refused():
    message = "LTX2VideoVaeNeighborhoodAttention modules, got Linear"
    for on in (True, False):
        with pytest.raises(ValueError, match=message):
            diffusers.use(torch.nn.Linear(2, 2), on)
    with pytest.raises(ValueError, match=r"got str.*pipeline.diffusion_decoder"):
        diffusers.use("decoder")
