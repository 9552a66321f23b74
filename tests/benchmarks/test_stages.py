"""The first half hour of a GPU: its calls, and the times of stages and tiles."""

import json
from itertools import chain

import pytest
import torch
from oracles.attention_oracle import PATTERNS

from benchmarks.gpu import correctness, parts, stages, table, timing
from sparsering.kernels.triton import call, configs


def test_the_first_half_hour_is_25_minutes():
    assert list(chain(*parts.CALLS.values())) == list(parts.PARTS)
    seconds = {
        name: sum(parts.PARTS[part].seconds for part in own) for name, own in parts.CALLS.items()
    }
    assert list(seconds) == ["first", "stages", "peers", "rest", "later"]
    assert seconds["first"] <= 4 * 60
    assert all(total <= 490 for total in seconds.values())  # a call's budget is 500 s
    assert sum(seconds.values()) - seconds["later"] <= 25 * 60


def test_the_best_fifteen_minutes_show_the_main_figure_by_minute_four():
    shapes = {"new masks": 2}  # of a GPU; the rehearsal has one
    seconds = {
        name: parts.PARTS[name].seconds / (shapes.get(name, 4) if cases else 1)
        for name, cases in parts.QUARTER.items()
    }
    names = list(parts.QUARTER)
    main = names.index("main shapes")
    assert names[:main] == [parts.SMOKE, "ten results are right"]
    assert sum(seconds[name] for name in names[: main + 1]) <= 4 * 60
    assert sum(seconds.values()) <= 12.5 * 60  # the rest is starts of processes
    for name, cases in parts.QUARTER.items():
        assert set(cases) <= set(parts.PARTS[name].cases)
    assert len(set(correctness.TEN)) == 10 and set(correctness.TEN) <= set(PATTERNS)
    assert next(iter(parts.calls_by_name())) == "quarter"


def test_a_digest_is_of_every_bit_and_its_place():
    x, y = torch.randn(2, 3, 8), torch.randn(4, 4)
    first = stages.digest([x, y])
    assert len(first) == 16 and stages.digest([x.clone(), y.clone()]) == first
    others = [[y, x], [x], [x, y.flip(0)], [x.flip(2), y], [x, torch.where(y == y[0, 0], 0, y)]]
    for other in others:
        assert stages.digest(other) != first
    changed = x.clone()
    changed.view(torch.int32)[1, 2, 7] ^= 1
    assert stages.digest([changed, y]) != first


def test_configs_are_2_3_and_4_stages_of_each_streamed_tile():
    like = torch.empty(1, 2, 256, 128)
    for kernel in configs.KERNELS:
        tried = stages.tried(kernel, like, 128, 128)
        default = configs.default(kernel, like.dtype, like.device, 128, 128)
        assert tried[0] == default and len(set(tried)) == len(tried)
        streamed = {c.streamed for c in configs.candidates(kernel, like, 128, 128)}
        for tile in streamed & {c.streamed for c in tried}:
            assert {c.stages for c in tried if c.streamed == tile} >= {2, 3, 4}
        assert default.streamed in streamed and len({c.streamed for c in tried}) > 1


@pytest.fixture
def quick(monkeypatch) -> None:
    monkeypatch.setattr(stages, "TOKENS", 64)
    monkeypatch.setattr(stages, "HEADS", 1)
    monkeypatch.setattr(timing, "sized", lambda on_gpu, rehearsed: 1)


@pytest.mark.usefixtures("quick")
def test_each_config_has_a_time_an_error_and_its_bits():
    rows = list(stages.measured(16, 16))
    assert {(row["kernel"], row["pattern"]) for row in rows} == {
        (kernel, name) for kernel in configs.KERNELS for name in ("random blocks", "dense")
    }
    for row in rows:
        assert row["ms"] > 0 and row["error"] < 1e-6 and row["as_default"] and row["bits_after"]
    assert sum(row["default"] for row in rows) == 6
    made = {"name": "gpu", "parts": {"stages and tiles": {"cases": {}, "rows": rows}}}
    assert any("stages of" in line for line in table._others(made))
    json.dumps(rows)


@pytest.mark.usefixtures("quick")
def test_what_is_wrong_or_does_not_compile_is_named_and_not_timed(monkeypatch):
    usual, timed = call.forward, []
    monkeypatch.setattr(stages, "taken", lambda calls, rounds: timed.append(calls) or {})
    monkeypatch.setattr(stages, "patterns", lambda block: {"dense": stages.sr.Full()})

    def planted(problem):
        key = configs.config_key("forward", problem.query.dtype, 16, 16)
        stage = configs.measured.choices(problem.query.device)["configs"].get(key)
        if stage is not None and stage[3] == 3:
            raise RuntimeError("out of resource: shared memory\nmore")
        out, lse = usual(problem)
        return out * 1.5, lse

    monkeypatch.setattr(call, "forward", planted)
    monkeypatch.setattr(stages, "KERNELS", ("forward",))
    first, second = stages.measured(16, 16)
    assert first["left_out"] == "its error is 0.5" and not timed
    assert second["cannot"] == "RuntimeError: out of resource: shared memory"


@pytest.mark.usefixtures("quick")
def test_one_result_that_is_no_number_is_not_timed(monkeypatch):
    usual = call.backward

    def planted(*args):
        dq, dk, dv, *rest = usual(*args)
        return dq, dk, dv * torch.nan, *rest

    monkeypatch.setattr(call, "backward", planted)
    monkeypatch.setattr(stages, "KERNELS", ("query", "key"))
    monkeypatch.setattr(stages, "patterns", lambda block: {"dense": stages.sr.Full()})
    query, _, key, _ = stages.measured(16, 16)
    assert query["ms"] > 0 and query["as_default"]
    assert key["left_out"] == "its error is nan" and "ms" not in key


@pytest.mark.usefixtures("quick")
def test_a_broken_gpu_ends_the_case(monkeypatch):
    def planted(problem):
        if stages.configs.measured.choices(problem.query.device)["configs"]:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        return usual(problem)

    usual = call.forward
    monkeypatch.setattr(call, "forward", planted)
    monkeypatch.setattr(stages, "is_alive", lambda: False)
    with pytest.raises(RuntimeError, match="illegal memory access"):
        list(stages.measured(16, 16))


@pytest.mark.usefixtures("quick")
def test_configs_beyond_the_budget_are_named(monkeypatch):
    monkeypatch.setattr(stages, "SECONDS", -1.0)
    rows = list(stages.measured(16, 16))
    assert all(row["left_out"] == "the -1 s of this case were spent" for row in rows)
