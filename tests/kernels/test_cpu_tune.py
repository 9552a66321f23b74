"""`sparsering tune` on a CPU: what is measured is kept, and calls that name no size run it."""

import json
import os
import sys

import pytest
import torch

import sparsering as sr
from sparsering.cli import main
from sparsering.kernels import tune
from sparsering.kernels.cpu import call
from sparsering.kernels.cpu.call import measured


@pytest.fixture
def own_cache(tmp_path, monkeypatch):
    call.reasons()  # the kernel is compiled where it always is
    monkeypatch.setenv("SPARSERING_CACHE", str(tmp_path))
    measured.forget()
    yield tmp_path
    measured.forget()


def test_the_fastest_that_is_right_is_kept_and_used(own_cache, monkeypatch):
    pattern, seconds = sr.SlidingWindow(9), {16: 3.0, 48: 1.0, 80: 2.0}
    monkeypatch.setattr(
        tune._Turns, "milliseconds", lambda self, title, runs: {x: seconds[x] for x in runs}
    )
    forward, said = call.forward, []

    def sabotaged(problem):
        out, lse = forward(problem)
        return (out * 1.01 if problem.layout.block_size == 48 else out), lse

    monkeypatch.setattr(call, "forward", sabotaged)
    path = tune.tune(
        "cpu", pattern, tokens=100, num_heads=2, num_kv_heads=1, head_dim=8, dtype=torch.float32,
        block_sizes=(16, 48, 80), say=said.append,
    )  # fmt: skip
    monkeypatch.undo()
    monkeypatch.setenv("SPARSERING_CACHE", str(own_cache))
    assert path.parent == own_cache and path.name.startswith("cpu-")
    assert any("48: left out, its results differ by 0.01" in line for line in said)
    like = torch.zeros(1, 1, 1, 8)
    assert measured.block_size(pattern.expression, like) == 80
    assert measured.block_size(pattern.expression, like.bfloat16()) is None
    assert measured.block_size(sr.Causal().expression, like) is None
    query = torch.randn(1, 2, 300, 8)
    assert "cpu, blocks of 80" in sr.explain(query, query, query, pattern)
    out = sr.attention(query, query, query, pattern)
    assert torch.equal(out, sr.attention(query, query, query, pattern, block_size=80))
    sr.attention(query, query, query, pattern, block_size=16)  # a named one still wins
    assert "cpu, blocks of 16" in sr.explain(query, query, query, pattern, block_size=16)


def test_a_tiny_tuning_from_the_command_line(own_cache, capsys):
    shapes = "--tokens 64 --heads 2 --kv-heads 1 --head-dim 8 --block-sizes 16 32 --backend cpu"
    assert main(["tune", "SlidingWindow(9)", *shapes.split()]) == 0
    told = capsys.readouterr().out
    assert "block size 16: " in told and "block size 32: " in told and "Wrote " in told
    like = torch.zeros(1, 1, 1, 8)
    assert measured.block_size(sr.SlidingWindow(9).expression, like) in (16, 32)
    measured.keep({}, {sr.Causal().expression: 48}, like)
    assert measured.block_size(sr.Causal().expression, like) == 48
    assert measured.block_size(sr.SlidingWindow(9).expression, like) in (16, 32)


def test_results_differ_by_the_largest_error_on_what_is_finite():
    whole, empty = torch.tensor([3.0, 4.0]), torch.tensor([-torch.inf, 1.0])
    assert tune.error_of((whole, empty), (whole, empty)) == 0
    assert tune.error_of((whole, empty + 0.25), (whole, empty)) == 0.25
    assert tune.error_of((whole * 0.5, empty), (whole, empty)) == 0.5
    assert tune.error_of((whole, whole), (whole, empty)) == torch.inf


_GOOD = {"configs": {}, "block_sizes": {}}


def _written(content):
    return lambda path: path.write_bytes(
        content if isinstance(content, bytes) else content.encode()
    )


def _linked(path):
    path.symlink_to(path.with_name("nowhere"))


def _unreadable(path):
    path.write_text(json.dumps(_GOOD))
    path.chmod(0)


def _sizes(text):
    return _written(f'{{"configs": {{}}, "block_sizes": {{"x": {text}}}}}')


def _configs(text):
    return _written(f'{{"configs": {{"x": {text}}}, "block_sizes": {{}}}}')


_FOREIGN = {
    "empty": _written(""),
    "truncated": _written(json.dumps(_GOOD)[:-3]),
    "list": _written("[]"),
    "number": _written("3"),
    "null": _written("null"),
    "string": _written('"configs"'),
    "missing": _written("{}"),
    "wrong kinds": _written('{"configs": [], "block_sizes": {}}'),
    "unknown keys": _written(json.dumps(_GOOD | {"more": 1})),
    "huge": _written(json.dumps(_GOOD) + " " * (5 << 20)),
    "folder": lambda path: path.mkdir(),
    "fifo": lambda path: os.mkfifo(path),
    "unreadable": _unreadable,
    "binary": _written(bytes(range(128, 256))),
    "nested": _written("[" * 100_000),
    "nested objects": _written('{"configs":' * 100_000),
    "dangling link": _linked,
    "duplicate keys": _written('{"configs": {}, "block_sizes": {"x": 16, "x": 32}}'),
    "many digits": _sizes("1" * 5000),
    **{f"size {x}": _sizes(x) for x in ("NaN", "-16", "0", "24", "272", "32.0", "true", '"32"')},
    **{
        f"config {x}": _configs(x)
        for x in ("[]", "[64, 64, 4]", "[48, 64, 4, 2]", "[64, 64, 0, 2]", "[64, 64, 4, NaN]",
                  "[64, -64, 4, 2]", "{}", "[64, 64, 4, 2, 0, 0, 0, 0, 0, 0]", '"6442"')
    },
}  # fmt: skip


@pytest.mark.parametrize("kind", _FOREIGN)
def test_a_file_that_is_not_as_it_was_written_is_named_once_and_ignored(own_cache, kind):
    if kind == "unreadable" and os.geteuid() == 0:
        pytest.skip("root reads any file")
    _FOREIGN[kind](path := measured.path(torch.device("cpu")))
    like = torch.randn(1, 1, 40, 8)
    with pytest.warns(UserWarning) as said:
        for _ in range(2):
            assert measured.block_size("x", like) is None
    assert len(said) == 1
    assert str(path) in str(said[0].message)
    expected = sr.attention(like, like, like, sr.Causal(), backend="reference")
    got = sr.attention(like, like, like, sr.Causal())
    torch.testing.assert_close(got, expected, atol=1e-6, rtol=0)


@pytest.mark.skipif(sys.platform == "win32", reason="links need a permission there")
def test_a_link_to_a_file_that_was_written_is_read(own_cache):
    like = torch.zeros(1, 1, 1, 8)
    path = measured.keep({}, {"x": 48}, like)
    path.rename(moved := path.with_name("moved.json"))
    path.symlink_to(moved)
    measured.forget()
    assert measured.block_size("x", like) == 48
