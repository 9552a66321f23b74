"""`convert`: sparse attention for families that do not ask transformers' attention interface."""

from typing import Any

from ....checks import check_module
from ....ground.keywords import with_hints
from ..families import CONVERTED, CONVERTED_NAMES, MASK_BUILDERS


@with_hints()
def convert(model: Any) -> list[str]:
    """Lets Longformer, LED, Chronos-2 or DiNAT attend at the cost of their patterns, in place.

    Results and gradients are the originals'. Modules stay the same objects, with their parameters
    and hooks; only their class changes. Longformer's and LED's global tokens come with each call as
    ever (`global_attention_mask`), and so do Chronos-2's groups (`group_ids`). Rows of padding, and
    series at times without values, may differ. In training, other attention weights are dropped.
    DiNAT is computed as its authors define it, without NATTEN: `without_natten` lets transformers
    make the model.

    Args:
        model: a model of transformers, or a `Chronos2Model` (package chronos-forecasting).

    Returns: names of the modules that were converted now; [] if all were before.

    Raises: ValueError for a model of another family.

    Example:
        >>> convert(AutoModel.from_pretrained("allenai/longformer-base-4096"))
    """
    check_module("model", model)
    modules = dict(model.named_modules())
    ours = tuple(row.runs for row in CONVERTED.values())
    kinds = {name: type(x).__name__ for name, x in modules.items()}
    found = {name: CONVERTED[kind].runs for name, kind in kinds.items() if kind in CONVERTED}
    if not found and not any(isinstance(x, ours) for x in modules.values()):
        raise ValueError(
            f"expected a model of one of the families {CONVERTED_NAMES}, got "
            f"{type(model).__name__}; most other families take hf.register() or hf.apply"
        )
    for name, cls in found.items():
        modules[name].__class__ = cls
    for module in modules.values():
        for name, builds in MASK_BUILDERS.items():
            if hasattr(module, name):
                setattr(module, name, builds)
    return list(found)
