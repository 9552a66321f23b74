"""The machine code of the kernels of a call, for a GPU that is not there.

`tests/kernels/compile_triton.py` catches the launches of the backend's own host code and compiles
what would be launched; here its binary is taken apart, and the loop over full entries found.
"""

import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parent.parent.parent
CAPABILITY = 90
IN_GLUON = "hopper"
KERNELS = ("forward", "query", "key", IN_GLUON)
THREADS = 32  # of a warp


class Instruction(NamedTuple):
    """One instruction of a warp, with what its encoding tells the scheduler.

    Attributes:
        name: opcode, such as "FFMA".
        text: with its modifiers and operands.
        stall: cycles before the warp's next instruction may be issued.
        sets: the barriers (0 to 5) that it frees when its result is there, or its operands read.
        waits: the barriers that it waits for, a bit each.
    """

    name: str
    text: str
    stall: int
    sets: tuple[int, ...]
    waits: int


class Compiled(NamedTuple):
    """A kernel as it would run.

    Attributes:
        kernel, config: what was launched.
        registers, spilled: of a thread; spilled ones in bytes.
        shared: bytes of a program.
        warps: of a program, that compute.
        resident: warps that registers are set aside for.
        loop: what a warp runs for one step over an entry that needs no mask.
        rows, streamed: tokens of a step, kept and streamed.
    """

    kernel: str
    config: tuple[Any, ...]
    registers: int
    spilled: int
    shared: int
    warps: int
    resident: int
    loop: list[Instruction]
    rows: int
    streamed: int

    @property
    def counts(self) -> Counter[str]:
        """How often each opcode stands in the loop."""
        return Counter(x.name for x in self.loop)

    @property
    def per_processor(self) -> int:
        """Programs that fit a multiprocessor of Hopper at a time."""
        of_registers = (64 << 10) // (-(-self.registers // 8) * 8 * THREADS * self.resident)
        of_shared = (228 << 10) // (self.shared + (1 << 10))
        return min(of_registers, of_shared, 64 // self.resident)


@cache
def catching() -> Any:
    """The script that compiles what the backend launches."""
    sys.path.insert(0, str(ROOT / "tests" / "kernels"))
    import compile_triton  # type: ignore[import-not-found]

    return compile_triton


def compiled(case: Mapping[str, Any], config: Any = None, kernel: str = "") -> list[Compiled]:
    """The forward, dQ and dK/dV kernels of a case of `compile_triton`, or one, of this config."""
    import triton
    from triton.backends.compiler import GPUTarget

    from sparsering.kernels.triton import call, launch

    script, chosen = catching(), call.config_for
    if config is not None:
        call.config_for = lambda name, *rest: config if name == kernel else chosen(name, *rest)
    try:
        launched = script.launches(dict(case), CAPABILITY)
    finally:
        call.config_for = chosen
    found = []
    for function, its_config, arguments in launched:
        name = function.__name__.removesuffix("_kernel")
        if name not in KERNELS or (kernel and name not in (kernel, IN_GLUON)):
            continue
        made = triton.compile(
            script.source(function, arguments),
            target=GPUTarget("cuda", CAPABILITY, THREADS),
            options=launch.options(its_config),
        )
        registers, spilled = resources(made.asm["ptx"])
        code = instructions(made.asm["cubin"])
        warps = resident = made.metadata.num_warps
        columns = 2 * arguments["KEYS"] * arguments["HEAD_DIM"] // 16 if name == IN_GLUON else None
        loop = main_loop(code, columns)
        if name == IN_GLUON:  # four warps to 64 rows, and those that load; they meet among fours
            warps, registers = arguments["ROWS"] // 16, its_config.registers
            resident = warps + 4
            loop = [x for x in loop if x.name != "BAR"]
        found.append(
            Compiled(
                name, tuple(its_config), registers, spilled, made.metadata.shared, warps, resident,
                loop, arguments["KEYS" if name == "key" else "ROWS"],
                arguments["QUERIES" if name == "key" else "KEYS"],
            )
        )  # fmt: skip
    return found


def resources(ptx: str) -> tuple[int, int]:
    """Registers of a thread, and bytes that are spilled, as the assembler tells."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.ptx"
        path.write_text(ptx)
        command = [str(tool("ptxas")), "-v", "--gpu-name=sm_90a", str(path), "-o", f"{path}.cubin"]
        told = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    spilled = sum(int(n) for n in re.findall(r"(\d+) bytes spill", told))
    return int(re.findall(r"Used (\d+) registers", told)[0]), spilled


def tool(name: str) -> Path:
    """A program of CUDA that Triton brings along."""
    import triton

    return Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / name


def instructions(binary: bytes) -> list[Instruction | str]:
    """The instructions of a kernel; a label stands as its name."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary)
        file.flush()
        command = [str(tool("nvdisasm")), "-hex", "-c", file.name]
        told = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found: list[Instruction | str] = []
    text = ""
    for row in told.splitlines():
        if label := re.match(r"\s*(\.L_x_\d+):", row):
            found.append(label[1])
        elif first := re.match(r"\s*/\*[0-9a-f]{4,}\*/\s+(.*?)\s*;\s+/\* 0x[0-9a-f]{16} \*/", row):
            text = first[1]
        elif text and (second := re.match(r"\s*/\* 0x([0-9a-f]{16}) \*/", row)):
            found.append(decoded(text, int(second[1], 16)))
            text = ""
    return found


def decoded(text: str, word: int) -> Instruction:
    """An instruction, from its text and the upper half of its encoding."""
    name = re.sub(r"^@!?U?P\w+\s+", "", text).split()[0].split(".")[0]
    barriers = ((word >> 46) & 7, (word >> 49) & 7)
    return Instruction(
        name, text, (word >> 41) & 15, tuple(b for b in barriers if b < 6), (word >> 52) & 63
    )


def columns_of(x: Instruction) -> int:
    """Columns of the result of an HGMMA, 0 of all else."""
    found = re.search(r"HGMMA\.64x(\d+)x16", x.text)
    return int(found[1]) if found else 0


def main_loop(code: list[Instruction | str], columns: int | None = None) -> list[Instruction]:
    """The innermost loop with products: of full entries, by bulk copies where the kernel has any.

    `columns`: that its products have in all, where other warps do the loading.
    """
    at = {x: i for i, x in enumerate(code) if isinstance(x, str)}
    loops = []
    for i, x in enumerate(code):
        if isinstance(x, Instruction) and x.name == "BRA":
            target = re.search(r"`\((\.L_x_\d+)\)", x.text)
            if target and at.get(target[1], i) < i:
                body = [y for y in code[at[target[1]] : i + 1] if isinstance(y, Instruction)]
                names = {y.name for y in body}
                if columns is not None:
                    if sum(map(columns_of, body)) >= columns:
                        loops.append((False, len(body), body))
                elif "HGMMA" in names and names & {"UTMALDG", "LDGSTS"}:
                    loops.append(("UTMALDG" not in names, len(body), body))
    return min(loops, key=lambda found: found[:2])[2]
