"""Extras of a call under torch.compile, vmap, checkpointing, autocast and watchers of calls."""

from typing import Any

import pytest
import torch
from oracles.attention_oracle import Case, assert_close, assert_same_attention, gradients, inputs
from oracles.extras_oracle import ALL, SEED, extras_of
from torch import Tensor

import sparsering as sr

CASE = Case(num_heads=4, num_kv_heads=2, q_len=75, kv_len=91, head_dim=12, value_dim=20)


def call_with_all(query, key, value, table, sink, seed=SEED):
    return sr.attention(
        query, key, value, sr.LongNet((16, 91), (1, 3)) & sr.Causal(), softcap=0.8,
        distance_bias=table, sink=sink, dropout_p=0.3, dropout_seed=seed, return_lse=True,
    )  # fmt: skip


def leaves_of(dtype: torch.dtype = torch.float64) -> list[Tensor]:
    options = extras_of(CASE, "distance_bias sink", dtype)
    return [*inputs(CASE, dtype), *options.values()]


def test_all_extras_compile_to_one_graph():
    torch.compiler.reset()
    leaves = leaves_of()
    compiled = torch.compile(call_with_all, fullgraph=True, backend="aot_eager")
    assert_same_attention(compiled(*leaves), call_with_all(*leaves), leaves)
    seed = torch.tensor(5)
    assert_same_attention(compiled(*leaves, seed), call_with_all(*leaves, 5), leaves)


def test_a_seed_that_torch_draws_compiles_and_differs_from_call_to_call():
    torch.compiler.reset()
    leaves = [x.detach() for x in leaves_of()]
    compiled = torch.compile(call_with_all, fullgraph=True, backend="aot_eager")
    first, second = (compiled(*leaves, None)[0] for _ in range(2))
    assert not torch.equal(first, second)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpointing_replays_the_same_dropout(use_reentrant: bool):
    from torch.utils.checkpoint import checkpoint

    leaves = leaves_of(torch.float32)
    grads = []
    for run in (
        lambda: call_with_all(*leaves, None),
        lambda: checkpoint(call_with_all, *leaves, None, use_reentrant=use_reentrant),
    ):
        torch.manual_seed(7)
        out, lse = run()
        for x in leaves:
            x.grad = None
        (out.sum() + lse.sum()).backward()
        grads.append([out, lse, *(x.grad for x in leaves)])
    for a, b in zip(*grads, strict=True):
        assert torch.equal(a, b)


def test_tables_keep_their_dtype_under_autocast_and_beside_half_precision():
    leaves = leaves_of(torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        out, lse = call_with_all(*leaves)
    assert (out.dtype, lse.dtype) == (torch.bfloat16, torch.float32)
    low = [x.detach().bfloat16() for x in leaves[:3]]
    assert torch.equal(out, call_with_all(*low, *leaves[3:])[0])
    assert [x.dtype for x in gradients((out, lse), leaves)] == [torch.float32] * 5
    small = [x.detach().bfloat16().requires_grad_() for x in leaves[3:]]
    of_small = gradients(call_with_all(*leaves[:3], *small), small)
    assert [x.dtype for x in of_small] == [torch.bfloat16] * 2


@pytest.mark.parametrize("backend", ["gather", "cpu", "reference"])
def test_vmap_over_tables_and_sinks_is_a_loop(backend: str):
    query, key, value, _, _ = (x.detach().float() for x in leaves_of())
    table, sink = torch.randn(3, 4, 9), torch.randn(3, 4)
    pattern = sr.Causal()

    def call(table: Tensor, sink: Tensor) -> Tensor:
        options = {"distance_bias": table, "sink": sink, "dropout_p": 0.2, "dropout_seed": 4}
        if backend == "reference":
            options = {"distance_bias": table, "sink": sink}
        return sr.attention(query, key, value, pattern, softcap=3.0, backend=backend, **options)

    got = torch.func.vmap(call)(table, sink)
    for i in range(3):
        assert_close(got[i], call(table[i], sink[i]), 1e-6)
    of_sum = torch.func.grad(lambda t, s: call(t, s).sin().sum(), (0, 1))
    leaves = [table[0].clone().requires_grad_(), sink[0].clone().requires_grad_()]
    expected = torch.autograd.grad(call(*leaves).sin().sum(), leaves)
    for a, b in zip(of_sum(table[0], sink[0]), expected, strict=True):
        assert_close(a, b, 1e-5)


def test_the_reference_differentiates_the_extras_twice():
    case = Case(1, 2, 1, 4, 5, 3, 2)
    x, options = inputs(case), extras_of(case, "distance_bias sink")

    def call(*leaves: Tensor) -> Any:
        return sr.attention(
            *leaves[:3], sr.Causal(), softcap=1.3, distance_bias=leaves[3], sink=leaves[4],
            dropout_p=0.3, dropout_seed=2, backend="reference", return_lse=True,
        )  # fmt: skip

    assert torch.autograd.gradgradcheck(call, (*x, *options.values()))


@pytest.mark.parametrize("backend", ["gather", "cpu"])
def test_a_table_that_learns_nothing_changes_no_other_gradient(backend: str):
    leaves = leaves_of(torch.float32)
    call = {"sink": leaves[4], "softcap": 1.5, "backend": backend}
    fixed = sr.attention(*leaves[:3], sr.Causal(), distance_bias=leaves[3].detach(), **call)
    learned = sr.attention(*leaves[:3], sr.Causal(), distance_bias=leaves[3], **call)
    others = [*leaves[:3], leaves[4]]
    for a, b in zip(gradients([fixed], others), gradients([learned], others), strict=True):
        assert torch.equal(a, b)


def test_flops_of_extras_are_those_of_the_pattern():
    from torch.utils.flop_counter import FlopCounterMode

    totals = []
    for options in ({}, extras_of(CASE, ALL, torch.float32)):
        with FlopCounterMode(display=False) as counter:
            out = sr.attention(*inputs(CASE, torch.float32), sr.Causal(), **options)
            out.sum().backward()
        totals.append(counter.get_total_flops())
    assert totals[0] == totals[1] > 0


def watched_by(name: str, call: Any) -> list[str]:
    """Names of the operators that a watcher of torch's sees in a call."""
    from torch.utils._python_dispatch import TorchDispatchMode

    seen: list[str] = []
    if name == "dispatch mode":

        class Watch(TorchDispatchMode):
            def __torch_dispatch__(self, func, types, args=(), kwargs=None):
                seen.append(str(func))
                return func(*args, **(kwargs or {}))

        with Watch():
            call()
    elif name == "profiler":
        with torch.profiler.profile() as profile:
            call()
        seen += [event.name for event in profile.events()]
    elif name == "make_fx":
        from torch.fx.experimental.proxy_tensor import make_fx

        graph = make_fx(call)()
        seen += [str(node.target) for node in graph.graph.nodes]
    return seen


@pytest.mark.parametrize("watcher", ["dispatch mode", "profiler", "make_fx"])
@pytest.mark.parametrize("backend", ["gather", "cpu"])
def test_watchers_see_the_operator_where_no_gradient_is_wanted(backend: str, watcher: str):
    x = inputs(CASE, torch.float32, requires_grad=False)
    sr.layout_cache.clear()
    seen = watched_by(watcher, lambda: sr.attention(*x, sr.Causal(), backend=backend))
    assert any("sparsering" in name and name.split("::")[-1].split(".")[-2:-1] != ["forward"]
               and "attention" in name for name in seen)  # fmt: skip


@pytest.mark.parametrize("backend", ["gather", "cpu"])
def test_a_transform_leaves_no_tensor_of_its_own_in_a_layout(backend: str):
    x = inputs(CASE, torch.float32, requires_grad=False)
    sr.layout_cache.clear()
    call = lambda *x: sr.attention(*x, sr.Causal(), backend=backend)  # noqa: E731
    got = torch.func.functionalize(call)(*x)
    assert torch.equal(call(*x), got)


def test_lazily_negated_tensors_are_what_they_stand_for():
    query, key, value = inputs(CASE, torch.float32, requires_grad=False)
    negated = torch._neg_view(query)
    assert negated.is_neg()
    assert torch.equal(
        sr.attention(negated, key, value, sr.Causal(), backend="cpu"),
        sr.attention(-query, key, value, sr.Causal(), backend="cpu"),
    )


def test_calls_that_nothing_watches_skip_the_operator(monkeypatch: pytest.MonkeyPatch):
    from sparsering.route import run as ops

    def never(**call: Any) -> None:
        raise AssertionError("the operator ran")

    monkeypatch.setattr(ops, "attention_op", never)
    x = inputs(CASE, torch.float32, requires_grad=False)
    sr.attention(*x, sr.Causal())
    with torch.no_grad():
        sr.attention(*(t.requires_grad_() for t in x), sr.Causal())
    with pytest.raises(AssertionError, match="the operator ran"):
        sr.attention(*x, sr.Causal())


def test_an_int_seed_that_changes_is_not_compiled_for_again():
    torch.compiler.reset()
    graphs = []
    compiled = torch.compile(
        call_with_all, fullgraph=True, backend=lambda graph, _: graphs.append(graph) or graph
    )
    leaves = leaves_of()
    for seed in (1, 2, 2**62, -5, 0):
        for found, expected in zip(
            compiled(*leaves, seed), call_with_all(*leaves, seed), strict=True
        ):
            assert torch.equal(found, expected)
    assert len(graphs) == 2  # one for the first seed, one for all others


def test_vmap_of_calls_of_one_batch_entry_drops_as_each_would():
    x = torch.randn(3, 3, 1, 4, 30, 16)

    def call(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return sr.attention(query, key, value, sr.Causal(), dropout_p=0.3, dropout_seed=3)

    got = torch.func.vmap(call)(*x)
    for i in range(3):
        assert_close(got[i], call(*(t[i] for t in x)), 1e-6)


@pytest.mark.parametrize("threads_of_call", [1, 2])
def test_the_same_call_has_the_same_bits(threads_of_call: int, threads: None):
    torch.set_num_threads(threads_of_call)
    leaves = leaves_of(torch.float32)
    runs = []
    for _ in range(2):
        got = call_with_all(*leaves)
        runs.append([*got, *gradients(got, leaves)])
    for a, b in zip(*runs, strict=True):
        assert torch.equal(a, b)
