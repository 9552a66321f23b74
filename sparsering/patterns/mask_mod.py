"""Masks that are defined by a function, the `mask_mod` of FlexAttention.

    attention(query, key, value, from_mask_mod(lambda b, h, q, k: q - k < 512) & Causal())

The text of such a pattern has a name in place of the function, which only this process knows.
"""

import math
from collections import Counter, OrderedDict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple, cast
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from ..ground.arguments import checked_integer, kind_of, shortened
from ..ground.keywords import with_hints
from ..ground.once import one_thread
from .algebra import Frame, Mask
from .expression import add_constructor
from .frame import MOST_HEADS
from .function_state import Reads

MaskModFunction = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]

_IN_A_GRAPH = (
    "from_mask_mod cannot run inside a compiled function: it calls the function, to see what it "
    "depends on. Make the mask outside. A mask whose numbers change in each step makes a graph for "
    "each; pass what changes as data: Packed(lengths) of a tensor for documents, KeyMask(valid) "
    "for padding, SelectedBlocks(indices) for chosen keys"
)
_MOST_FUNCTIONS = 1024  # recent mask_mods that stay alive even if no pattern refers to them


@with_hints()
def from_mask_mod(mask_mod: MaskModFunction, *, batch_size: int | None = None) -> Mask:
    """Builds the mask of a FlexAttention `mask_mod(batch, head, q_idx, kv_idx) -> bool tensor`.

    As in FlexAttention, the function gets query *indices*, which count from 0 for any `q_start`,
    and runs under `torch.vmap`. Masks are equal, and share cached layouts, if their functions have
    equal code and read equal values: closures, defaults, globals and attributes. A mask that is
    created after such a value changed is another one; a mask from before keeps the layouts that it
    has, and raises ValueError where it needs the function again.

    Args:
        mask_mod: any function that FlexAttention takes. Tensors that it closes over must be on the
            CPU. With several ranks, each rank must pass an equal function.
        batch_size: batch entries; needed if the function depends on the batch entry.

    Returns: a mask, which differs by head or batch entry if the function depends on them.

    Raises: ValueError if the function does not return a bool tensor, or depends on the batch entry
        without a batch_size. Inside a compiled function it breaks the graph, with a message.

    Cost: the layout evaluates every pair once, for each head and batch entry that differs. Heads of
        which the function reads equal numbers, such as a flag of each head, count as one.

    Example:
        >>> document = torch.tensor([0, 0, 1, 1])
        >>> def same(b, h, q, k):
        ...     return document[q] == document[k]
        >>> out = attention(query, key, value, from_mask_mod(same) & Causal())
    """
    if not callable(mask_mod):
        raise ValueError(
            "mask_mod must be a function of (batch, head, q_idx, kv_idx), got "
            f"{shortened(repr(mask_mod))}; Dense(mask) takes a bool tensor"
        )
    if batch_size is not None:
        batch_size = checked_integer("batch_size", batch_size, 0, MOST_HEADS)
    if torch.compiler.is_compiling():
        torch._dynamo.graph_break(msg=_IN_A_GRAPH)
    named = _registered(mask_mod)
    if named.depends[0] is None:
        _check_function(mask_mod)
        named.depends = _dependence(mask_mod)
        named.accept()
    by_batch, by_head = named.depends
    if by_batch and batch_size is None:
        raise ValueError(
            "mask_mod depends on the batch entry: expected batch_size, got None; pass the number "
            "of batch entries, as in from_mask_mod(mask_mod, batch_size=2)"
        )
    return MaskMod(named.name, batch_size if by_batch else None, by_head)


def _check_function(mask_mod: MaskModFunction) -> None:
    """Calls a mask_mod once on zeros; raises ValueError if it does not return a single bool.

    It also tries the call under `torch.vmap`, by which masks are evaluated.
    """
    zero = torch.zeros((), dtype=torch.int64)
    try:
        result = mask_mod(zero, zero, zero, zero)
    except TypeError as error:
        raise ValueError(
            f"mask_mod must take (batch, head, q_idx, kv_idx), each an index tensor, got: {error}; "
            "write it as for FlexAttention"
        ) from error
    if not isinstance(result, Tensor) or result.dtype != torch.bool or result.dim():
        raise ValueError(
            "mask_mod must return one bool tensor of shape () for indices of shape (), got "
            f"{kind_of(result)}; combine comparisons with & and | (not `and`, `or`)"
        )
    try:
        _over_pairs(mask_mod, (zero, zero), zero[None], zero[None])
    except RuntimeError as error:
        raise ValueError(
            f"mask_mod must work under torch.vmap, got: {error} Combine comparisons with & and | "
            "(not `and`, `or`), choose with torch.where (not `if`)"
        ) from error


@dataclass(frozen=True, repr=False, eq=False)
class MaskMod(Mask):
    """The mask that `from_mask_mod` returns; `name` stands for its function in this process."""

    name: str
    batch_size: int | None = None
    by_head: bool = False
    batch: int = 0
    head: int = 0

    def _validate(self) -> None:
        if (named := _by_name.get(self.name)) is None:
            raise ValueError(
                f"the mask_mod {self.name!r} is not known in this process, or was dropped after "
                f"{_MOST_FUNCTIONS} newer ones; build it again with from_mask_mod, and hold a "
                "reference to the pattern"
            )
        _use(named)
        object.__setattr__(self, "_named", named)

    def __reduce__(self) -> tuple[Any, ...]:
        """Copies and pickles the function itself, because other processes do not know its name."""
        return _of_function, (self._named.function, *self._values())  # type: ignore[attr-defined]

    def at(self, batch: int, head: int, frame: Frame) -> Mask:
        batch = batch if self.batch_size is not None else 0
        head = self._alike(frame)[head] if self.by_head else self.head
        return replace(self, batch_size=None, batch=batch, head=head)

    def num_batches(self) -> int | None:
        return self.batch_size

    def num_tables(self, frame: Frame) -> int:
        if not self.by_head:
            return 1
        alike = self._alike(frame)
        if len(set(alike)) <= 1:
            return 1
        # if every kv head has a single mask, there are as many (kv head, mask) as kv heads
        of_kv_heads = {(frame.kv_head(head), mask) for head, mask in enumerate(alike)}
        in_groups = len(of_kv_heads) == frame.num_kv_heads
        return frame.num_kv_heads if in_groups else frame.num_heads

    def _alike(self, frame: Frame) -> tuple[int, ...]:
        """Returns for each query head the first head with, as far as known, the same mask.

        `at` and `num_tables` call it, so that heads with equal masks share a table.
        """
        named: _NamedFunction = self._named  # type: ignore[attr-defined]
        if (found := named.alike.get(frame.num_heads)) is None:
            with ThreadPoolExecutor(1) as thread:  # for the reason that `holds` gives
                thread.submit(named.check).result()
                found = thread.submit(_heads_alike, named.function, frame.num_heads).result()
                thread.submit(named.accept).result()
            named.alike[frame.num_heads] = found
        return found

    def holds(self, p: Tensor, k: Tensor, frame: Frame) -> Tensor:
        p, k = frame.inside(p, k)
        shape = torch.broadcast_shapes(p.shape, k.shape)
        if not math.prod(shape):
            return torch.zeros(shape, dtype=torch.bool)
        named: _NamedFunction = self._named  # type: ignore[attr-defined]
        at = torch.tensor(self.batch), torch.tensor(self.head)
        try:
            # torch.compile sets modes in this thread, so another thread evaluates the function.
            with ThreadPoolExecutor(1) as thread:
                thread.submit(named.check).result()
                pairs = thread.submit(_over_pairs, named.function, at, p - frame.q_start, k)
                result: Tensor = pairs.result()
                thread.submit(named.accept).result()
                return result
        except IndexError as error:
            raise ValueError(
                f"the mask_mod {self.name!r} must accept query indices up to "
                f"{frame.q_len - 1} and key indices up to {frame.kv_len - 1}, got: {error}; the "
                "tensors that it reads must reach that far"
            ) from error


@one_thread()
def _over_pairs(
    function: MaskModFunction, at: tuple[Tensor, Tensor], row: Tensor, column: Tensor
) -> Tensor:
    """Evaluates a mask_mod on indices of queries and keys; returns bool, of their broadcast shape.

    `at` is the batch entry and the head, [] each. Indices are not expanded: vmap maps each dim.
    """
    dims = max(row.dim(), column.dim())
    row, column = (x[(None,) * (dims - x.dim())] for x in (row, column))
    outer, over = range(dims), cast(Callable[..., Tensor], partial(function, *at))
    for sizes in zip(row.shape[::-1], column.shape[::-1], strict=True):
        over = torch.vmap(over, tuple(None if n < max(sizes) else 0 for n in sizes))
    return over(
        row.squeeze([d for d in outer if row.shape[d] < column.shape[d]]),
        column.squeeze([d for d in outer if column.shape[d] < row.shape[d]]),
    )


def _of_function(function: MaskModFunction, name: str, *arguments: Any) -> MaskMod:
    """Unpickles a `MaskMod`, and registers its function if this process does not know it yet."""
    named = _by_name.get(name)
    known = named is not None and named.function is function
    return MaskMod(name if known else _registered(function).name, *arguments)


class _NamedFunction:
    """A mask_mod with the name that stands for it in texts.

    Patterns and `_recent` keep it alive.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        # whether the mask depends on (the batch entry, the head); None until it was traced
        self.depends: tuple[bool | None, bool] = None, False
        self.alike: dict[int, tuple[int, ...]] = {}  # results of `MaskMod._alike`, by num_heads
        self.function: MaskModFunction
        self.reads: Reads
        self.state: str | None  # digest of the values that the function read when registered

    def check(self) -> None:
        """Raises ValueError if the function reads other values than when the mask was created."""
        if self.reads.now() != self.state:
            raise ValueError(
                f"the mask_mod {self.name!r} reads values that have changed since from_mask_mod, "
                "so its mask is another; call from_mask_mod again"
            )

    def accept(self) -> None:
        """Takes what the function reads now as unchanged, after a call that itself changed it."""
        self.state = self.reads.now()


_by_name: WeakValueDictionary[str, _NamedFunction] = WeakValueDictionary()
_recent: OrderedDict[str, _NamedFunction] = OrderedDict()  # a backward pass may outlive its pattern
_counts: Counter[str] = Counter()  # functions that had no digest so far, by `__qualname__`


def _registered(function: MaskModFunction) -> _NamedFunction:
    """Gives a mask_mod a name: its `__qualname__` and a digest of what it reads, or a number.

    The number is for a function whose values cannot all be read; such functions are counted.
    """
    reads = Reads(function)
    stem, state = getattr(function, "__qualname__", type(function).__name__), reads.now(exact=True)
    _counts[stem] += state is None
    name = f"{stem}-{state or _counts[stem]}"
    named = _by_name.setdefault(name, _NamedFunction(name))
    named.function, named.reads, named.state = function, reads, state
    _use(named)
    return named


def _use(named: _NamedFunction) -> None:
    """Notes that a function is used now: the `_MOST_FUNCTIONS` used last stay alive."""
    _recent[named.name] = named
    _recent.move_to_end(named.name)
    while len(_recent) > _MOST_FUNCTIONS:
        _recent.popitem(last=False)


def _cannot_be_mapped(mask_mod: MaskModFunction, argument: int) -> bool:
    """Whether a mask_mod's result may depend on one of its arguments, as torch.vmap over it shows.

    The mask may then depend on this argument. It is asked where the function cannot be traced.
    """
    indices = [torch.zeros((), dtype=torch.int64)] * 4
    indices[argument] = torch.zeros(2, dtype=torch.int64)
    in_dims = tuple(0 if number == argument else None for number in range(4))
    try:
        torch.vmap(mask_mod, in_dims=in_dims, out_dims=None)(*indices)
    except (RuntimeError, ValueError, TypeError, IndexError):
        return True
    return False


_LIKE_AN_ARGUMENT = {
    *("aten.new_ones", "aten.new_zeros", "aten.new_full", "aten.new_empty"),
    *("aten.ones_like", "aten.zeros_like", "aten.full_like", "aten.empty_like"),
}


def _dependence(mask_mod: MaskModFunction) -> tuple[bool, bool]:
    """Returns whether a mask_mod depends on (the batch entry, the head), by its traced graph."""
    indices = [torch.zeros(2, dtype=torch.int64) for _ in range(4)]
    if (traced := _traced(mask_mod, indices)) is None:
        return _cannot_be_mapped(mask_mod, 0), _cannot_be_mapped(mask_mod, 1)
    result = traced.sources[traced.result]
    return 0 in result, 1 in result


class _Traced(NamedTuple):
    """The graph of a mask_mod, from make_fx, and the arguments on which each node depends."""

    module: Any
    result: Any  # the node of the output
    sources: dict[Any, set[int]]  # for each node, the indices of the arguments that it depends on


def _traced(mask_mod: MaskModFunction, indices: list[Tensor]) -> _Traced | None:
    """Traces a mask_mod with four index tensors; None if it branches on their values or raises."""
    from torch.fx.experimental.proxy_tensor import make_fx  # slow to import

    try:
        module = make_fx(torch.vmap(mask_mod))(*indices)
    except Exception:  # the user's function may raise anything
        return None
    sources: dict[Any, set[int]] = {}
    arguments = 0
    for node in module.graph.nodes:
        inputs = node.all_input_nodes
        if str(node.target).rpartition(".")[0] in _LIKE_AN_ARGUMENT:
            inputs = inputs[1:]  # the first input gives only dtype and device
        own = {arguments} if node.op == "placeholder" else set()
        arguments += len(own)
        sources[node] = own.union(*(sources[x] for x in inputs))
    (result,) = (node for node in module.graph.nodes if node.op == "output")
    return _Traced(module, result, sources)


def _heads_alike(mask_mod: MaskModFunction, num_heads: int) -> tuple[int, ...]:
    """Returns for each head the first head whose mask is known to be equal, [num_heads] numbers.

    A function may first compute something from the head alone, such as to look up a flag per head.
    If the rest of the graph uses the head only through these values, heads with equal values have
    equal masks.
    """
    from torch.fx import Interpreter

    every, heads = tuple(range(num_heads)), torch.arange(num_heads)
    traced = _traced(mask_mod, [heads * 0, heads, heads * 0, heads * 0])
    if traced is None or num_heads < 2:
        return every
    of_head = [node for node, sources in traced.sources.items() if sources == {1}]
    read = [x for x in of_head if any(traced.sources[user] != {1} for user in x.users)]
    read += [x for x in of_head if traced.result in x.users]
    values: dict[Any, Tensor] = {}

    class Reader(Interpreter):
        def run_node(self, node: Any) -> Any:
            result = super().run_node(node)
            if node in read:
                values[node] = result
            return result

    Reader(traced.module).run(heads * 0, heads, heads * 0, heads * 0)
    found = [values[node] for node in read]
    # only one number per head can be compared; other shapes may have heads in any dim
    if not all(isinstance(x, Tensor) and x.shape == (num_heads,) for x in found):
        return every
    rows = list(zip(*(x.tolist() for x in found), strict=True))
    first: dict[Any, int] = {}
    return tuple(first.setdefault(row, head) for head, row in enumerate(rows)) if rows else every


add_constructor("MaskMod", MaskMod)
