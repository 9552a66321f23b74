"""Distributed training: splits a step's windows, and the tokens of each window, over a mesh.

    torchrun --nproc-per-node 8 -m sparsering train --sequence-parallel 4 --batch-size 2 --out out

The mesh has two axes. Ranks along "sp" share each sequence and attend by `ring_attention`. Ranks
along "dp" have different windows. Losses and gradients are summed, not averaged: each rank divides
its part by the number of all targets. By default every rank has all parameters. With FSDP2
(`fully_shard`), each rank has a part of every parameter, its gradient and its optimizer state.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from ..distributed import RingPlan, ring_attention, shard
from ..distributed.plan import default_plan
from ..ground.commands import program, sparsering
from ..models.longnet import LongNetLM
from ..nn.transformer import Attend
from .recipe import Recipe

TIMEOUT_S = 60.0

T = TypeVar("T")
E = TypeVar("E", bound=Exception)


@dataclass(frozen=True, eq=False)
class Ranks:
    """The processes that train one model together, and how they share its windows and weights.

    Every rank calls the same methods in the same order.
    """

    mesh: DeviceMesh | None = None  # axes "dp" (data parallel), "sp" (sequence parallel)
    sharding: str = "contiguous"  # how "sp" ranks divide a sequence, as for `RingPlan`
    timeout: float | None = None  # seconds that a rank waits for its peers at each step of a ring
    # A mesh of one axis with all ranks, each of which has a part of every parameter. None if every
    # rank has all parameters.
    shards: DeviceMesh | None = None

    @property
    def rank(self) -> int:
        return 0 if self.mesh is None else self.mesh.get_rank()

    @property
    def world_size(self) -> int:
        return 1 if self.mesh is None else self.mesh.size()

    @property
    def leads(self) -> bool:
        """Whether this process is rank 0, which prints and writes metrics."""
        return self.rank == 0

    def start(self, command: str) -> str:
        """Returns the shell command that runs `sparsering COMMAND` on this many processes."""
        if self.mesh is None:
            return sparsering(command)
        torchrun = program("torchrun", "torch.distributed.run")
        ranks = f"--nproc-per-node {self.world_size}"
        shared = f"--sequence-parallel {self.size('sp')}"
        parts = "" if self.shards is None else " --shard"
        return f"{torchrun} {ranks} -m sparsering {command} {shared}{parts}"

    @property
    def device(self) -> torch.device:
        on_gpu = self.mesh is not None and self.mesh.device_type == "cuda"
        return torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")

    def size(self, axis: str) -> int:
        """Number of ranks along the mesh axis "dp" or "sp"."""
        return 1 if self.mesh is None else self.mesh[axis].size()

    def place_along(self, axis: str) -> int:
        """Index of this process along the mesh axis "dp" or "sp"."""
        return 0 if self.mesh is None else self.mesh[axis].get_local_rank()

    def check(self, recipe: Recipe) -> None:
        """Raises ValueError if ranks cannot share the recipe's windows or their tokens."""
        if recipe.attention == "selected" and self.size("sp") > 1:
            raise ValueError(
                f"attention selected chooses among all keys of a window, got --sequence-parallel "
                f"{self.size('sp')}; pass --sequence-parallel 1"
            )
        if recipe.batch_size % self.size("dp"):
            dp, sp = self.size("dp"), self.size("sp")
            raise ValueError(
                f"expected a batch size that is a multiple of {dp}, because {dp * sp} processes "
                f"with --sequence-parallel {sp} are {dp} groups, got {recipe.batch_size}; pass "
                f"--batch-size {-(-recipe.batch_size // dp) * dp}, or --sequence-parallel {dp * sp}"
            )

    def from_leader(self, value: T) -> T:
        """Returns rank 0's value on all ranks; all must call it."""
        return self.gather(value)[0]

    def gather(self, value: T) -> list[T]:
        """Returns the values of all ranks, on all ranks; all must call it."""
        values = [value] * self.world_size
        if self.mesh is not None:
            dist.all_gather_object(values, value)
        return values

    def together(self, do: Callable[[], T]) -> T:
        """Runs `do` on all ranks and returns its result; raises on all ranks if one raises.

        A rank without an error of its own raises the error of the first rank that failed. `do` must
        not wait for other ranks, because they may have failed.
        """
        if self.mesh is None:
            return do()
        failure: Exception | None = None
        try:
            result = do()
        except Exception as error:
            failure = error
        kinds = (ValueError, OSError, ImportError, MemoryError)
        kind = next((kind for kind in kinds if isinstance(failure, kind)), RuntimeError)
        failures = self.gather(None if failure is None else (kind, str(failure)))
        for rank, other in enumerate(failures):
            if other is not None:
                raise spoken_by(rank, failure or other[0](f"rank {rank}: {other[1]}"))
        return result

    def agree(self, what: str, value: object) -> None:
        """Raises ValueError on all ranks if they pass different values; `what` describes them."""
        values = self.gather(value)
        for rank, other in enumerate(values):
            if other != values[0]:
                text = (
                    f"expected the same {what} on all ranks, got {values[0]} on rank 0 and "
                    f"{other} on rank {rank}; start every rank with the same arguments and files"
                )
                raise spoken_by(0, ValueError(text))

    def any_signal(self, number: int | None) -> int | None:
        """Returns the largest signal number that any rank passes; None if no rank passes one."""
        if self.mesh is None:
            return number
        largest = torch.tensor(number or 0, device=self.device)
        dist.all_reduce(largest, dist.ReduceOp.MAX)
        return int(largest) or None

    def place(self, model: LongNetLM) -> None:
        """Moves the model to this rank's device.

        With `shards`, splits its parameters over ranks.
        """
        if self.shards is None:
            model.to(self.device)
            return
        from torch.distributed.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method

        for module in (*model.blocks, model):  # one block's parameters are whole at a time
            # By default FSDP2 keeps the root's parameters whole after a forward pass. After a
            # validation, `parameters()` would not be the tensors that the optimizer knows.
            fully_shard(module, mesh=self.shards, reshard_after_forward=True)
            assert isinstance(module, FSDPModule)
            # The ranks' losses sum to the mean loss, so that gradients are summed too.
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
        register_fsdp_forward_method(model, "loss")

    def plan(self, model: LongNetLM, length: int) -> RingPlan:
        """Plans the model's ring attention over a sequence of `length` tokens."""
        options = {"num_heads": model.num_heads, "sharding": self.sharding}
        return default_plan(model.pattern, length, self.size("sp"), **options)

    def loss(
        self,
        model: LongNetLM,
        tokens: Tensor,
        targets: Tensor,
        attend: Attend | Sequence[Attend] | None = None,
        num_targets: int | None = None,
    ) -> Tensor:
        """Computes this rank's share of the mean loss over windows [B, N]; shares sum to the mean.

        The summed loss is divided by `num_targets`, by default the number of `targets`. If the
        windows do not divide evenly over "dp", every rank along "dp" computes all windows and
        returns 1 / dp of their loss.
        """
        if self.mesh is None:
            return model.loss(tokens, targets, attend=attend, num_targets=num_targets)
        batch, length = tokens.shape
        dp, num_targets = self.size("dp"), num_targets or targets.numel()
        if batch % dp:
            num_targets *= dp
        else:
            first = self.place_along("dp") * (batch // dp)
            tokens, targets = (x[first : first + batch // dp] for x in (tokens, targets))
        sp, sharding = self.mesh["sp"], self.plan(model, length).sharding
        cut = partial(shard, mesh=sp, sharding=sharding)
        ring = partial(
            ring_attention, pattern=model.pattern, mesh=sp, sharding=sharding, timeout=self.timeout
        )
        return model.loss(
            cut(tokens, dim=1).to(self.device),
            cut(targets, dim=1).to(self.device),
            attend=attend or cast(Attend, ring),
            positions=cut(torch.arange(length), dim=0).to(self.device),
            num_targets=num_targets,
        )

    def total(self, part: Tensor) -> float:
        """Sums the ranks' parts of a loss; returns the total on all ranks."""
        if self.mesh is not None:
            part = part.detach().double()
            dist.all_reduce(part)
        return part.item()

    def clip_gradients(self, model: nn.Module, largest: float) -> float:
        """Sums gradients over ranks, clips their norm, and returns the norm before that.

        Gradients of sharded parameters are summed already, by FSDP's backward.
        """
        if self.mesh is not None and self.shards is None:
            grads = [p.grad for p in model.parameters() if p.grad is not None]
            joined = torch.cat([grad.flatten() for grad in grads])
            dist.all_reduce(joined)
            for grad, part in zip(grads, joined.split([g.numel() for g in grads]), strict=True):
                grad.copy_(part.view_as(grad))
        norm = nn.utils.clip_grad_norm_(model.parameters(), largest)
        return (norm.full_tensor() if isinstance(norm, DTensor) else norm).item()


def spoken_by(rank: int, error: E) -> E:
    """Marks an error that all ranks raise, so that commands print it on one; returns it."""
    error.speaker = rank  # type: ignore[attr-defined]
    return error


ALONE = Ranks()


def arrange(
    sequence_parallel: int,
    *,
    sharding: str = "contiguous",
    timeout: float = TIMEOUT_S,
    shard_parameters: bool = False,
) -> Ranks:
    """Arranges all processes as a mesh of data-parallel and sequence-parallel ranks.

    Groups of `sequence_parallel` ranks share each sequence; the groups share a step's windows. With
    `shard_parameters`, each of all ranks has a part of every parameter.
    """
    world = dist.get_world_size()
    if world % sequence_parallel:
        raise ValueError(
            f"expected a number of processes that is a multiple of --sequence-parallel "
            f"{sequence_parallel}, got {world}; pass --sequence-parallel {world}, or start "
            f"torchrun with --nproc-per-node {sequence_parallel}"
        )
    grid = torch.arange(world).view(-1, sequence_parallel)
    limit = timedelta(seconds=timeout)
    groups = [
        dist.new_subgroups_by_enumeration(axis.tolist(), timeout=limit)[0]
        for axis in (grid.T, grid)
    ]
    device_type = "cuda" if dist.get_backend() == "nccl" else "cpu"
    mesh = DeviceMesh.from_group(groups, device_type, mesh=grid, mesh_dim_names=("dp", "sp"))
    shards = None
    if shard_parameters:
        everybody = dist.group.WORLD
        assert everybody is not None
        shards = DeviceMesh.from_group(everybody, device_type, mesh_dim_names=("shard",))
    return Ranks(mesh=mesh, sharding=sharding, timeout=timeout, shards=shards)


def was_restarted() -> bool:
    """Whether `torchrun --max-restarts` has started this process again after a failure."""
    return _restarts() > 0


def _restarts() -> int:
    """Returns how many times torchrun has restarted this process after failures."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))


@contextmanager
def ranks_of_torchrun(
    sequence_parallel: int | None = None,
    *,
    sharding: str | None = None,
    timeout: float | None = None,
    shard_parameters: bool = False,
) -> Iterator[Ranks]:
    """Joins the processes that torchrun started, with gloo on CPUs and NCCL on GPUs.

    Without torchrun it yields `Ranks` of a single process.

    Args:
        sequence_parallel: number of ranks that share each sequence; default 1.
        sharding: as for `RingPlan`; default "contiguous".
        timeout: seconds that a rank waits for its peers; default TIMEOUT_S.
        shard_parameters: whether each rank has only a part of every parameter, as in `arrange`.
    """
    if not dist.is_torchelastic_launched():
        shares = (sequence_parallel or 1) > 1 or sharding is not None
        if shares or timeout is not None or shard_parameters:
            torchrun = program("torchrun", "torch.distributed.run")
            raise ValueError(
                "--sequence-parallel, --sharding, --shard and --timeout need processes started by "
                f"torchrun, got a process started without it; begin the command with {torchrun} "
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
    # The store outlives a restart, with addresses of processes that are gone. A prefix hides them.
    store = dist.PrefixStore(f"start {_restarts()}", store)
    limit, backend = timedelta(seconds=seconds), "nccl" if on_gpu else "gloo"
    dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=limit)
    yield arrange(
        sequence_parallel or 1,
        sharding=sharding or "contiguous",
        timeout=seconds,
        shard_parameters=shard_parameters,
    )
    dist.destroy_process_group()  # not after an error, because peers may be dead
