"""`propose` beside the clock: does what it recommends meet a budget of time, and nothing denser?"""

from functools import partial

import torch

import sparsering as sr
from sparsering.planning.proposals import candidates, propose

from ..measure import Row, inputs_of, interleaved, sampled_error

_SHARES = (0.1, 0.2, 0.4, 0.7)  # of the time of dense attention: the budgets


def proposals(quick: bool) -> list[Row]:
    """Measures the candidates of five lengths beside proposals for four budgets."""
    rows = []
    for tokens in (1024, 2048) if quick else (2048, 4096, 8192, 16384, 32768):
        texts = {sr.parse(text): text for _, text in candidates(tokens, causal=True)}
        query, key, value = inputs_of(8, tokens, 64)
        calls = {text: partial(sr.attention, query, key, value, p) for p, text in texts.items()}
        errors = {
            text: sampled_error(calls[text](), query, key, value, p, rows=8)
            for p, text in texts.items()
        }
        ms = interleaved(calls, 3 if tokens > 8192 else 9)
        for share in _SHARES:
            limit = share * ms["Causal()"]
            found = propose(tokens, seconds=limit / 1e3, memory="total")
            best, chosen = found[0], texts[found[0].pattern]
            meeting = [each for each in found if ms[texts[each.pattern]] <= limit]
            densest = max(meeting, key=lambda each: each.density, default=None)
            rows.append({
                "tokens": tokens, "heads": 8, "head_dim": 64, "dtype": "float32",
                "budget_ms": limit, "recommended": chosen, "fits": best.fits,
                "density": best.density, "predicted_ms": 1e3 * best.seconds, "ms": ms[chosen],
                "of_budget": ms[chosen] / limit, "error": errors[chosen],
                "densest_measured": None if densest is None else texts[densest.pattern],
                "its_density": None if densest is None else densest.density,
                "fastest_ms": min(ms.values()), "dense_ms": ms["Causal()"],
                "threads": torch.get_num_threads(),
            })  # fmt: skip
    return rows
