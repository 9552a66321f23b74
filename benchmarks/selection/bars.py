"""What each record has to show, and whether it does: over all seeds, the worst of them counts."""

from collections.abc import Callable, Iterable, Sequence

from sparsering.bench.measure import Row


def bar(name: str, values: Iterable[float], *, least: float | None = None, most: float | None = None) -> Row:
    """One bar: the worst value beside what it has to reach."""
    found = list(values)
    worst = (min if most is None else max)(found, default=float("nan"))
    met = worst >= least if most is None else worst <= most
    asked = {"at_least": least} if most is None else {"at_most": most}
    return {"bar": name, **asked, "worst": worst, "runs": len(found), "met": bool(met)}


def _column(rows: Sequence[Row], column: str, **where: object) -> list[float]:
    """The numbers of a column where others hold what is asked."""
    return [
        row[column]
        for row in rows
        if row.get(column) is not None and all(row.get(k) == v for k, v in where.items())
    ]


def flagged(rows: Sequence[Row]) -> list[Row]:
    found = []
    for size, low in (("small", 0.25), ("hard", 0.15)):
        at = {"experiment": size}
        for arm in ("kl", "pooled", "bias"):
            accuracy = _column(rows, "accuracy", arm=arm, **at)
            found.append(bar(f"{size}: {arm}, accuracy", accuracy, least=0.95))
            recall = _column(rows, "recall", arm=arm, **at)
            found.append(bar(f"{size}: {arm}, recall", recall, least=0.98))
            shuffled = _column(rows, "shuffled", arm=arm, **at)
            found.append(bar(f"{size}: {arm}, scores shuffled, accuracy", shuffled, most=low))
        for arm in ("frozen", "random", "window"):
            accuracy = _column(rows, "accuracy", arm=arm, **at)
            found.append(bar(f"{size}: {arm}, accuracy", accuracy, most=low))
        mean = _column(rows, "accuracy", arm="mean", **at)
        found.append(bar(f"{size}: mean, accuracy", mean, most=0.5 if size == "small" else 0.3))
        pairs = [row["density"] / (64 / row["tokens"]) for row in rows
                 if row["experiment"] == size and row["arm"] != "full"]
        found.append(bar(f"{size}: pairs over those of 4 blocks a question", pairs, most=1.02))
    straight = _column(rows, "accuracy", arm="straight-through", experiment="small")
    return [*found, bar("small: straight-through, accuracy", straight, most=0.25)]


def lengths(rows: Sequence[Row]) -> list[Row]:
    found = []
    for tokens in (4096, 16384):
        full = {row["seed"]: row["accuracy"] for row in rows
                if row["arm"] == "full" and row["tokens"] == tokens}
        for arm in ("kl", "pooled"):
            at = [row for row in rows if row["arm"] == arm and row["tokens"] == tokens]
            values = [row["accuracy"] for row in at]
            found.append(bar(f"{tokens}: {arm}, accuracy", values, least=0.97))
            above = [row["accuracy"] - full[row["seed"]] for row in at]
            found.append(bar(f"{tokens}: {arm}, accuracy less full attention's", above, least=-0.01))
        for arm, most in (("mean", 0.15), ("window", 0.06)):
            values = _column(rows, "accuracy", arm=arm, tokens=tokens)
            found.append(bar(f"{tokens}: {arm}, accuracy", values, most=most))
    return found


def schedules(rows: Sequence[Row]) -> list[Row]:
    gated = {"experiment": "hard", "arm": "kl"}
    return [
        bar("gated, accuracy", _column(rows, "accuracy", **gated), least=0.95),
        bar("cold, accuracy", _column(rows, "accuracy", schedule="cold"), most=0.10),
        bar("gated: largest rise of the loss at a switch, in standard deviations",
            _column(rows, "largest_rise", **gated), most=3.0),
        bar("gated: resumed in the middle of the ramp, equal bits",
            _column(rows, "resumes_bit_equal", **gated), least=1),
    ]


BARS: dict[str, Callable[[Sequence[Row]], list[Row]]] = {
    "flagged": flagged,
    "lengths": lengths,
    "schedules": schedules,
}


def of(name: str, rows: Sequence[Row]) -> list[Row]:
    """The bars of a record."""
    return BARS[name](rows) if name in BARS else []
