"""`hf.using`: exactly a pattern in a block, against eager with a mask of all pairs."""

import pytest
import torch
from helpers.thinned import thinned
from transformers import (
    AttentionInterface,
    DynamicCache,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    StaticCache,
)
from transformers.masking_utils import AttentionMaskInterface
from transformers_models import like, made, padded, result, tokens
from using_oracle import (
    LEAST,
    assert_all_close,
    assert_close,
    eager_result,
    log_counts,
    norms_in_full,
    outcome,
)

import sparsering as sr
from sparsering.integrations import transformers as hf

CAUSAL = sr.Causal()
WINDOW = sr.SlidingWindow(2)


def chosen(seed: int = 0) -> sr.Pattern:
    """Three of the seven blocks of 2 keys, for every query of every kv head and batch entry."""
    draw = torch.rand(2, 2, 13, 7, generator=torch.Generator().manual_seed(seed))
    return sr.SelectedBlocks(draw.argsort(-1)[..., :3], 2, 1)


PATTERNS = {
    "window": WINDOW,
    "wider than the model's own": sr.SlidingWindow(9),
    "not causal": sr.SlidingWindow(2, 3),
    "sinks": (sr.SlidingWindow(3) | sr.GlobalTokens(2, rows=False)) & CAUSAL,
    "documents": sr.Documents((4, 6, 3)) & CAUSAL,
    "key padding": (sr.KeyPadding((13, 6)) & CAUSAL) | sr.SlidingWindow(0),
    "key mask": (sr.KeyMask(torch.arange(26).view(2, 13) % 3 > 0) & CAUSAL) | sr.SlidingWindow(0),
    "selected": (chosen() & CAUSAL) | sr.SlidingWindow(0),
    "function": sr.from_mask_mod(
        lambda b, h, q, k: ((q - k) % (h + 2) == 0) | (k == b), batch_size=2
    ),
    "longnet": sr.LongNet((4, 8), (1, 2)) & CAUSAL,
}
FAMILIES = ["llama", "mistral", "qwen2", "gemma3", "gpt-oss", "llama4", "deepseek-v3", "gpt2"]


@pytest.mark.parametrize(("family", "name"), thinned(4, [*FAMILIES, "gemma2"], PATTERNS))
def test_values_and_gradients_are_those_of_eager_with_the_mask(family, name):
    pattern = PATTERNS[name]
    if name == "selected" and family in ("deepseek-v3", "gpt2"):  # 4 kv heads
        pattern = sr.SelectedBlocks(torch.arange(52).view(1, 1, 13, 4) % 7, 2, 1) & CAUSAL
        pattern = pattern | sr.SlidingWindow(0)
    model = made(family)
    with hf.using(model, pattern):
        assert model.config._attn_implementation == "sparsering"
        got = outcome(model, grads=True)
    assert model.config._attn_implementation == "eager"
    wanted = eager_result(family, pattern, grads=True)
    assert_all_close(got, wanted)
    own = outcome(made(family))
    assert (own - wanted[0]).abs().max() > 1e-3, "the pattern changes nothing"
    assert_close(outcome(model), own, "after the block")


@pytest.mark.parametrize("family", ["bert", "modernbert"])
@pytest.mark.parametrize("name", ["window", "not causal", "key mask", "function", "longnet"])
def test_an_encoder_has_it_too(family, name):
    pattern, eager = PATTERNS[name], made(family)
    model = made(family)
    with hf.using(model, pattern):
        got = outcome(model, grads=True)
    assert_all_close(got, outcome(eager, True, attention_mask=log_counts(pattern, eager)))


def plain(pattern):
    """An attention function that calls the reference with a pattern, whatever the mask."""

    def attend(module, query, key, value, attention_mask=None, scaling=None, **options):
        out = sr.attention(query, key, value, pattern, scale=scaling, backend="reference")
        return out.transpose(1, 2), None

    return attend


@pytest.mark.parametrize("family", ["llama", "mistral", "deepseek-v3"])
@pytest.mark.parametrize("causal", [True, False])
def test_longnet_is_the_reference_in_an_attention_function(family, causal):
    """Each query's branches weigh by their own sums, which no mask of all pairs shows by itself."""
    longnet = sr.LongNet((4, 8), (1, 2))
    longnet = longnet & CAUSAL if causal else longnet
    AttentionInterface.register("longnet-oracle", plain(longnet))
    AttentionMaskInterface.register("longnet-oracle", lambda *args, **options: None)
    model = made(family)
    with hf.using(model, longnet):
        got = outcome(model, grads=True)
    assert_all_close(got, outcome(made(family, "longnet-oracle"), grads=True))


THREE_LAYERS = {
    "num_hidden_layers": 3,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
}


class TestLayers:
    """Returns the pattern of each layer."""

    def test_an_index_overrides_a_type(self):
        model, wide = made("qwen2", **THREE_LAYERS), sr.SlidingWindow(7, 1)
        with hf.using(model, {"sliding_attention": wide, 0: WINDOW}):
            got = outcome(model, grads=True)
        # The last layer keeps the model's own mask.
        wanted = eager_result("qwen2", {0: WINDOW, 1: wide}, grads=True, more=THREE_LAYERS)
        assert_all_close(got, wanted)

    def test_layers_that_are_not_named_keep_padding_and_window(self):
        model, real = made("qwen2", **THREE_LAYERS), padded("left").bool()
        with hf.using(model, {1: sr.KeyMask(real)}):
            got = outcome(model, attention_mask=padded("left"))
        options = {"more": THREE_LAYERS, "attention_mask": padded("left")}
        assert_close(got[real], eager_result("qwen2", {1: sr.KeyMask(real)}, **options)[real])

    def test_a_map_of_nothing_changes_nothing(self):
        model = made("mistral")
        with hf.using(model, {}):
            assert_close(outcome(model), outcome(made("mistral")))

    @pytest.mark.parametrize("key", [2, -1, "sliding", "sliding_attention", True, "0", None])
    def test_an_unknown_key_is_an_error_and_changes_nothing(self, key):
        model = made("llama")
        expected = r"using needs layer indices \(0 to 1\) or layer types \(full_attention\)"
        with pytest.raises(ValueError, match=expected):  # noqa: SIM117  # the block is not entered
            with hf.using(model, {0: WINDOW, key: WINDOW}):
                pytest.fail("entered")
        assert model.config._attn_implementation == "eager"
        assert_close(outcome(model), outcome(made("llama")))

    @pytest.mark.parametrize("pattern", ["Causal()", None, {0: "Causal()"}, {0: None}])
    def test_what_is_no_pattern_is_an_error(self, pattern):
        model = made("llama")
        with pytest.raises(TypeError, match="must be a sparsering pattern"):  # noqa: SIM117
            with hf.using(model, pattern):
                pytest.fail("entered")
        assert model.config._attn_implementation == "eager"

    def test_the_inner_part_of_a_model_may_be_named(self):
        model = made("gemma3")
        with hf.using(model.model, WINDOW):
            got = outcome(model)
        assert_close(got, eager_result("gemma3", WINDOW))


class TestInputs:
    """Positions are token indices, whatever the model's other inputs say."""

    @pytest.mark.parametrize("side", ["left", "right"])
    @pytest.mark.parametrize("name", ["sinks", "longnet", "documents"])
    def test_padding_neither_hides_keys_nor_shifts_positions(self, side, name):
        model, inputs = made("llama"), {"attention_mask": padded(side)}
        with hf.using(model, PATTERNS[name]):
            got = outcome(model, **inputs)
        assert_close(got, eager_result("llama", PATTERNS[name], **inputs), "padded rows too")

    @pytest.mark.parametrize("name", ["sinks", "longnet"])
    def test_position_ids_that_restart_reach_only_rotary_positions(self, name, recwarn):
        restarting = torch.cat((torch.arange(6), torch.arange(7)))[None].expand(2, -1)
        model, inputs = made("llama"), {"position_ids": restarting, "use_cache": False}
        with hf.using(model, PATTERNS[name]):
            got = outcome(model, **inputs)
        assert_close(got, eager_result("llama", PATTERNS[name], **inputs))
        assert (got - eager_result("llama", PATTERNS[name])).abs().max() > 1e-3
        assert not [x for x in recwarn if "position_ids restart" in str(x.message)]

    def test_a_mask_of_pairs_has_no_effect_on_named_layers(self):
        own = log_counts(sr.SlidingWindow(6), made("llama"))[:, :1]
        model, inputs = made("llama"), {"attention_mask": own}
        for pattern in (WINDOW, {0: WINDOW}):
            with hf.using(model, pattern):
                got = outcome(model, grads=True, **inputs)
            model.zero_grad()
            assert_all_close(got, eager_result("llama", pattern, grads=True, **inputs))

    def test_cumulative_lengths_have_no_effect_on_named_layers(self):
        """A pattern replaces documents, of any number of rows."""
        ends = torch.tensor([0, 6, 13, 26])
        inputs = {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends, "use_cache": False}
        model = made("llama")
        with hf.using(model, WINDOW):
            assert_close(outcome(model, **inputs), eager_result("llama", WINDOW))
        with (
            hf.using(model, {0: WINDOW}),
            pytest.raises(NotImplementedError, match="for a single row"),
        ):
            outcome(model, **inputs)

    def test_a_pattern_of_another_length_or_batch_is_an_error(self):
        model = made("llama")
        for pattern in (sr.Documents((4, 6)), sr.KeyPadding((13, 6, 2))):
            with pytest.raises(ValueError), hf.using(model, pattern):
                outcome(model)
            assert model.config._attn_implementation == "eager"


class TestCaches:
    """A block needs whole sequences; a new cache may be filled."""

    def test_earlier_tokens_are_an_error(self):
        model = made("llama")
        caches = [DynamicCache(), StaticCache(config=model.config, max_cache_len=20)]
        for cache in caches:
            with torch.no_grad():
                model(input_ids=tokens(), past_key_values=cache)
                for pattern in (WINDOW, {1: WINDOW}):
                    with (
                        hf.using(model, pattern),
                        pytest.raises(ValueError, match=r"whole sequence in each call, got 1 que"),
                    ):
                        model(input_ids=tokens(length=1), past_key_values=cache)

    @pytest.mark.parametrize("window", [1, 2, 5])
    def test_earlier_tokens_that_a_cache_has_dropped_are_an_error(self, window):
        """A window's cache of one token returns as many keys as there are queries."""
        model = made("mistral", sliding_window=window)
        cache = DynamicCache(config=model.config)
        with hf.using(model, WINDOW), torch.no_grad():
            model(input_ids=tokens(), past_key_values=cache)
            with pytest.raises(ValueError, match="use_cache=False"):
                model(input_ids=tokens(length=1), past_key_values=cache)

    def test_a_sparse_cache_is_an_error(self):
        model = like(made("llama"))
        with (
            hf.using(model, WINDOW),
            pytest.raises(ValueError, match="pass use_cache=False"),
            torch.no_grad(),
        ):
            model(input_ids=tokens(), past_key_values=hf.SparseCache(model))

    def test_a_new_cache_is_filled(self):
        model, cache = made("llama"), DynamicCache()
        with hf.using(model, WINDOW):
            assert_close(outcome(model, past_key_values=cache), eager_result("llama", WINDOW))
        assert cache.get_seq_length() == 13

    def test_generation_is_refused_or_calls_whole_sequences(self):
        model = made("llama")
        options = {"max_new_tokens": 3, "do_sample": False, "pad_token_id": 0}
        with hf.using(model, WINDOW), torch.no_grad():
            with pytest.raises(ValueError, match="whole sequence"):
                model.generate(tokens(), **options)
            got, ids = model.generate(tokens(), use_cache=False, **options), tokens()
            for _ in range(3):
                ids = torch.cat((ids, result(model, input_ids=ids)[:, -1:].argmax(-1)), 1)
        assert got.tolist() == ids.tolist()


class TestT5:
    """A bias by distance, in the encoder and in the decoder, and attention across."""

    def wanted(self, encoder, decoder):
        eager = made("t5")
        for stack, pattern, length in ((eager.encoder, encoder, 13), (eager.decoder, decoder, 9)):
            mask = pattern.to_dense(length, num_heads=4).double().log().clamp(min=LEAST)[None]
            for block in stack.block:
                block.layer[0].SelfAttention.register_forward_pre_hook(
                    lambda module, args, kwargs, mask=mask: (args, {**kwargs, "mask": mask}),
                    with_kwargs=True,
                )
        return self.outcome(eager)

    def outcome(self, model):
        """T5's norms round to float32 in their own way."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(
                "transformers.models.t5.modeling_t5.T5LayerNorm.forward",
                lambda self, x: (
                    self.weight
                    * x
                    * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.variance_epsilon)
                ),
            )
            return outcome(
                model, grads=True, use_cache=False, decoder_input_ids=tokens(length=9, seed=1)
            )

    @pytest.mark.parametrize("pattern", [sr.SlidingWindow(2, 1), sr.LongNet((4,), (1,))])
    def test_encoder_and_decoder_have_the_pattern(self, pattern):
        model = made("t5")
        with hf.using(model, pattern):
            got = self.outcome(model)
        assert_all_close(got, self.wanted(pattern, pattern))

    def test_the_encoder_alone(self):
        model, pattern = made("t5"), sr.SlidingWindow(1, 1)
        with hf.using(model.encoder, pattern):
            got = self.outcome(model)
        assert_all_close(got, self.wanted(pattern, CAUSAL))

    def test_a_bias_of_pairs_is_refused(self):
        model = made("t5")
        module = model.encoder.block[0].layer[0].SelfAttention
        bias = torch.randn(1, 4, 13, 13, dtype=torch.float64)
        with (
            hf.using(model, WINDOW),
            pytest.raises(NotImplementedError, match="bias by distance or none"),
        ):
            module(torch.randn(1, 13, 32, dtype=torch.float64), position_bias=bias)


def test_images_have_a_pattern_too():
    pattern, image = sr.SlidingWindow(1, 1) | sr.GlobalTokens(1), torch.randn(2, 3, 12, 12).double()
    dense = pattern.to_dense(10).double().log().clamp(min=LEAST)[None]
    eager, model = made("vit"), made("vit")
    for module in eager.modules():
        if type(module).__name__ == "ViTAttention":
            module.register_forward_pre_hook(lambda module, args: (args[0], dense))
    with torch.no_grad():
        with hf.using(model, pattern):
            got = result(model, pixel_values=image)
        assert_close(got, result(eager, pixel_values=image))


def test_bfloat16_in_autocast_is_the_reference_in_autocast():
    AttentionInterface.register("window-oracle", plain(WINDOW))
    AttentionMaskInterface.register("window-oracle", lambda *args, **options: None)
    model, other = made("llama").float(), made("llama", "window-oracle").float()
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        with hf.using(model, WINDOW):
            got = result(model, input_ids=tokens())
        wanted, exact = result(other, input_ids=tokens()), eager_result("llama", WINDOW)
    error, allowed = (x.double() - exact for x in (got, wanted))
    assert error.abs().max() <= 2 * allowed.abs().max() and got.dtype == wanted.dtype


class TestExplain:
    def test_a_block_shows_its_patterns_and_no_cache(self):
        model = made("qwen2")
        with hf.using(model, {0: sr.SlidingWindow(3, 3)}):
            first, second = hf.explain(model).splitlines()
        assert first.startswith("0: SlidingWindow(3, 3); ") and first.endswith("cache: none")
        assert second.startswith("1: Causal(); ") and second.endswith("cache: grows without end")
        assert hf.explain(model) == "Qwen2ForCausalLM runs 'eager', not 'sparsering'"

    @pytest.mark.parametrize("name", PATTERNS)
    def test_every_pattern_can_be_explained(self, name):
        """A mask of a function has no bound of its cache, and asks for none."""
        model = made("llama")
        with hf.using(model, PATTERNS[name]):
            lines = hf.explain(model).splitlines()
        assert [line.split(": ")[0] for line in lines] == ["0", "1"]
        assert all(str(PATTERNS[name])[:20] in line for line in lines)


def test_norms_in_full_is_what_the_families_compute():
    for family in ("llama", "gemma2", "gemma3", "gpt-oss", "llama4", "deepseek-v3"):
        model = made(family)
        with torch.no_grad():
            rounded = result(model, input_ids=tokens())
            with norms_in_full(model):
                exact = result(model, input_ids=tokens())
        assert 0 < (rounded - exact).abs().max() < 1e-4 * exact.abs().max(), family


def test_a_tree_itself_keeps_each_layers_window():
    """Gemma 3 with windows of 3: logits of each path are those of its sequence alone."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2, "head_dim": 8}
    layers = {"num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"]}
    config = Gemma3TextConfig(
        **sizes, **layers, num_key_value_heads=1, vocab_size=32, sliding_window=3
    )
    model = Gemma3ForCausalLM(config).double().eval()
    sequences = [torch.tensor([1, 2, 3, 4, 5]), torch.tensor([1, 2, 3, 6, 7, 8]), torch.tensor([9])]
    tree = sr.pack_tree(sequences)
    row = {"input_ids": tree.tokens[None], "position_ids": tree.position_ids[None]}
    with torch.no_grad():
        with hf.using(model, tree):
            found = model(**row, use_cache=False).logits[0]
        with hf.using(model, tree.pattern):
            without_windows = model(**row, use_cache=False).logits[0]
        for sequence, path in zip(sequences, tree.paths, strict=True):
            alone = model(sequence[None]).logits[0]
            assert (found[path] - alone).abs().max() < 1e-10
    assert (without_windows - found).abs().max() > 1e-4
    model.config.layer_types = ["linear_attention", "full_attention"]
    refused = pytest.raises(NotImplementedError, match="got 'linear_attention'; pass")
    with refused, hf.using(model, tree):
        pass
