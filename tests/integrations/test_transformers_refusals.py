"""Never silently different: what is not supported raises by name, what got lost warns."""

import copy
import importlib
import sys
import types
import warnings
from types import ModuleType

import pytest
import torch
from oracles.attention_oracle import dense_attention
from transformers import BloomConfig, BloomForCausalLM, GPTNeoConfig, GPTNeoForCausalLM
from transformers_families import tiny
from transformers_models import assert_same, like, made, padded, pair, result, tokens

import sparsering as sr
from sparsering.integrations import transformers as hf
from sparsering.integrations.transformers.call import dense, masks, sources
from sparsering.integrations.transformers.call.attention import attention_function
from sparsering.integrations.transformers.call.chosen import Chosen


class Module(torch.nn.Module):
    is_causal = False


def call(layer=None, **keywords):
    query = torch.randn(1, 4, 6, 8)
    key = torch.randn(1, 2, 6, 8)
    return attention_function(layer or Module(), query, key, key, None, **keywords)


@pytest.mark.parametrize(
    "name",
    ["topk_indices", "cache", "head_mask", "alibi", "attention_bias"],
)
def test_a_keyword_that_changes_the_result_is_refused_by_name(name):
    with pytest.raises(NotImplementedError, match=f"does not support {name} "):
        call(**{name: torch.ones(1)})


def test_chosen_keys_without_the_mask_of_the_model_are_refused():
    layer = Module()
    layer.indexer = None  # the lists are those of another layer's
    with pytest.raises(
        NotImplementedError, match="indexer chooses keys needs the model's own mask"
    ):
        call(layer, indices=torch.zeros(1, 6, 2, dtype=torch.int32))


def test_chosen_keys_in_a_compiled_static_cache_are_refused(monkeypatch):
    """Its length is on the device alone, so the mask there is only of keys that a query sees."""
    mask = masks.mask_interface(1, 1, 6, torch.tensor(3))
    inputs = torch.randn(1, 2, 1, 8), *torch.randn(2, 1, 2, 6, 8).unbind()
    chosen = Chosen(torch.zeros(1, 1, 1, 2, dtype=torch.int64))
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    with pytest.raises(NotImplementedError, match="cannot be compiled with a static cache"):
        sources.attend_masked(Module(), inputs, mask, None, {}, chosen)


def test_keywords_that_change_nothing_are_left_out():
    plain, none = call(), call(use_cache=True, deterministic=None, sliding_window=3, head_mask=None)
    assert plain[1] is None and none[0].shape == plain[0].shape == (1, 6, 4, 8)
    assert plain[0].is_contiguous()


@pytest.mark.parametrize("causal", [False, True])
def test_a_bias_of_pairs_learns_pair_by_pair(causal):
    module = Module()
    module.is_causal = causal
    query, key = torch.randn(1, 4, 6, 8).double(), torch.randn(1, 2, 6, 8).double()
    for start in (torch.zeros(1, 4, 6, 6), torch.randn(1, 4, 6, 6)):  # zeros go by any distance
        bias = start.double().requires_grad_()
        mask = masks.mask_interface(batch_size=1, q_length=6, kv_length=6) if causal else None
        out, _ = attention_function(module, query, key, key, mask, position_bias=bias)
        seen = torch.ones(6, 6).bool().tril() if causal else torch.ones(6, 6).bool()
        wanted, _ = dense_attention(query, key, key, seen, bias=bias)
        assert_same(out, wanted.transpose(1, 2))
        weight = torch.randn_like(out)
        grads = [
            torch.autograd.grad((x * weight).sum(), bias) for x in (out, wanted.transpose(1, 2))
        ]
        assert_same(grads[0][0], grads[1][0])


def test_a_bias_that_does_not_go_by_distance_is_computed_over_all_pairs():
    module = Module()
    module.has_relative_attention_bias = True  # as T5's have; numbers decide
    query, key = torch.randn(1, 4, 6, 8), torch.randn(1, 2, 6, 8)
    for learns in (False, True):
        bias = torch.randn(1, 4, 6, 6, requires_grad=learns)
        out, _ = attention_function(module, query, key, key, None, position_bias=bias)
        wanted, _ = dense_attention(query, key, key, torch.ones(6, 6).bool(), bias=bias)
        assert_same(out, wanted.transpose(1, 2))


def test_an_unknown_keyword_is_told():
    with pytest.warns(UserWarning, match="does not know the keyword gate, and leaves it out"):
        call(gate=2.0)
    with pytest.warns(UserWarning, match="gives no attention weights"):
        call(output_attentions=True)


def test_cumulative_lengths_are_documents_or_refused():
    eager, ours = pair("llama")
    position_ids = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4, 5, 0, 1, 2]])
    ids, cu = tokens(1), torch.tensor([0, 4, 10, 13], dtype=torch.int32)
    lengths = {"cu_seq_lens_q": cu, "cu_seq_lens_k": cu, "max_length_q": 6, "max_length_k": 6}
    with torch.no_grad():
        wanted = result(eager, input_ids=ids, position_ids=position_ids, use_cache=False)
        # an all-ones mask makes transformers forget the documents: the lengths still tell
        ones = torch.ones_like(ids)
        given = {"input_ids": ids, "position_ids": position_ids, "attention_mask": ones}
        got = result(ours, **given, use_cache=False, **lengths)
        # trl also says each token's document, for models with convolutions
        numbers = torch.repeat_interleave(torch.arange(3), cu.diff())[None]
        also = result(ours, **given, use_cache=False, **lengths, seq_idx=numbers)
    assert_same(got, wanted)
    assert_same(also, wanted)
    unlike = {**lengths, "cu_seq_lens_k": torch.tensor([0, 5, 10, 13], dtype=torch.int32)}
    with pytest.raises(NotImplementedError, match="cu_seq_lens_q and cu_seq_lens_k"):
        ours(**given, use_cache=False, **unlike)
    with pytest.raises(NotImplementedError, match="for a single row"):
        ours(input_ids=tokens(2), use_cache=False, **lengths)


def test_packing_that_got_lost_warns():
    _, ours = pair("llama")
    position_ids = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4, 5, 0, 1, 2]])
    given = {"input_ids": tokens(1), "position_ids": position_ids}
    with pytest.warns(UserWarning, match="position_ids restart"):
        ours(**given)  # which makes a cache
    with pytest.warns(UserWarning, match="position_ids restart"):
        ours(**given, use_cache=False, attention_mask=torch.ones(1, 13, dtype=torch.int64))
    ours(**given, use_cache=False)


def test_positions_of_left_padding_are_no_packing():
    _, ours = pair("llama")
    mask = padded("left")
    position_ids = (mask.cumsum(1) - 1).clamp(min=0)
    ours(input_ids=tokens(), attention_mask=mask, position_ids=position_ids)
    ours(
        input_ids=tokens(),
        attention_mask=mask,
        position_ids=(mask.cumsum(1) - 1).where(mask > 0, 1),
    )


def test_a_causal_module_without_a_mask_must_have_equal_lengths():
    module = Module()
    module.is_causal = True
    query, key = torch.randn(1, 2, 3, 8), torch.randn(1, 2, 5, 8)
    with pytest.raises(ValueError, match="needs a mask for 3 queries of 5 keys"):
        attention_function(module, query, key, key, None)
    out, _ = attention_function(module, query[:, :, :1], key, key, None)
    assert_same(out, sr.attention(query[:, :, :1], key, key, sr.Full()).transpose(1, 2))
    out, _ = attention_function(module, key, key, key, None)
    assert_same(out, sr.attention(key, key, key, sr.Causal()).transpose(1, 2))
    out, _ = attention_function(module, key, key, key, None, is_causal=False)
    assert_same(out, sr.attention(key, key, key, sr.Full()).transpose(1, 2))


def test_a_mask_used_as_a_tensor_is_refused():
    mask = masks.mask_interface(batch_size=1, q_length=3, kv_length=3)
    for use in (
        lambda: mask + 1,
        lambda: mask[:, :, :1],
        lambda: ~mask,
        lambda: torch.where(mask, 0.0, 1.0),
    ):
        with pytest.raises(NotImplementedError, match="uses its attention mask as a tensor"):
            use()
    assert mask.contiguous() is mask.to("cpu") is mask and mask.size(3) == mask.dim() - 1 == 3


def test_a_mask_of_other_lengths_is_refused():
    mask = masks.mask_interface(batch_size=1, q_length=6, kv_length=6)
    query = torch.randn(1, 2, 6, 8)
    with pytest.raises(ValueError, match="for 6 queries of 6 keys, got 6 of 7"):
        key = torch.randn(1, 2, 7, 8)
        attention_function(Module(), query, key, key, mask)
    with pytest.raises(ValueError, match=r"must be .batch, tokens., or a bool or float mask"):
        wrong = torch.ones(1, 6, 6, dtype=torch.bool)
        masks.mask_interface(batch_size=1, q_length=6, kv_length=6, attention_mask=wrong)
    with pytest.raises(ValueError, match="must broadcast to"):
        key = torch.randn(1, 2, 7, 8)
        attention_function(Module(), query, key, key, torch.ones(1, 1, 6, 6, dtype=torch.bool))


def test_what_is_no_pattern_has_a_limit(monkeypatch):
    monkeypatch.setattr(dense, "MOST_SCORES", 2 * 4 * 13 * 13 - 1)
    _, ours = pair("llama")
    mask = torch.ones(2, 1, 13, 13, dtype=torch.bool).tril()
    with pytest.raises(ValueError, match="4-D attention_mask is computed over all pairs"):
        ours(input_ids=tokens(), attention_mask=mask)
    monkeypatch.setattr(dense, "MOST_SCORES", 2 * 4 * 13 * 13)
    ours(input_ids=tokens(), attention_mask=mask)


def gpt_neo():
    sizes = {"vocab_size": 61, "hidden_size": 32, "num_layers": 1, "num_heads": 4}
    return GPTNeoForCausalLM(GPTNeoConfig(**sizes, attention_types=[[["global"], 1]]))


def bloom():
    return BloomForCausalLM(BloomConfig(vocab_size=61, hidden_size=32, n_layer=1, n_head=4))


@pytest.mark.parametrize("make", [gpt_neo, bloom])
def test_a_family_that_does_not_dispatch_is_refused(make):
    model = make()
    with pytest.raises(NotImplementedError, match="does not ask transformers' attention interface"):
        hf.apply(model, sr.Causal())
    assert not hasattr(model.config, "sparsering")
    assert model.config._attn_implementation != "sparsering"


def test_a_model_that_stays_on_its_implementation_is_refused(monkeypatch):
    model = made("llama")
    monkeypatch.setattr(type(model), "set_attn_implementation", lambda self, name: None)
    with pytest.raises(NotImplementedError, match="does not let LlamaAttention change"):
        hf.apply(model, sr.Causal())
    assert not hasattr(model.config, "sparsering")


def test_a_mask_with_a_function_of_its_own_is_computed_and_no_pattern():
    from transformers.masking_utils import create_causal_mask

    config = made("llama", "sparsering").config
    embeds = torch.randn(2, 6, 32)

    def prefix(batch, head, query, key):
        return key < 3

    joined = {"config": config, "inputs_embeds": embeds, "past_key_values": None}
    joined |= {"attention_mask": padded("left", 6, (6, 4)), "or_mask_function": prefix}
    mask = create_causal_mask(**joined)
    assert mask.kind is None
    query, key = torch.randn(2, 4, 6, 8), torch.randn(2, 2, 6, 8)
    module = Module()
    got, _ = attention_function(module, query, key, key, mask)
    allowed = sr.Causal() | sr.GlobalTokens(3, rows=False)
    valid = padded("left", 6, (6, 4))
    wanted = sr.attention(query, key, key, allowed & sr.KeyMask(valid.bool())).transpose(1, 2)
    assert_same(got, wanted, valid)
    module.config = copy.deepcopy(config)
    module.config.sparsering = "Causal()"
    with pytest.raises(NotImplementedError, match="a function of the model's own"):
        attention_function(module, query, key, key, mask)


def test_dropout_is_drawn_once_a_call_and_scales_what_is_kept():
    query, key = torch.randn(1, 4, 40, 8), torch.randn(1, 2, 40, 8)
    mask = masks.mask_interface(batch_size=1, q_length=40, kv_length=40)
    torch.manual_seed(3)
    got, _ = attention_function(Module(), query, key, key, mask, dropout=0.25)
    again, _ = attention_function(Module(), query, key, key, mask, dropout=0.25)
    torch.manual_seed(3)
    wanted = sr.attention(query, key, key, sr.Causal(), dropout_p=0.25).transpose(1, 2)
    assert_same(got, wanted)
    assert not torch.equal(got, again)


def test_training_drops_weights_as_the_model_asks():
    model = made("llama", "sparsering", attention_dropout=0.5)
    with torch.no_grad():
        still = [result(model, input_ids=tokens()) for _ in range(2)]
        model.train()
        moving = [result(model, input_ids=tokens()) for _ in range(2)]
    assert torch.equal(*still) and not torch.equal(*moving)


def test_the_mask_interface_never_gives_none_nor_pairs():
    mask = masks.mask_interface(batch_size=1, q_length=1 << 20, kv_length=1 << 20)
    assert mask is not None and mask.shape == (1, 1, 1 << 20, 1 << 20)
    assert mask.pattern(0, 1 << 20) == sr.Causal()


def test_an_old_version_is_named(monkeypatch):
    old = ModuleType("transformers")
    old.__version__ = "5.22.9"
    monkeypatch.setitem(sys.modules, "transformers", old)
    monkeypatch.delitem(sys.modules, "sparsering.integrations.transformers")
    message = r"5\.23 or newer.*got 5\.22\.9; .*pip install 'sparsering\[hf"
    with pytest.raises(ImportError, match=message):
        importlib.import_module("sparsering.integrations.transformers")


def test_registering_twice_is_registering_once():
    from transformers import PreTrainedModel

    before = PreTrainedModel._check_and_adjust_attn_implementation
    hf.register()
    assert PreTrainedModel._check_and_adjust_attn_implementation is before


def test_nothing_above_warns_without_a_reason():
    model = made("mistral", "sparsering")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        like(model)(input_ids=tokens(), attention_mask=padded("left"))


def test_a_query_that_a_mask_of_pairs_leaves_nothing_is_0_and_learns_nothing():
    query = torch.randn(1, 4, 6, 8).double().requires_grad_()
    key = torch.randn(1, 2, 6, 8).double().requires_grad_()
    mask = torch.ones(1, 1, 6, 6, dtype=torch.bool).tril(-1)
    out, _ = attention_function(Module(), query, key, key, mask)
    assert not out[:, 0].any()
    seen = sr.Dense(mask[0, 0])
    wanted = sr.attention(query, key, key, seen).transpose(1, 2)
    assert_same(out, wanted)
    for got, grad in zip(
        *(torch.autograd.grad(x.square().sum(), (query, key)) for x in (out, wanted)), strict=True
    ):
        assert_same(got, grad)


def test_masks_that_only_models_say_are_told_to_nobody():
    with pytest.raises(ValueError, match="is no part of a pattern") as found:
        sr.parse("Causal() & Unknown(3)")
    assert "SlidingWindow" in str(found.value) and "SameRun" not in str(found.value)


@pytest.mark.parametrize("stored", [3, ["Full()"], True, 2.5, sr.Causal(), {"0": 3}, {0: "Full()"}])
def test_a_config_that_holds_no_text_of_a_pattern_is_refused_with_a_way_out(stored):
    module = Module()
    module.config = types.SimpleNamespace(sparsering=stored)
    query = torch.randn(1, 4, 6, 8)
    with pytest.raises(ValueError, match=r"config\.sparsering must be the text .* apply\("):
        attention_function(module, query, query, query, None)
    model = made("llama")
    model.config.sparsering = stored
    with pytest.raises(ValueError, match=r"config\.sparsering must be the text .* apply\("):
        hf.explain(model)


def test_a_sparse_cache_of_a_model_whose_config_names_other_masks_says_so():
    model = tiny("moshi")
    hf.register()
    model.set_attn_implementation("sparsering")
    refused = pytest.raises(ValueError, match=r"config names other masks .* use the default cache")
    with torch.no_grad(), refused:
        model(torch.randint(4, 61, (1, 8)), past_key_values=hf.SparseCache(model))


def test_a_sparse_cache_of_a_model_with_cross_attention_is_refused_by_its_layers():
    model = tiny("mllama")
    hf.register()
    model.set_attn_implementation("sparsering")
    with pytest.raises(NotImplementedError, match="got cross attention in the layers"):
        hf.SparseCache(model)


def test_ranks_do_not_share_embeddings_that_need_the_whole_row():
    """ESM scales them by the share of masked tokens, of which a rank has a part."""
    from transformers import EsmConfig, EsmModel

    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4}
    config = EsmConfig(vocab_size=33, pad_token_id=1, mask_token_id=32, **sizes)
    with pytest.raises(
        NotImplementedError, match=r"EsmEmbeddings.* masked tokens of the whole row"
    ):
        hf.parallelize(EsmModel(config))
