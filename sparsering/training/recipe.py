"""A recipe: all settings that a training run's losses depend on. Checkpoints contain it."""

import math
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Annotated, Any, get_type_hints

import torch

from ..ground.keywords import class_with_hints
from ..models.longnet import LongNetLM
from ..patterns.expression import parse
from ..patterns.positions import Causal
from .adaptive import schedule_of

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
# In characters: a stranger may have written the recipe, and long patterns take long to parse.
LONGEST_PATTERN = 1000

# settings that are missing in checkpoints of version 0.2.0; they get their defaults
_ADDED = ("attention", "blocks", "block_size", "schedule", "gate", "refine")

_RANGES = {
    **dict.fromkeys(("context", "batch_size", "steps", "blocks", "block_size"), (1, 1 << 40)),
    **dict.fromkeys(("width", "num_layers", "num_heads"), (1, 1 << 24)),
    **dict.fromkeys(("warmup_steps", "refine"), (0, 1 << 40)),
    "seed": (-(1 << 63), (1 << 64) - 1),  # the range of torch.manual_seed
}


@class_with_hints
@dataclass(frozen=True)
class Recipe:
    """Settings of a training run; its losses are bitwise reproducible on the same machine."""

    # `sparsering train --help` shows these texts and defaults.
    pattern: Annotated[str, "attention pattern, as a Python expression; Causal() is added"] = (
        "LongNet((256, 1024, 4096, 16384), (1, 4, 16, 64)) & Causal()"
    )
    data: Annotated[str | None, "text file or folder (default: Python's standard library)"] = None
    glob: Annotated[str, "names of the files to read in a folder, such as '*.txt'"] = "*"
    context: Annotated[int, "tokens per window"] = 16384
    batch_size: Annotated[int, "windows per step"] = 1
    steps: Annotated[int, "optimizer steps of the whole run"] = 1000
    width: Annotated[int, "channels of the model"] = 128
    num_layers: Annotated[int, "transformer blocks"] = 4
    num_heads: Annotated[int, "attention heads"] = 2
    learning_rate: Annotated[float, "peak; then falls to a tenth by half a cosine"] = 8e-3
    warmup_steps: Annotated[int, "steps in which the learning rate rises linearly"] = 20
    weight_decay: Annotated[float, "of AdamW, for the weight matrices only"] = 0.1
    clip_norm: Annotated[float, "a gradient of larger norm is scaled down to this norm"] = 1.0
    seed: Annotated[int, "decides initial weights, validation files and windows"] = 0
    dtype: Annotated[str, "float32, bfloat16 (autocast), or auto: what the device is best at"] = (
        "auto"
    )
    checkpoint_layers: Annotated[bool, "recompute each block in backward to save memory"] = False

    attention: Annotated[str, "pattern, or selected: causal, blocks chosen by content"] = "pattern"
    blocks: Annotated[int, "blocks that each row of queries chooses"] = 16
    block_size: Annotated[int, "tokens of a block"] = 64
    schedule: Annotated[str, "blocks by step: '0:dense, 200:64' (default: always --blocks)"] = ""
    gate: Annotated[str, "'loss<=2.5': the schedule waits for such a loss (default: none)"] = ""
    refine: Annotated[int, "steps between improvements of tables of blocks; 0: no tables"] = 0

    def __post_init__(self) -> None:
        for name, (least, most) in _RANGES.items():
            if not least <= (got := getattr(self, name)) <= most:
                raise ValueError(f"{name} must be from {least} to {most}, got {got}")
        for name in ("learning_rate", "clip_norm"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be above 0, got {getattr(self, name)}")
        if self.dtype not in ("auto", *DTYPES):
            raise ValueError(f"dtype must be auto, float32 or bfloat16, got {self.dtype!r}")
        if self.attention not in ("pattern", "selected"):
            raise ValueError(f"attention must be pattern or selected, got {self.attention!r}")
        if self.attention == "selected":
            schedule_of(self)
        elif self.schedule or self.gate or self.refine:
            raise ValueError(
                "schedule, gate and refine decide chosen blocks, got them for attention "
                f"{self.attention!r}; pass --attention selected"
            )
        if len(self.pattern) > LONGEST_PATTERN:
            raise ValueError(
                f"pattern must be at most {LONGEST_PATTERN} characters, got {len(self.pattern)}; "
                "write it shorter"
            )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Python may warn of text that `parse` rejects anyway
            parse(self.pattern)

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> "Recipe":
        """Builds a recipe from a checkpoint's JSON; ValueError for wrong names or types."""
        kinds = get_type_hints(cls)
        values = {name: getattr(cls, name) for name in _ADDED} | values
        if values.keys() != kinds.keys():
            odd = ", ".join(sorted(values.keys() ^ kinds.keys())[:3])
            raise ValueError(f"the recipe lacks settings, or has unknown ones: {odd}")
        for name, kind in kinds.items():
            if not _has_type(kind, value := values[name]):
                raise ValueError(f"the recipe's {name} is an unusable {type(value).__name__}")
        return cls(**values)

    def build_model(self) -> LongNetLM:
        """Builds the recipe's model, with initial weights that the seed decides."""
        torch.manual_seed(self.seed)
        return self._model()

    def _model(self) -> LongNetLM:
        """Builds the model with random weights from torch's global generator, unseeded."""
        return LongNetLM(
            parse(self.pattern) if self.attention == "pattern" else Causal(),
            width=self.width,
            num_layers=self.num_layers,
            num_heads=self.num_heads,
            checkpoint_layers=self.checkpoint_layers,
        )

    def parameter_shapes(self) -> Iterator[tuple[str, torch.Size]]:
        """Yields (name, shape) of each parameter of the model without allocating any."""
        with torch.device("meta"):
            model = replace(self, num_layers=1)._model()
        for name, parameter in model.named_parameters():
            before, block, after = name.partition("blocks.0.")
            for layer in range(self.num_layers) if block else ():
                yield f"{before}blocks.{layer}.{after}", parameter.shape
            if not block:
                yield name, parameter.shape

    def learning_rate_at(self, step: int) -> float:
        """Returns the learning rate of a step: a linear warm-up, then a cosine down to a tenth."""
        warm = min(1.0, (step + 1) / max(self.warmup_steps, 1))
        progress = (step - self.warmup_steps) / max(self.steps - self.warmup_steps, 1)
        cosine = (1 + math.cos(math.pi * min(max(progress, 0.0), 1.0))) / 2
        return self.learning_rate * warm * (0.1 + 0.9 * cosine)


def _has_type(kind: Any, value: object) -> bool:
    """Whether a JSON value has the type of a recipe's field; floats may be written as ints."""
    if kind is float:
        return type(value) in (int, float) and abs(value) < 1e300  # type: ignore[arg-type]
    return isinstance(value, kind) and isinstance(value, bool) == (kind is bool)


def best_dtype() -> str:
    """Returns the faster dtype for autocast on this CPU: bfloat16 only if the CPU supports it.

    Measured with the demo's model on a CPU with avx512_bf16 and no AMX: a step takes 1.7 s in
    float32 and 1.0 s in bfloat16. Without these instructions bfloat16 is slower than float32.
    """
    amx, avx512 = (
        getattr(torch.cpu, name, lambda: False)()
        for name in ("_is_amx_tile_supported", "_is_avx512_bf16_supported")
    )
    return "bfloat16" if amx or avx512 else "float32"
