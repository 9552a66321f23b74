"""torchrun of processes that are forked from the one that runs it, which has imported torch.

Fresh processes take seconds to import. Tests of torchrun itself, and slow ones, start fresh ones.
"""

import atexit
import multiprocessing
import os
import runpy
import signal
import sys
import time
import traceback
from types import FrameType
from typing import Any

import torch
from torch.distributed import TCPStore
from torch.distributed.run import parse_args

GRACE = 30.0  # seconds that the others have to stop after the end of one, as torchrun's have


def main(words: list[str]) -> None:
    """Runs torchrun's command line; exits with 1 if ranks have failed once too often."""
    options = parse_args(words)
    assert not options.no_python, "such a command needs fresh processes"
    signal.signal(signal.SIGTERM, _exit)
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # outlives restarts
    for restarts in range(options.max_restarts + 1):
        if _ended_well(options, store.port, restarts):
            return
    sys.exit(1)


def _exit(number: int, frame: FrameType | None) -> None:
    sys.exit(128 + number)


def _ended_well(options: Any, port: int, restarts: int) -> bool:
    """Runs all ranks; whether all have ended with 0. The first that has not stops the others."""
    world = int(options.nproc_per_node)
    sys.stdout.flush()
    sys.stderr.flush()
    running: list[int] = []
    try:
        for rank in range(world):
            pid = os.fork()
            if pid == 0:
                _run_rank(options, rank, world, port, restarts)
            running.append(pid)
        while running:
            for pid in list(running):
                ended, status = os.waitpid(pid, os.WNOHANG)
                if ended:
                    running.remove(pid)
                    if status:
                        return False
            time.sleep(0.005)
        return True
    finally:
        _stop(running)


def _stop(running: list[int]) -> None:
    """Asks processes to stop, and kills those that have not after `GRACE`."""
    for pid in running:
        os.kill(pid, signal.SIGTERM)
    last = time.monotonic() + GRACE
    for pid in running:
        while not os.waitpid(pid, os.WNOHANG)[0]:
            if time.monotonic() > last:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
                break
            time.sleep(0.005)


def _run_rank(options: Any, rank: int, world: int, port: int, restarts: int) -> None:
    """Runs the script or module in this process, and ends it."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    torch.set_num_threads(1)
    context_of = multiprocessing.get_context  # what a rank starts anew is forked from it too
    multiprocessing.get_context = lambda method=None: context_of(  # type: ignore[assignment]
        "forkserver" if method == "spawn" else method
    )
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_PORT")
    os.environ.update(zip(names, map(str, (rank, rank, world, world, port)), strict=True))
    os.environ.update(MASTER_ADDR="127.0.0.1", TORCHELASTIC_RESTART_COUNT=str(restarts))
    os.environ.update(TORCHELASTIC_RUN_ID="forked", TORCHELASTIC_USE_AGENT_STORE="True")
    program, sys.argv = options.training_script, [options.training_script]
    sys.argv += options.training_script_args
    status = 1
    try:
        if options.module:
            runpy.run_module(program, run_name="__main__", alter_sys=True)
        else:
            sys.path.insert(0, os.path.dirname(program))
            runpy.run_path(program, run_name="__main__")
        status = 0
    except SystemExit as ended:
        if isinstance(ended.code, str):
            print(ended.code, file=sys.stderr)
        else:
            status = ended.code or 0
    except BaseException:
        traceback.print_exc()
    finally:
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
