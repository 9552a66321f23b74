"""Measures what a stranger waits for: from an empty environment to a right number on their model.

    make wheels
    python -m benchmarks.strangers --out benchmarks/records

`strangers.json`: an index of this machine serves the wheel of `dist/`. For each of three users, the
clock runs while an environment is made, what the user needs is installed into it, and a script of
theirs runs. Other packages, torch too, come from where this machine's pip finds them. The script
prints its distance from a dense computation in float64, so that the last second is that of a right
number. Nothing is compiled: there is no compiler. Seconds are medians of the rounds.
"""

import argparse
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch

from .measure import write_record

ROOT = Path(__file__).resolve().parent.parent
SERVER = "pypiserver==2.4.2"
MOST_ERROR = 1e-5
MODEL = """
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM
import sparsering as sr
from sparsering.integrations import transformers as hf

torch.manual_seed(0)
sizes = dict(hidden_size=256, intermediate_size=512, num_hidden_layers=4, vocab_size=1000)
config = Qwen2Config(num_attention_heads=8, num_key_value_heads=2, **sizes)
model = Qwen2ForCausalLM(config).eval()
tokens = torch.randint(1000, (1, 2048))
at = torch.arange(2048)
seen = (at[:, None] >= at) & (at[:, None] - at <= 256)
model.set_attn_implementation("eager")
with torch.no_grad():
    dense = model.double()(tokens, attention_mask={"full_attention": torch.where(
        seen, 0.0, -torch.inf).double()[None, None]}).logits
hf.apply(model.float(), sr.Causal() & sr.SlidingWindow(256))
with torch.no_grad():
    logits = model(tokens).logits
print("error", float((logits - dense).abs().max() / dense.abs().max()))
"""
MASK = """
import torch
import sparsering as sr

def mask_mod(b, h, q, k):  # written for FlexAttention: documents of 1,000 tokens, causal, 64 sinks
    return (q // 1000 == k // 1000) & (q >= k) | (k < 64) & (q >= k)

torch.manual_seed(0)
query, key, value = (torch.randn(1, 8, 4096, 64, requires_grad=True) for _ in range(3))
out = sr.attention(query, key, value, sr.from_mask_mod(mask_mod))
out.square().sum().backward()
at = torch.arange(4096)
seen = mask_mod(0, 0, at[:, None], at)
exact = [x.detach().double().requires_grad_() for x in (query, key, value)]
dense = torch.nn.functional.scaled_dot_product_attention(*exact, seen)
dense.square().sum().backward()
found = [out.detach(), *(x.grad for x in (query, key, value))]
right = [dense.detach(), *(x.grad for x in exact)]
print("error", max(float((a - b).abs().max() / b.abs().max()) for a, b in zip(found, right)))
"""
SLIDES = """
import torch
from functools import partial
from sparsering.integrations import gigapath
from sparsering.integrations.gigapath import layers

torch.manual_seed(0)
model = gigapath.SlideEncoder(in_width=384, width=192, num_layers=3)
tiles, coords = torch.randn(3000, 384), torch.cartesian_prod(torch.arange(50), torch.arange(60))
found = model.embed(tiles, 256 * coords).slide
layers.attention = partial(layers.attention, backend="reference")
dense = model.double().embed(tiles.double(), 256 * coords).slide
print("error", float((found - dense).abs().max() / dense.abs().max()))
"""
LIBRARIES = """
import sparsering as sr
print("compiled for", "nothing" if sr.backends()["cpu"] else "cpu")
"""
USERS = {  # what each installs, and runs
    "a Qwen-shaped model of transformers": ("sparsering[hf]", MODEL),
    "a mask of FlexAttention": ("sparsering", MASK),
    "slides": ("sparsering", SLIDES),
}


def run(*command: object) -> str:
    """Runs a command in an empty folder, without a compiler; returns what it prints."""
    environment = {name: x for name, x in os.environ.items() if not name.startswith("PYTHON")}
    with tempfile.TemporaryDirectory() as empty:
        environment |= {"CXX": "no-such-compiler", "SPARSERING_CACHE": empty}
        done = subprocess.run(
            [str(x) for x in command],
            cwd=empty,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
    if done.returncode:
        sys.exit(f"strangers: {done.stderr[-2000:]}")
    return done.stdout


def new_environment(folder: Path, *packages: str) -> Path:
    """Makes an environment and installs into it; returns its interpreter."""
    run(sys.executable, "-m", "venv", folder)
    python = folder / "bin" / "python"
    run(python, "-m", "pip", "install", "--quiet", "--no-cache-dir", *packages)
    return python


@contextmanager
def index(dist: Path) -> Iterator[str]:
    """Serves the wheels of a folder from this machine; yields the address."""
    with tempfile.TemporaryDirectory() as name, socket.socket() as found:
        python = new_environment(Path(name), SERVER)
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
        found.close()
        at = ["-p", str(port), "-i", "127.0.0.1", "--disable-fallback"]
        command = [str(python.parent / "pypi-server"), "run", *at, str(dist)]
        server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            for _ in range(200):
                with socket.socket() as tried:
                    if tried.connect_ex(("127.0.0.1", port)) == 0:
                        break
                time.sleep(0.1)
            yield f"http://127.0.0.1:{port}/simple/"
        finally:
            server.terminate()
            server.wait()


def seconds_to_a_number(packages: Sequence[str], script: str) -> dict[str, float]:
    """Returns the seconds of installing and of running, and the distance that was printed."""
    with tempfile.TemporaryDirectory() as name:
        begin = time.perf_counter()
        python = new_environment(Path(name), *packages)
        installed = time.perf_counter()
        said = run(python, "-c", script)
        done = time.perf_counter()
        expected = run(python, "-c", LIBRARIES)
    if "compiled for cpu" not in expected:
        sys.exit("strangers: expected the wheel with libraries in dist/; build it: make wheels")
    error = float(said.split("error ")[1])
    if not error < MOST_ERROR:
        sys.exit(f"strangers: expected an error below {MOST_ERROR}, got {error}")
    return {"install_s": installed - begin, "script_s": done - installed, "error": error}


def main() -> None:
    """Writes the record."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--dist", type=Path, default=ROOT / "dist", help="folder of the wheels")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    rows = []
    torch_of_this = f"torch=={torch.__version__.partition('+')[0]}"
    with index(arguments.dist) as address:
        for user, (package, script) in USERS.items():
            packages = ["--extra-index-url", address, package, torch_of_this]
            found = [seconds_to_a_number(packages, script) for _ in range(arguments.rounds)]
            totals = [x["install_s"] + x["script_s"] for x in found]
            rows.append({
                "user": user,
                "seconds": statistics.median(totals),
                "most_seconds": max(totals),
                **{name: statistics.median(x[name] for x in found) for name in found[0]},
                "rounds": arguments.rounds,
            })  # fmt: skip
            write_record(arguments.out, "strangers", rows)


if __name__ == "__main__":
    main()
