"""The backend flash against the reference, by stand-ins of FlashAttention-3 and -4 on the CPU."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from oracles import flash_packages
from oracles.attention_oracle import assert_close
from oracles.flash_packages import LAST_CALL, installed
from torch import Tensor

import sparsering as sr
from sparsering.call import NO_OPTIONS
from sparsering.distributed.rank import choose_kernels
from sparsering.kernels.library import flash

HOPPER, BLACKWELL = (9, 0), (10, 0)
GPUS = {"3": ((3,), HOPPER), "4": ((4,), HOPPER), "3 and 4": ((3, 4), BLACKWELL)}
DOCUMENTS = sr.Documents((9, 0, 20, 11))
# name: pattern, number of queries, number of keys, q_start, the function that computes it
BANDS: dict[str, tuple[sr.Pattern, int, int, int | None, str]] = {
    "full": (sr.Full(), 40, 40, None, "dense"),
    "full from anywhere": (sr.Full(), 12, 40, 3, "dense"),
    "causal": (sr.Causal(), 40, 40, None, "dense"),
    "later queries": (sr.Causal(), 12, 40, None, "dense"),
    "queries before the keys": (sr.Causal(), 40, 12, None, "dense"),
    "causal and shifted": (sr.Causal(), 40, 40, 3, "dense"),
    "window": (sr.SlidingWindow(5, 2), 40, 40, None, "dense"),
    "window on the left": (sr.SlidingWindow(5), 40, 40, None, "dense"),
    "window without an end": (sr.SlidingWindow(None, 3), 40, 40, None, "dense"),
    "window of later queries": (sr.SlidingWindow(5, 2), 12, 40, None, "dense"),
    "window of earlier queries": (sr.SlidingWindow(5, 2), 40, 12, None, "dense"),
    "window that is shifted": (sr.SlidingWindow(9, 9), 12, 40, 25, "dense"),
    "both": (sr.SlidingWindow(5, 2) & sr.Causal(), 40, 40, None, "dense"),
    "documents": (DOCUMENTS, 40, 40, None, "varlen"),
    "causal documents": (DOCUMENTS & sr.Causal(), 40, 40, None, "varlen"),
    "later queries of documents": (DOCUMENTS & sr.Causal(), 15, 40, None, "varlen"),
    "other documents of each entry": (
        sr.Documents(((9, 31), (5, 5, 30))) & sr.SlidingWindow(4, 1), 40, 40, None, "varlen",
    ),
    "packed": (sr.Packed((9, 20, 11), sr.SlidingWindow(3)), 40, 40, None, "varlen"),
    "lengths in a tensor": (
        sr.Documents(torch.tensor([[9, 31, 0], [5, 5, 30]])) & sr.Causal(), 40, 40, None, "varlen",
    ),
    "no keys": (sr.Full(), 5, 0, None, ""),
    "no queries": (sr.Causal(), 0, 7, None, ""),
}  # fmt: skip
CELLS = torch.tensor([[1, 0, 1, 0], [0, 0, 0, 0], [1, 1, 0, 1]], dtype=torch.bool)
BLOCKS: dict[str, sr.Pattern] = {
    "random blocks of each head": sr.RandomBlocks(0.4, 256),
    "a row without blocks": sr.Blocks(CELLS, 256),
    "nothing": sr.Blocks(torch.zeros(3, 4, dtype=torch.bool), 256),
    "block window": sr.BlockWindow(1, 256),
    "documents of blocks": sr.Documents((256, 512)) & sr.BlockCausal(256),
}


def drawn(
    q_len: int, kv_len: int, heads: tuple[int, int] = (4, 2), dtype: torch.dtype = torch.float64
) -> list[Tensor]:
    shapes = (2, heads[0], q_len, 8), (2, heads[1], kv_len, 8), (2, heads[1], kv_len, 8)
    return [torch.randn(shape, dtype=dtype) for shape in shapes]


def results(
    backend: str, tensors: Sequence[Tensor], pattern: sr.Pattern, with_lse: bool, **options: Any
) -> list[Tensor]:
    """Out, lse, and the gradients of query, key and value; an lse of -inf counts as 0."""
    leaves = [x.detach().clone().requires_grad_() for x in tensors]
    out, lse = sr.attention(*leaves, pattern, backend=backend, return_lse=True, **options)
    lse = torch.where(lse == -torch.inf, 0.0, lse)
    outs = (out, lse) if with_lse else (out,)
    grads = [torch.linspace(-1, 1, x.numel(), dtype=x.dtype).view(x.shape) for x in outs]
    found = torch.autograd.grad(outs, leaves, grads, materialize_grads=True)
    return [x.detach() for x in (out, lse, *found)]


@pytest.mark.parametrize("gpu", GPUS)
@pytest.mark.parametrize("name", BANDS)
def test_bands_and_documents_of_bands(name, gpu):
    pattern, q_len, kv_len, q_start, function = BANDS[name]
    versions, capability = GPUS[gpu]
    with_lse = 3 not in versions or capability != HOPPER  # FlashAttention-3 has no gradient of it
    tensors = drawn(q_len, kv_len)
    for scale in (None, 0.6, -0.3, 0.0):
        call = {"pattern": pattern, "with_lse": with_lse, "q_start": q_start, "scale": scale}
        expected = results("reference", tensors, **call)
        with installed(*versions, capability=capability):
            found = results("flash", tensors, **call)
            run = f"{4 if with_lse else 3} {function}"
            assert LAST_CALL.get("name", "") == (run if function else "")
        for number, (got, wanted) in enumerate(zip(found, expected, strict=True)):
            assert_close(got, wanted, 1e-12, f"scale {scale}, {number}")


@pytest.mark.parametrize("gpu", ["3", "4"])
def test_documents_with_other_numbers_of_queries(gpu):
    """Queries come before the keys in one document, one has no keys, and one has no queries."""
    versions, capability = GPUS[gpu]
    cu_q, cu_k = [0, 9, 14, 14, 30], [0, 4, 4, 10, 30]
    tensors = [x[0].transpose(0, 1) for x in drawn(30, 30)]
    for pattern in (sr.Causal(), sr.Full(), sr.SlidingWindow(3, 1)):
        expected = sr.attention_varlen(
            *tensors, cu_q, cu_k, pattern, backend="reference", return_lse=True
        )
        with installed(*versions, capability=capability):
            found = sr.attention_varlen(
                *tensors, cu_q, cu_k, pattern, backend="flash", return_lse=True
            )
        assert_close(found[0], expected[0], 1e-12)
        assert torch.equal(found[1] == -torch.inf, expected[1] == -torch.inf)
        visible = expected[1] > -torch.inf
        assert_close(found[1][visible], expected[1][visible], 1e-12)


@pytest.mark.parametrize("capability", [HOPPER, BLACKWELL], ids=["hopper", "blackwell"])
@pytest.mark.parametrize("name", BLOCKS)
def test_whole_blocks(name, capability):
    pattern, tensors = BLOCKS[name], drawn(768, 1024 if "row" in name or "noth" in name else 768)
    q_start = 0 if "row" in name or "noth" in name else None
    exact = sr.attention(*tensors, pattern, q_start=q_start, backend="gather", return_lse=True)
    with installed(3, 4, capability=capability):
        out, lse = sr.attention(
            *tensors, pattern, q_start=q_start, backend="flash", return_lse=True
        )
        assert LAST_CALL["name"] == "4 dense" and LAST_CALL["block_sparse_tensors"] is not None
    assert_close(out, exact[0], 1e-12)
    assert torch.equal(lse == -torch.inf, exact[1] == -torch.inf)
    assert_close(lse.clamp(min=-99), exact[1].clamp(min=-99), 1e-12)


@pytest.mark.parametrize("name", BLOCKS)
def test_gradients_of_whole_blocks_on_blackwell(name):
    kv_len = 1024 if "row" in name or "noth" in name else 768
    call = {"pattern": BLOCKS[name], "with_lse": True, "scale": -0.3}
    call["q_start"] = 0 if kv_len > 768 else None
    tensors = drawn(768, kv_len)
    expected = results("gather", tensors, **call)
    with installed(4, capability=BLACKWELL):
        found = results("flash", tensors, **call)
    for number, (got, wanted) in enumerate(zip(found, expected, strict=True)):
        assert_close(got, wanted, 1e-12, str(number))


def test_blocks_of_128_run_on_hopper_and_an_odd_number_on_blackwell():
    tensors = drawn(384, 384, heads=(2, 1))
    window, exact = sr.BlockWindow(1, 128), sr.attention(*tensors, sr.BlockWindow(1, 128))
    with installed(4):
        assert_close(sr.attention(*tensors, window, backend="flash"), exact, 1e-12)
    rows = sr.Blocks(CELLS[:, :3].repeat_interleave(2, 0)[:3], 128)  # rows 0 and 1 are alike
    with installed(4, capability=BLACKWELL):
        found = sr.attention(*tensors, rows, backend="flash")
        assert_close(found, sr.attention(*tensors, rows), 1e-12)
        with pytest.raises(NotImplementedError, match="on Blackwell it needs blocks of 256 queri"):
            sr.attention(*tensors, window, backend="flash")


def test_gradients_that_a_package_lacks_are_refused_by_name():
    tensors = [x.requires_grad_() for x in drawn(256, 256)]
    with installed(3):
        out, lse = sr.attention(*tensors, sr.Causal(), backend="flash", return_lse=True)
        torch.autograd.grad(out.sum(), tensors, retain_graph=True)
        with pytest.raises(NotImplementedError, match="FlashAttention-3 has no gradient of lse; "):
            torch.autograd.grad((out.sum() + lse.sum()), tensors)
    with installed(4):
        with pytest.raises(NotImplementedError, match=r"wrong on Hopper .* 2623 .*no_grad\(\)"):
            sr.attention(*tensors, sr.BlockWindow(0, 128), backend="flash")
        with torch.no_grad():
            sr.attention(*tensors, sr.BlockWindow(0, 128), backend="flash")
        out = sr.attention(*tensors, sr.Causal(), backend="flash")
        (grad,) = torch.autograd.grad(out.square().sum(), tensors[:1], create_graph=True)
        with pytest.raises(NotImplementedError, match=r"another library .* second derivatives"):
            torch.autograd.grad(grad.sum(), tensors)


def test_deterministic_gradients_are_asked_for_or_refused(monkeypatch):
    tensors = [x.requires_grad_() for x in drawn(256, 256)]
    with installed(3, 4, capability=BLACKWELL):
        for is_asked in (False, True):
            monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda x=is_asked: x)
            for pattern in (sr.Causal(), sr.Documents((100, 156))):
                sr.attention(*tensors, pattern, backend="flash")
                assert LAST_CALL["deterministic"] is is_asked
        with pytest.raises(NotImplementedError, match="gradients of whole blocks in no fixed orde"):
            sr.attention(*tensors, sr.BlockWindow(0, 256), backend="flash")


def test_what_it_cannot_run_is_refused_with_a_way_out():
    tensors, short = drawn(256, 256), drawn(40, 40)
    for versions, given, pattern, options, told in (
        ((4,), short, sr.Dilated(16, 2), {}, "lengths that are multiples of 128, got 40 queries"),
        ((4,), tensors, sr.Dilated(256, 2), {}, "every query sees every key, or none"),
        ((4,), tensors, sr.SlidingWindow(9, 0, 2), {}, "this pattern has others"),
        ((4,), tensors, sr.BlockWindow(1, 64), {}, "this pattern has others"),
        ((4,), tensors, sr.Causal() + sr.Full(), {}, "has 2 passes"),
        ((3,), tensors, sr.BlockWindow(1, 128), {}, "not BlockWindow; for whole blocks, instal"),
        ((3,), short, sr.Causal(), {"q_start": -3}, "leave out q_start, got -3 of 40 queries"),
        ((3,), short, sr.SlidingWindow(2, 9), {"q_start": 3}, "leave out q_start, got 3"),
        ((4,), short, DOCUMENTS, {"q_start": -1}, "leave out q_start, got -1 of 40"),
    ):
        with (
            installed(*versions),
            pytest.raises(NotImplementedError, match=f"flash: .*{told}.*leave out backend="),
        ):
            sr.attention(*given, pattern, backend="flash", **options)
    wide = [torch.randn(1, 1, 256, 136) for _ in range(3)]
    with installed(4), pytest.raises(NotImplementedError, match="whole blocks for head dims up to"):
        sr.attention(*wide, sr.BlockWindow(0, 128), backend="flash")
    with installed(4):
        with pytest.raises(NotImplementedError, match="flash: it has no sink "):
            sr.attention(*short, sr.Full(), backend="flash", sink=torch.zeros(4))
        with pytest.raises(NotImplementedError, match="flash: a ring needs a backend for all lay"):
            choose_kernels("flash", short, NO_OPTIONS, sr.Full())
        assert "\nflash: usable (only when named)" in sr.explain(*short, sr.SlidingWindow(3))
        assert "\nflash: for whole blocks it needs" in sr.explain(*short, sr.Dilated(16, 2))


def test_it_says_why_it_cannot_run_here(monkeypatch):
    missing = "neither FlashAttention-4 (package flash-attn-4) nor FlashAttention-3"
    assert sr.backends()["flash"][0].startswith(missing)
    monkeypatch.setattr(flash, "_installed", lambda: (3,))
    assert sr.backends()["flash"] == ["torch sees no CUDA GPU"]
    x = drawn(8, 8, dtype=torch.float32)
    cpu = ["it runs on cuda tensors", "it computes in bfloat16 and float16"]
    assert flash.reasons(*x) == cpu
    with pytest.raises(NotImplementedError, match="flash: it runs on cuda tensors, it computes in"):
        sr.attention(*x, sr.Full(), backend="flash")
    half = [y.bfloat16() for y in x]
    odd, other = [y[..., :7] for y in half], [*half[:2], half[2][..., :4]]
    assert "multiples of 8 up to 256, got 7" in flash.reasons(*odd)[1]
    assert "one head dim for query, key and value, got 8 and 4" in flash.reasons(*other)[1]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for capability, told in (
        ((8, 6), "compute capability 9 (Hopper), or 10 or 11 (Blackwell), got 8.6"),
        ((12, 0), "got 12.0"),
        ((10, 3), "FlashAttention-3 is for Hopper; Blackwell needs the package flash-attn-4"),
    ):
        monkeypatch.setattr(flash, "capability_of", lambda device, found=capability: found)
        (reason,) = flash.reasons()
        assert told in reason
    monkeypatch.setattr(flash, "capability_of", lambda device: HOPPER)
    assert flash.reasons() == []


def test_what_is_installed_is_found_without_an_import(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    for files, versions in (
        (["flash_attn/__init__.py"], ()),  # FlashAttention-2
        (["flash_attn/cute/interface.py"], (4,)),
        (["flash_attn_interface.py"], (3, 4)),
    ):
        for file in files:
            (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / file).write_text("raise AssertionError('this package was imported')")
        flash._installed.cache_clear()
        assert flash._installed() == versions
    flash._installed.cache_clear()


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # torch's own, at a break
def test_a_compiled_function_breaks_its_graph_at_the_package():
    def call(*tensors: Tensor) -> Tensor:
        return 2 * sr.attention(*tensors, DOCUMENTS & sr.Causal(), backend="flash")

    tensors = [x.requires_grad_() for x in drawn(40, 40)]
    with installed(4):
        torch._dynamo.reset()
        found, expected = (
            [out, *torch.autograd.grad(out.sum(), tensors)]
            for out in (torch.compile(call, backend="aot_eager")(*tensors), call(*tensors))
        )
        for got, wanted in zip(found, expected, strict=True):
            assert_close(got, wanted, 1e-12)
    assert flash_packages.LAST_CALL["name"] == "4 varlen"
