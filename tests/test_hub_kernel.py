"""The package as a kernel of the Hugging Face Hub: its folders, and a process that loads them."""

import ast
import base64
import hashlib
import importlib.util
import json
import os
import re
import subprocess
import sys

import pytest
from helpers import forked
from helpers.pages import ROOT

SPEC = importlib.util.spec_from_file_location("hub_kernel", ROOT / "packaging/kernels/build.py")
hub_kernel = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(hub_kernel)

# `load` takes a folder as kernels 0.17 does; its own function replaces it in the slow tests.
LOAD = """
import importlib.util, json, sys
from pathlib import Path

def load(out):
    folder = Path(out) / "build" / "torch-cpu"
    name = json.loads((folder / "metadata.json").read_text())["id"]
    spec = importlib.util.spec_from_file_location(name, folder / "__init__.py")
    sys.modules[name] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
"""
LOAD_BY_KERNELS = """
from pathlib import Path
from kernels import get_local_kernel
from kernels._rust import Digest, DigestAlgorithm, Metadata

def load(out):
    module = get_local_kernel(Path(out))
    folder = Path(module.__file__).parent
    digest = Digest.hash_variant(DigestAlgorithm.SHA256, folder)
    Metadata.read_from_file(folder / "metadata.json").digest.validate(digest)
    return module
"""
BESIDE_THE_PACKAGE = """
import torch, sparsering as sr
kernel = load({out!r})
assert kernel.__name__.startswith("_sparsering_cpu_") and kernel is not sr
assert kernel.__all__ == sr.__all__
torch.manual_seed(0)
query = torch.randn(2, 4, 200, 16, dtype=torch.float64, requires_grad=True)
key, value = torch.randn(2, 2, 2, 200, 16, dtype=torch.float64)
found = []
for package in (kernel, sr):
    pattern = package.LongNet((32, 128), (1, 2)) & package.Causal()
    out = package.attention(query, key, value, pattern, backend={backend!r})
    found.append((out, *torch.autograd.grad(out.square().sum(), query)))
exact = sr.attention(query, key, value, pattern, backend="reference")
for a, b in zip(*found, strict=True):
    assert torch.equal(a, b)
assert (found[0][0] - exact).abs().max() < 1e-13
ours, theirs = (vars(torch.ops)[x.__name__] for x in (kernel, sr))
assert "attention" in vars(ours) or ours.attention is not theirs.attention
"""
TRACED = """
from torch.utils.flop_counter import FlopCounterMode
with FlopCounterMode(display=False) as counter, torch.no_grad():
    kernel.attention(query, key, value, kernel.Causal(), backend={backend!r})
calls = [str(x) for x in counter.get_flop_counts()["Global"]]
assert calls == [kernel.__name__ + ".attention"], calls
graphs = []
def keep(graph, inputs):
    graphs.append(graph)
    return graph.forward
compiled = torch.compile(kernel.attention, fullgraph=True, backend=keep)
compiled(query, key, value, kernel.Causal(), backend={backend!r})
(graph,) = graphs
assert kernel.__name__ + ".attention" in str([x.target for x in graph.graph.nodes]), graph
"""


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """Returns a folder with the kernel for any machine, and its ids."""
    out = tmp_path_factory.mktemp("kernel")
    return out, hub_kernel.build(out)


def test_each_folder_has_the_package_and_says_what_it_is(built):
    out, made = built
    assert set(made) == {"torch-cpu", "torch-cuda"} == {x.name for x in (out / "build").iterdir()}
    for folder, name in made.items():
        backend = folder.partition("-")[2]
        variant = out / "build" / folder
        told = json.loads((variant / "metadata.json").read_text())
        digests = told.pop("digest")
        assert told == {
            "name": "sparsering", "id": name, "version": 0, "license": "mit",
            "python-depends": [], "backend": {"type": backend},
        }  # fmt: skip
        assert re.fullmatch(rf"_sparsering_{backend}_[0-9a-f]{{10}}", name)
        files = {x.relative_to(variant).as_posix() for x in variant.rglob("*") if x.is_file()}
        assert digests["algorithm"] == "sha256"
        assert set(digests["files"]) == files - {"metadata.json"}
        for path in ("__init__.py", "kernels/triton/forward.py", "kernels/cpu/cpu.cpp"):
            content = (variant / path).read_bytes()
            digest = base64.b64encode(hashlib.sha256(content).digest()).decode()
            assert digests["files"][path] == digest
            assert content == (ROOT / "sparsering" / path).read_bytes()
        assert not files & {"__main__.py", "cli/__init__.py", "demo/__init__.py"}
    card = (out / "README.md").read_text()
    assert card.startswith("---\nlicense: mit\n") and "version=0" in card


def test_an_id_changes_with_any_file():
    files = {"a.py": b"1", "b.py": b"2"}
    names = {hub_kernel.identifier(x, "cpu") for x in (files, files | {"b.py": b"3"})}
    names |= {hub_kernel.identifier({"a.py": b"1b.py", "": b"2"}, "cpu")}
    assert len(names) == 3 and hub_kernel.identifier(dict(files), "cpu") in names


def test_a_folder_with_files_is_refused(built):
    with pytest.raises(ValueError, match=r"expected an empty folder, or none, got .*; delete it"):
        hub_kernel.build(built[0])


def test_a_kernel_imports_itself_by_relative_names_and_nothing_that_is_left_out():
    """An absolute import would take the installed package, if there is one."""
    for name, content in hub_kernel.sources().items():
        text = content.decode()
        if not name.endswith(".py") or not re.search(r"\b(sparsering|cli|demo)\b", text):
            continue
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Import):
                absolute, relative = [x.name for x in node.names], []
            elif isinstance(node, ast.ImportFrom) and node.level:
                absolute, relative = (
                    [],
                    [node.module] if node.module else [x.name for x in node.names],
                )
            else:
                absolute, relative = [getattr(node, "module", None) or ""], []
            assert "sparsering" not in {x.partition(".")[0] for x in absolute}, name
            assert not {x.partition(".")[0] for x in relative} & {"cli", "demo"}, name


def test_a_kernel_runs_beside_the_installed_package(built):
    code = LOAD + BESIDE_THE_PACKAGE.format(out=str(built[0]), backend="gather")
    done = forked.run(code)
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def kernels(tmp_path_factory):
    """Returns the environment of a process that can import kernels 0.17, which tests lack."""
    site = tmp_path_factory.mktemp("site")
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(site)]
    subprocess.run([*pip, "kernels==0.17.2", "sigstore==4.5.1"], check=True)
    path = os.pathsep.join([str(site), str(ROOT)])
    return os.environ | {"PYTHONPATH": path, "HF_HUB_OFFLINE": "1"}


def run(code: str, environment: dict[str, str]) -> None:
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]


MODEL = """
import importlib, torch
from transformers import LlamaConfig, LlamaForCausalLM
kernel = load({out!r})
importlib.import_module(kernel.__name__ + ".integrations.transformers").register()
config = LlamaConfig(
    vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
    num_attention_heads=4, num_key_value_heads=2,
)
torch.manual_seed(0)
model = LlamaForCausalLM(config).eval()
tokens = torch.randint(64, (2, 50))
with torch.no_grad():
    found = []
    for name in ("eager", "sparsering"):
        model.set_attn_implementation(name)
        found.append(model(tokens).logits)
assert 0 < (found[0] - found[1]).abs().max() < 1e-5
import sys
assert "sparsering" not in sys.modules
"""


@pytest.mark.slow
def test_kernels_loads_the_folder_that_needs_nothing_compiled(built, kernels):
    out = str(built[0])
    beside = LOAD_BY_KERNELS + BESIDE_THE_PACKAGE + TRACED
    run(beside.format(out=out, backend="gather"), kernels)
    run(LOAD_BY_KERNELS + MODEL.format(out=out), kernels | {"CXX": "", "PATH": ""})


COMPILED = """
import torch
kernel = load({out!r})
assert "torch-stable-abi211-cpu-" in kernel.__file__
torch.manual_seed(0)
query, key, value = torch.randn(3, 1, 4, 300, 32)
pattern = kernel.LongNet((64, 256), (1, 2)) & kernel.Causal()
assert kernel.explain(query, key, value, pattern).startswith("runs: cpu")
out = kernel.attention(query, key, value, pattern)
exact = [x.double() for x in (query, key, value)]
exact = kernel.attention(*exact, pattern, backend="reference")
assert (out - exact).abs().max() < 2e-6
space = vars(torch.ops)[kernel.__name__ + "_cpu"]
assert "table" in vars(space) and "sparsering_cpu" not in vars(torch.ops)
"""


@pytest.mark.slow
def test_kernels_prefers_the_folder_with_compiled_libraries(tmp_path, kernels):
    made = hub_kernel.build(tmp_path / "kernel", with_libraries=True)
    (stable,) = (x for x in made if x.startswith("torch-stable-abi211-cpu-"))
    found = (tmp_path / "kernel" / "build" / stable).glob("kernels/cpu/*.so")
    assert {x.name for x in found} >= {"binary-default.so"}
    without = {"CXX": "", "PATH": "", "SPARSERING_CACHE": str(tmp_path / "cache")}
    for vectors in ("default", ""):
        more = without | {"SPARSERING_CPU": vectors}
        run(LOAD_BY_KERNELS + COMPILED.format(out=str(tmp_path / "kernel")), kernels | more)
    assert not list(tmp_path.glob("cache/*.so"))
