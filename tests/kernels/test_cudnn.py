"""The backend cudnn against the reference, by a stand-in of cuDNN's kernels on the CPU."""

import pytest
import torch
from oracles.attention_oracle import assert_close
from oracles.cudnn_package import CALLS, installed
from torch import Tensor

import sparsering as sr
from sparsering.kernels.library import cudnn

CELLS = torch.tensor([[1, 0, 1, 0], [0, 0, 0, 0], [1, 1, 0, 1]], dtype=torch.bool)
BLOCKS: dict[str, sr.Pattern] = {
    "random blocks of each head": sr.RandomBlocks(0.4, 128),
    "random blocks of all heads": sr.RandomBlocks(0.4, 128, per_head=False),
    "a row without blocks": sr.Blocks(CELLS, 128),
    "nothing": sr.Blocks(torch.zeros(3, 4, dtype=torch.bool), 128),
    "block window": sr.BlockWindow(1, 128),
    "documents of blocks": sr.Documents((128, 256)) & sr.BlockCausal(128),
    "full": sr.Full(),
    "chosen blocks": sr.SelectedBlocks(torch.tensor([[[[0, 2], [1, -1], [0, 1]]]]), 128),
}


def drawn(
    q_len: int, kv_len: int, heads: tuple[int, int] = (4, 2), width: int = 128
) -> list[Tensor]:
    shapes = (2, heads[0], q_len, width), (2, heads[1], kv_len, width), (2, heads[1], kv_len, width)
    return [torch.randn(shape).bfloat16() for shape in shapes]


def results(backend: str, tensors: list[Tensor], pattern: sr.Pattern, **options) -> list[Tensor]:
    leaves = [x.detach().clone().requires_grad_() for x in tensors]
    out, lse = sr.attention(*leaves, pattern, backend=backend, return_lse=True, **options)
    upstream = torch.linspace(-1, 1, out.numel()).view(out.shape).to(out.dtype)
    return [out.detach(), lse.detach(), *torch.autograd.grad(out, leaves, upstream)]


@pytest.mark.parametrize("major", [9, 10])
@pytest.mark.parametrize("heads", [(4, 2), (2, 2)])
@pytest.mark.parametrize("name", BLOCKS)
def test_whole_blocks_forward_and_backward(name, heads, major):
    pattern = BLOCKS[name]
    longer = name in ("a row without blocks", "nothing")
    tensors, options = drawn(384, 512 if longer else 384, heads), {}
    if longer:
        options["q_start"] = 0
    exact = [x.double() for x in tensors]
    for scale in (None, 0.6, -0.3, 0.0):
        expected = results("reference", exact, pattern, scale=scale, **options)
        with installed(major):
            found = results("cudnn", tensors, pattern, scale=scale, **options)
            assert CALLS == ["forward", "backward"]
        assert torch.equal(found[1] == -torch.inf, expected[1] == -torch.inf)
        for number, (got, wanted) in enumerate(zip(found, expected, strict=True)):
            seen = wanted > -torch.inf
            # results are rounded to bfloat16, and gradients of groups are summed in it; lse is not
            rounding = 1e-6 if number == 1 else 2.0**-7
            largest = float(wanted[seen].abs().max()) if seen.any() else 0.0
            assert_close(got.double()[seen], wanted[seen], rounding * largest, str(number))


def test_what_it_cannot_run_is_refused_with_a_way_out():
    tensors = drawn(384, 384)
    for given, pattern, told in (
        (drawn(40, 40), sr.Full(), "lengths that are multiples of 64, got 40 queries and 40 keys"),
        (tensors, sr.Causal(), "every query sees every key, or none"),
        (tensors, sr.BlockWindow(1, 32), "this pattern has others"),
        (tensors, sr.Causal() + sr.Full(), "has 2 passes"),
    ):
        with (
            installed(),
            pytest.raises(NotImplementedError, match=f"cudnn: .*{told}.*leave out backend="),
        ):
            sr.attention(*given, pattern, backend="cudnn")
        assert not CALLS
    with installed(), pytest.raises(NotImplementedError, match="cudnn: it has no sink "):
        sr.attention(*tensors, sr.Full(), backend="cudnn", sink=torch.zeros(4))


def test_gradients_that_the_package_lacks_are_refused():
    pattern = sr.BlockWindow(0, 64)
    half = [x.half().requires_grad_() for x in drawn(128, 128)]
    narrow = [x.requires_grad_() for x in drawn(128, 128, width=64)]
    with installed():
        for given, told in (
            (half, "it has gradients in bfloat16 alone"),
            (narrow, "on this GPU it has gradients for head dims 128, got 64 and 64"),
        ):
            with pytest.raises(NotImplementedError, match=f"cudnn: {told}; call it under torch.no"):
                sr.attention(*given, pattern, backend="cudnn")
            with torch.no_grad():
                out = sr.attention(*given, pattern, backend="cudnn")
            exact = sr.attention(*(x.double() for x in given), pattern, backend="reference")
            assert_close(out.double(), exact.detach(), 2e-2)
        learnt = [x.requires_grad_() for x in drawn(128, 128)]
        out, lse = sr.attention(*learnt, pattern, backend="cudnn", return_lse=True)
        with pytest.raises(NotImplementedError, match="cudnn: it has no gradient of lse"):
            lse.sum().backward()
        torch.use_deterministic_algorithms(True)
        try:
            with pytest.raises(NotImplementedError, match="not say that its gradients are determ"):
                sr.attention(*learnt, pattern, backend="cudnn")
        finally:
            torch.use_deterministic_algorithms(False)


def test_calls_without_queries_or_keys_do_not_reach_the_package():
    for q_len, kv_len in ((0, 128), (128, 0)):
        with installed():
            tensors = drawn(q_len, kv_len)
            out, lse = sr.attention(*tensors, sr.Full(), backend="cudnn", return_lse=True)
        assert not CALLS and out.shape == tensors[0].shape
        assert not out.any() and torch.equal(lse, torch.full_like(lse, -torch.inf))


def test_it_says_why_it_cannot_run_here(monkeypatch, tmp_path):
    missing = "the package nvidia-cudnn-frontend is not installed, or has no block-sparse attention"
    assert sr.backends()["cudnn"] == [missing, "torch sees no CUDA GPU"]
    monkeypatch.syspath_prepend(tmp_path)
    for folder, there in (("cudnn", False), ("cudnn/block_sparse_attention", True)):
        (tmp_path / folder).mkdir()
        (tmp_path / "cudnn" / "__init__.py").write_text("raise AssertionError('it was imported')")
        cudnn._is_installed.cache_clear()
        assert cudnn._is_installed() == there
    assert sr.backends()["cudnn"] == ["torch sees no CUDA GPU"]
    tensors = [x.float() for x in drawn(64, 64)]
    cpu = ["it runs on cuda tensors", "it computes in bfloat16 and float16"]
    assert cudnn.reasons(*tensors) == cpu
    with pytest.raises(NotImplementedError, match="cudnn: it runs on cuda tensors, it computes in"):
        sr.attention(*tensors, sr.Full(), backend="cudnn")
    cudnn._is_installed.cache_clear()


@pytest.mark.parametrize(
    ("major", "dims", "told"),
    [
        (8, (128, 128), "it needs a GPU of compute capability 9 to 12, got 8"),
        (9, (64, 96), ""),
        (9, (80, 80), "on compute capability 9 it runs head dims 64, 96, 128, got 80 and 80"),
        (10, (64, 96), "on compute capability 10 it runs head dims 64, 96, 128, got 64 and 96"),
        (12, (64, 64), "on compute capability 12 it runs head dims 128, got 64 and 64"),
        (12, (128, 128), ""),
    ],
)
def test_it_says_of_each_gpu_which_head_dims_it_runs(major, dims, told, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(cudnn, "_is_installed", lambda: True)
    monkeypatch.setattr(cudnn, "_major", lambda device: major)

    class OnGpu:
        device, dtype = torch.device("cuda", 0), torch.bfloat16

        def __init__(self, width: int) -> None:
            self.shape = (1, 2, 64, width)

    tensors = (OnGpu(dims[0]), OnGpu(dims[0]), OnGpu(dims[1]))
    assert cudnn.reasons(*tensors) == [told] * bool(told)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # torch's own, at a break
def test_a_compiled_function_breaks_its_graph_at_the_package():
    def call(*tensors: Tensor) -> Tensor:
        return 2 * sr.attention(*tensors, sr.BlockWindow(1, 64), backend="cudnn")

    tensors = [x.requires_grad_() for x in drawn(128, 128)]
    with installed():
        torch._dynamo.reset()
        found, expected = (
            [out, *torch.autograd.grad(out.sum(), tensors)]
            for out in (torch.compile(call, backend="aot_eager")(*tensors), call(*tensors))
        )
        for got, wanted in zip(found, expected, strict=True):
            assert torch.equal(got, wanted)
