"""Lengths that come as tensors are data of compiled functions: one graph serves all of a shape."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.thinned import slow_except, thinned
from torch import Tensor
from torch._dynamo.utils import counters
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import checkpoint

import sparsering as sr

TOKENS, DOCUMENTS = 48, 4

# name: (whether lengths are of each batch entry, the pattern of lengths and parents)
PATTERNS: dict[str, tuple[bool, Callable[[Any, Any], sr.Pattern]]] = {
    "documents": (False, lambda n, parents: sr.Documents(n)),
    "of each entry": (True, lambda n, parents: sr.Causal() & sr.Documents(n)),
    "blocks": (False, lambda n, parents: sr.BlockCausal(n)),
    "blocks of each entry": (True, lambda n, parents: sr.BlockCausal(n) & sr.SlidingWindow(30, 9)),
    "packed LongNet": (
        False,
        lambda n, parents: sr.Packed(n, sr.LongNet((8, 16), (1, 2)) & sr.Causal()),
    ),
    "or": (
        False,
        lambda n, parents: sr.Causal() & (sr.Documents(n) | sr.GlobalTokens(2, rows=False)),
    ),
    "plus": (
        True,
        lambda n, parents: (sr.Causal() & sr.Documents(n)) + sr.Packed(n, sr.SlidingWindow(3)),
    ),
    "tree": (False, lambda n, parents: sr.Tree(n, parents)),
    "trees of a mixture": (
        False,
        lambda n, parents: sr.Tree(n, parents, sr.LongNet((8, 16), (1, 2)) & sr.Causal()),
    ),
    "tree of each entry": (
        True,
        lambda n, parents: sr.Tree(n, parents, sr.SlidingWindow(7)),
    ),
}


def drawn(seed: int, batch: int | None = None) -> tuple[Tensor, Tensor]:
    """Returns lengths of documents, some of them 0, and parents of as many nodes."""
    generator = torch.Generator().manual_seed(seed)
    shape = (() if batch is None else (batch,)) + (DOCUMENTS - 1,)
    cuts = torch.randint(TOKENS + 1, shape, generator=generator).sort().values
    edges = (
        torch.nn.functional.pad(cuts, (1, 0)),
        torch.nn.functional.pad(cuts, (0, 1), value=TOKENS),
    )
    parents = [
        torch.randint(-1, max(i, 0), (*shape[:-1], 1), generator=generator)
        for i in range(DOCUMENTS)
    ]
    return edges[1] - edges[0], torch.cat(parents, -1)


def qkv(backend: str, seed: int) -> list[Tensor]:
    dtype = torch.float32 if backend == "cpu" else torch.float64
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randn(2, 2, TOKENS, 8, dtype=dtype, generator=generator).requires_grad_()
        for _ in range(3)
    ]


def as_lists(arguments: Any) -> list[Any]:
    return [x.tolist() for x in arguments]


def one_graph(
    call: Callable[..., Tensor],
    arguments: Callable[[int], tuple[Any, ...]],
    backend: str = "cpu",
    steps: int = 4,
    plain: Callable[[Any], Any] = as_lists,
    **compile_options: Any,
) -> None:
    """Asserts equal bits of a compiled call and of the same call with ints, in one graph."""
    torch._dynamo.reset()
    counters.clear()
    compiled = torch.compile(call, backend="aot_eager", fullgraph=True, **compile_options)
    for seed in range(steps):
        inputs, given = qkv(backend, seed), arguments(seed)
        out, expected = compiled(*inputs, *given), call(*inputs, *plain(given))
        weight = torch.randn_like(out)
        grads, wanted = (torch.autograd.grad(x, inputs, weight) for x in (out, expected))
        assert torch.equal(out, expected)
        assert all(map(torch.equal, grads, wanted))
    assert counters["stats"]["unique_graphs"] == 1


BACKENDS = ("cpu", "gather", "reference")


@pytest.mark.parametrize(("name", "backend"), thinned(6, PATTERNS, BACKENDS))
def test_one_graph_serves_all_lengths(name, backend):
    of_entries, pattern = PATTERNS[name]
    one_graph(
        lambda q, k, v, *given: sr.attention(q, k, v, pattern(*given), backend=backend),
        lambda seed: drawn(seed, 2 if of_entries else None),
        backend,
    )


@pytest.mark.parametrize("name", slow_except(["of each entry", "packed LongNet", "tree"], PATTERNS))
def test_a_pattern_made_outside_is_data_too(name):
    of_entries, pattern = PATTERNS[name]
    one_graph(
        lambda q, k, v, mask: sr.attention(q, k, v, mask),
        lambda seed: (pattern(*drawn(seed, 2 if of_entries else None)),),
        plain=lambda given: given,
    )


OPTIONS: dict[str, Any] = {
    "softcap": 4.0,
    "sink": torch.tensor([0.5, -1.0]),
    "distance_bias": torch.linspace(-1, 1, 18).view(2, 9),
    "dropout_p": 0.3,
    "block_size": 32,
}


@pytest.mark.parametrize(
    ("name", "backend"), thinned(3, ("packed LongNet", "plus", "tree"), BACKENDS)
)
def test_with_every_option(name, backend):
    of_entries, pattern = PATTERNS[name]
    options = {
        name: x.double() if isinstance(x, Tensor) and backend != "cpu" else x
        for name, x in OPTIONS.items()
    }
    one_graph(
        lambda q, k, v, *given: sr.attention(
            q, k, v, pattern(*given), backend=backend, dropout_seed=7, **options
        ),
        lambda seed: drawn(seed, 2 if of_entries else None),
        backend,
    )


@pytest.mark.parametrize("dynamic", slow_except([True], [True, None]))
def test_key_padding_with_checkpointing(dynamic):
    def call(q: Tensor, k: Tensor, v: Tensor, lengths: Any) -> Tensor:
        def inner(*inputs: Tensor) -> Tensor:
            return sr.attention(*inputs, sr.Causal() & sr.KeyPadding(lengths))

        return checkpoint(inner, q, k, v, use_reentrant=False)

    one_graph(call, lambda seed: (torch.tensor([seed, TOKENS - seed]),), dynamic=dynamic)


@pytest.mark.parametrize("backend", slow_except(["cpu"], BACKENDS))
def test_varlen_of_tensors(backend):
    pattern = sr.LongNet((8, 16), (1, 2)) & sr.Causal()

    def call(q: Tensor, k: Tensor, v: Tensor, cu_q: Any, cu_k: Any) -> Tensor:
        rows = (x[0].transpose(0, 1) for x in (q, k, v))
        options = {"dropout_p": 0.2, "dropout_seed": 3, "backend": backend}
        return sr.attention_varlen(*rows, cu_q, cu_k, pattern, **options)

    def arguments(seed: int) -> tuple[Tensor, ...]:
        lengths = drawn(seed)[0], drawn(seed + 50)[0]
        return tuple(torch.nn.functional.pad(x.cumsum(0), (1, 0)).int() for x in lengths)

    one_graph(call, arguments, backend)


@pytest.mark.slow
def test_a_thousand_steps_are_one_graph():
    one_graph(
        lambda q, k, v, n: sr.attention(q, k, v, sr.Causal() & sr.Documents(n)),
        lambda seed: drawn(seed)[:1],
        steps=1000,
    )


@pytest.mark.parametrize("name", slow_except(["of each entry"], PATTERNS))
def test_a_second_tuple_compiles_again_without_an_error(name):
    of_entries, pattern = PATTERNS[name]
    torch._dynamo.reset()
    counters.clear()
    compiled = torch.compile(
        lambda q, k, v, *given: sr.attention(q, k, v, pattern(*given)),
        backend="aot_eager",
        fullgraph=True,
    )
    for seed in range(3):
        given = as_lists(drawn(seed, 2 if of_entries else None))
        inputs = qkv("cpu", seed)
        expected = sr.attention(*inputs, pattern(*given))
        assert torch.equal(compiled(*inputs, *given), expected)
    assert counters["stats"]["unique_graphs"] == 3


@pytest.mark.parametrize("strict", slow_except([False], [False, True]))
def test_exported_with_a_dynamic_length(strict):
    class Model(torch.nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor, lengths: Any) -> Tensor:
            return sr.attention(q, k, v, sr.Packed(lengths, sr.Causal() & sr.SlidingWindow(5)))

    tokens = torch.export.Dim("tokens", min=2, max=4096)
    documents = torch.export.Dim("documents", min=2, max=64)
    program = torch.export.export(
        Model(),
        (*qkv("cpu", 0), torch.tensor([30, 18])),
        dynamic_shapes=({2: tokens}, {2: tokens}, {2: tokens}, {0: documents}),
        strict=strict,
    )
    for lengths in ([10, 38], [1, 2, 97], [0, 33, 0, 0]):
        inputs = [torch.randn(2, 2, sum(lengths), 8) for _ in range(3)]
        out = program.module()(*inputs, torch.tensor(lengths))
        assert torch.equal(out, Model()(*inputs, lengths))


def test_a_tensor_is_copied_and_equals_its_ints():
    lengths = torch.tensor([20, 28])
    pattern = sr.Causal() & sr.Documents(lengths)
    lengths[0] = 28
    assert pattern == sr.Causal() & sr.Documents((20, 28))
    assert str(pattern) == "Causal() & Documents((20, 28))"
    assert hash(pattern) == hash(sr.Causal() & sr.Documents((20, 28)))


@pytest.mark.parametrize(
    ("lengths", "message"),
    [
        (torch.tensor([-1, 49]), "at least 0, got -1"),
        (torch.tensor([20, 20]), "must sum to the key length 48, got 40"),
        (torch.tensor([[24, 24]] * 3), "3 batch entries, got a query of 2"),
        (torch.tensor([24.0, 24.0]), r"int64 tensor \[n\] or \[B, n\], got torch.float32 \(2,\)"),
        (torch.tensor(48), r"int64 tensor \[n\] or \[B, n\], got torch.int64 \(\)"),
    ],
)
def test_wrong_lengths_are_told_in_a_compiled_call(lengths, message):
    torch._dynamo.reset()
    compiled = torch.compile(
        lambda q, k, v, n: sr.attention(q, k, v, sr.Documents(n)), backend="eager", fullgraph=True
    )
    with pytest.raises((ValueError, torch._dynamo.exc.Unsupported), match=message):
        compiled(*qkv("cpu", 0), lengths)


@pytest.mark.parametrize("edges", [[5, 20, 53], [0, 20, 49], [0, 50, 48]])
def test_wrong_cumulative_lengths_are_told_in_a_compiled_call(edges):
    torch._dynamo.reset()
    compiled = torch.compile(
        lambda x, cu: sr.attention_varlen(x, x, x, cu, cu), backend="eager", fullgraph=True
    )
    with pytest.raises(ValueError, match=r"the tensors must have|at least 0"):
        compiled(torch.randn(TOKENS, 2, 8), torch.tensor(edges))


def test_distances_of_two_trees_are_refused_in_a_compiled_call():
    torch._dynamo.reset()

    def call(q: Tensor, k: Tensor, v: Tensor, n: Tensor, parents: Tensor) -> Tensor:
        pattern = sr.Tree(n, parents) + sr.Tree(n, parents * 0 - 1)
        return sr.attention(q, k, v, pattern, distance_bias=OPTIONS["distance_bias"])

    compiled = torch.compile(call, backend="eager", fullgraph=True)
    with pytest.raises(ValueError, match="the same one Tree in every branch"):
        compiled(*qkv("cpu", 0), torch.tensor([20, 28]), torch.tensor([-1, 0]))


TOKENS_OF_CALLS = torch.randn(2, 2, TOKENS, 8)
SELECTIONS = [
    torch.randint(3, (3, 2), generator=torch.Generator().manual_seed(i)) for i in range(3)
]


def attend(pattern: sr.Pattern, **options: Any) -> Tensor:
    return sr.attention(*[TOKENS_OF_CALLS] * 3, pattern, **options)


def same_document(lengths: Tensor) -> Callable[..., Tensor]:
    ids = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
    return lambda b, h, q, k: ids[q] == ids[k]


# What docs/concepts.md says is new in each of three calls: (the call, its arguments)
CHANGES: dict[str, tuple[Callable[[Any], Tensor], list[Any]]] = {
    "lengths in a tensor, of one shape": (
        lambda n: attend(sr.Documents(n)),
        [drawn(seed)[0] for seed in range(3)],
    ),
    "the number of lengths in a tensor": (
        lambda n: attend(sr.Documents(n)),
        [torch.tensor([1] * n + [TOKENS - n]) for n in (1, 2, 3)],
    ),
    "lengths as ints": (
        lambda n: attend(sr.Documents(n)),
        [drawn(seed)[0].tolist() for seed in range(3)],
    ),
    "a `KeyMask`": (
        lambda valid: attend(sr.KeyMask(valid)),
        [torch.arange(TOKENS) > n for n in range(3)],
    ),
    "the indices of `SelectedBlocks`": (
        lambda indices: attend(sr.SelectedBlocks(indices, 16)),
        SELECTIONS,
    ),
    "numbers of a pattern, such as a window": (
        lambda left: attend(sr.SlidingWindow(left)),
        [3, 4, 5],
    ),
    "ids that a `from_mask_mod` function reads, made outside": (
        lambda pattern: attend(pattern),
        [sr.from_mask_mod(same_document(drawn(seed)[0])) for seed in range(3)],
    ),
    "the number of tokens": (
        lambda x: sr.attention(x, x, x, sr.Causal()),
        [TOKENS_OF_CALLS[:, :, :n] for n in (40, 41, 42)],
    ),
    "numbers of a call, such as `softcap`": (
        lambda number: attend(sr.Causal(), softcap=number),
        [3.0, 4.0, 5.0],
    ),
    "`dropout_seed`, an int": (
        lambda seed: attend(sr.Causal(), dropout_p=0.5, dropout_seed=seed),
        [3, 4, 5],
    ),
    "`dropout_seed`, a tensor": (
        lambda seed: attend(sr.Causal(), dropout_p=0.5, dropout_seed=seed),
        [torch.tensor(n) for n in (3, 4, 5)],
    ),
}


def test_the_table_of_graphs_in_the_docs_is_true():
    text = (Path(__file__).parents[2] / "docs" / "concepts.md").read_text()
    rows = text.split("| new in each call | graphs of three calls |")[1].split("\n\n")[0]
    told = dict(line.strip("| ").split(" | ") for line in rows.splitlines()[2:])
    found = {}
    for name, (call, arguments) in CHANGES.items():
        torch._dynamo.reset()
        counters.clear()
        compiled = torch.compile(call, backend="eager", fullgraph=True)
        for argument in arguments:
            assert torch.equal(compiled(argument), call(argument))
        found[name] = str(counters["stats"]["unique_graphs"])
    assert told == found


def test_a_mask_mod_made_in_a_graph_names_what_a_graph_takes_as_data():
    def call(x: Tensor, ids: Tensor) -> Tensor:
        return sr.attention(x, x, x, sr.from_mask_mod(lambda b, h, q, k: ids[q] == ids[k]))

    ids = torch.arange(TOKENS) // 5
    torch._dynamo.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported, match=r"pass what changes as data: Packed"):
        torch.compile(call, backend="eager", fullgraph=True)(TOKENS_OF_CALLS, ids)
    torch._dynamo.reset()
    lengths = ids.unique_consecutive(return_counts=True)[1]
    broken = torch.compile(call, backend="eager")(TOKENS_OF_CALLS, ids)
    torch.testing.assert_close(broken, attend(sr.Documents(lengths)))


TRACED: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "documents": lambda q, n: sr.attention(q, q, q, sr.Documents(n)),
    "padding": lambda q, n: sr.attention(q, q, q, sr.Causal() & sr.KeyPadding(n[:1])),
    "tree": lambda q, n: sr.attention(q, q, q, sr.Tree(n, n * 0 - 1)),
    "varlen": lambda q, n: sr.attention_varlen(
        *[q[0].transpose(0, 1)] * 3, *[torch.nn.functional.pad(n.cumsum(0), (1, 0))] * 2
    ),
}


@pytest.mark.parametrize("mode", ["real", "fake", "symbolic", "jit"])
@pytest.mark.parametrize("name", TRACED)
@pytest.mark.filterwarnings("ignore")  # torch.jit.trace warns of itself
def test_other_tracers_do_not_keep_the_numbers(name, mode):
    query, call = torch.randn(1, 2, TOKENS, 8), TRACED[name]
    first, second = torch.tensor([20, 28]), torch.tensor([5, 43])
    if mode == "jit":
        traced = torch.jit.trace(call, (query, first), check_trace=False)
    else:
        traced = make_fx(call, tracing_mode=mode)(query, first)
    expected = call(query, second)
    assert torch.equal(traced(query, second), expected)
    assert not torch.equal(expected, call(query, first))
