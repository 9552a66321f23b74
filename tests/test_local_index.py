"""A release as a stranger gets it: built, uploaded to an index of this machine, and installed."""

import hashlib
import importlib.metadata
import os
import re
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest
from helpers.pages import README, ROOT, blocks
from packaging.requirements import Requirement

SERVER = "pypiserver==2.4.2"
# Appended to README's block: the first tokens alone, with the reference, give their rows again.
CHECK = """
import sparsering
first = (x[:, :, :64].detach().double() for x in (query, key, value))
expected = attention(*first, pattern, backend="reference")
error = float((out[:, :, :64] - expected).abs().max())
print("error", error, "from", sparsering.__file__, sparsering.__version__)
"""


def run(*command: object, **options: object) -> str:
    """Runs a command without pip's settings; returns what it prints."""
    names = ("PIP_", "PYTHON", "SPARSERING_CXX", "TWINE_")
    environment = {x: y for x, y in os.environ.items() if not x.startswith(names)}
    done = subprocess.run(
        [str(x) for x in command], capture_output=True, text=True, check=False,
        **{"env": environment | {"PIP_CONFIG_FILE": os.devnull}, **options},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


def environment_of(folder: Path) -> Path:
    """Makes an environment without pip; returns its interpreter."""
    run(sys.executable, "-m", "venv", "--without-pip", folder)
    return folder / "bin" / "python"


def link_torch(site: Path) -> None:
    """Links torch and what it requires, and nothing else, into an environment."""
    wanted, seen = ["torch"], set()
    while wanted:
        name = re.sub(r"[-_.]+", "-", wanted.pop()).lower()
        if name in seen:
            continue
        seen.add(name)
        found = importlib.metadata.distribution(name)
        needs = [Requirement(x) for x in found.requires or ()]
        wanted += [x.name for x in needs if not x.marker or x.marker.evaluate({"extra": ""})]
        for part in {x.parts[0] for x in found.files or ()} - {"..", "__pycache__"}:
            (site / part).symlink_to(Path(str(found.locate_file(part))))


@pytest.fixture
def index(tmp_path):
    """Starts an index in an environment of its own, without other indices behind it."""
    python = environment_of(tmp_path / "server")
    install = [sys.executable, "-m", "pip", "--python", python, "install", "--quiet", SERVER]
    run(*install, env=None)  # from the registry, as this machine's pip is set up
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    packages = tmp_path / "packages"
    packages.mkdir()
    options = ["-p", str(port), "-i", "127.0.0.1", "-P", ".", "-a", ".", "--disable-fallback"]
    server = subprocess.Popen(
        [python.parent / "pypi-server", "run", *options, packages],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    address = f"http://127.0.0.1:{port}/"
    try:
        for _ in range(200):
            with socket.socket() as tried:
                if tried.connect_ex(("127.0.0.1", port)) == 0:
                    break
            assert server.poll() is None
            time.sleep(0.1)
        yield address
    finally:
        server.terminate()
        server.wait()


@pytest.mark.slow
def test_a_release_is_uploaded_once_installed_and_runs_the_first_block(index, tmp_path):
    dist, empty = tmp_path / "dist", tmp_path / "empty"
    empty.mkdir()
    run(sys.executable, "-m", "build", "--outdir", dist, ROOT, env=None)
    files = sorted(dist.iterdir())
    assert [x.suffix for x in files] == [".whl", ".gz"]
    twine = [sys.executable, "-m", "twine"]
    run(*twine, "check", "--strict", *files)
    upload = [*twine, "upload", "--non-interactive", "-u", "-", "-p", "-", "--repository-url"]
    run(*upload, index, *files)

    with urllib.request.urlopen(f"{index}simple/sparsering/") as page:
        links = re.findall(r'href="([^"#]+)#sha256=(\w+)"', page.read().decode())
    assert {(Path(link).name, digest) for link, digest in links} == {
        (x.name, hashlib.sha256(x.read_bytes()).hexdigest()) for x in files
    }
    # A released version stays as it is.
    with pytest.raises(AssertionError, match="409"):
        run(*upload, index, files[0])

    python = environment_of(tmp_path / "clean")
    (site,) = (tmp_path / "clean").glob("lib/python*/site-packages")
    link_torch(site)
    before = {x.name for x in site.iterdir()}
    pip = [sys.executable, "-m", "pip", "--python", python, "install", "--no-cache-dir"]
    said = run(*pip, "--index-url", f"{index}simple/", "sparsering")
    version = files[0].name.split("-")[1]
    assert f"Successfully installed sparsering-{version}" in said
    assert {x.name for x in site.iterdir()} - before == {
        "sparsering", f"sparsering-{version}.dist-info"
    }  # fmt: skip
    first = next(x.code for x in blocks(README.read_text()) if x.language == "python")
    said = run(python, "-I", "-c", first + CHECK, cwd=empty)
    error, at = re.findall(rf"^error (\S+) from (\S+) {re.escape(version)}$", said, re.MULTILINE)[0]
    assert float(error) < 2e-6 and Path(at) == site / "sparsering" / "__init__.py"
    assert "runs: " in said
