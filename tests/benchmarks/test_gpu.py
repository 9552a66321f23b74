"""The benchmark of the GPU, rehearsed without one: how it runs, what it keeps, what it refuses."""

import json
import os
import re
import subprocess
import sys
from functools import partial
from pathlib import Path

import odd_parts
import pytest
import torch

import sparsering as sr
from benchmarks.gpu import bars, calls, correctness, lists, parts, running, table, timing
from benchmarks.measure import environment
from benchmarks.report.page import report_page
from sparsering.kernels import triton
from sparsering.selection import select_blocks

ROOT = Path(__file__).resolve().parents[2]


def row(setting: str, backend: str, ms: float, **more: object) -> dict[str, object]:
    shape = {"dtype": "bfloat16", "tokens": 32768, "heads": 16, "head_dim": 128}
    times = {"ms": ms, "least_ms": ms * 0.9, "most_ms": ms * 1.1}
    rest = {"density": 0.1, "tflops": 1000 / ms, "error": 2e-3, "case": "forward"}
    return {"setting": setting, "backend": backend, **shape, **times, **rest, **more}


def part(rows: list[dict[str, object]], **cases: dict[str, object]) -> dict[str, object]:
    named = {str(x["setting"]): {"run": 0, "sources": "0", "seconds": 1.0} for x in rows}
    return {"about": "as it was asked", "cases": {**named, **cases}, "rows": rows}


def record() -> dict[str, object]:
    """One as a GPU would leave it, with a part of each kind."""
    main = bars.MAIN
    made = {
        "main shapes are right": part([{"setting": "D 128", "backend": "triton", "error": 1e-3}]),
        "ceilings": part([row("both", "matmul", 1.4, tflops=800.0, case=None)]),
        "main shapes": part([
            row(main, "ours", 2.0), row(main, "flex", 2.6), row(main, "dense flash", 15.0),
            row(main, "dense cudnn", 13.0), {"setting": main, "backend": "fa4", "failed": "gone"},
            row(main, "ours", 7.0, case="forward+backward", tflops=300.0),
        ]),
        "founding table": part([row("forward", "ours", 0.15, tokens=4096, heads=8)]),
        "layouts": part([{"setting": "all", "pattern": "a window", "ms": 6.0, "least_ms": 5.0,
                          "most_ms": 7.0, "tokens": 1 << 20}]),
        "overhead": part([row("forward", "ours", 0.07, us=70.0, tokens=128)]),
        "memory": part([{"setting": "all", "pattern": "longnet", "case": "forward",
                         "tokens": 1 << 20, "extra_bytes": 5e8,
                         "share_of_inputs_and_outputs": 0.01}]),
        "grid, 32K tokens": part(
            [row(main, "ours", 3.0, drawn=0.2), {"setting": main, "left_out": "seconds a call"}],
            second={"run": 0, "sources": "0", "failed": "RuntimeError: <no> memory"},
        ),
    }  # fmt: skip
    place = {**environment(), "gpu": "NVIDIA H100", "commit": "0123456789abc", "sources": "0"}
    whole = {"name": "gpu", "environment": place, "runs": [place], "parts": made}
    return {**whole, "bars": bars.bars(whole)}


def test_bars_say_what_is_met_and_what_was_not_measured():
    found = {bar["bar"]: bar for bar in record()["bars"]}
    assert found["forward, main shape"]["found"] == 500.0
    assert found["forward, main shape"]["floor_met"] and not found["forward, main shape"]["aim_met"]
    assert found["forward and backward, main shape"]["floor_met"] is False
    assert found["forward, times FlexAttention's speed"]["found"] == pytest.approx(1.3)
    assert found["forward, times the fastest dense, 90% sparse"]["found"] == pytest.approx(6.5)
    assert found["4096 tokens, 90% sparse, forward"]["floor_met"]
    overhead = found["overhead of a call on the host"]
    assert overhead["at_most"] and overhead["floor_met"] is False
    unknown = found["forward and backward, times FlexAttention's speed"]
    assert unknown["found"] is None and unknown["floor_met"] is None
    assert found["cases of correctness that fail"]["found"] == 0


def test_the_record_becomes_tables_of_markdown():
    lines = list(table.markdown(record()))
    assert lines[0].startswith("NVIDIA H100, torch ") and "commit 0123456789," in lines[0]
    text = "\n".join(lines)
    assert "| forward, main shape | 400 TFLOP/s | 600 TFLOP/s | 500 TFLOP/s | floor |" in text
    assert "| overhead of a call on the host | at most 60 us |  | 70 us | no |" in text
    unknown = "forward and backward, times FlexAttention's speed"
    assert f"| {unknown} | 1 x | 1.3 x | not measured |  |" in text
    ours = next(line for line in lines if line.startswith("| forward, D 128, blocks of 128"))
    assert "2.00 ms (1.80-2.20), 500 TFLOP/s, 2e-03 | 62% | 2.60 ms" in ours and "1.30 x" in ours
    assert "- grid, 32K tokens, second: failed, RuntimeError: <no> memory" in lines
    for block in text.split("\n\n"):  # every row of a table has its columns
        rows = [line for line in block.splitlines() if line.startswith("|")]
        assert len({line.count("|") for line in rows}) <= 1, block


def test_the_report_shows_every_part_of_the_record():
    made = record()
    page = report_page({}, made)
    for name in made["parts"]:
        assert name in page
    assert "NVIDIA H100, commit 0123456789" in page and "as it was asked" in page
    assert "floor met" in page and "missed" in page and "500 TFLOP/s" in page
    assert "seconds a call" in page and "RuntimeError: &lt;no&gt; memory" in page
    assert "grid, 32K tokens: 1 of 2 missing" in page and "500 MB" in page
    assert "rehearsal" not in page
    made["environment"]["gpu"] = None
    assert "A rehearsal without a GPU: its figures mean nothing" in report_page({}, made)


def place(**more: object) -> dict[str, object]:
    return {"gpu": "NVIDIA H100", "commit": None, "uncommitted_changes": None, **more}


@pytest.fixture
def odd(monkeypatch, tmp_path) -> Path:
    """Parts that fail, die and hang; returns the file that mends them."""
    monkeypatch.setattr(parts, "PARTS", odd_parts.PARTS)
    monkeypatch.setattr(running, "work", odd_parts.work)
    monkeypatch.setattr(running, "LONGEST_CASE", 12.0)
    monkeypatch.setenv(odd_parts.MENDED, str(tmp_path / "mended"))
    return tmp_path / "mended"


def test_what_is_on_record_is_kept_of_the_same_sources_and_gpu_alone(odd, tmp_path):
    first = running.Session(tmp_path, None, "abcdef0", keep=False)
    assert first.starts_on(place()) == "a new record"
    first.adds("alone", "fine", {"ms": 1.0}, seconds=1.0)
    first.adds("bounded", "first", {"ms": 1.0}, seconds=1.0)
    first.record["parts"]["bounded"]["cases"]["first"]["sources"] = "of another day"
    first.write()
    given = running.read(tmp_path / "gpu.json")
    assert given["runs"][0]["commit"] == "abcdef0"  # told, as there is no history

    def kept(keep: bool, **here: object) -> list[str]:
        session = running.Session(tmp_path / "next", json.loads(json.dumps(given)), "", keep=keep)
        session.starts_on(place(**here))
        assert len(session.record["runs"]) == (2 if session.record["parts"] else 1)
        return list(session.record["parts"])

    assert kept(False) == ["alone"]
    assert kept(True) == ["alone", "bounded"]
    assert kept(False, gpu="NVIDIA H200") == []
    assert running.read(tmp_path / "none.json") is None
    (tmp_path / "cut.json").write_text('{"name": "gpu", "ru')
    assert running.read(tmp_path / "cut.json") is None


def test_rates_over_lists_count_a_repeated_key_once_and_empty_slots_never():
    assert lists.distinct(torch.tensor([[[[5, 2, 5, -1], [-1, -1, 0, 0]]]])) == 3
    chosen = lists.drawn(1, 30, 16)
    pattern = sr.SelectedBlocks(chosen, 1) & sr.Causal()
    assert lists.distinct(chosen) == pattern.to_dense(30, 30).sum()


def test_what_guards_gradients_knows_right_from_wrong():
    args = [torch.randn(1, 2, 128, 16) for _ in range(3)]
    pattern, grad = sr.RandomBlocks(0.3, 32), torch.randn(1, 2, 128, 16)
    exact = timing.exact_gradients(args, pattern, 32, grad)
    leaves = [x.double().requires_grad_() for x in args]
    out = sr.attention(*leaves, pattern, backend="reference")
    grads = torch.autograd.grad(out, leaves, grad.double())
    for ours, true in zip(exact, (out, *grads), strict=True):
        assert timing.relative(ours, true[:, :1]) < 1e-12
    assert timing.error_of_gradients(out, grads, args, grad) < 1e-12
    assert timing.error_of_rows(out.detach(), args, pattern) < 1e-12
    for number in range(3):
        wrong = [x * 1.2 if i == number else x for i, x in enumerate(grads)]
        with pytest.raises(RuntimeError, match="sums over gradients is wrong"):
            timing.error_of_gradients(out, wrong, args, grad)
    with pytest.raises(RuntimeError, match="zeros"):
        timing.error_of_rows(torch.zeros_like(out), args, pattern)
    with pytest.raises(RuntimeError, match="is wrong"):
        timing.error_of_rows(out.detach().roll(1, 2), args, pattern)
    with pytest.raises(RuntimeError, match="nan"):
        timing.largest([0.0, float("nan")], 1.0, "it")


@pytest.mark.parametrize(
    "case",
    [correctness.smoke, correctness.biased_selection, partial(calls.extras, "float32", "sink")],
    ids=["smoke", "biased selection", "extras"],
)
def test_a_case_with_other_bits_in_its_second_run_fails(case, monkeypatch):
    runs, forward = [], triton.call._forward_pass

    def planted(part, number, out, lse) -> None:
        forward(part, number, out, lse)
        runs.append(out)
        if not repeatable and len(runs) == 2:
            lse += 1e-3

    monkeypatch.setattr(triton.call, "_forward_pass", planted)
    monkeypatch.setattr(correctness, "REPEATED", True)
    repeatable = True
    assert next(case())["error"] < 1e-5 and len(runs) >= 3
    repeatable = runs.clear()
    with pytest.raises(AssertionError, match="result 1 has other bits"):
        next(case())


@pytest.mark.slow
def test_a_case_that_fails_dies_or_hangs_costs_itself_alone(odd, tmp_path):
    def run() -> tuple[dict[str, object], str]:
        session = running.Session(tmp_path, running.read(tmp_path / "gpu.json"), "", keep=False)
        lines = list(running.run(session, {}, budget=400, processes=2))
        return json.loads((tmp_path / "gpu.json").read_text()), "\n".join(lines)

    made, said = run()
    states = {name: made["parts"][name]["cases"] for name in odd_parts.PARTS}
    for name in ("fine", "last"):
        assert set(states["alone"][name]) == {"run", "sources", "seconds"}
    assert "is wrong: errors ['0.5'] (odd_parts.py:" in states["alone"]["fails"]["failed"]
    for name in ("alone", "together"):
        assert "its process died (exit code -9)" in states[name]["dies"]["failed"]
    assert states["alone"]["hangs"]["failed"] == "no end in 12 s"
    assert "failed" not in {**states["together"]["one"], **states["together"]["two"]}
    rows = [x["backend"] for x in made["parts"]["alone"]["rows"]]
    assert rows == ["fine", "fine", "fails", "dies", "breaks", "hangs", "last", "last"]
    assert said.count("another one goes on") == 1
    assert "illegal memory access" in states["alone"]["breaks"]["failed"]
    assert "left" in states["bounded"]["second"] and "left, the -1 s of this part" in said

    odd.touch()
    made, said = run()
    for name, part in odd_parts.PARTS.items():
        for case in part.cases:
            state = made["parts"][name]["cases"][case]
            if name != "bounded":
                assert "failed" not in state and "left" not in state
                assert state["run"] == (1 if case in ("fails", "dies", "breaks", "hangs") else 0)
                of_case = [x for x in made["parts"][name]["rows"] if x["setting"] == case]
                assert [x["ms"] for x in of_case] == [1.0, 2.0]  # not those of before beside them


@pytest.mark.slow
def test_nothing_runs_after_a_smoke_that_fails(odd, tmp_path, monkeypatch):
    def run() -> list[str]:
        session = running.Session(tmp_path, running.read(tmp_path / "gpu.json"), "", keep=False)
        lines = list(running.run(session, {"together": ("one",)}, budget=400, processes=2))
        assert "gpu.json" in os.listdir(tmp_path)
        return lines

    odd.touch()
    monkeypatch.setenv(odd_parts.SMOKES, "1")
    assert run()[-1] == "the smoke did not pass: nothing else runs"
    states = running.read(tmp_path / "gpu.json")["parts"]
    assert list(states) == [parts.SMOKE]
    assert "is wrong: errors ['0.5']" in states[parts.SMOKE]["cases"]["smokes"]["failed"]
    monkeypatch.delenv(odd_parts.SMOKES)
    assert "smoke" in run()[1]
    states = running.read(tmp_path / "gpu.json")["parts"]
    assert list(states) == [parts.SMOKE, "together"]
    assert list(states["together"]["cases"]) == ["one"]  # the case that was chosen, alone


def benchmark(*more: object, **options: object) -> subprocess.Popen:
    """`python -m benchmarks.gpu`, rehearsed."""
    command = [sys.executable, "-W", "ignore", "-m", "benchmarks.gpu", *map(str, more)]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(ROOT)}
    told = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, **options}
    return subprocess.Popen(command, cwd=ROOT, env=environment, **told)


@pytest.mark.slow
def test_a_folder_that_cannot_be_written_is_told_before_anything_is_measured(tmp_path):
    (tmp_path / "file").write_text("")
    run = benchmark("--out", tmp_path / "file" / "out")
    _, error = run.communicate(timeout=120)
    assert run.returncode == 2 and "name another --out" in error and "Traceback" not in error


@pytest.mark.slow
def test_it_runs_through_and_goes_on_where_it_was_killed(tmp_path):
    few = ["--only", "ceilings", "founding table", "layouts", "other calls are right"]
    run = benchmark("--out", tmp_path, "--resume", tmp_path, *few)
    for line in run.stdout:
        if "layouts |" in line:
            break
    run.kill()
    run.communicate()
    before = json.loads((tmp_path / "gpu.json").read_text())
    assert {"ceilings", "founding table", "layouts"} <= set(before["parts"])

    run = benchmark("--out", tmp_path, "--resume", tmp_path)
    out, error = run.communicate(timeout=900)
    assert run.returncode == 0, out + error
    assert not re.search(r"^ *\d+ s +(ceilings|founding table|layouts) \|", out, re.MULTILINE)
    made = json.loads((tmp_path / "gpu.json").read_text())
    assert list(made["parts"]) == list(parts.PARTS) and len(made["runs"]) == 2
    for name, part in parts.PARTS.items():
        assert set(made["parts"][name]["cases"]) == set(part.cases)
        assert {x["setting"] for x in made["parts"][name]["rows"]} == set(part.cases), name
        for x in made["parts"][name]["rows"]:
            bound = 2e-2 if x.get("dtype") in ("bfloat16", "float16") else 1e-3
            assert x.get("error") is None or 0 <= x["error"] < bound, x
    assert (tmp_path / "gpu.png").stat().st_size > 5000
    page = report_page({}, made)
    assert all(name in page for name in parts.PARTS)
    assert "A rehearsal without a GPU" in next(iter(table.markdown(made)))

    run = benchmark("--out", tmp_path, "--budget", "0")
    out, _ = run.communicate(timeout=120)
    assert run.returncode == 0 and "0 cases are missing" in out
    run = benchmark("--out", tmp_path / "new", "--resume", tmp_path, "--budget", "0")
    out, _ = run.communicate(timeout=120)
    assert run.returncode == 0 and (tmp_path / "new" / "gpu.json").exists()
    run = benchmark("--out", tmp_path / "none", "--resume", tmp_path / "no", "--budget", "0")
    out, _ = run.communicate(timeout=120)
    assert run.returncode == 1 and re.search(r"smoke \| .*: left, \d+ s of 0 were spent", out)


@pytest.mark.slow
def test_one_command_begins_the_best_fifteen_minutes(tmp_path):
    settings = {"PYTHON": sys.executable, "BUDGET": "0", "TRITON_INTERPRET": "1"}
    command = ["sh", str(ROOT / "benchmarks" / "gpu" / "first.sh"), str(tmp_path)]
    done = subprocess.run(
        command,
        env=os.environ | settings,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1, done.stderr
    assert f"torch {torch.__version__}" in done.stdout and "GPU: none" in done.stdout
    assert "absent: flashinfer; left out: FlashInfer" in done.stdout
    assert "smoke did not pass" in done.stdout
    missing = sum(len(cases or parts.PARTS[name].cases) for name, cases in parts.QUARTER.items())
    assert f"{missing} cases are missing" in done.stdout
    assert (tmp_path / "gpu.json").exists()


def in_tf32(x: torch.Tensor) -> torch.Tensor:
    """Rounds float32 to the 10 bits of mantissa that tf32 has."""
    bits = x.view(torch.int32)
    return ((bits + 0x1000) & ~0x1FFF).view(torch.float32)


def truncated(x: torch.Tensor) -> torch.Tensor:
    """Converts float64 to float32 toward zero, as tensor cores do after each addition."""
    near = x.float()
    return torch.where(near.double().abs() > x.abs(), near.nextafter(torch.zeros_like(near)), near)


def on_tensor_cores(x: torch.Tensor, y: torch.Tensor, products: int) -> torch.Tensor:
    """Multiplies float32 matrices in one or three products of tf32; sums are truncated."""
    (a, b), total = (in_tf32(x), in_tf32(y)), torch.zeros(len(x), y.shape[1])
    pairs = [(a, b), (in_tf32(x - a), b), (a, in_tf32(y - b))][:products]
    for begin in range(0, x.shape[1], 8):
        part = slice(begin, begin + 8)
        for left, right in reversed(pairs):
            exact = total.double() + left[:, part].double() @ right[part].double()
            total = truncated(exact)
    return total


@pytest.mark.parametrize("terms", [16, 128, 450, 4096])
@pytest.mark.parametrize("signs", ["one", "both"])
def test_the_grant_of_float32_admits_three_products_of_tf32_and_not_one(terms, signs):
    """Sums of one sign drift most; up to 450 terms, as the cases have, one product is refused."""
    generator = torch.Generator().manual_seed(terms)
    draw = torch.rand if signs == "one" else torch.randn
    x, y = draw(64, terms, generator=generator), draw(terms, 64, generator=generator)
    exact = x.double() @ y.double()

    def error(got: torch.Tensor) -> float:
        return correctness.oracle().errors(got, exact)[0] / exact.abs().max().item()

    allowed = 2 * (error(x @ y) + correctness.grant(torch.float32, terms, tensor_cores=True))
    assert error(on_tensor_cores(x, y, 3)) <= allowed
    if signs == "both" and terms <= 450:
        assert error(on_tensor_cores(x, y, 1)) > allowed


def test_without_tensor_cores_the_grant_is_that_of_powers_of_two():
    for terms in (16, 1 << 20):
        assert correctness.grant(torch.float32, terms, tensor_cores=False) == 2e-6
        assert correctness.grant(torch.bfloat16, terms, tensor_cores=True) == 8e-5
    assert correctness.grant(torch.float32, 32768, tensor_cores=True) < 1e-3


def test_another_choice_of_blocks_fails(monkeypatch):
    assert [row["error"] for row in correctness.choice()] == [0, 0]
    calls_made = []

    def planted(scores: torch.Tensor, *rest: object, **options: object) -> torch.Tensor:
        calls_made.append(0)
        found = select_blocks(scores, *rest, **options)
        return found.flip(-1) if len(calls_made) % 8 == 0 else found

    monkeypatch.setattr(correctness, "select_blocks", planted)
    with pytest.raises(RuntimeError, match="the choice of blocks is wrong"):
        list(correctness.choice())
