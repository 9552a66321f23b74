"""Trains a small block-diffusion language model on text, beside a causal one of equal steps.

    python examples/train_diffusion.py                     # some minutes on two cores
    python examples/train_diffusion.py --steps 30          # a look

Both models read bytes, and have the same layers and data. The diffusion model (arXiv 2503.09573)
sees n noisy tokens, then the same n clean ones, under the mask `BlockDiffusion(n, size)`: all of
its blocks are trained in one pass. In a block, a share t of the tokens is hidden; the loss is the
mean of -log p of each hidden token, divided by t, which bounds the nats of a byte from above. The
causal model's loss is the nats of a byte. At the end the diffusion model writes text, block by
block: `KVCache.attend(keep=False)` computes each denoising step, and the last call keeps the block.
"""

import argparse
import time
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import sparsering as sr
from sparsering.cli.argument_types import positive
from sparsering.mistakes import OneLineParser, one_line_errors
from sparsering.training import read_text

HIDDEN, VOCABULARY = 256, 257  # the id of a hidden token; all bytes and it


class Model(nn.Module):
    """A transformer whose layers attend over a pattern, or to a cache each."""

    def __init__(self, tokens: int, width: int = 128, layers: int = 4, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.token, self.place = nn.Embedding(VOCABULARY, width), nn.Embedding(tokens, width)
        self.layers = nn.ModuleList(
            nn.ModuleDict(
                {
                    "norm": nn.LayerNorm(width),
                    "qkv": nn.Linear(width, 3 * width),
                    "out": nn.Linear(width, width),
                    "mlp": nn.Sequential(
                        nn.LayerNorm(width),
                        nn.Linear(width, 4 * width),
                        nn.GELU(),
                        nn.Linear(4 * width, width),
                    ),
                }
            )
            for _ in range(layers)
        )
        self.head = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 256))

    def forward(
        self,
        tokens: Tensor,
        places: Tensor,
        pattern: sr.Pattern | None = None,
        caches: list[sr.KVCache] | None = None,
        keep: bool = True,
    ) -> Tensor:
        """Returns logits [B, N, 256] of tokens [B, N] at their places [N]."""
        x = self.token(tokens) + self.place(places)
        for number, layer in enumerate(self.layers):
            shape = (*x.shape[:2], 3, self.heads, -1)
            query, key, value = layer["qkv"](layer["norm"](x)).view(shape).permute(2, 0, 3, 1, 4)
            if caches is None:
                y = sr.attention(query, key, value, pattern)
            else:
                y = caches[number].attend(query, key, value, keep=keep)
            x = x + layer["out"](y.transpose(1, 2).flatten(2))
            x = x + layer["mlp"](x)
        return self.head(x)


def drawn(data: Tensor, n: int, batch: int, generator: torch.Generator) -> Tensor:
    """Draws texts [batch, n] from bytes."""
    starts = torch.randint(len(data) - n, (batch,), generator=generator).tolist()
    return torch.stack([data[start : start + n] for start in starts]).long()


def diffusion_loss(model: Model, clean: Tensor, size: int, generator: torch.Generator) -> Tensor:
    """Returns the bound in nats a byte, for texts [B, N]; draws a share of each block to hide."""
    batch, n = clean.shape
    share = torch.rand(batch, n // size, generator=generator).clamp(min=1 / size)
    share = share.repeat_interleave(size, 1)
    hidden = torch.rand(batch, n, generator=generator) < share
    both = torch.cat((clean.masked_fill(hidden, HIDDEN), clean), 1)
    places = torch.arange(n).repeat(2)
    logits = model(both, places, sr.BlockDiffusion(n, size))[:, :n]
    losses = F.cross_entropy(logits.transpose(1, 2), clean, reduction="none")
    return (losses * hidden / share).mean()


def causal_loss(model: Model, clean: Tensor) -> Tensor:
    """Returns the nats a byte of texts [B, N]; the first byte is guessed from a hidden token."""
    before = F.pad(clean[:, :-1], (1, 0), value=HIDDEN)
    logits = model(before, torch.arange(clean.shape[1]), sr.Causal())
    return F.cross_entropy(logits.transpose(1, 2), clean)


@torch.no_grad()
def written(model: Model, prompt: Tensor, tokens: int, size: int, rounds: int) -> Tensor:
    """Writes behind a prompt [1, n] of whole blocks: each block by `rounds` denoising steps."""
    width = model.token.weight.shape[1] // model.heads
    caches = [
        sr.KVCache(sr.BlockCausal(size), 1, num_kv_heads=model.heads, head_dim=width)
        for _ in model.layers
    ]
    model(prompt, torch.arange(prompt.shape[1]), caches=caches)
    text = [prompt]
    for start in range(prompt.shape[1], prompt.shape[1] + tokens, size):
        block, places = torch.full((1, size), HIDDEN), torch.arange(start, start + size)
        for left in range(rounds, 0, -1):
            chances = model(block, places, caches=caches, keep=False).softmax(-1)
            best, token = chances.max(-1)
            best = best.masked_fill(block != HIDDEN, -1)
            number = -(-int((block == HIDDEN).sum()) // left)  # the surest of those that are left
            surest = best[0].topk(number).indices
            block[0, surest] = token[0, surest]
        model(block, places, caches=caches)  # the final block is kept
        text.append(block)
    return torch.cat(text, 1)


def main(arguments: list[str] | None = None) -> dict[str, float]:
    """Trains both models; prints and returns their losses on validation text."""
    parser = OneLineParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=positive, default=400, help="of each model (default 400)")
    parser.add_argument("--tokens", type=positive, default=256, help="of a text (default 256)")
    parser.add_argument("--size", type=positive, default=8, help="tokens of a block (default 8)")
    parser.add_argument("--batch-size", type=positive, default=8, help="texts (default 8)")
    parser.add_argument("--text", type=Path, help="a file or folder; default: Python's own modules")
    given = parser.parse_args(arguments)
    n, size = given.tokens, given.size
    if n % (2 * size):
        raise ValueError(
            f"--tokens must be a multiple of two blocks of --size {size}, got {n}; for example "
            f"{max(1, n // (2 * size)) * 2 * size}"
        )
    text = read_text(given.text, context=n)
    losses = {}
    for kind in ("diffusion", "causal"):
        torch.manual_seed(0)
        generator, texts = (torch.Generator().manual_seed(seed) for seed in (1, 2))
        model = Model(n)

        def loss_of(clean: Tensor, kind: str = kind, model: Model = model) -> Tensor:
            if kind == "causal":
                return causal_loss(model, clean)
            return diffusion_loss(model, clean, size, generator)  # noqa: B023

        optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.01)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, max(2, given.steps))
        begin = time.perf_counter()
        for step in range(given.steps):
            loss = loss_of(drawn(text.train, n, given.batch_size, texts))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
            if step % 100 == 0:
                print(f"{kind} step {step}: {loss.item():.3f} nats a byte", flush=True)
        seconds = time.perf_counter() - begin
        model.eval()
        generator.manual_seed(3), texts.manual_seed(4)
        with torch.no_grad():
            parts = [drawn(text.validation, n, 8, texts) for _ in range(16)]
            losses[kind] = sum(loss_of(part).item() for part in parts) / len(parts)
        bound = "at most " if kind == "diffusion" else ""
        print(f"{kind}: {bound}{losses[kind]:.3f} nats a byte of validation text, {seconds:.0f} s")
        if kind == "diffusion":
            prompt = parts[0][:1, : n // 2]
            found = written(model, prompt, n // 4 // size * size, size, rounds=max(1, size // 2))
            tail = bytes(found[0, prompt.shape[1] :].tolist())
            print("written by blocks:", tail.decode("utf-8", "replace"))
    return losses


if __name__ == "__main__":
    with one_line_errors("train_diffusion"):
        main()
