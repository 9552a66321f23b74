"""Prepares a folder with Python and torch for 64-bit Arm, which this machine runs by emulation.

    python tools/emulated.py runs/aarch64              # prepares; prints the interpreter
    python tools/emulated.py runs/aarch64 -m pytest -m "not slow" tests/kernels/test_cpu.py

Python and the C libraries are packages of Debian, torch and NumPy are wheels. Nothing is installed
on this machine: it needs `qemu-aarch64-static` and `aarch64-linux-gnu-g++`, which compiles the
kernel when a command runs in this checkout. PyPI's torch for Arm links to CUDA's libraries. The
folder has stand-ins for them, whose functions return an error, so that torch finds no GPU. A call
takes some twenty times as long as on a processor of its own.
"""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
QEMU, COMPILER = "qemu-aarch64-static", "aarch64-linux-gnu-g++"
PROCESSOR = "neoverse-n1"  # of an AWS Graviton 2: Neon alone
PLATFORMS = ("manylinux_2_28_aarch64", "manylinux_2_27_aarch64", "manylinux_2_17_aarch64", "any")
# What torch's wheel asks for beside CUDA, and what the kernels' tests import.
PACKAGES = ("filelock", "fsspec", "jinja2", "networkx", "setuptools", "sympy", "typing-extensions",
            "numpy", "pytest", "hypothesis")  # fmt: skip
# torch reads what its processor is from files that the host has for its own processor.
ABOUT_PROCESSOR = """processor\t: {i}
Features\t: fp asimd evtstrm aes pmull sha1 sha2 crc32 atomics fphp asimdhp cpuid asimdrdm asimddp
CPU implementer\t: 0x41
CPU architecture: 8
CPU variant\t: 0x3
CPU part\t: 0xd0c
CPU revision\t: 1

"""
IS_OF_CUDA = re.compile(r"_*cu[A-Za-z]|nccl|nvrtc|nvshmem")
VERSION, LINKED = re.compile(r"Name: (\S+)\s+Flags"), re.compile(r"NEEDED.*\[(.*)\]")


def main() -> int:
    """Prepares the folder that is named, and runs its Python with the other arguments."""
    if len(sys.argv) < 2:
        sys.exit("emulated: name a folder, as in `python tools/emulated.py runs/aarch64`")
    python = prepared(Path(sys.argv[1]))
    if len(sys.argv) == 2:
        print(python)
        return 0
    settings = {
        "CXX": os.environ.get("CXX", COMPILER),
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
        "PYTHONPATH": os.environ.get("PYTHONPATH", str(ROOT)),
        "SPARSERING_CACHE": str(python.with_name("kernels")),
    }
    command = [str(python), *sys.argv[2:]]
    return subprocess.run(command, env=os.environ | settings, check=False).returncode


def lacking() -> list[str]:
    """Returns the programs that emulation needs and this machine lacks."""
    needed = (QEMU, COMPILER, "apt-get", "dpkg-deb", "readelf")
    return [name for name in needed if shutil.which(name) is None]


def prepared(folder: Path) -> Path:
    """Returns the emulated Python, a script; the first time, its folder is filled."""
    if lacks := lacking():
        sys.exit(
            f"emulated: needs {', '.join(lacks)}: on Debian, "
            "`apt-get install qemu-user-static g++-aarch64-linux-gnu`; else give the wheel to "
            "`python tools/check_dist.py --libraries` on an Arm machine"
        )
    folder = folder.resolve()
    root, stand_ins = folder / "root", folder / "cuda"
    site = root / "usr" / "lib" / "python3" / "dist-packages"
    python = folder / "python"
    if not python.exists():
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        unpack_system(folder, root)
        describe_processor(root)
        (binary,) = (root / "usr" / "bin").glob("python3.[0-9]*[0-9]")
        install_packages(binary.name.removeprefix("python"), site)
        make_stand_ins(site / "torch", stand_ins)
        # processes that tests start are emulated too
        (site / "emulated.pth").write_text(f"import sys; sys.executable = {str(python)!r}\n")
        emulator = f"{shutil.which(QEMU)} -cpu {PROCESSOR} -L {root} -E LD_LIBRARY_PATH={stand_ins}"
        python.write_text(f'#!/bin/sh\nexec {emulator} {binary} "$@"\n')
        python.chmod(0o755)
    return python


def unpack_system(folder: Path, root: Path) -> None:
    """Unpacks Debian's Python for Arm, and the libraries that it needs, into `root`."""
    lists, archives, status = folder / "lists", folder / "cache" / "archives", folder / "status"
    for path in (lists / "partial", archives / "partial", root):
        path.mkdir(parents=True)
    status.touch()
    settings = {
        "APT::Architecture": "arm64",
        "APT::Architectures": "arm64",
        "APT::Sandbox::User": "root",
        "Debug::NoLocking": "1",
        "Dir::State::Lists": str(lists),
        "Dir::State::status": str(status),
        "Dir::Cache": str(folder / "cache"),
    }
    apt = ["apt-get", "-qq", *(x for pair in settings.items() for x in ("-o", "=".join(pair)))]
    subprocess.run([*apt, "update"], check=True)
    fetch = [*apt, "install", "--yes", "--no-install-recommends", "--download-only"]
    subprocess.run([*fetch, "python3", "libstdc++6", "libgomp1"], check=True)
    for package in sorted(archives.glob("*.deb")):
        subprocess.run(["dpkg-deb", "-x", str(package), str(root)], check=True)


def describe_processor(root: Path) -> None:
    """Writes the files under `root` that Linux has for a processor; qemu reads them there."""
    of_all = range(os.cpu_count() or 1)
    (root / "proc").mkdir(exist_ok=True)
    text = "".join(ABOUT_PROCESSOR.format(i=i) for i in of_all)
    (root / "proc" / "cpuinfo").write_text(text)
    for i in of_all:
        path = root / "sys" / "devices" / "system" / "cpu" / f"cpu{i}" / "regs" / "identification"
        path.mkdir(parents=True)
        (path / "midr_el1").write_text("0x00000000413fd0c1\n")


def install_packages(version: str, site: Path) -> None:
    """Installs torch for Arm, as new as this Python's, and what tests need, into `site`."""
    import torch

    target = ["--target", str(site), "--python-version", version, "--only-binary", ":all:"]
    target += [x for name in PLATFORMS for x in ("--platform", name)]
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    pins = ["--constraint", str(ROOT / "requirements-dev.txt")]
    for packages in (["--no-deps", f"torch=={torch.__version__.partition('+')[0]}"], PACKAGES):
        subprocess.run([*pip, *target, *pins, *packages], check=True)


def make_stand_ins(torch: Path, folder: Path) -> None:
    """Compiles a stand-in for each library of CUDA that torch's libraries link to and lack."""
    folder.mkdir()
    libraries = [*torch.glob("*.so"), *torch.glob("lib/*.so*")]
    wanted, held, linked = set[str](), set[str](), set[str]()
    versions: dict[str, str] = {}  # by library: that of its symbols
    for library in libraries:
        read = ["readelf", "--wide", "--dynamic", "--version-info", "--dyn-syms", str(library)]
        done = subprocess.run(read, capture_output=True, text=True, check=True)
        of_file = ""
        for line in done.stdout.splitlines():
            fields = line.split()
            if found := LINKED.search(line):
                linked.add(found[1])
            elif found := re.search(r"File: (\S+)", line):
                of_file = found[1]
            elif found := VERSION.search(line):
                versions[of_file] = found[1]
            elif len(fields) >= 8 and fields[0].rstrip(":").isdigit():
                (wanted if fields[6] == "UND" else held).add(fields[7].partition("@")[0])
    functions = sorted(name for name in wanted - held if IS_OF_CUDA.match(name))
    source, script = folder / "functions.cpp", folder / "versions.map"
    # 100 says "no device" to CUDA's callers, and is an error to those of the other libraries
    lines = [f"int {name}() {{ return 100; }}" for name in functions]
    source.write_text("\n".join(('extern "C" {', *lines, "}\n")))
    own = {library.name for library in libraries}
    for name in sorted(linked - own):
        if not re.match("lib(cu|nccl|nv)", name):
            continue
        command = [COMPILER, "-shared", "-fPIC", "-w", str(source), "-o", str(folder / name)]
        if name in versions:
            script.write_text(f"{versions[name]} {{ global: *; }};\n")
            command.append(f"-Wl,--version-script={script}")
        subprocess.run([*command, f"-Wl,-soname,{name}"], check=True)


if __name__ == "__main__":
    sys.exit(main())
