"""Compiles the Triton kernels for GPUs that are not there, and prints what came out as JSON.

    python tests/kernels/compile_triton.py 90 '{"dtype": "bfloat16", "head_dim": 128}' ...
    python tests/kernels/compile_triton.py 0 '{}'    # for AMD
    python tests/kernels/compile_triton.py 90 --kernels query_kernel,key_kernel '{}'  # some alone
    python tests/kernels/compile_triton.py keys '{"tokens": 1024}' '{"tokens": 1000}'

The backend's own host code runs on CPU tensors with its launches caught, so that what is compiled
is what would be launched. Run apart from the tests, which load the kernels for the interpreter.
"""

import json
import re
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import triton
from machine_code import loop_spills
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas
from triton.compiler import ASTSource

import sparsering as sr
from sparsering.coordinates import CoordinateBias
from sparsering.kernels.problem import Problem
from sparsering.kernels.triton import call as backend
from sparsering.kernels.triton import configs, extra_arguments, key_lists, lists
from sparsering.kernels.triton import launch as triton_launch
from sparsering.layouts.layout import BlockLayout, Pass
from sparsering.layouts.lists import Coordinates, ListedPairs, Lists
from sparsering.patterns.algebra import Frame

AMD = 0  # in place of a compute capability: an MI300, with the configs of 80
SHARED_MEMORY = {  # bytes that a program may have
    **{AMD: 65536, 80: 166912, 90: 232448, 100: 232448},
    **{86: 101376, 89: 101376, 120: 101376},
}
TYPES = {
    torch.float32: "fp32",
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.int64: "i64",
    torch.int32: "i32",
    torch.int16: "i16",
    torch.uint8: "u8",
    torch.bool: "i1",
}


def launches(case: dict[str, Any], capability: int) -> list[tuple[Any, Any, dict[str, Any]]]:
    """(kernel, config, arguments) of every launch of a forward and backward call."""
    caught: list[tuple[Any, Any, dict[str, Any]]] = []

    def catch(launch, of_call) -> None:
        arguments = zip(launch.kernel.arg_names, launch.arguments(of_call), strict=True)
        caught.append((launch.kernel, launch.config, dict(arguments)))

    triton_launch.Launch.run = catch
    for module in (backend, extra_arguments):
        module.processors = lambda device: 132
    for module in (configs, lists):
        module.generation = lambda device: capability if capability in (90, 100) else 80
        module.shared_memory = lambda device: SHARED_MEMORY[capability] - (2 << 10)
    if chosen := case.get("config"):  # as a tuning file has it, for the forward
        usual = backend.config_for
        backend.config_for = lambda kernel, *rest: (
            configs.Config(*chosen) if kernel == "forward" else usual(kernel, *rest)
        )
    dtype = getattr(torch, case.get("dtype", "bfloat16"))
    head_dim, tile = case.get("head_dim", 128), case.get("block_size", 128)
    heads, kv_heads, length = case.get("heads", 2), case.get("kv_heads", 2), case.get("tokens", 512)
    query = torch.randn(1, heads, case.get("queries", length), head_dim, dtype=dtype)
    key = torch.randn(1, kv_heads, length, head_dim, dtype=dtype)
    value = torch.randn(1, kv_heads, length, case.get("value_dim", head_dim), dtype=dtype)
    if case.get("values_in_keys"):
        value = key[..., : value.shape[3]]
    pattern = eval(case.get("pattern", "Causal()"), vars(sr))
    layout = pattern.layout(
        query.shape[2], length, num_heads=heads, num_kv_heads=kv_heads, block_size=tile
    )
    if case.get("streams"):  # as documents and rings have them
        layout = replace(layout, passes=tuple(map(placed, layout.passes)))
    scale = case.get("scale", 0.1)
    if (slots := case.get("list")) is not None:
        return launches_of_lists(case, slots, (query, key, value), caught)
    bias = torch.zeros(1, heads, layout.num_blocks) if case.get("bias") else None
    given = extras(heads, query.shape[2], length, case.get("reach", 128))
    given = {name: given[name] for name in case.get("extras", ())}
    given["in_order"] = case.get("in_order", False)
    problem = Problem(layout, query, key, value, scale, bias, **given)
    out, lse = backend.forward(problem)
    backend.backward(problem, out, lse, torch.randn_like(out), torch.randn_like(lse))
    return caught


def launches_of_lists(
    case: dict[str, Any], slots: int, inputs: tuple[torch.Tensor, ...], caught: list[Any]
) -> list[tuple[Any, Any, dict[str, Any]]]:
    """As `launches`, for lists of `slots` keys in `tables` tables, with no tile beside them."""
    query, key, _ = inputs
    shape = 1, case.get("tables", 1), query.shape[2], slots
    at = None
    if case.get("streams"):  # as documents have them
        at = Coordinates(
            torch.zeros(1, 3, query.shape[2], dtype=torch.int64),
            torch.zeros(1, 2, 1, key.shape[2], dtype=torch.int64),
        )
    heads = query.shape[1]
    frame = Frame.build(query.shape[2], key.shape[2], heads, key.shape[1], None)
    selection = sr.SelectedBlocks(torch.zeros(shape, dtype=torch.int64), 1)
    key_lists.interpreting = lambda: True  # so that it takes lists that are not on a GPU
    hidden = (
        torch.ones(1, key.shape[2], dtype=torch.bool)
        if "key_mask" in case.get("extras", ())
        else None
    )
    listed = key_lists.list_keys(ListedPairs(selection, limit=sr.Causal()), frame, hidden, 0)
    listed = listed._replace(coordinates=at)
    if case.get("bias"):  # lists with a bias are in the order of its slots
        keys = torch.zeros(shape, dtype=torch.int32)
        listed = Lists(keys=keys, branch=0, coordinates=at, place=keys)
    given = extras(heads, query.shape[2], key.shape[2], case.get("reach", 128))
    bias = torch.zeros(1, heads, query.shape[2], slots) if case.get("bias") else None
    problem = Problem(
        BlockLayout(frame, 128, (), 0), *inputs, case.get("scale", 0.1), bias, lists=(listed,),
        **{name: given[name] for name in case.get("extras", ()) if name != "key_mask"},
    )  # fmt: skip
    out, lse = backend.forward(problem)
    backend.backward(problem, out, lse, torch.randn_like(out), torch.randn_like(lse))
    return caught


def placed(p: Pass) -> Pass:
    """A pass whose tiles tell where they are, and which stream of dropout they take."""
    stream = torch.zeros_like(p.query_start)
    return replace(p, query_origin=p.query_start, key_origin=p.key_start, stream=stream)


def extras(heads: int, queries: int, keys: int, reach: int) -> dict[str, Any]:
    """The extras of a call as `Problem` has them; block_bias is the `bias` of a case."""
    return {
        "softcap": 30.0,
        "distance_bias": torch.zeros(1, heads, 2 * reach + 1),
        "sink": torch.zeros(1, heads, queries),
        "dropout_p": 0.1,
        "dropout_seed": torch.zeros(1, 1, dtype=torch.int64),
        "key_mask": torch.ones(1, keys, dtype=torch.bool),
        "coordinate_bias": (bias := coordinates(heads, queries, keys)),
        "captured": bias.tensors,
    }


def coordinates(heads: int, queries: int, keys: int) -> CoordinateBias:
    """Coordinates in two dims, in float64, of which kernels read two parts."""
    own, other = (torch.zeros(1, n, 2, dtype=torch.float64) for n in (queries, keys))
    return CoordinateBias(own, other, torch.zeros(heads))


def source(kernel: Any, arguments: dict[str, Any]) -> ASTSource:
    """The kernel as the just-in-time compiler would see it for these arguments."""
    signature, constants, attributes = {}, {}, {}
    for i, parameter in enumerate(kernel.params):
        x = arguments[parameter.name]
        if parameter.is_constexpr:
            signature[parameter.name], constants[parameter.name] = "constexpr", x
        elif hasattr(x, "block_shape"):
            shape = ",".join(str(n) for n in x.block_shape)
            layout = f",{x.layout!r}" if kernel.is_gluon() else ""
            signature[parameter.name] = f"tensordesc<{TYPES[x.base.dtype]}[{shape}]{layout}>"
        elif isinstance(x, torch.Tensor):
            signature[parameter.name] = f"*{TYPES[x.dtype]}"
            attributes[(i,)] = [["tt.divisibility", 16]]
        else:
            signature[parameter.name] = parameter.annotation_type
    if kernel.is_gluon():
        from triton.experimental.gluon._runtime import GluonASTSource

        return GluonASTSource(kernel, signature, constants, attributes)
    return ASTSource(kernel, signature, constants, attributes)


def compiled(
    kernel: Any, config: Any, arguments: dict[str, Any], capability: int
) -> dict[str, Any]:
    options = triton_launch.options(config)
    if capability == AMD:
        return compiled_for_amd(kernel, options, arguments)
    target = GPUTarget("cuda", capability, 32)
    made = triton.compile(source(kernel, arguments), target=target, options=options)
    ptx = made.asm["ptx"]
    arch = re.search(r"\.target (\S+)", ptx)[1].rstrip(",")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.ptx"
        path.write_text(ptx)
        command = [
            get_ptxas(capability).path,
            "-v",
            f"--gpu-name={arch}",
            path,
            "-o",
            f"{path}.cubin",
        ]
        told = subprocess.run(command, capture_output=True, text=True, check=True).stderr
        overlapped = []
        if kernel.is_gluon():
            tool = triton.knobs.nvidia.cuobjdump.path
            command = [tool, "-sass", f"{path}.cubin"]
            overlapped = exponentials_during_products(subprocess.check_output(command, text=True))
        spilled = sum(int(n) for n in re.findall(r"(\d+) bytes spill", told))
        in_loops = loop_spills(Path(f"{path}.cubin")) if spilled else 0
    return {
        "kernel": kernel.__name__,
        "config": config and config._asdict(),
        "rows": arguments.get("ROWS", arguments.get("KEYS")),
        "tma": bool(arguments.get("TMA")),
        "shared": made.metadata.shared,
        "registers": int(re.search(r"Used (\d+) registers", told)[1]),
        "spilled": spilled,
        "loop_spills": in_loops,
        "serialized": "C7515" in told,  # ptxas makes each wgmma wait for the one before
        "wgmma": ptx.count("wgmma.mma_async"),
        "tcgen05": ptx.count("tcgen05.mma"),
        "mma": ptx.count("mma.sync"),
        "bulk_copies": ptx.count("cp.async.bulk.tensor"),
        "overlapped": overlapped,
        "barrier_waits": ptx.count("mbarrier.try_wait"),
        "moved_registers": re.findall(r"setmaxnreg\.(\w+\.sync\.aligned\.u32 \s*\d+)", ptx),
        "copies": len(re.findall(r"cp\.async\.c", ptx)),
    }


def exponentials_during_products(sass: str) -> list[int]:
    """How many exponentials stand between a wait for the older of two products, and for both."""
    waits = re.findall(r"WARPGROUP\.DEPBAR\.LE gsb0, 0x(\d)|(MUFU\.EX2)", sass)
    found, count = [], None
    for pending, exponential in waits:
        if exponential:
            count = None if count is None else count + 1
        else:
            if count is not None and pending == "0":
                found.append(count)
            count = 0 if pending == "1" else None
    return found


def compiled_for_amd(kernel: Any, options: dict, arguments: dict[str, Any]) -> dict[str, Any]:
    target = GPUTarget("hip", "gfx942", 64)
    made = triton.compile(source(kernel, arguments), target=target, options=options)
    assembly = made.asm["amdgcn"]
    return {
        "kernel": kernel.__name__,
        "shared": made.metadata.shared,
        "spilled": int(re.search(r"vgpr_spill_count: +(\d+)", assembly)[1]),
        "mfma": assembly.count("v_mfma"),
    }


def keys(cases: list[dict[str, Any]]) -> None:
    """Prints what each kernel would be compiled for, as the launcher tells them apart."""
    seen = set()
    for case in cases:
        for kernel, config, arguments in launches(case, 90):
            made = source(kernel, arguments)
            specialized = [p.name for p in kernel.params if is_specialized(p)]
            assert not specialized, f"{kernel.__name__} is compiled for values of {specialized}"
            seen.add((kernel.__name__, "extras" in case, made.hash(), str(config)))
    for name, extras, digest, config in sorted(seen):
        print(json.dumps({"kernel": name, "extras": extras, "digest": digest, "config": config}))


def is_specialized(parameter: Any) -> bool:
    """Whether the values of an integer count, and not only its type."""
    kind = parameter.annotation_type
    return kind.startswith("i") and not parameter.do_not_specialize


def main(capability: int, cases: list[dict[str, Any]], kernels: list[str]) -> None:
    seen = set()
    for case in cases:
        for kernel, config, arguments in launches(case, capability):
            if kernels and kernel.__name__ not in kernels:
                continue
            made = source(kernel, arguments)
            key = made.hash(), config
            if key not in seen:
                seen.add(key)
                print(json.dumps({"case": case, **compiled(kernel, config, arguments, capability)}))


if __name__ == "__main__":
    what, *rest = sys.argv[1:]
    chosen = rest[1].split(",") if rest[:1] == ["--kernels"] else []
    told = [json.loads(case) for case in rest[2 if chosen else 0 :]]
    keys(told) if what == "keys" else main(int(what), told, chosen)
