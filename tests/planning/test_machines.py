"""Published figures of machines: as printed, in one unit, and consistent with one another."""

import math

import pytest

from sparsering.cli import main
from sparsering.planning.machines import MACHINES, named
from sparsering.planning.sizes import show_seconds

# As data sheets print them: GB, TB/s, TFLOP/s of float32, and of half precision *with* sparsity;
# twice the dense figure for GPUs without sparsity (V100, T4, and GTX 1080 in float32).
PRINTED = {
    "H200": (141, 4.8, 67, 1979),
    "H100 SXM": (80, 3.35, 67, 1979),
    "H100 PCIe": (80, 2.0, 51, 1513),
    "A100 80GB": (80, 2.039, 19.5, 624),
    "A100 40GB": (40, 1.555, 19.5, 624),
    "L4": (24, 0.3, 30.3, 242),
    "RTX 4090": (24, 1.008, 82.6, 330.4),
    "B200": (180, 8.0, 75, 4500),
    "V100": (32, 0.9, 15.7, 250),
    "L40S": (48, 0.864, 91.6, 724),
    "A10": (24, 0.6, 31.2, 250),
    "T4": (16, 0.3, 8.1, 130),
    "RTX 5090": (32, 1.792, 104.8, 419),
    "RTX 3090": (24, 0.936, 35.6, 142),
    "GTX 1080": (8, 0.32, 8.9, 17.8),
    "GB200": (186, 8.0, 80, 5000),
    "MI300X": (192, 5.3, 163.4, 2614.9),
    "RTX A6000": (48, 0.768, 38.7, 309.7),
}


@pytest.mark.parametrize("name", PRINTED)
def test_gpus_have_the_printed_figures_without_sparsity(name):
    memory, bandwidth, float32, sparse = PRINTED[name]
    machine = MACHINES[name]
    assert machine.kind == "gpu"
    assert machine.memory_bytes == memory * 10**9
    assert machine.bandwidth == pytest.approx(bandwidth * 1e12)
    assert machine.peak("float32") == pytest.approx(float32 * 1e12)
    assert machine.peak("bfloat16") == machine.peak("float16") == pytest.approx(sparse / 2 * 1e12)


def test_every_gpu_is_compared_with_its_data_sheet():
    assert {machine.name for machine in MACHINES.values() if machine.kind == "gpu"} == set(PRINTED)


@pytest.mark.parametrize("machine", MACHINES.values(), ids=MACHINES)
def test_figures_are_in_si_units_with_a_source(machine):
    assert MACHINES[machine.name] is machine and machine.known == "published"
    assert machine.kind in ("cpu", "gpu")
    assert 1e11 < machine.bandwidth < 1e13
    assert machine.memory_bytes is None or 8e9 <= machine.memory_bytes < 1e12
    assert machine.link_bandwidth is None or 1e10 < machine.link_bandwidth < machine.bandwidth
    assert any(vendor in machine.source for vendor in ("NVIDIA", "Apple", "Intel", "AMD", "AWS"))
    for dtype, flops in machine.peaks.items():
        assert dtype in ("float32", "bfloat16", "float16")
        # A byte of memory is worth more than one product, and less than a thousand.
        assert 1 < flops / machine.bandwidth < 1000, dtype
    if machine.peaks:
        assert machine.peak("float32") <= machine.peak("float16")
        faster = machine.peak("float32") < machine.peak("bfloat16")
        assert faster == (machine.name != "GTX 1080")  # which computes them in float32


def test_sockets_are_cores_times_clock_times_width():
    assert MACHINES["EPYC 9654"].bandwidth == pytest.approx(460.8e9)
    assert MACHINES["Xeon 8480+"].bandwidth == pytest.approx(307.2e9)
    assert MACHINES["EPYC 9755"].bandwidth == pytest.approx(614.4e9)
    assert MACHINES["Graviton4"].bandwidth == pytest.approx(537.6e9)
    assert MACHINES["EPYC 9654"].peak("float32") == pytest.approx(11.3664e12)
    assert MACHINES["EPYC 9755"].peak("float32") == pytest.approx(33.5872e12)
    assert MACHINES["Xeon 8480+"].peak("float32") == pytest.approx(13.6192e12)
    assert MACHINES["Xeon 8480+"].peak("bfloat16") == 16 * MACHINES["Xeon 8480+"].peak("float32")


def test_what_is_not_published_bounds_nothing():
    assert MACHINES["M4 Max"].peaks == {} and MACHINES["M4 Max"].peak("float32") == math.inf
    assert MACHINES["H200"].peak("int8") == math.inf
    assert hash(MACHINES["H200"]) != hash(MACHINES["L4"])


@pytest.mark.parametrize(
    ("name", "found"),
    [
        *(("h200", "H200"), ("H100", "H100 SXM"), ("h100-pcie", "H100 PCIe")),
        *(("A100", "A100 80GB"), ("a100_40gb", "A100 40GB"), ("rtx4090", "RTX 4090")),
        *(("4090", "RTX 4090"), ("m4max", "M4 Max"), ("Genoa", "EPYC 9654")),
        ("xeon 8480+", "Xeon 8480+"),
    ],
)
def test_names_are_found_in_any_case_and_spacing(name, found):
    assert named(name) is MACHINES[found]


@pytest.mark.parametrize("name", ["H300", "", None, 200])
def test_an_unknown_machine_is_told_the_known_ones(name):
    with pytest.raises(ValueError, match=r"machine must be one of H200, .*Graviton4, got") as said:
        named(name)
    assert "leave it out for this machine" in str(said.value)


def test_a_machine_can_be_described(capsys):
    words = ["plan", "Causal()", "--tokens", "64K", "--dtype", "bfloat16"]
    described = ["--tflops", "150", "--bandwidth", "900", "--memory", "24GB"]
    assert main([*words, *described]) == 0
    said = capsys.readouterr().out
    flops = 4 * 64 * 8 * (65536 * 65537 / 2)
    assert f"at least {show_seconds(flops / 150e12)}" in said and "on a described GPU" in said
    for missing in (described[:4], described[2:], [*described, "--gpu", "H200"]):
        assert main([*words, *missing]) == 2
        assert "takes --tflops, --bandwidth and --memory" in capsys.readouterr().err
