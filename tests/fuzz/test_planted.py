"""Plants defects in kernels, layouts, caches and rings; a minute of attack must find each."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

DEFECTS = {
    "the kernel reads rows in half precision as floats": (
        "calls",
        "kernels/cpu/results.h",
        "merge(part, lses[i], sums.row<S>(row), old, width)",
        "merge(part, lses[i], sums.row<float>(row), old, width)",
    ),
    "the kernel's cap has another slope": (
        "calls",
        "kernels/cpu/scores.h",
        "(Vec(1.f) - t * t).store(slope + i, n);",
        "(Vec(1.f) - t).store(slope + i, n);",
    ),
    "gather takes the bias of another entry": (
        "calls",
        "kernels/gather/chunk_extras.py",
        "added = self.bias[entries].gather(-1, slots)",
        "added = self.bias[entries].gather(-1, slots.flip(-1))",
    ),
    "pairs of listed blocks are laid where they have no slot": (
        "calls",
        "layouts/terms.py",
        "others = [(grid, part) for grid, part in found if grid != plain]",
        "others: list[tuple[Grid, Mask]] = []",
    ),
    "a cache evicts keys one token early": (
        "caches",
        "decoding/cache_state.py",
        "alive = (positions >= 0) & (last.amax(0) >= oldest)",
        "alive = (positions >= 0) & (last.amax(0) > oldest)",
    ),
    "each round of a ring adds the sink": (
        "rings",
        "distributed/rank.py",
        'extras = {**self.extras, "sink": None}',
        "extras = {**self.extras}",
    ),
    "top_p keeps one block less": (
        "selections",
        "selection/choose.py",
        "before = weight.cumsum(-1) - weight",
        "before = weight.cumsum(-1)",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", DEFECTS)
def test_a_minute_of_attack_finds_a_planted_defect(name, tmp_path):
    kind, file, right, wrong = DEFECTS[name]
    for folder in ("sparsering", "tests"):
        shutil.copytree(ROOT / folder, tmp_path / folder)
    planted = tmp_path / "sparsering" / file
    text = planted.read_text()
    assert text.count(right) == 1, "the defect has no place any more"
    planted.write_text(text.replace(right, wrong))
    path = os.pathsep.join([str(tmp_path / "tests"), str(tmp_path)])
    environment = os.environ | {"PYTHONPATH": path}
    if file.endswith(".h"):  # compile before the attack begins, into a temporary cache
        environment["SPARSERING_CACHE"] = str(tmp_path / "cache")
        build = [sys.executable, "-m", "sparsering", "build"]
        subprocess.run(build, cwd=tmp_path, env=environment, check=True, capture_output=True)
    attack = [sys.executable, "-m", "fuzz", "--kinds", kind, "--seconds", "600", "--seed", "1"]
    found = subprocess.run(
        attack, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert found.returncode == 1, found.stdout + found.stderr
    assert f"## FAULT in {kind}" in found.stdout, found.stdout + found.stderr
    spent = re.search(r"cases in (\d+) processor seconds", found.stdout)
    assert int(spent[1]) <= 120  # of the processor; a quiet one takes a minute at most
