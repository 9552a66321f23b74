"""Ranks that torchrun binds to a NUMA node give the results of those that it does not.

`--numa-binding` binds a rank to the node of its GPU, by the program numactl. Where there is no GPU,
the ranks' one seam to CUDA, the node of a GPU, is answered from /sys here; where numactl is not
installed, a script binds as it does. Flag, launcher, binding and ranks are those of torch.
"""

import ast
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

NODES = sorted(Path("/sys/devices/system/node").glob("node[0-9]*"))

LAUNCHER = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]

RANK = """
import os, torch
import torch.distributed as dist
from sparsering import Causal
from sparsering.distributed import ring_attention, shard

torch.set_num_threads(1)
dist.init_process_group("gloo")
torch.manual_seed(0)
whole = torch.randn(3, 1, 2, 192, 16)
own = [x.requires_grad_() for x in shard(whole, dim=3)]
out = ring_attention(*own, Causal())
grads = torch.autograd.grad(out.square().sum(), own)
bits = [x.detach().view(torch.int32).sum(dtype=torch.int64).item() for x in (out, *grads)]
bound = os.environ.get("BOUND", "")
found = dist.get_rank(), sorted(os.sched_getaffinity(0)), bits, bound
print(f"FOUND {found}\\n", end="", flush=True)  # one write: lines of two ranks stay apart
dist.destroy_process_group()
"""

GPU_ON_EVERY_NODE = """
import torch.numa.binding as binding
binding._get_numa_node_index_for_gpu_index = lambda *, gpu_index: gpu_index % {nodes}
"""

NUMACTL = """#!{python}
import os, sys
first, *command = sys.argv[1:]
name, _, cpus = first.partition("=")
assert name == "--physcpubind"
ends = [part.split("-") for part in cpus.split(",")]
os.sched_setaffinity(0, {{cpu for end in ends for cpu in range(int(end[0]), int(end[-1]) + 1)}})
os.environ["BOUND"] = cpus
os.execvp(command[0], command)
"""


def run_ranks(folder: Path, *options: str) -> dict[int, list]:
    """(processors, bits of results, what a script was asked to bind) of two ranks of torchrun."""
    program = folder / "rank.py"
    program.write_text(RANK)
    paths = [str(folder), str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")]
    done = subprocess.run(
        [*LAUNCHER, *options, str(program)],
        env=os.environ
        | {"GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": os.pathsep.join(paths)}
        | {"PATH": f"{folder}{os.pathsep}{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stdout.splitlines() if "FOUND" in line]
    found = [ast.literal_eval(line.split("FOUND ")[1]) for line in lines]
    return {rank: results for rank, *results in found}


@pytest.mark.slow
@pytest.mark.skipif(not NODES, reason="Linux tells of no NUMA nodes here")
def test_bound_ranks_compute_the_same(tmp_path):
    if not torch.cuda.is_available():
        (tmp_path / "sitecustomize.py").write_text(GPU_ON_EVERY_NODE.format(nodes=len(NODES)))
    if scripted := shutil.which("numactl") is None:
        (tmp_path / "numactl").write_text(NUMACTL.format(python=sys.executable))
        (tmp_path / "numactl").chmod(0o755)
    free = run_ranks(tmp_path)
    bound = run_ranks(tmp_path, "--numa-binding", "node")
    assert bound.keys() == free.keys() == {0, 1}
    for rank, (processors, bits, asked) in bound.items():
        everywhere, expected, nothing = free[rank]
        assert bits == expected
        assert set(processors) <= set(everywhere)
        assert nothing == "" and bool(asked) == scripted
        if len(NODES) == 1:
            assert processors == everywhere
