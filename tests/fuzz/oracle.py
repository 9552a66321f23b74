"""Attention with all extras of a call, forward and backward, by its formulas in float64 numpy.

It shares no code with the library. Each result comes with its magnitude: the same sums over the
absolute values of their terms. An error that is small relative to the magnitude is rounding.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Results:
    """Exact results, their magnitudes by the same names, and the largest score."""

    exact: dict[str, Array]
    magnitude: dict[str, Array]
    largest_score: float


def attend(
    query: Array,
    key: Array,
    value: Array,
    present: NDArray[np.bool_],
    grad_out: Array,
    grad_lse: Array,
    *,
    scale: float,
    softcap: float | None = None,
    added: Array | float = 0.0,
    bias: Array | float = 0.0,
    sink: Array | None = None,
    keep: Array | float = 1.0,
) -> Results:
    """Computes out, lse and every gradient of one call.

    Args:
        query: [B, Hq, Nq, D]; key, value: [B, Hkv, Nk, D] and [.., Dv].
        present: [J, B, Hq, Nq, Nk] whether each branch of a mixture has a pair.
        grad_out: [B, Hq, Nq, Dv]; grad_lse: [B, Hq, Nq].
        added: [B, Hq, Nq, Nk], what is added to scaled scores before the softcap.
        bias: [J or 1, B, Hq, Nq, Nk], the sum of all biases of a pair; -inf removes the pair.
        sink: [B, Hq, Nq], the logit of a key whose value is zero.
        keep: dropout's factor of each pair's weight, in the shape of bias.

    Returns: `out`, `lse`, `query`, `key`, `value`, `bias` [J, B, Hq, Nq, Nk], `added` and `sink`.
    """
    seen = present.any((0, 1, 2, 3))
    if 2 * seen.sum() < len(seen):  # the rest has no part in any sum
        of_pairs = added, bias, keep
        wide = (x if np.ndim(x) == 0 or x.shape[-1] == 1 else x[..., seen] for x in of_pairs)
        added, bias, keep = wide
        options = {"scale": scale, "softcap": softcap, "bias": bias, "sink": sink, "keep": keep}
        options["added"] = added
        few = key[:, :, seen], value[:, :, seen], present[..., seen]
        found = attend(query, *few, grad_out, grad_lse, **options)
        for results in (found.exact, found.magnitude):
            for name, axis in (("bias", 4), ("added", 3), ("key", 2), ("value", 2)):
                places = (slice(None),) * axis + (seen,)
                shape = list(results[name].shape)
                shape[axis] = len(seen)
                x = np.zeros(shape)
                x[places] = results[name]
                results[name] = x
        return found
    batch, heads, *_ = query.shape
    group = heads // max(1, key.shape[1])
    k, v = (np.repeat(x, group, 1) for x in (key, value))
    raw = scale * query @ k.swapaxes(2, 3) + added
    capped = raw if softcap is None else softcap * np.tanh(raw / softcap)
    slope = np.ones_like(raw) if softcap is None else 1 - (capped / softcap) ** 2
    score = np.where(present, capped + bias, -np.inf)  # [J, B, Hq, Nq, Nk]
    nothing = np.full(query.shape[:3], -np.inf)
    logit = nothing if sink is None else sink
    highest = score.max((0, 4), initial=-np.inf)
    highest = np.maximum(highest, logit)
    highest = np.where(highest == -np.inf, 0.0, highest)
    weight = np.exp(score - highest[..., None])
    of_sink = np.exp(logit - highest)
    total = weight.sum((0, 4)) + of_sink
    with np.errstate(divide="ignore"):
        lse = highest + np.log(total)
    total = np.where(total == 0, 1.0, total)
    weight, of_sink = weight / total[..., None], of_sink / total
    used = weight * keep

    def summed(x: Array) -> Array:  # sums over the query heads of a kv head
        return x.reshape(batch, key.shape[1], group, *x.shape[2:]).sum(2)

    def results(sign: bool, q: Array, k: Array, v: Array, dout: Array, dlse: Array) -> dict:
        minus = 1 if sign else -1  # magnitudes add the terms that gradients subtract
        dweight = dout @ v.swapaxes(2, 3) * keep
        delta = (weight * dweight).sum((0, 4)) + minus * -dlse
        dscore = weight * (dweight - minus * delta[..., None])
        dadded = dscore.sum(0) * (slope if sign else 1.0)
        draw = dadded * (scale if sign else abs(scale))
        return {
            "out": used.sum(0) @ v,
            "query": draw @ k,
            "key": summed(draw.swapaxes(2, 3) @ q),
            "value": summed(used.sum(0).swapaxes(2, 3) @ dout),
            "bias": dscore,
            "added": dadded,
            "sink": -minus * of_sink * delta,
        }

    exact = results(True, query, k, v, grad_out, grad_lse)
    parts = (np.abs(x) for x in (query, k, v, grad_out, grad_lse))
    magnitude = results(False, *parts)
    magnitude["sink"] = np.abs(magnitude["sink"])
    products = abs(scale) * np.abs(query) @ np.abs(k).swapaxes(2, 3)
    finite = np.where(np.isfinite(bias), np.abs(bias), 0.0)
    highest_added = np.abs(added).max(initial=0.0)
    largest = float(products.max(initial=0.0) + finite.max(initial=0.0) + highest_added)
    exact["lse"], magnitude["lse"] = lse, np.ones_like(lse)
    return Results(exact, magnitude, largest)


def kept(
    seed: int, p: float, batch: int, heads: int, branches: int, q: Array, k: Array
) -> NDArray[np.bool_]:
    """[J, B, H, Nq, Nk] whether dropout keeps each weight: the hash of the contract, in numpy."""
    word, half = np.uint64(2**32 - 1), np.int64(2**31)

    def mixed(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
        for multiplier, shift in ((0x21F0AAAD, 16), (0xD35A2D97, 15)):
            x = (x ^ x >> np.uint64(shift)) * np.uint64(multiplier) & word
        return x ^ x >> np.uint64(15)

    states = np.array([_state(seed, entry) for entry in range(batch)], np.uint64)
    states = states.reshape(1, -1, 1, 1, 1)
    a, b = states & word, states >> np.uint64(32)
    parts = (
        np.arange(heads).reshape(1, 1, -1, 1, 1),
        np.arange(branches).reshape(-1, 1, 1, 1, 1),
        q.reshape(-1, 1),
    )
    for part in parts:
        part = part.astype(np.int64).astype(np.uint64) & word
        a = mixed((a ^ part) + np.uint64(0x9E3779B9) & word)
        b = mixed((b ^ part) + np.uint64(0x7F4A7C15) & word)
    x = k.astype(np.int64).astype(np.uint64) & word
    x = x * np.uint64(0x9E3779B1) & word ^ a
    x = (x ^ x >> np.uint64(16)) * np.uint64(0x21F0AAAD) & word
    x = ((x ^ x >> np.uint64(15)) + b & word) * np.uint64(0xD35A2D97) & word
    x = x.astype(np.int64)
    signed = np.where(x >= half, x - 2 * half, x)
    return signed >= min(round(p * 2**32), 2**32 - 1) - half


def _state(seed: int, entry: int) -> int:
    """Hashes a seed and a batch entry to 62 bits, in Python's integers."""
    whole, state = 2**64 - 1, 0
    for part in (seed, entry):
        state = part + state * 31 + 0x9E3779B9 & whole
        for multiplier, shift in ((0xBF58476D1CE4E5B9, 30), (0x94D049BB133111EB, 27)):
            state = (state ^ _shifted(state, shift)) * multiplier & whole
        state = (state ^ _shifted(state, 31)) & whole
    return state & 2**62 - 1


def _shifted(x: int, bits: int) -> int:
    """Arithmetic right shift of a 64-bit integer; extends the sign."""
    return (x - 2**64 if x >> 63 else x) >> bits & 2**64 - 1
