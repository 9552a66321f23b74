"""Tensors of a device that are kept for any stream: made in one, waited for by the others."""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Built:
    """The point of a stream up to which things were made there."""

    stream: torch.cuda.Stream
    event: torch.cuda.Event

    @classmethod
    def now(cls, device: torch.device) -> "Built | None":
        """After all that the current stream was given; None where there are no streams."""
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
