"""The recipe for conda: what it needs is what the package needs, and rattler-build renders it."""

import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import sparsering

ROOT = Path(__file__).parent.parent
RECIPE = ROOT / "packaging" / "conda" / "recipe.yaml"
RATTLER = "py-rattler-build==0.73.0"
# Prints what is rendered for the platforms whose libraries `tools/build_wheels.py` compiles.
RENDER = """
import json, sys
from rattler_build import PlatformConfig, RenderConfig, Stage0Recipe, VariantConfig
recipe = Stage0Recipe.from_file(sys.argv[1])
variants = VariantConfig({"cxx_compiler": ["gxx"], "c_stdlib": ["sysroot"]})
found = {"skip": recipe.to_dict()["build"]["skip"]}
for platform in ("linux-64", "linux-aarch64", "osx-arm64"):
    settings = RenderConfig(platform=PlatformConfig(target_platform=platform))
    (rendered,) = recipe.render(variants, settings)
    found[platform] = rendered.recipe.to_dict()
print(json.dumps(found))
"""


def needs(section: str) -> dict[str, str]:
    """Returns the packages of a section of the requirements, and their least versions."""
    text = RECIPE.read_text(encoding="utf-8")
    (lines,) = re.findall(rf"^  {section}:\n((?:    - .*\n)+)", text, re.MULTILINE)
    words = [line.strip().removeprefix("- ").split() for line in lines.splitlines()]
    return {name: least[0] if least else "" for name, *least in words}


def test_the_recipe_needs_what_the_package_needs():
    read = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    project = read["project"]
    expected = {"python": project["requires-python"]}
    for need in project["dependencies"]:
        name, least = re.fullmatch(r"([\w-]+)(>=[\d.]+)", need).groups()
        expected[{"torch": "pytorch"}.get(name, name)] = least
    assert needs("run") == expected
    backend = {x.partition(">")[0]: x[x.find(">") :] for x in read["build-system"]["requires"]}
    assert expected.items() | backend.items() <= needs("host").items()


@pytest.mark.slow
def test_rattler_build_renders_the_recipe_for_each_platform(tmp_path):
    subprocess.run([sys.executable, "-m", "venv", tmp_path], check=True)
    python = tmp_path / "bin" / "python"
    subprocess.run([python, "-m", "pip", "install", "--quiet", RATTLER], check=True)
    command = [python, "-c", RENDER, str(RECIPE)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found.pop("skip") == ["win"]
    assert len(found) == 3
    for platform, recipe in found.items():
        assert recipe["package"] == {"name": "sparsering", "version": sparsering.__version__}
        assert f"gxx_{platform}" in recipe["requirements"]["build"]
        tools = re.findall(r"tools/\w+\.py", " ".join(recipe["build"]["script"]))
        assert tools and all((ROOT / name).exists() for name in tools)
