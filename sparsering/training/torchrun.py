"""Joins the processes that torchrun starts, also when it restarts them after a failure.

Example:
    with ranks_of_torchrun(sequence_parallel=4) as ranks:
        train(recipe, out, resume=starts_again(ranks, out), ranks=ranks)
"""

import os
import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from .checkpoint import read_about
from .ranks import TIMEOUT_S, Ranks, arrange


@contextmanager
def ranks_of_torchrun(
    sequence_parallel: int | None = None,
    *,
    sharding: str | None = None,
    timeout: float | None = None,
) -> Iterator[Ranks]:
    """Joins the processes that torchrun started, with gloo on CPUs and NCCL on GPUs.

    Without torchrun it yields `Ranks` of a single process.

    Args:
        sequence_parallel: number of ranks that share each sequence; default 1.
        sharding: as for `RingPlan`; default "contiguous".
        timeout: seconds that a rank waits for its peers; default TIMEOUT_S.
    """
    if not dist.is_torchelastic_launched():
        if (sequence_parallel or 1) > 1 or sharding is not None or timeout is not None:
            raise ValueError(
                "--sequence-parallel, --sharding and --timeout need processes started by torchrun, "
                "got a process started without it; begin the command with torchrun "
                f"--nproc-per-node {sequence_parallel or 1} -m sparsering, or leave these out"
            )
        yield Ranks()
        return
    on_gpu = torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"])
    if on_gpu:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    seconds = TIMEOUT_S if timeout is None else timeout
    if not seconds > 0:
        raise ValueError(f"--timeout must be above 0 seconds, got {timeout}; leave it out for 60")
    start = max(seconds, TIMEOUT_S)  # starting may take long even if the timeout is short
    store, rank, world = next(dist.rendezvous("env://", timeout=timedelta(seconds=start)))
    dist.init_process_group(
        "nccl" if on_gpu else "gloo",
        store=_fresh_store(store, rank, world, start),
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=seconds),
    )
    yield arrange(sequence_parallel or 1, sharding=sharding or "contiguous", timeout=seconds)
    dist.destroy_process_group()  # not after an error, because peers may be dead


def starts_again(ranks: Ranks, folder: Path) -> bool:
    """Whether torchrun has restarted these processes after they saved a checkpoint in `folder`.

    A checkpoint from another launch of torchrun does not count.
    """
    if ranks.mesh is None:
        return False
    restarts = ranks.gather(int(os.environ["TORCHELASTIC_RESTART_COUNT"]))
    same_launch = False
    if ranks.leads and max(restarts) > 0:  # hosts may count restarts differently
        with suppress(OSError, ValueError):
            same_launch = read_about(folder).launch == launch()
    return ranks.from_leader(same_launch)


def launch() -> str | None:
    """Returns a name of this torchrun command, unchanged by restarts; None without torchrun."""
    if not dist.is_torchelastic_launched():
        return None
    name = os.environ["TORCHELASTIC_RUN_ID"]
    return f"process {os.getppid()}" if name == "none" else name


def _fresh_store(store: dist.Store, rank: int, world: int, timeout: float) -> dist.Store:
    """Returns a namespace of torchrun's store that only these processes use.

    torchrun keeps its store when it restarts processes, with the addresses of the dead processes.
    So rank 0 draws a random namespace, and every other rank writes a random greeting there. Rank 0
    publishes the greetings that it has read. A rank that finds its own greeting knows that the
    namespace is not from a dead rank 0.
    """
    name = secrets.token_hex(8)
    if rank == 0:
        store.set("namespace", name)
        keys = [f"{name}/{other}" for other in range(1, world)]
        store.wait(keys, timedelta(seconds=timeout))
        store.set(f"{name}/greetings", " ".join(store.get(key).decode() for key in keys))
        return dist.PrefixStore(name, store)
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        namespace = store.get("namespace").decode()
        store.set(f"{namespace}/{rank}", name)
        greetings = f"{namespace}/greetings"
        if store.check([greetings]) and name in store.get(greetings).decode():
            return dist.PrefixStore(namespace, store)
        time.sleep(0.02)
    raise TimeoutError(
        f"rank {rank} has not met rank 0 within {timeout} s; pass a longer --timeout"
    )
