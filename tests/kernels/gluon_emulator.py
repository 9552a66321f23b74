"""Runs a Gluon kernel on CPU tensors, as Triton's interpreter does for its own language.

The kernel's Python source runs with other names for what the language gives: tensors are torch's,
shared memory too. The partitions of a program run in threads of which one goes on at a time, drawn
anew at every barrier, copy and product. Copies and products happen late, when they are drawn too,
from what memory holds by then; until a copy has come its buffer holds NaN. So a buffer that is read
too soon or filled too soon shows in the results, and a wait that nothing ends is a `DeadlockError`.

Layouts are not looked at: the compiler holds those.
"""

import random
import threading
from collections.abc import Callable
from types import FunctionType, ModuleType, SimpleNamespace
from typing import Any

import torch
import triton.language as tl
from torch import Tensor

NAN = float("nan")


class DeadlockError(AssertionError):
    """Every partition waits, and nothing is under way."""


class Partitions:
    """Threads that run by turns, and what happens beside them (`late`)."""

    def __init__(self, seed: int):
        self.draw = random.Random(seed)
        self.lateness = self.draw.choice((0.0, 0.7, 0.98))  # how rarely what could go on waits
        self.late: list[Callable[[], None]] = []
        self.ready: dict[int, Callable[[], bool]] = {}
        self.wake: dict[int, threading.Event] = {}
        self.failure: BaseException | None = None
        self.mine = threading.local()
        self.done = threading.Event()

    def run(self, tasks: list[Callable[[], Any]]) -> None:
        for i in range(len(tasks)):
            self.ready[i], self.wake[i] = (lambda: True), threading.Event()
        threads = [threading.Thread(target=self._go, args=(i, t)) for i, t in enumerate(tasks)]
        for thread in threads:
            thread.start()
        self._next()
        self.done.wait(60)
        for thread in threads:
            thread.join(60)
        if self.failure is not None:
            raise self.failure
        while self.late:
            self.late.pop(0)()

    def _go(self, number: int, task: Callable[[], Any]) -> None:
        self.mine.number = number
        self.wake[number].wait()
        try:
            if self.failure is None:
                task()
        except BaseException as problem:
            self.failure = self.failure or problem
        del self.ready[number]
        self._next()

    def pause(self, until: Callable[[], bool] = lambda: True) -> None:
        """Lets others go on, at least until something holds."""
        number = self.mine.number
        self.ready[number] = until
        self.wake[number].clear()
        self._next()
        self.wake[number].wait()
        if self.failure is not None:
            raise RuntimeError("another partition failed")

    def _next(self) -> None:
        while self.failure is None and self.ready:
            able = [number for number, until in self.ready.items() if until()]
            late = [] if able and self.draw.random() < self.lateness else self.late
            drawn = self.draw.randrange(len(able) + len(late)) if able or late else -1
            if drawn < 0:
                self.failure = DeadlockError(f"{len(self.ready)} partitions wait")
            elif drawn >= len(able):
                self.late.pop(drawn - len(able))()
            else:
                self.wake[able[drawn]].set()
                return
        for event in self.wake.values():
            event.set()
        if not self.ready:
            self.done.set()


class Pointer:
    """A place, or a tensor of places, in the memory of a tensor."""

    def __init__(self, memory: Tensor, at: Any):
        self.memory, self.at = memory, at
        self.dtype = SimpleNamespace(element_ty=memory.dtype)

    @classmethod
    def to(cls, x: Tensor) -> "Pointer":
        whole = x.new_empty(0).set_(x.untyped_storage())
        return cls(whole, torch.tensor(x.storage_offset()))

    def __add__(self, steps: Any) -> "Pointer":
        return Pointer(self.memory, self.at + steps)


class Shared:
    """A tensor in shared memory, or a part of one."""

    def __init__(self, held: Tensor):
        self.held, self.dtype, self.layout = held, held.dtype, None

    def index(self, i: Any) -> "Shared":
        return Shared(self.held[int(i)])

    def slice(self, first: int, length: int) -> "Shared":
        return Shared(self.held.narrow(0, first, length))

    def permute(self, order: tuple[int, ...]) -> "Shared":
        return Shared(self.held.permute(order))

    def _reinterpret(self, dtype: torch.dtype, shape: list[int], layout: Any) -> "Squares":
        return Squares(self.held, shape)

    def load(self, layout: Any) -> Tensor:
        return self.held.clone()

    def store(self, value: Tensor) -> None:
        self.held.copy_(value)


class Squares:
    """A tile [rows, columns] as squares of 8 x 64, below one another and then beside."""

    def __init__(self, held: Tensor, shape: list[int]):
        assert shape == [held.numel() // 512, 8, 64]
        self.held, self.down = held, held.shape[0] // 8

    def index(self, i: int) -> Shared:
        beside, below = divmod(int(i), self.down)
        return Shared(self.held[8 * below : 8 * below + 8, 64 * beside : 64 * beside + 64])


class Barrier:
    """An mbarrier: a phase ends when all have arrived and all bytes have come."""

    def __init__(self):
        self.count = self.missing = self.bytes = self.phase = 0

    def changed(self, arrivals: int, bytes_more: int) -> None:
        self.missing -= arrivals
        self.bytes += bytes_more
        assert self.missing >= 0, "more arrived than were told of"
        if self.missing == 0 and self.bytes == 0:
            self.phase ^= 1
            self.missing = self.count


class Barriers:
    def __init__(self, shape: list[int]):
        self.held = [Barrier() for _ in range(shape[0])]

    def index(self, i: Any) -> Barrier:
        return self.held[int(i)]


class Product:
    """A product that is under way; arithmetic with it fails."""

    def __init__(self, a: Any, b: Shared, acc: Any, use_acc: bool):
        self.operands, self.use_acc, self.value = (a, b, acc), use_acc, None

    def happen(self) -> None:
        if self.value is None:
            a, b, acc = self.operands
            a = a.held if isinstance(a, Shared) else a
            acc = acc.value if isinstance(acc, Product) else acc
            self.value = a.float() @ b.held.float() + (acc if self.use_acc else 0)


class Language:
    """Names of `tl` and `gl`, and of Hopper's modules, for one program."""

    def __init__(self, program: int, seed: int):
        self.partitions = Partitions(seed)
        self.under_way: dict[int, list[Product]] = {}
        self.program = torch.tensor(program, dtype=torch.int32)
        told = {name: getattr(self, name) for name in dir(type(self)) if not name.startswith("_")}
        kinds = ("int32", "int64", "uint32", "float32", "float16", "bfloat16")
        told |= {name: getattr(torch, name) for name in kinds}
        nothing = dict.fromkeys(
            ("SliceLayout", "BlockedLayout", "DotOperandLayout", "NVMMADistributedLayout"),
            lambda *args: None,
        )
        shared = SimpleNamespace(get_default_for=lambda *args: None)
        self.language = SimpleNamespace(**told, **nothing, NVMMASharedLayout=shared)
        self.mbarrier = SimpleNamespace(
            MBarrierLayout=lambda: Barriers, init=self._init, expect=self._expect,
            arrive=self._arrive, wait=self._wait,
        )  # fmt: skip
        self.tma = SimpleNamespace(async_copy_global_to_shared=self._copy)

    # tensors

    def program_id(self, axis: int) -> Tensor:
        return self.program

    def arange(self, first: int, stop: int, layout: Any = None) -> Tensor:
        return torch.arange(first, stop, dtype=torch.int32)

    def full(self, shape: list[int], value: float, dtype: torch.dtype, layout: Any = None):
        return torch.full(shape, value, dtype=dtype)

    def zeros(self, shape: list[int], dtype: torch.dtype, layout: Any = None) -> Tensor:
        return torch.zeros(shape, dtype=dtype)

    def cast(self, x: Any, dtype: torch.dtype) -> Tensor:
        return torch.as_tensor(x).to(dtype)

    def where(self, which: Any, a: Any, b: Any) -> Tensor:
        return torch.where(torch.as_tensor(which), a, b)

    def maximum(self, a: Any, b: Any) -> Tensor:
        return torch.maximum(torch.as_tensor(a), torch.as_tensor(b))

    def max(self, x: Tensor, axis: int) -> Tensor:
        return x.amax(axis)

    def sum(self, x: Tensor, axis: int) -> Tensor:
        return x.sum(axis)

    def exp(self, x: Tensor) -> Tensor:
        return x.exp()

    def exp2(self, x: Tensor) -> Tensor:
        return x.exp2()

    def log(self, x: Tensor) -> Tensor:
        return x.log()

    def expand_dims(self, x: Tensor, axis: int) -> Tensor:
        return x.unsqueeze(axis)

    def convert_layout(self, x: Tensor, layout: Any) -> Tensor:
        return x

    def static_range(self, *bounds: int) -> range:
        return range(*bounds)

    def load(self, pointer: Pointer, mask: Any = None, other: Any = None) -> Tensor:
        at = torch.as_tensor(pointer.at)
        if mask is None:
            return pointer.memory[at.long()]
        at, mask = torch.broadcast_tensors(at, torch.as_tensor(mask))
        out = pointer.memory.new_full(at.shape, other)
        out[mask] = pointer.memory[at[mask].long()]
        return out

    def store(self, pointer: Pointer, value: Any, mask: Tensor) -> None:
        at, mask, value = torch.broadcast_tensors(pointer.at, mask, value)
        pointer.memory[at[mask].long()] = value[mask].to(pointer.memory.dtype)

    # shared memory and what runs beside

    def allocate_shared_memory(self, dtype: torch.dtype, shape: list[int], layout: Any) -> Any:
        return (
            Barriers(shape) if layout is Barriers else Shared(torch.full(shape, NAN, dtype=dtype))
        )

    def fence_async_shared(self) -> None:
        pass

    def _init(self, barrier: Barrier, count: int) -> None:
        barrier.count = barrier.missing = count

    def _expect(self, barrier: Barrier, bytes: int) -> None:
        barrier.changed(1, bytes)

    def _arrive(self, barrier: Barrier, count: int) -> None:
        barrier.changed(count, 0)
        if hasattr(self.partitions.mine, "number"):
            self.partitions.pause()

    def _wait(self, barrier: Barrier, phase: Any, pred: Any = True) -> None:
        if pred:
            self.partitions.pause(lambda: barrier.phase != int(phase))

    def _copy(self, described: Any, place: list[Any], barrier: Barrier, to: Shared) -> None:
        row, column = (int(x) for x in place)
        to.held.fill_(NAN)

        def come() -> None:
            rows, columns = (len(x) for x in (to.held, to.held[0]))
            whole = torch.as_strided(described.base, described.shape, described.strides)
            found = whole[row : row + rows, column : column + columns]
            to.held.zero_()[: len(found)] = found  # zeros past the end of the matrix
            barrier.changed(0, -to.held.numel() * to.held.itemsize)

        self.partitions.late.append(come)
        self.partitions.pause()

    def warpgroup_mma(self, a: Any, b: Any, acc: Any, use_acc: bool = True, is_async: bool = False):
        assert is_async
        product = Product(a, b, acc, use_acc)
        mine = self.under_way.setdefault(self.partitions.mine.number, [])
        mine.append(product)

        def happen() -> None:
            for earlier in mine[: mine.index(product)] if product in mine else ():
                earlier.happen()
            product.happen()

        self.partitions.late.append(happen)
        self.partitions.pause()
        return product

    def warpgroup_mma_wait(self, outstanding: int, deps: tuple[Any, ...]) -> Any:
        mine = self.under_way[self.partitions.mine.number]
        while len(mine) > outstanding:
            mine[0].happen()
            mine.pop(0)
        self.partitions.pause()
        found = tuple(x.value if isinstance(x, Product) else x for x in deps)
        assert all(x is not None for x in found), "a product was read before it was waited for"
        return found[0] if len(found) == 1 else found

    def warp_specialize(self, tasks: list[Any], warps: list[int], registers: list[int]) -> None:
        assert len(tasks) == len(warps) + 1 == len(registers) + 1
        self.partitions.run([lambda f=f, args=args: f(*args) for f, args in tasks])


def run(kernel: Any, programs: int, arguments: dict[str, Any], seed: int) -> None:
    """Runs every program of a launch, one after another."""
    for program in range(programs):
        language = Language(program, 1000 * seed + program)
        function = _translated(kernel, language, {})
        function(**{p.name: _given(p, arguments[p.name]) for p in kernel.params})


def _given(parameter: Any, x: Any) -> Any:
    if parameter.is_constexpr:
        return x
    if isinstance(x, Tensor):
        return Pointer.to(x)
    if hasattr(x, "base"):
        return SimpleNamespace(
            base=x.base, shape=x.shape, strides=x.strides, dtype=x.base.dtype, layout=x.layout
        )
    kinds = {"i32": torch.int32, "i64": torch.int64, "fp32": torch.float32}
    return torch.tensor(x, dtype=kinds[parameter.annotation_type])


def _translated(jitted: Any, language: Language, known: dict[Any, Any]) -> Any:
    """The function of a kernel, or of one that it calls, over the emulator's names."""
    function = jitted.fn
    if function not in known:
        names: dict[str, Any] = {"__builtins__": __builtins__}
        made = FunctionType(
            function.__code__, names, function.__name__, function.__defaults__, function.__closure__
        )
        known[function] = made
        for name in function.__code__.co_names:
            if name in function.__globals__:
                names[name] = _named(name, function.__globals__[name], language, known)
    return known[function]


def _named(name: str, x: Any, language: Language, known: dict[Any, Any]) -> Any:
    if hasattr(x, "fn"):
        return _translated(x, language, known)
    if isinstance(x, ModuleType):
        return getattr(language, name, language.language)
    if isinstance(x, tl.constexpr):
        return x.value
    return getattr(language, name, x)
