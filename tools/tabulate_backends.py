"""Writes the tables of backends and options in README.md and docs/concepts.md from the code.

    .venv/bin/python tools/tabulate_backends.py

Each table stands between two comments with its name. tests/pages/test_backend_tables.py fails where
a page differs from what this writes.
"""

import re
import sys
from collections.abc import Iterable
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from sparsering.kernels.backends import BACKENDS, NAMES  # noqa: E402
from sparsering.route.options import ANYWHERE, OPTIONS  # noqa: E402

ABOUT = {  # name: (what it is, the devices it is written for)
    "cpu": ("a C++ kernel, compiled on first use, or ahead by `sparsering build`", "CPU"),
    "triton": (
        "Triton kernels over the same tiles; **no GPU has run them yet** ([GPUs](docs/gpu.md))",
        "NVIDIA GPU",
    ),
    "gather": ("portable torch; needs no compiler", "any"),
    "reference": ("dense mathematics in plain torch: the oracle of every test", "any"),
    "torch_sparse": (
        "sampled products of `torch.sparse`, an experiment to compare with",
        "CPU, GPU",
    ),
    "sdpa": ("torch's own fused attention, for `Full()` and `Causal()`", "any"),
    "flash": (
        "FlashAttention-3 and -4, in half precision: full, causal, windows, documents, blocks; "
        "**no GPU has run it yet**",
        "Hopper, Blackwell",
    ),
    "cudnn": (
        "cuDNN's sparse kernels, in half precision: masks of few intervals of keys, whole blocks; "
        "**no GPU has run it yet**",
        "Hopper, Blackwell",
    ),
}
COMPUTED = [name for name in OPTIONS if name != "dropout_seed"]  # a seed belongs to dropout_p
COMPUTED.append("coordinate_bias")  # a score_mod that kernels know
PAGES = {"README.md": ("backends",), "docs/concepts.md": ("options", "named")}


def options_of(name: str) -> list[str]:
    """Returns the options of a call that a backend computes."""
    extras = BACKENDS[name].extras
    return [x for x in COMPUTED if ("block_bias" if x == "slot_bias" else x) in extras]


def in_words(options: Iterable[str]) -> str:
    """Returns options as one cell of a table, such as "all but `score_mod`"."""
    missing = [f"`{x}`" for x in COMPUTED if x not in set(options)]
    if len(missing) == len(COMPUTED):
        return "none"
    return "all" + (f" but {', '.join(missing)}" if missing else "")


def takes_float64(name: str) -> bool:
    """True if no reason of a backend against a float64 tensor names that dtype."""
    reasons = BACKENDS[name].reasons(*[torch.empty(1, 1, 1, 1, dtype=torch.float64)] * 3)
    return not any("float64" in reason or "bfloat16" in reason for reason in reasons)


def results(name: str) -> str:
    """Returns what calls of a backend return, as one cell of a table."""
    return "out, lse, gradients" if BACKENDS[name].returns_lse else "out, gradients"


def table(heads: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """Returns lines of Markdown."""
    lines = [list(heads), *map(list, rows)]
    lines.insert(1, ["---"] * len(lines[0]))
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def backends() -> str:
    """Returns the table of all backends."""
    return table(
        ("backend", "what it is", "devices", "float64", "options", "runs"),
        (
            (
                f"`{name}`",
                *ABOUT[name],
                "yes" if takes_float64(name) else "no",
                in_words(options_of(name)),
                "when named" if BACKENDS[name].only_named else "default",
            )
            for name in NAMES
        ),
    )


def options() -> str:
    """Returns the table that says which backend and verb computes which option."""
    columns = {name: options_of(name) for name in NAMES}
    columns |= {"caches": list(ANYWHERE), "rings": list(ANYWHERE)}
    return table(
        ("option", *columns),
        (
            (f"`{option}`", *("yes" if option in has else "no" for has in columns.values()))
            for option in COMPUTED
        ),
    )


def named() -> str:
    """Returns the table of backends that run only when a call names them."""
    return table(
        ("backend", "devices", "options", "results", "rings and caches"),
        (
            (
                f"`{name}`",
                ABOUT[name][1],
                in_words(options_of(name)),
                results(name),
                "yes" if BACKENDS[name].reads_layouts else "no",
            )
            for name in NAMES
            if BACKENDS[name].only_named
        ),
    )


TABLES = {"backends": backends, "options": options, "named": named}


def with_tables(page: str, text: str) -> str:
    """Returns the text of a page with its tables as the code is now."""
    for name in PAGES[page]:
        pattern = rf"(<!-- {name} -->\n).*?(<!-- {name} -->)"
        found = re.search(pattern, text, re.DOTALL)
        if found is None:
            raise ValueError(f"{page} has no two lines <!-- {name} --> around a table")
        text = text[: found.end(1)] + TABLES[name]() + text[found.start(2) :]
    return text


if __name__ == "__main__":
    for page in PAGES:
        path = ROOT / page
        path.write_text(with_tables(page, path.read_text(encoding="utf-8")), encoding="utf-8")
