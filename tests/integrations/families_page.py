"""Writes and reads docs/families.md: a line of its tables for a model type that runs, or a list.

`place(run, ranks)` says where a type stands: as the cells of its line, or as the list that it is
in. Reasons are sentences of `CAUSES`, which the page numbers; one without a sentence is an error.
"""

import functools
import json
import re
from pathlib import Path
from typing import Any, NamedTuple

import transformers
from indexed_caches import CACHES, FAMILIES, WAYS
from running_families import INPUTS, Run
from transformers.models.auto.configuration_auto import (
    CONFIG_MAPPING_NAMES,
    model_type_to_module_name,
)

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "families.md"
_MODELS = Path(transformers.__file__).parent / "models"
_COLUMNS = (
    *("model type", "register", "apply", "using", "cache", "over ranks", "convert", "masks"),
    "speed and memory",
)


class Line(NamedTuple):
    """A model type's line: the table that it is in, and the cells after its name."""

    table: str
    register: str
    apply: str
    using: str
    cache: str
    ranks: str
    convert: str
    masks: str
    speed: str


CAUSES = (  # of "no": what an error says, and the sentence of the page
    (
        "does not ask transformers' attention interface|does not use the attention interface",
        "Its classes compute attention themselves and do not ask transformers' interface.",
    ),
    (
        "uses its attention mask as a tensor",
        "The model computes with its mask as a tensor, outside attention.",
    ),
    (
        "indexer chooses keys",
        "An indexer of the model chooses the keys, so no pattern can replace its mask.",
    ),
    (
        "got (a mask|one) of all pairs",
        "The model makes a mask of all pairs itself. Only `using` may replace it.",
    ),
    (
        "got a bias for each pair|got a function of the model's own",
        "The model adds a bias for each pair that does not depend on distance alone, or has a mask "
        "function of its own.",
    ),
    (
        "must be self-attention|whole sequence in each call, got \\d+ queries of",
        "Its cross attention looks like self-attention; name the other layers, as "
        "`{index: pattern}`.",
    ),
    (
        "the model's mask is for \\d+ queries",
        "The model calls attention for other shapes than those of its mask.",
    ),
    (
        "attends once over the keys",
        "`SparseCache` needs keys that are attended once: this model caches latents, shares keys "
        "among layers, or attends in halves. Its default cache works.",
    ),
    (
        "needs a pattern for each layer|SparseCache stores keys for|object has no attribute",
        "`SparseCache` knows full attention, windows and chunks; this model has other layers. Its "
        "default cache works.",
    ),
    (
        "equal to sdpa",
        'Without a mask, eager looks both ways and sdpa back; "sparsering" is equal to sdpa.',
    ),
    (
        "its layers of type .* are not attention",
        "Over ranks: some layers mix tokens otherwise than by attention over a mask (a state "
        "space, linear attention, a convolution). glm5_next and qwen4_exp run with "
        "`layer_types` of indexed layers alone.",
    ),
    (
        "derives positions from",
        "Over ranks: its positions come from the padding of the whole row, of which a rank has a "
        "part. OPT runs with `position_ids`.",
    ),
    (
        "joins neighbouring tokens|join neighbouring tokens|joins tokens without attention",
        "Over ranks: its embeddings or projections join neighbouring tokens.",
    ),
    (
        "does not say how many layers|takes no position_ids|layers use the attention interface",
        "Over ranks: it takes no positions, or its layers do not all show what they do.",
    ),
    (
        "scales embeddings by the padding",
        "Over ranks: its embeddings are scaled by the padding and the masked tokens of the whole "
        "row.",
    ),
)


# --- a place -------------------------------------------------------------------------------------


def place(run: Run, ranks: str = "") -> Line | str:
    """Returns a type's line, or the name of the list that it belongs to."""
    converts = run.convert == "equal"
    if run.built == "equal" and (converts or run.register not in ("not called", _RANDOM)):
        return Line(
            run.inputs,
            cell(run.apply if converts else run.register),
            cell(run.apply),
            cell(run.apply if converts else run.using),
            _cache(run),
            cell(ranks),
            "equal" if converts else "-",
            ", ".join(run.masks) or "-",
            speeds().get(run.kind, "-"),
        )
    source = section(run.kind)
    if source != "asks":
        return {"own": _OWN, "none": _NONE}[source]
    return _why_not_run(run)


def cell(result: str) -> str:
    """Returns "equal", "-" for what was not tried, or "no" and the number of a cause."""
    if result in ("equal", "runs"):
        return "equal"
    if result in ("", "changes nothing"):  # a tiny image has fewer tokens than the window
        return "-"
    return f"no, {_number(result)}"


def _number(result: str) -> int:
    for number, (expression, _) in enumerate(CAUSES, 1):
        if re.search(expression, result):
            return number
    raise ValueError(f"families_page.CAUSES has no sentence for: {result}")


def _cache(run: Run) -> str:
    if run.sparse_cache == "equal":
        return "SparseCache"
    if run.own_cache == "equal":
        return f"own; {_number(run.sparse_cache)}"
    assert run.own_cache == "", run
    return "-"


_RANDOM = "eager differs from itself"
_OWN = "Attention of their own"
_NONE = "Made of other models, or without softmax attention"
_PARTS = "Parts of other models"
_PACKAGES = "Packages that are missing"
_INPUTS = "Other inputs"
_IDLE = "No layer that asks"
_SIZES = "No small model"
LISTS = {
    _OWN: "They compute a softmax in their own classes and do not ask the interface, so `load`, "
    "`apply` and `using` refuse them by name.",
    _NONE: "Their code has no softmax. They are made of other models of this page, which are "
    "reached as said there, or mix tokens otherwise (convolutions, state spaces, pooling).",
    _PARTS: "They ask the interface, and run as parts of the models that have them: transformers "
    "builds no model from their config alone.",
    _PACKAGES: "They ask the interface. The run lacks a package that their code imports, such as "
    "timm or scipy.",
    _INPUTS: "They ask the interface. The run does not make their inputs: boxes, masks and points, "
    "codes, series, grids of patches, or images of a fixed size.",
    _IDLE: "Their code asks the interface, but no layer of the small model did: it has none, "
    "or attention of its own, and `apply` refuses it by name. vit_mae gives random results.",
    _SIZES: "They ask the interface. The run found no small config that their class accepts, or no "
    "small one is fast.",
}


def _why_not_run(run: Run) -> str:
    if run.built == "equal":
        return _IDLE
    if run.built.startswith("LookupError"):
        return _PARTS
    if run.built.startswith(("ImportError", "ModuleNotFoundError")):
        return _PACKAGES
    return _INPUTS if run.built.startswith("no inputs") else _SIZES


def section(kind: str) -> str:
    """Returns by a type's source how its attention is reached: "asks", "own" or "none"."""
    folder = _MODELS / model_type_to_module_name(kind)
    source = "".join(x.read_text(encoding="utf-8") for x in folder.glob("modeling_*.py"))
    if "ALL_ATTENTION_FUNCTIONS" in source:
        return "asks"
    return "own" if "softmax(" in source.lower() else "none"


# --- records -------------------------------------------------------------------------------------


@functools.cache
def speeds() -> dict[str, str]:
    """Returns, by model type, how much faster and smaller a recorded pass over tokens is."""
    found = {}
    for name in ("transformers", "converted", "indexed"):
        path = ROOT / "benchmarks" / "records" / f"{name}.json"
        rows = json.loads(path.read_text(encoding="utf-8"))["rows"]
        passes = [x for x in rows if x["case"] in ("prefill", "converted")]
        for model in {x["model"] for x in passes} & {*CONFIG_MAPPING_NAMES}:
            of_model = [x for x in passes if x["model"] == model and not x.get("backward")]
            if (text := _speed(of_model)) and model not in found:
                found[model] = f"[{text}](../benchmarks/records/{name}.json)"
    return found


def _speed(rows: list[dict[str, Any]]) -> str:
    for tokens in sorted({x["tokens"] for x in rows}, reverse=True):
        at = {x["attention"]: x for x in rows if x["tokens"] == tokens}
        for other in ("sdpa", "original", "eager"):
            if "sparsering" in at and other in at:
                ours, theirs = at["sparsering"], at[other]
                time, size = theirs["ms"] / ours["ms"], ours["peak_bytes"] / theirs["peak_bytes"]
                text = f"{tokens:,} tokens: {time:.1f}x as fast as {other}, "
                return text + f"{size:.2f} of its bytes"
    return ""


# --- the page ------------------------------------------------------------------------------------

_TEXT = """# Families of transformers

Find your model's type, `AutoConfig.from_pretrained(name).model_type`, on this page (all {total}
types of transformers {version} are here). Then:

| the page says | write |
| --- | --- |
| register: equal | `hf.register()`, then `attn_implementation="sparsering"`; or `hf.load(path)` |
| apply: equal | `hf.apply(model, pattern)`: your pattern in place of the model's windows |
| using: equal | `with hf.using(model, pattern):` exactly that pattern, in this block |
| cache: SparseCache | `model.generate(..., past_key_values=hf.SparseCache(model))` |
| over ranks: equal | `hf.parallelize(model, group)`: several processes share each call |
| convert: equal | `hf.convert(model)`, as for Longformer below |

```python
from transformers import LongformerConfig, LongformerModel

from sparsering.integrations import transformers as hf

sizes = {{"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}}
config = LongformerConfig(**sizes, num_attention_heads=4, attention_window=64)
assert config.model_type == "longformer"  # its line says: convert
model = LongformerModel(config)  # or from_pretrained(name)
print(hf.convert(model))  # names of the modules that changed
```

[Models of transformers](transformers.md) explains each way, [A model over many ranks](parallel.md)
the ranks. `hf.explain(model)` says what each layer runs. Chronos-2 of the package
chronos-forecasting has `convert` too.

## The tables

Each line is a run, and a test. A tiny model of the type with random weights is called in float64
with padded text (or with an image, a sound, or patches). These are equal, within 1e-9 of the
largest value:

- **register**: outputs and gradients, to those of eager attention (minimax_m3_vl without padding:
  [indexed.md](indexed.md#models-of-transformers) says why).
- **apply**, **using**: outputs, to dense attention over the same pattern (a window and a global
  token).
- **cache**: the logits of a prompt and of single tokens, to eager without a cache. "own" is the
  family's own cache, which works under "sparsering"; the number says why `SparseCache` does not.
- **over ranks**: loss, logits and gradients of two processes, to those of one, for a padded and for
  a packed batch (documents). Only text decoders, and encoders with a head for masked tokens, were
  tried.
- **convert**: outputs, to those of the original.

How to read a cell:

- "no, 3" means that the call raises an error, for the reason in sentence 3 of [why not](#why-not).
- "-" means that it was not tried, or that it makes no sense for this type.
- **masks** lists the masks of the tiny model's layers. The size of a window includes the query's
  own token. "a function of its own" and "a tensor of pairs" mean that the model builds its mask
  itself. Then "sparsering" may have to compute all pairs.
- Speeds were measured on a model with the family's shape, at the longest input that has a record.

{tables}
### Caches of indexed families

Where an indexer chooses keys, `generate` gives the tokens and logits of eager attention under
"sparsering" in these ways: greedy, beams, assisted (`prompt_lookup_num_tokens`) and a prompt in
chunks (`prefill_chunk_size`), with padding on the left and without. MiniMax-M3 behind padding is
equal to eager on the row alone. transformers refuses the ways that are not named, under eager too
("-": all four). Columns are values of `cache_implementation`; sliding layers (dots3_note) are part
of them. "quantized" is fp8 here. Offloaded caches ran on a CPU, where nothing moves, and on no GPU.

{caches}
## Why not

{causes}

## Types without a line

{lists}
Do not edit this page: `python tools/tabulate_families.py` writes it from the runs, in about 7
minutes on 2 cores. `make test` runs some of its lines again, `make test-all` all of them.
"""


def ways_cell(found: list[str]) -> str:
    """Returns the cell of a cache in which these ways to generate are equal to eager's."""
    return "all" if found == [*WAYS] else ", ".join(found) or "-"


def page(places: dict[str, Line | str], caches: dict[tuple[str, str], str]) -> str:
    """Returns the text of docs/families.md; `caches` has a cell for each (family, cache)."""
    lines = {kind: x for kind, x in places.items() if isinstance(x, Line)}
    tables = []
    for table in INPUTS:
        rows = [(f"`{kind}`", *x[1:]) for kind, x in sorted(lines.items()) if x.table == table]
        head = [_COLUMNS, ("---",) * len(_COLUMNS)]
        body = "\n".join("| " + " | ".join(row) + " |" for row in [*head, *rows])
        tables.append(f"### {table}\n\n{len(rows)} types.\n\n{body}\n")
    lists = []
    for name, sentence in LISTS.items():
        kinds = sorted(kind for kind, x in places.items() if x == name)
        names = ", ".join(f"`{kind}`" for kind in kinds)
        folded = f"<details>\n<summary>{len(kinds)} types</summary>\n\n{names}\n\n</details>\n"
        lists.append(f"### {name}\n\n{sentence}\n\n{folded}")
    head = [("model type", *(f"`{x}`" for x in CACHES)), ("---",) * (len(CACHES) + 1)]
    rows = [(f"`{x}`", *(caches[x, y] for y in CACHES)) for x in FAMILIES]
    of_caches = "".join("| " + " | ".join(row) + " |\n" for row in [*head, *rows])
    return _TEXT.format(
        caches=of_caches,
        total=len(places),
        version=transformers.__version__,
        tables="\n".join(tables),
        causes="\n".join(f"{i}. {sentence}" for i, (_, sentence) in enumerate(CAUSES, 1)),
        lists="\n".join(lists),
    )


def caches_of_page() -> dict[tuple[str, str], str]:
    """Reads the cells of the table of caches in docs/families.md, by (family, cache)."""
    text = PAGE.read_text(encoding="utf-8").split("### Caches of indexed families")[1]
    found = {}
    for line in text.split("## Why not")[0].splitlines():
        if line.startswith("| `"):
            kind, *cells = (x.strip() for x in line.strip("|").split(" | "))
            found |= {(kind.strip("`"), x): cell for x, cell in zip(CACHES, cells, strict=True)}
    return found


def places_of_page() -> list[tuple[str, Line | str]]:
    """Reads docs/families.md: each model type that it names, and where."""
    found: list[tuple[str, Line | str]] = []
    heading = ""
    for line in PAGE.read_text(encoding="utf-8").splitlines():
        if line.startswith("### "):
            heading = line.removeprefix("### ")
        elif heading in INPUTS and line.startswith("| `"):
            kind, *cells = (x.strip() for x in line.strip("|").split(" | "))
            found.append((kind.strip("`"), Line(heading, *cells)))
        elif heading in LISTS and line.startswith("`"):
            found += [(x.strip("`"), heading) for x in line.split(", ")]
    return found
