"""The public functions: what they refuse and say.

A message tells what was expected, what was got, and one way out.
"""

import re
from typing import Any

import pytest
import torch
from oracles.attention_oracle import Case, assert_close, attend_by_rows, inputs
from oracles.kinds import random_table
from torch import Tensor

import sparsering as sr
from sparsering.call import Call, Options
from sparsering.distributed import ring_attention, simulate_ring
from sparsering.kernels.backends import BACKENDS, reasons_against
from sparsering.route.decision import Decision
from sparsering.route.options import OPTIONS
from sparsering.route.run import attend

CASE = Case(2, 4, 2, 40, 40, 8, 6)
SHAPES = "batch 2, 4 heads of 40 queries, 2 heads of 40 keys"


def tensors(**changes: Any) -> dict[str, Tensor]:
    """Query, key and value of CASE; a change is a shape, a dtype, a device or a tensor."""
    made = dict(zip(("query", "key", "value"), inputs(CASE, torch.float32, False), strict=True))
    for name, change in changes.items():
        old = made[name]
        if isinstance(change, tuple):
            made[name] = torch.zeros(change)
        elif isinstance(change, torch.Tensor):
            made[name] = change
        else:
            made[name] = old.to(change)
    return made


def contains(*parts: object) -> str:
    """A regular expression of literal parts in this order."""
    return "(?s)" + ".*".join(re.escape(str(part)) for part in parts)


# What is refused: arguments -> TypeError or ValueError with what was expected, got, and a way out.

WRONG_TENSORS = {
    "no batch dim": (
        tensors(query=(4, 40, 8)),
        contains("[batch, heads, tokens, head dim]", "got query (4, 40, 8)", "unsqueeze"),
    ),
    "five dims": (
        tensors(value=(1, 2, 2, 40, 6)),
        contains("[batch, heads, tokens, head dim]", "value (1, 2, 2, 40, 6)", "unsqueeze"),
    ),
    "another batch of keys": (
        tensors(key=(3, 2, 40, 8), value=(3, 2, 40, 6)),
        contains("must agree", "query (2, 4, 40, 8), key (3, 2, 40, 8)", "transpose(1, 2)"),
    ),
    "another head dim of keys": (
        tensors(key=(2, 2, 40, 7)),
        contains("must agree", "query (2, 4, 40, 8), key (2, 2, 40, 7)", "transpose(1, 2)"),
    ),
    "another length of values": (
        tensors(value=(2, 2, 41, 6)),
        contains("must agree", "key (2, 2, 40, 8), value (2, 2, 41, 6)", "transpose(1, 2)"),
    ),
    "another number of value heads": (
        tensors(value=(2, 1, 40, 6)),
        contains("must agree", "key (2, 2, 40, 8), value (2, 1, 40, 6)", "transpose(1, 2)"),
    ),
    "heads that do not divide": (
        tensors(key=(2, 3, 40, 8), value=(2, 3, 40, 6)),
        contains("query heads must be a multiple of key/value heads", "got 4 and 3"),
    ),
    "no key heads": (
        tensors(key=(2, 0, 40, 8), value=(2, 0, 40, 6)),
        contains("query heads must be a multiple of key/value heads", "got 4 and 0"),
    ),
    "integers": (
        tensors(query=torch.int64, key=torch.int64, value=torch.int64),
        contains("float64, float32, bfloat16, float16", "torch.int64", ".to()"),
    ),
    "complex numbers": (
        tensors(query=torch.complex64, key=torch.complex64, value=torch.complex64),
        contains("float64, float32, bfloat16, float16", "torch.complex64", ".to()"),
    ),
    "two dtypes": (
        tensors(value=torch.bfloat16),
        contains("share a dtype", "torch.float32", "torch.bfloat16", ".to()"),
    ),
    "two devices": (tensors(key="meta"), contains("on one device", "got cpu, meta, cpu", ".to()")),
}


NO_TENSORS = {
    "a list": ([[1.0]], contains("query must be a tensor", "got a list", "torch.as_tensor")),
    "nothing": (None, contains("query must be a tensor", "got None")),
    "an array": (torch.zeros(2, 4, 40, 8).numpy(), contains("got a ndarray", "torch.as_tensor")),
    "a sparse tensor": (
        torch.zeros(2, 4, 40, 8).to_sparse(),
        contains("query must be a dense tensor", "torch.sparse_coo", ".to_dense()"),
    ),
    "a jagged tensor": (
        torch.nested.nested_tensor([torch.zeros(4, n, 8) for n in (3, 5)], layout=torch.jagged),
        contains("query must be a dense tensor", "nested", "KeyPadding", "Packed"),
    ),
}


@pytest.mark.parametrize("name", NO_TENSORS)
def test_what_is_no_dense_tensor_raises_value_error(name):
    query, message = NO_TENSORS[name]
    for call in attention_in_every_way({**tensors(), "query": query}, sr.Causal()):
        with pytest.raises(ValueError, match=message):
            call()


@pytest.mark.parametrize(
    ("scale", "message"),
    [
        ("a", contains("scale must be a number or None", "got 'a'", "float()")),
        (True, contains("scale must be a number or None", "got True")),
        ([0.5], contains("scale must be a number or None", "got [0.5]")),
        (float("nan"), contains("scale must be a finite float", "got nan")),
        (10**400, contains("scale must be a finite float", "got 1000", "...")),
        (torch.tensor(0.5), contains("got a tensor ()", "multiply the query by it")),
    ],
)
def test_a_scale_that_is_no_number_raises_value_error(scale, message):
    args = tensors()
    for call in (
        *attention_in_every_way(args, sr.Causal(), scale=scale),
        lambda: sr.attention_weights(args["query"], args["key"], sr.Causal(), scale=scale),
        lambda: simulate_ring(**args, pattern=sr.Causal(), world_size=2, scale=scale),
        lambda: ring_attention(**args, pattern=sr.Causal(), scale=scale),
    ):
        with pytest.raises(ValueError, match=message):
            call()


@pytest.mark.parametrize("name", ["q_start", "block_size"])
@pytest.mark.parametrize("number", [10**30, -(2**63), 2**63 - 1])
def test_a_number_of_tokens_beyond_any_length_raises_value_error(name, number):
    for call in attention_in_every_way(tensors(), sr.Causal(), **{name: number}):
        with pytest.raises(ValueError, match=contains(f"{name} must lie within", f"got {number}")):
            call()


@pytest.mark.parametrize(
    "option", ["logit_cap", *(name for name in OPTIONS if name != "slot_bias")]
)
def test_an_option_is_computed_or_refused_by_name_and_never_ignored(option):
    """The next option, too: what no kernel computes, and what its schema does not know."""
    args = tensors()
    bias = torch.zeros(2, 4, 6)  # of Causal() at 40 tokens
    for name, backend in BACKENDS.items():
        reasons = " ".join(reasons_against(name, tuple(args.values()), {option: bias}))
        assert (f"it has no {option}" in reasons) == (option not in backend.extras)
        if option == "logit_cap" and name != "triton":
            with pytest.raises((TypeError, AssertionError), match="logit_cap"):
                call = Call(
                    **args,
                    pattern=sr.Causal(),
                    scale=1.0,
                    q_start=0,
                    block_size=16,
                    options=Options({"logit_cap": 5.0}),
                )
                attend(call, Decision.of(call, name))


@pytest.mark.parametrize("part", ["outs", "lses"])
@pytest.mark.parametrize("given", [None, 3, [[1.0]], [None]])
def test_what_is_no_sequence_of_tensors_cannot_be_merged(part, given):
    whole = {"outs": [torch.zeros(1, 1, 4, 2)], "lses": [torch.zeros(1, 1, 4)], part: given}
    with pytest.raises(ValueError, match="two sequences of tensors, got"):
        sr.merge_attention(**whole)


def test_tensors_without_numbers_have_shapes_alone():
    args = {name: x.to("meta") for name, x in tensors().items()}
    assert sr.attention(**args, pattern=sr.Causal(), backend="gather").shape == (2, 4, 40, 6)
    for call in (
        lambda: sr.attention_weights(args["query"], args["key"], sr.Causal()),
        lambda: simulate_ring(**args, pattern=sr.Causal(), world_size=2),
    ):
        with pytest.raises(ValueError, match="got some on the meta device"):
            call()
    with pytest.raises(ValueError, match="dense tensor with numbers, got one on the meta device"):
        sr.Blocks(torch.ones(2, 2, dtype=torch.bool, device="meta"), 16)
    with pytest.raises(ValueError, match=r"dense tensor with numbers, got torch\.sparse_coo"):
        sr.Dense(torch.ones(2, 2, dtype=torch.bool).to_sparse())


def test_a_scale_may_be_any_number():
    import numpy

    args = tensors()
    expected = sr.attention(**args, pattern=sr.Causal(), scale=2.0)
    for scale in (2, numpy.float32(2), numpy.int64(2)):
        assert torch.equal(sr.attention(**args, pattern=sr.Causal(), scale=scale), expected)


@pytest.mark.parametrize("name", ["q_start", "block_size"])
@pytest.mark.parametrize("value", ["16", 1.5, 1.0, True])
def test_a_number_of_another_kind_raises_value_error(name, value):
    message = contains(f"{name} must be an int or None", f"got {value!r}", "int()")
    for call in attention_in_every_way(tensors(), sr.Causal(), **{name: value}):
        with pytest.raises(ValueError, match=message):
            call()


@pytest.mark.parametrize("backend", [None, "reference"])
def test_meta_tensors_tell_shapes(backend):
    args = {name: x.to("meta") for name, x in tensors().items()}
    out, lse = sr.attention(**args, pattern=sr.Causal(), return_lse=True, backend=backend)
    assert out.is_meta and out.shape == (2, 4, 40, 6) and lse.shape == (2, 4, 40)
    assert sr.explain(**args, pattern=sr.Causal()).startswith("runs: gather")


def attention_in_every_way(args: dict[str, Tensor], pattern: Any, **options: Any) -> list[Any]:
    """Calls of every function that takes these tensors, to be made one by one."""
    calls: list[Any] = [
        lambda: sr.attention(**args, pattern=pattern, **options),
        lambda: sr.attention(**args, pattern=pattern, backend="reference", **options),
    ]
    if not options:
        calls.append(lambda: sr.explain(**args, pattern=pattern))
    return calls


@pytest.mark.parametrize("name", WRONG_TENSORS)
def test_tensors_that_do_not_fit_raise_value_error(name):
    args, message = WRONG_TENSORS[name]
    for call in attention_in_every_way(args, sr.Causal()):
        with pytest.raises(ValueError, match=message):
            call()


@pytest.mark.parametrize(
    ("query", "key", "message"),
    [
        ((2, 40, 8), (2, 2, 40, 8), contains("[batch, heads, tokens, head dim]", "(2, 40, 8)")),
        ((2, 2, 40, 8), (2, 2, 40, 9), contains("must agree", "(2, 2, 40, 9)")),
        ((2, 3, 40, 8), (2, 2, 40, 8), contains("multiple", "got 3 and 2")),
    ],
)
def test_attention_weights_refuses_what_attention_does(query, key, message):
    with pytest.raises(ValueError, match=message):
        sr.attention_weights(torch.zeros(query), torch.zeros(key), sr.Causal())


@pytest.mark.parametrize("pattern", [None, "Causal()", torch.ones(40, 40).bool(), sr.Causal])
def test_what_is_no_pattern_raises_type_error(pattern):
    args = tensors()
    got = "the class Causal" if pattern is sr.Causal else type(pattern).__name__
    message = contains("sparsering pattern such as Causal()", f"got {got};")
    calls = attention_in_every_way(args, pattern)
    calls.append(lambda: sr.attention_weights(args["query"], args["key"], pattern))
    for call in calls:
        with pytest.raises(TypeError, match=message):
            call()


def test_options_are_keyword_only():
    with pytest.raises(TypeError):
        sr.attention(*tensors().values(), sr.Causal(), 0.5)  # type: ignore[misc]


@pytest.mark.parametrize("block_size", [0, 8, 17, 24, 272, -16])
def test_a_block_size_that_is_not_legal_raises(block_size):
    message = contains("multiple of 16 from 16 to 256", f"got {block_size}")
    args = tensors()
    with pytest.raises(ValueError, match=message):
        sr.attention(**args, pattern=sr.Causal(), block_size=block_size)
    with pytest.raises(ValueError, match=message):
        sr.attention_weights(args["query"], args["key"], sr.Causal(), block_size=block_size)


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        (sr.Documents((10, 20)), contains("40", "30")),
        (sr.Packed((10, 20), sr.Causal()), contains("40", "30")),
        (sr.KeyPadding((40, 40, 40)), contains("for 3 batch entries", "got a query of 2")),
        (sr.Blocks(random_table(3, 1, 1, 1), 64), contains("3 batch entries", "query of 2")),
        (sr.Blocks(random_table(2, 2), 16), contains("cover 3", "of 16", "got shape (2, 2)")),
        (sr.Blocks(random_table(3, 3, 3), 16), contains("3")),  # of 4 query and 2 kv heads
        (sr.Dense(random_table(40, 41)), contains("40", "41")),
        (sr.Dilated(16, 4, (1, 2, 3)), contains("2", "3")),
    ],
    ids=repr,
)
def test_a_pattern_that_does_not_fit_the_inputs_raises(pattern, message):
    for call in attention_in_every_way(tensors(), pattern)[:2]:
        with pytest.raises(ValueError, match=message):
            call()


@pytest.mark.parametrize("backend", ["cpu", "gather", "reference"])
@pytest.mark.parametrize(
    ("shape", "block_size", "message"),
    [
        ((1, 1, 6), None, contains("block_bias needs an explicit block_size", "layout(block_size")),
        ((6,), 16, contains("[2 or 1, 4 or 1, num_blocks]", "got (6,)")),
        ((1, 6), 16, contains("[2 or 1, 4 or 1, num_blocks]", "got (1, 6)")),
        ((3, 1, 6), 16, contains("[2 or 1, 4 or 1, num_blocks]", "got (3, 1, 6)")),
        ((2, 2, 6), 16, contains("[2 or 1, 4 or 1, num_blocks]", "got (2, 2, 6)")),
        ((1, 1, 5), 16, contains("6]", "got 5", "num_blocks")),
        ((1, 1, 9), 16, contains("6]", "got 9", "num_blocks")),
        ((1, 1, 0), 16, contains("6]", "got 0", "num_blocks")),
    ],
)
def test_a_block_bias_that_does_not_fit_raises(shape, block_size, message, backend):
    with pytest.raises(ValueError, match=message):
        sr.attention(
            **tensors(),
            pattern=sr.Causal(),
            block_size=block_size,
            block_bias=torch.zeros(shape),
            backend=backend,
        )


@pytest.mark.parametrize(
    ("bias", "message"),
    [
        (torch.zeros(1, 1, 6, dtype=torch.int64), contains("floating point", "torch.int64 on cpu")),
        (torch.zeros(1, 1, 6, device="meta"), contains("on cpu", "torch.float32 on meta")),
    ],
)
def test_a_block_bias_of_another_kind_or_place_raises(bias, message):
    with pytest.raises(ValueError, match=message):
        sr.attention(**tensors(), pattern=sr.Causal(), block_size=16, block_bias=bias)


def test_weights_with_a_block_bias_need_a_block_size_too():
    args = tensors()
    with pytest.raises(ValueError, match="block_bias needs an explicit block_size"):
        sr.attention_weights(
            args["query"], args["key"], sr.Causal(), block_bias=torch.zeros(1, 1, 1)
        )


def test_an_unknown_backend_raises_with_the_names_there_are():
    with pytest.raises(ValueError, match=contains("gather", "reference", "or None", "got 'fast'")):
        sr.attention(**tensors(), pattern=sr.Causal(), backend="fast")


# Which backend runs


@pytest.fixture
def cpu_cannot_run(monkeypatch):
    """`cpu`, which comes first, has two reasons not to run."""

    def reasons(*tensors: object) -> list[str]:
        return ["it is too cold", f"it saw {len(tensors)} tensors"]

    monkeypatch.setitem(BACKENDS, "cpu", BACKENDS["cpu"]._replace(reasons=reasons))


def test_backends_are_named_with_reasons_why_not():
    found = sr.backends()
    usable = ("cpu", "triton", "gather", "reference", "torch_sparse", "sdpa")
    assert found.pop("flash")[0].startswith("neither FlashAttention-4 (package flash-attn-4)")
    assert found.pop("cudnn")[0].startswith("the package nvidia-cudnn-frontend is not in")
    assert found == {name: [] for name in usable}  # Triton's interpreter is on


@pytest.mark.usefixtures("cpu_cannot_run")
def test_backends_tells_reasons_that_need_no_inputs():
    assert sr.backends()["cpu"] == ["it is too cold", "it saw 0 tensors"]


def test_explain_gives_a_line_for_each_backend():
    with sr.batch_invariant():
        runs, *lines = sr.explain(**tensors(), pattern=sr.Causal()).split("\n")
    assert runs == f"runs: cpu, blocks of 64; {SHAPES}"
    names = ["cpu", "triton", "gather", "reference", "torch_sparse", "sdpa", "flash", "cudnn"]
    assert [line.split(": ")[0] for line in lines] == names == list(sr.backends())
    assert [name for name in names if f"{name}: usable" in lines] == ["cpu", "gather", "reference"]
    named = [name for name in names if f"{name}: usable (only when named)" in lines]
    assert named == ["triton", "torch_sparse", "sdpa"]  # Triton's interpreter is on
    double = {name: x.double() for name, x in tensors().items()}
    runs, bits, first, second, *others = sr.explain(**double, pattern=sr.Causal()).split("\n")
    assert bits.startswith("bits: those of a row may depend on what else the call computes")
    told = "it computes in float32; float64 stays with gather"
    assert runs == f"runs: gather, blocks of 64; {SHAPES}"
    assert (first, second) == (f"cpu: {told}", f"triton: {told} (only when named)")
    assert others[:2] == ["gather: usable", "reference: usable"]
    of_names = ["torch_sparse: usable (only when named)", "sdpa: usable (only when named)"]
    assert others[2:4] == of_names and others[4].startswith("flash: neither FlashAttention-4 (")


def test_explain_and_layout_tell_the_block_size_that_runs():
    query, key, value = tensors().values()
    sizes = ((sr.RandomBlocks(0.2, 64), 64), (sr.Causal(), 64), (sr.Full(), 128))
    for pattern, size in (*sizes, (sr.SlidingWindow(15), 32)):
        longer = (
            query[:, :, :1].expand(-1, -1, 300, -1),
            *(x[:, :, :1].expand(-1, -1, 300, -1) for x in (key, value)),
        )
        first, *_ = sr.explain(*longer, pattern).split("\n")
        assert first.startswith(f"runs: cpu, blocks of {size}; ")
        assert pattern.layout(300).block_size == size


def test_explain_heeds_options_and_refuses_what_attention_refuses():
    args = tensors()
    bias = torch.zeros(1, 1, sr.Causal().layout(40, block_size=16).num_blocks)
    lines = sr.explain(**args, pattern=sr.Causal(), block_size=16, block_bias=bias).split("\n")
    assert lines[0] == f"runs: cpu, blocks of 16; {SHAPES}"
    assert lines[2] == "cpu: usable"
    for pattern in (sr.Documents((3, 4)), sr.KeyPadding((3,)), sr.Dilated(8, 2, (0, 1, 2))):
        with pytest.raises(ValueError) as of_attention:
            sr.attention(**args, pattern=pattern)
        with pytest.raises(ValueError) as of_explain:
            sr.explain(**args, pattern=pattern)
        assert str(of_explain.value) == str(of_attention.value)


@pytest.mark.usefixtures("cpu_cannot_run")
def test_explain_gives_all_reasons_of_a_backend_that_cannot_run():
    runs, _, first, *others = sr.explain(**tensors(), pattern=sr.Causal()).split("\n")
    assert runs.startswith("runs: gather, blocks of 64")
    assert first == "cpu: it is too cold; it saw 3 tensors"
    assert others[1:3] == ["gather: usable", "reference: usable"]


@pytest.mark.usefixtures("cpu_cannot_run")
def test_a_named_backend_that_cannot_run_raises_with_all_its_reasons():
    with pytest.raises(NotImplementedError, match=contains("cpu", "too cold", "saw 3 tensors")):
        sr.attention(**tensors(), pattern=sr.Causal(), backend="cpu")


@pytest.mark.usefixtures("cpu_cannot_run")
def test_without_a_name_the_next_backend_runs():
    args = tensors()
    out = sr.attention(**args, pattern=sr.Causal())
    assert torch.equal(out, sr.attention(**args, pattern=sr.Causal(), backend="gather"))


def test_where_no_backend_can_run_every_reason_is_given(monkeypatch):
    for name, reason in (("cpu", "too old"), ("gather", "too cold"), ("reference", "too large")):
        backend = BACKENDS[name]._replace(reasons=lambda *_, reason=reason: [reason])
        monkeypatch.setitem(BACKENDS, name, backend)
    with pytest.raises(NotImplementedError, match=contains("gather: too cold", "reference: too l")):
        sr.attention(**tensors(), pattern=sr.Causal())


def test_return_lse_decides_between_a_tensor_and_a_pair():
    args = tensors()
    out = sr.attention(**args, pattern=sr.Causal())
    pair = sr.attention(**args, pattern=sr.Causal(), return_lse=True)
    assert isinstance(out, Tensor) and isinstance(pair, tuple)
    assert torch.equal(out, pair[0])
    expected = attend_by_rows(*(x.double() for x in args.values()), torch.ones(40, 40).tril())
    assert_close(pair[1].double(), expected[1], 1e-6, "lse")


@pytest.mark.parametrize("backend", ["cpu", "gather", "triton", "reference"])
@pytest.mark.parametrize("learns", [True, False])
def test_a_result_changes_in_place_and_only_its_backward_may_raise(backend: str, learns: bool):
    args = [torch.randn(1, 2, 20, 16, requires_grad=True) for _ in range(3)]
    with torch.set_grad_enabled(learns):
        out, lse = sr.attention(*args, sr.Causal(), return_lse=True, backend=backend)
    expected = out.detach() + 1, lse.detach() + 1
    out += torch.ones((), requires_grad=True)
    lse += torch.ones((), requires_grad=True)
    assert torch.equal(out, expected[0]) and torch.equal(lse, expected[1])
    if backend in ("cpu", "gather", "triton") and learns:  # the others save no result
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            out.sum().backward()
    else:
        out.sum().backward()


def test_options_of_other_libraries_are_named_with_what_to_write():
    names = {
        "attn_mask": r"pass pattern=Dense\(mask\)", "is_causal": r"pass pattern=Causal\(\), or",
        "window_size": r"pass pattern=SlidingWindow\(left, right\)", "dropout": "write dropout_p=",
        "block_mask": r"from_mask_mod\(mask", "enable_gqa": "as they are; leave it out",
    }  # fmt: skip
    for name, told in names.items():
        for pattern in ({"pattern": sr.Causal()}, {}):  # their own calls have no pattern
            with pytest.raises(ValueError, match=f"attention takes no {name}: .*{told}") as error:
                sr.attention(**tensors(), **pattern, **{name: None})
            assert ("leave it out" in str(error.value)) == (name == "enable_gqa")
    with pytest.raises(TypeError, match=r"a sparsering pattern such as Causal\(\), got NoneType"):
        sr.attention(**tensors())
    with pytest.raises(TypeError, match=r"attention has no option scales .*; its options are"):
        sr.attention(**tensors(), pattern=sr.Causal(), scales=1.0)
