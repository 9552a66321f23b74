"""Progress of long work: a bar in a terminal, lines elsewhere, nothing where nobody asked."""

import io
import re
import sys

import pytest

import sparsering as sr
from sparsering.cli import main
from sparsering.ground import progress as shown_progress
from sparsering.ground.progress import progress, showing, unshown


class Terminal(io.StringIO):
    def isatty(self):
        return True


class Clock:
    """Stands in for `time` in the module: `sleep` moves it, nothing waits."""

    def __init__(self):
        self.now = 100.0

    def monotonic(self):
        return self.now


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(shown_progress, "time", clock)
    return clock


def worked(clock, seconds, *, total=4, after_s=1.0, done=0, note=""):
    with progress("tune", total, "call", done=done, after_s=after_s) as work:
        for _ in range(total - done):
            clock.now += seconds
            work.advance(note=note)


def test_lines_tell_count_note_rate_and_time_left(clock, capsys):
    with showing("bars and lines"):
        worked(clock, 2.0, note="block size 64")
    assert capsys.readouterr().err.splitlines() == [
        "tune 1/4  block size 64  2.0 s/call  0:06 left",
        "tune 4/4  block size 64  2.0 s/call  0:00 left",
    ]


def test_lines_come_every_five_seconds(clock, capsys):
    with showing("bars and lines"):
        worked(clock, 0.5, total=8000, after_s=0.0)
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "tune 1/8,000  2.0 calls/s  1:06:40 left"
    assert lines[1] == "tune 11/8,000  2.0 calls/s  1:06:34 left"
    assert len(lines) == 800 + 1


def test_work_that_ends_sooner_says_nothing(clock, capsys):
    with showing("bars and lines"):
        worked(clock, 0.2)
    assert capsys.readouterr().err == ""


def test_what_an_earlier_process_did_does_not_count_for_the_rate(clock, capsys):
    with showing("bars and lines"):
        worked(clock, 10.0, total=100, done=97)
    assert capsys.readouterr().err.splitlines()[0] == "tune 98/100  10.0 s/call  0:20 left"


def test_the_number_of_units_can_change(clock, capsys):
    with showing("bars and lines"), progress("try", 6, "call", after_s=0.0) as work:
        work.expect(3)
        clock.now += 1
        work.advance(2)
    assert capsys.readouterr().err == "try 2/3  2.0 calls/s  0:00 left\n"


def test_a_program_without_a_terminal_prints_nothing(clock, capsys):
    worked(clock, 30.0)
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize("shown", ["bars", "bars and lines"])
def test_a_terminal_gets_a_bar_that_leaves_nothing_behind(monkeypatch, shown):
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    with showing(shown), progress("plan", 3, "estimate", after_s=0.0) as work:
        work.bar.mininterval = 0.0
        for _ in range(3):
            work.advance(note="window")
    text = terminal.getvalue()
    assert re.search(r"\rplan 2/3 \|[^|]*\| +[0-9.,]+ estimates/s, [0-9:]+ left, window", text)
    assert "\n" not in text and text.split("\r")[-2].strip() == ""


def test_without_tqdm_a_terminal_gets_lines(monkeypatch, clock):
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setitem(sys.modules, "tqdm", None)
    worked(clock, 3.0, total=1)
    assert terminal.getvalue() == "tune 1/1  3.0 s/call  0:00 left\n"


def test_quiet_shows_neither_bar_nor_lines(monkeypatch, clock):
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    with showing("nothing"):
        worked(clock, 30.0)
    assert terminal.getvalue() == ""


def test_only_the_first_process_of_a_group_shows(monkeypatch, clock, capsys):
    monkeypatch.setenv("RANK", "1")
    with showing("bars and lines"):
        worked(clock, 30.0)
    assert capsys.readouterr().err == ""


def test_work_within_work_shows_nothing_of_its_own(clock, capsys):
    with showing("bars and lines"), progress("plan", 1, "estimate", after_s=0.0) as outer:
        worked(clock, 30.0)
        outer.advance()
    worked(clock, 30.0)
    assert capsys.readouterr().err == "plan 1/1  120.0 s/estimate  0:00 left\n"


def test_work_after_a_failure_is_shown_again(clock, capsys):
    with showing("bars and lines"):
        with pytest.raises(KeyError), progress("plan", 1, "estimate"):
            raise KeyError
        worked(clock, 30.0, total=1)
    assert capsys.readouterr().err == "tune 1/1  30.0 s/call  0:00 left\n"


def test_results_are_printed_to_stdout_while_work_is_shown(clock, capsys):
    with showing("bars and lines"), progress("tune", 1, "call") as work:
        work.say("block size 64: 1.5 ms")
    with unshown(3) as work:
        work.say("hidden work speaks too")
    assert capsys.readouterr().out == "block size 64: 1.5 ms\nhidden work speaks too\n"


def test_a_layout_beyond_two_seconds_is_shown_by_its_tiles(clock, capsys):
    def slow(batch, head, query, key):
        clock.now += 3.0
        return (query - key) % 7 < 3

    with showing("bars and lines"):
        sr.from_mask_mod(slow).layout(4096, block_size=16)
    lines = capsys.readouterr().err.splitlines()
    assert re.fullmatch(r"layout 4,096/65,536  .* tiles/s  [0-9:]+ left", lines[0]), lines
    assert lines[-1].startswith("layout 65,536/65,536")


LONG = {
    "tune": ["tune", "Causal()", "--tokens", "256", "--heads", "1", "--block-sizes", "64"],
    "plan": ["plan", "--tokens", "1024"],
    "plot": ["plot", "Causal()", "--length", "256", "--out", "causal.png"],
}


@pytest.mark.parametrize("name", LONG)
def test_quiet_commands_print_their_results_alone(name, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    arguments = LONG[name]
    ticks = iter(range(0, 10**9, 7))  # every look at the clock is 7 s later
    monkeypatch.setattr(Clock, "monotonic", lambda self: next(ticks))
    monkeypatch.setattr(shown_progress, "time", Clock())
    assert main(arguments) == 0
    loud = capsys.readouterr()
    assert main([*arguments, "--quiet"]) == 0
    quiet = capsys.readouterr()
    assert quiet.err == "" and quiet.out
    if name != "plot":  # whose layout of few tiles is one step
        assert re.search(rf"{name} \d+/\d+ .* left\n", loud.err)
