"""Equal calls share one decision (backend, layout, scale); other calls do not."""

import gc
import weakref
from typing import Any

import pytest
import torch
from oracles.attention_oracle import Case, assert_close, gradients, inputs
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

import sparsering as sr
from sparsering.kernels.backends import BACKENDS
from sparsering.route import decision

CASE = Case(2, 4, 2, 40, 40, 8, 8)


def drawn(requires_grad: bool = False, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    return inputs(CASE, dtype, requires_grad)


def exact(args: list[Tensor], pattern: sr.Pattern, **options: Any) -> Tensor:
    return sr.attention(
        *(x.detach().double() for x in args), pattern, backend="reference", **options
    )


@pytest.fixture
def checks(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """List that gets an item for each call whose arguments are checked in full."""
    seen: list[int] = []
    real = decision.check_inputs
    monkeypatch.setattr(decision, "check_inputs", lambda *x: (seen.append(1), real(*x)))
    decision._decisions.clear()
    return seen


@pytest.mark.parametrize("requires_grad", [False, True])
@pytest.mark.parametrize(
    "pattern",
    [
        sr.Causal(),
        sr.Causal() & sr.KeyPadding((3, 40)),
        sr.Causal() & sr.KeyMask(torch.arange(40) % 3 > 0),
        sr.LongNet((8, 16), (1, 2)),
    ],
    ids=str,
)
@pytest.mark.parametrize("extras", [{}, {"softcap": 3.0, "sink": torch.zeros(4)}])
def test_later_calls_are_not_checked_again_and_compute_the_same(
    pattern, requires_grad, extras, checks
):
    args = drawn(requires_grad)
    first = sr.attention(*args, pattern, return_lse=True, **extras)
    again = [sr.attention(*args, pattern, return_lse=True, **extras) for _ in range(2)]
    assert len(checks) == 1
    for found in again:
        assert all(map(torch.equal, found, first))
        if requires_grad:
            assert all(map(torch.equal, gradients(found, args), gradients(first, args)))
    assert_close(first[0].double(), exact(args, pattern, **extras), 3e-6)


def test_numbers_that_compare_equal_are_not_confused():
    args = drawn()
    for good, name in ((1, "scale"), (0, "q_start"), (16, "block_size")):
        sr.attention(*args, sr.Causal(), **{name: good})
        for bad in (bool(good), float(good), str(good)):
            if name == "scale" and type(bad) is float:
                continue
            with pytest.raises(ValueError, match=f"{name} must be"):
                sr.attention(*args, sr.Causal(), **{name: bad})


def test_gradients_and_their_absence_share_no_run():
    args, pattern = drawn(True), sr.SlidingWindow(5)
    with torch.no_grad():
        for _ in range(2):
            assert not sr.attention(*args, pattern).requires_grad
    for _ in range(2):
        out = sr.attention(*args, pattern)
        assert all(x.abs().sum() > 0 for x in gradients([out], args))
    value = args[2].detach().requires_grad_()
    out = sr.attention(args[0].detach(), args[1].detach(), value, pattern)
    assert gradients([out], [value])[0].abs().sum() > 0
    table = torch.zeros(1, 3, requires_grad=True)
    for _ in range(2):
        out = sr.attention(*(x.detach() for x in args), pattern, distance_bias=table)
        assert gradients([out], [table])[0].abs().sum() > 0


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")
def test_modes_and_transforms_are_seen_after_plain_calls():
    args, pattern = drawn(), sr.Causal()
    plain = [sr.attention(*args, pattern) for _ in range(2)][1]
    with torch.autocast("cpu", torch.bfloat16):
        assert sr.attention(*args, pattern).dtype == torch.bfloat16
    with FlopCounterMode(display=False) as counter:
        sr.attention(*args, pattern)
    assert counter.get_total_flops() > 0
    loss = torch.func.grad(lambda x: sr.attention(x, *args[1:], pattern).sum())
    assert loss(args[0]).abs().sum() > 0
    mapped = torch.func.vmap(lambda x: sr.attention(x, *args[1:], pattern))
    assert_close(mapped(torch.stack([args[0]] * 2))[1], plain, 1e-6)
    compiled = torch.compile(sr.attention, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(*args, pattern), plain)
    negative = torch._neg_view(args[0])
    assert_close(
        sr.attention(negative, *args[1:], pattern), sr.attention(-args[0], *args[1:], pattern), 1e-6
    )
    meta = [x.to("meta") for x in args]
    assert sr.attention(*meta, pattern, backend="gather").is_meta
    with torch.inference_mode():
        assert torch.equal(sr.attention(*args, pattern), plain)
    with pytest.raises(ValueError, match="must share a dtype"):
        sr.attention(args[0], args[1].double(), args[2], pattern)
    nested = torch.nested.nested_tensor(list(args[0]), layout=torch.jagged)
    for wrong in (nested, args[0].to_sparse()):
        with pytest.raises(ValueError, match="must be a dense tensor"):
            sr.attention(wrong, *args[1:], pattern)
    for name in ("scale", "q_start", "block_size"):
        with pytest.raises(ValueError, match=name):
            sr.attention(*args, pattern, **{name: torch.ones(())})
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(args[0], args[0])
        moved = torch.autograd.forward_ad.unpack_dual(sr.attention(dual, *args[1:], pattern))
        assert torch.equal(moved.primal, plain) and moved.tangent.abs().max() > 0


def test_a_changed_table_of_backends_is_a_new_decision(monkeypatch):
    args = drawn()
    compiled = sr.attention(*args, sr.Causal())
    gathered = sr.attention(*args, sr.Causal(), backend="gather")
    assert not torch.equal(compiled, gathered)  # else nothing is shown
    with monkeypatch.context() as patch:
        cannot = BACKENDS["cpu"]._replace(reasons=lambda *_: ["no compiler"])
        patch.setitem(BACKENDS, "cpu", cannot)
        for _ in range(2):
            assert torch.equal(sr.attention(*args, sr.Causal()), gathered)
    assert torch.equal(sr.attention(*args, sr.Causal()), compiled)


def test_tensors_of_a_pattern_count_by_their_content():
    args = drawn()
    for shift in range(3):
        valid = torch.arange(40) % 3 != shift
        for pattern in (sr.KeyMask(valid), sr.Dense(valid.expand(40, -1))):
            assert_close(sr.attention(*args, pattern).double(), exact(args, pattern), 3e-6)


def test_extras_are_checked_in_each_call():
    args, pattern = drawn(), sr.Causal()
    out = sr.attention(*args, pattern)
    for _ in range(2):
        sink = torch.zeros(4)
        found = sr.attention(*args, pattern, sink=sink)
        assert_close(found.double(), exact(args, pattern, sink=sink.double()), 3e-6)
        with pytest.raises(ValueError, match="sink must be"):
            sr.attention(*args, pattern, sink=torch.zeros(3))
        with pytest.raises(ValueError, match="dropout_p must be"):
            sr.attention(*args, pattern, dropout_p=1.5)
        assert torch.equal(sr.attention(*args, pattern, dropout_p=0, dropout_seed=3), out)
        dropped = [sr.attention(*args, pattern, dropout_p=0.5, dropout_seed=s) for s in (1, 1, 2)]
        assert torch.equal(dropped[0], dropped[1]) and not torch.equal(dropped[1], dropped[2])


def test_strides_and_threads_change_no_decision():
    def attend(*args: Tensor) -> Tensor:
        pattern = sr.Causal() & sr.SlidingWindow(20)
        return sr.attention(*args, pattern, scale=1.0, q_start=1, block_size=16)

    args = drawn()
    out = attend(*args)
    strided = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in args]
    assert torch.equal(attend(*strided), out)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        assert torch.equal(attend(*args), out)
    finally:
        torch.set_num_threads(before)


def test_few_decisions_are_kept(checks):
    for length in range(1, 300):
        x = torch.zeros(1, 1, length, 1)
        sr.attention(x, x, x, sr.Full(), block_size=16)
    assert len(decision._decisions) == decision._MOST < len(checks) == 299


def test_steps_of_a_cache_share_a_decision_and_a_call_of_their_shapes_changes_none(checks):
    args, pattern = drawn(), sr.SlidingWindow(9) & sr.Causal()
    caches = [sr.KVCache(pattern, 2, 2, 8, num_heads=4, page_size=16) for _ in range(2)]
    parts = [
        [x[:, :, i : i + n] for x in args] for i, n in ((0, 20), *((i, 1) for i in range(20, 40)))
    ]
    outs = [[cache.attend(*part) for part in parts] for cache in caches[:1]]
    assert len(checks) <= 4  # prompt and step, and the attention of the prompt
    decision._decisions.clear()
    for part in parts:
        sr.attention(*part, pattern)
    outs.append([caches[1].attend(*part) for part in parts])
    assert all(map(torch.equal, *outs))
    with pytest.raises(ValueError, match=r"the cache holds torch\.float32, got keys of"):
        caches[0].attend(*(x.double() for x in parts[-1]))
    with pytest.raises(ValueError, match="equally many new tokens"):
        caches[0].attend(*(x[:1] for x in parts[-1]))


@pytest.mark.parametrize("requires_grad", [False, True])
def test_a_pattern_has_parts_for_each_frame(requires_grad):
    pattern = sr.SlidingWindow(5) & sr.KeyMask(torch.arange(40) % 3 > 0)
    args = drawn(requires_grad)
    for q_len in (40, 7, 1, 40, 7):
        own = [args[0][:, :, :q_len], *args[1:]]
        assert_close(sr.attention(*own, pattern).double(), exact(own, pattern), 3e-6)
    with pytest.raises(ValueError, match="bool for each of 39 keys"):
        sr.attention(*(x[:, :, 1:] for x in args), pattern)


TABLE = torch.arange(40)[:, None].clamp(max=39)
WITH_TENSORS = {
    "lists": lambda: sr.SelectedBlocks(TABLE, 1, query_block=1),
    "lists and a mask": lambda: sr.SelectedBlocks(TABLE, 1, query_block=1) & sr.Causal(),
    "lists beside tiles": lambda: sr.SelectedBlocks(TABLE, 1, query_block=1) | sr.SlidingWindow(3),
    "a mixture": lambda: sr.SelectedBlocks(TABLE, 1, query_block=1) + sr.SlidingWindow(3),
    "blocks": lambda: sr.SelectedBlocks(torch.zeros(3, 1, dtype=torch.int64), 16),
    "key mask": lambda: sr.KeyMask(torch.arange(40) % 3 > 0),
    "masked": lambda: sr.Causal() & sr.KeyMask(torch.arange(40) % 3 > 0),
    "dense": lambda: sr.Dense(torch.ones(40, 40, dtype=torch.bool).tril()),
    "edges": lambda: sr.SelectedBlocks.from_edges(
        torch.cat((torch.stack((torch.zeros(39).long(), torch.arange(1, 40))), INDEX), 1), 40
    ),
}
INDEX = torch.tensor([[5, 6], [1, 2]])


@pytest.mark.parametrize("requires_grad", [False, True])
@pytest.mark.parametrize("name", WITH_TENSORS)
def test_a_pattern_with_tensors_is_freed_with_its_last_reference(name, requires_grad):
    """Its parts do not hold it in a circle, which would live until Python looks for such."""
    args, make = drawn(requires_grad), WITH_TENSORS[name]
    options = {"q_start": 0}
    wanted = sr.attention(*args, make(), backend="reference", **options)
    gc.collect()
    gc.disable()
    try:
        pattern = make()
        for _ in range(3):
            assert_close(sr.attention(*args, pattern, **options), wanted, 3e-6)
        assert requires_grad or vars(pattern)["_parts"]
        alive = weakref.ref(pattern)
        del pattern
        sr.layout_cache.clear()
        assert alive() is None
    finally:
        gc.enable()
