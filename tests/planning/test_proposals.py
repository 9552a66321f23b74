"""Proposals against their contract: costs of `estimate`, reach by definition, limits and order."""

import json
import re
from pathlib import Path

import pytest
import torch

import sparsering as sr
from sparsering.cli import main
from sparsering.patterns.algebra import Frame
from sparsering.planning import proposals as proposals_module
from sparsering.planning import propose, reach
from sparsering.planning.screen import proposal_screen

RECORDS = Path(__file__).parents[2] / "benchmarks" / "records"


def by_definition(pattern, tokens, heads, kv_heads):
    """Returns keys that the last query sees, and layers until it depends on all tokens."""
    pairs = pattern.to_dense(tokens, num_heads=heads, num_kv_heads=kv_heads).bool().any(0)
    seen, layers = pairs[-1].clone(), 1
    count = int(seen.sum())
    seen[-1] = True
    while not seen.all():
        further = seen | pairs[seen].any(0)
        if torch.equal(further, seen):
            return count, None
        seen, layers = further, layers + 1
    return count, layers


@pytest.mark.parametrize("most", [1 << 21, 16], ids=["one layout", "layouts of parts"])
@pytest.mark.parametrize(
    "pattern",
    [
        sr.Causal(),
        (sr.SlidingWindow(31) | sr.GlobalTokens(4, rows=False)) & sr.Causal(),
        sr.SlidingWindow(9, 9) | sr.GlobalTokens(2),
        sr.LongNet((32, 128, 512), (1, 4, 16)) & sr.Causal(),
        sr.LongNet((32, 128, 512), (1, 4, 16)),
        sr.RandomBlocks(0.1, 16) & sr.Causal(),
        sr.RandomBlocks(0.2, 16, per_head=False) | sr.BlockWindow(1, 16),
        sr.Hierarchical(((16, 64), (64, 256), (256, None)), 16) & sr.Causal(),
        sr.Hierarchical(((16, 64),), 16),
    ],
    ids=str,
)
def test_reach_and_layers_are_those_of_the_pairs(pattern, most, monkeypatch):
    monkeypatch.setattr(reach, "_MOST_BLOCKS", most)
    for tokens in (1, 5, 100, 512):
        for heads, kv_heads in ((1, 1), (4, 2)):
            frame = Frame.build(tokens, tokens, heads, kv_heads, 0)
            expected = by_definition(pattern, tokens, heads, kv_heads)
            blocks = (tokens / 16) ** 2
            seen = reach.keys_seen(pattern, frame)
            layers = reach.layers_to_see_all(pattern, frame, seen, blocks, 16)
            found = (int(seen.sum()), layers)
            assert found == expected


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("tokens", [1, 7, 1200])
def test_proposals_have_the_reach_of_their_patterns(tokens, causal, monkeypatch):
    monkeypatch.setattr(proposals_module, "_WINDOWS", (64, 300, 1026))
    for each in propose(tokens, num_heads=4, num_kv_heads=2, causal=causal):
        assert (each.reach, each.layers) == by_definition(each.pattern, tokens, 4, 2)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"backward": True, "batch_size": 2, "causal": False},
        {"machine": "H200", "num_heads": 16, "num_kv_heads": 4, "head_dim": 128},
        {"machine": "A100", "ranks": 2, "dtype": torch.float16},
    ],
    ids=str,
)
def test_costs_are_those_of_estimate(options):
    dtype = torch.bfloat16 if "machine" in options else torch.float32
    call = {"dtype": dtype, **options, "tokens": 8192}
    causal = call.pop("causal", True)
    found = propose(8192, **options)
    dense = sr.estimate(sr.Causal() if causal else sr.Full(), **call)
    kinds = ("SlidingWindow", "Dilated|LongNet", r"RandomBlocks\(0\.1", r"RandomBlocks\(0\.05")
    for kind in (*kinds, r"RandomBlocks\(0\.01", "Hierarchical"):
        assert any(re.search(kind, str(each.pattern)) for each in found)
    assert dense.pattern in [each.pattern for each in found]
    densities = [each.density for each in found[1:]]
    assert densities == sorted(densities, reverse=True)
    for each in found:
        alone = sr.estimate(each.pattern, **call)
        assert (each.seconds, each.bytes) == (alone.seconds.value, alone.peak_bytes.value)
        assert each.density == alone.pairs / dense.pairs
        assert each.ranks == options.get("ranks", 1)
        assert type(each.seconds) is type(each.bytes) is float
        assert each.quality == "unknown" or each.quality.endswith(
            "records/selection-language.json)"
        )


def test_the_first_is_the_densest_that_meets_the_limits():
    limits = dict.fromkeys((1e-9, 1e-3, 3e-3, 0.01, 0.03, 0.1, 0.3, 1.0, 10.0))
    before = 0.0
    for seconds in limits:
        found = propose(32768, machine="A100", dtype=torch.float32, seconds=seconds / 30)
        trained = [each for each in found if "RandomBlocks" not in str(each.pattern)]
        fits = [each for each in trained if each.fits]
        assert found[0] in trained
        reaching = [each for each in fits if each.layers is not None] or fits
        fitting = [each.density for each in reaching]
        for each in found:
            assert each.fits == (each.seconds <= seconds / 30)
        assert found[0].density == max(fitting, default=found[0].density)
        if not fitting:
            assert found[0].seconds == min(each.seconds for each in trained)
            assert "takes the least time" in found[0].reason
        else:
            assert found[0].density >= before
            before = found[0].density
    assert before == 1


def test_where_memory_is_short_the_reason_says_what_it_takes():
    found = propose(65536, memory="100MB", seconds=1e9)
    assert not any(each.fits for each in found)
    trained = [each for each in found if "RandomBlocks" not in str(each.pattern)]
    assert found[0].bytes == min(each.bytes for each in trained)
    assert re.search(r"56\d MB a rank, or at least 6 ranks", found[0].reason)
    enough = propose(65536, memory=int(found[0].bytes), seconds=1e9)
    assert enough[0].fits and enough[0].pattern == found[0].pattern


def test_without_seconds_the_limit_is_that_of_a_layers_other_products():
    for backward in (False, True):
        options = {"machine": "A100", "dtype": torch.bfloat16, "backward": backward}
        dense = sr.estimate(sr.Causal(), tokens=65536, **options)
        products = 24 * 512**2 * 65536 * (3 if backward else 1)
        limit = products * dense.seconds.value / dense.flops.value
        for each in propose(65536, **options):
            assert each.fits == (each.seconds <= limit)


def test_the_figures_of_quality_are_those_of_the_record():
    rows = json.loads((RECORDS / "selection-language.json").read_text())["rows"]
    text = " ".join(proposals_module._QUALITY.values())
    bits = {}
    for row in rows:
        if row.get("steps") == 650:
            bits.setdefault((row["arm"], row["block_size"]), []).append(row["bits_per_byte"])
    mean = {arm: sum(values) / len(values) for arm, values in bits.items()}
    quoted = [f"{mean[arm]:.3f}" for arm in (("full", 0), ("window", 32), ("random", 32))]
    chosen = [f"{x:.3f}" for (arm, _), x in mean.items() if arm in ("exact", "mean")]
    assert set(re.findall(r"\d\.\d{3}", text)) == {*quoted, min(chosen), max(chosen)}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"seq_len": 0}, "seq_len must be"),
        ({"num_heads": 0}, "num_heads must be at least 1"),
        ({"seconds": 0}, "seconds must be above 0"),
        ({"seconds": -1}, "seconds must be a finite number"),
        ({"memory": 0}, "memory must be"),
        ({"ranks": 0}, "ranks must be at least 1"),
        ({"machine": "H2000"}, "machine must be one of"),
        ({"machine": "Genoa"}, "memory must be given"),
    ],
    ids=str,
)
def test_bad_arguments_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        propose(**{"seq_len": 1024, **options})


def test_plan_without_a_pattern_says_what_to_use(capsys):
    assert main(["plan", "--tokens", "200k", "--gpu", "H200"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("one attention call of 204,800 tokens, 8 heads of 64, bfloat16")
    assert max(map(len, lines)) <= 100
    use = next(line for line in lines if line.startswith("use"))[10:]
    assert sr.parse(use) == propose("200K", machine="H200")[0].pattern
    assert re.search(r"plan --tokens 200k --gpu H200 --take \d$", lines[-1])
    for option in (["--seconds", "1"], ["--full"], ["--take", "1"]):
        assert main(["plan", "Causal()", "--tokens", "4K", *option]) == 2
        assert "leave the pattern out" in capsys.readouterr().err
    for option in (["--backend", "cpu"], ["--block-size", "64"], ["--sharding", "zigzag"]):
        assert main(["plan", "--tokens", "4K", *option]) == 2
        assert "are for one pattern; name it" in capsys.readouterr().err
    assert main(["plan", "--tokens", "4K", "--memory", "total"]) == 0


def test_random_blocks_are_a_cost_and_never_recommended():
    dense, *_ = found = propose("200K", machine="H200", seconds=1e9)
    costs = [each for each in found if "RandomBlocks" in str(each.pattern)]
    assert dense.density == 1 and len(costs) == 3
    for each in costs:  # with just the time of a row of random blocks, which was recommended before
        best, *others = propose("200K", machine="H200", seconds=1.001 * each.seconds)
        assert "RandomBlocks" not in str(best.pattern) and best.fits
        assert "to train with" in best.reason
        (same,) = (x for x in others if x.pattern == each.pattern)
        assert same.fits and "the cost of blocks chosen by content" in same.reason


def test_proposals_are_values():
    first, again, second = (propose(n, memory="1GB")[0] for n in (256, 256, 512))
    assert first != second and first == again and hash(first) == hash(again)
    with pytest.raises(AttributeError):
        first.seconds = 0.0


def table_of(lines):
    """Returns {row: (marked, text of the pattern)} of a printed table, each text from one line."""
    begin = next(i for i, line in enumerate(lines) if line.startswith(" row ")) + 1
    found, number = {}, 0
    for line in lines[begin : lines.index("", begin)]:
        if row := re.match(r"(\*| ) +(\d+)  .*  (?:yes|no) *(.*)$", line):
            number = int(row[2])
            found[number] = row[1] == "*", row[3]
        else:
            assert found[number][1] == ""
            found[number] = found[number][0], line.strip()
    return found


@pytest.mark.parametrize("words", [["--tokens", "2K"], ["--tokens", "1500", "--full"]], ids=str)
def test_each_row_of_proposals_can_be_typed_and_taken(capsys, words):
    words = ["plan", *words, "--gpu", "L4", "--heads", "4"]
    assert main(words) == 0
    lines = capsys.readouterr().out.splitlines()
    tokens, full = proposals_module.parse_tokens(words[2]), "--full" in words
    expected = [text for _, text in proposals_module.candidates(tokens, not full)]
    printed = table_of(lines)
    assert [text for _, text in printed.values()] == expected
    best = propose(tokens, num_heads=4, machine="L4", causal=not full)[0]
    for number, (marked, text) in printed.items():
        assert marked == (sr.parse(text) == best.pattern)
        assert main([*words, "--take", str(number)]) == 0
        taken = capsys.readouterr().out.splitlines()
        assert taken[1] == text and taken[0] == lines[0]
    assert main([*words, "--take", str(len(expected) + 1)]) == 2
    assert f"1 to {len(expected)}" in capsys.readouterr().err


def test_long_texts_of_patterns_stay_whole():
    texts = [text for _, text in proposals_module.candidates(1 << 24, True)]
    assert max(map(len, texts)) > 90
    found = [
        proposals_module.Proposal(sr.parse(text), 1.0, 1e9, 0.5, 9, None, 1, True, "r", "q")
        for text in texts
    ]
    lines = proposal_screen(found, "title", texts, "sparsering plan").splitlines()
    assert [sr.parse(text) for _, text in table_of(lines).values()] == [x.pattern for x in found]


def test_what_never_sees_the_whole_text_is_recommended_only_where_nothing_else_fits(monkeypatch):
    monkeypatch.setattr(proposals_module, "_WINDOWS", (64, 300, 1026))
    found = propose(1 << 16, machine="H200")
    (longnet,) = (each for each in found if each.layers is None)
    options = {"machine": "H200", "seconds": 1.01 * longnet.seconds}
    best, *others = propose(1 << 16, **options)
    (longnet,) = (each for each in others if each.layers is None)
    assert longnet.fits and best.fits and best.density < longnet.density
    assert best.layers is not None and "longnet it never does" in best.reason
    assert "never depends on the whole text" in longnet.reason
    candidate = proposals_module._Candidate
    limits = {"seconds": 1e9, "limit": 1e18}
    dense, sparse = (sr.estimate(x, tokens=512) for x in (sr.Causal(), sr.SlidingWindow(9)))
    for layers, chosen in (((None, None), 0), ((None, 3), 1), ((2, 3), 0), ((2, None), 0)):
        rows = [
            candidate("longnet", one, reach=1, layers=number)
            for one, number in zip((dense, sparse), layers, strict=True)
        ]
        taken, reason = proposals_module._recommended(rows, **limits)
        assert taken is rows[chosen]
        assert ("never" in reason) == (layers[0] is None)
