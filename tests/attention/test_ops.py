"""The operator boundary: torch.library's own checks, torch.compile, autocast, checkpointing, FLOPs.

What runs in a process of its own proves what importing sparsering does and does not load.
"""

import subprocess
import sys
import textwrap
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.thinned import thinned
from oracles.attention_oracle import (
    PATTERNS,
    Case,
    assert_close,
    dense_counts,
    gradients,
    inputs,
)
from oracles.kinds import random_table
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import sparsering as sr
from sparsering.patterns.selected import selections_of

CASE = Case(2, 4, 2, 40, 40, 8, 6)
LONGNET = sr.LongNet((16, 32), (1, 2)) & sr.Causal()


def operator_arguments(
    case: Case,
    pattern: sr.Pattern,
    dtype: torch.dtype,
    with_bias: bool,
    block_size: int | None = 16,
    requires_grad: bool = True,
    backend: str = "gather",
    with_extras: bool = False,
) -> tuple[Any, ...]:
    """Arguments of torch.ops.sparsering.attention."""
    bias, slots, extras, dropout_p = None, None, (None, None, None), None
    if with_extras:
        table = torch.randn(case.batch, case.num_heads, 21, requires_grad=requires_grad)
        sink = torch.randn(case.batch, case.num_heads, 1, requires_grad=requires_grad)
        extras, dropout_p = (table, sink, torch.tensor([[5], [6]])), 0.2
    if with_bias and (selections := selections_of(pattern)):
        shape = case.batch, case.num_heads, selections[0].indices[0, 0].numel()
        slots = torch.randn(shape, requires_grad=requires_grad)
    elif with_bias:
        blocks = pattern.layout(**case.heads, block_size=16).num_blocks
        bias = torch.randn(case.batch, case.num_heads, blocks, requires_grad=requires_grad)
    q_start = case.kv_len - case.q_len
    return (
        *inputs(case, dtype, requires_grad),
        bias,
        slots,
        *extras,
        list(pattern.tensors),
        pattern.expression,
        0.3,
        2.0 if with_extras else None,
        dropout_p,
        q_start,
        block_size,
        backend,
    )


OPCHECKED = {
    "longnet": (CASE, LONGNET, torch.float32, False, None),
    "float64 with bias": (CASE, LONGNET, torch.float64, True),
    "bfloat16": (CASE, sr.SlidingWindow(9), torch.bfloat16, False),
    "blocks of each batch entry": (
        CASE,
        sr.Blocks(random_table(2, 4, 3, 3), 16),
        torch.float32,
        True,
    ),
    "slots": (
        CASE,
        sr.SelectedBlocks(torch.randint(-1, 3, (2, 2, 10, 3)), 16, 4) & sr.Causal(),
        torch.float32,
        True,
    ),
    "strided": (
        Case(1, 2, 1, 5, 40, 8, 6, arrange="tokens before heads"),
        sr.KeyPadding((30,)),
        torch.float32,
        False,
    ),
}


OPCHECKED["every extra, keys masked"] = (
    CASE,
    LONGNET & sr.KeyMask(torch.arange(40) % 3 > 0),
    torch.float32,
    False,
)

BACKENDS_OPCHECKED = [(name, "gather") for name in OPCHECKED] + [
    (name, "cpu") for name, case in OPCHECKED.items() if torch.float64 not in case
]


def opchecked_arguments(name: str, backend: str, requires_grad: bool) -> tuple[Any, ...]:
    case, pattern, dtype, with_bias, *rest = OPCHECKED[name]
    rest = [*(rest or [16]), requires_grad, backend, "extra" in name]
    return operator_arguments(case, pattern, dtype, with_bias, *rest)


@pytest.mark.parametrize("called", thinned(2, BACKENDS_OPCHECKED), ids=str)
def test_attention_passes_opcheck(called):
    args = opchecked_arguments(*called, requires_grad=True)
    torch.library.opcheck(torch.ops.sparsering.attention.default, args)


@pytest.mark.parametrize("called", thinned(3, BACKENDS_OPCHECKED), ids=str)
def test_attention_backward_passes_opcheck(called):
    args = opchecked_arguments(*called, requires_grad=False)
    out, lse = torch.ops.sparsering.attention(*args)
    grads = (torch.randn_like(out), torch.randn_like(lse))
    wanted = [isinstance(x, torch.Tensor) and x.is_floating_point() for x in args[:8]]
    args = (*args, out, lse, *grads, wanted)
    torch.library.opcheck(torch.ops.sparsering.attention_backward.default, args)


@pytest.mark.parametrize("called", thinned(3, BACKENDS_OPCHECKED), ids=str)
def test_operators_of_second_order_pass_opcheck(called):
    args = opchecked_arguments(*called, requires_grad=False)
    out, lse = torch.ops.sparsering.attention(*args)
    wanted = [isinstance(x, torch.Tensor) and x.is_floating_point() for x in args[:8]]
    moves = [torch.randn_like(x) if w else None for x, w in zip(args, wanted, strict=False)]
    ops = torch.ops.sparsering
    torch.library.opcheck(ops.attention_tangent.default, (*args, out, lse, *moves))
    grads = (torch.randn_like(out), torch.randn_like(lse))
    of_grads = (torch.randn_like(out), None)
    args = (*args, out, lse, *grads, *moves, *of_grads, wanted)
    torch.library.opcheck(ops.attention_backward_tangent.default, args)


# torch.compile

Function = Callable[..., Any]


def longnet_closed_over(query: Tensor, key: Tensor, value: Tensor) -> Any:
    return sr.attention(query, key, value, LONGNET, return_lse=True)


def pattern_made_inside(query: Tensor, key: Tensor, value: Tensor) -> Any:
    pattern = (sr.SlidingWindow(9) | sr.GlobalTokens(3)) & sr.Causal()
    return sr.attention(query, key, value, pattern, return_lse=True)


def padding_made_inside(query: Tensor, key: Tensor, value: Tensor) -> Any:
    pattern = sr.Causal() + sr.KeyPadding((30, 7)) + sr.LongNet((8, 16), (1, 2))
    return sr.attention(query, key, value, pattern, scale=0.5, block_size=32, return_lse=True)


TABLE = sr.Blocks(random_table(3, 3), 16)


def table_closed_over(query: Tensor, key: Tensor, value: Tensor) -> Any:
    return sr.attention(query, key, value, TABLE & sr.Causal(), return_lse=True)


def reference_inside(query: Tensor, key: Tensor, value: Tensor) -> Any:
    return sr.attention(query, key, value, LONGNET, backend="reference", return_lse=True)


def between_other_operations(query: Tensor, key: Tensor, value: Tensor) -> Any:
    out = sr.attention(query.sin(), key.mul(2), value, LONGNET)
    return out.relu(), sr.merge_attention([out, out], [out[..., 0], out[..., 1]])[0]


COMPILED = (
    *(longnet_closed_over, pattern_made_inside, padding_made_inside, table_closed_over),
    *(reference_inside, between_other_operations),
)


@pytest.fixture(autouse=True)
def nothing_compiled():
    torch.compiler.reset()
    yield
    torch.compiler.reset()


@pytest.mark.parametrize("function", thinned(2, COMPILED), ids=lambda f: f.__name__)
def test_compiles_to_one_graph_with_the_same_result(function):
    args = inputs(CASE)
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    got, expected = compiled(*args), function(*args)
    for a, b in zip(got, expected, strict=True):
        assert_close(a.detach(), b.detach(), 1e-13)
    for a, b in zip(gradients(got, args), gradients(expected, args), strict=True):
        assert_close(a, b, 1e-12)


def test_a_compiled_call_is_one_operator_and_no_graph_break():
    args = inputs(CASE)
    explanation = torch._dynamo.explain(longnet_closed_over)(*args)
    assert (explanation.graph_count, explanation.graph_break_count) == (1, 0)
    targets = [n.target for g in explanation.graphs for n in g.graph.nodes]
    names = [str(target) for target in targets]
    assert sum("sparsering.attention" in name for name in names) == 1


def test_compiles_with_a_block_bias_and_its_gradient():
    args = inputs(CASE)
    blocks = LONGNET.layout(**CASE.heads, block_size=16).num_blocks
    bias = torch.randn(1, 4, blocks, dtype=torch.float64, requires_grad=True)

    def function(*args: Tensor) -> Tensor:
        return sr.attention(*args[:3], LONGNET, block_size=16, block_bias=args[3])

    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    wrt = (*args, bias)
    got, expected = compiled(*wrt), function(*wrt)
    assert_close(got.detach(), expected.detach(), 1e-13)
    for a, b in zip(gradients([got], wrt), gradients([expected], wrt), strict=True):
        assert_close(a, b, 1e-12)


def test_compiles_with_a_table_that_is_an_input():
    def function(query: Tensor, key: Tensor, value: Tensor, table: Tensor) -> Tensor:
        return sr.attention(query, key, value, sr.Blocks(table, 16))

    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    args = inputs(CASE)
    for seed in range(3):
        table = torch.rand(3, 3, generator=torch.Generator().manual_seed(seed)) < 0.5
        got, expected = compiled(*args, table), function(*args, table)
        assert_close(got.detach(), expected.detach(), 1e-13)


def test_one_compiled_graph_serves_all_lengths():
    compilations = 0

    def count(graph: torch.fx.GraphModule, example_inputs: list[Any]) -> Any:
        nonlocal compilations
        compilations += 1
        return graph.forward

    compiled = torch.compile(longnet_closed_over, fullgraph=True, dynamic=True, backend=count)
    for length, queries in ((40, 40), (56, 56), (73, 73), (131, 131)):
        args = inputs(Case(2, 4, 2, queries, length, 8, 6))
        for a, b in zip(compiled(*args), longnet_closed_over(*args), strict=True):
            assert_close(a.detach(), b.detach(), 1e-13)
    assert compilations == 1


def test_dynamic_lengths_through_forward_and_backward():
    compiled = torch.compile(longnet_closed_over, fullgraph=True, dynamic=True, backend="aot_eager")
    for length in (40, 70, 33):
        args = inputs(Case(1, 2, 1, length, length, 8, 6))
        got, expected = compiled(*args), longnet_closed_over(*args)
        for a, b in zip(gradients(got, args), gradients(expected, args), strict=True):
            assert_close(a, b, 1e-12)


@pytest.mark.slow
def test_compiles_with_inductor():
    args = inputs(CASE)
    compiled = torch.compile(between_other_operations, fullgraph=True)
    got, expected = compiled(*args), between_other_operations(*args)
    for a, b in zip(got, expected, strict=True):
        assert_close(a.detach(), b.detach(), 1e-12)
    for a, b in zip(gradients(got, args), gradients(expected, args), strict=True):
        assert_close(a, b, 1e-11)


# Autocast


@pytest.mark.parametrize("backend", ["gather", "reference"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_is_a_call_with_inputs_of_that_dtype(dtype, backend):
    args = inputs(CASE, torch.float32)
    with torch.autocast("cpu", dtype):
        out, lse = sr.attention(*args, LONGNET, return_lse=True, backend=backend)
    assert (out.dtype, lse.dtype) == (dtype, torch.float32)
    low = [x.to(dtype) for x in args]
    expected = sr.attention(*low, LONGNET, return_lse=True, backend=backend)
    assert torch.equal(out, expected[0]) and torch.equal(lse, expected[1])
    got, want = gradients((out, lse), args), gradients(expected, args)
    for a, b in zip(got, want, strict=True):
        assert a.dtype == torch.float32
        assert torch.equal(a, b)


def test_autocast_takes_inputs_of_several_dtypes():
    query, key, value = inputs(CASE, torch.float32)
    low = value.detach().bfloat16().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        out, _ = sr.attention(query, key, low, LONGNET, return_lse=True)
    expected = sr.attention(query.bfloat16(), key.bfloat16(), low, LONGNET)
    assert torch.equal(out, expected)
    grads = gradients([out], (query, key, low))
    assert [grad.dtype for grad in grads] == [torch.float32, torch.float32, torch.bfloat16]


def test_autocast_leaves_float64_alone():
    args = inputs(CASE)
    with torch.autocast("cpu", torch.bfloat16):
        out, lse = sr.attention(*args, LONGNET, return_lse=True)
    expected = sr.attention(*args, LONGNET, return_lse=True)
    assert torch.equal(out, expected[0]) and torch.equal(lse, expected[1])


def test_autocast_of_a_layer_and_backward_outside_of_it():
    project = torch.nn.Linear(16, 48)
    x = torch.randn(2, 40, 16, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        query, key, value = (
            y.unflatten(-1, (2, 8)).transpose(1, 2) for y in project(x).chunk(3, -1)
        )
        out, lse = sr.attention(query, key, value, sr.Causal(), return_lse=True)
    assert (out.dtype, lse.dtype) == (torch.bfloat16, torch.float32)
    (out.float().square().mean() + lse.mean()).backward()
    assert x.grad is not None and x.grad.dtype == torch.float32
    assert project.weight.grad.isfinite().all() and project.weight.grad.abs().max() > 0


def test_compiled_autocast_is_eager_autocast():
    args = inputs(CASE, torch.float32)
    compiled = torch.compile(longnet_closed_over, fullgraph=True, backend="aot_eager")
    with torch.autocast("cpu", torch.bfloat16):
        got, expected = compiled(*args), longnet_closed_over(*args)
    for a, b in zip(got, expected, strict=True):
        assert a.dtype == b.dtype and torch.equal(a, b)


# Checkpointing, functions of torch, FLOPs


def gradients_of_checkpoint(args: tuple[Tensor, ...], use_reentrant: bool) -> list[Tensor]:
    """Gradients by `.backward`, the only way that reentrant checkpoints support."""
    out, lse = checkpoint(longnet_closed_over, *args, use_reentrant=use_reentrant)
    generator = torch.Generator().manual_seed(1)
    grads = [
        torch.randn(x.shape, generator=generator, dtype=torch.float64).float() for x in (out, lse)
    ]
    torch.autograd.backward((out, lse), grads)
    return [x.grad for x in args]


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpointing_gives_the_same_gradients(use_reentrant):
    args = inputs(CASE, torch.float32)
    expected = gradients(longnet_closed_over(*args), args)
    got = gradients_of_checkpoint(args, use_reentrant)
    for a, b in zip(got, expected, strict=True):
        assert torch.equal(a, b)


def test_a_parameter_reaches_its_gradient_through_a_module():
    class Layer(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.project = torch.nn.Linear(8, 24, dtype=torch.float64)

        def forward(self, x: Tensor, backend: str) -> Tensor:
            query, key, value = self.project(x).chunk(3, -1)
            return sr.attention(query, key, value, LONGNET, backend=backend)

    layer, x = Layer(), torch.randn(2, 2, 40, 8, dtype=torch.float64)
    got = gradients([layer(x, "gather")], list(layer.parameters()))
    expected = gradients([layer(x, "reference")], list(layer.parameters()))
    for a, b in zip(got, expected, strict=True):
        assert_close(a, b, 1e-11)


@pytest.mark.parametrize(
    "name",
    ["full", "longnet", "mixture with overlap", "key padding", "blocks of each head", "nothing"],
)
def test_flops_are_those_of_the_pattern_s_exact_pairs(name):
    case = CASE
    pattern = PATTERNS[name](case)
    pairs = dense_counts(pattern, case).sum().item()  # of all batch entries and query heads
    args = inputs(case, torch.float32)
    with FlopCounterMode(display=False) as forward:
        out, lse = sr.attention(*args, pattern, return_lse=True)
    assert forward.get_total_flops() == 2 * pairs * (case.head_dim + case.value_dim)
    with FlopCounterMode(display=False) as backward:
        torch.autograd.backward((out, lse), (torch.ones_like(out), torch.ones_like(lse)))
    expected = 2 * pairs * (3 * case.head_dim + 2 * case.value_dim)
    assert backward.get_total_flops() == expected


def test_what_keeps_tables_stays_outside_cuda_graphs_of_inductor():
    for name in ("attention", "attention_backward", "slot_mass", "cached_attention"):
        operator = getattr(torch.ops.sparsering, name).default
        assert torch.Tag.cudagraph_unsafe in operator.tags


# Processes of their own

ROOT = Path(__file__).parents[2]
OPTIONAL = ("triton", "matplotlib", "safetensors", "transformers", "hypothesis", "pandas")


def run_fresh(code: str) -> str:
    """Standard output of a program in a new interpreter, its warnings turned to errors."""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", textwrap.dedent(code)],
        capture_output=True,
        text=True,
        cwd=ROOT,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


CALL = """
    import torch
    torch.manual_seed(0)
    query, key, value = (torch.randn(1, 2, 40, 8, requires_grad=True) for _ in range(3))
    pattern = sr.LongNet((16, 32), (1, 2)) & sr.Causal()
    out = sr.attention(query, key, value, pattern)
    out.sum().backward()
    exact = sr.attention(query, key, value, pattern, backend="reference")
    assert (out - exact).abs().max() < 1e-5 and query.grad.abs().max() > 0
"""


DIGEST = """
    import hashlib
    drawn = sr.RandomBlocks(0.5, 16, seed=3)
    rand = sr.attention(query, key, value, drawn, block_size=16)
    results = (out, query.grad, key.grad, value.grad, rand, drawn.to_dense(40).float())
    data = b"".join(bytes(x.detach().contiguous().view(torch.uint8).flatten().tolist())
                    for x in results)
    print(hashlib.sha256(data).hexdigest())
"""


def test_fresh_processes_load_no_optional_package_and_compute_the_same_bits():
    """One process can import all packages, the other none of them."""
    call = textwrap.dedent(CALL) + textwrap.dedent(DIGEST)
    first, *loaded = run_fresh(
        "import sys, torch\nbefore = set(sys.modules)\nimport sparsering as sr\n"
        "heavy = {'torch._dynamo', 'sympy', 'triton', 'transformers', 'matplotlib'}\n"
        "assert not heavy & set(sys.modules), heavy & set(sys.modules)\n"
        "assert set(dir(sr)) == set(sr.__all__)\n"
        "x = torch.zeros(1, 1, 40, 8, requires_grad=True)\n"
        "sr.attention(x, x, x, sr.Causal()).sum().backward()\n"
        "assert not heavy & set(sys.modules), heavy & set(sys.modules)\n"
        + call
        + textwrap.dedent("""
        print(*sorted(set(sys.modules) - before))
        import torch.utils.flop_counter as counter  # it imports Triton
        assert torch.ops.sparsering.attention_backward in counter.flop_registry
        import importlib  # again registers nothing again
        registered = torch.ops.sparsering.attention.default
        importlib.import_module("sparsering.route.operators")
        assert torch.ops.sparsering.attention.default is registered
        from sparsering.cli import build_parser
        build_parser()
        assert not {"matplotlib", "safetensors"} & set(sys.modules)
        """)
    ).split()
    second, *_ = run_fresh(
        textwrap.dedent(f"""
        import sys
        for name in {(*OPTIONAL, "numpy")!r}:
            sys.modules[name] = None  # import raises ImportError
        import warnings
        warnings.simplefilter("error")  # torch warns where it finds no numpy
        import sparsering as sr
        warnings.resetwarnings()
        """)
        + call
        + textwrap.dedent("""
        assert "gather: usable" in sr.explain(query, key, value, pattern)
        print(sr.Causal().layout(64))
        ids = torch.tensor([0, 0, 1])  # what a mask_mod reads is hashed, and what ranks agree on
        sr.from_mask_mod(lambda b, h, q, k: ids[q] == ids[k]).layout(3)
        from sparsering.distributed.agreement import _digest
        _digest(ids, ids[::2], ids[:0], 1.0)
        """)
    ).split()
    tops = {name.partition(".")[0] for name in loaded}
    assert "sparsering" in tops
    # numpy and triton are torch's own choice: it loads them where they are there
    assert not tops & set(OPTIONAL) - {"triton"}
    unneeded = {"models", "training", "cli", "nn", "distributed", "integrations"}
    unneeded |= {"kernels.triton.forward", "kernels.triton.backward", "kernels.tune"}
    assert not {f"sparsering.{name}" for name in unneeded} & set(loaded)
    assert len(first) == 64 and first == second


def test_every_public_name_is_listed_once_and_documented():
    assert len(set(sr.__all__)) == len(sr.__all__)
    for name in sr.__all__:
        assert getattr(sr, name).__doc__, name


class Onlooker(TorchDispatchMode):
    """Sees operators go by, and lets them."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[str] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen.add(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("looks", ["at both", "at forward", "at backward"])
def test_an_operator_that_nobody_looks_at_gives_the_same_bits(looks):
    """Autograd alone sees a function in its place."""
    args, onlooker = inputs(CASE, torch.float32), Onlooker()
    with onlooker if looks != "at backward" else nullcontext():
        out, lse = sr.attention(*args, LONGNET, return_lse=True)
    with onlooker if looks != "at forward" else nullcontext():
        found = torch.autograd.grad(out.sum() + lse.sin().sum(), args)
    if looks != "at backward":
        assert "sparsering.attention.default" in onlooker.seen
    if looks != "at forward":
        assert "sparsering.attention_backward.default" in onlooker.seen
    plain_out, plain_lse = sr.attention(*args, LONGNET, return_lse=True)
    plain = torch.autograd.grad(plain_out.sum() + plain_lse.sin().sum(), args)
    pairs = zip((out, lse, *found), (plain_out, plain_lse, *plain), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)
