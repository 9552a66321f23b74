"""Unknown keywords of constructors and planning functions are refused with a hint."""

import inspect
import re

import pytest
import torch

import sparsering as sr
from sparsering.patterns.expression import _INTERNAL, BUILT_IN
from sparsering.planning import propose

PLANNING = [sr.estimate, sr.choose_batch_size, sr.longest_sequence, propose]
x = torch.randn(1, 2, 64, 16)


@pytest.mark.parametrize("name", [x for x in BUILT_IN if x not in _INTERNAL])
def test_a_constructor_names_its_arguments(name):
    """Every public constructor, found in the table that `parse` reads."""
    assert getattr(sr, name) is BUILT_IN[name]
    options = list(inspect.signature(BUILT_IN[name]).parameters)
    rest = f"; its options are {', '.join(options)}" if options else ", and no others; leave it out"
    with pytest.raises(TypeError, match=re.escape(f"{name} has no option qqq{rest}")):
        BUILT_IN[name](qqq=1)
    with pytest.raises(ValueError, match=re.escape(f"{name} has no option qqq{rest}, in pattern")):
        sr.parse(f"{name}(qqq=1)")


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: sr.LongNet(segments=(16,), dilation_rates=(1,)),
            r"LongNet has no option segments \(did you mean segment",
        ),
        (
            lambda: sr.SlidingWindow(widow=3),
            r"option widow; its options are left, right, dilation$",
        ),
        (
            lambda: sr.Packed(length=(3,), pattern=sr.Causal()),
            r"Packed has no option length \(did you mean lengths\?\)",
        ),
        (lambda: sr.Tree(parent=(-1,)), r"Tree has no option parent \(did you mean parents\?\)"),
        (
            lambda: sr.estimate(sr.Causal(), tokens=64, head_dims=4),
            r"option head_dims \(did you mean head_dim\?\); its opt",
        ),
        (
            lambda: sr.compare(x, x, x, sr.Causal(), second=1),
            r"option second \(did you mean seconds\?\); its options",
        ),
        (
            lambda: sr.attention(x, x, x, sr.Causal(), scales=1),
            r"attention has no option scales \(did you mean scale\?\)",
        ),
    ],
    ids=["LongNet", "SlidingWindow", "Packed", "Tree", "estimate", "compare", "attention"],
)
def test_a_similar_argument_is_named(call, message):
    with pytest.raises(TypeError, match=message):
        call()


@pytest.mark.parametrize("function", PLANNING, ids=lambda function: function.__name__)
def test_planning_takes_machine_for_gpu(function):
    first = 64 if function is propose else sr.Causal()
    with pytest.raises(ValueError, match=f"{function.__name__} takes no gpu: .* write machine="):
        function(first, gpu="H100")
    with pytest.raises(TypeError, match=r"option machines \(did you mean machine\?\)"):
        function(first, machines="H100")


def test_other_mistakes_keep_their_messages():
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'left'"):
        sr.SlidingWindow()
    with pytest.raises(TypeError, match="multiple values for argument 'left'"):
        sr.SlidingWindow(3, left=4)
    assert sr.SlidingWindow(left=3, right=1) == sr.SlidingWindow(3, 1)
    assert str(inspect.signature(sr.Causal)) == "() -> None"


def test_compiled_calls_make_patterns():
    lengths = torch.tensor([32, 32])

    def call(lengths):
        inner = sr.SlidingWindow(left=15) & sr.Causal()
        return sr.attention(x, x, x, sr.Packed(lengths=lengths, pattern=inner))

    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(lengths), call(lengths))


def test_a_compiled_call_keeps_the_message():
    """torch.compile cannot trace the search for a similar name, so it has the list alone."""
    x = torch.randn(1, 1, 16, 8)

    def call(x):
        return sr.attention(x, x, x, sr.Causal(), return_lsee=True)

    torch._dynamo.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported, match="attention has no option return_lsee"):
        torch.compile(call, backend="eager", fullgraph=True)(x)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: sr.Neighbourhood((8, 8), kernel_size=3), "no kernel_size.*window=kernel_size"),
        (lambda: sr.Neighbourhood((8, 8), 1, is_causal=True), "no is_causal.*causal=is_causal"),
        (lambda: sr.SlidingWindow(window=3), "no window.*left=window - 1.*right=window // 2"),
        (lambda: sr.SlidingWindow(window_size=3), "no window_size.*left=window - 1"),
        (lambda: sr.parse("SlidingWindow(window=3)"), "no window.*left=window - 1"),
    ],
    ids=["kernel_size", "is_causal", "window", "window_size", "text"],
)
def test_names_of_other_libraries_are_answered(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_the_window_of_a_hint_has_that_many_keys():
    causal, around = sr.SlidingWindow(3 - 1), sr.SlidingWindow(3 // 2, 3 // 2)
    for pattern in (causal, around):
        assert pattern.to_dense(9)[0, 4].sum() == 3
    with pytest.raises(TypeError, match="has no option radius"):
        causal.layout(64, radius=3)  # hints are of the constructor
