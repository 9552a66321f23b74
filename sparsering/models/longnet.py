"""A causal byte-level language model whose attention follows any sparsering pattern.

    model = LongNetLM(LongNet((1024, 4096), (1, 4)), width=128, num_layers=4, num_heads=2)
    loss = model.loss(tokens, targets)             # int64 [B, N] bytes and the bytes after them
    text = model.sample(b"def ", num_bytes=200)

A plain pre-norm transformer: RMSNorm, rotary positions, normalised queries and keys, a squared-ReLU
MLP, and one table of embeddings that also reads out the logits. Only the call of `attend` knows of
sparsity.
"""

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ..functional import attention
from ..nn.rope import rotary_table
from ..nn.transformer import Attend, Block
from ..patterns.algebra import And, Pattern
from ..patterns.positions import Causal

READOUT_TOKENS = 4096  # logits exist for this many tokens at a time


def dense_causal_attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Equals `attention(query, key, value, Causal())`, by torch's own dense kernel; to compare."""
    return F.scaled_dot_product_attention(query, key, value, is_causal=True)


class LongNetLM(nn.Module):
    """Predicts each byte from the bytes before it.

    Args:
        pattern: any pattern; pairs that look ahead are taken out (`& Causal()`).
        width: channels of the residual stream; a multiple of num_heads, with an even head dim.
        num_layers, num_heads: transformer blocks, and attention heads in each.
        mlp_ratio: MLP channels per channel of width.
        vocab_size: number of tokens; 256 for bytes.
        rope_base: wavelengths of the rotary positions run from 2 pi to about 2 pi rope_base tokens.
        checkpoint_layers: keep only each block's input for backward and run the block again there.

    Weights are drawn from torch's global generator: call `torch.manual_seed` before.

    Raises: ValueError where width and num_heads do not fit.

    Source: LongNet (arXiv 2307.02486), section 3; RoFormer (arXiv 2104.09864) for the rotary
    positions.
    """

    def __init__(
        self,
        pattern: Pattern,
        *,
        width: int = 128,
        num_layers: int = 4,
        num_heads: int = 2,
        mlp_ratio: int = 4,
        vocab_size: int = 256,
        rope_base: float = 10000.0,
        checkpoint_layers: bool = False,
    ) -> None:
        super().__init__()
        if width % num_heads or width // num_heads % 2:
            raise ValueError(
                f"width must be num_heads times an even head dim, got width {width} and "
                f"{num_heads} heads; width {num_heads * 64} gives heads of 64"
            )
        self.pattern = without_lookahead(pattern)
        self.attend: Attend = partial(attention, pattern=self.pattern)
        self.num_heads = num_heads
        self.rope_base = rope_base
        self.checkpoint_layers = checkpoint_layers
        self.embedding = nn.Embedding(vocab_size, width)
        self.blocks = nn.ModuleList(
            Block(width, num_heads, mlp_ratio * width) for _ in range(num_layers)
        )
        self.norm = nn.RMSNorm(width)
        nn.init.normal_(self.embedding.weight, std=0.02)  # small, as it is also the readout

    def forward(self, tokens: Tensor, *, attend: Attend | None = None) -> Tensor:
        """Scores the byte after each position.

        Args:
            tokens: int64 [B, N].
            attend: maps (query, key, value), each [B, H, N, D], to [B, H, N, D]; default: the
                model's pattern.

        Returns: logits [B, N, vocab_size]; those at position i depend on tokens 0..i alone.
        """
        return F.linear(self.hidden(tokens, attend=attend), self.embedding.weight)

    def hidden(
        self, tokens: Tensor, *, attend: Attend | None = None, positions: Tensor | None = None
    ) -> Tensor:
        """The normalised residual stream [B, N, width] that the logits are read from.

        Args:
            tokens, attend: as `forward`.
            positions: int64 [N], where the tokens stand in the sequence that `attend` sees; default
                0 .. N - 1.
        """
        attend = attend or self.attend
        x = self.embedding(tokens)  # [B, N, width]
        x = F.rms_norm(x, x.shape[-1:])
        cos, sin = rotary_table(
            tokens.shape[1], x.shape[-1] // self.num_heads, self.rope_base, x.device, positions
        )
        for block in self.blocks:
            if self.checkpoint_layers and torch.is_grad_enabled():
                x = checkpoint(block, x, cos, sin, attend, use_reentrant=False)
            else:
                x = block(x, cos, sin, attend)
        return self.norm(x)

    def loss(
        self,
        tokens: Tensor,
        targets: Tensor,
        *,
        attend: Attend | None = None,
        positions: Tensor | None = None,
        num_targets: int | None = None,
    ) -> Tensor:
        """Mean cross-entropy in nats per byte, without ever holding all logits.

        Args:
            tokens, targets: int64 [B, N]; `targets[b, i]` is the byte after `tokens[b, i]`.
            attend: as `forward`.
            positions: as `hidden`.
            num_targets: what the sum is divided by; default all of `targets`. A rank that has a
                part of a step's targets passes the number of all, and the parts add up to the mean.

        Cost: READOUT_TOKENS x vocab_size logits at a time; backward computes them again.
        """
        hidden = self.hidden(tokens, attend=attend, positions=positions)
        x = hidden.flatten(0, 1).split(READOUT_TOKENS)
        y = targets.flatten().split(READOUT_TOKENS)
        weight = self.embedding.weight
        sums = [
            checkpoint(readout_loss, a, weight, b, use_reentrant=False)
            for a, b in zip(x, y, strict=True)
        ]
        return torch.stack(sums).sum() / (num_targets or targets.numel())

    @torch.no_grad()
    def sample(
        self,
        prompt: bytes,
        num_bytes: int,
        *,
        temperature: float = 0.7,
        window: int = 512,
        seed: int = 0,
    ) -> bytes:
        """Continues a text, one byte at a time.

        Args:
            prompt: at least one byte.
            num_bytes: how many bytes to add.
            temperature: divides the logits; 0 takes the likeliest byte.
            window: the model reads the last `window` bytes for each new one, at the cost of a
                forward pass of `window` tokens (there is no cache of keys and values yet).
            seed: of the draws; the same seed gives the same text.

        Returns: the added bytes, without the prompt.

        Raises: ValueError for an empty prompt; FloatingPointError where scores are not finite.
        """
        if not prompt:
            raise ValueError(
                "sample needs a prompt of at least one byte, got none; a newline will do"
            )
        generator = torch.Generator().manual_seed(seed)
        text = list(prompt)
        for _ in range(num_bytes):
            seen = text[-window:]
            # one length, so one layout; a causal model cannot see the padding
            padded = seen + [0] * (window - len(seen))
            tokens = torch.tensor([padded], device=self.embedding.weight.device)
            x = self.hidden(tokens)[0, len(seen) - 1]
            logits = F.linear(x, self.embedding.weight).float().cpu()
            if not logits.isfinite().all():
                raise FloatingPointError(
                    "expected finite scores of the next byte, got infinity or NaN; the model's "
                    "weights are unusable: take those of another checkpoint"
                )
            if temperature > 0:
                chances = (logits / temperature).softmax(0)
                text.append(int(torch.multinomial(chances, 1, generator=generator)))
            else:
                text.append(int(logits.argmax()))
        return bytes(text[len(prompt) :])


def readout_loss(x: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """Summed cross-entropy of tokens x [n, width] with targets [n]."""
    logits = F.linear(x, weight)  # [n, vocab_size]
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return F.cross_entropy(logits, targets, reduction="sum")


def without_lookahead(pattern: Pattern) -> Pattern:
    """The pattern's pairs with k <= p; the pattern itself where each branch says so already."""
    for branch in pattern.branches:
        if not (branch == Causal() or (isinstance(branch, And) and Causal() in branch.masks)):
            return pattern & Causal()  # type: ignore[operator]
    return pattern
