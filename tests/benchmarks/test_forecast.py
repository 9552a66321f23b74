"""The model of a multiprocessor that forecasts the GPU kernels, on loops whose time is known."""

from benchmarks.forecast.compiled import Compiled, Instruction, decoded
from benchmarks.forecast.processor import forecast, product_cycles

LAST = "HGMMA.64x128x16.F32.BF16 R24, gdesc[UR8], R24, gsb0"
WAIT = "WARPGROUP.DEPBAR.LE gsb0, 0x0"


def instruction(text: str, stall: int = 1) -> Instruction:
    return Instruction(text.split(".")[0].split()[0], text, stall, (), 0)


def kernel(loop: list[Instruction], warps: int = 8, shared: int = 200 << 10) -> Compiled:
    return Compiled("forward", (), 200, 0, shared, warps, warps, loop, 128, 128)


def test_a_product_takes_what_tensor_cores_and_shared_memory_do():
    # 2 * 64 * 128 * 16 operations at 4096 a cycle; 128 x 16 and 64 x 16 items of 2 bytes at 128
    assert product_cycles(instruction(LAST)) == (64.0, 48.0)
    in_registers = "HGMMA.64x32x16.F32.BF16 R24, R8, gdesc[UR8], R24"
    assert product_cycles(instruction(in_registers)) == (16.0, 8.0)


def test_products_of_two_warpgroups_take_turns_at_the_tensor_cores():
    loop = [instruction(LAST.removesuffix(", gsb0"))] * 15 + [instruction(LAST), instruction(WAIT)]
    told = forecast(kernel(loop))
    assert told.bounds["tensor"] == 2 * 16 * 64
    assert 2048 <= told.cycles < 1.05 * 2048 and told.limiter == "tensor"
    alone = forecast(kernel(loop, warps=4))
    assert 1024 < alone.cycles < 1.15 * 1024  # it waits for itself


def test_what_waits_for_products_and_a_barrier_takes_both_in_a_row():
    loop = [instruction(LAST), instruction(WAIT), *[instruction("FADD R1, R1, R2")] * 200]
    both = forecast(kernel([*loop, instruction("BAR.SYNC 0x0")]))
    # until the first product is there nothing else can go on, nor after the barrier
    assert 64 + 2 * 200 < both.cycles < 64 + 2 * 200 + 60 and both.limiter != "tensor"


def test_exponentials_take_eight_cycles_each():
    told = forecast(kernel([instruction("MUFU.EX2 R1, R2")] * 100))
    assert told.limiter == "special" and abs(told.cycles - 2 * 100 * 8) < 0.02 * 1600


def test_encodings_tell_stalls_and_barriers():
    word = 5 << 41 | 2 << 46 | 7 << 49 | 0b101 << 52
    assert decoded("@!P0 FADD.FTZ R1, R2, R3", word) == Instruction(
        "FADD", "@!P0 FADD.FTZ R1, R2, R3", 5, (2,), 0b101
    )


def test_programs_on_a_multiprocessor_are_bounded_by_registers_and_shared_memory():
    assert kernel([], warps=8).per_processor == 1
    assert kernel([], warps=4, shared=10 << 10).per_processor == 2  # 200 x 128 of 65,536 registers
    assert kernel([], warps=4, shared=100 << 10).per_processor == 2
