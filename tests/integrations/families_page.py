"""Sorts every model type of transformers by how its attention is reached: docs/families.md."""

from pathlib import Path

import transformers
from transformers.models.auto.configuration_auto import (
    CONFIG_MAPPING_NAMES,
    model_type_to_module_name,
)

from sparsering.integrations.transformers.converted import _OURS

PAGE = Path(__file__).resolve().parents[2] / "docs" / "families.md"
_MODELS = Path(transformers.__file__).parent / "models"
_TEXT = """# Families of transformers

{total} model types of transformers {version}, by how sparsering reaches their attention. Find
yours: `AutoConfig.from_pretrained(name).model_type`.

```python
from sparsering.integrations import transformers as hf

hf.register()  # then attn_implementation="sparsering", or hf.load(path)
```

Do not edit this page: `python tools/tabulate_families.py` writes it from the sources of
transformers, and a test compares it with them. What runs over ranks is in
[another table](parallel-families.md), from runs.

## `register`, `load`, `apply`, `using`

Their code asks transformers' attention interface, in all their layers or in some.
`hf.explain(model)` says what each layer runs, and a mask or option that is not supported is an
error by its name. The tests run every causal family, BERT, ModernBERT, T5 and ViT of them. {asks}

## `convert`

Attention of their own, which `hf.convert(model)` replaces
([how](transformers.md#families-with-attention-of-their-own-convert)): {convert}, and chronos-2 of
the package chronos-forecasting.

## Attention of their own

They compute a softmax in their own classes and do not ask the interface, so `apply`, `using` and
`load` refuse them by name. {own}

## Made of other models, or without softmax attention

Their own code has no softmax: they are made of other models of this page, which are reached as
said there, or mix tokens otherwise (convolutions, state spaces, pooling). {none}
"""


def sorted_types() -> dict[str, list[str]]:
    """Returns the model types of each section of the page."""
    found: dict[str, list[str]] = {"asks": [], "convert": [], "own": [], "none": []}
    for kind in sorted(CONFIG_MAPPING_NAMES):
        folder = _MODELS / model_type_to_module_name(kind)
        source = "".join(x.read_text(encoding="utf-8") for x in folder.glob("modeling_*.py"))
        if any(f"class {name}(" in source for name in _OURS):
            found["convert"].append(kind)
        elif "ALL_ATTENTION_FUNCTIONS" in source:
            found["asks"].append(kind)
        else:
            found["own" if "softmax(" in source.lower() else "none"].append(kind)
    return found


def families_page() -> str:
    """Returns the text of docs/families.md."""
    found = sorted_types()
    lists = {name: ", ".join(f"`{x}`" for x in kinds) for name, kinds in found.items()}
    counts = {name: f"{len(kinds)} types:\n{lists[name]}." for name, kinds in found.items()}
    counts["convert"] = lists["convert"]
    total = sum(map(len, found.values()))
    return _TEXT.format(total=total, version=transformers.__version__, **counts)
