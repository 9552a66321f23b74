"""Runs a Gluon kernel's own Python source on the CPU, so that its synchronization can be wrong.

Gluon has no interpreter. This module stands in for the few functions that the kernels use. Tensors
are torch's, and a partition (a group of warps) is a thread. One thread runs at a time, and at each
access to shared memory or a barrier, a seeded choice says who goes on: a partition, or a copy or a
product under way. Copies and products complete some time after they were issued.

A program fails if it deadlocks, if a product reads memory that a copy has not filled, if memory is
overwritten while a product may still read it, if a barrier gets more arrivals than it counts, or if
a result is used before the wait for it.
"""

import ast
import random
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

import sparsering

FOLDER = Path(sparsering.__file__).parent / "kernels" / "triton"


class SynchronizationError(Exception):
    """A program deadlocks, or uses memory or results at a wrong time."""


class Stopped(BaseException):
    """Ends the thread of a partition after another partition has failed."""


class Partition:
    """A group of warps: its thread, what it waits for, and what it has under way."""

    def __init__(self, number: int, run: Callable[[], None], program: "Program") -> None:
        self.number, self.ready = number, lambda: True
        self.go, self.done, self.error = threading.Semaphore(0), False, None
        self.products: list[Product] = []  # issued and not complete; they complete in this order
        self.read: list[tuple[Shared, Tensor]] = []  # complete for one warp, maybe not for others
        self.copies: list[list[Copy]] = [[]]  # groups of copies by pointers; the last is open
        self.arrived: list[Shared] = []  # copies that this partition's threads have waited for
        self.fenced: list[Shared] = []  # and that products may read after a barrier of threads
        self.thread = threading.Thread(target=self._run, args=(run, program), daemon=True)

    def _run(self, run: Callable[[], None], program: "Program") -> None:
        self.go.acquire()
        try:
            run()
            self.check_reads()
            if self.products:
                raise SynchronizationError("a partition ends before its products")
        except Stopped:
            pass
        except BaseException as error:
            self.error = error
        self.done = True
        program.back.release()

    def check_reads(self) -> None:
        for shared, versions in self.read:
            if not torch.equal(shared.versions, versions):
                raise SynchronizationError("shared memory was overwritten while a warp read it")
        self.read.clear()


class Program:
    """A program of the grid, and the choice of what happens next in it."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self.eager = self.chance.choice((0.05, 0.3, 0.7, 0.95))  # how soon copies complete
        self.events: list[Callable[[], None]] = []  # copies under way, in any order
        self.issued: list[int] = []  # the partition of each product
        self.partitions: list[Partition] = []
        self.current: Partition | None = None
        self.back, self.stopping = threading.Semaphore(0), False

    def run(self, functions: Sequence[Callable[[], None]]) -> None:
        """Runs partitions until all of them end."""
        self.partitions = [Partition(i, f, self) for i, f in enumerate(functions)]
        for x in self.partitions:
            x.thread.start()
        try:
            while any(not x.done for x in self.partitions):
                self._next()
            if self.events:
                raise SynchronizationError("the program ends before its copies")
        finally:
            self.stopping = True
            for x in self.partitions:
                while not x.done:
                    x.go.release()
                    self.back.acquire()
                x.thread.join()
            self.current = None

    def _next(self) -> None:
        able = [x for x in self.partitions if not x.done and x.ready()]
        first = [x.products[0].complete for x in self.partitions if x.products]
        under_way = [*self.events, *first]
        if not able and not under_way:
            waiting = [x.number for x in self.partitions if not x.done]
            raise SynchronizationError(f"deadlock: partitions {waiting} wait")
        if not able or (under_way and self.chance.random() < self.eager):
            self.chance.choice(under_way)()
            return
        self.current = chosen = self.chance.choice(able)
        chosen.go.release()
        self.back.acquire()
        if chosen.error is not None:
            raise chosen.error

    def pause(self, ready: Callable[[], bool] = lambda: True) -> None:
        """Lets others go on, and the calling partition again once it is `ready`."""
        own = self.current
        if own is None:  # before the partitions start
            return
        own.ready = ready
        self.back.release()
        own.go.acquire()
        if self.stopping:
            raise Stopped
        own.ready = lambda: True


class Shared:
    """Shared memory [.., rows, columns] with a version and a validity for each row."""

    def __init__(self, data: Tensor, versions: Tensor, valid: Tensor, *, turned=False) -> None:
        self.data, self.versions, self.valid, self.turned = data, versions, valid, turned
        self.dtype, self.shape = data.dtype, list(data.shape)

    @classmethod
    def new(cls, dtype: torch.dtype, shape: Sequence[int]) -> "Shared":
        data = torch.full(shape, float("nan"), dtype=dtype)
        versions = torch.zeros(shape[:-1], dtype=torch.int64)
        return cls(data, versions, torch.zeros(shape[:-1], dtype=torch.bool))

    def index(self, i: Any) -> "Shared":
        assert 0 <= int(i) < len(self.data)
        return Shared(self.data[int(i)], self.versions[int(i)], self.valid[int(i)])

    def permute(self, order: Sequence[int]) -> "Shared":
        assert order == (1, 0) and not self.turned
        return Shared(self.data, self.versions, self.valid, turned=True)

    def overwrite(self) -> None:
        """Starts a write: until it completes, no one may read."""
        self.data.fill_(float("nan"))
        self.versions += 1
        self.valid.fill_(False)

    def value(self) -> Tensor:
        if not self.valid.all():
            raise SynchronizationError("a product reads shared memory that is not filled")
        return self.data.T if self.turned else self.data


class Copy:
    """A copy by pointers into shared memory, which the threads of one partition wait for."""

    def __init__(self, to: Shared, rows: Tensor) -> None:
        self.to, self.rows = to, rows
        to.overwrite()

    def complete(self) -> None:
        self.to.data.copy_(self.rows)


class Barrier:
    """An mbarrier: a phase completes when all arrivals and all bytes are there."""

    def __init__(self) -> None:
        self.count, self.pending, self.bytes, self.phase = 0, 0, 0, 0

    def init(self, count: int) -> None:
        assert self.count == 0
        self.count = self.pending = count

    def arrive(self, count: int) -> None:
        if not self.count or self.pending < count:
            raise SynchronizationError("a barrier got more arrivals than it counts")
        self.pending -= count
        self._advance()

    def arrived(self, count: int) -> None:
        self.bytes -= count
        self._advance()

    def _advance(self) -> None:
        if not self.pending and not self.bytes:
            self.phase ^= 1
            self.pending = self.count


class Barriers:
    """Shared memory of barriers."""

    def __init__(self, shape: Sequence[int]) -> None:
        self.barriers = [Barrier() for _ in range(shape[0])]

    def index(self, i: Any) -> Barrier:
        assert 0 <= int(i) < len(self.barriers)
        return self.barriers[int(i)]


class Product:
    """A product that tensor cores compute some time after it was issued."""

    def __init__(self, partition: Partition, a: Any, b: Shared, acc: Any, use_acc: bool) -> None:
        self.partition, self.acc, self.use_acc = partition, acc, use_acc
        self.operands, self.result = (a, b), None
        self.reads = [(x, x.versions.clone()) for x in self.operands if isinstance(x, Shared)]
        for x, _ in self.reads:
            x.value()

    def complete(self) -> None:
        for x, versions in self.reads:
            if not torch.equal(x.versions, versions):
                raise SynchronizationError("shared memory was overwritten during a product")
        a, b = (x.value() if isinstance(x, Shared) else x for x in self.operands)
        acc = self.acc.result if isinstance(self.acc, Product) else self.acc
        product = a.float() @ b.float()
        self.result = product + acc if self.use_acc else product
        self.partition.products.remove(self)
        self.partition.read += self.reads


class Pointer:
    """Addresses in a tensor's memory."""

    def __init__(self, memory: Tensor, at: Any) -> None:
        self.memory, self.at = memory, at
        self.dtype = SimpleNamespace(element_ty=memory.dtype)

    @classmethod
    def of(cls, x: Tensor) -> "Pointer":
        size = x.untyped_storage().nbytes() // x.itemsize - x.storage_offset()
        return cls(x.as_strided((size,), (1,)), torch.zeros((), dtype=torch.int64))

    def __add__(self, more: Any) -> "Pointer":
        return Pointer(self.memory, self.at + more)

    def addresses(self, mask: Any) -> tuple[Tensor, Tensor]:
        """Returns the addresses that exist, and where they stand in the tensor of pointers."""
        at, there = torch.broadcast_tensors(
            self.at, torch.as_tensor(True if mask is None else mask)
        )
        used = at[there]
        if used.numel() and (used.min() < 0 or used.max() >= len(self.memory)):
            raise IndexError(f"an address is outside of a tensor of {len(self.memory)} numbers")
        return used, there


class Descriptor:
    """A tensor descriptor of a matrix, by which TMA copies tiles."""

    def __init__(self, described: Any) -> None:
        base, self.matrix_shape = described.base, described.shape
        self.memory = Pointer.of(base).memory
        self.width = described.strides[0]
        self.dtype, self.layout = base.dtype, described.layout
        shape = described.block_shape
        self.block_type = SimpleNamespace(shape=shape, nbytes=shape[0] * shape[1] * base.itemsize)

    def tile(self, row: int, column: int) -> Tensor:
        """Copies a tile; what is outside of the matrix is 0."""
        tile = torch.zeros(self.block_type.shape, dtype=self.dtype)
        rows, columns = (
            torch.arange(n) + at for n, at in zip(tile.shape, (row, column), strict=True)
        )
        assert (rows[:, None] >= 0).all() and (columns >= 0).all()
        inside = (rows < self.matrix_shape[0])[:, None] & (columns < self.matrix_shape[1])
        at = rows[:, None] * self.width + columns
        inside &= at < len(self.memory)
        tile[inside] = self.memory[at[inside]]
        return tile


class Language:
    """Stands for what kernels use of `triton.language`, `gluon.language` and Hopper's functions."""

    int32, int64, uint32 = torch.int32, torch.int64, torch.int64
    float32 = torch.float32
    static_range = range
    where, exp2, exp, log = torch.where, torch.exp2, torch.exp, torch.log

    def __init__(self, program: Program, number: int) -> None:
        self._program, self._number = program, number
        for name in ("NVMMADistributedLayout", "SliceLayout", "BlockedLayout", "DotOperandLayout"):
            setattr(self, name, lambda *_: None)
        self.mbarrier = SimpleNamespace(
            MBarrierLayout=lambda: None, init=self._init, wait=self._wait, expect=self._expect,
            arrive=self._arrive,
        )  # fmt: skip
        self.tma = SimpleNamespace(async_copy_global_to_shared=self._copy_tile)
        self.async_copy = SimpleNamespace(
            async_copy_global_to_shared=self._copy_rows, commit_group=self._commit_group,
            wait_group=self._wait_group,
        )  # fmt: skip

    @staticmethod
    def constexpr(value: Any) -> Any:
        return value

    def program_id(self, axis: int) -> Tensor:
        return torch.tensor(self._number, dtype=torch.int32)

    @staticmethod
    def cast(x: Any, dtype: torch.dtype) -> Tensor:
        return torch.as_tensor(x).to(dtype)

    @staticmethod
    def arange(first: int, last: int, layout: Any = None) -> Tensor:
        return torch.arange(first, last, dtype=torch.int32)

    @staticmethod
    def full(shape: Sequence[int], value: float, dtype: torch.dtype, layout: Any = None) -> Tensor:
        return torch.full(shape, value, dtype=dtype)

    @staticmethod
    def zeros(shape: Sequence[int], dtype: torch.dtype, layout: Any = None) -> Tensor:
        return torch.zeros(shape, dtype=dtype)

    zeros_like = staticmethod(torch.zeros_like)

    @staticmethod
    def convert_layout(x: Tensor, layout: Any) -> Tensor:
        return x

    @staticmethod
    def max(x: Tensor, axis: int) -> Tensor:
        return x.amax(axis)

    @staticmethod
    def sum(x: Tensor, axis: int) -> Tensor:
        return x.sum(axis)

    @staticmethod
    def maximum(a: Any, b: Any) -> Tensor:
        return torch.maximum(torch.as_tensor(a), torch.as_tensor(b))

    @staticmethod
    def minimum(a: Any, b: Any) -> Tensor:
        return torch.minimum(torch.as_tensor(a), torch.as_tensor(b))

    @staticmethod
    def load(pointer: Pointer, mask: Any = None, other: float = 0) -> Tensor:
        used, there = pointer.addresses(mask)
        found = torch.full(there.shape, other, dtype=pointer.memory.dtype)
        found[there] = pointer.memory[used]
        return found

    @staticmethod
    def store(pointer: Pointer, value: Tensor, mask: Any = None) -> None:
        used, there = pointer.addresses(mask)
        pointer.memory[used] = value.broadcast_to(there.shape)[there].to(pointer.memory.dtype)

    def allocate_shared_memory(self, dtype: Any, shape: Sequence[int], layout: Any) -> Any:
        if dtype is self.int64:
            return Barriers(shape) if len(shape) == 2 else Barrier()
        return Shared.new(dtype, shape)

    def warp_specialize(self, functions: Sequence[Any], warps: Any, registers: Any) -> None:
        self._program.run([lambda f=f, args=args: f(*args) for f, args in functions])

    def thread_barrier(self) -> None:
        self._program.pause()
        own = self._program.current
        own.check_reads()
        for to in own.fenced:
            to.valid.fill_(True)
        own.fenced.clear()

    def fence_async_shared(self) -> None:
        if (own := self._program.current) is not None:
            own.fenced += own.arrived
            own.arrived.clear()

    @staticmethod
    def _init(barrier: Barrier, count: int) -> None:
        barrier.init(count)

    def _wait(self, barrier: Barrier, phase: Any, pred: Any = True) -> None:
        if pred:
            assert barrier.count
            self._program.pause(lambda: barrier.phase != int(phase))

    def _expect(self, barrier: Barrier, count: int) -> None:
        self._program.pause()
        barrier.bytes += count
        barrier.arrive(1)

    def _arrive(self, barrier: Barrier, count: int) -> None:
        self._program.pause()
        barrier.arrive(count)

    def _copy_tile(
        self, tiles: Descriptor, at: Sequence[Any], barrier: Barrier, to: Shared
    ) -> None:
        self._program.pause()
        assert to.shape == list(tiles.block_type.shape)
        to.overwrite()
        row, column = map(int, at)

        def complete() -> None:
            self._program.events.remove(complete)
            to.data.copy_(tiles.tile(row, column))
            to.valid.fill_(True)
            barrier.arrived(tiles.block_type.nbytes)

        self._program.events.append(complete)

    def _copy_rows(self, to: Shared, pointers: Pointer, mask: Tensor) -> None:
        self._program.pause()
        self._program.current.copies[-1].append(Copy(to, self.load(pointers, mask)))

    def _commit_group(self) -> None:
        self._program.current.copies.append([])

    def _wait_group(self, outstanding: int) -> None:
        own = self._program.current
        while len(own.copies) - 1 > outstanding:
            for copy in own.copies.pop(0):
                copy.complete()
                own.arrived.append(copy.to)

    def warpgroup_mma(
        self, a: Any, b: Shared, acc: Any, *, use_acc: bool = True, is_async: bool = False
    ) -> Product:
        assert is_async
        self._program.pause()
        own = self._program.current
        own.products.append(made := Product(own, a, b, acc, use_acc))
        self._program.issued.append(own.number)
        return made

    def warpgroup_mma_wait(self, outstanding: int = 0, *, deps: Sequence[Any]) -> Any:
        own = self._program.current
        self._program.pause(lambda: len(own.products) <= outstanding)
        if any(isinstance(x, Product) and x.result is None for x in deps):
            raise SynchronizationError("a product is used before the wait for it")
        found = tuple(x.result if isinstance(x, Product) else x for x in deps)
        return found if len(found) > 1 else found[0]


def functions_of(file: str, language: Language, names: dict[str, Any], planted: Any) -> dict:
    """Runs a file of kernels with `language` in place of what it imports; returns its names."""
    text = (FOLDER / file).read_text()
    for old, new in planted:
        assert text.count(old) == 1, f"{text.count(old)} times in {file}: {old}"
        text = text.replace(old, new)
    tree = ast.parse(text)
    tree.body = [x for x in tree.body if not isinstance(x, ast.Import | ast.ImportFrom)]
    for x in ast.walk(tree):
        if isinstance(x, ast.FunctionDef):
            x.decorator_list = []
    scope = {**names, "tl": language, "gl": language}
    exec(compile(tree, file, "exec"), scope)
    return scope


def run(
    kernel: str, file: str, programs: int, arguments: dict[str, Any], seed: int,
    planted: Sequence[tuple[str, str]] = (),
) -> list[Program]:  # fmt: skip
    """Runs a kernel of a file for all programs of a grid.

    Args:
        arguments: of the kernel, by name, as a launch has them.
        seed: of the choices of what happens next.
        planted: pairs of texts; each first one is replaced in the file, to plant a defect.
    """
    return list(_run(kernel, file, programs, arguments, seed, planted))


def _run(
    kernel: str, file: str, programs: int, arguments: dict[str, Any], seed: int, planted: Any
) -> Iterator[Program]:
    import inspect

    from sparsering.kernels.triton import walk

    for number in range(programs):
        program = Program(seed * programs + number)
        language = Language(program, number)
        names: dict[str, Any] = {
            "UNIT": walk.UNIT,
            "CUT": walk.CUT,
            "Callable": Callable,
            "Any": Any,
        }
        names["triton"] = SimpleNamespace(jit=None)  # decorators are left out
        for name in ("mbarrier", "tma", "async_copy", "fence_async_shared", "warpgroup_mma"):
            names[name] = getattr(language, name)
        names["warpgroup_mma_wait"] = language.warpgroup_mma_wait
        for other in ("device.py", "combine.py"):
            names |= functions_of(other, language, names, ())
        function = functions_of(file, language, names, planted)[kernel]
        kinds = inspect.get_annotations(function)
        function(**{name: _given(x, kinds.get(name)) for name, x in arguments.items()})
        yield program


def _given(x: Any, kind: Any) -> Any:
    """An argument as the kernel gets it."""
    if isinstance(x, Tensor):
        return Pointer.of(x)
    if hasattr(x, "block_shape"):
        return Descriptor(x)
    return torch.tensor(x, dtype=kind) if isinstance(kind, torch.dtype) else x
