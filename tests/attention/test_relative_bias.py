"""A table of biases by rows and columns is that of its definition, as a `distance_bias`."""

import itertools

import pytest
import torch
from torch import Tensor

import sparsering as sr

CASES = [
    ((6, 9), (5, 5), (1, 1)),  # the narrowest grid for a window of 5
    ((9, 10), (3, 5), (2, 1)),
    ((8, 15), (5, 3), (1, 4)),  # columns are no multiple of the dilation
    ((12, 14), (3, 7), (3, 2)),  # fewer columns than the table, none of them beyond the grid
    ((1, 9), (1, 7), (1, 1)),
    ((9, 4), (7, 1), (1, 2)),
]


def by_definition(table: Tensor, shape: tuple[int, int], dilation: tuple[int, int]) -> Tensor:
    """Returns the number of each pair, [heads, N, N], and 0 for pairs that the table has not."""
    heads, rows, columns = table.shape
    bias = table.new_zeros(heads, shape[0] * shape[1], shape[0] * shape[1])
    for query in range(shape[0] * shape[1]):
        for key in range(shape[0] * shape[1]):
            down = key // shape[1] - query // shape[1]
            right = key % shape[1] - query % shape[1]
            i, j = down // dilation[0] + rows // 2, right // dilation[1] + columns // 2
            whole = down % dilation[0] == right % dilation[1] == 0
            if whole and 0 <= i < rows and 0 <= j < columns:
                bias[:, query, key] = table[:, i, j]
    return bias


@pytest.mark.parametrize(("shape", "window", "dilation"), CASES)
def test_outputs_and_gradients_are_those_of_the_definition(shape, window, dilation):
    pattern = sr.Neighbourhood(shape, window=window, dilation=dilation)
    tokens = shape[0] * shape[1]
    inputs = [torch.randn(2, 3, tokens, 8, dtype=torch.float64) for _ in range(3)]
    table = torch.randn(3, 2 * window[0] - 1, 2 * window[1] - 1, dtype=torch.float64)
    leaves = [x.requires_grad_() for x in (*inputs, table)]
    q, k, v, t = leaves
    mask = pattern.to_dense(tokens).bool().squeeze()
    score = q @ k.mT * 8**-0.5 + by_definition(t, shape, dilation)
    right = score.masked_fill(~mask, -torch.inf).softmax(-1) @ v
    sent = torch.randn_like(right)
    expected = torch.autograd.grad(right, leaves, sent)
    for dtype, error in ((torch.float64, 1e-12), (torch.float32, 1e-5)):
        own = [x.detach().to(dtype).requires_grad_() for x in leaves]
        bias = sr.relative_bias_2d(own[3], shape, dilation=dilation)
        assert bias.dtype == dtype
        out = sr.attention(*own[:3], pattern, distance_bias=bias)
        found = torch.autograd.grad(out, own, sent.to(dtype))
        for a, b in zip((out, *found), (right, *expected), strict=True):
            assert (a - b).abs().max() < error * b.abs().max(), dtype


def test_distances_that_the_table_has_not_are_zero():
    bias = sr.relative_bias_2d(torch.ones(2, 3, 3), (4, 6))
    assert bias.dtype == torch.float32 and bias.shape == (2, 2 * 8 + 1)
    places = [i for i in range(-8, 9) if bias[0, i + 8]]
    assert places == [-7, -6, -5, -1, 0, 1, 5, 6, 7]
    assert sr.relative_bias_2d(torch.ones(2, 3, 3).half(), (4, 6)).dtype == torch.float32


def test_a_narrow_grid_is_refused_up_to_the_width_that_the_message_says():
    table = torch.randn(2, 9, 13)  # windows of 5 x 7
    for dilation, narrow, least in (((1, 1), 12, 13), ((1, 2), 24, 25), ((1, 3), 36, 37)):
        with pytest.raises(ValueError, match=rf"a grid of {least} columns.*score_mod"):
            sr.relative_bias_2d(table, (40, narrow), dilation=dilation)
        for width in range(least, least + 6):
            sr.relative_bias_2d(table, (40, width), dilation=dilation)


def test_it_is_refused_exactly_where_two_places_meet():
    for width, down, right in itertools.product(range(1, 14), (1, 2, 3), (1, 2, 3, 4)):
        table, steps = torch.zeros(1, 5, 9), range(-4, 5)
        used = [(i, j) for i in steps[2:7] for j in steps if abs(right * j) < width]
        places = [i * down * width + j * right for i, j in used]
        try:
            sr.relative_bias_2d(table, (40, width), dilation=(down, right))
            refused = False
        except ValueError:
            refused = True
        assert refused == (len(set(places)) < len(places)), (width, down, right)


def test_it_compiles_in_one_graph():
    def call(x: Tensor, table: Tensor) -> Tensor:
        bias = sr.relative_bias_2d(table, (6, 9))
        pattern = sr.Neighbourhood((6, 9), window=3)
        return sr.attention(x, x, x, pattern, distance_bias=bias)

    x, table = torch.randn(1, 2, 54, 8), torch.randn(2, 5, 5, requires_grad=True)
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x, table), call(x, table))
    grads = [torch.autograd.grad(f(x, table).sum(), table)[0] for f in (compiled, call)]
    torch.testing.assert_close(*grads)


def test_other_arguments_are_refused():
    table = torch.randn(2, 5, 5)
    for bad in (torch.randn(5, 5), torch.randn(2, 4, 5), torch.ones(2, 5, 5, dtype=torch.int64)):
        with pytest.raises(ValueError, match=r"table must be floating point \[heads, 2 \* k0 - 1"):
            sr.relative_bias_2d(bad, (9, 9))
    with pytest.raises(ValueError, match="table must be"):
        sr.relative_bias_2d([[1.0]], (9, 9))
    with pytest.raises(ValueError, match="rows and columns of a grid, got"):
        sr.relative_bias_2d(table, (9, 9, 9))
    with pytest.raises(ValueError, match="dilation must be"):
        sr.relative_bias_2d(table, (9, 9), dilation=(1, 1, 1))
