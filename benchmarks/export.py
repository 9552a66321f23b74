"""Measures exported models beside the modules that they were made of.

    python -m benchmarks.export --out benchmarks/records

`export.json`, float32, random weights, one row of tokens. The models have two layers of width 256
and four heads: "gemma", a Gemma 3 whose layers have windows of 512, and "longnet", an encoder over
LongNet((1024, 4096), (1, 4)). The ways: "module" is the model with our kernels, "program" the
exported program after `decompositions()`, run by torch's own operators, "onnxruntime" the same
program in ONNX Runtime, and "sdpa" the Gemma with transformers' own mask of all pairs. Each way
runs in a fresh process: `ms` is the best of some calls there, `peak_mb` the peak of the first call,
beyond memory before it. `mb` is the file of a program, of which `tables_mb` are tables of
attention. Errors are those of the output beside "module", relative to its largest number.
"""

import argparse
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import onnxruntime
import torch
from torch import Tensor
from transformers import Gemma3ForCausalLM, Gemma3TextConfig

import sparsering as sr
from sparsering.export import decompositions
from sparsering.integrations import transformers as hf
from sparsering.models import LongNetEncoder

from .measure import Row, distance_of, give_back_freed, milliseconds, peak_and_figures, write_record

LENGTHS, WIDTH, HEADS, ROUNDS = (4096, 16384), 256, 4, 3


class Gemma(torch.nn.Module):
    """A Gemma 3 whose two layers have windows, from tokens to logits of the last 16."""

    def __init__(self, attention: str = "sparsering") -> None:
        super().__init__()
        hf.register()
        config = Gemma3TextConfig(
            vocab_size=256,
            hidden_size=WIDTH,
            intermediate_size=4 * WIDTH,
            num_hidden_layers=2,
            num_attention_heads=HEADS,
            num_key_value_heads=HEADS // 2,
            head_dim=WIDTH // HEADS,
            sliding_window=512,
            layer_types=["sliding_attention"] * 2,
            attn_implementation=attention,
        )
        self.model = Gemma3ForCausalLM(config)

    def forward(self, tokens: Tensor) -> Tensor:
        """Returns logits [1, 16, 256] of tokens [1, N]."""
        logits: Tensor = self.model(tokens, use_cache=False, logits_to_keep=16).logits
        return logits


class Encoder(torch.nn.Module):
    """An encoder of two layers over dilated segments."""

    def __init__(self) -> None:
        super().__init__()
        pattern = sr.LongNet((1024, 4096), (1, 4))
        self.model = LongNetEncoder(pattern, width=WIDTH, num_layers=2, num_heads=HEADS)
        for x in self.model.parameters():  # new blocks are the identity
            torch.nn.init.normal_(x, std=0.05)

    def forward(self, x: Tensor) -> Tensor:
        """Returns states [1, 1 + N, width] of vectors [1, N, width]."""
        states: Tensor = self.model(x)
        return states


MODELS: dict[str, Callable[[], torch.nn.Module]] = {"gemma": Gemma, "longnet": Encoder}


def model_of(name: str, way: str = "module") -> torch.nn.Module:
    """Makes a model, with the same weights at every call."""
    torch.manual_seed(0)
    return (Gemma("sdpa") if way == "sdpa" else MODELS[name]()).eval()


def input_of(name: str, tokens: int) -> Tensor:
    """Draws the input of a model, the same at every call."""
    generator = torch.Generator().manual_seed(1)
    if name == "gemma":
        return torch.randint(256, (1, tokens), generator=generator)
    return torch.randn(1, tokens, WIDTH, generator=generator)


def write_programs(name: str, tokens: int, folder: Path) -> Row:
    """Exports a model to `folder`; returns the sizes of files and tables, and the seconds taken."""
    begin, inputs = time.perf_counter(), (input_of(name, tokens),)
    with torch.no_grad():
        program = torch.export.export(model_of(name), inputs)
    program = program.run_decompositions(decompositions())
    torch.export.save(program, folder / "program.pt2")
    seconds = time.perf_counter() - begin
    torch.onnx.export(program, inputs, dynamo=True, verbose=False).save(folder / "model.onnx")
    return {
        "tables_mb": sum(x.nbytes for x in program.constants.values()) / 1e6,
        "program": (folder / "program.pt2").stat().st_size / 1e6,
        "onnxruntime": sum(x.stat().st_size for x in folder.glob("model.onnx*")) / 1e6,
        "nodes": len(program.graph.nodes),
        "seconds": seconds,
    }


def call_of(name: str, way: str, folder: Path) -> Callable[[Tensor], Tensor]:
    """Returns a way to compute a model."""
    if way == "program":
        return torch.export.load(folder / "program.pt2").module()
    if way == "onnxruntime":
        session = onnxruntime.InferenceSession(folder / "model.onnx")
        given = session.get_inputs()[0].name
        return lambda x: torch.from_numpy(session.run(None, {given: x.numpy()})[0])
    return model_of(name, way)


def _calls(name: str, way: str, tokens: int, folder: Path, rounds: int) -> Iterator[Any]:
    with torch.no_grad():
        call, x = call_of(name, way, folder), input_of(name, tokens)
        if way in ("module", "sdpa"):  # compiles what later calls need
            call(input_of(name, 256))
        give_back_freed()
        yield
        out = call(x)
        yield
        yield min(milliseconds(lambda: call(x)) for _ in range(rounds)), out[:, -16:].tolist()


def rows_of(name: str, tokens: int, rounds: int) -> list[Row]:
    """Measures the ways of a model at a length."""
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as folder:
        sizes = write_programs(name, tokens, Path(folder))
        exact: list[Tensor] = []
        for way in ("module", "program", "onnxruntime", *["sdpa"] * (name == "gemma")):
            peak, (ms, out) = peak_and_figures(_calls, name, way, tokens, Path(folder), rounds)
            exact = exact or [torch.tensor(out)]
            row: Row = {"model": name, "tokens": tokens, "way": way, "ms": ms}
            row |= {"peak_mb": peak / 1e6, "error": distance_of([torch.tensor(out)], exact)}
            if way in sizes:
                row |= {"mb": sizes[way], "tables_mb": sizes["tables_mb"]}
            if way == "program":
                row |= {"nodes": sizes["nodes"], "export_seconds": sizes["seconds"]}
            if not row["error"] < 1e-5:
                raise RuntimeError(f"{name} by {way} is wrong by {row['error']}")
            rows.append(row)
    return rows


def main() -> None:
    """Writes the record."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.export", description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder of the record")
    parser.add_argument("--tokens", type=int, nargs="+", default=LENGTHS)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    arguments = parser.parse_args()
    rows = []
    for tokens in arguments.tokens:
        for name in MODELS:
            rows += rows_of(name, tokens, arguments.rounds)
            write_record(arguments.out, "export", rows)


if __name__ == "__main__":
    main()
