"""Biases by the places of two tokens, in space (`coordinate_bias`) or in a grid."""

from collections.abc import Sequence
from typing import Any, TypeGuard

import torch
from torch import Tensor

from .checks import DTYPES, check_tensor
from .ground.arguments import INTEGERS
from .ground.keywords import with_hints
from .patterns.grid import checked_shape, of_each_dim


class CoordinateBias:
    """The score_mod that `coordinate_bias` makes: `score - slope_h * |x_q - x_k|`."""

    def __init__(self, query_coords: Tensor, coords: Tensor, slopes: Tensor) -> None:
        self.query_coords, self.coords, self.slopes = query_coords, coords, slopes

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The tensors that it reads, each once."""
        own = () if self.query_coords is self.coords else (self.query_coords,)
        return *own, self.coords, self.slopes

    def on(self, tensors: Sequence[Tensor]) -> "CoordinateBias":
        """Returns a copy that reads other `tensors`."""
        *_, coords, slopes = tensors
        return CoordinateBias(tensors[0], coords, slopes)

    def __call__(
        self, score: Tensor, batch: Tensor, head: Tensor, q_idx: Tensor, kv_idx: Tensor
    ) -> Tensor:
        query, key = (
            x[0, index] if len(x) == 1 else x[batch, index]
            for x, index in ((self.query_coords, q_idx), (self.coords, kv_idx))
        )
        return score - self.slopes[head] * torch.linalg.vector_norm(query - key, dim=-1)

    def check(self, query: Tensor, key: Tensor) -> None:
        """Raises ValueError if query and key have other batch entries, tokens or heads."""
        batch, heads = query.shape[:2]
        for name, x, tokens in (
            ("query_coords", self.query_coords, query.shape[2]),
            ("coords", self.coords, key.shape[2]),
        ):
            if len(x) not in (1, batch) or x.shape[1] != tokens or x.device != query.device:
                raise ValueError(
                    f"coordinate_bias {name} must be [{batch} or 1, {tokens}, dims] on "
                    f"{query.device}, got {tuple(x.shape)} on {x.device}; pass one coordinate for "
                    "each token, and query_coords where queries are other tokens than keys"
                )
        if len(self.slopes) != heads or self.slopes.device != query.device:
            raise ValueError(
                f"coordinate_bias slopes must be [{heads}] on {query.device}, one for each query "
                f"head, got {tuple(self.slopes.shape)} on {self.slopes.device}"
            )


def is_coordinate_bias(score_mod: object) -> TypeGuard[CoordinateBias]:
    """True for a score_mod that backends may compute without calling it."""
    return type(score_mod) is CoordinateBias


@with_hints()
def coordinate_bias(
    coords: Tensor, slopes: Tensor, *, query_coords: Tensor | None = None
) -> CoordinateBias:
    """Returns a `score_mod` that lowers each score by the distance of query and key in space.

    `score - slopes[h] * |coords[b, q] - coords[b, k]|`, the Euclidean distance: ALiBi in 2 or 3
    dims, as TITAN has it for the tiles of a slide. Gradients reach slopes and coordinates.

    Args:
        coords: [B or 1, N, dims] or [N, dims], the place of each token, floats or integers. TITAN
            counts in tiles: divide pixels by the size of a tile.
        slopes: [query heads], floating point.
        query_coords: the same for queries, default `coords`.

    Returns: a function for `attention(..., score_mod=)`, on the backends cpu, triton (not
        over lists of single keys), gather and reference.

    Raises: ValueError for other shapes, here or in the call.

    Cost: that of the pattern's visited tiles, in time; no tensor of all pairs. On cpu a fifth more
        than without the bias, and a tenth of gather's time.

    Example:
        >>> bias = coordinate_bias(coords, slopes)
        >>> out = attention(query, key, value, LongNet((1024, 4096), (1, 4)), score_mod=bias)

    Source: TITAN (arXiv 2411.19666), 2-D ALiBi; ALiBi (2108.12409).
    """
    check_tensor("coordinate_bias slopes", slopes, "[heads]")
    if slopes.dim() != 1 or slopes.dtype not in DTYPES:
        raise ValueError(
            "coordinate_bias slopes must be a floating point tensor [heads], got "
            f"{slopes.dtype} {tuple(slopes.shape)}; torch.tensor([...]) makes one"
        )
    dtype = torch.promote_types(slopes.dtype, torch.float32)
    keys = _checked("coords", coords, dtype)
    queries = keys if query_coords is None else _checked("query_coords", query_coords, dtype)
    if queries.shape[-1] != keys.shape[-1]:
        raise ValueError(
            "coordinate_bias query_coords and coords must have the same dims, got "
            f"{queries.shape[-1]} and {keys.shape[-1]}"
        )
    return CoordinateBias(queries, keys, slopes)


def _checked(name: str, coords: Any, dtype: torch.dtype) -> Tensor:
    """Returns coordinates as floats [B or 1, N, dims]."""
    check_tensor(f"coordinate_bias {name}", coords, "[B, tokens, dims]")
    x: Tensor = coords if coords.dim() == 3 else coords[None]
    if x.dim() != 3 or not x.shape[2] or x.dtype not in (*DTYPES, *INTEGERS):
        raise ValueError(
            f"coordinate_bias {name} must be numbers [B, tokens, dims] or [tokens, dims], got "
            f"{coords.dtype} {tuple(coords.shape)}; torch.stack((x, y), -1) makes one"
        )
    return x.to(torch.promote_types(x.dtype, dtype))


@with_hints()
def relative_bias_2d(
    table: Tensor, shape: Sequence[int], *, dilation: int | Sequence[int] = 1
) -> Tensor:
    """Returns the `distance_bias` of a table by rows and columns between two tokens of a grid.

    The score of query (y, x) and key (y + d0 * i, x + d1 * j) gets
    `table[h, i + k0 - 1, j + k1 - 1]`, as NATTEN's rpb: a window of k0 x k1 tokens needs i and j
    below k0 and k1, either sign. Other distances get 0.

    Args:
        table: [heads, 2 * k0 - 1, 2 * k1 - 1], floating point.
        shape: rows and columns of the grid, whose tokens are in row-major order.
        dilation: (d0, d1), or one int: the distance of neighbours in the window.

    Returns: [heads, 2R + 1] in float32 (float64 for float64), differentiable in the table.

    Raises: ValueError for another table, or if two of its places lie at one distance in the
        sequence, as in narrow grids.

    Cost: O(heads * R), R about d0 * k0 * columns.

    Example:
        >>> bias = relative_bias_2d(rpb, (56, 56), dilation=2)  # rpb [heads, 13, 13]
        >>> pattern = Neighbourhood((56, 56), window=7, dilation=2)
        >>> out = attention(query, key, value, pattern, distance_bias=bias)

    Source: NATTEN (arXiv 2204.07143), section 3; Swin Transformer (2103.14030).
    """
    height, width = _two("shape", checked_shape("relative_bias_2d", shape))
    down, right = of_each_dim("relative_bias_2d dilation", dilation, 1, 2)
    check_tensor("relative_bias_2d table", table, "[heads, rows, columns]")
    if table.dim() != 3 or not all(n % 2 for n in table.shape[1:]) or table.dtype not in DTYPES:
        raise ValueError(
            "relative_bias_2d table must be floating point [heads, 2 * k0 - 1, 2 * k1 - 1] for a "
            f"window of k0 x k1 tokens, got {table.dtype} {tuple(table.shape)}"
        )
    k0, k1 = (n // 2 + 1 for n in table.shape[1:])
    # Steps that leave the grid belong to no pair.
    rows, columns = min(k0 - 1, (height - 1) // down), min(k1 - 1, (width - 1) // right)
    line = down * width  # two places meet if some lines are as long as some columns
    lines = [n * line for n in range(1, 2 * rows + 1)]
    if any(x % right == 0 and x <= 2 * columns * right for x in lines):
        raise ValueError(
            f"relative_bias_2d needs a distance of its own for each place of the table, got "
            f"{width} columns, where a row below looks like columns to the right; a grid of "
            f"{2 * right * (k1 - 1) // down + 1} columns has them, or add the table in a "
            "score_mod, by the rows and columns of q_idx and kv_idx"
        )
    i, j = (torch.arange(-n, n + 1, device=table.device) for n in (rows, columns))
    distance = (i[:, None] * line + j * right).flatten()
    # One more number at each end, 0, is that of all larger distances.
    radius = rows * line + columns * right + 1
    used = table[:, k0 - 1 - rows : k0 + rows, k1 - 1 - columns : k1 + columns].flatten(1)
    used = used.to(torch.promote_types(used.dtype, torch.float32))
    return used.new_zeros(len(used), 2 * radius + 1).index_copy(1, distance + radius, used)


def _two(name: str, sizes: tuple[int, ...]) -> tuple[int, int]:
    """Returns two numbers; raises ValueError for another count."""
    if len(sizes) != 2:
        raise ValueError(
            f"relative_bias_2d {name} must be the rows and columns of a grid, got {sizes}; "
            "score_mod= takes a function of other places"
        )
    return sizes[0], sizes[1]
