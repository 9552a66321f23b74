"""Checks a library of the kernel: what it takes from torch, and which instructions it has.

    python tools/audit_binary.py binary-avx2.so ...

- Of torch, it links to functions of the stable ABI of torch 2.11 alone. What it looks up by name at
  run time is listed below: a torch without those names works too.
- Without AVX-512 in its name it has no instruction of AVX-512, without AVX2 none of AVX.
Instructions are those that objdump disassembles, on x86 under Linux; symbols are read by nm.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

# Looked up when the kernel is loaded (machine/products.h, selection/shares.h).
LOOKED_UP = {
    "_ZN2at6native7cpublas6brgemmEllllllbPKfS3_Pfb",
    "_ZN2at6native7cpublas6brgemmEllllllbPKN3c108BFloat16ES5_Pfb",
    "_ZN2at6native7cpublas14brgemm_releaseEb",
    "_ZN2at13globalContextEv",
    "_ZNK2at7Context17userEnabledMkldnnEv",
    "_ZNK2at10TensorBase8_versionEv",
}
# Of the C and C++ libraries, with a version: auditwheel says how old a system may be.
SYSTEM = re.compile(r"@(GLIBC|GLIBCXX|CXXABI|GCC)_")
X86_64 = b"\x3e\x00"  # the machine, in the header of a library of Linux
AVX512 = re.compile(r"%zmm|%[xy]mm(1[6-9]|2\d|3[01])\b|%k[0-7]\b")
AVX = re.compile(r"%[yz]mm|\sv[a-z0-9]+\s.*%xmm|%k[0-7]\b")


def main() -> int:
    """Checks the libraries that are named."""
    for path in sys.argv[1:]:
        check(Path(path))
    return 0


def check(library: Path) -> None:
    """Ends with a line that says what is wrong with a library."""
    beyond = symbols_beyond(library)
    expect(not beyond, f"{library.name} needs {beyond}, beyond the stable ABI of torch 2.11")
    names = set(re.findall(rb"\x00(_ZN[0-9A-Za-z_]+)(?=\x00)", library.read_bytes()))
    unlisted = {name.decode() for name in names} - LOOKED_UP
    unlisted = {name for name in unlisted if re.match("_ZNK?(2at|3c10|5torch)", name)}
    expect(not unlisted, f"{library.name} looks up {sorted(unlisted)}")
    if library.read_bytes()[18:20] == X86_64:
        found = wrong_instructions(library)
        expect(not found, f"{library.name} has an instruction beyond its name: {found}")
    print(f"{library.name}: {library.stat().st_size:,} bytes, torch's stable ABI alone")


def symbols_beyond(library: Path) -> list[str]:
    """Returns symbols that neither the system nor torch's stable ABI has."""
    listed = [["nm", "-D", "--undefined-only", "--with-symbol-versions"], ["nm", "-u"]]
    command = listed[sys.platform == "darwin"]
    done = subprocess.run([*command, str(library)], capture_output=True, text=True, check=True)
    lines = [line.split() for line in done.stdout.splitlines() if line.strip()]
    symbols = {line[-1] for line in lines if line[0] != "w"}  # a weak symbol may stay undefined
    if sys.platform == "darwin":  # libraries' names are not in the list: those of C++ code of torch
        return sorted(x for x in symbols if re.search(r"(2at|3c10|5torch)", x))
    return sorted({x for x in symbols if not SYSTEM.search(x)} - stable_functions())


def stable_functions() -> set[str]:
    """Returns the C functions that torch's header declares for torch 2.11."""
    from torch.utils.cpp_extension import include_paths

    source = "#include <torch/csrc/stable/c/shim.h>\n"
    flags = ["-DTORCH_TARGET_VERSION=0x020b000000000000", *(f"-I{x}" for x in include_paths("cpu"))]
    done = subprocess.run(
        [os.environ.get("CXX") or "c++", "-E", "-P", "-x", "c++", *flags, "-"],
        input=source,
        capture_output=True,
        text=True,
        check=True,
    )
    return set(re.findall(r"\b((?:aoti_)?torch_\w+)\s*\(", done.stdout))


def wrong_instructions(library: Path) -> str:
    """Returns the first instruction that the library's name does not promise, or ""."""
    if "avx512" in library.name:
        return ""
    wrong = AVX512 if "avx2" in library.name else AVX
    command = ["objdump", "-d", "--no-show-raw-insn", str(library)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    instructions = (line.partition(":")[2].strip() for line in done.stdout.splitlines())
    return next((x for x in instructions if wrong.search(" " + x.replace("\t", " "))), "")


def expect(holds: bool, otherwise: str) -> None:
    """Ends with a line that says what is wrong."""
    if not holds:
        sys.exit(f"audit_binary: {otherwise}")


if __name__ == "__main__":
    sys.exit(main())
