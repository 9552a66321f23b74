"""`attention_varlen` against a loop that attends each document alone; what it refuses and says."""

import re
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

import sparsering as sr

CU_Q, CU_K = (0, 5, 5, 45, 46, 110, 120), (0, 9, 20, 20, 60, 130, 180)
DOCUMENTS = len(CU_Q) - 1

PATTERNS = {
    "full": sr.Full(),
    "causal": sr.Causal(),
    "window": sr.SlidingWindow(20, 3),
    "strided window": sr.SlidingWindow(None, 0, 3),
    "longnet": sr.LongNet((16, 64), (1, 3)) & sr.Causal(),
    "sinks": sr.Causal() & (sr.SlidingWindow(7) | sr.GlobalTokens(2)),
    "random": sr.RandomBlocks(0.4, 16),
    "mixture": sr.Causal() + sr.SlidingWindow(9, 9),
}


def inputs(dtype: torch.dtype = torch.float64, grad: bool = True) -> list[Tensor]:
    """Query [Tq, 4, 8], key [Tk, 2, 8], value [Tk, 2, 6]."""
    shapes = (CU_Q[-1], 4, 8), (CU_K[-1], 2, 8), (CU_K[-1], 2, 6)
    return [torch.randn(shape, dtype=dtype).requires_grad_(grad) for shape in shapes]


def one_by_one(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_q: Sequence[int],
    cu_k: Sequence[int],
    pattern: Any,
    **options: Any,
) -> tuple[Tensor, Tensor]:
    """(out, lse) of a call of `attention` for each document, on the reference."""
    outs, lses = [], []
    for rows, keys in zip(pairwise(cu_q), pairwise(cu_k), strict=True):
        document = [x[slice(*of)] for x, of in ((query, rows), (key, keys), (value, keys))]
        document = [x.transpose(0, 1)[None] for x in document]
        out, lse = sr.attention(*document, pattern, return_lse=True, backend="reference", **options)
        outs.append(out[0].transpose(0, 1))
        lses.append(lse[0])
    return torch.cat(outs), torch.cat(lses, 1)


def gradients(results: tuple[Tensor, Tensor], tensors: list[Tensor]) -> list[Tensor]:
    """Returns gradients of a random sum of out and lse, over rows with keys."""
    out, lse = results
    generator = torch.Generator().manual_seed(3)
    weights = [torch.randn(x.shape, generator=generator, dtype=x.dtype) for x in (out, lse)]
    finite = torch.where(lse.isinf(), 0.0, lse)
    return list(
        torch.autograd.grad((out * weights[0]).sum() + (finite * weights[1]).sum(), tensors)
    )


def assert_alike(got: Sequence[Tensor], expected: Sequence[Tensor], tolerance: float) -> None:
    for a, b in zip(got, expected, strict=True):
        assert a.shape == b.shape and a.dtype == b.dtype
        assert torch.equal(a.isinf(), b.isinf())
        assert (torch.nan_to_num(a - b, 0.0).abs() <= tolerance * (1 + b.abs())).all()
        assert not a.isnan().any()


@pytest.mark.parametrize(
    ("backend", "dtype", "tolerance"),
    [("gather", torch.float64, 1e-12), ("cpu", torch.float32, 2e-5)],
)
@pytest.mark.parametrize("name", PATTERNS)
def test_documents_are_attended_one_by_one(
    name: str, backend: str, dtype: torch.dtype, tolerance: float
) -> None:
    tensors = inputs(dtype)
    got = sr.attention_varlen(
        *tensors, CU_Q, CU_K, PATTERNS[name], return_lse=True, backend=backend, block_size=32
    )
    expected = one_by_one(*tensors, CU_Q, CU_K, PATTERNS[name])
    assert got[0].shape == (CU_Q[-1], 4, 6) and got[1].shape == (4, CU_Q[-1])
    assert_alike(got, expected, tolerance)
    assert_alike(gradients(got, tensors), gradients(expected, tensors), 4 * tolerance)


def test_a_document_without_keys_gives_empty_rows_and_no_gradient() -> None:
    tensors = inputs()
    out, lse = sr.attention_varlen(*tensors, CU_Q, CU_K, return_lse=True)
    assert not out[5:45].any() and lse[:, 5:45].eq(-torch.inf).all()
    assert lse[:, :5].isfinite().all()
    query_grad, key_grad, value_grad = gradients((out, lse), tensors)
    assert not query_grad[5:45].any() and query_grad[:5].any()
    assert not key_grad[9:20].any() and not value_grad[9:20].any()  # keys without queries


@st.composite
def cumulative(draw: st.DrawFn) -> tuple[list[int], list[int]]:
    number = draw(st.integers(0, 4))
    edges = []
    for _ in range(2):
        lengths = draw(st.lists(st.integers(0, 20), min_size=number, max_size=number))
        edges.append([sum(lengths[:i]) for i in range(number + 1)])
    return edges[0], edges[1]


@settings(max_examples=30, suppress_health_check=list(HealthCheck))
@given(cumulative(), st.sampled_from(sorted(PATTERNS)))
def test_documents_of_any_lengths(edges: tuple[list[int], list[int]], name: str) -> None:
    cu_q, cu_k = edges
    query, key = torch.randn(cu_q[-1], 2, 4).double(), torch.randn(cu_k[-1], 1, 4).double()
    tensors = query, key, key + 1
    got = sr.attention_varlen(*tensors, cu_q, cu_k, PATTERNS[name], return_lse=True)
    if len(cu_q) == 1:
        assert got[0].shape == (0, 2, 4) and got[1].shape == (2, 0)
    else:
        assert_alike(got, one_by_one(*tensors, cu_q, cu_k, PATTERNS[name]), 1e-12)


def test_lengths_come_as_tensors_and_sequences() -> None:
    tensors = inputs(torch.float32, False)
    expected = sr.attention_varlen(*tensors, CU_Q, CU_K, sr.Causal())
    given_by = [list, torch.tensor, lambda x: torch.tensor(x, dtype=torch.int32)]
    for of in given_by:
        assert torch.equal(sr.attention_varlen(*tensors, of(CU_Q), of(CU_K), sr.Causal()), expected)
    mixed = sr.attention_varlen(*tensors, CU_Q, torch.tensor(CU_K), sr.Causal(), scale=8**-0.5)
    assert torch.equal(mixed, expected)


def test_strides_do_not_matter() -> None:
    tensors = inputs(torch.float32, False)
    expected = sr.attention_varlen(*tensors, CU_Q, CU_K, sr.Causal())
    strided = [x.transpose(0, 1).contiguous().transpose(0, 1) for x in tensors]
    assert torch.equal(sr.attention_varlen(*strided, CU_Q, CU_K, sr.Causal()), expected)


@pytest.mark.parametrize("backend", ["gather", "reference"])
def test_extras_go_by_positions_in_the_document_and_documents_as_batch_entries(
    backend: str,
) -> None:
    tensors, pattern = inputs(grad=False), sr.Causal() + sr.SlidingWindow(9, 9)
    sink = torch.randn(4).double()
    extras = {"sink": sink, "softcap": 2.0, "distance_bias": torch.randn(4, 15).double()}
    extras |= {"dropout_p": 0.4, "dropout_seed": 7}
    got = sr.attention_varlen(
        *tensors, CU_Q, CU_K, pattern, return_lse=True, backend=backend, **extras
    )
    outs, lses = [], []
    for number, (rows, keys) in enumerate(zip(pairwise(CU_Q), pairwise(CU_K), strict=True)):
        query, key, value = tensors
        document = query[slice(*rows)], key[slice(*keys)], value[slice(*keys)]
        batch = [x.transpose(0, 1).expand(DOCUMENTS, *x.transpose(0, 1).shape) for x in document]
        out, lse = sr.attention(*batch, pattern, return_lse=True, backend="reference", **extras)
        outs.append(out[number].transpose(0, 1))
        lses.append(lse[number])
    assert_alike(got, (torch.cat(outs), torch.cat(lses, 1)), 1e-12)


def test_dropout_of_documents_differs() -> None:
    """Two equal documents drop different weights."""
    tensors = [torch.randn(12, 2, 8).repeat(2, 1, 1) for _ in range(3)]
    out = sr.attention_varlen(*tensors, (0, 12, 24), (0, 12, 24), dropout_p=0.5, dropout_seed=1)
    assert not torch.equal(out[:12], out[12:])
    kept = sr.attention_varlen(*tensors, (0, 12, 24), (0, 12, 24))
    assert torch.equal(kept[:12], kept[12:])


@pytest.mark.parametrize("name", ["causal", "longnet"])
def test_it_compiles_without_a_graph_break(name: str) -> None:
    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return sr.attention_varlen(query, key, value, CU_Q, list(CU_K), PATTERNS[name]) * 2

    tensors = inputs(torch.float32)
    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")
    expected, got = attend(*tensors), compiled(*tensors)
    assert torch.equal(got, expected)
    for a, b in zip(
        torch.autograd.grad(got.sum(), tensors),
        torch.autograd.grad(expected.sum(), tensors),
        strict=True,
    ):
        assert torch.equal(a, b)


def contains(*parts: str) -> str:
    return "(?s)" + ".*".join(map(re.escape, parts))


T = torch.tensor
WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "a batch dim": (
        {"query": torch.zeros(1, 120, 4, 8)},
        contains("[tokens, heads, head dim]", "(1, 120, 4, 8)", "without a batch dim"),
    ),
    "no tensor": ({"key": [1.0]}, contains("[tokens, heads, head dim]", "list")),
    "heads that do not divide": (
        {"query": torch.zeros(120, 3, 8)},
        contains("query heads must be a multiple of key/value heads", "got 3 and 2"),
    ),
    "other values": ({"value": torch.zeros(60, 2, 6)}, contains("must agree")),
    "floats": (
        {"cu_q": T(CU_Q).float()},
        contains("cu_q must be an int32 or int64 tensor", "torch.float32", "cumsum"),
    ),
    "bools": ({"cu_q": (False, True)}, contains("cu_q", "sequence of ints", "(False, True)")),
    "a matrix": ({"cu_k": T([CU_K])}, contains("cu_k must be", "[documents + 1]", "(1, 7)")),
    "text": ({"cu_k": "0 5"}, contains("cu_k must be a tensor or a sequence of ints", "'0 5'")),
    "nothing": ({"cu_k": None}, contains("cu_k must be a tensor or a sequence", "None")),
    "no edges": ({"cu_q": ()}, contains("cu_q must hold", "got []")),
    "lengths": ({"cu_q": (60, 60)}, contains("cu_q", "from 0", "to the 120 queries", "[60, 60]")),
    "too few": ({"cu_q": (0, 60)}, contains("cu_q", "to the 120 queries, got [0, 60]", "cumsum")),
    "decreasing": (
        {"cu_k": (0, 150, 100, 180)},
        contains("cu_k", "not decreasing, to the 180 keys", "[0, 150, 100, 180]"),
    ),
    "another number": (
        {"cu_q": (0, 120)},
        contains("cu_q and cu_k must have equally many documents, got 1 and 6", "length 0"),
    ),
    "q_start": ({"q_start": 0}, contains("takes no q_start", "aligned with its last key")),
    "block_bias": ({"block_bias": None}, contains("takes no block_bias", "blocks")),
    "a pattern per batch entry": (
        {"pattern": sr.Causal() & sr.KeyPadding((3,))},
        contains("the same for all", "KeyPadding((3,))", "documents' lengths"),
    ),
    "a key mask": (
        {"pattern": sr.KeyMask(torch.ones(9, dtype=torch.bool))},
        contains("the same for all", "KeyMask(t0)", "documents' lengths"),
    ),
    "a pattern of other lengths": (
        {"pattern": sr.Documents((4, 4))},
        contains("must sum to the key length 9, got 8"),
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_does_not_fit_raises_and_says_what_would(name: str) -> None:
    changes, message = WRONG[name]
    query, key, value = inputs(torch.float32, False)
    call = {"query": query, "key": key, "value": value, "cu_q": CU_Q, "cu_k": CU_K} | changes
    with pytest.raises(ValueError, match=message):
        sr.attention_varlen(**call)


def test_what_is_no_pattern_or_no_option_raises() -> None:
    tensors = inputs(torch.float32, False)
    with pytest.raises(TypeError, match=contains("pattern must be a sparsering pattern", "str")):
        sr.attention_varlen(*tensors, CU_Q, CU_K, "Causal()")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"causality is a pattern; pass pattern=Causal\(\)"):
        sr.attention_varlen(*tensors, CU_Q, CU_K, causal=True)


@pytest.mark.parametrize("backend", ["cpu", "gather"])
@pytest.mark.parametrize(
    "options",
    [
        {"softcap": 3.0},
        {"sink": torch.tensor([0.5, -1.0])},
        {"distance_bias": torch.linspace(-1, 1, 18).view(2, 9)},
        {"softcap": 3.0, "dropout_p": 0.3, "dropout_seed": 5},
    ],
    ids=lambda options: "+".join(options),
)
def test_each_extra_in_float32(options, backend):
    inputs = [torch.randn(48, 2, 8, requires_grad=True) for _ in range(3)]
    edges = [0, 20, 20, 48]
    out = sr.attention_varlen(*inputs, edges, edges, sr.Causal(), backend=backend, **options)
    exact = {name: x.double() if isinstance(x, Tensor) else x for name, x in options.items()}
    doubles = [x.detach().double().requires_grad_() for x in inputs]
    expected = sr.attention_varlen(
        *doubles, edges, edges, sr.Causal(), backend="reference", **exact
    )
    assert torch.allclose(out.double(), expected, atol=1e-5)
    weight = torch.randn(out.shape)
    grads = torch.autograd.grad(out, inputs, weight)
    for grad, wanted in zip(
        grads, torch.autograd.grad(expected, doubles, weight.double()), strict=True
    ):
        assert torch.allclose(grad.double(), wanted, atol=1e-5)
