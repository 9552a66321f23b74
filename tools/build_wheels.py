"""Builds the wheel that needs no compiler: the wheel of `make dist`, and the kernel's libraries.

    python tools/build_wheels.py          # dist/sparsering-*-manylinux_2_28_x86_64.whl
    python tools/build_wheels.py --machine aarch64    # the wheel for Linux on Arm, compiled here

One library for each kind of vectors (x86: none, AVX2, AVX-512) is compiled from the same source by
the machine's own compiler, in parallel. A library calls torch by its stable ABI, and Python not at
all: one wheel serves each Python and each torch from 2.11 on. `tools/audit_binary.py` checks that,
and auditwheel that an old system has what the libraries need.
"""

import argparse
import base64
import concurrent.futures
import csv
import hashlib
import importlib
import io
import os
import platform
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import zipfile
from pathlib import Path

import audit_binary

ROOT = Path(__file__).resolve().parent.parent
KERNEL = "sparsering/kernels/cpu"
IS_MACOS = sys.platform == "darwin"
FLAGS = "-std=c++20 -O3 -DNDEBUG -fPIC -shared -fvisibility=hidden"
OLDEST_SYSTEM = "manylinux_2_28"  # that of torch's own wheels
OLDEST_MACOS = "-mmacosx-version-min=11.0"
MOST_BYTES = 8 << 20
CROSS_COMPILER = "aarch64-linux-gnu-g++"
# auditwheel offers the tags of the machine that it runs on alone.
AUDITWHEEL = """
import platform, sys
platform.machine = lambda: MACHINE
from auditwheel.main import main
sys.exit(main())
"""


def main() -> int:
    """Compiles the libraries, checks them, and writes the wheel."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dist", type=Path, default=ROOT / "dist", help="folder of the wheels")
    parser.add_argument(
        "--no-repair", action="store_true", help="keep this system's own tag, as a conda build does"
    )
    own = platform.machine()
    parser.add_argument("--machine", choices=sorted({own, "aarch64"}), default=own)
    arguments = parser.parse_args()
    dist, machine = arguments.dist, arguments.machine
    if machine != own and shutil.which(CROSS_COMPILER) is None:
        sys.exit(
            f"build_wheels: {machine} needs {CROSS_COMPILER}: `apt-get install "
            "g++-aarch64-linux-gnu`; or build the wheel on such a machine"
        )
    (pure,) = dist.glob("sparsering-*-py3-none-any.whl")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        libraries = compiled(folder, machine=machine)
        for library in libraries:
            audit_binary.check(library)
        wheel = with_libraries(pure, libraries, folder, machine)
        for old in dist.glob(f"sparsering-*_{machine}.whl"):
            old.unlink()
        if sys.platform == "linux" and not arguments.no_repair:
            tag = f"{OLDEST_SYSTEM}_{machine}"
            options = [
                "--exclude",
                "libtorch_cpu.so",
                "--plat",
                tag,
                "--only-plat",
                "-w",
                str(dist),
            ]
            auditwheel = [sys.executable, "-c", AUDITWHEEL.replace("MACHINE", repr(machine))]
            subprocess.run([*auditwheel, "repair", *options, str(wheel)], check=True)
        else:
            shutil.copy(wheel, dist)
    (wheel,) = dist.glob(f"sparsering-*_{machine}.whl")
    if wheel.stat().st_size > MOST_BYTES:
        sys.exit(f"build_wheels: {wheel.name} has {wheel.stat().st_size:,} bytes")
    print(f"{wheel.name}: {wheel.stat().st_size:,} bytes")
    return 0


def compiled(
    folder: Path, namespace: str = "sparsering_cpu", machine: str = platform.machine()
) -> list[Path]:
    """Returns the kernel's libraries, one for each kind of vectors of a machine's family."""
    sys.path.insert(0, str(ROOT))
    flags = importlib.import_module("sparsering.kernels.cpu.build")._VECTOR_FLAGS
    names = list(flags) if machine in ("x86_64", "AMD64") else ["DEFAULT"]
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        each = [
            pool.submit(compile_library, folder, x, flags[x], namespace, machine) for x in names
        ]
        return [library.result() for library in each]


def compile_library(folder: Path, name: str, vectors: str, namespace: str, machine: str) -> Path:
    """Compiles the kernel with one kind of vectors; torch finds its operators in the namespace."""
    from torch.utils.cpp_extension import include_paths, library_paths

    library = folder / f"binary-{name.lower()}.so"
    compiler = os.environ.get("CXX") or "c++"
    torch_libraries = [f"-L{path}" for path in library_paths("cpu")]
    if machine != platform.machine():  # torch's library of that machine is not here: name it alone
        compiler, torch_libraries = CROSS_COMPILER, [f"-L{folder}", "-Wl,--no-as-needed"]
        named = ["-x", "c++", "-shared", "-Wl,-soname,libtorch_cpu.so", os.devnull]
        subprocess.run([compiler, *named, "-o", str(folder / "libtorch_cpu.so")], check=True)
    command = [compiler, str(ROOT / KERNEL / "cpu.cpp"), *FLAGS.split()]
    command += ["-include", str(ROOT / "tools" / "wheels" / "old_systems.h")]
    command += [*vectors.split(), f"-DCPU_CAPABILITY={name}", f"-DCPU_CAPABILITY_{name}"]
    command += [f'-DSPARSERING_NAMESPACE="{namespace}"']
    command += [f"-isystem{path}" for path in include_paths("cpu")]
    command += [*torch_libraries, "-ltorch_cpu"]
    command += [OLDEST_MACOS, "-Wl,-rpath,@loader_path/../../../torch/lib"] if IS_MACOS else ["-s"]
    subprocess.run([*command, "-w", "-o", str(library)], check=True)
    return library


def with_libraries(
    pure: Path, libraries: list[Path], folder: Path, machine: str = platform.machine()
) -> Path:
    """Returns a copy of a wheel that also has the libraries, and the platform's tag."""
    platform_name = sysconfig.get_platform().replace("-", "_").replace(".", "_")
    if machine != platform.machine():
        platform_name = f"linux_{machine}"
    tag = "py3-none-" + (f"macosx_11_0_{platform.machine()}" if IS_MACOS else platform_name)
    wheel = folder / pure.name.replace("py3-none-any", tag)
    with zipfile.ZipFile(pure) as archive:
        files = {name: archive.read(name) for name in archive.namelist()}
    (record,) = (name for name in files if name.endswith(".dist-info/RECORD"))
    about = record.replace("RECORD", "WHEEL")
    text = files[about].decode().replace("Root-Is-Purelib: true", "Root-Is-Purelib: false")
    files[about] = text.replace("Tag: py3-none-any", f"Tag: {tag}").encode()
    files |= {f"{KERNEL}/{library.name}": library.read_bytes() for library in libraries}
    del files[record]
    lines = io.StringIO()
    rows = csv.writer(lines, lineterminator="\n")
    for name, content in files.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
        rows.writerow((name, f"sha256={digest}", len(content)))
    rows.writerow((record, "", ""))
    files[record] = lines.getvalue().encode()
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in files.items():
            entry = zipfile.ZipInfo(name, date_time=(2020, 2, 2, 0, 0, 0))
            entry.external_attr = (0o100755 if name.endswith(".so") else 0o100644) << 16
            entry.compress_type = zipfile.ZIP_DEFLATED
            archive.writestr(entry, content)
    return wheel


if __name__ == "__main__":
    sys.exit(main())
