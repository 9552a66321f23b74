"""The backend cudnn against the reference, by stand-ins of cuDNN's kernels on the CPU."""

import pytest
import torch
from oracles.attention_oracle import assert_close
from oracles.cudnn_package import CALLS, installed
from torch import Tensor

import sparsering as sr
from sparsering.kernels.library import cudnn, declared_masks

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


BOTH = ("flex_attention", "block_sparse_attention")
BLOCKS_ALONE = BOTH[1:]


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


def assert_near(found: list[Tensor], expected: list[Tensor], rounding: float) -> None:
    """Compares out, lse and gradients, relative to the largest number of each.

    All but lse are rounded to bfloat16, and differ by `rounding` at most.
    """
    assert torch.equal(found[1] == -torch.inf, expected[1] == -torch.inf)
    for number, (got, wanted) in enumerate(zip(found, expected, strict=True)):
        seen = wanted > -torch.inf
        largest = float(wanted[seen].abs().max()) if seen.any() else 0.0
        bound = (1e-6 if number == 1 else rounding) * largest
        assert_close(got.double()[seen], wanted[seen], bound, str(number))


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
        # gradients of groups are summed in bfloat16
        assert_near(found, expected, 2.0**-7)


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
    missing = "the package nvidia-cudnn-frontend is not installed, or has no sparse attention"
    assert sr.backends()["cudnn"] == [missing, "torch sees no CUDA GPU"]
    monkeypatch.syspath_prepend(tmp_path)
    folders = ("cudnn", ()), (f"cudnn/{BOTH[1]}", BLOCKS_ALONE), (f"cudnn/{BOTH[0]}", BOTH)
    for folder, there in folders:
        (tmp_path / folder).mkdir()
        (tmp_path / "cudnn" / "__init__.py").write_text("raise AssertionError('it was imported')")
        cudnn._installed.cache_clear()
        assert cudnn._installed() == there
    assert sr.backends()["cudnn"] == ["torch sees no CUDA GPU"]
    tensors = [x.float() for x in drawn(64, 64)]
    cpu = ["it runs on cuda tensors", "it computes in bfloat16 and float16"]
    assert cudnn.reasons(*tensors) == cpu
    with pytest.raises(NotImplementedError, match="cudnn: it runs on cuda tensors, it computes in"):
        sr.attention(*tensors, sr.Full(), backend="cudnn")
    cudnn._installed.cache_clear()


@pytest.mark.parametrize(
    ("kinds", "capability", "dims", "told"),
    [
        (BLOCKS_ALONE, (8, 9), (128, 128), "a GPU of compute capability 9 to 12, got 8"),
        (BLOCKS_ALONE, (9, 0), (64, 96), ""),
        (BLOCKS_ALONE, (9, 0), (80, 80), "capability 9 it runs head dims 64, 96, 128, got 80 and"),
        (BLOCKS_ALONE, (10, 0), (64, 96), "capability 10 it runs head dims 64, 96, 128, got 64 an"),
        (BLOCKS_ALONE, (12, 0), (64, 64), "on compute capability 12 it runs head dims 128, got 64"),
        (BLOCKS_ALONE, (12, 0), (128, 128), ""),
        (BOTH, (8, 9), (128, 128), "it needs a GPU of compute capability 9 to 12, got 8"),
        (BOTH, (9, 0), (80, 8), ""),
        (BOTH, (10, 3), (192, 128), ""),
        (BOTH, (10, 0), (256, 256), ""),
        (BOTH, (9, 0), (84, 80), "192 with values of 128, and 256, got 84 and 80"),
        (BOTH, (9, 0), (192, 192), "192 with values of 128, and 256, got 192 and 192"),
        (BOTH, (11, 0), (80, 80), "on compute capability 11 it runs head dims 64, 96, 128, got 80"),
        (BOTH, (12, 0), (128, 128), ""),
        (BOTH[:1], (12, 0), (128, 128), "no block-sparse attention, got compute capability 12.0"),
        (BOTH[:1], (9, 0), (128, 128), ""),
    ],
)
def test_it_says_of_each_gpu_which_head_dims_it_runs(kinds, capability, dims, told, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(cudnn, "_installed", lambda: kinds)
    monkeypatch.setattr(cudnn, "capability_of", lambda device: capability)

    class OnGpu:
        device, dtype = torch.device("cuda", 0), torch.bfloat16

        def __init__(self, width: int) -> None:
            self.shape = (1, 2, 64, width)

    tensors = (OnGpu(dims[0]), OnGpu(dims[0]), OnGpu(dims[1]))
    found = cudnn.reasons(*tensors)
    assert len(found) == bool(told) and told in "".join(found)


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


# Declared masks

FEW = torch.tensor([[1, 0, 0, 1, 1], [0, 0, 0, 0, 0], [1, 1, 1, 1, 1]], dtype=torch.bool)
DECLARED: dict[str, sr.Pattern] = {
    "full": sr.Full(),
    "causal": sr.Causal(),
    "window and sinks": sr.Causal() & (sr.SlidingWindow(7) | sr.GlobalTokens(2)),
    "documents": sr.Documents((13, 0, 30, 7)) & sr.SlidingWindow(9, 4),
    "documents of each entry": sr.Packed(((13, 37), (20, 30)), sr.Causal()),
    "tree": sr.Tree((20, 9, 11, 10), (-1, 0, 0, 1)),
    "blocks": sr.Blocks(FEW, 10),
    "all but a window": sr.Causal() - sr.SlidingWindow(5),
    "a pattern for each head": sr.PerHead((sr.Causal(), sr.SlidingWindow(3, 2))),
    "rows without keys": sr.Causal() & sr.KeyMask(torch.arange(50) >= 30),
    "nothing": sr.Causal() & sr.KeyMask(torch.zeros(50, dtype=torch.bool)),
}


def narrow(q_len: int, kv_len: int, heads: int = 4, dims: tuple[int, int] = (16, 16)) -> list:
    shapes = (2, heads, q_len, dims[0]), (2, 2, kv_len, dims[0]), (2, 2, kv_len, dims[1])
    return [torch.randn(shape).bfloat16() for shape in shapes]


def results_of_both(backend: str, tensors: list[Tensor], pattern: sr.Pattern, **options) -> list:
    """(out, lse, gradients) of a sum of out and lse, where rows with keys have one."""
    leaves = [x.detach().clone().requires_grad_() for x in tensors]
    out, lse = sr.attention(*leaves, pattern, backend=backend, return_lse=True, **options)
    upstream = torch.linspace(-1, 1, out.numel()).view(out.shape).to(out.dtype)
    total = (out * upstream).sum() + lse[lse > -torch.inf].sin().sum().to(out.dtype)
    return [out.detach(), lse.detach(), *torch.autograd.grad(total, leaves)]


@pytest.mark.parametrize(("heads", "capability"), [(4, (9, 0)), (2, (10, 3))])
@pytest.mark.parametrize("name", DECLARED)
def test_declared_masks_forward_and_backward(name, heads, capability):
    pattern, options = DECLARED[name], {}
    tensors = narrow(30, 50, heads)
    if name == "blocks":
        options["q_start"] = 0
    exact = [x.double() for x in tensors]
    for scale in (None, 0.6, -0.3, 0.0):
        expected = results_of_both("reference", exact, pattern, scale=scale, **options)
        with installed(*capability, declared=True):
            found = results_of_both("cudnn", tensors, pattern, scale=scale, **options)
            assert CALLS[-2:] == ["forward", "backward of lse"] and CALLS[:-2] in ([], ["plan"])
        # gradients are summed in bfloat16
        assert_near(found, expected, 2.0**-6)


def test_attention_varlen_is_a_declared_mask():
    tensors = [x[0].transpose(0, 1) for x in narrow(20, 25)]
    lengths = (0, 5, 5, 17, 20), (0, 9, 13, 25, 25)
    with installed(declared=True):
        found = sr.attention_varlen(*tensors, *lengths, sr.Causal(), backend="cudnn")
        assert "forward" in CALLS
    exact = [x.double() for x in tensors]
    wanted = sr.attention_varlen(*exact, *lengths, sr.Causal(), backend="reference")
    assert_close(found.double(), wanted, 2e-2)


def test_a_plan_serves_calls_of_equal_shapes():
    sr.layout_cache.clear()
    pattern = sr.SlidingWindow(5)
    with installed(declared=True):
        for tensors, planned in (
            (narrow(30, 50), True),
            (narrow(30, 50), False),
            ([x.half() for x in narrow(30, 50)], True),
            ([x[:1] for x in narrow(30, 50)], True),
            (narrow(30, 50, dims=(16, 24)), True),
            ([x.requires_grad_() for x in narrow(30, 50)], True),
            ([x.requires_grad_() for x in narrow(30, 50)], False),
        ):
            CALLS.clear()
            sr.attention(*tensors, pattern, backend="cudnn")
            assert (["plan"] * planned + ["forward"]) == CALLS
        before = sr.layout_cache.info().entries
        assert sr.layout_cache.invalidate(pattern) == before == 6  # five plans, and the intervals


def test_the_bytes_of_a_plan_count_in_the_cache(monkeypatch):
    sr.layout_cache.clear()
    held = iter((100, 1 << 20))
    monkeypatch.setattr(declared_masks, "_allocated", lambda device: next(held))
    with installed(declared=True):
        sr.attention(*narrow(30, 50), sr.Causal(), backend="cudnn")
    assert (1 << 20) - 100 < sr.layout_cache.info().bytes < (1 << 20) + 10_000
    sr.layout_cache.clear()


def test_tensors_in_any_memory_reach_the_package_as_it_needs_them():
    wide = narrow(30, 50, dims=(24, 24))
    for tensors in (
        [x[..., 1:17] for x in wide],  # rows begin at odd places
        [x[..., ::2][..., :8] for x in wide],
        [x.mT.contiguous().mT for x in wide],
        [x[:, :1].expand_as(x) for x in wide],
    ):
        leaves = [x.detach().requires_grad_() for x in tensors]
        exact = [x.detach().double().requires_grad_() for x in tensors]
        with installed(declared=True):
            out, lse = sr.attention(*leaves, sr.Causal(), backend="cudnn", return_lse=True)
            # gradients of sums are expanded numbers
            found = torch.autograd.grad(out.sum() + lse.sum().to(out.dtype), leaves)
        out, lse = sr.attention(*exact, sr.Causal(), backend="reference", return_lse=True)
        wanted = torch.autograd.grad(out.sum() + lse.sum(), exact)
        for x, y in zip(found, wanted, strict=True):
            assert_close(x.double(), y, 2.0**-6 * float(y.abs().max()))


def test_patterns_of_many_intervals_run_as_whole_blocks():
    tensors = drawn(64 * 40, 64 * 40, heads=(2, 2))
    alternate = (torch.arange(40) % 2 == 0).expand(40, 40)
    with installed(declared=True), torch.no_grad():
        assert "flex" not in CALLS
        out = sr.attention(*tensors, sr.Blocks(alternate, 64), backend="cudnn")
        assert CALLS == ["forward"]
        expected = sr.attention(*tensors, sr.Blocks(alternate, 64), backend="gather")
        assert_close(out.double(), expected.double(), 2e-2)
        for pattern, told in (
            (sr.Dilated(64, 2), "as a declared mask: the keys of Dilated have a distance"),
            (sr.Causal() + sr.Full(), "a mixture counts some pairs twice; as whole blocks: it"),
            (sr.Blocks(alternate, 64) & sr.Causal(), "sees 20 intervals of keys, more than 16; as"),
        ):
            with pytest.raises(NotImplementedError, match=f"cudnn: .*{told}.*leave out backend="):
                sr.attention(*tensors, pattern, backend="cudnn")


def test_gradients_that_declared_masks_lack_are_refused():
    unlike = [x.requires_grad_() for x in narrow(20, 20, dims=(32, 16))]
    wide = [x.requires_grad_() for x in narrow(20, 20, 2, dims=(64, 104))]
    widest = [x.requires_grad_() for x in narrow(20, 20, dims=(256, 256))]
    with installed(9, declared=True):
        for given, told in (
            (unlike, "grouped heads of head dims 32 and 16"),
            (wide, "head dims 64 and 104"),
        ):
            with pytest.raises(NotImplementedError, match=f"on Hopper .* no gradients for {told};"):
                sr.attention(*given, sr.Causal(), backend="cudnn")
            with torch.no_grad():
                sr.attention(*given, sr.Causal(), backend="cudnn")
        out, lse = sr.attention(*widest, sr.Causal(), backend="cudnn", return_lse=True)
        torch.autograd.grad(out.sum() + lse.sum().to(out.dtype), widest)
    with installed(10, declared=True):
        for given in (unlike, wide):
            sr.attention(*given, sr.Causal(), backend="cudnn").sum().backward()
        out, lse = sr.attention(*widest, sr.Causal(), backend="cudnn", return_lse=True)
        torch.autograd.grad(out.sum(), widest)
        out, lse = sr.attention(*widest, sr.Causal(), backend="cudnn", return_lse=True)
        with pytest.raises(NotImplementedError, match="no gradient of lse for head dim 256"):
            lse.sum().backward()


def test_gradients_in_order_are_asked_of_the_package():
    with installed(declared=True):
        torch.use_deterministic_algorithms(True)
        try:
            sr.attention(*narrow(20, 20), sr.Causal(), backend="cudnn")
        finally:
            torch.use_deterministic_algorithms(False)
        assert CALLS[-1] == "in order"
