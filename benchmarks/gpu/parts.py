"""The measurements, part by part, the most important first.

`seconds` are estimates for an H100: a Triton kernel compiles in 1.5 s, FlexAttention in 8 s forward
and 10 s with backward; a timed call takes 0.3 s (5 turns of 60 ms), the start of a process 5 s.
Parts that are not timed run in six processes at once. `CALLS` groups the parts: four calls fill the
first half hour of a GPU, and `QUARTER` is the best of them for fifteen minutes.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

from ..measure import Row
from . import calls, company, correctness, lists, programs, shapes, speed, stages, tuned
from .device import STUB, sized

Case = Callable[[], Iterator[Row]]


class Part(NamedTuple):
    """A group of cases with a common description.

    Attributes:
        about: description for the reader of the report.
        cases: functions that yield rows; each case succeeds, fails or is left out on its own.
        seconds: estimated time of the whole part on an H100.
        bound: seconds after which no further case of the part starts.
        timed: whether the part needs the GPU to itself; cases of other parts run concurrently.
    """

    about: str
    cases: dict[str, Case]
    seconds: float
    bound: float
    timed: bool = True

    @property
    def module(self) -> str:
        """Name of the module that defines its cases."""
        case = next(iter(self.cases.values()))
        return getattr(case, "func", case).__module__


MAIN = [(128, 128), (64, 128), (128, 64), (64, 64)]
if sized(False, True):
    MAIN = [(64, 64)] if STUB else [(16, 32)]
LISTS = sized(  # heads, head dims of keys and of values, listed keys, tokens
    ((16, 128, 128, 512, 16384), (16, 128, 128, 2048, 16384), (128, 576, 512, 2048, 4096)),
    ((2, 16, 16, 8, 64), (2, 48, 32, 8, 64)),
)
NEW_MASKS = sized((128, 64), (32,))


def _named(width: int, block: int, *more: str) -> str:
    return ", ".join((f"D {width}", f"blocks of {block}", *more))


def _grid(tokens: int, with_flex: bool) -> dict[str, Case]:
    return {
        _named(*shape): partial(speed.grid, *shape, tokens, with_flex and shape[1] == 128)
        for shape in MAIN
    }


def _patterns(dtype: str, shares: int) -> dict[str, Case]:
    return {
        f"{dtype}, share {n + 1} of {shares}": partial(correctness.every_pattern, dtype, n, shares)
        for n in range(sized(shares, 1))
    }


HEAD_DIMS = sized((256, 512, 32, 48, 64, 72, 80, 96, 128, 192, 16), (24, 40))
BLOCKS = sized((16, 32, 48, 96, 160, 256), (48,))
EXTRAS = {
    "bfloat16": calls.EXTRAS,
    "float32": sized(calls.EXTRAS, ("all",)),
    "float16": sized(("dropout", "all"), ()),
    correctness.TF32: sized(("all",), ()),
}
BACKENDS = ("triton", "gather", "reference")

SMOKE = "smoke"
"""Name of the first part: if it fails, nothing else runs."""

PARTS: dict[str, Part] = {
    SMOKE: Part(
        "One forward and one backward of a causal window, bfloat16, against float64, and the "
        "choice of blocks, which is the CPU's. If it fails, its error is the record.",
        {"one call": correctness.smoke, "choice of blocks": correctness.choice}, 40, 90,
    ),
    "kernel tests are right": Part(
        "The tests of the kernels, on this GPU: each case twice, with equal bits, and with "
        "pipelines of one stage.",
        {name: partial(programs.kernel_tests, name) for name in programs.TESTS},
        95, 120, timed=False,
    ),
    "memory and races are right": Part(
        "The smoke under compute-sanitizer: accesses beyond a tensor, races in shared memory, "
        "barriers.",
        {tool: partial(programs.sanitized, tool) for tool in programs.SANITIZERS},
        90, 160, timed=False,
    ),
    "ten results are right": Part(
        "Ten patterns of the tests in bfloat16 and float32, with lse and all gradients, against "
        "float64.",
        {
            f"{dtype}, share {n + 1} of 2": partial(correctness.ten_patterns, dtype, n)
            for dtype in ("bfloat16", "float32") for n in range(2)
        },
        50, 110, timed=False,
    ),
    "launches are right": Part(
        "One call of each kind of launch that the smoke lacks, forward and backward, against "
        "float64: packed heads, heads that share sums, cut tiles, several passes, a single query, "
        "float32, lists of keys, a draft, 8 bits.",
        {
            **{name: partial(correctness.launches, name) for name in correctness.LAUNCHES},
            "lists of keys": lists.right, "drafts": calls.drafts, "8 bits": calls.stored,
            "unlike heads": calls.unlike_heads,
        },
        60, 150, timed=False,
    ),
    "main shapes are right": Part(
        "Random blocks, a window and LongNet at the shapes that are measured below, bfloat16: out, "
        "lse and gradients through both against float64; an error may be twice that of dense "
        "attention in bfloat16.",
        {_named(*shape): partial(correctness.main_shapes, *shape) for shape in MAIN},
        60, 150, timed=False,
    ),
    "calls are right": Part(
        "CUDA graphs replayed on new inputs, torch.compile, calls that never wait for the GPU, "
        "gradients through lse and a bias of blocks; against float64. Rows in any company, under "
        "batch_invariant, bit for bit.",
        {
            "graphs": calls.graphs, "a graph that selects": calls.graph_of_selected,
            "torch.compile": calls.compiled, "no waits": calls.without_waiting,
            "lists without waits": lists.without_waiting,
            **{f"in company, {dtype}": partial(company.company, dtype)
               for dtype in ("bfloat16", "float32")},
            "a bias of blocks": correctness.biased_selection,
        },
        30, 90, timed=False,
    ),
    "stages, compiled": Part(
        "Every config of the next part, compiled: registers, spilled registers, shared memory, or "
        "why it cannot be.",
        {
            _named(*shape, f"share {n + 1} of 3"): partial(stages.compile_ahead, *shape, n, 3)
            for shape in MAIN for n in range(sized(3, 1))
        },
        45, 110, timed=False,
    ),
    "ceilings": Part(
        "A bfloat16 matrix product of 8192 and a copy of 2 GB, both ways counted, on random "
        "numbers.",
        {"matmul and copy": speed.ceilings}, 5, 30,
    ),
    "stages and tiles": Part(
        "The forward, dQ, and dK with dV, each launched alone with 2, 3 and 4 stages and several "
        "streamed tiles: time, error, and whether the bits are those of the default.",
        {_named(*shape): partial(stages.measured, *shape) for shape in MAIN}, 80, 160,
    ),
    "profiles": Part(
        "One forward and one dK and dV at the main shape under ncu: tensor cores, L2, stalls.",
        {kernel: partial(programs.profiled, kernel) for kernel in ("forward", "key")}, 50, 100,
    ),
    "main shapes": Part(
        "10% random blocks, 16 heads, 32768 tokens, bfloat16. Rates count visited blocks.",
        {_named(*shape): partial(speed.main_shape, *shape) for shape in MAIN}, 180, 240,
    ),
    "share of dense": Part(
        "10% random blocks beside our own dense attention, cudnn-frontend's block-sparse kernels "
        "and FlashInfer's: the rate of a visited pair, as a share of the rate of our Full().",
        {_named(*shape): partial(shapes.share_of_dense, *shape) for shape in MAIN}, 60, 120,
    ),
    "lists": Part(
        "One list of keys for all heads: 16 heads of 128, 16384 tokens, beside dense attention; "
        "latents of 576 and 512, 128 heads, 4096 tokens. Rates count distinct keys.",
        {
            f"{heads} heads, D {width}, {slots} keys": partial(
                lists.timed, heads, width, value_dim, slots, tokens)
            for heads, width, value_dim, slots, tokens in LISTS
        },
        60, 130,
    ),
    "packed heads": Part(
        "10% random blocks, 16 heads on 4, 32768 tokens: heads of a group in one program, and one "
        "head at a time, in turns.",
        {_named(*shape): partial(shapes.packed_heads, *shape) for shape in MAIN[::2]}, 30, 90,
    ),
    "new masks": Part(
        "From a new choice of blocks on the GPU to the launch of its first tile, beside "
        "FlashInfer's plan().",
        {f"blocks of {block}": partial(shapes.new_masks, block) for block in NEW_MASKS}, 20, 60,
    ),
    "founding table": Part(
        "4096 tokens, 8 heads of 64, float16, a window of blocks that leaves out 90%: called from "
        "Python, and as a replayed CUDA graph.",
        {"forward": speed.founding_table}, 10, 30,
    ),
    "overhead": Part(
        "What a tiny call costs the host, not waited for, its layout cached.",
        {"a tiny call": speed.overhead}, 6, 30,
    ),
    "layouts": Part(
        "From a pattern to its tables on the GPU, through the host, nothing cached, 16 heads, "
        "blocks of 128.",
        {"2^20 tokens": speed.layouts}, 10, 45,
    ),
    "longnet": Part(
        "LongNet of five branches, a million tokens, 16 heads of 64; dense attention at 32768.",
        {"2^20 tokens": speed.longnet}, 25, 60,
    ),
    "windows": Part(
        "Causal windows at 65536 tokens, 16 heads of 128, beside FlexAttention and, where it is "
        "installed, FlashAttention-3. Rates count exact pairs.",
        {f"{size} keys": partial(shapes.window, size) for size in sized((4096, 1024, 256), (40,))},
        75, 150,
    ),
    "documents": Part(
        "Packed documents of ragged lengths, causal, 65536 tokens, 16 heads of 128.",
        {"65536 tokens": shapes.documents}, 25, 60,
    ),
    "selected blocks": Part(
        "10% of the blocks, chosen for each row and head, beside random blocks: laid out once, and "
        "anew at each call.",
        {"main shape": shapes.selected}, 15, 45,
    ),
    "decoding": Part(
        "One query of 32 heads against 131072 keys of 8, beside dense attention, FlexAttention and "
        "reading the keys; and a token of a KVCache.",
        {"131072 keys": shapes.decoding}, 25, 60,
    ),
    "every pattern is right": Part(
        "The patterns of the tests, 450 tokens, 4 heads of 128 on 2, against float64.",
        _patterns("bfloat16", 3) | _patterns("float16", 2) | _patterns("float32", 2)
        | _patterns(correctness.TF32, 2),
        80, 160, timed=False,
    ),
    "shapes are right": Part(
        "Head dims, block sizes, lengths, strides, and more than 2^31 elements.",
        {
            **{f"head dim {width}": partial(correctness.head_dim, width) for width in HEAD_DIMS},
            **{f"blocks of {size}": partial(correctness.block_size, size) for size in BLOCKS},
            "strides": correctness.strides, "beyond int32": correctness.beyond_int32,
        },
        80, 160, timed=False,
    ),
    "extras are right": Part(
        "Softcap, a bias by distance, a sink, dropout, masked keys, against float64.",
        {
            f"{name}, {dtype}": partial(calls.extras, dtype, name)
            for dtype, names in EXTRAS.items() for name in names
        },
        90, 160, timed=False,
    ),
    "other calls are right": Part(
        "A ring in one process with the sequence on the host, decoding, modules, the language "
        "model, packed documents, keys' masses, torch.func; against float64.",
        {
            "offloaded ring": calls.offloaded_ring, "decoding": calls.decoding,
            **{name: partial(calls.module, name) for name in calls.MODULES},
            "others": calls.others,
        },
        30, 90, timed=False,
    ),
    "backends are right": Part(
        "Each backend that runs on this device, named, or the reason why it refuses.",
        {
            f"{name}, {dtype}": partial(correctness.backend, name, dtype)
            for name in BACKENDS for dtype in ("bfloat16", "float32")
        },
        45, 100, timed=False,
    ),
    "memory": Part(
        "Peak memory of a call at a million tokens, 16 heads of 64, beyond its arguments and "
        "result.",
        {"2^20 tokens": speed.memory}, 10, 40,
    ),
    "tuning, compiled": Part(
        "Every candidate of `sparsering tune` and the default, run once.",
        {
            _named(*shape, f"share {n + 1} of 4"): partial(tuned.compile_ahead, *shape, n, 4)
            for shape in MAIN for n in range(sized(4, 1))
        },
        60, 120, timed=False,
    ),
    "tuning": Part(
        "What `sparsering tune` chose for the main shapes.",
        {_named(*shape): partial(tuned.measured, *shape) for shape in MAIN}, 40, 90,
    ),
    "tuned shapes": Part(
        "The main shapes with the defaults and with the choices, in turns.",
        {_named(*shape): partial(tuned.beside_default, *shape) for shape in MAIN}, 20, 60,
    ),
    "beside tuned FlexAttention": Part(
        "The main shape beside FlexAttention's own search for the fastest kernel.",
        {_named(*shape): partial(speed.beside_tuned_flex, *shape) for shape in MAIN[:1]}, 90, 120,
    ),
    "grid, 32K tokens": Part(
        "Random blocks of 2 to 50%.", _grid(sized(32768, 128), True), 100, 110,
    ),
    "grid, 8K tokens": Part(
        "Random blocks of 2 to 50%.", _grid(sized(8192, 64), False), 30, 60,
    ),
    "grid, 128K tokens": Part(
        "Random blocks of 2 to 50%.", _grid(sized(131072, 192), False), 90, 110,
    ),
    "grid, 1M tokens": Part(
        "Random blocks of 2 to 50%; what takes seconds a call is left out.",
        _grid(sized(1 << 20, 256), False), 60, 110,
    ),
}  # fmt: skip
"""Parts by name, in the order in which they run."""

CALLS: dict[str, tuple[str, ...]] = {
    "first": (SMOKE, "kernel tests are right", "memory and races are right"),
    "stages": (
        "ten results are right", "launches are right", "main shapes are right", "calls are right",
        "stages, compiled", "ceilings", "stages and tiles", "profiles",
    ),
    "peers": (
        "main shapes", "share of dense", "lists", "packed heads", "new masks", "founding table",
        "overhead", "layouts", "longnet", "windows",
    ),
    "rest": (
        "documents", "selected blocks", "decoding", "every pattern is right", "shapes are right",
        "extras are right", "other calls are right", "backends are right", "memory",
    ),
    "later": (
        "tuning, compiled", "tuning", "tuned shapes", "beside tuned FlexAttention",
        "grid, 32K tokens", "grid, 8K tokens", "grid, 128K tokens", "grid, 1M tokens",
    ),
}  # fmt: skip
"""Names of the parts of each call; all calls but the last fill the first half hour."""

QUARTER: dict[str, tuple[str, ...]] = {
    SMOKE: (),
    "ten results are right": (),
    "main shapes": (_named(*MAIN[0]),),
    "share of dense": (_named(*MAIN[0]),),
    "overhead": (),
    "layouts": (),
    "new masks": (f"blocks of {NEW_MASKS[0]}",),
    "longnet": (),
    "lists": (),
    "decoding": (),
    "calls are right": (),
    "memory and races are right": (),
    "launches are right": (),
    "kernel tests are right": (),
    "ceilings": (),
    "windows": (),
    "stages and tiles": (_named(*MAIN[0]),),
    "documents": (),
    "packed heads": (),
}
"""By part, in order: the cases that fifteen minutes are spent on; all of a part without names."""


def calls_by_name() -> dict[str, dict[str, tuple[str, ...]]]:
    """Returns the parts and cases of each call by its name, the best fifteen minutes first."""
    others = {call: dict.fromkeys(names, ()) for call, names in CALLS.items()}
    return {"quarter": QUARTER, **others}


def seconds_of(name: str, cases: Sequence[str] = ()) -> float:
    """Returns the estimated seconds of cases of a part, of all without any."""
    part = PARTS[name]
    return part.seconds * len(cases or part.cases) / len(part.cases)
