"""A tuning file alone makes calls on Hopper launch the kernel of two warp groups."""

from collections.abc import Iterator
from functools import partial

import pytest
import torch
from calls import rows
from gpu_stub import counted, gpu

import sparsering as sr
from sparsering.kernels.triton import configs
from sparsering.kernels.triton import launch as triton_launch
from sparsering.kernels.triton.configs import Config, candidates, default

OWN = Config(128, 128, 8, 2, tma=True, masked=32, ping_pong=True)
CAUSAL = sr.Causal()


@pytest.fixture
def tuned(hopper: torch.device, tmp_path, monkeypatch) -> Iterator[None]:
    """Writes a tuning file for blocks of 128, head dims 64 and 128, as `sparsering tune` does."""
    monkeypatch.setenv("SPARSERING_CACHE", str(tmp_path))
    configs.measured.forget()
    found = {
        configs.config_key("forward", dtype, width, 128, packed): OWN
        for dtype in (torch.bfloat16, torch.float16, torch.float32)
        for width in (64, 128)
        for packed in (0, 128)
    }
    configs.measured.keep(found, {}, rows())
    yield
    configs.measured.forget()


@pytest.fixture
def launched(monkeypatch) -> list[str]:
    """Names of the kernels that calls would launch; nothing is compiled."""
    names: list[str] = []
    monkeypatch.setattr(
        triton_launch.Launch, "run", lambda self, _: names.append(self.kernel.fn.__name__)
    )
    return names


def test_a_tuned_call_launches_it(tuned):
    query = rows()
    with counted() as counts:
        sr.attention(query, query, query, CAUSAL, block_size=128)
    (launch,) = counts.launches
    assert (launch.kernel, launch.warps) == ("ping_pong_kernel", 12)
    other = rows(tokens=700)
    with counted() as counts:
        sr.attention(other, other, other, CAUSAL, block_size=128)
    assert [x.kernel for x in counts.launches] == ["ping_pong_kernel"] and not counts.compiles


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_tuned_calls_of_128_channels_launch_it(tuned, dtype):
    query = rows(width=128, dtype=dtype)
    for pattern in (CAUSAL, sr.Full() + CAUSAL, sr.Full() & sr.SlidingWindow(3000)):
        with counted() as counts:
            sr.attention(query, query, query, pattern, block_size=128)
        assert {x.kernel for x in counts.launches} == {"ping_pong_kernel"}


def test_other_calls_launch_the_plain_kernel(tuned, launched):
    """In turn with plain calls, which share layouts and prepared launches with them."""
    query, single = rows(), rows(dtype=torch.float32)
    misaligned = torch.zeros(2 * 512 * 64 + 1, dtype=torch.bfloat16, device="cuda")[1:]

    def attend(query=query, key=query, value=query, pattern=CAUSAL, **options) -> list[str]:
        launched.clear()
        sr.attention(query, key, value, pattern, **{"block_size": 128, **options})
        return [*launched]

    plain, own = ["forward_kernel"], ["ping_pong_kernel"]
    assert attend() == own
    for options in (
        {"softcap": 20.0},
        {"distance_bias": torch.zeros(2, 9, device="cuda")},
        {"pattern": CAUSAL & sr.KeyMask(torch.ones(1, 512, dtype=torch.bool, device="cuda"))},
        {"dropout_p": 0.1, "dropout_seed": 7},
    ):
        assert attend(**options)[:1] == plain, options
        assert attend() == own
    assert attend(sink=torch.zeros(2, device="cuda")) == own
    assert attend(value=misaligned.view(query.shape)) == plain
    assert attend(query=misaligned.view(query.shape)) == plain
    assert attend(single, single, single) == plain
    assert attend(value=rows(width=128)) == plain
    assert attend(query=rows(tokens=1)) == plain
    assert attend(block_size=64) == plain
    assert attend(query=rows(4)) == own  # two query heads share keys
    with sr.batch_invariant():
        assert attend() == plain
    assert attend(pattern=sr.LongNet((256, 512), (1, 2))) == ["ping_pong_kernel", "forward_kernel"]
    assert attend() == own


def test_what_cannot_run_it_launches_the_plain_kernel(tuned, launched, monkeypatch):
    query = rows()
    for name, value in (
        ("_has_gluon", lambda: False),  # Triton before 3.6
        ("generation", lambda device: 100),
        ("shared_memory", lambda device: 99 << 10),
    ):
        launched.clear(), triton_launch._launches.clear(), sr.layout_cache.clear()
        with monkeypatch.context() as patch:
            patch.setattr(configs, name, value)
            sr.attention(query, query, query, CAUSAL, block_size=128)
        assert launched == ["forward_kernel"], name


def test_tuning_on_hopper_measures_it_if_asked(hopper):
    ask = partial(candidates, ping_pong=True)
    for width in (64, 128):
        like = rows(width=width)
        found = list(ask("forward", like, width, 128))
        assert sum(c.ping_pong for c in found) == 2
        assert not any(c.ping_pong for c in candidates("forward", like, width, 128))
        assert all(configs.takes_ping_pong(c, like, width) for c in found if c.ping_pong)
        assert not default("forward", like.dtype, like.device, width, 128).ping_pong
        assert not any(c.ping_pong for c in ask("query", like, width, 128))
        assert not any(c.ping_pong for c in ask("forward", like, width, 64))
        assert not any(c.ping_pong for c in ask("forward", like.float(), width, 128))
    assert not any(c.ping_pong for c in ask("forward", rows(width=256), 256, 128))
    for capability in (80, 100):
        with gpu(capability):
            like = rows(width=128)
            assert not any(c.ping_pong for c in ask("forward", like, 128, 128))
