"""Asynchronous copies to a GPU, and tensors that several CUDA streams share.

`moved` queues a copy after the work of the current stream. `Built` remembers the point of a stream
at which shared tensors are complete; other streams wait for it before they read them.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

OUTSIDE_CUDA_GRAPHS = (torch.Tag.cudagraph_unsafe,)
"""Tags of operators that cache tables for later calls. `torch.compile(mode="reduce-overhead")` runs
them outside its CUDA graphs, which would overwrite the tables' memory."""


@dataclass(frozen=True, eq=False)
class Built:
    """Marks the point in a CUDA stream after which some tensors, computed there, are complete."""

    stream: torch.cuda.Stream
    event: torch.cuda.Event

    @classmethod
    def now(cls, device: torch.device) -> "Built | None":
        """Marks the end of the current stream's queue; None if the device has no streams."""
        if device.type != "cuda":
            return None
        stream = torch.cuda.current_stream(device)
        return cls(stream, stream.record_event())

    def wait(self, tensors: Iterable[Tensor]) -> None:
        """Makes the current stream wait until `tensors` are complete; the host does not wait."""
        stream = torch.cuda.current_stream(self.stream.device)
        if stream == self.stream or torch.cuda.is_current_stream_capturing():
            return  # `torch.cuda.graph` synchronizes the device before it captures
        stream.wait_event(self.event)
        for tensor in tensors:
            if tensor.device.type != "cpu":
                tensor.record_stream(stream)


def capturing(device: torch.device) -> bool:
    """Whether kernels that are launched now on `device` are recorded into a CUDA graph, not run."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def moved(x: Tensor, device: torch.device) -> Tensor:
    """Returns x on `device`; from the CPU to a GPU it copies asynchronously from pinned memory.

    Raises: RuntimeError while a CUDA graph is captured, because each replay would read the pinned
    memory again.
    """
    if device.type != "cuda":
        return x.to(device)
    if x.device.type == "cpu" and not torch.compiler.is_compiling():
        if capturing(device):
            raise RuntimeError(
                "a CUDA graph cannot capture the copy of a layout or a key mask to the GPU; make "
                "the same call once before the capture, so that its layout is cached, and pass key "
                "masks as tensors on the GPU"
            )
        x = x.contiguous().pin_memory()  # an expanded tensor cannot be pinned
    return x.to(device, non_blocking=True)


def moved_together(tensors: dict[Any, Tensor], device: torch.device) -> dict[Any, Tensor]:
    """Moves CPU tensors to a GPU by one copy, packed in one buffer; returns views of it by key."""
    distinct = {id(x): x for x in tensors.values()}
    parts = [x.contiguous().flatten().view(torch.uint8) for x in distinct.values()]
    parts = [pad(x, (0, -len(x) % 16)) for x in parts]  # kernels load faster from such addresses
    block = moved(torch.cat(parts), device) if parts else torch.empty(0)
    copies = {}
    for x, part in zip(distinct.values(), block.split([len(x) for x in parts]), strict=True):
        copies[id(x)] = part[: x.nbytes].view(x.dtype).view(x.shape)
    return {key: copies[id(x)] for key, x in tensors.items()}
