"""Rows of several documents, whose position_ids restart: each document has the result it has alone.

Many families do not hand position_ids to their mask, so transformers does not see the documents.
"""

import copy
import threading
import warnings

import pytest
import torch
import transformers
from helpers.thinned import thinned
from transformers_models import assert_same, like, made

import sparsering as sr
from sparsering.integrations import transformers as hf

hf.register()
SIZES = {
    "vocab_size": 61,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}
# Families that do not hand position_ids to their mask: class, config, its sizes
FAMILIES = {
    "opt": ("OPTForCausalLM", {"ffn_dim": 48, "word_embed_proj_dim": 32}),
    "roberta": ("RobertaModel", {}),
    "bert-decoder": ("BertLMHeadModel", {"is_decoder": True}),
    "electra": ("ElectraModel", {"embedding_size": 32}),
    "albert": ("AlbertModel", {"embedding_size": 32}),
    "esm": ("EsmModel", {"position_embedding_type": "rotary"}),
    "eurobert": ("EuroBertModel", {}),
    "distilbert": ("DistilBertModel", {}),
    "nomic-bert": ("NomicBertModel", {}),
}
CUTS = ((4, 11), (9, 10))  # where the documents of each row begin, behind the first


def model_of(family, implementation="sparsering"):
    if family not in FAMILIES:
        return made(family, implementation)
    name, sizes = FAMILIES[family]
    cls = getattr(transformers, name)
    torch.manual_seed(7)
    model = cls._from_config(cls.config_class(**{**SIZES, **sizes})).double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(4)
    model.set_attn_implementation(implementation)
    assert model.config._attn_implementation == implementation
    return model


def packed(first=3, length=17):
    """Tokens and position_ids [2, N] of rows of three documents, and where each document stands."""
    ids = torch.randint(first, 61, (2, length), generator=torch.Generator().manual_seed(1))
    places, parts = torch.empty(2, length, dtype=torch.int64), []
    for row, cuts in enumerate(CUTS):
        for start, stop in zip((0, *cuts), (*cuts, length), strict=True):
            places[row, start:stop] = torch.arange(stop - start)
            parts.append((row, slice(start, stop)))
    return ids, places, parts


def options(family):
    decodes = family in ("gpt-oss", "opt", "bert-decoder", "llama", "gpt2")
    return {"use_cache": False} if decodes else {}


def assert_apart(model, family, offset=0, **more):
    ids, places, parts = packed()
    more |= options(family)
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("error")
        got = model(ids, position_ids=places + offset, **more)[0]
        for row, part in parts:
            alone = model(ids[row, part][None], position_ids=places[row, part][None] + offset)
            assert_same(got[row, part], alone[0][0], atol=1e-6)


@pytest.mark.parametrize(
    "family", ["gpt-oss", "bert", "modernbert", *thinned(4, [*FAMILIES, "llama", "gpt2"])]
)
def test_documents_have_the_results_they_have_alone(family):
    model = model_of(family)
    assert_apart(model, family, offset=2 if family == "roberta" else 0)
    assert_apart(copy.deepcopy(model), family)


@pytest.mark.parametrize("family", ["bert", "gpt-oss"])
def test_one_document_is_not_cut(family):
    """Positions that begin later, or leave some out, are of one document."""
    eager = model_of(family, "eager")
    ids, _, _ = packed()
    for places in (torch.arange(17) + 20, torch.arange(17) * 2):
        inputs = {"position_ids": places[None], **options(family)}
        with torch.no_grad():
            assert_same(like(eager)(ids, **inputs)[0], eager(ids, **inputs)[0])


@pytest.mark.parametrize("family", thinned(3, ["modernbert", "bert", "opt"]))
def test_documents_under_torch_compile(family):
    torch.compiler.reset()
    model = model_of(family)
    fast = torch.compile(model, backend="eager", fullgraph=True)
    ids, places, _ = packed()
    for position_ids in (places, places.flip(0), torch.arange(17)[None]):
        inputs = {"position_ids": position_ids, **options(family)}
        with torch.no_grad():
            assert_same(fast(ids, **inputs)[0], model(ids, **inputs)[0])
            assert_same(fast(ids, **options(family))[0], model(ids, **options(family))[0])
    torch.compiler.reset()


@pytest.mark.parametrize("family", ["bert", "modernbert", "gpt-oss"])
def test_a_pattern_restarts_in_each_document(family):
    model = model_of(family)
    hf.apply(model, sr.Dilated(4, 2) | sr.SlidingWindow(1, 1))
    assert_apart(model, family)


def test_gradients_with_checkpointing():
    ids, places, parts = packed()
    model = model_of("gpt-oss")
    model.train()
    grads = []
    for checkpoints in (False, True):
        if checkpoints:
            model.activation_checkpointing_enable({"use_reentrant": True})
        model.zero_grad()
        model(ids, position_ids=places, use_cache=False)[0].square().sum().backward()
        grads.append([p.grad.clone() for p in model.parameters()])
    model.activation_checkpointing_disable()
    model.zero_grad()
    for row, part in parts:
        out = model(ids[row, part][None], position_ids=places[row, part][None], use_cache=False)
        out[0].square().sum().backward()
    for one, two, parameter in zip(*grads, model.parameters(), strict=True):
        scale = 1 + parameter.grad.abs().max().item()
        torch.testing.assert_close(one, two, rtol=0, atol=1e-6 * scale)
        torch.testing.assert_close(one, parameter.grad, rtol=0, atol=1e-6 * scale)


def test_threads_have_their_own_documents():
    model, (ids, places, _) = model_of("bert"), packed()
    inputs = [places, places.flip(0), None, torch.arange(17)[None]]
    wanted = [model(ids, position_ids=x)[0] for x in inputs]
    wrong = []

    def run(number):
        for _ in range(20):
            with torch.no_grad():
                got = model(ids, position_ids=inputs[number])[0]
            wrong.append((got - wanted[number]).abs().max().item() > 1e-6)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(wrong) == 80 and not any(wrong)


def test_cross_attention_sees_the_whole_other_sequence():
    family = "bert-decoder"
    sizes = {**SIZES, "is_decoder": True, "add_cross_attention": True}
    model = transformers.BertLMHeadModel(transformers.BertConfig(**sizes)).double().eval()
    model.set_attn_implementation("sparsering")
    ids, places, parts = packed()
    others = torch.randn(2, 17, 32).double()  # as long as the rows
    with torch.no_grad():
        inputs = {"position_ids": places, "encoder_hidden_states": others, **options(family)}
        got = model(ids, **inputs)[0]
        for row, part in parts:
            inputs = {"position_ids": places[row, part][None], **options(family)}
            one = model(ids[row, part][None], encoder_hidden_states=others[row][None], **inputs)
            assert_same(got[row, part], one[0][0], atol=1e-6)


def test_padding_is_no_document():
    """With an attention_mask, the model's own result; positions of padding do not warn."""
    ids, _, _ = packed()
    real = torch.ones_like(ids)
    real[1, :5] = 0
    for family in ("bert", "modernbert", "gpt-oss"):
        eager = model_of(family, "eager")
        inputs = {"attention_mask": real, "position_ids": (real.cumsum(1) - 1).clamp(min=0)}
        with torch.no_grad():
            assert_same(like(eager)(ids, **inputs)[0], eager(ids, **inputs)[0], real)


@pytest.mark.parametrize("family", ["modernbert", "roberta", "gpt-oss", "opt"])
def test_documents_that_meet_warn_once_and_name_a_way_out(family):
    ids, places, parts = packed()
    model = model_of(family)
    cases = [{"attention_mask": torch.ones_like(ids), **options(family)}]
    cases += [{}] if options(family) else []  # makes a cache
    for more in cases:
        with pytest.warns(UserWarning, match="position_ids restart.*cu_seq_lens_q") as told:
            model(ids, position_ids=places, **more)
        assert 1 <= len(told) <= 2  # one for each of the model's masks
        lengths = torch.tensor([0, 4, 11, 17])
        more |= {"cu_seq_lens_q": lengths, "cu_seq_lens_k": lengths, "position_ids": places[:1]}
        more |= {"attention_mask": torch.ones(1, 17)} if "attention_mask" in more else {}
        with torch.no_grad():
            got = model(ids[:1], **more)[0]
            for row, part in parts[:3]:
                alone = model(ids[row, part][None], position_ids=places[row, part][None])
                assert_same(got[row, part], alone[0][0], atol=1e-6)


def test_steps_behind_a_call_that_failed_have_no_documents():
    model, (ids, places, _) = model_of("bert"), packed()
    with pytest.raises(Exception, match="index"):
        model(ids + 1000, position_ids=places)
    wanted = model(ids)[0]
    copy_of_it = model_of("bert")
    assert_same(wanted, copy_of_it(ids)[0])


def qwen_vl():
    """The language model of Qwen2.5-VL, whose rotary positions have three planes."""
    rope = {"rope_type": "default", "mrope_section": [1, 1, 2]}
    text = {**SIZES, "num_key_value_heads": 2, "rope_scaling": rope}
    eyes = {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2}
    config = transformers.Qwen2_5_VLConfig(
        text_config=text, vision_config={**eyes, "out_hidden_size": 32}
    )
    torch.manual_seed(7)
    model = transformers.Qwen2_5_VLForConditionalGeneration._from_config(
        config, attn_implementation="sparsering"
    )
    return model.double().eval().model


def planes(places, num_planes):
    return places[None].expand(num_planes, *places.shape)


@pytest.mark.parametrize("num_planes", [3, 4])
def test_documents_of_three_dims_are_apart(num_planes):
    model, (ids, places, parts) = qwen_vl(), packed()
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("error")
        inputs = {"position_ids": planes(places, num_planes), "use_cache": False}
        got = model(ids, **inputs)[0]
        for row, part in parts:
            alone = model(ids[row, part][None], use_cache=False)
            assert_same(got[row, part], alone[0][0], atol=1e-6)
        torch.compiler.reset()
        fast = torch.compile(model, backend="eager", fullgraph=True)
        assert_same(fast(ids, **inputs)[0], got)
        torch.compiler.reset()


def with_image(first=0):
    """Positions [3, 1, 12] of a text, an image of 2 x 3 and a text."""
    image = torch.tensor([[2, 2, 2, 2, 2, 2], [2, 2, 2, 3, 3, 3], [2, 3, 4, 2, 3, 4]])
    before, behind = planes(torch.arange(2), 3), planes(torch.arange(5, 9), 3)
    return (torch.cat([before, image, behind], 1) + first)[:, None]


def test_an_image_begins_no_document():
    """Positions of an image repeat and fall; only a text that begins anew is another document."""
    model, ids = qwen_vl(), packed()[0][:1, :12]
    eager = copy.deepcopy(model)
    eager.set_attn_implementation("eager")
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("error")
        for first in (0, 7):
            inputs = {"position_ids": with_image(first)}
            assert_same(model(ids, **inputs)[0], eager(ids, **inputs)[0])
        alone = model(ids, position_ids=with_image(), use_cache=False)[0]
        both = torch.cat([with_image(), with_image()], 2)
        twice = model(ids.repeat(1, 2), position_ids=both, use_cache=False)[0]
        assert_same(twice, alone.repeat(1, 2, 1), atol=1e-6)


@pytest.mark.parametrize("num_planes", [2, 3, 4])
@pytest.mark.parametrize("hiding", ["cache", "mask", "both"])
def test_the_warning_names_what_the_call_has_not_done(num_planes, hiding):
    model, (ids, places, _) = qwen_vl(), packed()
    inputs = {"use_cache": hiding != "mask"}
    if hiding != "cache":
        inputs["attention_mask"] = torch.ones_like(ids[:1])
    places = places[:1] if num_planes == 2 else planes(places[:1], num_planes)
    with pytest.warns(UserWarning, match="packed documents see each other") as told:
        model(ids[:1], position_ids=places, **inputs)
    text = str(told[0].message)
    assert "pass cu_seq_lens_q and cu_seq_lens_k, or " in text
    assert ("use_cache=False" in text) == (hiding != "mask")
    assert ("no attention_mask" in text) == (hiding != "cache")


def test_planes_that_do_not_show_their_documents_warn():
    """A later document that begins above the row's first position, in three planes."""
    model, ids = qwen_vl(), packed()[0][:1, :12].repeat(1, 2)
    both = torch.cat([with_image(), with_image(3)], 2)
    with pytest.warns(UserWarning, match=r"cu_seq_lens_k, or a first plane of text") as told:
        got = model(ids, position_ids=both, use_cache=False)[0]
    assert len(told) == 1
    lengths = torch.tensor([0, 12, 24])
    text = torch.arange(12).repeat(2)[None, None]
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("error")
        inputs = {"position_ids": both, "use_cache": False}
        first = model(ids, cu_seq_lens_q=lengths, cu_seq_lens_k=lengths, **inputs)[0]
        inputs["position_ids"] = torch.cat([text, both])
        second = model(ids, **inputs)[0]
        alone = model(ids[:, 12:], position_ids=both[:, :, 12:], use_cache=False)[0]
    assert_same(first[:, 12:], alone, atol=1e-6)
    assert_same(second[:, 12:], alone, atol=1e-6)
    assert (got[:, 12:] - alone).abs().max() > 1e-3
