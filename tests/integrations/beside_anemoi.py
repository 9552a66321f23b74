"""The processors and mappers of anemoi-models; test_beside_packages.py installs it and runs this.

pytest tests/integrations/beside_anemoi.py    # where anemoi-models is installed
"""

import copy
import sys
from types import ModuleType
from typing import Any

import pytest
import torch
from anemoi.models.distributed.shapes import BipartiteGraphShardInfo, GraphShardInfo
from anemoi.models.layers import attention as of_anemoi
from anemoi.models.layers.mapper import TransformerForwardMapper
from anemoi.models.layers.processor import TransformerProcessor
from anemoi.utils.config import DotDict
from torch import Tensor, nn

from sparsering.integrations import anemoi

SIZES = {"num_channels": 32, "num_chunks": 1, "num_heads": 4, "mlp_hidden_ratio": 2}
SDPA = {"attention_implementation": "scaled_dot_product_attention"}


def processor(**options: Any) -> TransformerProcessor:
    torch.manual_seed(0)
    options = SDPA | options
    return TransformerProcessor(**SIZES, num_layers=2, layer_kernels=DotDict(), **options)


def mapper(**options: Any) -> TransformerForwardMapper:
    torch.manual_seed(0)
    sizes = {"in_channels_src": 6, "in_channels_dst": 5}
    return TransformerForwardMapper(**sizes, **SIZES, layer_kernels=DotDict(), **(SDPA | options))


def out_and_gradients(model: nn.Module, inputs: Any) -> list[Tensor]:
    """Runs two rows of nodes; returns the outputs and the gradients of inputs and weights."""
    if isinstance(inputs, tuple):
        out = model(inputs, 2, BipartiteGraphShardInfo())
        leaves: tuple[Tensor, ...] = inputs
    else:
        out, leaves = model(inputs, 2, GraphShardInfo()), (inputs,)
    out = out[1] if isinstance(out, tuple) else out
    weights = (x for x in model.parameters() if x.requires_grad)
    loss = out.square().mean()
    grads = torch.autograd.grad(loss, (*leaves, *weights), allow_unused=True)
    return [out, *(x for x in grads if x is not None)]


def nodes(number: int, channels: int, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    drawn = torch.randn(2 * number, channels, generator=generator)
    return drawn.to(dtype).requires_grad_()


def inputs_of(model: nn.Module, dtype: torch.dtype) -> Any:
    if isinstance(model, TransformerProcessor):
        return nodes(50, 32, dtype)
    return nodes(50, 6, dtype), nodes(30, 5, dtype)


@pytest.mark.parametrize("options", [{}, {"qk_norm": True, "attn_channels": 16}], ids=str)
@pytest.mark.parametrize("window", [None, 0, 7, 1000])
@pytest.mark.parametrize("make", [processor, mapper])
def test_results_and_gradients_are_anemois_own(make, window, options):
    own = make(window_size=window, **options).double()
    ours = anemoi.use(copy.deepcopy(own))
    expected = out_and_gradients(own, inputs_of(own, torch.float64))
    found = out_and_gradients(ours, inputs_of(own, torch.float64))
    assert len(found) == len(expected) > 20
    for x, y in zip(found, expected, strict=True):
        torch.testing.assert_close(x, y, rtol=0, atol=1e-9 * float(y.detach().abs().max() + 1))


def test_float32_errs_as_little_as_sdpa():
    own = processor(window_size=7)
    exact = out_and_gradients(copy.deepcopy(own).double(), inputs_of(own, torch.float64))
    theirs = out_and_gradients(own, inputs_of(own, torch.float32))
    ours = out_and_gradients(anemoi.use(own), inputs_of(own, torch.float32))
    for right, x, y in zip(exact, theirs, ours, strict=True):
        largest = float(right.detach().abs().max())
        error, eager = (float((z.double() - right).detach().abs().max()) for z in (y, x))
        assert error < 2 * eager + 1e-6 * largest


def test_autocast_is_as_good_as_sdpa_there():
    own = processor(window_size=7, qk_norm=True)
    exact = out_and_gradients(copy.deepcopy(own).double(), inputs_of(own, torch.float64))[0]
    with torch.autocast("cpu", torch.bfloat16):
        theirs = out_and_gradients(own, inputs_of(own, torch.float32))[0]
        ours = out_and_gradients(anemoi.use(own), inputs_of(own, torch.float32))[0]
    error, eager = (float((x.double() - exact).detach().norm()) for x in (ours, theirs))
    assert error < 2 * eager


def flash_of_dense(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    """flash_attn_func of flash-attn 2 by its documentation, over all pairs: [B, N, H, D]."""
    assert not options["causal"] and not options["dropout_p"]
    left, right = options["window_size"]
    cap, slopes = options["softcap"], options["alibi_slopes"]
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    scores = q @ k.mT * q.shape[-1] ** -0.5
    if cap:
        scores = cap * (scores / cap).tanh()
    behind = torch.arange(q.shape[2])[:, None] + k.shape[2] - q.shape[2] - torch.arange(k.shape[2])
    if slopes is not None:
        scores = scores - slopes[:, :, None, None] * behind.abs()
    hidden = torch.zeros_like(behind, dtype=torch.bool)
    if left >= 0:  # -1: no bound
        hidden |= behind > left
    if right >= 0:
        hidden |= -behind > right
    weights = scores.masked_fill(hidden, -torch.inf).softmax(-1).nan_to_num(0.0)
    return (weights @ v).transpose(1, 2)


@pytest.fixture
def with_flash(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    package: Any = ModuleType("flash_attn")
    package.flash_attn_func, package.__version__ = flash_of_dense, "2.8.0"
    monkeypatch.setitem(sys.modules, "flash_attn", package)
    return {"attention_implementation": "flash_attention"}


@pytest.mark.parametrize("options", [{}, {"softcap": 1.5, "use_alibi_slopes": True}], ids=str)
@pytest.mark.parametrize("window", [None, 7])
@pytest.mark.parametrize("make", [processor, mapper])
def test_a_model_of_flash_attn_needs_it_no_longer(make, window, options, with_flash):
    own = make(window_size=window, **with_flash, **options).double()
    ours = anemoi.use(copy.deepcopy(own))
    expected = out_and_gradients(own, inputs_of(own, torch.float64))
    found = out_and_gradients(ours, inputs_of(own, torch.float64))
    for x, y in zip(found, expected, strict=True):
        torch.testing.assert_close(x, y, rtol=0, atol=1e-9 * float(y.detach().abs().max() + 1))


def test_it_can_be_undone_and_weights_keep_their_names():
    model = processor(window_size=7)
    names, before = list(model.state_dict()), [x.attention.attention for x in model.proc]
    assert anemoi.use(anemoi.use(model)) is model
    assert list(model.state_dict()) == names
    assert all(isinstance(x.attention.attention, anemoi.NodeAttention) for x in model.proc)
    anemoi.use(model, False)
    anemoi.use(model, False)
    assert [x.attention.attention for x in model.proc] == before
    assert not any(x.attention._attention_backend_applied for x in model.proc)


def test_the_backend_of_the_environment_does_not_replace_it(monkeypatch):
    model = anemoi.use(processor(window_size=7))
    monkeypatch.setattr(of_anemoi, "ATTENTION_BACKEND", "flash_attention")  # not installed
    out_and_gradients(model, inputs_of(model, torch.float32))


def test_what_has_no_such_attention_is_refused(monkeypatch):
    with pytest.raises(ValueError, match=r"MultiHeadSelfAttention modules .*got Linear"):
        anemoi.use(nn.Linear(2, 2))
    with pytest.raises(ValueError, match=r"got str.*pass a TransformerProcessor"):
        anemoi.use("processor")
    model = processor(window_size=7)
    model.proc[1].attention.attention.use_rotary_embeddings = True
    before = [x.attention.attention for x in model.proc]
    with pytest.raises(ValueError, match=r"got use_rotary_embeddings=True .*on flash-attn"):
        anemoi.use(model)
    assert [x.attention.attention for x in model.proc] == before
