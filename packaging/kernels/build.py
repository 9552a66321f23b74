"""Build the package as a kernel of the Hugging Face Hub, in the form that kernels 0.17 loads.

    python packaging/kernels/build.py --out runs/kernel                # any machine: Python, Triton
    python packaging/kernels/build.py --out runs/kernel --libraries    # and the compiled CPU kernel

OUT/build has a folder for each kind of machine: the package, less its commands, and metadata.json.
`torch-cpu` and `torch-cuda` need nothing compiled: on CPUs, the first use compiles the kernel. With
--libraries there is also `torch-stable-abi211-cpu-...` for this machine's processors. It has a
library for each kind of vectors, and needs no compiler, and torch 2.11 or newer.

A process may load several versions, beside an installed package. So the id of a folder is the name
of the imported package and the namespace of its operators (sparsering/ground/namespace.py). It has
a digest of all sources: equal ids mean equal code.
"""

import argparse
import base64
import hashlib
import importlib.util
import json
import platform
import shutil
import sys
import tempfile
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "sparsering"
CARD = Path(__file__).with_name("CARD.md")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
SUFFIXES = {".py", ".typed", ".json", ".cpp", ".h"}
# Programs: nothing of a kernel is run by a command.
LEFT_OUT = {"__main__.py", "cli", "demo"}
BACKENDS = ("cpu", "cuda")
STABLE = "torch-stable-abi211"  # the oldest torch that the libraries run beside


def sources() -> dict[str, bytes]:
    """Returns the content of the package's files, by their paths in it."""
    paths = [path.relative_to(PACKAGE) for path in PACKAGE.rglob("*") if path.suffix in SUFFIXES]
    kept = sorted(path for path in paths if path.parts[0] not in LEFT_OUT)
    found = {path.as_posix(): (PACKAGE / path).read_bytes() for path in kept}
    return found | {"LICENSE": (ROOT / "LICENSE").read_bytes()}


def identifier(files: dict[str, bytes], backend: str) -> str:
    """Returns the id of a kernel: a name that Python imports, with a digest of the files."""
    digest = hashlib.sha256()
    for name, content in files.items():
        digest.update(f"{name}\0{len(content)}\0".encode() + content)
    return f"_sparsering_{backend}_{digest.hexdigest()[:10]}"


def write_variant(folder: Path, backend: str, name: str, files: dict[str, bytes]) -> None:
    """Writes the files and their metadata into a folder, which must not exist."""
    for path, content in files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes(content)
    digests = {
        path: base64.b64encode(hashlib.sha256(files[path]).digest()).decode()
        for path in sorted(files)
    }
    metadata = {
        "name": "sparsering",
        "id": name,
        "version": int(PROJECT["version"].split(".")[0]),
        "license": PROJECT["license"].lower(),
        "python-depends": [],
        "backend": {"type": backend},
        "digest": {"algorithm": "sha256", "files": digests},
    }
    (folder / "metadata.json").write_text(json.dumps(metadata, indent=2) + "\n", encoding="utf-8")


def libraries(namespace: str) -> dict[str, bytes]:
    """Returns the compiled CPU kernel for each kind of vectors, as in the wheel."""
    tools = ROOT / "tools"
    sys.path.insert(0, str(tools))
    spec = importlib.util.spec_from_file_location("build_wheels", tools / "build_wheels.py")
    assert spec is not None and spec.loader is not None
    wheels = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(wheels)
    with tempfile.TemporaryDirectory() as folder:
        paths = wheels.compiled(Path(folder), namespace)
        for path in paths:
            wheels.audit_binary.check(path)
        return {f"kernels/cpu/{path.name}": path.read_bytes() for path in paths}


def build(out: Path, with_libraries: bool = False) -> dict[str, str]:
    """Writes the kernel into a folder; returns the id of each kind of machine."""
    if out.exists() and any(out.iterdir()):
        raise ValueError(
            f"expected an empty folder, or none, got {out} with files; delete it or name another"
        )
    files, made = sources(), {}
    for backend in BACKENDS:
        made[f"torch-{backend}"] = name = identifier(files, backend)
        write_variant(out / "build" / f"torch-{backend}", backend, name, files)
    if with_libraries:
        machine = f"{platform.machine()}-{platform.system()}".lower().replace("arm64", "aarch64")
        made[f"{STABLE}-cpu-{machine}"] = name = identifier(files, "cpu_stable")
        held = files | libraries(f"{name}_cpu")
        write_variant(out / "build" / f"{STABLE}-cpu-{machine}", "cpu", name, held)
    shutil.copy(CARD, out / "README.md")
    return made


def main() -> int:
    """Build what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / "kernel", help="a new folder")
    parser.add_argument(
        "--libraries", action="store_true", help="compile the CPU kernel for this system too"
    )
    arguments = parser.parse_args()
    try:
        made = build(arguments.out, arguments.libraries)
    except ValueError as error:
        print(f"build: {error}", file=sys.stderr)
        return 1
    for folder, name in made.items():
        print(f"{arguments.out}/build/{folder}: {name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
