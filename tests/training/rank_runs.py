"""Runs over ranks that tests start: by workers that stay, by torchrun as users do, or forked."""

import dataclasses
import gc
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from helpers import torchrun as forked_torchrun
from helpers.forked import forking
from helpers.ring_workers import Workers

from sparsering.cli import main
from sparsering.training import Recipe, train
from sparsering.training.ranks import arrange

RECIPE = Recipe(
    pattern="LongNet((16, 64), (1, 4))",
    context=64,
    batch_size=2,
    width=16,
    num_layers=2,
    num_heads=2,
    steps=8,
    warmup_steps=2,
    dtype="float32",
)
TOLERANCE = 2e-6
"""Relative, of losses and gradient norms in float32; 4e-7 is the largest difference seen."""


def train_rank(
    rank: int, recipe: Recipe, out: Path, sp: int, sharding: str, options: dict[str, Any]
) -> list[dict[str, Any]]:
    """A rank's metrics, without its own time; the option "shard" is `--shard`."""
    ranks = arrange(sp, sharding=sharding, shard_parameters=options.pop("shard", False))
    metrics = train(recipe, out, validate_every=4, ranks=ranks, **options).metrics
    return [{name: record[name] for name in record if name != "seconds"} for record in metrics]


def figures(folder: Path) -> dict[tuple[int, str], float]:
    """Losses and gradient norms of `metrics.jsonl`, by step and name."""
    text = (folder / "metrics.jsonl").read_text()
    whole = text[: text.rfind("\n") + 1].splitlines()
    return {
        (record["step"], name): record[name]
        for record in map(json.loads, whole)
        for name in ("loss", "grad_norm", "validation_loss")
        if name in record
    }


def run(
    workers: Workers, recipe: Recipe, out: Path, sp: int, sharding: str = "contiguous", **options
) -> list[list[dict[str, Any]]]:
    return workers.run(train_rank, recipe, out, sp, sharding, options)


def torchrun(number: int, *words: object) -> list[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", number, *words]
    return [str(word) for word in command]


def train_words(recipe: Recipe, out: Path) -> list[object]:
    words: list[object] = ["-m", "sparsering", "train", "--out", out]
    for field in dataclasses.fields(recipe):
        if field.name != "checkpoint_layers":
            words += ["--" + field.name.replace("_", "-"), getattr(recipe, field.name)]
    return words


def has_reached(out: Path, step: int) -> bool:
    return (out / "metrics.jsonl").exists() and (step, "loss") in figures(out)


def watch(process: subprocess.Popen, log: Path, is_there: Callable[[], bool]) -> None:
    while not is_there():
        assert process.poll() is None, log.read_text()
        time.sleep(0.02)


def worker(launcher: int, rank: int) -> int:
    """The process that torchrun started for a rank."""
    for child in children(launcher):
        environment = Path(f"/proc/{child}/environ").read_bytes().split(b"\0")
        if b"RANK=%d" % rank in environment:
            return child
    raise AssertionError(f"no rank {rank} under {launcher}")


def children(process: int) -> list[int]:
    """The processes that a process has started, in that order."""
    return [int(x) for x in Path(f"/proc/{process}/task/{process}/children").read_text().split()]


class ForkedCommand:
    """A command line of sparsering's or torchrun's as `subprocess.Popen` shows it, but forked.

    For torchrun's processes see `helpers.torchrun`.
    """

    def __init__(self, program: str, words: list[str], log: Path) -> None:
        log.touch()
        self._process = forking().Process(target=_launch, args=(program, words, log))
        self._process.start()
        assert self._process.pid is not None
        self.pid = self._process.pid

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int | None:
        self._process.join(timeout)
        return self._process.exitcode

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def terminate(self) -> None:
        self._process.terminate()

    def kill(self) -> None:
        self._process.kill()

    def worker(self, rank: int) -> int:
        """The process that was forked for a rank."""
        found = children(self.pid)
        assert len(found) > rank, f"no rank {rank} under {self.pid}"
        return found[rank]


def _launch(program: str, words: list[str], log: Path) -> None:
    gc.freeze()  # what was imported: no search for garbage looks through it
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    with open(log, "w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    if program == "torchrun":
        forked_torchrun.main(words)
    else:
        sys.exit(main(words))
