"""Functions for a bias by coordinates: distances of tokens in space, and their gradients.

The coordinates of tokens are [B or 1, parts, dims, tokens]: pointers are to a token's first number,
and a stride leads to its number in the next dim. With `LOW`, a coordinate is the sum of two parts.
"""

import triton
import triton.language as tl


@triton.jit
def _apart(
    of_row,
    of_column,
    row_stride,
    column_stride,
    in_rows,
    in_columns,
    d: tl.constexpr,
    DIMS: tl.constexpr,
    LOW: tl.constexpr,
):
    """Returns the differences [rows, columns] of tokens in dim `d`; tokens outside are at 0."""
    row = tl.load(of_row + d * row_stride, mask=in_rows, other=0.0)
    column = tl.load(of_column + d * column_stride, mask=in_columns, other=0.0)
    result = row[:, None] - column[None, :]
    if LOW:
        row = tl.load(of_row + (DIMS + d) * row_stride, mask=in_rows, other=0.0)
        column = tl.load(of_column + (DIMS + d) * column_stride, mask=in_columns, other=0.0)
        result += row[:, None] - column[None, :]
    return result


@triton.jit
def distances(
    of_row,
    of_column,
    row_stride,
    column_stride,
    in_rows,
    in_columns,
    DIMS: tl.constexpr,
    LOW: tl.constexpr,
):
    """Returns the Euclidean distances [rows, columns] of tokens."""
    squares = tl.zeros([of_row.shape[0], of_column.shape[0]], tl.float32)
    for d in tl.static_range(DIMS):
        apart = _apart(
            of_row, of_column, row_stride, column_stride, in_rows, in_columns, d, DIMS, LOW
        )
        squares += apart * apart
    return tl.sqrt(squares)


@triton.jit
def coordinate_sums(
    dscore,
    slope,
    of_row,
    of_column,
    row_stride,
    column_stride,
    in_rows,
    in_columns,
    DIMS: tl.constexpr,
    LOW: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Returns the gradients of the rows' coordinates and slopes, [rows, WIDTH].

    Takes dS [rows, columns] by scaled scores, and `slope` by these, which broadcasts to [rows].
    Column DIMS of the result is the sum of dS * distance; columns behind it are 0. Pairs with
    dS = 0, such as hidden ones, add nothing.
    """
    far = distances(of_row, of_column, row_stride, column_stride, in_rows, in_columns, DIMS, LOW)
    number = tl.arange(0, WIDTH)[None, :]
    products = tl.sum(tl.where(dscore == 0.0, 0.0, dscore * far), 1)
    sums = tl.where(number == DIMS, products[:, None], 0.0)
    here = far == 0.0
    unit = tl.where((dscore == 0.0) | here, 0.0, dscore / tl.where(here, 1.0, far))
    for d in tl.static_range(DIMS):
        apart = _apart(
            of_row, of_column, row_stride, column_stride, in_rows, in_columns, d, DIMS, LOW
        )
        of_dim = -slope * tl.sum(tl.where(unit == 0.0, 0.0, unit * apart), 1)
        sums = tl.where(number == d, of_dim[:, None], sums)
    return sums
