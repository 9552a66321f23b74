"""Scores that are computed for some queries at a time, so that no tensor of all pairs is needed."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

AT_A_TIME = 1 << 22  # scores in memory at a time
_BY_ROW = {"matmul", "mul", "relu", "masked_fill", "add", "squeeze", "sum", "bitwise_not"}


class Rows:
    """A tensor [B, N, ...] that is computed for some queries at a time.

    `of` computes the rows of a slice of queries; `cells` is the most numbers that one query needs
    on the way. Operations that treat each query by itself return `Rows` again. `topk` and others
    return the whole result.
    """

    def __init__(self, of: Callable[[slice], Tensor], queries: int, cells: int = 0) -> None:
        first = of(slice(0, 1))
        self.of, self.queries, self.cells = of, queries, max(cells, first.numel())
        self.shape = torch.Size((len(first), queries, *first.shape[2:]))
        self.dtype, self.device = first.dtype, first.device

    def __getattr__(self, name: str) -> Callable[..., Any]:
        method = getattr(Tensor, name)
        return lambda *args, **options: self.__torch_function__(method, (), (self, *args), options)

    def __mul__(self, other: Any) -> Any:
        return torch.mul(self, other)  # type: ignore[arg-type]

    def __invert__(self) -> Any:
        return torch.bitwise_not(self)  # type: ignore[arg-type]

    @classmethod
    @torch.no_grad()
    def __torch_function__(
        cls, function: Any, _: Any, args: tuple[Any, ...], options: dict[str, Any] | None = None
    ) -> Any:
        lazy = [x for x in args if isinstance(x, Rows)]
        queries, cells = lazy[0].queries, max(x.cells for x in lazy)

        def of(part: slice) -> Any:
            return function(*(_rows(x, part, queries) for x in args), **(options or {}))

        if function.__name__ in _BY_ROW:
            return Rows(of, queries, cells)
        if function is Tensor.topk:
            one = of(slice(0, 1))  # results of parts, kept one by one, would fragment the heap
            whole = [x.new_empty(len(x), queries, *x.shape[2:]) for x in one]
            for part in args[0].parts():
                for to, x in zip(whole, of(part), strict=True):
                    to[:, part] = x
            return torch.return_types.topk((whole[0], whole[1]))
        return of(slice(0, queries))

    def parts(self) -> list[slice]:
        """Returns slices of the queries whose results need about `AT_A_TIME` numbers each."""
        step = max(1, AT_A_TIME // max(1, self.cells))
        return [slice(x, min(x + step, self.queries)) for x in range(0, self.queries, step)]


def _rows(x: Any, part: slice, queries: int) -> Any:
    """Returns rows `part` of x if x has a row for each query, else x itself."""
    if isinstance(x, Rows):
        return x.of(part)
    return x[:, part] if isinstance(x, Tensor) and x.dim() > 2 and x.shape[1] == queries else x


class KeysInParts:
    """Wraps keys [B, M, D] of an indexer, so that a large product with its queries gives `Rows`.

    The indexer's own code uses it like a tensor; queries are [B, N, H, D]. Methods that return a
    tensor, such as `transpose`, return keys in parts.
    """

    def __init__(self, keys: Tensor) -> None:
        self.keys = keys

    def __getattr__(self, name: str) -> Any:
        own = getattr(self.keys, name)

        def method(*args: Any, **options: Any) -> Any:
            result = own(*args, **options)
            return KeysInParts(result) if isinstance(result, Tensor) else result

        return method if callable(own) else own

    @classmethod
    def __torch_function__(
        cls, function: Any, _: Any, args: tuple[Any, ...], options: dict[str, Any] | None = None
    ) -> Any:
        query, *others = (x.keys if isinstance(x, KeysInParts) else x for x in args)
        if function is torch.matmul:
            (key,) = others  # [B, 1, D, M]
            pairs = query[..., 0].numel() * key.shape[3]
            if query.shape[1] > 1 and pairs > AT_A_TIME:
                return Rows(partial(_products, query, key[:, 0]), query.shape[1])
        return function(query, *others, **(options or {}))


def _products(query: Tensor, key: Tensor, part: slice) -> Tensor:
    """Multiplies queries `part` of [B, N, H, D] with keys [B, D, M]: [B, n, H, M].

    Queries and heads are one dimension, so that each batch entry is a single matrix product.
    """
    some = query[:, part]  # [B, n, H, D]
    products = torch.matmul(some.flatten(1, 2), key)  # [B, n * H, M]
    return products.unflatten(1, some.shape[1:3])  # [B, n, H, M]
