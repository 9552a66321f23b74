"""The command line of the benchmarks: `python -m benchmarks bench | report`."""

import pytest

from benchmarks import comparisons, tables
from benchmarks.__main__ import main


def test_bench_names_the_records_that_it_wrote(tmp_path, capsys, monkeypatch):
    seen = []

    def write_records(out, quick, only):
        seen.append((out, quick, only))
        return [out / "layouts.json"]

    monkeypatch.setattr(comparisons, "main", write_records)
    assert main(["bench", "--out", str(tmp_path), "--quick"]) == 0
    assert seen == [(tmp_path, True, None)]
    assert capsys.readouterr().out == f"Wrote {tmp_path / 'layouts.json'}\n"
    with pytest.raises(SystemExit):
        main(["bench", "--out", str(tmp_path), "--only", "layout"])
    assert "invalid choice: 'layout'" in capsys.readouterr().err
    assert seen == [(tmp_path, True, None)]


def test_a_finished_report_is_not_overwritten(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(tables, "failed", lambda out: [])
    (tmp_path / "index.html").write_text("a page")
    assert main(["report", "--out", str(tmp_path)]) == 2
    assert "which is not overwritten" in capsys.readouterr().err
    assert (tmp_path / "index.html").read_text() == "a page"
