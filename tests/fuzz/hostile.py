"""Hostile values: calls every public name with one or two arguments that it does not expect.

A call either works, or raises an error that names the argument. Afterwards, the valid call must
still work.
"""

import faulthandler
import math
import re
import resource
import signal
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from numbers import Real
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import numpy as np
import torch
from torch import Tensor

import sparsering as sr
from sparsering import distributed

from .attack import Cell, Refused
from .sane import SANE, Given

SECONDS, MEMORY = 5.0, 2 << 30


class Subclass(Tensor):
    """A subclass of Tensor, as a hostile value."""


LONG = "'x' * 100000"
VALUES = {  # sources of values; x is the valid value, `others` are the other arguments' values
    "none": "None",
    "bool": "True; False; np.True_; torch.tensor(True)",
    "text": f"''; 'x'; b'x'; {LONG}; '1'; '\\0'; 'cpu'; 'meta'; str(x)[:99]",
    "container": "[]; {}; (); [x]; (x, x); {'a': x}; range(3); iter(()); [None]; [[1], [2, 3]]; "
    "[1.5]; [-1]; [2**63]; ['a']; (1, True); [10**400, 1]; (nan, 1.0); [[]]; set(); [[1, 2]] * 2",
    "object": "object(); int; len; ...; NotImplemented; ValueError('x'); sr.Full; torch.float16; "
    "torch.device('meta'); FIRST; FIRST + FIRST; torch.Size([2])",
    "numpy": "np.zeros(3); np.array('x'); np.array([]); np.float64(0.5); np.int64(2); np.array(1); "
    "np.array([None, 1]); np.float32(nan); np.int8(-1); np.uint64(2**64 - 1); np.void(b'x')",
    "complex": "1j; complex('nan'); torch.tensor(1j); np.complex64(1)",
    "float": "1.5; nan; inf; -inf; -0.0; 1e308; 5e-324; Fraction(1, 3); Decimal('0.5'); 1e-46; 2.0",
    "integer": "-1; 0; 1; 3; 2**31; 2**53; 2**63 - 1; 2**63; -2**63; 10**400; 2**64",
    "0-d": "torch.tensor(1.5); torch.tensor(1); torch.tensor(nan); torch.tensor(2**62); "
    "torch.tensor(3, device='meta'); torch.tensor(-1)",
    "tensor": "torch.randn(3); torch.zeros(0); torch.ones(2, 3, dtype=torch.bool); "
    "torch.tensor([-1]); torch.tensor([2**63 - 1, 0]); torch.empty(2, device='meta'); "
    "torch.ones(2, 2).to_sparse(); torch.tensor([1, 1], dtype=torch.uint8); torch.zeros(2, 0); "
    "torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]); torch.ones(2, requires_grad=True)",
    "same": "np.int64(x); float(x); torch.tensor(x); np.array(x); Fraction(x); np.float64(x); "
    "list(x); torch.tensor(list(x)); np.array(list(x)); Text(x)",
    "another": "others[0]; others[1]; others[2]; others[-1]; others[-2]",
    "missing": "MISSING",
    # kinds that apply only to tensors
    "dims": "x[None]; x[0]; x.flatten(); x[..., None]; x.sum(); x[None, None]; x.movedim(0, -1)",
    "shape": "torch.cat([x, x]); torch.cat([x, x], -1); x.mT.contiguous(); x[..., :-1]; x[:1]; "
    "x[..., :1]; torch.cat([x, x], 1); x[:, :1]; x[:, :-1]; torch.cat([x, x], -2)",
    "size 0": "x[:0]; x[:, :0]; x[..., :0]; x[..., :0, :]; x.new_zeros(0); x[:0, :0]",
    "dtype": "x.double(); x.half(); x.bfloat16(); x.long(); x.bool(); x.cfloat(); x.int(); "
    "x.to(torch.float8_e4m3fn); x.to(torch.uint8); x.short(); x.float(); x.to(torch.uint64)",
    "layout": "x.to_sparse(); x.to('meta'); torch.nested.nested_tensor(list(x)); x.to_mkldnn(); "
    "x.flatten(1).to_sparse_csr()",
    "numbers": "torch.full_like(x, nan); torch.full_like(x, inf); torch.full_like(x, -inf); "
    "torch.full_like(x, -1); torch.zeros_like(x); x * 3e38; x + 2**62; x - 2**62 - 2**62; x + 3; "
    "x + 2**31; -x; x.flip(0)",
    "same tensor": "x.as_subclass(Subclass); torch.nn.Parameter(x.clone()); "
    "x.clone().requires_grad_(); torch._neg_view(-x); x.mT.contiguous().mT; x.tolist(); "
    "x.numpy(); inference(x); x.repeat_interleave(2, -1)[..., ::2]; torch.nn.Buffer(x); "
    "x.clone().requires_grad_() * 1",
}
OF_TENSORS = ("dims", "shape", "size 0", "dtype", "layout", "numbers", "same tensor")
CODE = {kind: [part.strip() for part in text.split("; ")] for kind, text in VALUES.items()}
MISSING = object()


class Text(str):
    """A subclass of str, as a hostile value."""


def inference(x: Tensor) -> Tensor:
    with torch.inference_mode():
        return x.clone()


@cache
def _compiled(source: str) -> Any:
    return compile(source, source, "eval")


def value_of(source: str, given: Given, name: str) -> Any:
    """Evaluates a source of `VALUES` for an argument."""
    others = [other for key, other in given.items() if key != name]
    return eval(
        _compiled(source),
        globals() | {"x": given.get(name), "others": others, "nan": math.nan, "inf": math.inf},
    )


def flat(x: Any) -> list[Any]:
    """Tensors, numbers and texts of a result."""
    if isinstance(x, type):
        return []
    if isinstance(x, tuple | list):
        return [found for part in x for found in flat(part)]
    if isinstance(x, dict):
        return flat(list(x.values()))
    if isinstance(x, sr.BlockLayout):
        on_meta = any(t.is_meta for p in x.passes for t in p.tensors())
        return [] if on_meta else [str(x), x.num_pairs]  # tables on meta have shapes alone
    if isinstance(x, sr.BlockWeights):
        return [x.values]
    if hasattr(x, "__dataclass_fields__") and not isinstance(x, sr.Pattern):
        return flat(list(vars(x).values()))
    return [x]


def is_large(x: Any) -> bool:
    """Whether x is, or contains, an int from 2 ** 20 to 2 ** 53."""
    return any(isinstance(part, int) and 1 << 20 <= part <= 1 << 53 for part in flat(x))


def _legal(name: str) -> Iterator[tuple[str, str, int]]:
    """Yields every (argument, kind, number) whose source evaluates without an error."""
    torch.manual_seed(0)
    _, given = SANE[name]()
    for argument, x in given.items():
        for kind, sources in CODE.items():
            if kind in OF_TENSORS and not isinstance(x, Tensor):
                continue
            for number, source in enumerate(sources):
                try:
                    value = value_of(source, given, argument)
                    assert kind != "same" or isinstance(x, str | tuple | list) or value == x
                except Exception:
                    continue
                yield argument, kind, number
    yield "unknown", "none", 0


LEGAL = {name: list(_legal(name)) for name in SANE}
CELLS = sorted({Cell(k, a, name, "-") for name, legal in LEGAL.items() for a, k, _ in legal})

ALLOWED = (ValueError, TypeError, NotImplementedError, ImportError, distributed.RingError)


@dataclass(frozen=True)
class Hostile:
    """One call with some arguments replaced: (argument, kind of value, number of the value)."""

    name: str
    replaced: tuple[tuple[str, str, int], ...]
    backend: str | None = None

    def cells(self) -> list[Cell]:
        return [Cell(kind, argument, self.name, "-") for argument, kind, _ in self.replaced]

    def check(self) -> None:
        call, given = self.sane()
        bad = dict(given)
        for argument, kind, number in self.replaced:
            value = value_of(CODE[kind][number], given, argument)
            if value is MISSING:
                bad.pop(argument)
            else:
                bad[argument] = value
        refusal = None
        try:
            with guarded(not self.asks_much(bad)):
                result = call(**bad)
        except ALLOWED as error:
            refusal = error
            self.judge(error)
        except (MemoryError, RuntimeError) as error:
            if not (isinstance(error, MemoryError) or re.search(OF_TORCH, str(error))):
                raise
            raise Refused("by torch, in its words") from error
        else:
            self.judge_result(result, given, bad)
        if refusal is None and self.name.split(".")[0] in STATEFUL:
            return
        torch.manual_seed(0)
        different = differs(call(**given), self.expected())
        assert not different, f"after that call the right one gives {different}"

    def asks_much(self, bad: Given) -> bool:
        """Whether it may take long: lengths of millions, given or looked for."""
        return self.name == "longest_sequence" or is_large(list(bad.values()))

    def sane(self) -> tuple[Callable[..., Any], Given]:
        torch.manual_seed(0)
        call, given = SANE[self.name]()
        if "backend" in given and self.backend:
            given["backend"] = self.backend
        return call, given

    def expected(self) -> Any:
        return _expected(self.name, self.backend)

    def judge(self, error: Exception) -> None:
        """Checks that an error message is short and names the argument."""
        text = str(error)
        assert text and text.isascii() and len(text) < 2000, f"such a message: {text[:500]!r}"
        if len(self.replaced) > 1 or self.replaced[0][1] in ("missing", "unknown"):
            return
        argument = self.replaced[0][0]
        names = [*self.sane()[1], *re.split("[ .]", self.name), argument.split("_")[-1]]
        names += ["pattern", "SelectedBlocks", "cache"]
        names += ["x", "query"] if argument in ("embed_dim", "dtype") else []  # of modules
        told = any(re.search(rf"(?i)(\b|_){word.rstrip('s')}", text) for word in names)
        assert told and re.search("got|need|must|takes|no ", text), (
            f"the argument {argument} is not named: {text!r}"
        )
        origin = traceback.extract_tb(error.__traceback__)[-1].filename
        assert argument in text or "sparsering" in origin, f"raised by {origin}: {text!r}"

    def judge_result(self, result: Any, given: Given, bad: Given) -> None:
        kinds = {kind for _, kind, _ in self.replaced}
        if all(is_finite(x) for x in bad.values()) and self.name not in SAY_NAN:
            assert all(is_finite(x) or not nan_in(x) for x in flat(result)), "NaN of finite values"
        learns = any(isinstance(x, Tensor) and x.requires_grad for x in bad.values())
        if kinds <= {"same", "same tensor"} and not (learns and self.name == "explain"):
            different = differs(result, self.expected())
            assert not different, f"equal values give {different}"


OF_TORCH = (
    r"can't allocate memory|not enough memory|Storage size calculation overflowed|"
    "Inference tensors cannot be saved for backward|is not on the expected device"  # linear layers
)
SAY_NAN = ("selection_report", "selection_loss")  # of drawn rows, of negative masses
STATEFUL = ("nn", "KVCache", "SelectedCache", "BlockSummaries", "PatternRefiner", "GatedSchedule")


@contextmanager
def guarded(is_small: bool) -> Iterator[None]:
    """Limits the processor time and memory of a call; a small call that exceeds them is a fault."""

    def late(*_: Any) -> None:
        error = AssertionError if is_small else Refused
        raise error(f"still at it after {SECONDS:g} seconds")

    known = signal.signal(signal.SIGPROF, late)
    before = resource.getrlimit(resource.RLIMIT_AS)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    signal.setitimer(signal.ITIMER_PROF, SECONDS, 0.5)  # again, if a callback swallows the error
    faulthandler.dump_traceback_later(300, exit=True, file=sys.__stderr__)  # waits, not works
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + MEMORY, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)
        faulthandler.cancel_dump_traceback_later()
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, known)


def is_finite(x: Any) -> bool:
    """Whether a value is so small that sums stay finite."""
    if isinstance(x, tuple | list):
        return all(map(is_finite, x))
    if isinstance(x, Tensor) and x.layout is torch.strided and not x.is_meta and not x.is_nested:
        return not x.is_floating_point() or bool((x.detach().double().abs() < 1e9).all())
    if isinstance(x, float | np.floating):
        return abs(x) < 1e9
    return not isinstance(x, Tensor | np.ndarray)


def nan_in(x: Any) -> bool:
    return bool(x.isnan().any()) if isinstance(x, Tensor) and not x.is_meta else x != x


def differs(a: Any, b: Any) -> str:
    """Describes the first difference of two results; "" if they agree."""
    a, b = flat(a), flat(b)
    if len(a) != len(b):
        return f"{len(a)} results instead of {len(b)}"
    for x, y in zip(a, b, strict=True):
        if isinstance(y, Tensor):
            if not isinstance(x, Tensor) or x.shape != y.shape:
                return f"{x} instead of {y}"
            if not torch.allclose(x.double(), y.double(), rtol=1e-4, atol=1e-5, equal_nan=True):
                return f"{x} instead of {y}"
        elif isinstance(y, float | int):
            if not isinstance(x, Real) or not math.isclose(x, y, rel_tol=1e-6):
                return f"{x} instead of {y}"
        elif isinstance(y, str | sr.Pattern) and x != y:
            return f"{x} instead of {y}"
    return ""


@cache
def _expected(name: str, backend: str | None) -> Any:
    call, given = Hostile(name, (), backend).sane()
    torch.manual_seed(0)
    return call(**given)


@st.composite
def cases(draw: st.DrawFn, cell: Cell) -> Hostile:
    """Draws calls with a value of the cell's kind for its argument, sometimes with a second one."""
    name, legal = cell.backend, LEGAL[cell.backend]
    numbers = [entry for entry in legal if entry[:2] == (cell.pattern, cell.option)]
    replaced = (draw(st.sampled_from(numbers)),)
    if draw(st.integers(0, 3)) == 3:
        second = draw(st.sampled_from(legal))
        if second[0] != cell.pattern:
            replaced = (*replaced, second)
    backend = draw(st.sampled_from((None, "reference", "gather", "cpu")))
    return Hostile(name, replaced, backend if name in BACKENDS_OF else None)


BACKENDS_OF = (
    *("attention", "attention slots", "attention plain", "attention_varlen", "KVCache.attend"),
)
