"""Copies to a GPU that the host does not wait for, and tensors that several streams share.

`moved` queues a copy behind the work of the current stream. `Built` remembers the point of a stream
at which shared tensors are complete; other streams wait for it before they read them.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Built:
    """The point of a stream up to which tensors were made there."""

    stream: torch.cuda.Stream
    event: torch.cuda.Event

    @classmethod
    def now(cls, device: torch.device) -> "Built | None":
        """Marks the end of what the current stream was given; None where there are no streams."""
        if device.type != "cuda":
            return None
        stream = torch.cuda.current_stream(device)
        return cls(stream, stream.record_event())

    def wait(self, tensors: Iterable[Tensor]) -> None:
        """Has the current stream wait before it uses these tensors; the host goes on at once.

        A stream that is being captured cannot wait for what came before: `torch.cuda.graph` waits
        for the whole device before it captures.
        """
        stream = torch.cuda.current_stream(self.stream.device)
        if stream == self.stream or torch.cuda.is_current_stream_capturing():
            return
        stream.wait_event(self.event)
        for tensor in tensors:
            if tensor.device.type != "cpu":
                tensor.record_stream(stream)


def capturing(device: torch.device) -> bool:
    """Whether what is launched now is recorded as a CUDA graph, to run later."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def moved(x: Tensor, device: torch.device) -> Tensor:
    """Returns a tensor on a device: to a GPU from pinned memory, behind what is queued there.

    The host waits for nothing. Torch keeps the pinned memory until the copy is done.

    Raises: RuntimeError where a CUDA graph is captured: it would read that memory at every replay.
    """
    if device.type != "cuda":
        return x.to(device)
    if x.device.type == "cpu" and not torch.compiler.is_compiling():
        if capturing(device):
            raise RuntimeError(
                "a CUDA graph cannot capture the copy of a layout or of a mask of keys to the GPU; "
                "make the same call once before the capture, which keeps layouts, and give masks "
                "of keys as tensors on the GPU"
            )
        x = x.contiguous().pin_memory()  # an expanded tensor cannot be pinned
    return x.to(device, non_blocking=True)
