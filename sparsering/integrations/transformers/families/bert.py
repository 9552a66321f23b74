"""BERT's relatives, over ranks: embeddings and losses that need tokens of other ranks.

MobileBERT joins neighboring tokens, ESM scales by the padding or the masked tokens, and ModernBERT
predicts only the tokens that have a label.
"""

import inspect
from collections.abc import Callable
from typing import Any


def embeds_by_mask(model: Any, _: Any) -> str | None:
    """Returns why ranks cannot share embeddings that depend on the attention mask, as ESM's do."""
    for path, module in model.named_modules():
        name = type(module).__name__
        if name.endswith("Embeddings") and (
            "attention_mask" in inspect.signature(module.forward).parameters
        ):
            return (
                f"{path} ({name}) scales embeddings by the padding or the masked tokens of the "
                "whole row"
            )
    return None


def joins_neighbours(_: Any, config: Any) -> str | None:
    """Returns why ranks cannot share embeddings that join neighboring tokens, as MobileBERT's."""
    if getattr(config, "trigram_input", False):
        return "its embeddings join neighbouring tokens (trigram_input)"
    return None


def predicts_some_tokens(model: Any, _: Any) -> str | None:
    """Returns why ranks cannot share a ModernBERT that ignores another label than -100."""
    if getattr(model, "sparse_prediction", False) and model.sparse_pred_ignore_index != -100:
        return "its config sets a sparse_pred_ignore_index other than -100"
    return None


AGAINST_RANKS: tuple[Callable[[Any, Any], str | None], ...] = (
    embeds_by_mask,
    joins_neighbours,
    predicts_some_tokens,
)
"""Functions of a model and its decoder's config: why ranks cannot share its calls, or None."""
