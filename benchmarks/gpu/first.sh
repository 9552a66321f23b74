#!/bin/sh
# Spends the best fifteen minutes of a GPU, from a bare machine: sh benchmarks/gpu/first.sh [FOLDER]
#
# The record, FOLDER/gpu.json, is complete at any moment; the same command continues it. PYTHON names
# an interpreter that has torch and Triton, and BUDGET the seconds after which no case starts.
# Without such an interpreter, an environment is made in runs/gpu, from the package index.
cd "$(dirname "$0")/../.." || exit 2
out=${1:-benchmarks/records}
python=${PYTHON:-python3}
if ! "$python" -c 'import torch, triton, numpy' 2>/dev/null; then
    python=runs/gpu/bin/python
    if [ ! -x "$python" ]; then
        python3 -m venv runs/gpu || exit 2
        pinned=$(grep -E '^(torch|pytest|hypothesis|matplotlib)==' requirements-dev.txt)
        # shellcheck disable=SC2086
        "$python" -m pip install --quiet numpy $pinned || exit 2
    fi
fi
"$python" - <<'END'
import importlib.metadata
import importlib.util
import platform
import shutil

import torch

print(f"Python {platform.python_version()}, torch {torch.__version__}, CUDA {torch.version.cuda}")
print("GPU:", torch.cuda.get_device_name() if torch.cuda.is_available() else "none")
packages = {  # by what is imported: what lacks without it
    "triton": "everything",
    "pytest": "the kernels' tests",
    "hypothesis": "the kernels' tests",
    "matplotlib": "the picture",
    "cudnn": "cuDNN's block-sparse kernels (nvidia-cudnn-frontend)",
    "flashinfer": "FlashInfer",
    "flash_attn": "FlashAttention-4",
    "flash_attn_interface": "FlashAttention-3",
}
for name, use in packages.items():
    if importlib.util.find_spec(name) is None:
        print(f"absent: {name}; left out: {use}")
for program, use in {"compute-sanitizer": "races and memory", "ncu": "profiles"}.items():
    if shutil.which(program) is None:
        print(f"absent: {program}; left out: {use}")
END
commit=$(git rev-parse HEAD 2>/dev/null)
exec "$python" -m benchmarks.gpu --call quarter --out "$out" --budget "${BUDGET:-780}" --commit "$commit"
