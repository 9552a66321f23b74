"""Compares "sparsering" with eager attention, for test_transformers_registered_first.py."""

import torch
from torch import Tensor
from transformers_families import tiny

_TYPES = {"gemma3": "token_type_ids"}  # of a model's argument that marks tokens of images


def compared(name: str) -> str:
    """Returns "equal", or how far the results of both attentions are apart, or an error's text.

    Tokens of "gemma3 with images" are marked as those of two images, which see themselves whole.
    """
    family, *images = name.split(" with ")
    torch.manual_seed(3)
    batch: dict[str, Tensor] = {"input_ids": torch.randint(4, 61, (2, 13))}
    more = {"use_bidirectional_attention": "vision"} if images and family != "gemma3" else {}
    implementation = "eager"
    try:
        model = tiny(family, **more)
        if images:
            plain = model(**batch).logits
            marks = torch.zeros(2, 13, dtype=torch.int64)
            marks[0, 2:6] = marks[0, 8:12] = 1
            batch[_TYPES.get(family, "mm_token_type_ids")] = marks
        outs: list[Tensor] = []
        for implementation in ("eager", "sparsering"):
            model.set_attn_implementation(implementation)
            with torch.no_grad():
                outs.append(model(**batch).logits)
    except Exception as error:
        return f"{implementation}: {type(error).__name__}: {error}"
    wanted, got = outs
    if images and (plain - wanted).abs().max() < 1e-3:
        return "images change nothing"
    difference = (got - wanted).abs().max().item()
    return "equal" if difference < 1e-5 * wanted.abs().max().item() else f"apart by {difference}"
