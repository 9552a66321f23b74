"""Exported programs run where no Python of ours is: ONNX Runtime, ExecuTorch, AOTInductor, C++."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from by_tables import exported
from test_models import MODELS
from torch import Tensor

import sparsering as sr

pytestmark = pytest.mark.filterwarnings("ignore:read_binary is deprecated")  # of ExecuTorch
ROOT = Path(__file__).resolve().parents[2]


class Window(torch.nn.Module):
    """A projection, attention over a window with padding, and a projection."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.project, self.out = torch.nn.Linear(32, 64), torch.nn.Linear(32, 8)

    def forward(self, x: Tensor, valid: Tensor) -> Tensor:
        q, kv = self.project(x).unflatten(-1, (4, 16)).transpose(1, 2).split(2, 1)
        pattern = sr.SlidingWindow(100, 20) & sr.KeyMask(valid)
        out = sr.attention(q, kv[:, :1], kv[:, 1:], pattern, sink=torch.zeros(2))
        return self.out(out.transpose(1, 2).flatten(2))


def window(tokens: int) -> tuple[torch.nn.Module, tuple[Tensor, ...], Tensor]:
    """Returns a small model in which a window attends, its inputs and what it returns for them."""
    module = Window().eval()
    inputs = torch.randn(2, tokens, 32), torch.rand(2, tokens) > 0.2
    with torch.no_grad():
        return module, inputs, module(*inputs)


def model(name: str, tokens: int) -> tuple[torch.nn.Module, tuple[Tensor, ...], Tensor]:
    """Returns a model of `test_models`, its inputs and what it returns for them."""
    made, given = MODELS[name]
    module, inputs = made(), given(tokens)
    with torch.no_grad():
        return module, inputs, module(*inputs)


def assert_same(got: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)


def in_onnxruntime(program: object, inputs: tuple[Tensor, ...], folder: Path) -> Tensor:
    onnxruntime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    torch.onnx.export(program, inputs, dynamo=True, verbose=False).save(folder / "model.onnx")
    session = onnxruntime.InferenceSession(folder / "model.onnx")
    names = [x.name for x in session.get_inputs()]
    given = dict(zip(names, (x.numpy() for x in inputs), strict=True))
    return torch.from_numpy(session.run(None, given)[0])


def in_executorch(program: object, inputs: tuple[Tensor, ...], folder: Path) -> Tensor:
    exir, runtime = (
        pytest.importorskip("executorch.exir"),
        pytest.importorskip("executorch.runtime"),
    )
    lowered = exir.to_edge_transform_and_lower(program, partitioner=[]).to_executorch()
    (folder / "model.pte").write_bytes(lowered.buffer)
    loaded = runtime.Runtime.get().load_program(folder / "model.pte")
    return loaded.load_method("forward").execute(list(inputs))[0].clone()


RUNTIMES = {"onnxruntime": in_onnxruntime, "executorch": in_executorch}


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_a_window_runs(tmp_path: Path, runtime: str):
    module, inputs, expected = window(300)
    assert_same(RUNTIMES[runtime](exported(module, inputs), inputs, tmp_path), expected)


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("runtime", RUNTIMES)
def test_a_model_runs(tmp_path: Path, runtime: str, name: str):
    module, inputs, expected = model(name, 4096)
    assert_same(RUNTIMES[runtime](exported(module, inputs), inputs, tmp_path), expected)


# A package of AOTInductor is loaded where the library is not.
LOAD = """
import sys, torch
*inputs, expected = torch.load(f"{sys.argv[1]}/data.pt")
model = torch._inductor.aoti_load_package(f"{sys.argv[1]}/model.pt2")
torch.testing.assert_close(model(*inputs), expected, rtol=1e-5, atol=1e-5)
assert "sparsering" not in sys.modules
"""


@pytest.mark.slow
def test_a_package_of_aotinductor_runs_without_the_library_and_in_cpp(tmp_path: Path):
    module, inputs, expected = window(300)
    program = exported(module, inputs)
    torch._inductor.aoti_compile_and_package(program, package_path=str(tmp_path / "model.pt2"))
    torch.save([*inputs, expected], tmp_path / "data.pt")
    run([sys.executable, "-W", "ignore", "-c", LOAD, str(tmp_path)])
    if (compiler := os.environ.get("CXX") or shutil.which("g++")) is None:
        pytest.skip("no C++ compiler")
    torch_folder = Path(torch.__file__).parent
    include, lib = torch_folder / "include", torch_folder / "lib"
    own = tmp_path / "run_exported"
    run(
        [
            *(compiler, "-std=c++20", "-O1", str(ROOT / "examples" / "run_exported.cpp")),
            *("-I", str(include), "-I", str(include / "torch" / "csrc" / "api" / "include")),
            *(
                "-L",
                str(lib),
                f"-Wl,-rpath,{lib}",
                "-ltorch",
                "-ltorch_cpu",
                "-lc10",
                "-o",
                str(own),
            ),
        ]
    )
    files = str(tmp_path / "model.pt2"), str(tmp_path / "data.pt")
    assert run([str(own), *files]).startswith("largest error ")
    torch.save([*inputs, expected + 1e-3], tmp_path / "data.pt")
    assert subprocess.run([str(own), *files], check=False).returncode == 1


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_a_model_runs_in_a_package_of_aotinductor(tmp_path: Path, name: str):
    module, inputs, expected = model(name, 4096)
    path = str(tmp_path / "model.pt2")
    torch._inductor.aoti_compile_and_package(exported(module, inputs), package_path=path)
    assert_same(torch._inductor.aoti_load_package(path)(*inputs), expected)


def run(command: list[str]) -> str:
    """Runs a program, which must end well; returns what it printed."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout
