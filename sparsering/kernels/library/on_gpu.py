"""Reasons of libraries that run only on some GPUs, in half precision."""

from collections.abc import Callable

import torch
from torch import Tensor


def faults_on_gpu(
    tensors: tuple[Tensor, ...], fault_of: Callable[[torch.device], str]
) -> list[str]:
    """Returns why kernels in half precision cannot run on tensors, or here; [] if they can.

    `fault_of` returns why they do not run on a GPU, or "" if they do. Without tensors, it is asked
    about the current GPU.
    """
    faults = []
    if any(x.device.type != "cuda" for x in tensors):
        faults.append("it runs on cuda tensors")
    elif not torch.cuda.is_available():
        faults.append("torch sees no CUDA GPU")
    else:
        devices = {x.device for x in tensors} or {torch.device("cuda")}
        faults += sorted({*map(fault_of, devices)} - {""})
    if any(x.dtype not in (torch.bfloat16, torch.float16) for x in tensors):
        faults.append("it computes in bfloat16 and float16")
    return faults


def capability_of(device: torch.device) -> tuple[int, int]:
    """Returns the compute capability of a GPU: (major, minor)."""
    return torch.cuda.get_device_capability(device)
