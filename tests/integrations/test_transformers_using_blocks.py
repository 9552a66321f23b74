"""Blocks of `hf.using`: nested, of threads and of several models; checkpoints, compiled models."""

import copy
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import pytest
import torch
from torch.utils.checkpoint import checkpoint
from transformers import LlamaForCausalLM
from transformers_models import like, made, result, tokens
from using_oracle import (
    assert_all_close,
    assert_close,
    eager_result,
    gradients,
    log_counts,
    norms_in_full,
    objective,
    outcome,
)

import sparsering as sr
from sparsering.integrations import transformers as hf

SLOW = pytest.mark.slow
NARROW, WIDE = sr.SlidingWindow(2), sr.SlidingWindow(5)


@pytest.fixture(scope="module")
def wanted():
    """Logits and gradients of eager attention over each of the two patterns."""
    with pytest.MonkeyPatch.context() as patch:
        softmax = torch.nn.functional.softmax
        patch.setattr(
            torch.nn.functional, "softmax", lambda x, dim=None, dtype=None: softmax(x, dim)
        )
        return {x: eager_result("llama", x, grads=True) for x in (NARROW, WIDE)}


def implementation(model):
    return model.config._attn_implementation


class TestNested:
    def test_the_inner_block_replaces_the_outer_one_whole(self, wanted):
        model = made("llama")
        with hf.using(model, NARROW):
            with hf.using(model, WIDE):
                assert_close(outcome(model), wanted[WIDE][0])
            assert_close(outcome(model), wanted[NARROW][0])
            with hf.using(model, {1: WIDE}):  # layer 0 has the model's own mask
                assert_close(outcome(model), eager_result("llama", {1: WIDE}))
            with hf.using(model.model, {}):
                assert_close(outcome(model), outcome(made("llama")))
            assert_close(outcome(model), wanted[NARROW][0])
        assert implementation(model) == "eager"

    def test_blocks_may_end_in_any_order(self, wanted):
        model = made("llama")
        with ExitStack() as outer, ExitStack() as inner:
            outer.enter_context(hf.using(model, NARROW))
            inner.enter_context(hf.using(model, WIDE))
            outer.close()
            assert_close(outcome(model), wanted[WIDE][0])
        assert implementation(model) == "eager"
        assert_close(outcome(model), outcome(made("llama")))

    def test_an_exception_ends_all_blocks(self, wanted):
        model = made("llama")
        with pytest.raises(ZeroDivisionError), hf.using(model, NARROW), hf.using(model, WIDE):
            raise ZeroDivisionError
        assert implementation(model) == "eager"
        assert_close(outcome(model), outcome(made("llama")))
        with pytest.raises(ValueError), hf.using(model, NARROW):
            model(input_ids=torch.zeros(1, 0, dtype=torch.int64), inputs_embeds=torch.zeros(1))
        with hf.using(model, WIDE):
            assert_close(outcome(model), wanted[WIDE][0])

    def test_a_function_may_be_decorated(self, wanted):
        model = made("llama")
        narrow = hf.using(model, NARROW)(outcome)
        for _ in range(2):
            assert_close(narrow(model), wanted[NARROW][0])
        assert implementation(model) == "eager"


class TestModels:
    """Each model has its own blocks, also if configs are shared."""

    @pytest.mark.parametrize("shared", [False, True])
    @pytest.mark.parametrize("first_ends", [False, True])
    def test_two_models_at_once(self, wanted, shared, first_ends):
        first = made("llama")
        second = LlamaForCausalLM(first.config if shared else copy.deepcopy(first.config))
        second = second.double().eval()
        second.load_state_dict(first.state_dict())
        assert (second.config is first.config) == shared
        one, two = ExitStack(), ExitStack()
        with two, one:
            one.enter_context(hf.using(first, NARROW))
            two.enter_context(hf.using(second, WIDE))
            assert_close(outcome(first), wanted[NARROW][0])
            assert_close(outcome(second), wanted[WIDE][0])
            ended, still, pattern = (first, second, WIDE) if first_ends else (second, first, NARROW)
            (one if first_ends else two).close()
            assert_close(outcome(still), wanted[pattern][0])
            assert_close(outcome(ended), outcome(made("llama")))
        assert implementation(first) == implementation(second) == "eager"

    def test_a_copy_is_outside_of_the_block(self, wanted):
        model = made("llama")
        with hf.using(model, NARROW):
            other = copy.deepcopy(model)
            assert_close(outcome(other), outcome(made("llama")))
            with hf.using(other, WIDE):
                assert_close(outcome(other), wanted[WIDE][0])
                assert_close(outcome(model), wanted[NARROW][0])
        assert_close(outcome(other), outcome(made("llama")))

    def test_a_pattern_of_apply_is_replaced_and_comes_back(self, wanted):
        model = made("llama")
        hf.apply(model, WIDE)
        before = model.config.to_dict()
        with hf.using(model, {0: NARROW}):
            assert_close(outcome(model), eager_result("llama", {0: NARROW, 1: WIDE}))
        with hf.using(model, NARROW):
            assert_close(outcome(model), wanted[NARROW][0])
        assert_close(outcome(model), wanted[WIDE][0])
        assert implementation(model) == "sparsering" and model.config.to_dict() == before

    def test_what_is_applied_in_a_block_stays_after_it(self, wanted):
        model = made("llama")
        with hf.using(model, NARROW):
            hf.apply(model, WIDE)
            assert_close(outcome(model), wanted[NARROW][0])
        assert implementation(model) == "sparsering"
        assert_close(outcome(model), wanted[WIDE][0])

    @pytest.mark.parametrize("before", ["eager", "sdpa", "sparsering"])
    def test_parallelize_and_a_block_begin_and_end_in_any_order(self, wanted, before):
        model = made("llama", before)
        with hf.using(model, NARROW):
            hf.parallelize(model)
            assert_close(outcome(model), wanted[NARROW][0])
        assert implementation(model) == "sparsering"
        assert_close(outcome(model), outcome(made("llama")))
        with hf.using(model, WIDE):
            hf.parallelize(model, False)
            assert implementation(model) == "sparsering"
            assert_close(outcome(model), wanted[WIDE][0])
        assert implementation(model) == before

    def test_a_family_that_cannot_change_is_refused_and_unchanged(self, monkeypatch):
        model = made("llama")
        monkeypatch.setattr(type(model), "_can_set_attn_implementation", lambda *_: False)
        monkeypatch.setattr(type(model.model), "_can_set_attn_implementation", lambda *_: False)
        with (
            pytest.raises(NotImplementedError, match=r"load the model with .* then call using"),
            hf.using(model, NARROW),
        ):
            pytest.fail("entered")
        monkeypatch.undo()
        assert implementation(model) == "eager"
        with hf.using(model, NARROW):
            assert implementation(model) == "sparsering"
        assert implementation(model) == "eager"

    def test_an_implementation_that_the_user_sets_stays(self):
        model = made("llama", "sdpa")
        with hf.using(model, NARROW):
            model.set_attn_implementation("eager")
        assert implementation(model) == "eager"

    def test_parts_of_a_model_get_back_their_own_implementations(self):
        model = made("t5")
        model.encoder.config._attn_implementation = "sdpa"
        with hf.using(model, NARROW):
            assert implementation(model.encoder) == implementation(model.decoder) == "sparsering"
        assert implementation(model.encoder) == "sdpa"
        assert implementation(model.decoder) == implementation(model) == "eager"


class TestThreads:
    def test_each_thread_has_its_own_block(self, wanted):
        """The barrier makes all of them open before any call, and again before any block ends."""
        model, barrier = made("llama"), threading.Barrier(4, timeout=60)
        own = outcome(like(model))

        def run(pattern):
            found = []
            for _ in range(3):
                with ExitStack() as stack:
                    if pattern is not None:
                        stack.enter_context(hf.using(model, pattern))
                    barrier.wait()
                    with torch.no_grad():
                        found.append(result(model, input_ids=tokens()))
                    barrier.wait()
            return found

        patterns = (NARROW, WIDE, {1: NARROW}, None)
        with norms_in_full(model), ThreadPoolExecutor(4) as threads:
            found = list(threads.map(run, patterns))
        expected = wanted[NARROW][0], wanted[WIDE][0], eager_result("llama", {1: NARROW}), own
        for got, one in zip(found, expected, strict=True):
            for each in got:
                assert_close(each, one)
        assert implementation(model) == "eager"

    @pytest.mark.parametrize("first", [NARROW, WIDE])
    def test_the_last_thread_restores_the_implementation(self, wanted, first):
        model, opened, ended = made("llama"), threading.Event(), threading.Event()

        def other():
            with hf.using(model, first):
                opened.set()
                assert ended.wait(60)
                return outcome(model), implementation(model)

        with ThreadPoolExecutor(1) as threads:
            future = threads.submit(other)
            assert opened.wait(60)
            with hf.using(model, WIDE):
                assert_close(outcome(model), wanted[WIDE][0])
            assert implementation(model) == "sparsering"
            assert hf.explain(model).count("Causal()") == 2, "another thread's block shows"
            assert_close(outcome(model), outcome(made("llama")))
            ended.set()
            got, during = future.result(60)
        assert during == "sparsering" and implementation(model) == "eager"
        assert_close(got, wanted[first][0])


def in_another_thread(function):
    with ThreadPoolExecutor(1) as threads:
        threads.submit(function).result(60)


def checkpoint_layers(model, reentrant):
    """Turns on gradient checkpointing, under the name that this transformers has for it."""
    old = model.gradient_checkpointing_enable
    getattr(model, "activation_checkpointing_enable", old)({"use_reentrant": reentrant})
    model.enable_input_require_grads()


RUNS = {"here": lambda function: function(), "in another thread": in_another_thread}


class TestBackward:
    """A backward pass has the pattern of its forward pass, or is refused."""

    @pytest.mark.parametrize("reentrant", [None, False, True])
    @pytest.mark.parametrize("run", RUNS)
    @pytest.mark.parametrize("around", [None, WIDE])
    def test_behind_the_block(self, wanted, reentrant, run, around):
        """Two forward passes, then their backward passes, in a block of another pattern or none."""
        model = made("llama").train()
        if reentrant is not None:
            checkpoint_layers(model, reentrant=reentrant)
        with norms_in_full(model):
            losses = {}
            for pattern in (NARROW, WIDE):
                with hf.using(model, pattern):
                    losses[pattern] = objective(result(model, input_ids=tokens(), use_cache=False))
            for pattern, loss in losses.items():
                model.zero_grad()

                def backward(loss=loss):
                    with ExitStack() as stack:
                        if around is not None:
                            stack.enter_context(hf.using(model, around))
                        loss.backward()

                RUNS[run](backward)
                got = wanted[pattern][0], gradients(model)
                assert_all_close(got, wanted[pattern])
        assert implementation(model) == ("eager" if reentrant is None else "sparsering")
        assert_close(outcome(model.eval()), outcome(made("llama")), "the model's own mask again")

    @pytest.mark.parametrize("reentrant", [False, True])
    @pytest.mark.parametrize("pattern", [NARROW, {1: NARROW}], ids=["all", "one"])
    def test_behind_the_block_with_a_mask_of_pairs(self, reentrant, pattern):
        """Layers get such a mask as it is, so it cannot hold the block's pattern."""
        inputs = {"attention_mask": log_counts(sr.SlidingWindow(7), made("llama"))[:, :1]}
        model = made("llama").train()
        checkpoint_layers(model, reentrant=reentrant)
        with norms_in_full(model):
            with hf.using(model, pattern):
                out = result(model, input_ids=tokens(), use_cache=False, **inputs)
            with hf.using(model, WIDE):
                objective(out).backward()
        expected = eager_result("llama", pattern, grads=True, **inputs)
        assert_all_close((out.detach(), gradients(model)), expected)

    def test_a_layer_without_a_block_has_none_in_the_backward(self):
        model = made("llama", "sparsering").train()
        checkpoint_layers(model, reentrant=False)
        with norms_in_full(model):
            with hf.using(model, NARROW):
                pass
            out = result(model, input_ids=tokens(), use_cache=False)
            with hf.using(model, NARROW):
                objective(out).backward()
        expected = outcome(made("llama"), grads=True)
        assert_all_close((out.detach(), gradients(model)), expected)

    @pytest.mark.parametrize("reentrant", [False, True])
    @pytest.mark.parametrize("around", [None, NARROW, WIDE], ids=["none", "same", "other"])
    def test_a_whole_model_that_runs_again_outside_is_refused(self, reentrant, around):
        model = made("llama", "sparsering")
        embeds = model.get_input_embeddings()(tokens()).detach().requires_grad_()

        def run(x):
            return result(model, inputs_embeds=x, use_cache=False)

        with hf.using(model, NARROW):
            out = checkpoint(run, embeds, use_reentrant=reentrant)
        with (
            ExitStack() as stack,
            pytest.raises(RuntimeError, match="open the block inside the function"),
        ):
            if around is not None:
                stack.enter_context(hf.using(model, around))
            out.sum().backward()

    @pytest.mark.parametrize("reentrant", [False, True])
    def test_a_mask_of_pairs_without_a_block_has_none_in_the_backward(self, reentrant):
        """Neither does a block before it count, nor the one around the backward pass."""
        inputs = {"attention_mask": log_counts(sr.SlidingWindow(7), made("llama"))[:, :1]}
        model = made("llama", "sparsering").train()
        checkpoint_layers(model, reentrant)
        with norms_in_full(model):
            with hf.using(model, NARROW):
                pass
            out = result(model, input_ids=tokens(), use_cache=False, **inputs)
            with hf.using(model, NARROW):
                objective(out).backward()
        expected = outcome(made("llama"), grads=True, **inputs)
        assert_all_close((out.detach(), gradients(model)), expected)

    @pytest.mark.parametrize("reentrant", [False, True])
    @pytest.mark.parametrize("pattern", [NARROW, {0: NARROW}], ids=["all", "one"])
    def test_a_block_inside_the_function_runs_again(self, reentrant, pattern):
        model = made("llama")
        embeds = model.get_input_embeddings()(tokens()).detach().requires_grad_()

        def run(x):
            with hf.using(model, pattern):
                return result(model, inputs_embeds=x, use_cache=False)

        found = []
        with norms_in_full(model):
            for function in (run, lambda x: checkpoint(run, x, use_reentrant=reentrant)):
                with hf.using(model, WIDE):
                    objective(function(embeds)).backward()
                found.append(embeds.grad)
                embeds.grad = None
        assert_close(found[1], found[0])
        assert implementation(model) == "eager"

    @pytest.mark.parametrize("reentrant", [False, True])
    def test_dropout_is_the_same_when_a_layer_runs_again(self, reentrant):
        found = []
        for again in (False, True):
            model = made("llama", attention_dropout=0.5).train()
            if again:
                checkpoint_layers(model, reentrant=reentrant)
            torch.manual_seed(3)
            with norms_in_full(model):
                with hf.using(model, NARROW):
                    out = result(model, input_ids=tokens(), use_cache=False)
                objective(out).backward()
            found.append((out.detach(), gradients(model)))
        assert_all_close(found[1], found[0])
        model.eval()
        with hf.using(model, NARROW):
            assert_close(outcome(model), eager_result("llama", NARROW))
        assert (found[0][0] - eager_result("llama", NARROW)).abs().max() > 1e-2, "nothing dropped"


class TestCompiled:
    """A new pattern compiles again; the old one stays compiled, and none outlives its block."""

    @pytest.fixture(autouse=True)
    def nothing_compiled(self):
        torch.compiler.reset()
        torch._dynamo.utils.counters.clear()
        yield
        torch.compiler.reset()

    def graphs(self):
        return torch._dynamo.utils.counters["stats"]["unique_graphs"]

    @pytest.mark.parametrize(
        ("patterns", "graphs"),
        [
            ((NARROW, None, sr.SlidingWindow(2)), [1, 2, 2]),
            pytest.param((None, NARROW, WIDE, {0: NARROW}, None), [1, 2, 3, 4, 4], marks=SLOW),
        ],
    )
    def test_each_pattern_has_its_graph(self, patterns, graphs):
        model = made("llama", "sparsering")
        fast = torch.compile(model, backend="eager", fullgraph=True)
        inputs = {"input_ids": tokens(), "use_cache": False}
        counts = []
        with torch.no_grad():
            for pattern in patterns:
                with ExitStack() as stack:
                    if pattern is not None:
                        stack.enter_context(hf.using(model, pattern))
                    got = result(fast, **inputs)
                    assert_close(got, result(model, **inputs))
                counts.append(self.graphs())
        assert counts == graphs

    @SLOW
    def test_tensors_of_a_pattern_are_inputs_of_one_graph(self):
        model = made("llama", "sparsering")
        fast = torch.compile(model, backend="aot_eager", fullgraph=True)
        inputs, found = {"input_ids": tokens(), "use_cache": False}, []
        for seed in range(3):
            draw = torch.rand(2, 2, 13, 7, generator=torch.Generator().manual_seed(seed))
            pattern = sr.SelectedBlocks(draw.argsort(-1)[..., :3], 2, 1) & sr.Causal()
            with torch.no_grad(), hf.using(model, pattern):
                found.append(result(fast, **inputs))
                assert_close(found[-1], result(model, **inputs))
        assert (found[0] - found[1]).abs().max() > 1e-3 and self.graphs() == 1

    @SLOW
    def test_gradients_behind_the_block(self, wanted):
        model = made("llama")
        fast = torch.compile(model, backend="aot_eager", fullgraph=True)
        with norms_in_full(model):
            losses = []
            for pattern in (NARROW, WIDE):
                with hf.using(model, pattern):
                    losses.append(objective(result(fast, input_ids=tokens(), use_cache=False)))
            for pattern, loss in zip((NARROW, WIDE), losses, strict=True):
                model.zero_grad()
                with hf.using(model, NARROW):
                    loss.backward()
                assert_all_close((wanted[pattern][0], gradients(model)), wanted[pattern])

    @SLOW
    def test_a_compiled_model_that_runs_again_outside_is_refused(self):
        model = made("llama", "sparsering")
        fast = torch.compile(model, backend="aot_eager", fullgraph=True)
        embeds = model.get_input_embeddings()(tokens()).detach().requires_grad_()

        def run(x):
            return result(fast, inputs_embeds=x, use_cache=False)

        with hf.using(model, NARROW):
            out = checkpoint(run, embeds, use_reentrant=False)
        with pytest.raises(RuntimeError):
            out.sum().backward()
