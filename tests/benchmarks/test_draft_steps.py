"""The comparison "drafts" measures exact drafts."""

from benchmarks.comparisons.drafts import GUESSES, PATTERNS, drafts, tree_of


def test_drafts_are_exact_and_measured_beside_plain_tokens():
    rows = drafts(quick=True)
    assert [row["way"] for row in rows[:3]] == [
        "plain tokens",
        "draft, first layer",
        "draft, other layers",
    ]
    assert len(rows) == 3 * len(PATTERNS)
    assert all(0 < row["error"] < 2e-6 and row["cached"] == 512 for row in rows)


def test_a_drawn_tree_has_branches():
    tree = tree_of(0)
    assert all(-1 <= parent < token for token, parent in enumerate(tree))
    assert len(tree) == GUESSES > len(set(tree)) > GUESSES // 3
    assert tree != tree_of(1)
