"""DiNAT without NATTEN: equal to what NATTEN's removed functions computed, by their definition."""

import copy

import pytest
import torch
from helpers import forked
from torch import Tensor
from transformers import DinatBackbone, DinatConfig, DinatForImageClassification, DinatModel
from transformers.models.dinat import modeling_dinat

from sparsering.integrations import transformers as hf


def window_start(index: int, length: int, kernel: int, dilation: int) -> int:
    """NATTEN's `get_window_start`, of its version 0.14."""
    radius = kernel // 2
    if dilation <= 1:
        late = length - index - radius - 1 if index + radius >= length else 0
        return max(index - radius, 0) + late
    first = index - radius * dilation
    if first < 0:
        return index % dilation
    if index + radius * dilation >= length:
        residue = index % dilation
        whole = length // dilation * dilation
        rest = length - whole
        if residue < rest:
            return length - rest + residue - 2 * radius * dilation
        return whole + residue - kernel * dilation
    return first


def bias_start(index: int, length: int, kernel: int, dilation: int) -> int:
    """NATTEN's `get_pb_start`, of its version 0.14."""
    radius = kernel // 2
    if dilation <= 1:
        late = length - index - 1 - radius if index + radius >= length else 0
        return radius + (radius - index if index < radius else 0) + late
    if index - radius * dilation < 0:
        return kernel - 1 - index // dilation
    if index + radius * dilation >= length:
        return (length - index - 1) // dilation
    return radius


class Unfused(torch.nn.Module):
    """transformers' `NeighborhoodAttention` as it was with `natten2dqkrpb` and `natten2dav`.

    transformers 5 arranges heads behind the columns, which these functions did not take; before, it
    arranged them behind the batch, as here.
    """

    def forward(self, hidden_states, output_attentions=False):
        batch, height, width, _ = hidden_states.shape
        kernel, dilation = self.kernel_size, self.dilation
        query, key, value = (
            layer(hidden_states)
            .view(batch, height, width, self.num_attention_heads, self.attention_head_size)
            .permute(0, 3, 1, 2, 4)
            for layer in (self.query, self.key, self.value)
        )
        query = query / self.attention_head_size**0.5
        rows = []
        for y in range(height):
            for x in range(width):
                places = [(y, height), (x, width)]
                i, j = (slice_of(*place, kernel, dilation) for place in places)
                keys, values = (a[:, :, i, j].flatten(2, 3) for a in (key, value))
                k, m = (bias_start(*place, kernel, dilation) for place in places)
                bias = self.rpb[:, k : k + kernel, m : m + kernel].flatten(1)
                score = torch.einsum("bhd,bhkd->bhk", query[:, :, y, x], keys) + bias
                rows.append(torch.einsum("bhk,bhkd->bhd", score.softmax(-1), values))
        out = torch.stack(rows, 1)  # [B, height * width, heads, D]
        return (out.reshape(hidden_states.shape),)


def slice_of(index: int, length: int, kernel: int, dilation: int) -> slice:
    first = window_start(index, length, kernel, dilation)
    return slice(first, first + (kernel - 1) * dilation + 1, dilation)


def made(cls: type = DinatModel, **more):
    """A small model of two stages; the second grid is half as wide as the first."""
    sizes = {"embed_dim": 8, "depths": [2, 2], "num_heads": [2, 4], "kernel_size": 3}
    sizes |= {"dilations": [[1, 2], [1, 2]], "drop_path_rate": 0.0, "patch_size": 4}
    torch.manual_seed(0)
    with hf.without_natten():
        model = cls(DinatConfig(**sizes | more))
    for name, parameter in model.named_parameters():
        if name.endswith("rpb"):
            torch.nn.init.normal_(parameter)
        elif parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=parameter[0].numel() ** -0.5)
    return model


def reference(model):
    """A copy in float64 that computes as NATTEN did."""
    exact = copy.deepcopy(model).double()
    for module in exact.modules():
        if isinstance(module, modeling_dinat.NeighborhoodAttention):
            module.__class__ = Unfused
    return exact


def results(model, image: Tensor) -> list[Tensor]:
    """The outputs, and gradients of the image and of all parameters."""
    image = image.clone().requires_grad_()
    outputs = model(image)
    values = outputs.feature_maps if "feature_maps" in outputs else outputs.to_tuple()
    generator = torch.Generator().manual_seed(1)
    total = sum((x * torch.randn(x.shape, generator=generator).to(x)).sum() for x in values)
    learned = [x for x in model.parameters() if x.requires_grad]
    return [*values, *torch.autograd.grad(total, [image, *learned], allow_unused=True)]


CASES = {
    "wide": (DinatModel, (40, 56), {}),
    "narrow in the second stage": (DinatModel, (64, 32), {}),  # 8 x 4 tokens, padded by dilation
    "smaller than a window": (DinatModel, (16, 16), {"kernel_size": 7}),
    "a backbone": (DinatBackbone, (40, 48), {"out_features": ["stage1", "stage2"]}),
    "a classifier": (DinatForImageClassification, (32, 40), {}),
}


@pytest.mark.parametrize("case", CASES.values(), ids=list(CASES))
def test_outputs_and_gradients_are_those_of_natten(case):
    cls, size, more = case
    model = made(cls, **more)
    exact = reference(model)
    names = hf.convert(model)
    assert len(names) == 4 and all(name.endswith("attention.self") for name in names)
    assert hf.convert(model) == []
    image = torch.randn(2, 3, *size)
    found, right = results(model, image), results(exact, image.double())
    for a, b in zip(found, right, strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            assert (a - b).abs().max() < 2e-5 * b.abs().max().clamp(min=1)


def test_narrow_grids_add_the_table_by_a_function(monkeypatch):
    """The test above holds both forms to their values; this one shows when each of them runs."""
    from sparsering.integrations.transformers.families import dinat

    forms = []
    attention = dinat.attention

    def seen(*inputs, **options):
        forms.append("score_mod" if "score_mod" in options else "distance_bias")
        return attention(*inputs, **options)

    monkeypatch.setattr(dinat, "attention", seen)
    model = made()
    hf.convert(model)
    model(torch.randn(1, 3, 64, 32))  # 16 x 8 tokens, then 8 x 4, and 8 x 6 for dilation 2
    assert forms == ["distance_bias", "distance_bias", "score_mod", "distance_bias"]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(dtype):
    model = made()
    exact = reference(model)
    hf.convert(model.to(dtype))
    image = torch.randn(1, 3, 64, 32)
    with torch.no_grad():
        found, right = model(image.to(dtype))[0], exact(image.double())[0]
    assert found.dtype == dtype
    assert (found - right).norm() < 4 * torch.finfo(dtype).eps * right.norm()


def test_dropout_is_that_of_training_alone():
    model = made(attention_probs_dropout_prob=0.5)
    hf.convert(model)
    image = torch.randn(1, 3, 32, 32)
    with torch.no_grad():
        assert not torch.equal(model.train()(image)[0], model(image)[0])
        assert torch.equal(model.eval()(image)[0], model(image)[0])


def test_attention_weights_are_refused():
    model = made()
    hf.convert(model)
    with pytest.raises(NotImplementedError, match="no attention weights"):
        model(torch.randn(1, 3, 32, 32), output_attentions=True)


def test_natten_is_asked_for_again_outside_of_the_block():
    with pytest.raises(ImportError, match="natten"):
        DinatModel(DinatConfig(depths=[1], num_heads=[1]))
    with pytest.raises(ZeroDivisionError), hf.without_natten():
        raise ZeroDivisionError
    with pytest.raises(ImportError, match="natten"):
        DinatModel(DinatConfig(depths=[1], num_heads=[1]))


def test_a_natten_without_the_removed_functions_does_not_matter():
    done = forked.run(
        "import sys, types\n"
        "sys.modules['natten'] = types.ModuleType('natten')\n"
        "sys.modules['natten.functional'] = types.ModuleType('natten.functional')\n"
        "import transformers.utils\n"
        "transformers.utils.is_natten_available = lambda: True\n"
        "from sparsering.integrations import transformers as hf\n"
        "with hf.without_natten():\n"
        "    from transformers import DinatConfig, DinatModel\n"
        "    DinatModel(DinatConfig(embed_dim=4, depths=[1], num_heads=[1]))\n"
        "assert transformers.utils.is_natten_available()\n"
        "print('made')\n"
    )
    assert done.returncode == 0 and "made" in done.stdout, done.stderr
