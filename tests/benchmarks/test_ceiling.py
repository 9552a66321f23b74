"""Rates of products and calls: `python -m benchmarks ceiling`."""

import json

import pytest
import torch

from benchmarks import measure
from benchmarks.__main__ import main
from benchmarks.comparisons import ceiling


def test_kernel_product_runs_once_in_each_thread():
    call = ceiling.kernel_product((16, 8, 16), torch.float32, times=2)
    assert call is not None
    assert len(call()) == torch.get_num_threads()


def test_each_tier_runs_in_a_limited_process(tmp_path, monkeypatch):
    seen = []

    def run(command, env, check):
        folder, tier = command[command.index("--out") + 1], command[command.index("--tier") + 1]
        seen.append((tier, env["SPARSERING_CPU"], env.get("ONEDNN_MAX_CPU_ISA")))
        record = {"rows": [{"tier": tier, "gflops": 1.0}]}
        with open(f"{folder}/ceiling.json", "w") as file:
            json.dump(record, file)

    monkeypatch.setattr(measure, "environment", dict)
    monkeypatch.setattr(ceiling, "tiers", lambda: ["avx2", "avx512"])
    monkeypatch.setattr(ceiling.subprocess, "run", run)
    assert main(["ceiling", "--out", str(tmp_path)]) == 0
    assert seen == [("avx2", "avx2", "AVX2"), ("avx512", "avx512", None)]
    rows = json.loads((tmp_path / "ceiling.json").read_bytes())["rows"]
    assert [row["tier"] for row in rows] == ["avx2", "avx512"]


def test_calls_are_shares_of_the_ceiling_and_of_full():
    rows = ceiling.call_rows(64, torch.float32, 50.0, backward=False, quick=True)
    assert rows[0]["of_full"] == 1
    for row in rows:
        assert row["of_ceiling"] == pytest.approx(row["gflops"] / 50)
        assert row["error"] < 1e-5
