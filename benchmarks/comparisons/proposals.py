"""`propose` beside the clock: does what it recommends meet a budget of time, and nothing denser?"""

import torch

import sparsering as sr
from sparsering.planning.calibrate import calibrate
from sparsering.planning.proposals import candidates, propose

from ..measure import Row, inputs_of, interleaved, sampled_error

_SHARES = (0.01, 0.04, 0.15, 0.5)  # of the time of dense attention: the budgets


def proposals(quick: bool) -> list[Row]:
    """Measures all candidates of five lengths, and compares them with proposals for four budgets.

    This machine is calibrated first, since `propose` predicts by its rates.
    """
    calibration, _ = calibrate()
    rows = []
    for tokens in (1024, 2048) if quick else (2048, 4096, 8192, 16384, 32768):
        texts = {sr.parse(text): text for _, text in candidates(tokens, causal=True)}
        query, key, value = inputs_of(8, tokens, 64)
        outs = {p: sr.attention(query, key, value, p) for p in texts}
        errors = {p: sampled_error(out, query, key, value, p, rows=8) for p, out in outs.items()}
        calls = {p: lambda p=p: sr.attention(query, key, value, p) for p in texts}
        ms = interleaved(calls, 3 if tokens > 8192 else 9)
        for share in _SHARES:
            limit = share * ms[sr.Causal()]
            found = propose(tokens, seconds=limit / 1e3, memory="total")
            best = found[0]
            meeting = [each for each in found if ms[each.pattern] <= limit]
            densest = max(meeting, key=lambda each: each.density, default=None)
            rows.append({
                "tokens": tokens, "heads": 8, "head_dim": 64, "dtype": "float32",
                "budget_ms": limit, "recommended": texts[best.pattern], "fits": best.fits,
                "density": best.density, "predicted_ms": 1e3 * best.seconds,
                "ms": ms[best.pattern], "over_budget": ms[best.pattern] / limit,
                "error": errors[best.pattern],
                "densest_measured": None if densest is None else texts[densest.pattern],
                "its_density": None if densest is None else densest.density,
                "dense_ms": ms[sr.Causal()], "calibration_error": calibration.error,
                "threads": torch.get_num_threads(),
            })  # fmt: skip
    return rows
