"""Checks each record against its bar: over all seeds, the worst of them counts."""

from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise

import torch

from ..measure import Row


def bar(
    name: str, values: Iterable[float], *, least: float | None = None, most: float | None = None
) -> Row:
    """One bar: the worst value and the limit that it has to meet."""
    numbers = list(values)
    worst = (min if most is None else max)(numbers, default=float("nan"))
    met = worst >= least if most is None else worst <= most
    limit = {"at_least": least} if most is None else {"at_most": most}
    return {"bar": name, **limit, "worst": worst, "runs": len(numbers), "met": bool(met)}


def _column(rows: Sequence[Row], column: str, **where: object) -> list[float]:
    """Numbers of a column in the rows whose other columns have these values."""
    return [
        row[column]
        for row in rows
        if row.get(column) is not None and all(row.get(k) == v for k, v in where.items())
    ]


def flagged(rows: Sequence[Row]) -> list[Row]:
    """Flagged facts: trained scorers answer, everything that ignores content does not."""
    bars = []
    for size, low in (("small", 0.25), ("hard", 0.15)):
        at = {"experiment": size}
        for arm in ("kl", "pooled", "bias")[: 3 if size == "small" else 2]:
            accuracy = _column(rows, "accuracy", arm=arm, **at)
            bars.append(bar(f"{size}: {arm}, accuracy", accuracy, least=0.95))
            recall = _column(rows, "recall", arm=arm, **at)
            bars.append(bar(f"{size}: {arm}, recall", recall, least=0.98))
            shuffled = _column(rows, "shuffled", arm=arm, **at)
            bars.append(bar(f"{size}: {arm}, scores shuffled, accuracy", shuffled, most=low))
        for arm in ("frozen", "random", "window")[: 3 if size == "small" else 2]:
            accuracy = _column(rows, "accuracy", arm=arm, **at)
            bars.append(bar(f"{size}: {arm}, accuracy", accuracy, most=low))
        mean = _column(rows, "accuracy", arm="mean", **at)
        bars.append(bar(f"{size}: mean, accuracy", mean, most=0.5 if size == "small" else 0.3))
        pairs = [
            row["density"] / (64 / row["tokens"])
            for row in rows
            if row["experiment"] == size and row["arm"] != "full"
        ]
        bars.append(bar(f"{size}: pairs over those of 4 blocks a question", pairs, most=1.02))
    straight = _column(rows, "accuracy", arm="straight-through", experiment="small")
    return [*bars, bar("small: straight-through, accuracy", straight, most=0.25)]


def lengths(rows: Sequence[Row]) -> list[Row]:
    """Lengths: no answer is lost where full attention dilutes."""
    bars = []
    for tokens in (4096, 16384):
        full = {
            row["seed"]: row["accuracy"]
            for row in rows
            if row["arm"] == "full" and row["tokens"] == tokens
        }
        for arm in ("kl", "pooled"):
            at = [row for row in rows if row["arm"] == arm and row["tokens"] == tokens]
            values = [row["accuracy"] for row in at]
            bars.append(bar(f"{tokens}: {arm}, accuracy", values, least=0.97))
            above = [row["accuracy"] - full[row["seed"]] for row in at]
            bars.append(bar(f"{tokens}: {arm}, accuracy less full attention's", above, least=-0.01))
        for arm, most in (("mean", 0.15), ("window", 0.06)):
            values = _column(rows, "accuracy", arm=arm, tokens=tokens)
            bars.append(bar(f"{tokens}: {arm}, accuracy", values, most=most))
    return bars


def schedules(rows: Sequence[Row]) -> list[Row]:
    """Schedules: gated learns, cold does not."""
    gated = {"experiment": "hard", "arm": "kl"}
    return [
        bar("gated, accuracy", _column(rows, "accuracy", **gated), least=0.95),
        bar("cold, accuracy", _column(rows, "accuracy", schedule="cold"), most=0.10),
        bar(
            "gated: largest rise of the loss at a switch, in standard deviations",
            _column(rows, "largest_rise", **gated),
            most=3.0,
        ),
        bar(
            "gated: resumed in the middle of the ramp, equal bits",
            _column(rows, "resumes_bit_equal", **gated),
            least=1,
        ),
    ]


def recall(rows: Sequence[Row]) -> list[Row]:
    """Associative recall."""

    def of(arm: str, column: str = "accuracy_far") -> dict[int, float]:
        return {row["seed"]: row[column] for row in rows if row["arm"] == arm}

    full, trained = of("full"), of("kl")
    less = [full[seed] - value for seed, value in trained.items()]
    return [
        bar("full, accuracy", of("full", "accuracy").values(), least=0.98),
        bar("full less kl, accuracy of far answers", less, most=0.02),
        bar("tokens, accuracy of far answers", of("tokens").values(), least=0.95),
        *(
            bar(f"{arm}, accuracy of far answers", of(arm).values(), most=0.35)
            for arm in ("window", "frozen")
        ),
        bar("kl, scores shuffled, far", of("kl", "shuffled_far").values(), most=0.35),
    ]


def language(rows: Sequence[Row]) -> list[Row]:
    """Byte model: the cost of far copies."""
    table = {(row["arm"], row.get("block_size"), row["seed"]): row for row in rows}
    bars, seeds = [], {row["seed"] for row in rows}
    for way, size in (("learned", 32), ("learned", 16), ("exact", 32)):
        worse, recovered, lost = [], [], []
        for seed in seeds:
            full, window = table["full", 0, seed], table["window", 32, seed]
            chosen = table[way, size, seed]
            worse.append(chosen["bits_per_byte"] - full["bits_per_byte"])
            gap = window["far_copies"] - full["far_copies"]
            recovered.append((window["far_copies"] - chosen["far_copies"]) / gap)
            if way == "learned":
                lost.append((chosen["shuffled_far_copies"] - chosen["far_copies"]) / gap)
        name = f"{way}, blocks of {size}"
        bars.append(bar(f"{name}: bits per byte above full attention's", worse, most=0.02))
        bars.append(bar(f"{name}: share of window - full kept, far copies", recovered, least=0.7))
        if lost:
            bars.append(bar(f"{name}: share that shuffled scores lose", lost, least=0.5))
    return bars


def captured(rows: Sequence[Row]) -> list[Row]:
    """Captured mass, and scorers fitted to a frozen model."""
    table: dict[tuple, dict[str, Row]] = {}
    for row in rows:
        if row["experiment"] == "captured":
            place = tuple(row[x] for x in ("seed", "layer", "block_size", "query_block", "k"))
            table.setdefault(place, {})[row["way"]] = row
    bars = []
    for better, worse, by in (
        ("mean", "random", 0.0), ("exact", "mean", 0.0), ("exact", "sub", 0.0),
        ("sub", "mean", -0.005), ("learned", "sub", -0.02),
    ):  # fmt: skip
        gains = [x[better]["captured"] - x[worse]["captured"] for x in table.values()]
        bars.append(bar(f"captured: {better} less {worse}", gains, least=by))
    pairs = [
        (1 - row["captured"], row["error"]) for ways in table.values() for row in ways.values()
    ]
    if pairs:
        bars.append(bar("rank correlation of error and lost mass", [_ranked(pairs)], least=0.9))
    fitted = [row for row in rows if row["experiment"] == "fitted"]
    gains = [row["recall_learned"] - row["recall_frozen"] for row in fitted]
    bars.append(bar("fitted: recall, learned less frozen", gains, least=0.4))
    gains = [row["recall_learned"] - row["recall_mean"] for row in fitted]
    bars.append(bar("fitted: recall, learned less mean", gains, least=0.0))
    falls = [max(b - a for a, b in pairwise(row["divergence_of_quarters"])) for row in fitted]
    bars.append(bar("fitted: rise of the divergence from a quarter to the next", falls, most=0.0))
    equal = [row["model_bit_equal"] for row in fitted]
    return [*bars, bar("fitted: the model's bits stay", equal, least=1)]


def _ranked(pairs: Sequence[tuple[float, float]]) -> float:
    """Spearman's correlation."""
    ranks = [
        torch.tensor(column).argsort().argsort().double() for column in zip(*pairs, strict=True)
    ]
    return torch.corrcoef(torch.stack(ranks))[0, 1].item()


def refined(rows: Sequence[Row]) -> list[Row]:
    """Refinement."""
    recovered, moved = (_column(rows, x, probes=True) for x in ("found", "found_after_move"))
    return [
        bar("planted blocks found", recovered, least=0.95),
        bar("found again after they moved", moved, least=0.95),
        bar(
            "found without looking at what is not visited",
            _column(rows, "found", probes=False),
            most=0.25,
        ),
        bar("captured mass", _column(rows, "captured", probes=True), least=0.75),
        bar("the table keeps its size", _column(rows, "one_size"), least=1),
    ]


BARS: dict[str, Callable[[Sequence[Row]], list[Row]]] = {
    "flagged": flagged,
    "lengths": lengths,
    "schedules": schedules,
    "recall": recall,
    "language": language,
    "captured": captured,
    "refined": refined,
}


def of(name: str, rows: Sequence[Row]) -> list[Row]:
    """The bars of a record."""
    return BARS[name](rows) if name in BARS else []
