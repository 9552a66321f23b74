"""The tables and the picture of docs/masks.md are those of the record "masks"."""

import json

from helpers.pages import ROOT

from benchmarks.masks import OURS, TOKENS, WAYS, cases_of
from sparsering.plots.figure import image
from tools import draw_masks, tabulate_masks

RECORD = json.loads(tabulate_masks.RECORD.read_text(encoding="utf-8"))
ROWS = RECORD["rows"]
MASKS = list(dict.fromkeys(row["mask"] for row in ROWS))
PAGE = (ROOT / "docs" / "masks.md").read_text(encoding="utf-8")


def test_the_record_has_each_mask_and_library_with_times_or_a_reason():
    assert RECORD["environment"]["uncommitted_changes"] is False
    found = {(row["mask"], row["library"]) for row in ROWS}
    assert found == {(mask, library) for mask in MASKS for library in WAYS}
    left_out = PAGE.partition("## Not in the record\n")[2].partition("\n## ")[0]
    named = {mask for mask in cases_of(TOKENS) if f"**{mask}**" in left_out}
    assert named == set(cases_of(TOKENS)) - set(MASKS)
    assert all(("refused" in row) != ("forward" in row) for row in ROWS)


def test_each_time_has_a_small_error():
    for row in ROWS:
        if row["library"] == OURS:
            assert row["error"] < 2e-6 and row["error_backward"] < 5e-6, row["mask"]
        elif "refused" not in row:
            assert row["error"] < 2e-5 and row.get("error_backward", 0) < 2e-5, row["mask"]


def test_the_tables_are_of_the_record():
    assert tabulate_masks.page(PAGE, ROWS) == PAGE, "tools/tabulate_masks.py writes the page"


def test_the_page_says_where_ours_is_slower():
    section = PAGE.partition("## Where ours is slower\n")[2].partition("\n## ")[0]
    named = {mask for mask in MASKS if f"**{mask}**" in section}
    assert named == {mask for mask, _, _ in tabulate_masks.slower(ROWS)}


def test_the_picture_has_a_mask_and_bars_for_each():
    figure = draw_masks.picture(ROWS)
    assert len(figure.axes) == 2 * len(MASKS)
    assert image(figure).startswith(b"\x89PNG")


def test_slower_rows_are_found():
    times = {OURS: 2.0, "faster": 1.0, "as fast": 2.0}
    rows = [{"mask": "m", "library": name, "forward": {"ms": ms}} for name, ms in times.items()]
    assert tabulate_masks.slower(rows) == {("m", "faster", "forward")}
