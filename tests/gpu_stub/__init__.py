"""A GPU that runs nothing: Triton's real launch path and torch's operators, checked and counted.

    with gpu(90) as device:              # 80, 86, 89, 90, 100 or 120
        query = torch.randn(1, 8, 512, 64, dtype=torch.bfloat16, device="cuda")
        with counted() as counts:
            sparsering.attention(query, query, query, sparsering.Causal())
    print(counts)                        # launches, operators, compiles, waits, transfers

Tensors of "cuda" are plain tensors whose memory is the host's. torch's operators run on the CPU,
one at a time. Triton binds, compiles and launches kernels as on a GPU; the driver under it checks
each launch and returns. **Kernels do not run**: their results keep the zeros of new memory.

It needs a torch without CUDA, Triton, gcc and g++; `missing()` says what is not there. Triton's
interpreter must be off. Both libraries are built once, into `~/.cache/sparsering-gpu-stub`.
"""

from .counts import Counts, capturing, counted
from .devices import CAPABILITIES, gpu, missing

__all__ = ["CAPABILITIES", "Counts", "capturing", "counted", "gpu", "missing"]
