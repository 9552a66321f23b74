"""Functions that apply extras to scores and weights, in forward and backward.

Arrays of pairs are [queries, keys] or [keys, queries]. Positions are absolute: int64 for a tile's
first token, and int32 for how far another token is from it.
"""

import triton
import triton.language as tl

from ...ground.dropout import ADDENDS, KEY_MULTIPLIER, MULTIPLIERS

_LOG2_E = tl.constexpr(1.4426950408889634)
_FAR = tl.constexpr(1 << 30)
_PART = tl.constexpr(64)  # channels that `products` multiplies at a time
_OF_KEY = tl.constexpr(KEY_MULTIPLIER % 2**32)
_MULTIPLIER_1 = tl.constexpr(MULTIPLIERS[0] % 2**32)
_MULTIPLIER_2 = tl.constexpr(MULTIPLIERS[1] % 2**32)
_ADDEND_A = tl.constexpr(ADDENDS[0] % 2**32)
_ADDEND_B = tl.constexpr(ADDENDS[1] % 2**32)


@triton.jit
def products(
    x, y, x_rows, y_rows, x_real, y_real, HEAD_DIM: tl.constexpr, PRECISION: tl.constexpr,
    WHOLE: tl.constexpr = 256,
):
    """Returns `x @ y.T` for rows x and y.

    It splits float32 rows of more than WHOLE channels into parts of the channels.

    Both operands are then in registers, where 512 channels of each row do not fit. The parts are
    read again from `x_rows` and `y_rows`, which point to the first channels of the rows that are
    `real`.
    """
    if x.dtype != tl.float32 or HEAD_DIM <= WHOLE:
        return tl.dot(x, tl.trans(y), input_precision=PRECISION)
    else:
        score = tl.zeros([x.shape[0], y.shape[0]], tl.float32)
        for first in tl.range(0, HEAD_DIM, _PART, num_stages=1):
            dim = first + tl.arange(0, _PART)[None, :]
            a = tl.load(x_rows[:, None] + dim, mask=x_real[:, None] & (dim < HEAD_DIM), other=0.0)
            b = tl.load(y_rows[:, None] + dim, mask=y_real[:, None] & (dim < HEAD_DIM), other=0.0)
            score = tl.dot(a, tl.trans(b), score, input_precision=PRECISION)
        return score


@triton.jit
def capped(product, scale, cap):
    """Returns `cap * tanh(x / cap)` for `x = scale * product`, and its derivative by x.

    Near 0, tanh is a series (Cephes, tanhf), elsewhere it uses an exponential; its relative error
    is at most 2e-7.
    """
    x = product * (scale / cap)
    size = tl.abs(x)
    rest = 1.0 / (tl.exp2(size * (2 * _LOG2_E)) + 1.0)  # (1 - tanh(size)) / 2
    square = x * x
    series = -5.70498872745e-3 * square + 2.06390887954e-2
    series = series * square - 5.37397155531e-2
    series = series * square + 1.33314422036e-1
    series = series * square - 3.33332819422e-1
    far = tl.where(x < 0.0, 2.0 * rest - 1.0, 1.0 - 2.0 * rest)
    tangent = tl.where(size < 0.625, x + x * square * series, far)
    return cap * tangent, 4.0 * rest * (1.0 - rest)


@triton.jit
def apart(key, query):
    """Returns the distance of two int64 positions as int32, clipped to [-2 ** 30, 2 ** 30]."""
    return tl.minimum(tl.maximum(key - query, -_FAR), _FAR).to(tl.int32)


@triton.jit
def bias_at(table, distance, reach, there):
    """Loads biases from a table of distances -reach to reach; clips distances to that range."""
    entry = tl.minimum(tl.maximum(distance, -reach), reach) + reach
    return tl.load(table + entry, mask=there, other=0.0)


@triton.jit
def _mixed(x):
    """Scrambles a 32-bit word, as the rounds of ground/dropout.py do."""
    x = (x ^ (x >> 16)) * _MULTIPLIER_1
    x = (x ^ (x >> 15)) * _MULTIPLIER_2
    return x ^ (x >> 15)


@triton.jit
def _word(word, head, branch, query, ADDEND: tl.constexpr):
    """Hashes a row's head, branch and query position into one word."""
    x = _mixed((word.to(tl.uint32) ^ head.to(tl.uint32)) + ADDEND)
    x = _mixed((x ^ branch.to(tl.uint32)) + ADDEND)
    return _mixed((x ^ query.to(tl.uint32)) + ADDEND)


@triton.jit
def words_of(seed, head, branch, query):
    """Hashes each row of scores to the words a and b of dropout (ground/dropout.py)."""
    a = _word(seed, head, branch, query, _ADDEND_A)
    return a, _word(seed >> 32, head, branch, query, _ADDEND_B)


@triton.jit
def kept_pairs(a, b, key, least):
    """True where dropout keeps a pair; a and b are its row's hash words, `key` its key position."""
    x = (key.to(tl.uint32) * _OF_KEY) ^ a
    x = (x ^ (x >> 16)) * _MULTIPLIER_1
    x = ((x ^ (x >> 15)) + b) * _MULTIPLIER_2
    return x.to(tl.int32, bitcast=True) >= least
