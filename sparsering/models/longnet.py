"""A causal byte-level language model whose attention follows any sparsering pattern.

    model = LongNetLM(LongNet((1024, 4096), (1, 4)), width=128, num_layers=4, num_heads=2)
    loss = model.loss(tokens, targets)             # int64 [B, N] bytes and the bytes after them
    text = model.sample(b"def ", num_bytes=200)

A plain pre-norm transformer: RMSNorm, rotary positions, normalised queries and keys, a squared-ReLU
MLP, and one table of embeddings that also reads out the logits. Only the call of `attend` knows of
sparsity.
"""

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ..algebra import And, Pattern
from ..functional import attention
from ..patterns import Causal

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]

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
            padded = seen + [0] * (
                window - len(seen)
            )  # one length, so one layout; a causal model cannot see the padding
            tokens = torch.tensor([padded], device=self.embedding.weight.device)
            x = self.hidden(tokens)[0, len(seen) - 1]
            logits = F.linear(x, self.embedding.weight).float().cpu()
            if not logits.isfinite().all():
                raise FloatingPointError(
                    "expected finite scores of the next byte, got infinity or NaN; the model's "
                    "weights are unusable: take those of another checkpoint"
                )
            if temperature > 0:
                text.append(
                    int(
                        torch.multinomial((logits / temperature).softmax(0), 1, generator=generator)
                    )
                )
            else:
                text.append(int(logits.argmax()))
        return bytes(text[len(prompt) :])


class Block(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, width: int, num_heads: int, mlp_width: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.attention_norm = nn.RMSNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.mlp_norm = nn.RMSNorm(width)
        self.up = nn.Linear(width, mlp_width, bias=False)
        self.down = nn.Linear(mlp_width, width, bias=False)
        for layer in (self.qkv, self.up):
            nn.init.normal_(layer.weight, std=width**-0.5)
        for layer in (self.out, self.down):  # a fresh block is the identity
            nn.init.zeros_(layer.weight)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, attend: Attend) -> Tensor:
        B, N, width = x.shape
        qkv = self.qkv(self.attention_norm(x)).view(
            B, N, 3, self.num_heads, width // self.num_heads
        )
        q, k, v = qkv.permute(2, 0, 3, 1, 4)  # each [B, H, N, D]
        q = rotate(F.rms_norm(q, q.shape[-1:]), cos, sin)
        k = rotate(F.rms_norm(k, k.shape[-1:]), cos, sin)
        heads = attend(q, k, v)  # [B, H, N, D]
        x = x + self.out(heads.transpose(1, 2).reshape(B, N, width))
        return x + self.down(F.relu(self.up(self.mlp_norm(x))).square())


def rotary_table(
    length: int,
    head_dim: int,
    base: float,
    device: torch.device,
    positions: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Cosine and sine [N, D / 2] of position x frequency, for positions 0 .. length - 1 or those
    given.
    """
    frequency = base ** (
        -torch.arange(0, head_dim, 2, dtype=torch.float32, device=device) / head_dim
    )
    if positions is None:
        positions = torch.arange(length, device=device)
    angle = positions.to(device, torch.float32)[:, None] * frequency
    return angle.cos(), angle.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turns channels (i, i + D / 2) of x [B, H, N, D] by position; scores see distances alone."""
    cos, sin = cos.to(x.dtype), sin.to(x.dtype)
    first, second = x.chunk(2, dim=-1)  # [B, H, N, D / 2]
    return torch.cat((first * cos - second * sin, first * sin + second * cos), dim=-1)


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
