"""The GPU record as Markdown lines for README and docs, and as a plot."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .bars import rows_of

Record = dict[str, Any]
_OF_SETTINGS = ("tuned shapes", "windows", "share of dense", "new masks", "stages and tiles")


def markdown(record: Record) -> Iterator[str]:
    """Yields lines of Markdown: the environment, the bars, and a table for each kind of figure."""
    place = record["environment"]
    yield (
        f"{place['gpu'] or 'A rehearsal without a GPU: these figures mean nothing'}, torch "
        f"{place['torch']}, Triton {place['triton']}, commit "
        f"{(place['commit'] or 'unknown')[:10]}, {place['date'][:10]}."
    )
    ran = {
        state["sources"] for part in record["parts"].values() for state in part["cases"].values()
    }
    commits = {record["runs"][state["run"]]["commit"] for part in record["parts"].values()
               for state in part["cases"].values()}  # fmt: skip
    if len(commits) > 1:
        yield f"Of {len(commits)} commits; the record says which figure is of which."
    assert ran
    yield from ("", *_bars(record))
    yield from ("", *_main(record))
    yield from ("", *_others(record))
    yield from ("", *_densities(record))
    yield from ("", *_missing(record))


def _bars(record: Record) -> Iterator[str]:
    yield from ("| asked | floor | aim | found | met |", "|---|---|---|---|---|")
    for bar in record["bars"]:
        unit = f" {bar['unit']}" if bar["unit"] else ""
        sign = "at most " if bar["at_most"] else ""
        aim = "" if bar["aim"] is None else f"{bar['aim']:g}{unit}"
        value = "not measured" if bar["found"] is None else f"{bar['found']:.3g}{unit}"
        met = {None: "", True: "floor", False: "no"}[bar["floor_met"]]
        met = "aim" if bar["aim_met"] else met
        yield f"| {bar['bar']} | {sign}{bar['floor']:g}{unit} | {aim} | {value} | {met} |"


def _main(record: Record) -> Iterator[str]:
    """Yields ours and the peers at the main shapes, with the share of a matrix product's rate."""
    ceiling = rows_of(record, "ceilings", backend="matmul")
    best = ceiling[0]["tflops"] if ceiling else None
    peers = ("flex", "flex, FLASH", "flash-attn-4", "dense cudnn", "dense flash",
             "dense flash-attn-3", "dense")  # fmt: skip
    rows = rows_of(record, "main shapes")
    there = [peer for peer in peers if any(row["backend"] == peer for row in rows)]
    yield "| case | ours | of a matrix product's rate | " + " | ".join(there) + " |"
    yield "|---" * (3 + len(there)) + "|"
    for ours in (row for row in rows if row["backend"] == "ours"):
        same = {"setting": ours["setting"], "case": ours["case"]}
        cells = [
            f"{ours['case']}, {ours['setting']}",
            f"{_ms(ours)}, {ours['tflops']:.0f} TFLOP/s, {ours['error']:.0e}",
            f"{ours['tflops'] / best:.0%}" if best else "",
        ]
        for peer in there:
            of_peer = rows_of(record, "main shapes", backend=peer, **same)
            cells.append(
                f"{_ms(of_peer[0])}, {of_peer[0]['ms'] / ours['ms']:.2f} x"
                if of_peer
                else "cannot run"
            )
        yield f"| {' | '.join(cells)} |"


def _others(record: Record) -> Iterator[str]:
    yield from ("| what | ours | rate, error |", "|---|---|---|")
    for part in ("share of dense", "new masks", "stages and tiles", "founding table", "longnet",
                 "windows", "documents", "selected blocks", "decoding",
                 "beside tuned FlexAttention", "overhead", "layouts", "tuned shapes",
                 "ceilings"):  # fmt: skip
        for row in rows_of(record, part):
            if str(row.get("backend", "ours")).startswith("dense"):
                continue
            named = [part, row.get("backend"), row.get("pattern"), row.get("case")]
            named += [row.get("kernel")]
            named += [row.get("setting")] if part in _OF_SETTINGS else []
            figures = [f"{row[key]:.3g} {unit}" for key, unit in
                    (("tflops", "TFLOP/s"), ("gb_per_s", "GB/s"), ("density", "dense"),
                     ("share_of_dense", "of the dense rate"), ("first_tile_ms", "ms to a tile"))
                    if row.get(key) is not None]  # fmt: skip
            figures += [f"{row['error']:.0e}"] if row.get("error") is not None else []
            name = ", ".join(str(x) for x in named if x and x != "ours")
            yield f"| {name} | {_ms(row)} | {', '.join(figures)} |"
    for row in record["parts"].get("memory", {}).get("rows", []):
        name = f"memory, {row['pattern']}, {row['case']}, {row['tokens']} tokens"
        share = row["share_of_inputs_and_outputs"]
        yield f"| {name} | {row['extra_bytes'] / 1e6:.0f} MB | {share:.2g} of inputs and outputs |"


def _densities(record: Record) -> Iterator[str]:
    """Yields TFLOP/s of ours by length, shape and density: forward; with backward."""
    rows = [row for name in record["parts"] if name.startswith("grid")
            for row in rows_of(record, name, backend="ours")]  # fmt: skip
    shares = sorted({row["drawn"] for row in rows})
    yield "| tokens, shape | " + " | ".join(f"{share:.0%}" for share in shares) + " |"
    yield "|---" * (1 + len(shares)) + "|"
    for tokens, setting in dict.fromkeys((row["tokens"], row["setting"]) for row in rows):
        cells = []
        for share in shares:
            own = [row for row in rows if (row["tokens"], row["setting"]) == (tokens, setting)
                   and row["drawn"] == share]  # fmt: skip
            cells.append("; ".join(f"{row['tflops']:.0f}" for row in own))
        yield f"| {tokens}, {setting} | {' | '.join(cells)} |"


def _missing(record: Record) -> Iterator[str]:
    for name, part in record["parts"].items():
        for case, state in part["cases"].items():
            for how in ("failed", "left"):
                if how in state:
                    yield f"- {name}, {case}: {how}, {state[how]}"


def _ms(row: dict[str, Any]) -> str:
    digits = 3 if row["ms"] < 1 else 2 if row["ms"] < 10 else 1
    return f"{row['ms']:.{digits}f} ms ({row['least_ms']:.{digits}f}-{row['most_ms']:.{digits}f})"


def plot(record: Record, path: Path) -> None:
    """Plots TFLOP/s on visited blocks as bars, for all parts but the grids and the ceilings."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    shown = {name: [row for row in rows_of(record, name) if "tflops" in row]
             for name in record["parts"] if not name.startswith(("grid", "ceilings"))}  # fmt: skip
    shown = {name: rows for name, rows in shown.items() if rows}
    figure = Figure(figsize=(8, 0.9 + 0.2 * sum(1 + len(rows) for rows in shown.values())))
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    labels, place = [], 0.0
    for name, rows in shown.items():
        place += 1
        for row in rows:
            color = "#c0504d" if str(row["backend"]).startswith("ours") else "#8c8c8c"
            axes.barh(place, row["tflops"], color=color)
            words = [name, row["setting"] if name != row["setting"] else "", row.get("case", "")]
            labels.append((place, ", ".join(filter(None, (*words, row["backend"])))))
            place += 1
    axes.set_yticks([at for at, _ in labels], [text for _, text in labels], fontsize=6)
    axes.invert_yaxis()
    for row in rows_of(record, "ceilings", backend="matmul"):
        axes.axvline(row["tflops"], color="black", linestyle=":")
    axes.set_xlabel("TFLOP/s on the blocks that are visited")
    figure.tight_layout()
    figure.savefig(path, dpi=130)
