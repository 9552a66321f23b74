"""One screen of `sparsering plan`: it fits a terminal, and its figures are those of `estimate`."""

import re
import shlex

import pytest
import torch

import sparsering as sr
from sparsering.cli import build_parser, main
from sparsering.distributed import RingPlan
from sparsering.planning import screen
from sparsering.planning.estimate import estimate_of
from sparsering.planning.fit import usable
from sparsering.planning.sizes import show_bytes, show_seconds

FOUNDING = "LongNet((2048, 32768), (1, 12)) & Causal()"


def plan(capsys, pattern, *argv):
    """The lines of a plan, and by its first word what each says."""
    assert main(["plan", pattern, *map(str, argv)]) == 0
    lines = capsys.readouterr().out.splitlines()
    text = [line for line in lines if not line.startswith("next")]  # a command stays whole
    assert len(text) <= 24 and max(map(len, text)) <= 100
    return lines, {line[:9].strip(): line[10:] for line in lines if line[:9].strip()}


def test_the_next_command_trains_with_the_planned_pattern(capsys):
    pattern = "SlidingWindow(7) & Causal()"
    command = plan(capsys, pattern, "--tokens", "1K", "--gpu", "H200")[1]["next"]
    words = shlex.split(command)
    parsed = build_parser().parse_args(words[words.index("train") :])
    assert (parsed.pattern, parsed.context) == (pattern, 1024)
    assert "next" not in plan(capsys, "Full()", "--tokens", "1K", "--gpu", "H200")[1]


def test_tiles_that_are_mostly_padding_say_what_they_cost(capsys):
    argv = ("--tokens", "4K", "--gpu", "H200")
    lines, _ = plan(capsys, "SlidingWindow(4096, dilation=4096) & Causal()", *argv)
    text = " ".join(" ".join(lines).split())
    said = "one token a tile where keys are 4,096 apart: kernels compute tiles of 16 x 16, "
    assert f"{said}{4096 * 256:.3g} pairs a head" in text
    lines, _ = plan(capsys, "SlidingWindow(2048, dilation=1024) & Causal()", *argv)
    assert "4 tokens a tile where keys are 1,024 apart" in " ".join(" ".join(lines).split())
    for full in ("SlidingWindow(256, dilation=256)", "LongNet((256, 4096), (1, 64)) & Causal()"):
        assert "tiles" not in plan(capsys, full, *argv)[1]


def test_what_does_not_fit_says_how_much_of_the_memory_a_call_can_use(capsys):
    argv = ("--tokens", "1M", "--gpu", "H200", "--memory", "1GB")
    advice = plan(capsys, "Causal()", *argv)[1]["advice"]
    room = f"{show_bytes(usable(10**9))} that a call can use of {show_bytes(10**9)}"
    assert f" in the {room}; take about " in advice


def test_the_founding_question_is_answered(capsys):
    argv = ("--tokens", "1M", "--gpu", "H200", "--ranks", 8)
    lines, said = plan(capsys, FOUNDING, *argv)
    pattern = sr.parse(FOUNDING)
    told = sr.estimate(pattern, tokens=1 << 20, machine="H200", ranks=8, dtype=torch.bfloat16)
    assert lines[1] == FOUNDING
    assert lines[0].startswith(
        "one attention call of 1,048,576 tokens, 8 heads of 64, bfloat16, batch 1, forward, on 8 x"
    )
    assert said["runs"] == f"triton, blocks of {told.block_size}"
    pairs = pattern.layout(1 << 20, num_heads=8).num_pairs
    assert f"{pairs:.3g} a head" in said["pairs"]
    assert f"{(1 << 39) / pairs:,.0f} times" in said["dense"]
    # 4 FLOP a channel and pair, at the data sheet's 989.5 TFLOP/s, over 8 ranks
    bound = 4 * 64 * 8 * pairs / 989.5e12 / 8
    assert said["time"].startswith(f"at least {show_seconds(bound)} a rank: a bound by published")
    assert said["memory"].startswith(f"{show_bytes(told.peak_bytes.value)} of 141 GB")
    batch = sr.choose_batch_size(
        pattern, tokens=1 << 20, machine="H200", ranks=8, dtype=torch.bfloat16
    )
    assert f"a batch of {batch:,} at this length" in said["fits"]
    assert "nothing moves" in said["sharding"]  # segments of 32K lie inside shards of 128K


def test_shardings_are_compared_with_what_their_plans_say(capsys):
    argv = ("--tokens", "8K", "--gpu", "L4", "--ranks", 4, "--heads", 4, "--kv-heads", 2)
    lines, _ = plan(capsys, "Causal()", *argv)
    for name in ("contiguous", "zigzag", "balanced"):
        line = next(line for line in lines if line[2:].startswith(name))
        made = RingPlan.build(sr.Causal(), 8192, 4, num_heads=4, num_kv_heads=2, sharding=name)
        most = max(made.bytes_received(r, head_dim=64, dtype=torch.bfloat16) for r in range(4))
        balance = float(made.loads.max() / made.loads.mean())
        cells = re.split(r"\s{2,}", line[2:].strip())
        assert cells[1:4] == [show_bytes(most), show_seconds(most / 32e9), f"{balance:.3f}"]
        assert line.startswith("*") == (name == "zigzag")


@pytest.mark.parametrize(
    ("pattern", "argv", "line", "expected"),
    [
        ("Full()", ("--gpu", "L4"), "advice", "it leaves out almost nothing"),
        ("SlidingWindow(64)", ("--memory", "1MB"), "advice", "it does not fit"),
        ("SlidingWindow(64)", ("--memory", "1MB"), "fits", "not even a batch of 1"),
        ("SlidingWindow(64)", ("--machine", "Genoa"), "fits", "with --memory"),
        ("SlidingWindow(64)", ("--gpu", "h100pcie"), "advice", "good: "),
        ("SlidingWindow(64, 64)", ("--gpu", "L4"), "dense", "full attention"),
        ("SlidingWindow(64) & Causal()", ("--gpu", "L4"), "dense", "causal attention"),
        ("Documents((1000, 3096)) & Causal()", ("--gpu", "L4"), "fits", "a batch of"),
        ("Dilated(512, 2)", ("--gpu", "H200", "--ranks", 4), "advice", "one device has room"),
        ("SlidingWindow(64)", ("--gpu", "L4", "--ranks", 4), "advice", "links bound it"),
    ],
)
def test_each_case_has_its_words(capsys, pattern, argv, line, expected):
    assert expected in plan(capsys, pattern, "--tokens", "4K", *argv)[1][line]


@pytest.mark.parametrize("pattern", ["Full()", "SlidingWindow(64)", "RandomBlocks(0.02, 64)"])
def test_the_longest_sequence_is_about_right_by_few_long_estimates(capsys, monkeypatch, pattern):
    lengths = []

    def counted(scenario):
        lengths.append(scenario.tokens)
        return estimate_of(scenario)

    monkeypatch.setattr(screen, "estimate_of", counted)
    _, said = plan(capsys, pattern, "--tokens", 200, "--memory", "3GB")
    assert lengths and len([n for n in lengths if n > 1 << 17]) <= 3
    exact = sr.longest_sequence(sr.parse(pattern), memory="3GB")
    told = re.search(r"about ([\d.]+)K tokens at this batch", said["fits"])
    assert float(told[1]) * 1024 == pytest.approx(exact, rel=0.05)


def test_options_reach_the_estimate(capsys):
    argv = ("--tokens", 4096, "--memory", "2GB", "--heads", 4, "--kv-heads", 2, "--head-dim", 32)
    argv += ("--dtype", "bfloat16", "--batch-size", 3, "--backward", "--block-size", 64)
    lines, said = plan(capsys, "SlidingWindow(64)", *argv, "--backend", "gather")
    assert " ".join(line.strip() for line in lines[:2]) == (
        "one attention call of 4,096 tokens, 4 heads (2 of keys) of 32, bfloat16, batch 3, forward "
        "and backward, on this machine"
    )
    assert said["runs"] == "gather, blocks of 64"
    told = sr.estimate(
        sr.SlidingWindow(64), tokens=4096, num_heads=4, num_kv_heads=2, head_dim=32,
        dtype=torch.bfloat16, batch_size=3, backward=True, block_size=64, backend="gather",
    )  # fmt: skip
    assert said["memory"].startswith(f"{show_bytes(told.peak_bytes.value)} of 2 GB")


@pytest.mark.parametrize(
    ("argv", "told"),
    [
        (("--tokens", "4K", "--gpu", "H300"), "machine must be one of H200"),
        (("--tokens", "4K", "--sharding", "odd", "--ranks", 2), "sharding must be one of"),
        (("--tokens", "4K", "--heads", 3, "--kv-heads", 2), "must be"),
        (("--tokens", "4K", "--backend", "reference"), "backend must be one whose costs are known"),
        (("--tokens", "many"), "must be"),
        (("--tokens", "4K", "--memory", "4 cups"), "must be"),
    ],
)
def test_a_wrong_option_is_one_line(capsys, argv, told):
    try:
        assert main(["plan", "Causal()", *map(str, argv)]) == 2
    except SystemExit as end:  # of argparse
        assert end.code == 2
    printed = capsys.readouterr()
    assert told in printed.err and printed.err.count("\n") == 1 and not printed.out
