"""Names of kernel parameters: Triton's JIT takes some keywords of a launch for itself."""

import importlib
import pkgutil

import pytest

import sparsering.kernels.triton as package

triton = pytest.importorskip("triton")

OWN = {"args", "device", "device_type", "grid", "kwargs", "self", "stream", "warmup"}
"""Keywords that `JITFunction.run` reads or refuses, other than compile options."""


def reserved() -> set[str]:
    from triton.backends.amd.compiler import HIPOptions
    from triton.backends.nvidia.compiler import CUDAOptions

    return OWN | CUDAOptions.__dataclass_fields__.keys() | HIPOptions.__dataclass_fields__.keys()


def parameters() -> dict[str, list[str]]:
    """Names of the parameters of every compiled function of the package."""
    found = {}
    for module in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
        for name, x in vars(importlib.import_module(module.name)).items():
            if hasattr(x, "arg_names"):
                found[name] = x.arg_names
    return found


def test_no_kernel_has_a_parameter_with_a_name_that_triton_reserves():
    of_kernels = parameters()
    assert {"forward_kernel", "query_kernel", "key_kernel", "prepare_kernel"} <= of_kernels.keys()
    assert {"merge_kernel", "sum_kernel", "sum_diagonals_kernel"} <= of_kernels.keys()
    taken = {name: reserved() & set(names) for name, names in of_kernels.items()}
    assert not any(taken.values()), taken


def test_a_reserved_name_is_seen():
    assert {"stream", "num_warps", "num_stages", "maxnreg", "waves_per_eu"} <= reserved()
