"""Every family computes on "sparsering" what it computes on eager, on rows that are real.

Models are float64; transformers' own softmax and norms round to float32, hence the tolerance.
"""

import copy
from collections.abc import Iterator

import pytest
import torch
from helpers.thinned import thinned
from torch import Tensor
from transformers import DynamicCache, StaticCache, WhisperConfig, WhisperForConditionalGeneration
from transformers_models import (
    DECODERS,
    ENCODERS,
    EVERY,
    assert_same,
    like,
    padded,
    pair,
    result,
    tokens,
)

each_decoder = pytest.mark.parametrize("family", DECODERS)
each_text_model = pytest.mark.parametrize("family", [*DECODERS, *ENCODERS])


def inputs_of(family: str, **more: Tensor) -> dict[str, Tensor]:
    if family == "vit":
        return {"pixel_values": torch.randn(2, 3, 12, 12, dtype=torch.float64)}
    if family == "t5":
        return {"input_ids": tokens(), "decoder_input_ids": tokens(length=9, seed=1), **more}
    return {"input_ids": tokens(), **more}


@pytest.fixture(autouse=True)
def nothing_warned(recwarn: pytest.WarningsRecorder) -> Iterator[None]:
    """Fails a test in which the library warns; transformers itself may."""
    yield
    texts = [str(x.message) for x in recwarn]
    assert not [text for text in texts if "sparsering" in text or "cu_seq_lens" in text]


@pytest.mark.parametrize("family", EVERY)
def test_a_batch_without_padding(family):
    eager, ours = pair(family)
    inputs = inputs_of(family)
    with torch.no_grad():
        assert_same(result(ours, **inputs), result(eager, **inputs))


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("family", [*DECODERS, *ENCODERS, "t5"])
def test_padding_on_either_side(family, side):
    eager, ours = pair(family)
    mask = padded(side)
    inputs = inputs_of(family, attention_mask=mask)
    with torch.no_grad():
        got, wanted = result(ours, **inputs), result(eager, **inputs)
        whole = result(eager, **inputs_of(family))
    where = None if family == "t5" else mask
    assert_same(got, wanted, where)
    moved = (got[1] - whole[1]).abs() if where is None else (got - whole)[1][mask[1].bool()].abs()
    if side == "left" or family in (*ENCODERS, "t5"):
        assert moved.max() > 1e-3, "padding changes nothing here: the test could not fail"


@each_text_model
def test_holes(family):
    eager, ours = pair(family)
    mask = torch.ones(2, 13, dtype=torch.int64)
    mask[0, 3:6] = mask[1, 0] = mask[1, 8] = 0
    inputs = {"input_ids": tokens(), "attention_mask": mask}
    with torch.no_grad():
        assert_same(result(ours, **inputs), result(eager, **inputs), mask)


@each_text_model
def test_a_row_of_padding_alone_is_finite(family):
    _, ours = pair(family)
    mask = padded("left", counts=(13, 0))
    with torch.no_grad():
        out = result(ours, input_ids=tokens(), attention_mask=mask)
    assert out.isfinite().all()


@pytest.mark.parametrize("family", EVERY)
def test_a_single_token(family):
    if family == "vit":
        pytest.skip("an image is more than a token")
    eager, ours = pair(family)
    inputs = {name: x[:, :1] for name, x in inputs_of(family).items()}
    with torch.no_grad():
        assert_same(result(ours, **inputs), result(eager, **inputs))


@each_decoder
def test_several_tokens_after_a_cache(family):
    eager, ours = pair(family)
    ids, mask = tokens(), padded("left")
    for cache_of in (lambda m: DynamicCache(config=m.config), lambda m: DynamicCache()):
        outs = []
        for model in (eager, ours):
            cache, parts = cache_of(model), []
            with torch.no_grad():
                for start, stop in ((0, 6), (6, 7), (7, 11), (11, 13)):
                    parts.append(
                        result(
                            model,
                            input_ids=ids[:, start:stop],
                            attention_mask=mask[:, :stop],
                            past_key_values=cache,
                            use_cache=True,
                        )
                    )
            outs.append(torch.cat(parts, 1))
        assert_same(outs[1], outs[0], mask)


def generated(model, ids: Tensor, mask: Tensor, **options) -> Tensor:
    options = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None, **options}
    found = model.generate(input_ids=ids, attention_mask=mask, pad_token_id=0, **options)
    return found[:, ids.shape[1] :]


WAYS = {
    "greedy": {},
    "static": {"cache_implementation": "static"},
    "beams": {"num_beams": 3},
    "no-cache": {"use_cache": False},
}


@pytest.mark.parametrize(("family", "way"), thinned(3, DECODERS, WAYS))
def test_generates_token_for_token(family, way):
    (eager, ours), options = pair(family), WAYS[way]
    ids, mask = tokens(length=9), padded("left", 9, (9, 5))
    got, wanted = generated(ours, ids, mask, **options), generated(eager, ids, mask, **options)
    assert got.tolist() == wanted.tolist()
    assert len(set(wanted.flatten().tolist())) > 2, "the same token over and over shows nothing"


def test_t5_generates_token_for_token():
    eager, ours = pair("t5")
    ids, mask = tokens(length=9), padded("right", 9, (9, 5))
    for options in ({}, {"num_beams": 3}):
        with torch.no_grad():
            found = [
                model.generate(
                    input_ids=ids,
                    attention_mask=mask,
                    max_new_tokens=12,
                    do_sample=False,
                    **options,
                ).tolist()
                for model in (eager, ours)
            ]
        assert found[0] == found[1]


@each_decoder
def test_a_static_cache_step_by_step(family):
    eager, ours = pair(family)
    ids, mask, outs = tokens(), padded("left"), []
    for model in (eager, ours):
        cache, parts = StaticCache(config=model.config, max_cache_len=17), []
        with torch.no_grad():
            for start, stop in ((0, 6), (6, 7), (7, 8), (8, 11), (11, 13)):
                some = {"input_ids": ids[:, start:stop], "attention_mask": mask[:, :stop]}
                parts.append(result(model, **some, past_key_values=cache, use_cache=True))
        outs.append(torch.cat(parts, 1))
    assert_same(outs[1], outs[0], mask)


PACKED = torch.tensor(
    [[0, 1, 2, 3, 0, 1, 2, 3, 4, 5, 0, 1, 2], [0, 1, 2, 3, 4, 5, 6, 0, 1, 0, 1, 2, 3]]
)


@pytest.mark.parametrize(
    "family", ["llama", "mistral", "qwen2", "gemma2", "gemma3", "llama4", "gpt2"]
)
def test_packed_documents(family):
    eager, ours = pair(family)
    inputs = {"input_ids": tokens(), "position_ids": PACKED, "use_cache": False}
    with torch.no_grad():
        got, wanted = result(ours, **inputs), result(eager, **inputs)
        alone = result(eager, input_ids=tokens()[1:, 7:9], use_cache=False)
    assert_same(got, wanted)
    assert_same(got[1:, 7:9], alone)


def gradients(model, **inputs) -> dict[str, Tensor]:
    model.zero_grad()
    out = result(model, **inputs)
    weight = torch.linspace(-1, 1, out.shape[-1], dtype=out.dtype).expand_as(out)
    if "attention_mask" in inputs:  # a query that sees nothing has eager's mean
        weight = weight * inputs["attention_mask"][..., None]
    (out * weight).sum().backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize(("family", "checkpointing"), thinned(2, EVERY, [True, False, None]))
def test_gradients_of_every_parameter(family, checkpointing):
    eager, ours = pair(family)
    inputs = inputs_of(family)
    if family in (*DECODERS, *ENCODERS):
        inputs["attention_mask"] = padded("left")
    if checkpointing is not None:
        how = {"use_reentrant": checkpointing}
        ours.gradient_checkpointing_enable(gradient_checkpointing_kwargs=how)
        eager.gradient_checkpointing_enable(gradient_checkpointing_kwargs=how)
        ours.train()
        eager.train()
    got, wanted = gradients(ours, **inputs), gradients(eager, **inputs)
    assert got.keys() == wanted.keys()
    for name, grad in wanted.items():
        scale = max(1e-3, float(grad.abs().max()))
        torch.testing.assert_close(got[name] / scale, grad / scale, rtol=0, atol=1e-6, msg=name)
    if family == "gpt-oss":
        assert got["model.layers.0.self_attn.sinks"].abs().max() > 1e-4
    if family == "t5":
        name = "encoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight"
        assert got[name].abs().max() > 1e-4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt-oss", "bert", "t5"])
def test_other_dtypes_are_as_near_as_eager_is(family, dtype):
    exact, _ = pair(family)
    eager = copy.deepcopy(exact).to(dtype)
    ours = like(eager)
    mask = None if family == "t5" else padded("left")
    inputs = inputs_of(family) if mask is None else inputs_of(family, attention_mask=mask)
    with torch.no_grad():
        wanted, theirs, got = (result(m, **inputs).double() for m in (exact, eager, ours))
    if mask is not None:
        wanted, theirs, got = (x[mask.bool()] for x in (wanted, theirs, got))
    error, eager_error = (got - wanted).abs().max(), (theirs - wanted).abs().max()
    assert error <= 2 * eager_error + 1e-6, (error, eager_error)


@pytest.mark.parametrize("family", ["llama", "mistral", "bert", "t5"])
def test_autocast(family):
    eager, ours = pair(family)
    eager, ours = eager.float(), ours.float()
    inputs = inputs_of(family)
    with torch.no_grad():
        exact = result(eager, **inputs)
        with torch.autocast("cpu", torch.bfloat16):
            got, theirs = result(ours, **inputs), result(eager, **inputs)
    assert got.dtype == theirs.dtype
    assert (got - exact).abs().max() < 2 * (theirs - exact).abs().max()


def as_added(allowed: Tensor) -> Tensor:
    least = torch.finfo(torch.float64).min
    return torch.zeros(allowed.shape, dtype=torch.float64).masked_fill(~allowed, least)


def test_a_users_mask_of_pairs():
    eager, ours = pair("llama")
    allowed = torch.rand(2, 1, 13, 13) < 0.5
    allowed |= torch.eye(13, dtype=torch.bool)
    added = torch.randn(2, 1, 13, 13, dtype=torch.float64)
    least = as_added(allowed)
    keys = padded("right").bool()[:, None, None]
    for mask in (allowed, added, added.abs(), least, keys, keys.expand(2, 1, 13, 13)):
        as_eager = as_added(mask) if mask.dtype == torch.bool else mask
        with torch.no_grad():
            got = result(ours, input_ids=tokens(), attention_mask=mask)
            wanted = result(eager, input_ids=tokens(), attention_mask=as_eager)
        assert_same(got, wanted)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.uint8])
def test_an_integer_mask_of_pairs_is_refused(dtype):
    _, ours = pair("llama")
    with pytest.raises(ValueError, match=r"must be bool .* or floating point"):
        ours(input_ids=tokens(), attention_mask=torch.ones(2, 1, 13, 13, dtype=dtype))


def test_window_sizes_count_as_transformers_counts_them():
    for window in (1, 2, 12, 13, 14):
        eager, ours = pair("mistral", sliding_window=window)
        with torch.no_grad():
            assert_same(result(ours, input_ids=tokens()), result(eager, input_ids=tokens()))


def test_whisper_has_masks_that_it_does_not_ask_for():
    sizes = {f"{side}_{what}": 2 for side in ("encoder", "decoder") for what in ("layers",)}
    sizes |= {f"{side}_attention_heads": 4 for side in ("encoder", "decoder")}
    sizes |= {"d_model": 32, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "num_mel_bins": 8}
    ends = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
    lengths = {"vocab_size": 61, "max_source_positions": 20, "max_target_positions": 40}
    none = {"suppress_tokens": None, "begin_suppress_tokens": None}
    eager = WhisperForConditionalGeneration(WhisperConfig(**sizes, **ends, **lengths, **none))
    eager = eager.double().eval()
    eager.set_attn_implementation("eager")
    inputs = {"input_features": torch.randn(2, 8, 40, dtype=torch.float64)}
    with torch.no_grad():
        both = [
            result(model, **inputs, decoder_input_ids=tokens(length=9))
            for model in (like(eager), eager)
        ]
    assert_same(*both)


def test_odd_heads_and_unlike_widths():
    for heads, kv_heads in ((3, 1), (6, 3), (5, 5)):
        eager, ours = pair(
            "llama", hidden_size=60, num_attention_heads=heads, num_key_value_heads=kv_heads
        )
        mask = padded("left")
        with torch.no_grad():
            inputs = {"input_ids": tokens(), "attention_mask": mask}
            assert_same(result(ours, **inputs), result(eager, **inputs), mask)
