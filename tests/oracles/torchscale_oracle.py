"""torchscale's dilated attention by its contract: dense, branch by branch, in the inputs' dtype.

Segments are padded with zero keys. Each head takes the rows and keys on its grid, with one softmax
a segment, and lse merges the branches. Shares no code with the library, nor with torchscale.
"""

import math
from types import SimpleNamespace

import torch
from torch import Tensor, nn


def attend_over_segments(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    segment_lengths: list[int],
    rates: list[int],
    *,
    causal: bool = False,
    zeros: bool = False,
    valid: Tensor | None = None,
) -> Tensor:
    """Computes dilated attention [B, H, N, D] of query, key and value of that shape.

    `zeros`: whether queries see the zero keys that pad a segment. `valid` [B, N]: keys that may
    be seen.
    """
    B, H, N, D = query.shape
    valid = torch.ones(B, N, dtype=torch.bool) if valid is None else valid
    outs, lses = [], []
    for length, rate in zip(segment_lengths, rates, strict=True):
        length = min(length, N)
        out, lse = query.new_zeros(B, H, N, D), query.new_full((B, H, N), -torch.inf)
        filled = math.ceil(length / rate) * rate
        for start in range(0, N, length):
            end = min(start + length, N)
            for h in range(H):
                residue = h // math.ceil(H / rate)
                grid = torch.arange(residue, filled, rate)
                real = grid < end - start
                rows = start + grid[real]
                if not len(rows):
                    continue
                k, v = key.new_zeros(2, B, len(grid), D)
                k = k.index_copy(1, torch.nonzero(real)[:, 0], key[:, h, rows])
                v = v.index_copy(1, torch.nonzero(real)[:, 0], value[:, h, rows])
                seen = torch.full((B, 1, len(grid)), zeros)
                seen[:, 0, real] = valid[:, rows]
                if causal:
                    seen = seen & (grid <= grid[real][:, None])
                score = query[:, h, rows] @ k.mT / math.sqrt(D)
                score = score.masked_fill(~seen, -torch.inf)
                empty = (score == -torch.inf).all(-1, keepdim=True)
                score = score.masked_fill(empty, 0.0)
                weight = torch.where(empty, 0.0, score.softmax(-1))
                out = out.index_put((slice_of(B), torch.tensor(h), rows), weight @ v)
                row_lse = torch.where(empty[..., 0], -torch.inf, score.logsumexp(-1))
                lse = lse.index_put((slice_of(B), torch.tensor(h), rows), row_lse)
        outs.append(out)
        lses.append(lse)
    lse = torch.stack(lses)  # [branches, B, H, N]
    empty = (lse == -torch.inf).all(0)
    share = torch.where(empty, 0.0, lse.masked_fill(empty, 0.0).softmax(0))
    return (share[..., None] * torch.stack(outs)).sum(0)


def slice_of(batch: int) -> Tensor:
    return torch.arange(batch)[:, None]


def turn(x: Tensor, scale: Tensor, base: float, offset: int, total: int, up: bool) -> Tensor:
    """Rotates and scales x [B, H, n, D], tokens from `offset` of `total`, by xPos's formula."""
    out = torch.zeros_like(x)
    for n in range(x.shape[2]):
        p = n + offset
        for i in range(len(scale)):
            angle = p / 10000 ** (i / len(scale))
            size = scale[i].to(x) ** ((p + (-total // 2)) / base)
            size = size if up else 1 / size
            a, b = x[:, :, n, 2 * i], x[:, :, n, 2 * i + 1]
            out[:, :, n, 2 * i] = size * (a * math.cos(angle) - b * math.sin(angle))
            out[:, :, n, 2 * i + 1] = size * (b * math.cos(angle) + a * math.sin(angle))
    return out


class Split(nn.Module):
    """torchscale's MultiwayNetwork."""

    def __init__(self, a: nn.Module, b: nn.Module) -> None:
        super().__init__()
        self.A, self.B, self.split_position = a, b, -1

    def forward(self, x: Tensor) -> Tensor:
        if self.split_position == -1:
            return self.A(x)
        p = self.split_position
        return torch.cat((self.A(x[:, :p]), self.B(x[:, p:])), 1)


class XPOS(nn.Module):
    def __init__(self, head_dim: int, scale_base: int) -> None:
        super().__init__()
        self.head_dim, self.scale_base = head_dim, scale_base
        even = torch.arange(0, head_dim, 2)
        self.register_buffer("scale", (even + 0.4 * head_dim) / (1.4 * head_dim))


class DilatedAttention(nn.Module):
    """Module with the parameters and results of torchscale's DilatedAttention.

    `zeros`: queries see padding keys, as in torchscale.
    """

    zeros = True

    def __init__(
        self,
        args: SimpleNamespace,
        embed_dim: int,
        num_heads: int,
        dropout: float = 0.0,
        self_attention: bool = False,
        encoder_decoder_attention: bool = False,
        subln: bool = False,
    ) -> None:
        super().__init__()
        assert self_attention ^ encoder_decoder_attention
        self.args, self.embed_dim, self.num_heads = args, embed_dim, num_heads
        self.head_dim = embed_dim // num_heads
        self.scaling = self.head_dim**-0.5
        self.dropout = dropout
        self.self_attention = self_attention
        self.encoder_decoder_attention = encoder_decoder_attention

        def part(make):
            return Split(make(), make()) if args.multiway else make()

        for name in ("k_proj", "v_proj", "q_proj", "out_proj"):
            setattr(self, name, part(lambda: nn.Linear(embed_dim, embed_dim)))
        norm = subln and self_attention
        eps = args.layernorm_eps
        self.inner_attn_ln = part(lambda: nn.LayerNorm(embed_dim, eps=eps)) if norm else None
        self.dropout_module = nn.Dropout(dropout)
        xpos = args.xpos_rel_pos and self_attention
        self.xpos = XPOS(self.head_dim, args.xpos_scale_base) if xpos else None

    def forward(self, query, key, value, key_padding_mask=None, is_causal=False, **others):
        B, N, E = query.shape
        q, k, v = (
            proj(x).view(B, N, self.num_heads, -1).transpose(1, 2)
            for proj, x in ((self.q_proj, query), (self.k_proj, key), (self.v_proj, value))
        )
        if self.xpos is not None:
            base = self.xpos.scale_base
            q = turn(q, self.xpos.scale, base, 0, N, up=True)
            k = turn(k, self.xpos.scale, base, 0, N, up=False)
        valid = None if key_padding_mask is None or self.zeros else ~key_padding_mask.bool()
        branches = list(self.args.segment_length), list(self.args.dilated_ratio)
        options = {"causal": is_causal, "zeros": self.zeros, "valid": valid}
        out = attend_over_segments(q, k, v, *branches, **options).transpose(1, 2).reshape(B, N, E)
        out = out if self.inner_attn_ln is None else self.inner_attn_ln(out)
        return self.out_proj(out), None
