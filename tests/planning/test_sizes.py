"""Sizes as people write and read them."""

import pytest

import sparsering as sr
from sparsering.cli import build_parser
from sparsering.planning.sizes import (
    parse_bytes,
    parse_tokens,
    show_bytes,
    show_seconds,
    show_tokens,
)


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("24GB", 24 * 10**9),
        ("24 gib", 24 * 2**30),
        ("1.5TB", 15 * 10**11),
        ("512MiB", 2**29),
        ("1_000kb", 10**6),
        ("100", 100),
        (12345, 12345),
        ("1e9", 10**9),
        (80e9, 80 * 10**9),
    ],
)
def test_bytes_are_read(text, number):
    assert parse_bytes(text) == number


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("1M", 2**20),
        ("64k", 2**16),
        ("1.5K", 1536),
        ("1,048,576", 2**20),
        ("2g", 2**31),
        (7, 7),
        ("1e6", 10**6),
    ],
)
def test_tokens_are_read_in_powers_of_two(text, number):
    assert parse_tokens(text) == number


@pytest.mark.parametrize(
    "wrong", ["", "GB", "-1GB", "0", 0, -5, True, 2.5, None, "1e-9", "5 apples"]
)
def test_what_is_no_size_is_refused_with_an_example(wrong):
    with pytest.raises(ValueError, match=r"memory must be bytes.*'24GB'.*got") as said:
        parse_bytes(wrong)
    assert repr(wrong) in str(said.value)
    with pytest.raises(ValueError, match=r"tokens must be .*'64K'.*got"):
        parse_tokens(wrong)


def test_tokens_are_whole():
    with pytest.raises(ValueError, match="tokens must be a whole number"):
        parse_tokens("0.3")
    with pytest.raises(ValueError, match="tokens must be a whole number"):
        parse_tokens("1.0001K")


@pytest.mark.parametrize(
    ("shown", "expected"),
    [
        (show_bytes(0), "0 B"),
        (show_bytes(999), "999 B"),
        (show_bytes(999_999), "1 MB"),
        (show_bytes(1_234_567), "1.23 MB"),
        (show_bytes(141 * 10**9), "141 GB"),
        (show_tokens(12_345), "12,345"),
        (show_tokens(2**20), "1M"),
        (show_tokens(117_504), "115K"),
        (show_seconds(0), "0 us"),
        (show_seconds(0.000_309), "309 us"),
        (show_seconds(0.169), "169 ms"),
        (show_seconds(2.47), "2.47 s"),
        (show_seconds(600), "10 min"),
        (show_seconds(36_000), "10 h"),
    ],
)
def test_figures_are_shown_with_three_digits(shown, expected):
    assert shown == expected


def test_every_command_understands_sizes_as_people_write_them():
    """Arguments are found by their names in all parsers, so a new one cannot be forgotten."""
    (commands,) = build_parser()._subparsers._group_actions
    found = set()
    for name, parser in commands.choices.items():
        parser.add_later(parser)
        for action in parser._actions:
            if action.dest in ("tokens", "length", "context"):
                assert action.type is not None and action.type("2K") == 2048, (name, action.dest)
                assert action.type("1e6") == 1_000_000 and action.type("4096") == 4096
            elif action.dest == "memory":
                assert action.type("1GB") == 10**9 and action.type("1GiB") == 2**30
            else:
                continue
            found.add((name, action.dest))
    assert found == {
        ("plan", "memory"), ("plan", "tokens"), ("plot", "length"), ("train", "context"),
        ("try", "length"), ("tune", "tokens"),
    }  # fmt: skip


def test_estimate_takes_sizes_as_choose_batch_size_does():
    assert sr.estimate(sr.Causal(), tokens="4K") == sr.estimate(sr.Causal(), tokens=4096)
    with pytest.raises(ValueError, match="tokens must be a whole number"):
        sr.estimate(sr.Causal(), tokens="many")
