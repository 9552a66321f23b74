"""Names that users type for options of `train` and `generate`, and runs that were finished."""

import pytest

from sparsering.cli import main


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("typed")
    (folder / "text.txt").write_text("one two three four five six seven eight\n" * 100)
    words = ["--data", folder / "text.txt", "--out", folder / "run", "--batch-size", 1]
    words += ["--tokens", 64, "--layers", 1, "--heads", 2, "--width", 16, "--steps", 2]
    assert main(["train", "--quiet", *map(str, words)]) == 0
    return folder / "run"


def test_resuming_a_finished_run_says_that_it_was_finished(run, capsys):
    assert main(["train", "--quiet", "--resume", "--out", str(run)]) == 0
    shown = capsys.readouterr().out
    assert f"The run in {run} was finished before, so nothing was trained" in shown
    assert "--steps with more than 2 trains it further" in shown


@pytest.mark.parametrize("draft", ["ngram", "n-gram", "N-gram"])
def test_generate_takes_the_names_that_users_type(run, draft, capsys):
    words = ["generate", str(run), "--max-new-tokens", "3", "--draft", draft]
    assert main([*words, "--prompt", "one two one two"]) == 0
    assert "one two one two" in capsys.readouterr().out


def test_a_run_that_was_finished_is_trained_further(run, capsys):
    assert main(["train", "--quiet", "--resume", "--out", str(run), "--steps", "3"]) == 0
    shown = capsys.readouterr().out
    assert "Step 3 of 3" in shown and "finished before" not in shown
