"""The stub's devices: one of each compute capability, as `torch.cuda` and as Triton's driver."""

import contextlib
import ctypes
import functools
import hashlib
import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from . import tensors
from .counts import (
    Launch,
    capturing,
    is_capturing,
    note_compile,
    note_launch,
    note_sync,
    waits_raise,
)

# Multiprocessors and bytes of shared memory of a block, by compute capability. The device's number
# is its place in this list; `driver.c` and `torch_devices.cpp` know the same devices.
DEVICES = {
    80: (108, 166912), 86: (84, 101376), 89: (58, 101376), 90: (132, 232448),
    100: (148, 232448), 120: (170, 101376),
}  # fmt: skip
CAPABILITIES = tuple(DEVICES)
_HERE = Path(__file__).parent
_TORCH = Path(torch.__file__).parent


def missing() -> str:
    """Why the stub cannot run here; "" if it can."""
    if torch.version.cuda or torch.version.hip:
        return "the GPU stub needs a build of torch without CUDA"
    if find_spec("triton") is None:
        return "the GPU stub needs the package triton"
    absent = [name for name in ("gcc", "g++") if shutil.which(name) is None]
    return f"the GPU stub needs {' and '.join(absent)}" if absent else ""


@contextlib.contextmanager
def gpu(capability: int) -> Iterator[torch.device]:
    """Makes the device of a compute capability the current CUDA device; may be nested."""
    driver, _ = _installed()
    from triton import knobs
    from triton.runtime import driver as active

    device = torch.device("cuda", CAPABILITIES.index(capability))
    outermost, before = torch.cuda.current_device is not _current, _current()
    hook = knobs.runtime.jit_post_compile_hook
    with contextlib.ExitStack() as undo:
        undo.callback(_library().stub_choose, before, 1)
        undo.callback(setattr, knobs.runtime, "jit_post_compile_hook", hook)
        for where, name, value in _patches() if outermost else ():
            undo.callback(setattr, where, name, getattr(where, name))
            setattr(where, name, value)
        if outermost:
            undo.callback(active.reset_active)
            active.set_active(driver)
        knobs.runtime.jit_post_compile_hook = _compiled
        _library().stub_choose(device.index, 1)
        yield device


def _compiled(*, fn: Any, **rest: Any) -> None:
    note_compile(fn.jit_function.__name__)


# ---- Building and loading. -------------------------------------------------


def _built(source: str, name: str, *command: str) -> Path:
    """Compiles a source into the user's cache, once for each of its versions."""
    text = (_HERE / source).read_bytes() + " ".join(command).encode()
    version = hashlib.sha256(text + torch.__version__.encode()).hexdigest()[:16]
    path = Path.home() / ".cache" / "sparsering-gpu-stub" / version / name
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        own = path.with_name(f"{name}.{os.getpid()}")
        compiler, *flags = command
        line = [compiler, "-O1", "-shared", "-fPIC", str(_HERE / source), "-o", str(own), *flags]
        done = subprocess.run(line, check=False, capture_output=True, text=True)
        assert not done.returncode, done.stderr[-3000:]
        os.replace(own, path)
    return path


@functools.cache
def _library() -> ctypes.CDLL:
    abi = f"-D_GLIBCXX_USE_CXX11_ABI={int(torch._C._GLIBCXX_USE_CXX11_ABI)}"
    flags = ["-std=c++20", f"-I{_TORCH / 'include'}", abi]
    libraries = [f"-L{_TORCH / 'lib'}", "-ltorch_cpu", "-lc10"]
    return ctypes.CDLL(str(_built("torch_devices.cpp", "devices.so", "g++", *flags, *libraries)))


@functools.cache
def _installed() -> tuple[Any, tensors.Libraries]:
    """Builds and loads both libraries; outside of `gpu` they do nothing."""
    assert not missing(), missing()
    assert os.environ.get("TRITON_INTERPRET", "0") != "1", "the stub needs Triton's compiler"
    import triton

    include = Path(triton.__file__).parent / "backends" / "nvidia" / "include"
    flags = [f"-I{include}", "-Wl,-soname,libcuda.so.1"]
    stub = _built("driver.c", "libcuda.so.1", "gcc", *flags)
    with contextlib.suppress(FileExistsError):
        stub.with_name("libcuda.so").symlink_to(stub.name)  # by which the linker finds it
    os.environ["TRITON_LIBCUDA_PATH"] = str(stub.parent)
    loaded = ctypes.CDLL(str(stub), mode=ctypes.RTLD_GLOBAL)
    loaded.stub_message.restype = ctypes.c_char_p
    _library()
    return _driver(loaded), tensors.install(_current)


# ---- torch.cuda. -----------------------------------------------------------


def _current() -> int:
    return int(_library().stub_device())


def _index(device: Any) -> int:
    if device is None or isinstance(device, int):
        return _current() if device is None or device < 0 else device
    index = torch.device(device).index
    return _current() if index is None else index


class _Device:
    """In place of the context `torch.cuda.device`."""

    def __init__(self, device: Any) -> None:
        self.index = _index(device)

    def __enter__(self) -> None:
        self.before = _current()
        _library().stub_choose(self.index, 0)

    def __exit__(self, *error: object) -> None:
        _library().stub_choose(self.before, 0)


class Event:
    """An event of a stream: passed at once. Between two, the host's time passes."""

    def __init__(self, **options: Any) -> None:
        self.recorded = 0.0

    def record(self, stream: Any = None) -> None:
        self.recorded = time.perf_counter()

    def elapsed_time(self, end: "Event") -> float:
        return max(1e-3, (end.recorded - self.recorded) * 1e3)

    def wait(self, stream: Any = None) -> None: ...
    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        note_sync("Event.synchronize")


class Stream:
    """A stream: nothing runs, so that all are alike."""

    cuda_stream = 0

    def __init__(self, device: Any = None, priority: int = 0) -> None:
        self.device = torch.device("cuda", _index(device))

    def record_event(self, event: Event | None = None) -> Event:
        return event or Event()

    def wait_event(self, event: Event) -> None: ...
    def wait_stream(self, stream: "Stream") -> None: ...
    def synchronize(self) -> None:
        note_sync("Stream.synchronize")


class Graph:
    """A CUDA graph: nothing runs, so that a replay does nothing."""

    def replay(self) -> None: ...


@contextlib.contextmanager
def _capture(graph: Graph, **options: Any) -> Iterator[None]:
    with capturing():
        yield


_streams: dict[int, list[Stream]] = {}


def _stream_of(device: Any = None) -> Stream:
    return _streams.setdefault(index := _index(device), [Stream(index)])[-1]


@contextlib.contextmanager
def _use(stream: Stream) -> Iterator[None]:
    _stream_of(stream.device)
    _streams[stream.device.index].append(stream)
    try:
        yield
    finally:
        _streams[stream.device.index].remove(stream)


def _properties(device: Any = None) -> SimpleNamespace:
    capability = CAPABILITIES[_index(device)]
    processors, shared = DEVICES[capability]
    return SimpleNamespace(
        name=f"stub of {capability}", major=capability // 10, minor=capability % 10,
        multi_processor_count=processors, shared_memory_per_block_optin=shared,
        total_memory=80 << 30, warp_size=32, gcnArchName="",
    )  # fmt: skip


def _capability(device: Any = None) -> tuple[int, int]:
    return divmod(CAPABILITIES[_index(device)], 10)


def _patches() -> Iterator[tuple[Any, str, Any]]:
    """(owner, name, value) of all Python functions that ask for a GPU."""
    cuda = {
        "is_available": lambda: True, "is_initialized": lambda: True,
        "init": lambda: None, "_lazy_init": lambda: None,
        "device_count": lambda: len(CAPABILITIES), "current_device": _current,
        "device": _Device, "set_device": lambda d: _library().stub_choose(_index(d), 0),
        "get_device_capability": _capability, "get_device_properties": _properties,
        "get_device_name": lambda d=None: _properties(d).name,
        "Stream": Stream, "Event": Event, "stream": _use, "current_stream": _stream_of,
        "synchronize": lambda d=None: note_sync("torch.cuda.synchronize"),
        "is_current_stream_capturing": is_capturing, "CUDAGraph": Graph, "graph": _capture,
        "set_sync_debug_mode": lambda mode: waits_raise(mode == "error"),
        "memory_allocated": lambda d=None: 0, "max_memory_allocated": lambda d=None: 0,
        "reset_peak_memory_stats": lambda d=None: None,
        "mem_get_info": lambda d=None: (80 << 30, 80 << 30),
        "empty_cache": lambda: None, "is_bf16_supported": lambda *a: True,
        "get_rng_state": lambda d=None: torch.zeros(16, dtype=torch.uint8),
        "set_rng_state": lambda state, d=None: None, "manual_seed_all": lambda seed: None,
    }  # fmt: skip
    yield from ((torch.cuda, name, value) for name, value in cuda.items())
    for name in ("empty", "empty_like", "empty_strided", "zeros", "ones", "full", "tensor"):
        yield torch, name, _pinning(getattr(torch, name))
    yield Tensor, "is_pinned", tensors.is_pinned
    yield Tensor, "pin_memory", lambda x: x if tensors.is_pinned(x) else tensors.pin(x.clone())
    yield Tensor, "record_stream", lambda x, stream: None


def _pinning(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A function that allocates, with `pin_memory` for a torch that has no CUDA."""

    @functools.wraps(make)
    def run(*args: Any, pin_memory: bool = False, **kwargs: Any) -> Tensor:
        x = make(*args, **kwargs)
        return tensors.pin(x) if pin_memory else x

    return run


# ---- Triton's driver. ------------------------------------------------------


def _driver(stub: ctypes.CDLL) -> Any:
    from triton.backends.compiler import GPUTarget
    from triton.backends.nvidia import driver as nvidia

    def checked(call: Callable[..., Any], *args: Any) -> Any:
        stub.stub_begin(_current())
        try:
            return call(*args)
        except RuntimeError as error:
            text = stub.stub_message().decode()
            raise RuntimeError(text or str(error)) from None

    class Utils:
        def __init__(self) -> None:
            self.real = nvidia.CudaUtils()

        def __getattr__(self, name: str) -> Any:
            return functools.partial(checked, getattr(self.real, name))

    class Launcher(nvidia.CudaLauncher):
        def __init__(self, source: Any, metadata: Any) -> None:
            super().__init__(source, metadata)
            self.name, self.warps = metadata.name, metadata.num_warps
            self.shared = metadata.shared

        def __call__(self, x: int, y: int, z: int, stream: int, function: int, *args: Any) -> None:
            for argument in args[4:]:
                memory = getattr(argument, "base", argument)  # of a tensor descriptor
                there = not isinstance(memory, Tensor) or memory.device.index == _current()
                assert there, f"{self.name} on device {_current()} reads {memory.device}"
            # tensor maps are filled in the call, by `Utils.fill_tma_descriptor`
            checked(super().__call__, x, y, z, stream, function, *args)
            note_launch(Launch(self.name, x * y * z, self.warps, self.shared))

    class Driver(nvidia.CudaDriver):
        def __init__(self) -> None:
            self.utils, self.launcher_cls = Utils(), Launcher
            self.get_device_capability = _capability
            self.get_current_device = _current
            self.set_current_device = lambda device: _library().stub_choose(device, 0)
            self.get_current_stream = lambda device: 0

        def get_current_target(self) -> Any:
            return GPUTarget("cuda", CAPABILITIES[_current()], 32)

        def get_empty_cache_for_benchmark(self) -> Tensor:
            return torch.empty(256, dtype=torch.int, device="cuda")  # there is no L2 cache to empty

        @staticmethod
        def is_active() -> bool:
            return True

    return Driver()
