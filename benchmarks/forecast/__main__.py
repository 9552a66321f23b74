"""Writes benchmarks/records/gpu-forecast.json, and prints it as the tables of docs/gpu.md.

    python -m benchmarks.forecast --out benchmarks/records [--before OTHER.json]
    python -m benchmarks.forecast --tables benchmarks/records

Needs Triton, no GPU. `--before` takes the rows of another record along, of older sources. The
second line writes nothing: where `benchmarks.gpu` has left its record in that folder, measured
figures stand beside those that were forecast.
"""

import argparse
import json
import sys
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from sparsering.bench.measure import environment

from ..gpu.bars import rows_of
from .compiled import IN_GLUON, KERNELS, Compiled, compiled
from .processor import FLOPS, forecast

Row = dict[str, Any]
NAME = "gpu-forecast"
PROCESSORS, CLOCK = 132, 1.755e9  # of an H100 or H200; a clock at which such products run
# Bytes a cycle and multiprocessor from the second cache: what a published kernel must at least have
# had (FastVideo's, 556 TFLOP/s on blocks of 64 x 64, head dim 128, each program reading its own).
CACHE_BYTES = 37.5
PRODUCTS = {"forward": 2, "query": 3, "key": 4, IN_GLUON: 2}  # of matrices, for a pair of tiles
NAMES = {"forward": "forward", "query": "dQ", "key": "dK, dV", IN_GLUON: "forward in Gluon"}
USEFUL = {"forward": 2, "forward+backward": 7}  # products that count: no scores computed again


def row_of(made: Compiled, head_dim: int, block: int) -> Row:
    """What is known of a kernel of this shape, and forecast."""
    told, counts = forecast(made), made.counts
    flops = 2 * PRODUCTS[made.kernel] * made.rows * made.streamed * head_dim
    copied = 2 * made.streamed * head_dim * 2  # two tensors of half precision
    cache = copied * made.per_processor / CACHE_BYTES
    bounds = told.bounds | {"cache": cache}
    cycles = max(told.cycles, cache)
    return {
        "kernel": made.kernel, "head_dim": head_dim, "block_size": block,
        "config": list(made.config), "registers": made.registers, "spilled": made.spilled,
        "shared": made.shared, "programs": made.per_processor,
        "instructions": len(made.loop), "wgmma": counts["HGMMA"],
        "waits": sum("DEPBAR" in x.text or x.name in ("BAR", "SYNCS") for x in made.loop),
        "addresses": counts["IMAD"] + counts["IADD3"] + counts["LEA"],
        "bytes_copied": copied, "flops_per_byte": flops / copied,
        "cycles": cycles, "bounds": bounds,
        "limiter": "cache" if cache >= told.cycles else told.limiter,
        "share_of_peak": flops * made.per_processor / cycles / FLOPS,
        "tflops": flops * made.per_processor / cycles * PROCESSORS * CLOCK / 1e12,
    }  # fmt: skip


def rows() -> Iterator[Row]:
    """Of every main shape and kernel; last, the forwards that only `sparsering tune` chooses."""
    from sparsering.kernels.triton import tuning

    shapes = [(head_dim, block) for head_dim in (64, 128) for block in (64, 128)]
    for head_dim, block in shapes:
        for made in compiled({"head_dim": head_dim, "block_size": block}):
            yield row_of(made, head_dim, block)
    for head_dim, block in shapes:
        like = torch.empty(1, dtype=torch.bfloat16)
        for config in tuning.candidates("forward", like, head_dim, block):
            if config.warp_specialize:
                case = {"head_dim": head_dim, "block_size": block}
                yield row_of(compiled(case, config, "forward")[0], head_dim, block)


def together(found: Sequence[Row]) -> Iterator[Row]:
    """Of each shape what calls should reach, in the products that count."""
    for head_dim, block in sorted({(r["head_dim"], r["block_size"]) for r in found}):
        of_shape = [r for r in found if (r["head_dim"], r["block_size"]) == (head_dim, block)]
        taken = {r["kernel"]: PRODUCTS[r["kernel"]] / r["tflops"] for r in of_shape}
        for case, kernels in (("forward", KERNELS[:1]), ("forward+backward", KERNELS[:3])):
            tflops = USEFUL[case] / sum(taken[name] for name in kernels)
            yield {"case": case, "head_dim": head_dim, "block_size": block, "tflops": tflops}


def tables(record: Mapping[str, Any], gpu: dict[str, Any] | None) -> Iterator[str]:
    """The record in Markdown: of kernels, before and now, and of calls beside what was measured."""
    yield from kernels_table(record["rows"])
    if record.get("before"):
        yield from ("", f"Before (commit {record['before']['commit'][:10]}):", "")
        yield from kernels_table(record["before"]["rows"])
    yield ""
    yield "| call | forecast TFLOP/s | before | measured |"
    yield "|---|---|---|---|"
    old = {shape(r): r for r in together((record.get("before") or {}).get("rows", []))}
    for row in together(record["rows"]):
        before = f"{old[shape(row)]['tflops']:.0f}" if shape(row) in old else ""
        yield (
            f"| {row['case']}, head dim {row['head_dim']}, blocks of {row['block_size']} | "
            f"{row['tflops']:.0f} | {before} | {measured(gpu, row)} |"
        )


def kernels_table(found: Iterable[Row]) -> Iterator[str]:
    """A line for each kernel and shape."""
    yield (
        "| kernel, head dim, block | config | registers, spilled bytes | shared KiB, programs | "
        "instructions, addresses | wgmma, FLOP/byte | waits | cycles a step: tensor, of all | "
        "limiter | share of peak |"
    )
    yield "|---|---|---|---|---|---|---|---|---|---|"
    for r in found:
        kept, taken, warps, stages, *more = r["config"]
        config = f"{kept} x {taken}, {warps} warps, {stages} stages"
        config += ", in turn" * bool(more[3:] and more[3])
        yield (
            f"| {NAMES[r['kernel']]}, {r['head_dim']}, {r['block_size']} | {config} | "
            f"{r['registers']}, {r['spilled']} | {r['shared'] / 1024:.0f}, {r['programs']} | "
            f"{r['instructions']}, {r['addresses']} | {r['wgmma']}, {r['flops_per_byte']:.0f} | "
            f"{r['waits']} | {r['bounds']['tensor']:.0f}, {r['cycles']:.0f} | {r['limiter']} | "
            f"{r['share_of_peak']:.2f} |"
        )


def shape(row: Mapping[str, Any]) -> tuple[Any, ...]:
    """What a forecast and a measurement have in common."""
    return row["case"], row["head_dim"], row["block_size"]


def measured(gpu: dict[str, Any] | None, row: Row) -> str:
    """The rate that `benchmarks.gpu` found for a call of this shape."""
    at = {name: row[name] for name in ("case", "head_dim", "block_size")}
    found = rows_of(gpu or {}, "main shapes", backend="ours", **at)
    return f"{found[0]['tflops']:.0f}" if found else "not measured"


def main() -> int:
    """Exit code 0."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.forecast", description=__doc__)
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--out", type=Path, help="folder of the record")
    where.add_argument("--tables", type=Path, help="folder of a record to print")
    parser.add_argument("--before", type=Path, help="a record of older sources")
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore")
    if arguments.out:
        record = {"name": NAME, "environment": environment(), "rows": list(rows())}
        if arguments.before:
            before = json.loads(arguments.before.read_text())
            commit = before["environment"]["commit"]
            record["before"] = {"commit": commit, "rows": before["rows"]}
        arguments.out.mkdir(parents=True, exist_ok=True)
        (arguments.out / f"{NAME}.json").write_text(json.dumps(record, indent=1))
    folder = arguments.out or arguments.tables
    gpu = folder / "gpu.json"
    found = json.loads(gpu.read_text()) if gpu.exists() else None
    record = json.loads((folder / f"{NAME}.json").read_text())
    print("\n".join(tables(record, found)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
