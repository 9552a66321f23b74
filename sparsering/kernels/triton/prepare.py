"""The Triton kernel that computes delta and a scaled lse per row, once before a backward."""

import triton.language as tl

from .device import elements, kernel


@kernel
def prepare_kernel(
    grad_out, grad_lse, out, lse, delta, row_lse,
    g_batch: tl.int64, g_head: tl.int64, g_token: tl.int64,
    o_batch: tl.int64, o_head: tl.int64, row_head: tl.int64, num_heads: tl.int64, q_len: tl.int64,
    unit: tl.float32,
    ROWS: tl.constexpr, VALUE_DIM: tl.constexpr, PADDED_VALUE_DIM: tl.constexpr,
    ALIGN: tl.constexpr,
):
    """Writes delta [B, heads, Nq], and row_lse = lse * unit, which is subtracted from scores.

    row_lse is +inf for a row without keys, so that P = 0. `unit` is log2(e), because kernels
    compute powers of 2. With a block bias it is 1, because kernels first subtract the bias from
    lse, then multiply by log2(e).
    """
    program = tl.program_id(0).to(tl.int64)
    blocks = (q_len + ROWS - 1) // ROWS
    position = program % blocks * ROWS + tl.arange(0, ROWS)
    row = program // blocks
    batch, head = row // num_heads, row % num_heads
    real = position < q_len
    dim = tl.arange(0, PADDED_VALUE_DIM)
    kept = real[:, None] & (dim < VALUE_DIM)[None, :]
    from_grad = position * elements(g_token, ALIGN)
    from_grad += batch * elements(g_batch, ALIGN) + head * elements(g_head, ALIGN)
    from_out = position * VALUE_DIM
    from_out += batch * elements(o_batch, ALIGN) + head * elements(o_head, ALIGN)
    do = tl.load(grad_out + from_grad[:, None] + dim[None, :], mask=kept, other=0.0)
    o = tl.load(out + from_out[:, None] + dim[None, :], mask=kept, other=0.0)
    given = row * q_len + position
    natural = tl.load(lse + given, mask=real, other=float("-inf"))
    product = tl.sum(do.to(tl.float32) * o.to(tl.float32), 1)
    product -= tl.load(grad_lse + given, mask=real, other=0.0)
    reduced_by = tl.where(natural == float("-inf"), float("inf"), natural * unit)
    tl.store(delta + row * row_head + position, product, mask=real)
    tl.store(row_lse + row * row_head + position, reduced_by, mask=real)
