"""Show that what `make dist` built is whole, and that it runs where nothing else is installed.

`make dist` runs `python tools/check_dist.py --content`, which reads the files of dist/.
`make check-dist` runs it whole: the wheel, with the torch that this Python has and nothing else, in
a new environment, once without a C++ compiler (one warning, the same numbers) and once with one
(the CPU kernel is built, and kept); then some of the sdist's own tests. It installs torch, so it
takes about a minute and 2 GB for a while.

The wheel of `make wheels`, if it is there, is installed and run as a user who may write to a
temporary folder alone, without a compiler and without a network: first one call, then tests of the
kernels and of `attention` against the installed package. `--python` names interpreters that have
other versions of torch, and NumPy: `--python .venv-2.11/bin/python .venv-2.14/bin/python`.
`--emulate FOLDER` runs the wheel for Linux on Arm too, with a Python that tools/emulated.py puts
into the folder.
"""

import argparse
import email.parser
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import tomllib
import zipfile
from collections.abc import Sequence
from pathlib import Path

import emulated
from addresses import addresses

ROOT = Path(__file__).resolve().parent.parent
VERSION = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]
# Beside the package, what its tests read; a sample of each folder.
WANTED = (
    "pyproject.toml", "README.md", "LICENSE", "CHANGELOG.md", "SECURITY.md", "CITATION.cff",
    "Makefile", "tests/conftest.py", "docs/architecture.md", "tools/docstring_openings.py",
    "benchmarks/measure.py",
    "benchmarks/records/window.json",
)  # fmt: skip
# A user whom no file belongs to, without a network.
NOBODY = (
    *(shutil.which("unshare") or "unshare", "--net"),
    *(shutil.which("setpriv") or "setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"),
    "--bounding-set=-all",
)
MOST_SECONDS = 1.0  # of the first call
SOME_TESTS = ("tests/test_numerics.py", "tests/test_architecture.py", "tests/test_release.py")
# Run against the installed wheel, each list in a process. What needs a compiler is left out, as is
# what the wheel's libraries have no part in.
WHEEL_TESTS = (
    tuple(f"tests/kernels/test_cpu{name}.py" for name in ("", "_rows", "_threads")),
    ("tests/attention",),
)
EMULATED_TESTS = (("tests/kernels/test_cpu.py",), ("tests/kernels/test_cpu_rows.py",))
WHEEL_TESTS_LEFT_OUT = (
    *("triton", "gather", "compile", "process"),
    *("documented", "docs", "dtensors"),  # read this checkout's pages; need a network
)
EMULATED_TESTS_LEFT_OUT = (*WHEEL_TESTS_LEFT_OUT, "any_expression")  # of minutes under emulation
# Ends the run with an error unless the tests imported the installed package and its library alone.
PLUGIN = """
import os, pathlib, sys
import pytest

def pytest_sessionfinish():
    site = os.environ["SITE"]
    ours = [x for name, x in sys.modules.items() if name.split(".")[0] == "sparsering"]
    strange = sorted({x.__file__ for x in ours if not x.__file__.startswith(site + os.sep)})
    maps = pathlib.Path("/proc/self/maps")  # not on macOS
    lines = maps.read_text().splitlines() if maps.exists() else []
    loaded = {line.split()[-1] for line in lines if "sparsering" in line}
    if strange or not all(name.startswith(site + os.sep) for name in loaded):
        raise pytest.UsageError(f"tests ran {strange or sorted(loaded)}")
"""
# Runs in the new environment; prints what ran, its distance from float64, and what was warned.
ATTEND = """
import json, sys, time, warnings
import torch, sparsering as sr
torch.manual_seed(0)
made = [torch.randn(2, h, 300, 32, requires_grad=True) for h in (4, 2, 2)]
exact = [x.detach().double().requires_grad_() for x in made]
pattern = sr.LongNet((64, 256), (1, 2)) & sr.Causal()
results = []
with warnings.catch_warnings(record=True) as told:
    warnings.simplefilter("always")
    start = time.perf_counter()
    sr.attention(*(x.detach() for x in made), pattern)
    seconds = time.perf_counter() - start
    runs = sr.explain(*made, pattern).splitlines()[0].split(": ")[1].split(",")[0]
    for inputs, options in ((made, {}), (exact, {"backend": "reference"})):
        out = sr.attention(*inputs, pattern, **options)
        grads = torch.autograd.grad(out.square().sum(), inputs)
        results.append([x.double() for x in (out.detach(), *grads)])
error = max(float((a - b).abs().max() / b.abs().max()) for a, b in zip(*results))
told = [str(w.message) for w in told if "sparsering" in str(w.message)]
able = torch.backends.cpu.get_cpu_capability()
print(json.dumps({"runs": runs, "error": error, "told": told, "from": sr.__file__,
    "seconds": seconds, "torch": torch.__version__, "able": able}))
"""


def main() -> int:
    """Check the files; unless only their content was asked for, run them too."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--content", action="store_true", help="read the files, run nothing")
    parser.add_argument("--dist", type=Path, default=ROOT / "dist", help="folder of both files")
    parser.add_argument("--python", nargs="*", default=[], help="interpreters that have torch")
    parser.add_argument(
        "--libraries", action="store_true", help="run the wheel of `make wheels` alone"
    )
    parser.add_argument("--emulate", type=Path, help="folder of a Python for Arm, made if missing")
    arguments = parser.parse_args()
    wheel = arguments.dist / f"sparsering-{VERSION}-py3-none-any.whl"
    sdist = arguments.dist / f"sparsering-{VERSION}.tar.gz"
    check_wheel(wheel)
    check_sdist(sdist)
    if not (arguments.content or arguments.libraries):
        with tempfile.TemporaryDirectory() as folder:
            run_wheel(wheel, Path(folder))
            run_tests(sdist, Path(folder))
    for wheel in arguments.dist.glob(f"sparsering-{VERSION}-py3-none-[!a]*.whl"):
        check_wheel(wheel, libraries=True)
        if wheel.stem.endswith("aarch64") and platform.machine() != "aarch64":
            if arguments.emulate is not None and not arguments.content:
                run_emulated(wheel, arguments.emulate)
            continue
        for python in () if arguments.content else (sys.executable, *arguments.python):
            run_libraries(wheel, Path(python).absolute())
    return 0


def check_wheel(wheel: Path, libraries: bool = False) -> None:
    """Nothing of the package is missing, and nothing else is there; torch alone is required."""
    with zipfile.ZipFile(wheel) as archive:
        held = set(archive.namelist())
        information = f"sparsering-{VERSION}.dist-info"
        metadata = email.parser.Parser().parsestr(archive.read(f"{information}/METADATA").decode())
    listed = subprocess.run(
        ["git", "ls-files", "sparsering"], cwd=ROOT, capture_output=True, text=True, check=False
    ).stdout.split()
    sources = [path for path in (ROOT / "sparsering").rglob("*") if path.suffix in {".cpp", ".h"}]
    wanted = {*listed, *(path.relative_to(ROOT).as_posix() for path in sources)}
    wanted |= {"sparsering/py.typed", f"{information}/licenses/LICENSE"}
    expect(not (wanted - held), f"{wheel.name} lacks {sorted(wanted - held)}")
    foreign = {name for name in held if name.split("/")[0] not in ("sparsering", information)}
    expect(not foreign, f"{wheel.name} also holds {sorted(foreign)}")
    compiled = [name for name in held if name.endswith(".so")]
    expect(bool(compiled) == libraries, f"{wheel.name} has the libraries {compiled}")
    apparatus = [name for name in held if re.search("/(bench|report)/", name)]
    expect(not apparatus, f"{wheel.name} holds the library alone, but also {sorted(apparatus)}")
    expect(metadata["Version"] == VERSION, f"{wheel.name} says version {metadata['Version']}")
    urls = dict(x.split(", ", 1) for x in metadata.get_all("Project-URL", []))
    expect(urls == addresses(ROOT), f"{wheel.name} names the addresses {urls}")
    needs = [x for x in metadata.get_all("Requires-Dist", []) if "extra ==" not in x]
    expect([x.split(">")[0] for x in needs] == ["torch"], f"{wheel.name} requires {needs}")
    print(f"{wheel.name}: {len(held)} files, {len(sources)} of them C++; requires {needs[0]}")


def check_sdist(sdist: Path) -> None:
    """Checks that the sdist has the files that tests need. `build` makes the wheel out of it."""
    with tarfile.open(sdist) as archive:
        held = {name.partition("/")[2] for name in archive.getnames()}
    lacks = [name for name in WANTED if name not in held]
    expect(not lacks, f"{sdist.name} lacks {lacks}")
    stray = [name for name in held if name.split("/")[0] in (".venv", "runs", "dist", "build")]
    expect(not stray, f"{sdist.name} also holds {stray[:3]}")
    print(f"{sdist.name}: {len(held)} files and folders")


def run_wheel(wheel: Path, folder: Path) -> None:
    """Installs the wheel and torch alone, and attends without a compiler and with one."""
    import torch

    python = folder / "clean" / "bin" / "python"
    subprocess.run([sys.executable, "-m", "venv", str(folder / "clean")], check=True)
    needs = [str(wheel), f"torch=={torch.__version__.partition('+')[0]}"]
    quiet = ["--quiet", "--disable-pip-version-check", "--no-cache-dir"]
    subprocess.run([python, "-m", "pip", "install", *quiet, *needs], check=True)
    empty = folder / "empty"
    empty.mkdir()

    without = attend(python, folder / "no-kernel", empty, {"PATH": str(empty), "CXX": "no-such"})
    expect(without["runs"] == "gather", f"without a compiler {without['runs']} runs")
    expect(len(without["told"]) == 1, f"without a compiler {without['told']} was said")
    line = without["told"][0]
    expect("\n" not in line and "no C++ compiler found" in line, f"it said {line!r}")
    print(f"without a compiler: {line}")

    for _ in range(2):  # compiled, then kept
        found = attend(python, folder / "kernel", empty, {})
        expect(found["runs"] == "cpu" and not found["told"], f"with a compiler: {found}")
    libraries = list((folder / "kernel").glob("cpu-*.so"))
    expect(len(libraries) == 1, f"the cache has {libraries}")
    print(f"with a compiler: {found['runs']}, {found['error']:.1e} from float64")
    command = [python.parent / "sparsering", "info"]
    told = subprocess.run(command, cwd=empty, capture_output=True, text=True, check=True).stdout
    expect(f"{VERSION}\n" in told, f"`sparsering info` says {told.splitlines()[0]}")
    pins = ["--constraint", str(ROOT / "requirements-dev.txt")]
    extras = [f"{wheel}[cli,plots]", needs[1]]
    subprocess.run([python, "-m", "pip", "install", *quiet, *pins, *extras], check=True)
    command = [python.parent / "sparsering", "demo", "--quick", "--out", folder / "demo"]
    subprocess.run(command, cwd=empty, check=True)
    expect((folder / "demo" / "report.html").exists(), "`sparsering demo` wrote no report")


def run_libraries(wheel: Path, python: Path) -> None:
    """Attends with the wheel's libraries, as a user who may write to a temporary folder alone."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        site, home, temporary, empty = (folder / x for x in ("site-packages", "home", "tmp", "bin"))
        for path in (home, temporary, empty):
            path.mkdir()
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-compile"]
        subprocess.run([*pip, "--target", str(site), str(wheel)], check=True)
        settings = {"PATH": str(empty), "CXX": "", "HOME": str(home), "TMPDIR": str(temporary)}
        settings |= {
            "PYTHONPATH": str(site),
            "PYTHONDONTWRITEBYTECODE": "1",
            "SPARSERING_CACHE": "",
        }
        before = files_of(folder)
        found = attend(python, home, empty, settings)  # it may write, but must not
        changed = sorted({x[0] for x in files_of(folder) ^ before})
        expect(not changed, f"{wheel.name} writes {changed}")
        folder.chmod(0o755)
        temporary.chmod(0o777)
        read_only = (site, home, empty, *site.rglob("*"))
        for path in read_only:
            path.chmod(path.stat().st_mode & ~0o222)
        nobody = NOBODY if hasattr(os, "geteuid") and os.geteuid() == 0 else ()
        shown = []
        able = ["", "DEFAULT", "AVX2", "AVX512"]
        for vectors in able[: able.index(found["able"]) + 1] if found["able"] in able else able[:2]:
            found = attend(python, home, empty, settings | {"SPARSERING_CPU": vectors}, nobody)
            expect(found["runs"] == "cpu" and not found["told"], f"{vectors}: {found}")
            expect(found["seconds"] <= MOST_SECONDS, f"a first call took {found['seconds']:.2f} s")
            shown.append(f"{vectors or 'first call'} {found['seconds'] * 1e3:.0f} ms")
        install_test_tools(folder)
        shown.append(run_wheel_tests([*nobody, python], folder, settings, WHEEL_TESTS))
        for path in read_only:
            path.chmod(path.stat().st_mode | 0o200)
    print(f"{wheel.name} on torch {found['torch']}: {', '.join(shown)}; no compiler, read-only")


def run_emulated(wheel: Path, environment: Path) -> None:
    """Attends with the wheel for Arm, and runs tests of the kernels, under qemu."""
    python = emulated.prepared(environment)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        site, empty, tools = (folder / x for x in ("site-packages", "bin", "tools"))
        empty.mkdir()
        tools.mkdir()
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-compile"]
        of_arm = ["--platform", "manylinux_2_28_aarch64", "--only-binary", ":all:"]
        subprocess.run([*pip, *of_arm, "--target", str(site), str(wheel)], check=True)
        settings = {"CXX": "no-such", "PYTHONPATH": str(site), "OMP_NUM_THREADS": "1"}
        found = attend(python, folder / "cache", empty, settings)
        expect(found["runs"] == "cpu" and not found["told"], f"emulated: {found}")
        told = run_wheel_tests([python], folder, settings, EMULATED_TESTS, EMULATED_TESTS_LEFT_OUT)
    print(f"{wheel.name} on torch {found['torch']}, emulated: {found['error']:.1e} off, {told}")


def install_test_tools(folder: Path) -> None:
    """Installs what runs the tests into the folder `tools`."""
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--target", str(folder / "tools")]
    pins = ["--constraint", str(ROOT / "requirements-dev.txt")]
    subprocess.run([*pip, *pins, "pytest", "hypothesis"], check=True)


def run_wheel_tests(
    command: Sequence[str | Path],
    folder: Path,
    settings: dict[str, str],
    of_processes: Sequence[Sequence[str]],
    left_out: Sequence[str] = WHEEL_TESTS_LEFT_OUT,
) -> str:
    """Runs tests of this checkout against the installed wheel; returns pytest's last lines.

    `command` is that of Python. `of_processes` names tests for each of several processes, and
    `left_out` words of tests that do not run.
    """
    tools, tests = folder / "tools", folder / "tests-of-wheel"
    shutil.copytree(ROOT / "tests", tests / "tests", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tests)
    (tools / "installed.py").write_text(PLUGIN)
    site = settings["PYTHONPATH"]
    environment = {name: x for name, x in os.environ.items() if not name.startswith("SPARSERING")}
    environment |= settings | {"PYTHONPATH": f"{site}{os.pathsep}{tools}", "SITE": site}
    leave_out = " and ".join(f"not {name}" for name in left_out)
    options = ["-q", "-m", "not slow", "-k", leave_out, "-p", "no:cacheprovider", "-p", "installed"]
    runs = [
        subprocess.Popen(
            [*command, "-m", "pytest", *options, *parts],
            cwd=tests, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )
        for parts in of_processes
    ]  # fmt: skip
    told = [run.communicate()[0].strip() for run in runs]  # each has one thread
    for run, text in zip(runs, told, strict=True):
        expect(run.returncode == 0, text[-6000:])
    return ", ".join(text.splitlines()[-1].strip("= ") for text in told)


def files_of(folder: Path) -> set[tuple[str, int, int]]:
    """Returns the files in a folder, with their sizes and times."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {(str(x.relative_to(folder)), x.stat().st_size, x.stat().st_mtime_ns) for x in files}


def attend(
    python: Path, cache: Path, empty: Path, settings: dict[str, str], prefix: Sequence[str] = ()
) -> dict:
    """Returns the output of `ATTEND`, run in an empty folder without this checkout."""
    ours = ("PYTHONPATH", "SPARSERING_CXXFLAGS", "SPARSERING_CACHE")
    environment = {name: x for name, x in os.environ.items() if name not in ours}
    environment |= {"SPARSERING_CACHE": str(cache), **settings}
    done = subprocess.run(
        [*prefix, python, "-c", ATTEND],
        cwd=empty,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    expect(done.returncode == 0, done.stderr)
    found = json.loads(done.stdout)
    expect("site-packages" in found["from"], f"it ran {found['from']}")
    expect(found["error"] < 1e-5, f"results are {found['error']:.1e} off")
    return found


def run_tests(sdist: Path, folder: Path) -> None:
    """Collects all tests of the unpacked sdist and runs a few, with this Python's tools."""
    with tarfile.open(sdist) as archive:
        archive.extractall(folder, filter="data")
    unpacked = folder / f"sparsering-{VERSION}"
    environment = {**os.environ, "PYTHONPATH": str(unpacked)}
    pytest = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    for arguments in (["--collect-only", "-qq"], list(SOME_TESTS)):
        done = subprocess.run(
            [*pytest, *arguments], cwd=unpacked, env=environment, capture_output=True, text=True,
            check=False,
        )  # fmt: skip
        expect(done.returncode == 0, done.stdout[-2000:] + done.stderr)
    print(f"tests of {sdist.name}: {done.stdout.strip().splitlines()[-1]}")


def expect(holds: bool, otherwise: str) -> None:
    """End with a line that says what is wrong."""
    if not holds:
        sys.exit(f"check_dist: {otherwise}")


if __name__ == "__main__":
    sys.exit(main())
