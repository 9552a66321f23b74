"""Caches of families whose indexers choose keys, and the ways to generate that each allows.

`ways(family, cache)` runs each way under "sparsering", with left padding and without, and compares
its tokens and logits with eager's. A way that transformers itself refuses is not in the result.
"""

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from sharing_families import InFloat64, choices_in_float32
from torch import Tensor
from transformers_families import tiny

from sparsering.integrations import transformers as hf

BY_TOKEN = ("axk2", "deepseek_v32", "dots3_note_text", "glm_moe_dsa", "hy_v4")
BY_ENTRY = ("deepseek_v4", "glm5_next", "qwen4_exp_text")
MINIMAX = "minimax_m3_vl_text"
FAMILIES = (*BY_TOKEN, *BY_ENTRY, MINIMAX)
CACHES: dict[str, dict[str, Any]] = {
    "dynamic": {},
    "static": {"cache_implementation": "static"},
    "quantized": {"cache_implementation": "quantized", "cache_config": {"backend": "fp8"}},
    "offloaded": {"cache_implementation": "offloaded"},
    "offloaded_static": {"cache_implementation": "offloaded_static"},
}
WAYS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "beams": {"num_beams": 3},
    "assisted": {"prompt_lookup_num_tokens": 3},
    "chunked": {"prefill_chunk_size": 5},
}
TOKENS, PADDING = 24, 7


class _NoStream(contextlib.nullcontext):  # type: ignore[type-arg]
    """Stands for a stream of a GPU, so that an offloaded cache runs on a CPU, moving nothing."""

    def wait_stream(self, *_: Any) -> None:
        """Does nothing."""


@contextlib.contextmanager
def no_streams() -> Iterator[None]:
    with (
        mock.patch.object(torch, "Stream", _NoStream),
        mock.patch.object(torch.cuda, "default_stream", lambda *_: _NoStream()),
        mock.patch.object(torch.cuda, "is_available", lambda: False),
    ):
        yield


def generated(model: Any, name: str, inputs: dict[str, Tensor], options: dict[str, Any]) -> Any:
    """Returns (new tokens, logits of each step or None), or the error that transformers raises."""
    hf.register()
    model.set_attn_implementation(name)
    tokens = {"pad_token_id": 0, "eos_token_id": None, "max_new_tokens": 6, "do_sample": False}
    kept = {"output_logits": True, "return_dict_in_generate": True, "disable_compile": True}
    try:
        out = model.generate(**inputs, **tokens, **kept, **options)
    except Exception as error:  # whatever it is, eager raises the same
        return f"{type(error).__name__}: {error}"
    new = out.sequences[:, inputs["input_ids"].shape[1] :]
    return new, None if "prompt_lookup_num_tokens" in options else torch.stack(out.logits)


def rows(family: str, way: str) -> Iterator[tuple[dict[str, Tensor], list[dict[str, Tensor]]]]:
    """Yields a batch and what eager runs in its place: the same, or MiniMax-M3's rows alone."""
    generator = torch.Generator().manual_seed(0)
    batch = 1 if way == "assisted" else 2
    ids = torch.randint(4, 61, (batch, TOKENS), generator=generator)
    for padding in (0, PADDING):
        mask = torch.ones_like(ids)
        mask[-1, :padding] = 0
        inputs = {"input_ids": ids, "attention_mask": mask}
        alone = [{"input_ids": row[real.bool()][None]} for row, real in zip(ids, mask, strict=True)]
        # a list of padded rows under eager has blocks of places
        yield inputs, alone if family == MINIMAX and padding else [inputs]


def ways(family: str, cache: str) -> list[str]:
    """Lists the ways to generate that give eager's tokens; raises AssertionError for others."""
    found = []
    with InFloat64(), torch.no_grad(), choices_in_float32(), no_streams():
        model = tiny(family).eval()
        for way, options in WAYS.items():
            options = {**CACHES[cache], **options}
            outcomes = [
                (
                    generated(model, "sparsering", inputs, options),
                    [generated(model, "eager", x, options) for x in others],
                )
                for inputs, others in rows(family, way)
            ]
            if all(_agree(*outcome) for outcome in outcomes):
                found.append(way)
    return found


def _agree(got: Any, parts: list[Any]) -> bool:
    """Whether both give the same tokens and logits; False if both raise the same error."""
    errors = [x for x in (got, *parts) if isinstance(x, str)]
    if errors:
        assert len(errors) == 1 + len(parts) and len({*errors}) == 1, errors
        return False
    (tokens, logits), wanted = got, torch.cat([x[0] for x in parts])
    assert torch.equal(tokens, wanted)
    if logits is not None:
        by_eager = torch.cat([x[1] for x in parts], 1)
        torch.testing.assert_close(logits, by_eager, rtol=0, atol=1e-9)
    return True
