"""Checks of wheels find what they look for: each gets a library or a wheel with one fault."""

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from helpers import forked

ROOT = Path(__file__).resolve().parent.parent
COMPILER = shutil.which("c++")
pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or not COMPILER or not shutil.which("objdump"), reason="needs binutils"
)
SOURCE = """
extern "C" {stable};
namespace at {{ int get_num_threads(); }}
extern "C" int run() {{ {body} return 0; }}
"""
AVX2 = 'asm volatile("vaddps %ymm0, %ymm1, %ymm2");'
STABLE = "unsigned long long aoti_torch_abi_version()", "aoti_torch_abi_version();"


def library(folder: Path, name: str, body: str, stable: str = STABLE[0]) -> Path:
    """Compiles a small library; torch's functions stay undefined in it."""
    path = folder / f"binary-{name}.so"
    source = SOURCE.format(body=body, stable=stable)
    command = [COMPILER, "-x", "c++", "-", "-O1", "-fPIC", "-shared", "-o", str(path)]
    subprocess.run(command, input=source, text=True, check=True)
    return path


def audited(path: Path) -> str:
    """Returns what the audit says is wrong with a library, or nothing."""
    command = [str(ROOT / "tools" / "audit_binary.py"), str(path)]
    code = (
        f"import runpy, sys; sys.argv = {command}; runpy.run_path({command[0]!r}, None, '__main__')"
    )
    done = forked.run(code)
    assert (done.returncode == 0) == (not done.stderr), done.stderr
    return done.stderr


def test_the_audit_passes_libraries_of_the_stable_abi(tmp_path):
    assert not audited(library(tmp_path, "avx2", STABLE[1] + AVX2))
    assert not audited(library(tmp_path, "avx512", STABLE[1] + AVX2.replace("ymm", "zmm")))


def test_the_audit_names_symbols_beyond_the_stable_abi(tmp_path):
    said = audited(library(tmp_path, "default", "at::get_num_threads();"))
    assert "_ZN2at15get_num_threadsEv" in said
    newer = "const char* torch_exception_get_what()"  # of torch 2.13
    assert "get_what" in audited(
        library(tmp_path, "default", "torch_exception_get_what();", stable=newer)
    )
    by_name = 'static const volatile char name[] = "_ZN2at5emptyEv"; return name[0];'
    assert "looks up ['_ZN2at5emptyEv']" in audited(library(tmp_path, "default", by_name))


@pytest.mark.parametrize(
    "name, instruction",
    [
        ("avx2", "vaddps %zmm0, %zmm1, %zmm2"),
        pytest.param("avx2", "vaddps %ymm17, %ymm1, %ymm2", marks=pytest.mark.slow),
        pytest.param("avx2", "kmovw %k1, %eax", marks=pytest.mark.slow),
        pytest.param("default", "vaddps %ymm0, %ymm1, %ymm2", marks=pytest.mark.slow),
        ("default", "vaddps %xmm0, %xmm1, %xmm2"),
    ],
)
def test_the_audit_names_an_instruction_that_a_processor_lacks(tmp_path, name, instruction):
    said = audited(library(tmp_path, name, f'asm volatile("{instruction}");'))
    assert f"beyond its name: {instruction.split()[0]} " in said.replace("\t", " ")


def test_the_package_alone_runs_its_demo(tmp_path):
    """As an installed wheel does: without benchmarks, examples and tools."""
    shutil.copytree(ROOT / "sparsering", tmp_path / "site" / "sparsering")
    (tmp_path / "empty").mkdir()
    done = subprocess.run(
        [sys.executable, "-P", "-m", "sparsering", "demo", "--quick", "--out", "out"],
        cwd=tmp_path / "empty",
        env={**os.environ, "PYTHONPATH": str(tmp_path / "site")},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert "standard library" in (tmp_path / "empty/out/report.html").read_text()


@pytest.mark.slow
def test_a_wheel_that_writes_into_site_packages_is_refused(tmp_path):
    sys.path.insert(0, str(ROOT / "tools"))
    import check_dist

    name = f"sparsering-{check_dist.VERSION}"
    wheel = tmp_path / f"{name}-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        package = ROOT / "sparsering"
        for path in (*package.rglob("*.py"), *package.rglob("*.json")):
            text = path.read_text()
            if path.parent.name == "sparsering" and path.name == "__init__.py":
                text += '\n\nopen(__file__.replace("__init__.py", "left.txt"), "w").close()\n'
            archive.writestr(path.relative_to(ROOT).as_posix(), text)
        about = "Metadata-Version: 2.1\nName: sparsering\nVersion: " + check_dist.VERSION
        tags = "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        archive.writestr(f"{name}.dist-info/METADATA", about + "\n")
        archive.writestr(f"{name}.dist-info/WHEEL", tags)
        archive.writestr(f"{name}.dist-info/RECORD", "")
    with pytest.raises(SystemExit, match=r"writes .*left\.txt"):
        check_dist.run_libraries(wheel, Path(sys.executable))
