"""Every public function, constructor and method refuses an unknown keyword, and names its own.

The callables are found by walking over the public modules, so a new one without hints fails here.
"""

import importlib
import inspect
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import sparsering as sr
from sparsering.distributed import ring_attention, simulate_ring

PACKAGE = Path(sr.__file__).parent
MODULES = sorted(
    ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__")
    for path in PACKAGE.rglob("*.py")
    if "kernels" not in path.parts  # backends, which only the library calls
    if re.search(r"^__all__ = ", path.read_text(), re.M)
)
NOT_MADE_BY_USERS = {  # what their constructors say instead
    "Pattern": "Pattern is no pattern yet",
    "Mask": "Mask is no pattern yet",
}
PASSED_ON = {  # their keywords go on to a class, which refuses them
    f"SelectedAttention.{name}": "SelectedAttention"
    for name in ("nsa", "moba", "adaptive", "hierarchical")
}
OF_TRANSFORMERS = {"load"}  # its keywords are those of `from_pretrained`
OPTION = "qqq"


def callables() -> Iterator[tuple[str, Callable[..., Any], int]]:
    """Yields (name, callable, number of bound arguments) of everything public, each once."""
    seen = set()
    for module in MODULES:
        library = importlib.import_module(module)
        for name in library.__all__:
            value = getattr(library, name)
            if inspect.isclass(value):
                if issubclass(value, Exception) or value in seen:
                    continue
                seen.add(value)
                yield name, value, 0
                yield from methods(name, value)
            elif inspect.isfunction(value):
                yield name, value, 0
            else:
                yield from methods(name, type(value))


def methods(name: str, cls: type) -> Iterator[tuple[str, Callable[..., Any], int]]:
    """Yields the public methods that a class has from this library."""
    for method in dir(cls):
        value = getattr(cls, method)
        if method.startswith("_") or not (inspect.isfunction(value) or inspect.ismethod(value)):
            continue
        if value.__module__.startswith("sparsering") and not hasattr(value, "_is_inner"):
            bound = inspect.isfunction(value) and not isinstance(
                inspect.getattr_static(cls, method), staticmethod
            )
            yield f"{name}.{method}", value, int(bound)


ALL = {name: (function, bound) for name, function, bound in callables()}


def test_the_walk_finds_all_kinds():
    kinds = {"attention", "KVCache", "KVCache.attend", "RingPlan.build", "layout_cache.info"}
    assert kinds <= set(ALL)
    assert {"MultiheadAttention.forward", "LongNetLM.generate", "parallelize", "Recipe"} <= set(ALL)


@pytest.mark.parametrize("name", sorted(set(ALL) - OF_TRANSFORMERS))
def test_an_unknown_keyword_is_refused_with_the_names(name):
    function, bound = ALL[name]
    parameters = list(inspect.signature(function).parameters.values())
    first = [x for x in parameters if x.default is x.empty and x.kind is x.POSITIONAL_OR_KEYWORD]
    required = [x.name for x in parameters if x.default is x.empty and x.kind is x.KEYWORD_ONLY]
    given = dict.fromkeys(required)
    with pytest.raises(TypeError) as failed:
        function(*[None] * len(first), **given, **{OPTION: 1})
    said = str(failed.value)
    if name in NOT_MADE_BY_USERS:
        assert NOT_MADE_BY_USERS[name] in said
        return
    verb = PASSED_ON.get(name, name).rpartition(".")[2]
    assert re.match(rf"(\w+\.)?{verb} has no option {OPTION}", said), said
    if name not in PASSED_ON:
        listed = re.findall(r"\w+", said.partition("its options are ")[2])
        own = {x.name for x in parameters[bound:] if x.kind is x.KEYWORD_ONLY} - set(given)
        assert own <= set(listed), f"{said}: it leaves out {own - set(listed)}"


x = torch.randn(1, 2, 64, 16)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda cache: cache.attend(x, x, x, length=[64]),
            r"attend has no option length \(did you mean lengths\?\)",
        ),
        (
            lambda _: sr.KVCache(sr.Causal(), 1, 2, 16, page=16),
            r"KVCache has no option page \(did you mean page_size",
        ),
        (
            lambda _: sr.SelectedCache(1, 2, 16, 4, rollbacks=2),
            r"SelectedCache has no option rollbacks \(did you mean rol",
        ),
        (
            lambda _: sr.Causal().layout(64, block=16),
            r"Pattern.layout has no option block \(did you mean block_",
        ),
        (
            lambda _: ring_attention(x, x, x, sr.Causal(), shardin="zigzag"),
            r"ring_attention has no option shardin \(did you mean shar",
        ),
    ],
    ids=["KVCache.attend", "KVCache", "SelectedCache", "layout", "ring_attention"],
)
def test_a_similar_name_of_a_method_is_named(call, message):
    cache = sr.KVCache(sr.Causal(), 1, 2, 16)
    with pytest.raises(TypeError, match=message):
        call(cache)
    assert cache.length == 0


CALLS = {
    "attention": lambda **given: sr.attention(x, x, x, sr.Causal(), **given),
    "explain": lambda **given: sr.explain(x, x, x, sr.Causal(), **given),
    "attention_weights": lambda **given: sr.attention_weights(x, x, sr.Causal(), **given),
    "key_mass": lambda **given: sr.key_mass(x, x, sr.Causal(), **given),
    "attention_varlen": lambda **given: sr.attention_varlen(
        x[0].mT, x[0].mT, x[0].mT, [0, 2], [0, 2], sr.Causal(), **given
    ),
    "simulate_ring": lambda **given: simulate_ring(x, x, x, sr.Causal(), world_size=2, **given),
    "ring_attention": lambda **given: ring_attention(x, x, x, sr.Causal(), **given),
    "attend": lambda **given: sr.KVCache(sr.Causal(), 1, 2, 16).attend(x, x, x, **given),
}


@pytest.mark.parametrize("verb", CALLS)
@pytest.mark.parametrize(
    ("name", "way_out"),
    [
        ("mask", "pattern=Dense(mask)"),
        ("mask_mod", "pattern=from_mask_mod(mask_mod)"),
        ("attn_mask", "pattern=Dense(mask)"),
        ("block_mask", "pattern=from_mask_mod(mask_mod)"),
        ("key_padding_mask", "KeyMask(valid)"),
        ("is_causal", "pattern & Causal()"),
        ("window_size", "pattern=SlidingWindow(left, right)"),
    ],
)
def test_options_of_other_libraries_name_the_way_out(verb, name, way_out):
    with pytest.raises(ValueError, match=f"^{verb} takes no {name}: .*{re.escape(way_out)}"):
        CALLS[verb](**{name: None})


def test_a_block_mask_as_the_pattern_names_its_function():
    from torch.nn.attention.flex_attention import create_block_mask

    block_mask = create_block_mask(lambda b, h, q, k: q >= k, None, None, 64, 64, device="cpu")
    way_out = re.escape("from_mask_mod(block_mask.mask_mod) makes a pattern")
    with pytest.raises(TypeError, match=f"BlockMask; {way_out}"):
        sr.attention(x, x, x, block_mask)
    with pytest.raises(TypeError, match=way_out):
        sr.Causal() & block_mask
    out = sr.attention(x, x, x, sr.from_mask_mod(block_mask.mask_mod))
    assert torch.equal(out, sr.attention(x, x, x, sr.from_mask_mod(lambda b, h, q, k: q >= k)))
