"""Processes that run functions together, as the ranks of a process group on gloo."""

import gc
import multiprocessing
import os
import tempfile
import traceback
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers.forked import forking

MAX_WORLD = 8
_TIMEOUT = 120.0  # of the tests; nothing should take as long

groups: dict[int, dist.ProcessGroup] = {}
"""In a worker: the first n ranks, by n; those that this one is in."""


class Workers:
    """`world` processes with a default group, and a group of the first n for each n.

    Only workers that are not `forked` see the current environment variables.
    """

    def __init__(self, world: int, timeout: float = 60.0, forked: bool = True) -> None:
        context = forking() if forked else multiprocessing.get_context("spawn")
        self.folder = tempfile.TemporaryDirectory()
        address = f"file://{self.folder.name}/rendezvous"
        self.pipes, self.processes = [], []
        for rank in range(world):
            own, theirs = context.Pipe()
            process = context.Process(
                target=_work, args=(theirs, rank, world, address, timeout), daemon=True
            )
            process.start()
            self.pipes.append(own)
            self.processes.append(process)

    def run(self, function: Callable[..., Any], *args: Any, world: int | None = None) -> list[Any]:
        """Returns `function(rank, *args)` of each of the first `world` ranks.

        The first error of a rank is raised here.
        """
        pipes = self.pipes[:world]
        for pipe in pipes:
            pipe.send((function, args))
        return self.results(pipes)

    def results(self, pipes: list[Connection]) -> list[Any]:
        results = []
        for rank, pipe in enumerate(pipes):
            if not pipe.poll(_TIMEOUT):
                raise TimeoutError(f"rank {rank} does not answer")
            results.append(pipe.recv())
        for rank, (fine, result) in enumerate(results):
            if not fine:
                raise AssertionError(f"rank {rank} raised:\n{result}")
        return [result for _, result in results]

    def close(self) -> None:
        for process in self.processes:
            process.kill()
            process.join()
        self.folder.cleanup()


def workers_of(world: int, scope: str = "module") -> Any:
    """A fixture: workers that the tests of a scope share."""

    @pytest.fixture(scope=scope)
    def started() -> Iterator[Workers]:
        workers = Workers(world)
        yield workers
        workers.close()

    return started


def _work(pipe: Connection, rank: int, world: int, address: str, timeout: float) -> None:
    from datetime import timedelta

    torch.set_num_threads(1)
    gc.freeze()  # what was imported: not looked through again, and its pages stay shared
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group(
        "gloo", init_method=address, rank=rank, world_size=world, timeout=timedelta(seconds=timeout)
    )
    for size in range(1, world + 1):
        group = dist.new_group(list(range(size)))
        if rank < size:
            groups[size] = group
    while True:
        try:
            function, args = pipe.recv()
        except EOFError:
            return
        try:
            pipe.send((True, function(rank, *args)))
        except BaseException:
            pipe.send((False, traceback.format_exc()))
