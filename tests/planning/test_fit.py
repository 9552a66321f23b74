"""The largest batch and the longest sequence: what is named fits, one more does not."""

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import sparsering as sr
from sparsering.planning.fit import about_largest, largest_that_fits, memory_here, memory_of, usable
from sparsering.planning.machines import MACHINES
from sparsering.planning.sizes import show_bytes

WINDOW = sr.SlidingWindow(256) & sr.Causal()


@settings(max_examples=60)
@given(
    base=st.integers(0, 10**6),
    slope=st.sampled_from([1, 10, 1000, 10**5]),
    bend=st.sampled_from([0, 0.1, 3.0]),
    stairs=st.sampled_from([1, 7, 1000]),
    limit=st.integers(1, 10**10),
    start=st.sampled_from([1, 32]),
)
def test_the_search_ends_at_the_edge(base, slope, bend, stairs, limit, start):
    asked = []

    def peak(n):
        asked.append(n)
        return base + slope * (n // stairs * stairs) + bend * n**1.5

    found = largest_that_fits(peak, limit, start)
    assert found == 0 or peak(found) <= limit
    assert peak(found + 1) > limit
    if stairs == 1:
        assert len(asked) < 25


@pytest.mark.parametrize("slope", [1, 1000])
@pytest.mark.parametrize("bend", [0, 1e-3, 1.0])
@pytest.mark.parametrize("base", [0, 10**6])
@pytest.mark.parametrize("limit", [10**7, 10**10])
def test_about_the_largest_takes_few_peaks(base, slope, bend, limit):
    asked = []

    def peak(n):
        asked.append(n)
        return base + slope * n + bend * n**2

    exact = largest_that_fits(peak, limit, 32)
    asked.clear()
    assert about_largest(peak, limit, 32, 1 << 40) == pytest.approx(exact, rel=0.03, abs=1)
    assert sum(n > exact / 2 for n in asked) <= 3 and len(asked) <= 8
    asked.clear()
    assert about_largest(peak, limit, 32, 1000) == pytest.approx(exact, rel=0.03, abs=1)
    assert max(asked) <= 1000


def test_about_the_largest_is_below_one_where_nothing_fits():
    assert about_largest(lambda n: 10**6 + n, 1000, 32, 1 << 22) < 1


def peak(**options):
    return sr.estimate(WINDOW, **options).peak_bytes.value


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"num_heads": 4, "num_kv_heads": 1, "head_dim": 128, "dtype": torch.bfloat16},
        {"machine": "L4", "block_size": 64},
        {"machine": "H200", "ranks": 4, "sharding": "zigzag"},
    ],
)
def test_a_batch_and_a_length_fit_and_more_do_not(options, backward):
    options = {**options, "backward": backward}
    memory, room = 300_000_000, usable(300_000_000)
    assert room == 276_000_000
    batch = sr.choose_batch_size(WINDOW, tokens="2K", memory=memory, **options)
    assert peak(tokens=2048, batch_size=batch, **options) <= room
    assert peak(tokens=2048, batch_size=batch + 1, **options) > room
    length = sr.longest_sequence(WINDOW, memory="300MB", batch_size=2, **options)
    assert length % 128 == 0
    assert peak(tokens=length, batch_size=2, **options) <= room
    assert peak(tokens=length + 128, batch_size=2, **options) > room


def test_a_length_is_a_multiple_of_what_is_asked():
    length = sr.longest_sequence(WINDOW, memory="20MB", multiple_of=1)
    assert peak(tokens=length) <= usable(20_000_000) < peak(tokens=length + 1)
    assert sr.longest_sequence(WINDOW, memory="20MB", multiple_of=1000) == length // 1000 * 1000


def test_where_nothing_fits_the_error_says_what_would():
    with pytest.raises(ValueError, match="must hold one sequence of 1,048,576 tokens") as said:
        sr.choose_batch_size(WINDOW, tokens=1 << 20, memory="1GB")
    assert f"needs {show_bytes(peak(tokens=1 << 20))}" in str(said.value) and "got 1 GB" in str(
        said.value
    )
    assert "longest_sequence" in str(said.value)
    with pytest.raises(ValueError, match=r"memory must hold 128 tokens, which need .* got 1 kB"):
        sr.longest_sequence(WINDOW, memory=1000)
    with pytest.raises(ValueError, match="multiple_of must be at least 1, got 0"):
        sr.longest_sequence(WINDOW, memory="1GB", multiple_of=0)
    with pytest.raises(TypeError, match=r"multiple_of must be an int.*got 1\.5"):
        sr.longest_sequence(WINDOW, memory="1GB", multiple_of=1.5)


def test_memory_is_what_is_given_or_what_the_machine_has():
    assert memory_of("H200", None) == 141 * 10**9
    assert memory_of(MACHINES["L4"], "1GB") == 10**9
    assert memory_of(None, "total") == memory_here(free=False)
    assert memory_of("H200", "total") == 141 * 10**9
    total = next(
        int(line.split()[1]) * 1024
        for line in Path("/proc/meminfo").read_text().splitlines()
        if line.startswith("MemTotal")
    )
    assert 10**8 < memory_here(free=True) < memory_here(free=False) <= total
    with pytest.raises(ValueError, match=r"memory must be given for EPYC 9654.*'256GB'"):
        sr.choose_batch_size(WINDOW, tokens=1024, machine="Genoa")


@pytest.mark.parametrize("version", [1, 2])
def test_a_container_has_its_limit_less_what_it_uses(tmp_path, version):
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/meminfo").write_text("MemTotal: 4000 kB\nMemAvailable: 3000 kB\n")
    assert memory_here(free=True, system=tmp_path) == 3000 << 10
    group = tmp_path / ("sys/fs/cgroup" if version == 2 else "sys/fs/cgroup/memory")
    group.mkdir(parents=True)
    limit, used, files = (
        ("memory.max", "memory.current", "inactive_file"),
        ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    )[version == 1]
    (group / limit).write_text("2048000\n")
    (group / used).write_text("1024000\n")
    (group / "memory.stat").write_text(f"anon 5\n{files} 24000\n")
    assert memory_here(free=False, system=tmp_path) == 2048000
    assert memory_here(free=True, system=tmp_path) == 2048000 - 1024000 + 24000
    (group / used).write_text("9999999\n")
    assert memory_here(free=True, system=tmp_path) == 0
    (group / limit).write_text("max\n")
    assert memory_here(free=True, system=tmp_path) == 3000 << 10


def test_a_gpu_has_what_torch_does_not_use(monkeypatch):
    for name, value in {
        "is_available": True,
        "mem_get_info": (30, 100),
        "memory_reserved": 20,
        "memory_allocated": 5,
    }.items():
        monkeypatch.setattr(torch.cuda, name, lambda value=value: value)
    assert memory_of(None, None, "triton") == 45
    assert memory_of(None, "total", "triton") == 100
    assert memory_of(None, None, "cpu") > 100


def test_a_call_may_use_a_share_of_the_memory():
    options = {"tokens": 2048, "memory": "300MB"}
    batch = sr.choose_batch_size(WINDOW, **options, share=0.8)
    assert peak(tokens=2048, batch_size=batch) <= 240_000_000
    assert peak(tokens=2048, batch_size=batch + 1) > 240_000_000
    assert sr.longest_sequence(WINDOW, memory="20MB", share=0.5) < sr.longest_sequence(
        WINDOW, memory="20MB"
    )
    for share in (0, -1, 1.1, "half"):
        with pytest.raises(ValueError, match="share must be"):
            sr.choose_batch_size(WINDOW, **options, share=share)


def test_limits_of_the_own_control_group_and_its_parents_count(tmp_path):
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/meminfo").write_text("\nMemTotal: 4000 kB\nMemAvailable: 3000 kB\nodd\n")
    (tmp_path / "proc/self/cgroup").write_text("3:cpu:/x\n0::/user.slice/job\n")
    job = tmp_path / "sys/fs/cgroup/user.slice/job"
    job.mkdir(parents=True)
    assert memory_here(free=True, system=tmp_path) == 3000 << 10
    (job.parent / "memory.max").write_text("2000000\n")
    assert memory_here(free=True, system=tmp_path) == 2000000  # without what is in use: the limit
    (job / "memory.max").write_text("1000000\n")
    (job / "memory.current").write_text("400000\n")
    (job / "memory.stat").write_text("anon\n\n")
    assert memory_here(free=True, system=tmp_path) == 600000
    assert memory_here(free=False, system=tmp_path) == 1000000
