"""Reads a compiled kernel's machine code, by Triton's own `cuobjdump`: what its loops do."""

import re
import subprocess
from functools import cache
from pathlib import Path

import triton

_LINE = re.compile(r"/\*([0-9a-f]{4,})\*/\s+(@!?U?P\w+ )?([A-Z][\w.]*)([^;]*);")
_MATRIX = re.compile(r"\w*MMA\b")  # HMMA, HGMMA, UTCHMMA and others
_LOCAL = re.compile(r"(STL|LDL)\b")  # a store or load of local memory, where spills go
_ENDS = {"EXIT", "RET", "BRX", "JMX"}  # instructions after which no next one of the block is known


_Line = tuple[int, bool, str, int | None]  # address, if conditional, name, target of a branch


def loop_spills(cubin: Path) -> int:
    """Counts the bytes that the innermost loops with matrix instructions store and load as spills.

    A kernel spends its time in these loops; code around them runs once for a tile or a head.
    """
    command = [_cuobjdump(), "-sass", cubin]
    return loop_spills_of(
        subprocess.run(command, capture_output=True, text=True, check=True).stdout
    )


def loop_spills_of(assembly: str) -> int:
    """Counts the same bytes in the lines that `cuobjdump -sass` prints."""
    lines = _instructions(assembly)
    loops = [loop for loop in _loops(lines) if any(_MATRIX.match(lines[i][2]) for i in loop)]
    innermost = [a for a in loops if not any(b < a for b in loops)]
    return sum(_bytes(lines[i][2]) for i in frozenset().union(*innermost))


def _instructions(assembly: str) -> list[_Line]:
    found: list[_Line] = []
    for address, condition, name, rest in _LINE.findall(assembly):
        branches = name.split(".")[0] == "BRA"
        target = re.findall(r"0x([0-9a-f]+)", rest) if branches else []
        # `BRA.U UP0` and `BRA P1, 0x10` have their condition among the operands
        conditional = bool(condition) or bool(re.search(r"\bU?P\d", rest))
        where = int(target[-1], 16) if target else None
        found.append((int(address, 16), conditional, name, where))
    assert found, "cuobjdump shows no instruction"
    return found


@cache
def _cuobjdump() -> Path:
    return Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"


def _loops(lines: list[_Line]) -> list[frozenset[int]]:
    """Returns the natural loops of a kernel's control flow, each as the numbers of its lines."""
    number = {address: i for i, (address, *_) in enumerate(lines)}
    following = []
    for i, (_, conditional, name, target) in enumerate(lines):
        ends = name.split(".")[0] in _ENDS or target is not None
        after = [i + 1] if (conditional or not ends) and i + 1 < len(lines) else []
        following.append(after if target is None else [*after, number[target]])
    starts = {0} | {to for tos in following if len(tos) != 1 for to in tos}
    starts |= {number[target] for *_, target in lines if target is not None}
    starts |= {i + 1 for i, tos in enumerate(following) if tos != [i + 1] and i + 1 < len(lines)}
    order = sorted(starts)
    blocks = dict(zip(order, [*order[1:], len(lines)], strict=True))  # first line: line after last
    edges = {first: following[stop - 1] for first, stop in blocks.items()}
    above = _dominators(edges)
    before: dict[int, list[int]] = {block: [] for block in above}
    for block in above:
        for to in edges[block]:
            before[to].append(block)
    bodies: dict[int, set[int]] = {}  # by the header of a loop
    for block in above:
        for header in edges[block]:
            if header in above[block]:
                body = bodies.setdefault(header, {header})
                waiting = [block]
                while waiting:
                    if (own := waiting.pop()) not in body:
                        body.add(own)
                        waiting += before[own]
    lines_of = {b: range(b, stop) for b, stop in blocks.items()}
    return [frozenset(i for b in body for i in lines_of[b]) for body in bodies.values()]


def _dominators(edges: dict[int, list[int]]) -> dict[int, set[int]]:
    """Returns, for each block that control reaches from block 0, the blocks on every way to it."""
    reached, waiting = [], [0]
    while waiting:
        if (block := waiting.pop()) not in reached:
            reached.append(block)
            waiting += edges[block]
    reached.sort()
    above = {block: set(reached) for block in reached}
    above[0] = {0}
    before = {b: [a for a in reached if b in edges[a]] for b in reached}
    changed = True
    while changed:
        changed = False
        for block in reached[1:]:
            now = {block} | set.intersection(*(above[a] for a in before[block]))
            changed |= now != above[block]
            above[block] = now
    return above


def _bytes(name: str) -> int:
    """Returns how many bytes an instruction of this name moves from or to local memory."""
    if not _LOCAL.match(name):
        return 0
    width = re.search(r"\.(8|16|U8|S8|U16|S16|64|128)\b", name)
    return 4 if width is None else int(width[1].lstrip("US")) // 8
