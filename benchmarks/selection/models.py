"""Networks of one or two attention layers that take the attention itself as an argument."""

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import sparsering as sr

from .tasks import VALUES, Facts

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(query [B, Hq, Nq, D], key [B, Hkv, Nk, D], value) to [B, Hq, Nq, D]."""


class FactReader(nn.Module):
    """One attention layer of one head from 64 questions to the facts; no positions anywhere."""

    def __init__(self, num_keys: int, width: int = 32):
        super().__init__()
        self.key_tokens = nn.Embedding(num_keys, width)
        self.value_tokens = nn.Embedding(VALUES, width)
        self.flag = nn.Parameter(torch.randn(width))
        self.question = nn.Parameter(torch.randn(width))
        self.projections = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(3))
        self.head = nn.Linear(width, VALUES)

    def forward(self, facts: Facts, attend: Attend) -> Tensor:
        """Logits [B, 64, 32] of the values."""
        fact_states = self.key_tokens(facts.keys) + self.value_tokens(facts.values)
        fact_states = fact_states + facts.flags[..., None] * self.flag
        questions = self.key_tokens(facts.questions) + self.question
        inputs = (questions, fact_states, fact_states)
        q, k, v = (p(x)[:, None] for p, x in zip(self.projections, inputs, strict=True))
        return self.head(attend(q, k, v)[:, 0])


class Layer(nn.Module):
    """Attention after a causal convolution of 5 of its projections, then a feed-forward net.

    The convolution lets a token's key hold the tokens before it, as in H3, Mamba and their kin. It
    starts so that a key is the query of the token before it, over `reach` tokens: what a network of
    this size takes more steps than fit here to find by itself is there from the start, copying.
    """

    def __init__(self, width: int, num_heads: int, num_kv_heads: int, rotary: bool, reach: int):
        super().__init__()
        self.heads, self.kv_heads, self.rotary = num_heads, num_kv_heads, rotary
        self.head_dim = width // num_heads
        inner = (num_heads + 2 * num_kv_heads) * self.head_dim
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.project = nn.Linear(width, inner, bias=False)
        self.mix = nn.Conv1d(inner, inner, 5, groups=inner, padding=4)
        self.out = nn.Linear(width, width, bias=False)
        self.feed = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )
        with torch.no_grad():
            taps = torch.randn(num_kv_heads, 1, self.head_dim, 4) * reach**-0.5
            taps[..., : 4 - reach] = 0.0
            inwards = self.project.weight.unflatten(0, (-1, self.head_dim))
            weight = self.mix.weight.zero_().unflatten(0, (-1, self.head_dim))[:, :, 0]
            q, k, v = weight.split((num_heads, num_kv_heads, num_kv_heads))
            q[..., 1:] = taps.expand(-1, num_heads // num_kv_heads, -1, -1).flatten(0, 1)
            k[..., :4] = taps[:, 0]
            v[..., 4] = 1.0
            inwards[:num_heads] = inwards[num_heads : num_heads + num_kv_heads].repeat_interleave(
                num_heads // num_kv_heads, 0
            )
            self.project.weight[: (num_heads + num_kv_heads) * self.head_dim] *= 2.0

    def heads_of(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Query, key and value of the layer's input [B, N, E]."""
        mixed = self.project(self.norms[0](x))
        mixed = self.mix(mixed.mT)[..., : x.shape[1]].unflatten(1, (-1, self.head_dim)).mT
        parts = mixed.split((self.heads, self.kv_heads, self.kv_heads), 1)
        q, k, v = (part.contiguous() for part in parts)
        return (rotated(q), rotated(k), v) if self.rotary else (q, k, v)

    def forward(self, x: Tensor, attend: Attend) -> Tensor:
        x = x + self.out(attend(*self.heads_of(x)).transpose(1, 2).flatten(2))
        return x + self.feed(self.norms[1](x))


class TokenModel(nn.Module):
    """Tokens to logits of the next ones, through layers that each attend in their own way."""

    def __init__(
        self,
        vocabulary: int,
        width: int,
        *,
        num_layers: int = 2,
        num_heads: int = 4,
        num_kv_heads: int = 2,
        rotary: bool = True,
        reach: int = 4,
    ):
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        nn.init.normal_(self.tokens.weight, std=0.5)
        layers = (Layer(width, num_heads, num_kv_heads, rotary, reach) for _ in range(num_layers))
        self.layers = nn.ModuleList(layers)
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary)

    def forward(self, tokens: Tensor, attends: Sequence[Attend]) -> Tensor:
        """Logits [B, N, vocabulary]; one way to attend for each layer."""
        x = self.tokens(tokens)
        for layer, attend in zip(self.layers, attends, strict=True):
            x = layer(x, attend)
        return self.head(self.norm(x))


def rotated(x: Tensor, base: float = 10000.0) -> Tensor:
    """Rotary position embedding of the first half of [B, H, N, D]; the rest has no position."""
    x, rest = x.chunk(2, -1)
    half = x.shape[-1] // 2
    angle = torch.outer(torch.arange(x.shape[2]), base ** (-torch.arange(half) / half))
    cos, sin = angle.cos(), angle.sin()
    a, b = x[..., :half], x[..., half:]
    return torch.cat((a * cos - b * sin, a * sin + b * cos, rest), -1)


def dense(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Every causal pair, by the library."""
    return sr.attention(q, k, v, sr.Causal())


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Returns the mean over the targets that are not -1."""
    return F.cross_entropy(logits.flatten(0, -2), targets.flatten(), ignore_index=-1)
