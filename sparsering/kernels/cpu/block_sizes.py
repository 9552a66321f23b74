"""Block sizes that `sparsering tune` measured for the compiled kernel on this processor."""

from pathlib import Path

import torch

from ..tuning_file import TuningFile, file_of, processor_name


def _path(_: torch.device) -> Path:
    used = torch.backends.cpu.get_cpu_capability()  # "AVX2", say; ATEN_CPU_CAPABILITY may lower it
    return file_of("cpu", f"{processor_name()} {used}", torch.__version__)


measured = TuningFile(_path)
