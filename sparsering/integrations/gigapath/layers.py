"""The layers of Prov-GigaPath's slide encoder, which compute a slide's rows whole or in parts."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...functional import attention
from ...ground.numerics import sum_dtype
from ...patterns.algebra import Pattern
from ...weights import key_mass

Heat = Literal["class", "all"] | None
"""Whose attention a heat map shows: the class token's, or that of all tokens."""


@dataclass(frozen=True)
class SlideTokens:
    """Settings of all layers while a slide is encoded: pattern, sink, rows, heat map, dropout."""

    pattern: Pattern
    sink: Tensor | None
    """[1, H, N], the log of the number of zero keys that each row sees, or None without any."""
    rows: int | None
    """The most rows to compute at a time; None computes all at once."""
    heat: Heat
    dropout: float


class DilatedProjections(nn.Module):
    """Linear layers of dilated attention, named as in torchscale, so that its weights load."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.k_proj, self.v_proj = nn.Linear(width, width), nn.Linear(width, width)
        self.q_proj, self.out_proj = nn.Linear(width, width), nn.Linear(width, width)
        self.inner_attn_ln = nn.LayerNorm(width)

    def heads(self, x: Tensor) -> Tensor:
        """Views rows [n, width] as [1, H, n, D]."""
        return x.view(1, len(x), self.num_heads, -1).transpose(1, 2)


class _MLP(nn.Module):
    """The MLP of a block, on rows [n, width], with a norm after its activation."""

    def __init__(self, width: int, mlp_width: int) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(width, mlp_width), nn.Linear(mlp_width, width)
        self.ffn_layernorm = nn.LayerNorm(mlp_width)

    def forward(self, x: Tensor) -> Tensor:
        x = self.fc1(x)
        x = F.gelu(x.to(sum_dtype(x))).to(x.dtype)
        return self.fc2(self.ffn_layernorm(x))


class EncoderLayer(nn.Module):
    """Pre-norm block: x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, width: int, num_heads: int, mlp_width: int) -> None:
        super().__init__()
        self.self_attn = DilatedProjections(width, num_heads)
        self.self_attn_layer_norm = nn.LayerNorm(width)
        self.ffn = _MLP(width, mlp_width)
        self.final_layer_norm = nn.LayerNorm(width)

    def forward(
        self, x: Tensor, how: SlideTokens, shares: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Returns the new rows of x [N, width], and what attention each token received, or None.

        `shares` [2] scales the outputs of attention and of the MLP, as stochastic depth does.
        """
        first, second = (1.0, 1.0) if shares is None else shares
        states, received = self._attended(x, how, first)

        def mapped(part: slice) -> Tensor:
            out = self.ffn(self.final_layer_norm(states[part]))
            return states[part] + second * F.dropout(out, how.dropout, self.training)

        return by_rows(mapped, states, how.rows), received

    def _attended(
        self, x: Tensor, how: SlideTokens, share: Tensor | float
    ) -> tuple[Tensor, Tensor | None]:
        """Returns x + share * attention(norm(x)), and how much attention each token received.

        The latter, [N] or None, is the mean over heads of what `how.heat` asks for.
        """
        attn, norm = self.self_attn, self.self_attn_layer_norm
        whole = norm(x) if how.rows is None else None

        def normed(part: slice) -> Tensor:
            return norm(x[part]) if whole is None else whole[part]

        k = attn.heads(by_rows(lambda part: attn.k_proj(normed(part)), x, how.rows))
        v = attn.heads(by_rows(lambda part: attn.v_proj(normed(part)), x, how.rows))
        received: list[Tensor] = []

        def attended(part: slice) -> Tensor:
            q = attn.heads(attn.q_proj(normed(part)))
            sink = None if how.sink is None else how.sink[..., part]
            if how.heat == "all" or (how.heat == "class" and part.start == 0):
                out, lse = attention(
                    q, k, v, how.pattern, q_start=part.start, sink=sink, return_lse=True
                )
                if how.heat == "class":  # the first row alone
                    q, lse = q[:, :, :1], lse[:, :, :1]
                mass = key_mass(q, k, how.pattern, lse, q_start=part.start)
                received.append(mass[0].mean(0))
            else:
                out = attention(q, k, v, how.pattern, q_start=part.start, sink=sink)
            out = attn.inner_attn_ln(out.transpose(1, 2).flatten(2)[0])
            return x[part] + share * F.dropout(attn.out_proj(out), how.dropout, self.training)

        states = by_rows(attended, x, how.rows)
        return states, torch.stack(received).sum(0) if received else None


def by_rows(function: Callable[[slice], Tensor], x: Tensor, rows: int | None) -> Tensor:
    """Computes `function(slice)` for x's rows, at most `rows` at a time, and joins the results.

    `function` gets a slice of n rows and returns [n, ...]; the result is [len(x), ...].
    """
    if rows is None or rows >= len(x):
        return function(slice(0, len(x)))
    out: Tensor | None = None
    for start in range(0, len(x), rows):
        part = function(slice(start, min(start + rows, len(x))))
        if out is None:
            out = part.new_empty(len(x), *part.shape[1:])
        out[start : start + len(part)] = part
    assert out is not None
    return out
