"""Code of 0.2.0 runs, except for what docs/upgrading.md has a row for."""

import importlib
import inspect
import json
import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from helpers.pages import ROOT

import sparsering as sr
from sparsering import distributed, plots, selection
from sparsering.cli import main
from sparsering.integrations import transformers as hf
from sparsering.layouts.cache import layout_cache
from sparsering.plots import attended, losses, traffic
from sparsering.training.checkpoint import load_checkpoint

# The public names of 0.2.0 with parameters and members, by introspection of that release.
OLD = json.loads((ROOT / "tests/helpers/public-0.2.0.json").read_text(encoding="utf-8"))
PAGE = (ROOT / "docs/upgrading.md").read_text(encoding="utf-8")
ROWS = re.findall(r"^\| (.*?) \| (.*) \|$", PAGE.split("\n## ")[1], re.MULTILINE)[1:]


def parameters(function: Any) -> dict[str, inspect.Parameter] | None:
    """Returns the parameters; None where any keyword is taken, or Python cannot tell."""
    try:
        found = dict(inspect.signature(function).parameters)
    except (TypeError, ValueError):
        return None
    return None if any(x.kind == x.VAR_KEYWORD for x in found.values()) else found


def gone() -> set[str]:
    """Returns what of 0.2.0's public names, members and parameters is not there."""
    found = set()
    for full_name, old in OLD.items():
        module, _, name = full_name.rpartition(".")
        value = getattr(importlib.import_module(module), name, None)
        if value is None:
            found.add(f"{module.rpartition('.')[2]}.{name}")
            continue
        owner = value if inspect.isclass(value) else type(value)
        calls = [(name, value, old.get("parameters"))]
        for member, its in old.get("members", {}).items():
            if hasattr(owner, member):
                calls.append((f"{name}.{member}", getattr(owner, member), its))
            elif member not in getattr(owner, "__dataclass_fields__", {}):
                found.add(f"{name}.{member}")
        for path, function, wanted in calls:
            now = parameters(function)
            if wanted and now is not None:
                found |= {f"{path}({x}=)" for x in wanted if x not in now}
                by_place = [x for x, y in now.items() if y.kind == y.POSITIONAL_OR_KEYWORD]
                before = [x for x in wanted if x in by_place]
                assert by_place[: len(before)] == before, path
    return found


def test_each_public_name_is_there_or_has_a_row():
    first_column = " ".join(old for old, _ in ROWS)
    assert {name for name in gone() if f"`{name}`" not in first_column} == set()
    assert len(OLD) == 72 and gone()  # what is looked for can be found


def no_modules(*names: str) -> None:
    for name in names:
        assert find_spec(f"sparsering.{name}") is None, name


def exits(*arguments: str) -> None:
    with pytest.raises(SystemExit) as found:
        main(list(arguments))
    assert found.value.code == 2


def flex() -> None:
    x = torch.zeros(1, 1, 8, 8)
    with pytest.raises(ValueError, match=r"backend must be one of .*, got 'flex'"):
        sr.attention(x, x, x, sr.Causal(), backend="flex")


def sdpa() -> None:
    x = torch.randn(1, 1, 8, 8)
    with pytest.raises(NotImplementedError, match=r"it runs Full\(\) and Causal\(\)"):
        sr.attention(x, x, x, sr.Documents((4, 4)), backend="sdpa")
    out = sr.attention(x, x, x, sr.Causal(), backend="sdpa")
    torch.testing.assert_close(out, sr.attention(x, x, x, sr.Causal(), backend="reference"))


def calibrate() -> None:
    exits("calibrate")
    assert not hasattr(sr.Estimate, "hint")
    sources = (ROOT / "sparsering" / "planning").rglob("*.py")
    assert not [x for x in sources if "uncalibrated" in x.read_text(encoding="utf-8")]


def programs() -> None:
    exits("bench")
    exits("report")
    no_modules("bench", "report")
    assert (ROOT / "benchmarks" / "__main__.py").exists()


def bytes_received() -> None:
    assert not hasattr(distributed.RingPlan, "nbytes")
    plan = distributed.RingPlan.build(sr.Causal(), 64, 2)
    assert plan.bytes_received(1, num_kv_heads=1, head_dim=8, dtype=torch.float32) > 0


def images() -> None:
    names = ("pattern_png", "patterns_png", "kept_png", "loss_png", "speed_png", "traffic_png")
    assert not any(hasattr(plots, name) for name in names)
    for kind, start in (("png", b"\x89PNG"), ("svg", b"<?xml")):
        assert attended.pattern_image(sr.Causal(), 64, kind=kind).startswith(start)
    now = (attended.patterns_image, attended.kept_image, losses.loss_image, losses.speed_image)
    for function in (*now, traffic.traffic_image):
        assert "kind" in inspect.signature(function).parameters


def own_figures() -> None:
    names = ("decoding_png", "sweeps_png", "draw_pattern", "pair_shares", "require_matplotlib")
    assert not any(hasattr(plots, name) for name in names)


def documents() -> None:
    packed = sr.Packed((3, 5), sr.Causal())
    expected = torch.block_diag(torch.ones(3, 3), torch.ones(5, 5)).bool()
    assert sr.Documents(packed.lengths).to_dense(8)[0].equal(expected)


def remainder() -> None:
    assert not hasattr(selection, "remainder_attention") and sr.merge_attention


def prefetch() -> None:
    assert not hasattr(layout_cache, "prefetch") and not hasattr(distributed, "prefetch")


def models_of_old_transformers() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(transformers, "__version__", "5.22.1")
        with pytest.raises(ImportError, match=r"needs transformers 5\.23 or newer, got 5\.22\.1; "):
            importlib.reload(hf)  # which raises before it defines anything


def checkpoints(tmp_path: Path, told: dict[str, Any]) -> None:
    (tmp_path / "checkpoint.json").write_text(json.dumps(told))
    with pytest.raises(ValueError, match=r"expected a checkpoint of version 0\.2\.0 in "):
        load_checkpoint(tmp_path)


PRIVATE = (
    "extras",
    "dispatch",
    "ops",
    "differentiable",
    "files",
    "dropout",
    "numerics",
    "pairs",
    "rows",
)
CHECKS = {
    '`backend="flex"`': flex,
    '`backend="sdpa"` for a pattern of your own': sdpa,
    "`sparsering calibrate`": calibrate,
    "`sparsering bench`": programs,
    "`RingPlan.nbytes`": bytes_received,
    "`Packed.documents`": documents,
    "`RingPlan.owners_at`": lambda: None,  # the names of the row are gone, by the test above
    "`plots.pattern_png`": images,
    "`plots.decoding_png`": own_figures,
    "`selection.remainder_attention`": remainder,
    "`layout_cache.prefetch`": prefetch,
    "`sparsering.cost`": lambda: no_modules("cost", "planner"),
    "private modules: ": lambda: no_modules(*PRIVATE),
    "transformers below 5.23": models_of_old_transformers,
}
# Checkpoints of 0.1, and those of 0.2.0 in parts, which are read through pickle.
REFUSED = {
    "checkpoints of 0.1": {"format": "sparsering checkpoint 1"},
    "a run that groups of ranks": {
        "format": "sparsering checkpoint 2",
        "tensors": {"folder": "parts", "files": {".metadata": "0"}},
    },
}


def test_each_row_has_a_check():
    starts = [*CHECKS, *REFUSED]
    for old, _ in ROWS:
        assert sum(old.startswith(start) for start in starts) == 1, old
    assert len(ROWS) == len(starts)


@pytest.mark.parametrize("start", CHECKS)
def test_what_a_row_says_is_gone_is_gone(start):
    CHECKS[start]()


@pytest.mark.parametrize("start", REFUSED)
def test_checkpoints_of_a_row_are_refused(start, tmp_path):
    checkpoints(tmp_path, REFUSED[start])
