"""Every kind of call, forward and backward, on every compute capability: each is launched.

The driver of the stub checks shared memory, grids and tensor maps. A kernel takes seconds to
compile for the first time, so that only a few cases are fast tests.
"""

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from calls import LONGNET, WINDOW
from gpu_stub import CAPABILITIES, capturing, counted, gpu
from helpers import device_runs
from torch import Tensor

import sparsering as sr
from sparsering.kernels.triton.configs import config_for, in_order
from sparsering.kernels.triton.launch import Launch
from sparsering.kernels.triton.lists import sums_heads_first

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


def inputs(
    *, heads: int = 2, kv_heads: int = 2, queries: int = 300, keys: int = 300, width: int = 64,
    value_width: int | None = None, dtype: torch.dtype = BF16,
) -> list[Tensor]:  # fmt: skip
    """Query, key and value on the current device."""
    value_width = value_width or width
    shapes = (heads, queries, width), (kv_heads, keys, width), (kv_heads, keys, value_width)
    return [torch.randn(1, *s, dtype=dtype, device="cuda") for s in shapes]


def token_first(x: Tensor) -> Tensor:
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def every_other(x: Tensor) -> Tensor:
    return torch.stack((x, x), 3)[:, :, :, 0]


def misaligned(x: Tensor) -> Tensor:
    flat = torch.zeros(x.numel() + 1, dtype=x.dtype, device=x.device)
    return flat[1:].view(x.shape)


def one_head(x: Tensor) -> Tensor:
    return x[:, :1].expand(x.shape)


PATTERNS: dict[str, Callable[[], sr.Pattern]] = {
    "full": sr.Full,
    "causal": sr.Causal,
    "window": lambda: WINDOW,
    "dilated": lambda: sr.SlidingWindow(70, 70, 3),
    "global": lambda: sr.SlidingWindow(70) | sr.GlobalTokens(5),
    "longnet": lambda: LONGNET,
    "blocks": lambda: sr.RandomBlocks(0.5, 64),
    "packed": lambda: sr.Packed((120, 180), sr.Causal()),
    "selected": lambda: (
        sr.SelectedBlocks(torch.zeros(1, 1, 5, 2, dtype=torch.int64, device="cuda"), 64)
        & sr.Causal()
    ),
}


def slopes() -> Tensor:
    return torch.ones(2, device="cuda", requires_grad=True)


EXTRAS: dict[str, Callable[[], dict[str, Any]]] = {
    "softcap": lambda: {"softcap": 30.0},
    "distance bias": lambda: {"distance_bias": torch.zeros(2, 65, device="cuda")},
    "sink": lambda: {"sink": torch.zeros(2, device="cuda")},
    "dropout": lambda: {"dropout_p": 0.1, "dropout_seed": 3},
    "coordinate bias": lambda: {
        "score_mod": sr.coordinate_bias(torch.zeros(300, 2, device="cuda"), slopes())
    },
    "block bias": lambda: {"block_bias": torch.zeros(1, 2, 9, device="cuda"), "block_size": 128},
}

LAYOUTS = [token_first, every_other, misaligned, one_head]


def call_of(pattern: sr.Pattern, args: list[Tensor], **options: Any) -> Callable[[], Tensor]:
    """A call of attention, forward and backward; returns out."""
    learnt = [x.detach().requires_grad_() for x in args]
    tables = {k: x for k, x in options.items() if isinstance(x, Tensor) and x.is_floating_point()}
    options |= {name: x.requires_grad_() for name, x in tables.items()}
    if (bias := options.get("score_mod")) is not None:
        tables["slopes"] = bias.slopes

    def call() -> Tensor:
        out, lse = sr.attention(*learnt, pattern, return_lse=True, backend="triton", **options)
        loss = out.float().sum() + lse.sum()
        torch.autograd.grad(loss, [*learnt, *tables.values()])
        return out

    return call


def run(pattern: sr.Pattern, args: list[Tensor], **options: Any) -> None:
    """Calls attention forward and backward, and counts at least one launch of each."""
    call = call_of(pattern, args, **options)
    with counted() as counts:
        out = call()
    names = {x.kernel for x in counts.launches}
    expected = {"forward_kernel", "query_kernel"} if out.numel() else set()
    expected |= {"key_kernel"} if out.numel() and args[1].numel() else set()
    assert expected <= names, counts


def sizes(test: Callable[..., None]) -> Any:
    """Marks a slow test to run on every compute capability."""
    every = pytest.mark.parametrize("capability", CAPABILITIES, ids="sm{}".format)
    return pytest.mark.slow(every(test))


@sizes
@pytest.mark.parametrize("name", PATTERNS)
def test_patterns(capability, name):
    with gpu(capability):
        run(PATTERNS[name](), inputs())


@sizes
@pytest.mark.parametrize("name", EXTRAS)
def test_extras(capability, name):
    with gpu(capability):
        run(sr.Full() if name == "block bias" else sr.Causal(), inputs(), **EXTRAS[name]())


@sizes
def test_masks_of_keys_and_all_extras_together(capability):
    with gpu(capability):
        valid = torch.arange(300, device="cuda") < 280
        run(sr.Causal() & sr.KeyMask(valid), inputs())
        given = {
            k: x for f in EXTRAS.values() if f is not EXTRAS["block bias"] for k, x in f().items()
        }
        run(sr.Causal() & sr.KeyMask(valid), inputs(width=128), **given)


@sizes
@pytest.mark.parametrize("dtype", [BF16, FP16, FP32], ids=str)
@pytest.mark.parametrize("width", [16, 32, 64, 72, 80, 96, 128, 192, 256, 320, 512])
def test_head_dims_and_dtypes(capability, width, dtype):
    with gpu(capability):
        run(WINDOW, inputs(width=width, dtype=dtype))


@sizes
def test_extras_of_the_widest_heads(capability):
    with gpu(capability):
        valid = torch.arange(300, device="cuda") < 280
        run(sr.Causal() & sr.KeyMask(valid), inputs(width=512))
        given = {k: x for name in ("softcap", "sink", "dropout") for k, x in EXTRAS[name]().items()}
        run(sr.Causal(), inputs(width=512), **given)
        given |= EXTRAS["distance bias"]()
        run(sr.Causal() & sr.KeyMask(valid), inputs(width=512), **given)


@sizes
@pytest.mark.parametrize("block_size", [16, 32, 48, 64, 96, 128, 160, 192, 256])
def test_block_sizes(capability, block_size):
    with gpu(capability):
        run(WINDOW, inputs(), block_size=block_size)


@sizes
@pytest.mark.parametrize("arranged", LAYOUTS, ids=lambda f: f.__name__)
def test_strides_and_offsets(capability, arranged):
    with gpu(capability):
        run(WINDOW, [arranged(x) for x in inputs()])
        run(LONGNET, [arranged(x) for x in inputs()])


@pytest.mark.parametrize("capability", [pytest.param(89, marks=pytest.mark.slow), 90])
def test_two_grouped_heads_of_a_block_of_64_share_a_program(capability):
    def forward(kv_heads: int) -> tuple[int, int]:
        with counted() as counts:
            sr.attention(*inputs(heads=4, kv_heads=kv_heads, width=128), WINDOW, block_size=64)
        (launch,) = counts.launches
        return launch.programs, launch.warps

    with gpu(capability):
        programs, warps = forward(4)
        assert forward(2) == (programs // 2, 8) == forward(1)
        assert warps == (4 if capability == 90 else 8)


@sizes
def test_heads_and_lengths(capability):
    with gpu(capability):
        run(WINDOW, inputs(heads=4, kv_heads=2))
        run(WINDOW, inputs(heads=8, kv_heads=1, width=128))
        run(WINDOW, inputs(heads=4, kv_heads=1, width=128), block_size=64)
        run(WINDOW, inputs(heads=4, kv_heads=2, width=256), block_size=16)
        run(WINDOW, inputs(width=192, value_width=128))
        run(sr.Causal(), inputs(queries=1))
        run(sr.Causal(), inputs(queries=1, heads=8, kv_heads=1))
        run(sr.Causal(), inputs(queries=1, keys=1))
        run(sr.Full(), inputs(queries=0))
        run(sr.Full(), inputs(keys=0), q_start=0)
        run(sr.Causal(), [x[:0] for x in inputs()])


# ---- Lists of single keys. ---------------------------------------------------------------------


def listed(tables: int = 1, slots: int = 70, queries: int = 300, keys: int = 300) -> sr.Pattern:
    """Lists on the device with repeats, -1 and numbers past the last key; one query lists none."""
    chosen = torch.randint(-1, keys + 1, (1, tables, queries, slots), device="cuda")
    chosen[:, :, 7] = -1
    return sr.SelectedBlocks(chosen, 1)


LISTS: dict[str, Callable[[], sr.Pattern]] = {
    "alone": listed,
    "under a causal mask": lambda: listed() & sr.Causal(),
    "a list of each head": lambda: listed(tables=2) & sr.SlidingWindow(200),
    "more slots than a step": lambda: listed(slots=300),
    "fewer slots than a step": lambda: listed(slots=3),
    "beside a window": lambda: (listed() | sr.SlidingWindow(20)) & sr.Causal(),
    "in a mixture": lambda: (listed() & sr.Causal()) + sr.SlidingWindow(20),
    "two in a mixture": lambda: listed() + (listed(slots=20) & sr.Causal()),
    "valid keys": lambda: listed() & sr.KeyMask(torch.arange(300, device="cuda") < 280),
}

LIST_OPTIONS: dict[str, Callable[[], dict[str, Any]]] = {
    # over lists there is a slot bias instead of a block bias, and no coordinate bias
    **{name: x for name, x in EXTRAS.items() if name not in ("block bias", "coordinate bias")},
    "slot bias": lambda: {"slot_bias": torch.zeros(1, 2, 300, 70, device="cuda")},
}


def run_lists(
    pattern: sr.Pattern,
    args: list[Tensor],
    *,
    most: int | None = None,
    torch_ops: int = 12,
    **options: Any,
) -> None:
    """Calls attention forward and backward; a CUDA graph can capture it, and nothing waits.

    Without `most`, the call launches each kernel of its only list once, and no other; a window
    beside a list and more lists launch at most `most` kernels.
    """
    query, key, value = args
    width = max(query.shape[3], value.shape[3])
    by_item = sums_heads_first(query.shape[1] // key.shape[1], width, query.dtype)
    expected = {"list_forward_kernel", "prepare_kernel", "list_query_kernel"}
    expected |= {"list_item_kernel", "list_sum_kernel"} if by_item else {"list_key_kernel"}
    # a slot bias needs the slot of each key, which torch's operators keep
    expected |= set() if "slot_bias" in options else {"list_rows_kernel"}
    expected |= {"list_distance_kernel"} if "distance_bias" in options else set()
    call = call_of(pattern, args, **options)
    call()
    with counted() as counts:
        call()
    names = Counter(x.kernel for x in counts.launches)
    assert expected <= names.keys() if most else names == Counter(expected), counts
    assert counts.triton <= (most or len(expected)) and counts.torch <= torch_ops, counts
    assert not counts.syncs and not counts.compiles, counts
    with capturing() as capture:
        call()
    assert not capture.surviving(), capture.surviving()


@sizes
@pytest.mark.parametrize("name", LISTS)
def test_lists(capability, name):
    with gpu(capability):
        several = "window" in name or "mixture" in name
        run_lists(LISTS[name](), inputs(), most=12 if several else None, torch_ops=26)


@sizes
@pytest.mark.parametrize("name", LIST_OPTIONS)
def test_options_of_lists(capability, name):
    with gpu(capability):
        args, torch_ops = inputs(heads=2, kv_heads=1), 130 if name == "slot bias" else 30
        run_lists(listed() & sr.Causal(), args, torch_ops=torch_ops, **LIST_OPTIONS[name]())


@sizes
@pytest.mark.parametrize("name", ["alone", "beside a window"])
def test_all_options_of_lists_together(capability, name):
    given = {"alone": ["slot bias"], "beside a window": []}[name]
    most, torch_ops = {"alone": (None, 180), "beside a window": (11, 80)}[name]
    with gpu(capability):
        options = [f for name, f in LIST_OPTIONS.items() if name != "slot bias" or name in given]
        extras = {name: x for f in options for name, x in f().items()}
        valid = sr.KeyMask(torch.arange(300, device="cuda") < 280)
        pattern = LISTS[name]() & valid
        run_lists(pattern, inputs(width=128), most=most, torch_ops=torch_ops, **extras)


@sizes
@pytest.mark.parametrize("dtype", [BF16, FP16, FP32], ids=str)
@pytest.mark.parametrize(
    "widths", [(16, 16), (72, 40), (128, 128), (192, 128), (320, 512), (576, 512)]
)
def test_head_dims_and_dtypes_of_lists(capability, widths, dtype):
    width, value_width = widths
    with gpu(capability):
        args = inputs(heads=8, kv_heads=1, width=width, value_width=value_width, dtype=dtype)
        run_lists(listed(), args)


@sizes
@pytest.mark.parametrize("widths", [(512, 512), (576, 512)])
@pytest.mark.parametrize("heads", [32, 128])
@pytest.mark.parametrize("extras", ["none", "all"])
def test_latents_of_many_heads_fit_every_card(capability, widths, heads, extras):
    width, value_width = widths
    with gpu(capability):
        args = inputs(
            heads=heads, kv_heads=1, queries=16, keys=16, width=width, value_width=value_width
        )
        given = {}
        if extras == "all":
            names = ("softcap", "distance bias", "dropout")
            given = {k: x for name in names for k, x in EXTRAS[name]().items()}
            table = given["distance_bias"]
            given["distance_bias"] = table[:1].expand(heads, -1).contiguous()
        run_lists(listed(queries=16, keys=16), args, torch_ops=40 if given else 12, **given)


@sizes
def test_heads_lengths_and_strides_of_lists(capability):
    with gpu(capability):
        run_lists(listed(), inputs(heads=4, kv_heads=2))
        run_lists(listed(tables=4), inputs(heads=4, kv_heads=2))
        run_lists(listed(), inputs(heads=128, kv_heads=1, queries=16, keys=300))
        run_lists(listed(queries=300), inputs(queries=1))
        for arranged in LAYOUTS:
            run_lists(listed(), [arranged(x) for x in inputs()])


@sizes
@pytest.mark.parametrize("extras", ["a mask", "distances", "all"])
@pytest.mark.parametrize("width", [320, 512])
def test_wide_heads_in_order_fit_every_card(capability, width, extras):
    with gpu(capability), sr.batch_invariant():
        valid = sr.KeyMask(torch.arange(300, device="cuda") < 280)
        given = {} if extras == "a mask" else EXTRAS["distance bias"]()
        if extras == "all":
            given |= {k: x for n in ("softcap", "sink", "dropout") for k, x in EXTRAS[n]().items()}
        pattern = sr.Causal() if extras == "distances" else sr.Causal() & valid
        run(pattern, inputs(width=width), **given)


# ---- The tests of the kernels, where a variable sends them to a GPU. ---------------------------


@pytest.mark.parametrize(
    "arranged",
    [
        pytest.param(f, id=f.__name__, marks=[pytest.mark.slow] * (i > 0))
        for i, f in enumerate(LAYOUTS)
    ],
)
def test_a_test_of_the_kernels_would_run_there_three_times(hopper, arranged, monkeypatch):
    monkeypatch.setattr(device_runs, "DEVICE", hopper)
    args = [arranged(x.cpu()).requires_grad_() for x in inputs()]
    there = [device_runs.placed(x) for x in args]
    for x, own in zip(there, args, strict=True):
        assert (x.device, x.shape, x.stride()) == (hopper, own.shape, own.stride())
        assert torch.equal(x.cpu(), own) and x.storage_offset() == own.storage_offset()

    def call() -> list[Tensor]:
        out = sr.attention(*map(device_runs.placed, args), WINDOW, block_size=64)
        grads = torch.autograd.grad(out.cpu(), args, torch.ones_like(args[0]))
        assert all(x.device.type == "cpu" for x in grads)
        return [out, *grads]

    stages: dict[str, list[int]] = {}

    def note(launch: Launch, of_call: Any, run: Callable[..., None] = Launch.run) -> None:
        if launch.config is not None:
            stages.setdefault(launch.kernel.fn.__name__, []).append(launch.config.stages)
        run(launch, of_call)

    monkeypatch.setattr(Launch, "run", note)
    device_runs.checked(call, lambda found: None, repeated=True)
    assert stages.keys() == {"forward_kernel", "query_kernel", "key_kernel"}
    for first, second, last in stages.values():
        assert first == second > last == 1


# ---- Cards with 99 KB of shared memory take the tiles of an A100 that fit. ---------------------


@pytest.mark.parametrize("capability", [86, 89, 120])
def test_small_cards_take_the_tiles_of_an_a100_wherever_they_fit(capability):
    def configs(width: int) -> list[tuple[int, ...]]:
        like = torch.empty(0, dtype=BF16, device="cuda")
        return [config_for(kernel, like, width, 128)[:4] for kernel in ("forward", "query", "key")]

    with gpu(80):
        large = {width: configs(width) for width in (64, 128, 256, 512)}
    with gpu(capability):
        assert configs(64) == large[64]
        assert configs(128) == [large[128][0], (64, 64, 8, 2), (64, 64, 8, 2)]
        assert configs(256) == [large[256][0], (64, 16, 8, 2), (64, 16, 8, 2)]
        assert configs(512) == 3 * [(16, 32, 8, 2)] != large[512]


def test_wide_heads_in_order_leave_room_for_a_mask_and_distances():
    def configs() -> list[tuple[int, ...]]:
        device = torch.device("cuda", torch.cuda.current_device())
        return [in_order(x, BF16, device, 512)[:4] for x in ("forward", "query", "key")]

    for capability in (90, 100):
        with gpu(capability):
            assert configs() == [(32, 32, 8, 2), (32, 32, 8, 2), (16, 32, 8, 2)]
    for capability in (80, 86):
        with gpu(capability):
            assert configs()[1] == (16, 16, 8, 2)


def test_such_a_tile_is_launched():
    with gpu(89), counted() as counts:
        sr.attention(*inputs(width=128), WINDOW)
    (launch,) = counts.launches
    assert 64 << 10 <= launch.shared <= 99 << 10


def test_the_widest_heads_of_such_a_card_and_of_hopper_are_launched():
    for capability in (89, 90):
        with gpu(capability):
            run(WINDOW, inputs(heads=1, kv_heads=1, width=512))
