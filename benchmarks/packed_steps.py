"""Measures what documents of other lengths cost in each step of compiled training.

    python -m benchmarks.packed_steps --out benchmarks/records

`packed-steps.json`: milliseconds of a training step of a small model over 8,192 packed tokens,
compiled once (`fullgraph=True`), with the lengths as a tensor: the same in each step, and others in
each step, in turns. Their difference is the cost of new layouts. Then FlexAttention's
`create_block_mask` for such documents, plain and compiled.
"""

import argparse
import statistics
import time
from pathlib import Path

import torch
from torch import Tensor
from torch._dynamo.utils import counters

import sparsering as sr

from .measure import write_record
from .new_layouts import TRAINED, Small, lengths_of, mask_times

STEPS, DOCUMENTS = 200, 20


def steps() -> list[dict[str, object]]:
    """Rows of steps with the same lengths and with others, in turns."""
    torch.manual_seed(0)
    model = Small()
    optimizer = torch.optim.AdamW(model.parameters())
    tokens = torch.randint(0, 256, (1, TRAINED))

    def loss(lengths: Tensor) -> Tensor:
        logits = model(tokens, sr.Causal() & sr.Documents(lengths))
        return torch.nn.functional.cross_entropy(logits[0, :-1], tokens[0, 1:])

    compiled = torch.compile(loss, fullgraph=True)
    counters.clear()
    first = torch.tensor(lengths_of(TRAINED, DOCUMENTS, 0))
    times: dict[str, list[float]] = {"the same": [], "other": []}
    for step in range(2 * STEPS + 4):
        kind = ("the same", "other")[step % 2]
        given = first if kind == "the same" else torch.tensor(lengths_of(TRAINED, DOCUMENTS, step))
        begin = time.perf_counter()
        compiled(given).backward()
        optimizer.step()
        optimizer.zero_grad()
        if step >= 4:
            times[kind].append(1e3 * (time.perf_counter() - begin))
    graphs = counters["stats"]["unique_graphs"]
    median = {kind: statistics.median(x) for kind, x in times.items()}
    extra = [b - a for a, b in zip(times["the same"], times["other"], strict=True)]
    cost = statistics.median(extra)
    shared = {"tokens": TRAINED, "documents": DOCUMENTS, "steps": STEPS, "graphs": graphs}
    return [
        {"case": f"step, {kind} lengths", "ms": ms, **shared} for kind, ms in median.items()
    ] + [{"case": "new layout", "ms": cost, "share": cost / median["other"], **shared}]


def masks() -> list[dict[str, object]]:
    """Rows of FlexAttention's mask of the same documents, plain and compiled."""
    from torch.nn.attention.flex_attention import create_block_mask

    rows: list[dict[str, object]] = []
    for name, make in (
        ("plain", create_block_mask),
        ("compiled", torch.compile(create_block_mask)),
    ):
        ms = statistics.median(mask_times(make, TRAINED, DOCUMENTS, time.perf_counter_ns))
        row = {"case": f"create_block_mask, {name}", "ms": ms}
        rows.append(row | {"tokens": TRAINED, "documents": DOCUMENTS})
    return rows


def main() -> None:
    """Writes the record."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("benchmarks/records"))
    write_record(parser.parse_args().out, "packed-steps", [*steps(), *masks()])


if __name__ == "__main__":
    main()
