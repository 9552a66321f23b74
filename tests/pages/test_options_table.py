"""The table of options in docs/concepts.md is what the code computes."""

from helpers.pages import ROOT

from sparsering.kernels.backends import BACKENDS, NAMES
from sparsering.route.options import ANYWHERE, OPTIONS

PAGE = ROOT / "docs" / "concepts.md"


def test_the_page_tells_which_backend_computes_which_option():
    columns = {"caches": set(ANYWHERE), "rings": set(ANYWHERE)}
    for name in NAMES:
        extras = set(BACKENDS[name].extras)
        columns[name] = extras | ({"slot_bias"} if "block_bias" in extras else set())
    assert columns["sdpa"] == columns["flash"]
    columns["sdpa, flash"] = columns["sdpa"]
    lines = PAGE.read_text(encoding="utf-8").split("\n")
    start = next(i for i, line in enumerate(lines) if line.startswith("| option |"))
    heads = [cell.strip() for cell in lines[start].strip("|").split("|")][1:]
    assert {*NAMES, "caches", "rings"} == {name for head in heads for name in head.split(", ")}
    found = {}
    for line in lines[start + 2 :]:
        if not line.startswith("|"):
            break
        option, *cells = (cell.strip() for cell in line.strip("|").split("|"))
        found[option.strip("`")] = dict(zip(heads, cells, strict=True))
    assert found == {
        option: {head: "yes" if option in columns[head] else "no" for head in heads}
        for option in OPTIONS
        if option != "dropout_seed"
    }
