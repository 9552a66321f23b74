"""The report's page: well formed, self-contained, and the prior figures as they were printed."""

import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from benchmarks.measure import environment
from benchmarks.report.columns import columns_of, rows_html
from benchmarks.report.page import TITLES, report_page
from benchmarks.report.prior import PRIOR, TABLES, prior_figure

RECORDS = Path(__file__).parents[2] / "benchmarks" / "records"
VOID = {"meta", "img", "br", "link", "input", "hr"}


class Page(HTMLParser):
    """The text, the attributes, and whether each tag that opens is closed in turn."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.attributes: list[tuple[str, str, str | None]] = []
        self.text = ""
        self.feed(page)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.attributes += [(tag, name, value) for name, value in attrs]
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += " " + data


def row(call: str, **more):
    shape = {"tokens": 4096, "heads": 8, "head_dim": 64, "dtype": "float32", "block_size": 64}
    figures = {"density": 0.0767, "error": 3.4e-7, "ms": 2.31, "least_ms": 2.29, "most_ms": 2.4}
    rest = {"peak_bytes": 12_500_000, "gflops": 87.6, "pattern": "BlockWindow(2, 64)"}
    return {"call": call, **shape, **figures, **rest, **more}


def records():
    rows = {
        "comparison": [row("window of 256, ours (cpu)"), row("all pairs, dense SDPA", ms=46.2)],
        "lengths": [row("dense SDPA"), row("LongNet", tokens=8192), row("dense SDPA", ms=9.0),
                    {"call": "<b>", "tokens": 8192, "left_out": "no time: 61 s & more"}],
        "launches": [row("window of 256, cpu", operators=4, outermost=1)],
        "gallery": [row("dense SDPA, all pairs"), row("Window", heads=1)],
        "rings": [row("2 ranks", known="measured", ranks=2, sharding="contiguous",
                      received_bytes=5, load_max_over_mean=1.0)],
        "roofline": [row("matrix product of 2,048, float32"), row("copy", gb_per_s=20.0),
                     row("a window, float32", intensity=3.0)],
    }  # fmt: skip
    place = environment()
    made = {
        name: {"name": name, "quick": False, "environment": place, "seconds": 1.0, "rows": rows}
        for name, rows in rows.items()
    }
    return {**made, "sparsity": {"environment": place, "failed": "RuntimeError: returned zeros"}}


def test_the_page_is_well_formed_and_loads_nothing():
    page = report_page(records())
    parsed = Page(page)
    assert parsed.open == []
    for tag, name, value in parsed.attributes:
        if name in ("src", "href", "srcset", "data", "action", "poster"):
            assert value.startswith(("data:image/png;base64,", "#")), (tag, name)
        assert tag not in ("script", "link", "iframe", "object"), tag
    assert not re.search(r"url\(|@import|https?://", page)
    pictures = [value for tag, name, value in parsed.attributes if (tag, name) == ("img", "alt")]
    assert len(pictures) == page.count("<img ") >= 5 and all(pictures)
    assert '<meta name="viewport" content="width=device-width' in page
    targets = {value for _, name, value in parsed.attributes if name == "id"}
    links = {value[1:] for _, name, value in parsed.attributes if name == "href"}
    assert links == targets == {*TITLES, "parts", "gpu", "wishes"}


def test_what_was_measured_failed_or_was_left_out_is_told():
    page = report_page(records())
    text = Page(page).text
    assert "20.0 times as long" in text and "Error against float64: 3e-7" in text
    assert "7.67%" in text and "2.31 (2.29 - 2.40)" in text and "12.5 MB" in text
    assert "Not measured: RuntimeError: returned zeros" in text
    assert "Not measured: it was not run" in text  # chosen, longest, layouts
    assert "no time: 61 s & more" in text and "&lt;b&gt;" in page and "<b>" not in page
    assert environment()["commit"][:10] in text and environment()["processor"] in text
    assert "trial run" not in text


@pytest.mark.slow
def test_a_trial_run_says_that_it_is_one():
    trial = {name: {**record, "quick": True} for name, record in records().items()}
    assert "its figures mean nothing" in Page(report_page(trial)).text


@pytest.mark.slow
@pytest.mark.parametrize("there", [False, True])
def test_gpu_figures_stand_beside_the_rows_they_fit_once_there_are_any(there):
    times = {"ms": 0.15, "least_ms": 0.14, "most_ms": 0.2}
    figures = {"backend": "ours", "tokens": 4096, "density": 0.09, "error": 1e-3, **times}
    failed = {"cases": {"65536 tokens": {"failed": "no memory"}}, "rows": []}
    parts = {"founding table": {"rows": [figures]}, "window": failed}
    gpu = {"environment": {"gpu": "NVIDIA H100", "commit": "0123456789abc"}, "parts": parts}
    page = report_page(records(), gpu if there else None)
    assert ("0.15 ms, density 9%" in page) == there == ("NVIDIA H100" in page)
    assert ("0.15 (0.14 - 0.2)" in page) == there
    assert ("failed, no memory" in page) == there
    own = rows_html(records()["comparison"]["rows"], columns_of("comparison", gpu))
    assert own.count("not measured") == 1  # dense attention is no part of that record


PRINTED = {
    "comparison": "29.72 28.27 68.36 28.44 28.23 148.13 540.95 29.22",
    "lengths": "121.91 39.82 148.05 47.35 263.06 90.79 513.46 197.16 1003.10 373.41 10x 30x "
    "102 41 100 182 1598 63 58 104 1717 1810 411 834 938 197 2013 104 52 99 2021 432 71 156 3685",
    "memory": "0.539 0.531 2.208 0.133 0.266 0.531 1.063",
    "launches": "308 10 60 70 6",
    "layouts": "48.74 60% 97%",
    "sparsity": "1842.60 8.39 4313.09 36.67 7518.30 54.83 219x 118x 137x",
    "rings": "8065 925 6.95 144 1161x 288 110 507 71 481 1382 625 2 1080 130K 4 100 1.6M 8 100 8M",
    "longest": "65,536 65,536 16,384 65K 65K 99% 130K 400K 99% 200K 1M 99% 200K 1M 99%",
    "chosen": "71 156 3685 2.208 0 17",
}
"""Every figure of the prior documents, in the order in which a table of theirs tells it."""


def test_the_prior_figures_are_those_that_were_printed():
    found = {
        table: " ".join(
            number
            for _, figures in prior["said"]
            for number in re.findall(r"\d(?:[\d.,]*\d)?[KM%x]?", figures)
        )
        for table, prior in TABLES.items()
    }
    assert found == PRINTED


def test_a_prior_figure_stands_beside_the_row_of_its_length_alone():
    assert prior_figure("lengths", "window in blocks", 16384) == "90.79 ms"
    assert prior_figure("lengths", "window in blocks", 131072) == ""
    assert prior_figure("lengths", "hierarchical", 32768) == "OOM"
    assert prior_figure("comparison", "window of 256, ours (cpu)", 4096).startswith("28.23 ms")
    assert prior_figure("comparison", "window of 256, ours (cpu), with gradients", 4096) == ""
    assert prior_figure("roofline", "copy", None) == ""
    for prior in TABLES.values():
        printed = " ".join(figure for _, figure in prior["said"])
        for *_, figure in prior["beside"]:
            for number in re.findall(r"\d+\.\d+", figure):
                assert number in printed or figure.split()[0] in printed, figure


def test_each_wish_says_what_became_of_it():
    wished = " ".join(wish for wish, _ in PRIOR["wishes"])
    for wish in (
        "automatic sparsity by length", "dynamic sparsity in training", "adaptive fixed",
        "larger GPUs", "FA3", "custom kernels", "distributed tests", "buffer pool",
        "lazy weight buffers", "block-size tuner", "fused kernel", "cache-aware order",
        "adaptive compression", "asynchronous pattern sync", "versioned pattern cache",
        "hardware-aware patterns", "importance tracker", "mixed precision",
        "coarse-to-fine hierarchy", "sparsity scheduler", "NUMA placement", "adaptive batch size",
    ):  # fmt: skip
        assert wish in wished
    assert all(len(became) > 20 for _, became in PRIOR["wishes"])


def test_the_parts_have_the_figures_of_their_record():
    record = json.loads((RECORDS / "ablation.json").read_text())
    page = report_page(records(), parts=record)
    parsed = Page(page)
    assert parsed.open == []
    for row in record["rows"]:
        assert row["part"] in parsed.text and f"{row['on_over_off']:.2f}" in parsed.text
    assert "python -m benchmarks ablation" in Page(report_page(records())).text
