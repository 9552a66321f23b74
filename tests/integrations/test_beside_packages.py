"""Runs the adapters' tests beside packages that are large, or forbid our torch or transformers.

Each package is put into a folder of its own, without what it asks for, so that no other torch comes
along. What it needs besides is listed here, at the versions that the tests passed with.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.pages import ROOT

HERE = Path(__file__).parent
PACKAGES = {
    "anemoi": [  # which asks for torch below 2.11
        "anemoi-models==0.19.0",
        *("anemoi-utils==0.5.14", "torch-geometric==2.8.1", "hydra-core==1.3.8"),
        *("omegaconf==2.4.0", "antlr4-python3-runtime==4.9.3", "xxhash==4.1.0"),
    ],
    "kvpress": [  # which asks for transformers below 5.3
        "kvpress==0.5.5",
        *("datasets==5.2.0", "pyarrow==26.0.1", "xxhash==4.1.0"),
        *("dill==0.4.1", "multiprocess==0.70.19"),
        *("cachetools==5.5.2", "fire==0.6.0", "six==1.17.0", "termcolor==3.3.0"),
    ],
    "trl": [  # whose datasets bring 200 MB
        "trl==1.16.0",
        *("datasets==5.2.0", "pyarrow==26.0.1", "xxhash==4.1.0"),
        *("dill==0.4.1", "multiprocess==0.70.19"),
    ],
}


@pytest.mark.slow
@pytest.mark.parametrize("name", PACKAGES)
def test_an_adapter_beside_its_package(name: str, tmp_path: Path) -> None:
    folder = tmp_path / "site-packages"  # by this name dill knows what it need not pickle
    run("-m", "pip", "install", "--quiet", "--no-deps", "--target", str(folder), *PACKAGES[name])
    test = str(HERE / f"beside_{name}.py")
    run("-m", "pytest", "-q", "-p", "no:cacheprovider", test, packages=folder)


def run(*arguments: str, packages: Path | None = None) -> None:
    """Runs a module of Python in the repository, with a folder of packages; it must end well."""
    paths = str(ROOT) if packages is None else os.pathsep.join((str(ROOT), str(packages)))
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": paths},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
