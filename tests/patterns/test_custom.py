"""Masks of a user's own: everywhere, exact, at the cost that is stated."""

import copy
import gc
import pickle
from dataclasses import field

import pytest
import torch
from helpers.torch_tables import evaluations
from oracles.attention_oracle import assert_close
from torch import Tensor

import sparsering as sr
from sparsering.distributed import RingPlan, simulate_ring
from sparsering.layouts.leaves import FULL
from sparsering.patterns import mask_mod as mask_mods
from sparsering.patterns.algebra import Frame
from sparsering.patterns.varlen_mask import Varlen


@sr.register_pattern
class Prefixed(sr.Mask):
    """Causal, but for a prefix that all see."""

    length: int

    def holds(self, p, k, frame):
        return (k <= p) | (k < self.length)


@sr.register_pattern
class FastPrefixed(sr.Mask):
    """Defines the mask again, with `status` and `candidates` for tiles."""

    length: int

    def holds(self, p, k, frame):
        return (k <= p) | (k < self.length)

    def status(self, q_first, q_last, k_first, k_last, frame):
        some = (k_first <= q_last) | (k_first < self.length)
        every = (k_last <= q_first) | (k_last < self.length)
        return some.int() + every.int()

    def candidates(self, q_first, q_last, frame):
        return torch.zeros_like(q_first), q_last.clamp(min=self.length - 1)


@sr.register_pattern
class SameLabel(sr.Mask):
    labels: Tensor

    def holds(self, p, k, frame):
        return self.labels[p] == self.labels[k]  # an index past the end would raise


@sr.register_pattern
class LooksBack(sr.Mask):
    distances: tuple[int, ...]

    def holds(self, p, k, frame):
        return torch.isin(p - k, torch.tensor(self.distances))


@sr.register_pattern
class LooksBackAnywhere(sr.Mask):
    """Defines the mask again, and declares that lengths change nothing."""

    distances: tuple[int, ...]
    asks_frame = False

    def holds(self, p, k, frame):
        return torch.isin(p - k, torch.tensor(self.distances))


@sr.register_pattern
class LastOf(sr.Mask):
    """The last keys of a sequence: depends on its length, and has a pattern inside."""

    count: int
    within: sr.Mask = sr.Full()

    def holds(self, p, k, frame):
        return (k >= frame.kv_len - self.count) & self.within.holds(p, k, frame)


LABELS = torch.arange(75) // 11
SHIFT = torch.tensor([0, 3])


def below_by_head(b, h, q, k):
    return q - k >= SHIFT[h]


def same_document(b, h, q, k):
    return LABELS[q] == LABELS[k]


PATTERNS = {
    "alone": Prefixed(20),
    "with tiles known": FastPrefixed(20),
    "a tensor": SameLabel(LABELS),
    "intersection": Prefixed(40) & sr.SlidingWindow(9, 30),
    "union with a stride": FastPrefixed(5) | sr.SlidingWindow(20, 0, 3),
    "mixture": FastPrefixed(5) + sr.Causal(),
    "in documents": sr.Packed((30, 0, 45), FastPrefixed(4)),
    "in documents, of their length": sr.Packed((30, 0, 45), LastOf(3, sr.Causal())),
    "a union in documents": sr.Packed((35, 40), LastOf(5) | Prefixed(1)),
    "documents in documents": sr.Packed((30, 0, 30, 15), FastPrefixed(2)) & sr.Documents((15,) * 5),
    "mask_mod": sr.from_mask_mod(same_document) & sr.Causal(),
    "mask_mod by head": sr.from_mask_mod(below_by_head),
    "mask_mod in documents": sr.Packed((30, 45), sr.from_mask_mod(below_by_head)),
}


def inputs(length: int = 75, dtype=torch.float64) -> list[Tensor]:
    return [torch.randn(2, heads, length, 8, dtype=dtype) for heads in (2, 1, 1)]


@pytest.mark.parametrize("name", PATTERNS)
@pytest.mark.parametrize("block_size", [16, 48, 128])
def test_its_layout_holds_its_pairs(name, block_size):
    pattern = PATTERNS[name]
    heads = {"num_heads": 2, "num_kv_heads": 1}
    dense = pattern.to_dense(75, **heads).long()
    layout = pattern.layout(75, **heads, block_size=block_size)
    assert torch.equal(layout.to_dense()[0].expand_as(dense), dense)
    assert layout.num_pairs == dense.sum() / len(dense)


def test_queries_that_are_the_last_of_many_keys():
    for pattern in (Prefixed(20), FastPrefixed(20), LastOf(7) & sr.Causal()):
        dense = pattern.to_dense(5, 75).long()
        assert torch.equal(pattern.layout(5, 75, block_size=16).to_dense()[0], dense)


@pytest.mark.parametrize("name", PATTERNS)
def test_it_runs_on_every_backend_and_over_ranks(name):
    pattern, args = PATTERNS[name], inputs()
    out, lse = sr.attention(*args, pattern, return_lse=True, backend="reference")
    for found in (
        sr.attention(*args, pattern, return_lse=True, backend="gather"),
        simulate_ring(*args, pattern, world_size=3, sharding="zigzag", return_lse=True),
    ):
        assert_close(found[0], out, 1e-12)
        assert_close(found[1], lse, 1e-12)
    single = [x.float() for x in args]
    assert_close(sr.attention(*single, pattern, backend="cpu").double(), out, 1e-5)


@pytest.mark.parametrize("name", ["in documents", "mask_mod by head", "a tensor"])
def test_it_has_gradients(name):
    pattern = PATTERNS[name]
    args = [x.requires_grad_() for x in inputs()]
    results = [
        torch.autograd.grad(sr.attention(*args, pattern, backend=backend).square().sum(), args)
        for backend in ("reference", "gather")
    ]
    for a, b in zip(*results, strict=True):
        assert_close(b, a, 1e-11)


@pytest.mark.parametrize("name", ["intersection", "a tensor", "mask_mod by head"])
def test_it_crosses_torch_compile(name):
    pattern, args = PATTERNS[name], inputs()
    torch._dynamo.reset()
    sr.layout_cache.clear()  # so that the layout is built in what was compiled
    compiled = torch.compile(sr.attention, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(*args, pattern), sr.attention(*args, pattern))


def test_one_made_inside_a_compiled_function():
    def f(query, key, value):
        return sr.attention(query, key, value, Prefixed(9) & sr.SlidingWindow(20, 20))

    torch._dynamo.reset()
    args = inputs()
    assert torch.equal(torch.compile(f, backend="aot_eager", fullgraph=True)(*args), f(*args))


def test_it_is_spelt_read_compared_and_copied():
    pattern = Prefixed(7) & sr.Causal()
    assert str(pattern) == "Prefixed(7) & Causal()"
    assert sr.parse(str(pattern)) == pattern and hash(sr.parse(str(pattern))) == hash(pattern)
    labelled = SameLabel(LABELS)
    assert labelled == SameLabel(LABELS.clone()) and hash(labelled) == hash(SameLabel(LABELS))
    assert labelled != SameLabel(LABELS + 1) and labelled != Prefixed(7)
    assert sr.parse("SameLabel(t0)", [LABELS]) == labelled
    for twin in (copy.deepcopy(labelled), pickle.loads(pickle.dumps(labelled))):
        assert twin == labelled and hash(twin) == hash(labelled)
    before = LABELS.clone()
    labels = before.clone()
    kept = SameLabel(labels)
    labels[0] = 99
    assert kept == SameLabel(before)


@pytest.mark.parametrize(
    "make",
    [
        lambda mask: sr.Packed((30, 0, 50), mask),
        lambda mask: Varlen((30, 40, 10), (20, 0, 60), mask),
    ],
    ids=["Packed", "Varlen"],
)
def test_a_mask_that_asks_no_frame_is_the_same_in_documents(make):
    bound, free = (make(mask((0, 3, 17))) for mask in (LooksBack, LooksBackAnywhere))
    assert free.pattern.asks_frame is False
    dense = bound.to_dense(80, q_start=0)
    assert torch.equal(free.to_dense(80, q_start=0), dense) and dense.any()
    for block_size in (16, 64):
        layout = free.layout(80, q_start=0, block_size=block_size)
        assert torch.equal(layout.to_dense()[0], dense.long())
    live = [pattern.live_keys(41, max_length=80)[0].tolist() for pattern in (bound, free)]
    assert live[0] == live[1] == torch.nonzero(dense[0, 41:, :41].any(0))[:, 0].tolist()


def test_a_status_of_tiles_saves_their_evaluation():
    for pattern, most in ((Prefixed(100), 32 * 32), (FastPrefixed(100), 32 + 8)):
        sr.layout_cache.clear()
        with evaluations() as pairs:
            pattern.layout(32 * 16, block_size=16)
        assert most // 2 < sum(pairs) <= most


def test_a_plan_of_ranks_counts_its_tokens():
    plan = RingPlan.build(FastPrefixed(10), 80, 4, block_size=16)
    assert [plan.tokens_received(rank) for rank in range(4)] == [0, 20, 40, 60]


def test_a_class_of_the_same_name_replaces_an_earlier_one():
    def cell(offset: int) -> type[sr.Mask]:
        @sr.register_pattern
        class Cell(sr.Mask):
            def holds(self, p, k, frame):
                return p - k == offset

        return Cell

    first, second = cell(0), cell(1)
    assert sr.parse("Cell()") == second() and second() != first()
    args = inputs(20)
    for pattern in (sr.parse("Cell()"), second()):
        assert_close(
            sr.attention(*args, pattern)[:, :, 1:], args[2][:, :, :-1].expand(-1, 2, -1, -1), 1e-14
        )


def test_patterns_of_an_earlier_class_of_the_name_stay_what_they_were():
    def cell(offset: int) -> type[sr.Mask]:
        @sr.register_pattern
        class Rerun(sr.Mask):
            def holds(self, p, k, frame):
                return p - k >= offset

        return Rerun

    args = [x.requires_grad_() for x in inputs(20)]
    first = cell(0)() & sr.SlidingWindow(9, 9)
    expected = sr.attention(*args, first, backend="reference")
    wanted = torch.autograd.grad(expected.sum(), args)
    out = sr.attention(*args, first)
    second = cell(5)() & sr.SlidingWindow(9, 9)
    sr.layout_cache.clear()
    assert str(first) == str(second) == "Rerun() & SlidingWindow(9, 9)" and first != second
    assert_close(sr.attention(*args, first), expected, 1e-14)
    for a, b in zip(torch.autograd.grad(out.sum(), args), wanted, strict=True):
        assert_close(a, b, 1e-12)
    assert sr.parse(str(first)) == second


def test_a_mask_inside_has_its_heads_batches_and_lengths():
    @sr.register_pattern
    class Near(sr.Mask):
        within: sr.Mask

        def holds(self, p, k, frame):
            return self.within.holds(p, k, frame) & (p - k < 20)

    near = sr.SlidingWindow(19, None)
    for within in (sr.Dilated(16, 2), sr.RandomBlocks(0.5, 16), sr.KeyPadding((40, 64))):
        pattern, args = Near(within), inputs(64)
        expected = (within & near).to_dense(64, num_heads=2, num_kv_heads=1)
        assert torch.equal(pattern.to_dense(64, num_heads=2, num_kv_heads=1), expected)
        assert_close(sr.attention(*args, pattern), sr.attention(*args, within & near), 1e-13)
    with pytest.raises(ValueError, match="must sum to the key length 64"):
        Near(sr.Documents((5, 6))).layout(64)
    with pytest.raises(TypeError, match="or a mask, got"):
        Near(sr.LongNet((4, 8), (1, 2)))


@pytest.mark.parametrize("parent", [sr.Causal, sr.Dilated, sr.BlockWindow, sr.Documents])
def test_a_mask_of_the_library_is_no_parent(parent):
    cls = type("Stricter", (parent,), {"holds": lambda self, p, k, frame: p == k})
    with pytest.raises(TypeError, match=f"must not derive from {parent.__name__}"):
        sr.register_pattern(cls)


def test_one_that_was_not_registered_says_so():
    class Forgotten(sr.Mask):
        length: int

        def holds(self, p, k, frame):
            return k < self.length

    with pytest.raises(TypeError, match=r"put @sparsering\.register_pattern above"):
        Forgotten(3)


def test_registered_twice_is_registered_once():
    assert sr.register_pattern(Prefixed) is Prefixed


def test_its_arguments_may_be_checked():
    @sr.register_pattern
    class Checked(sr.Mask):
        sizes: tuple[int, ...]

        def __post_init__(self):
            if not self.sizes:
                raise ValueError("Checked wants sizes")
            super().__post_init__()

        def holds(self, p, k, frame):
            return p * 0 + k * 0 == 0

    assert str(Checked([1, [2, None]])) == "Checked((1, (2, None)))"
    assert hash(Checked([1, 2])) == hash(Checked((1, 2)))
    with pytest.raises(ValueError, match="wants sizes"):
        Checked(())


def test_a_check_may_leave_out_that_of_its_parent():
    @sr.register_pattern
    class Positive(sr.Mask):
        count: int

        def __post_init__(self):
            if self.count < 1:
                raise ValueError("Positive wants a count")

        def holds(self, p, k, frame):
            return k < self.count

    assert str(Positive(3) & sr.Causal()) == "Positive(3) & Causal()"
    with pytest.raises(ValueError, match="wants a count"):
        Positive(0)


def test_numbers_and_strings_of_other_kinds_are_written_as_plain_ones():
    import enum

    import numpy as np

    class Name(enum.StrEnum):
        LEFT = "left"

    pattern = SameLabel((np.float64(2.5), np.int32(3), Name.LEFT, True))
    assert str(pattern) == "SameLabel((2.5, 3, 'left', True))"
    assert sr.parse(str(pattern)) == pattern


class NoHolds(sr.Mask):
    pass


class Keyword(sr.Mask):
    length: int = field(kw_only=True)

    def holds(self, p, k, frame):
        return k < self.length


class Clash(sr.Mask):
    tensors: int

    def holds(self, p, k, frame):
        return k < self.tensors


class WithInit(sr.Mask):
    def __init__(self, length):
        self.length = length

    def holds(self, p, k, frame):
        return k < self.length


@pytest.mark.parametrize(
    ("cls", "text"),
    [
        (3, "subclass of sparsering.Mask"),
        (int, "subclass of sparsering.Mask"),
        (NoHolds, "must define holds"),
        (WithInit, "must not define __init__"),
        (Keyword, "must take 'length' as a plain argument"),
        (Clash, "must not call an argument 'tensors'"),
    ],
)
def test_a_class_that_cannot_be_a_pattern(cls, text):
    with pytest.raises(TypeError, match=text):
        sr.register_pattern(cls)


@pytest.mark.parametrize("name", ["Causal", "LongNet", "MaskMod", "t0", "t12", "Own__v1"])
def test_a_name_that_is_taken(name):
    cls = type(name, (sr.Mask,), {"holds": lambda self, p, k, frame: p == k})
    with pytest.raises(ValueError, match="choose another"):
        sr.register_pattern(cls)


@pytest.mark.parametrize(
    ("value", "error", "text"),
    [
        (object(), TypeError, "Prefixed length must be a number, a string"),
        ({"a": 1}, TypeError, "tuple of these"),
        (float("nan"), ValueError, "finite"),
        (torch.zeros(2, device="meta"), TypeError, "CPU tensor"),
    ],
)
def test_an_argument_that_cannot_be_written(value, error, text):
    with pytest.raises(error, match=text):
        Prefixed(value)


def test_holds_that_gives_no_bool_is_told():
    @sr.register_pattern
    class Number(sr.Mask):
        def holds(self, p, k, frame):
            return p - k

    with pytest.raises(ValueError, match=r"Number\.holds must give a bool tensor.*int64"):
        Number().to_dense(4)


def test_holds_of_another_shape_is_told():
    @sr.register_pattern
    class Wide(sr.Mask):
        def holds(self, p, k, frame):
            return torch.ones(3, 7, 5, dtype=torch.bool)

    with pytest.raises(ValueError, match=r"broadcasts to \(4, 4\), got torch\.bool \(3, 7, 5\)"):
        Wide().to_dense(4)


# mask_mods


def test_a_mask_mod_asks_for_query_indices_as_flex_attention_does():
    from torch.nn.attention.flex_attention import create_mask

    pattern = sr.from_mask_mod(below_by_head)
    expected = create_mask(below_by_head, 1, 2, 5, 9, device="cpu")[0]
    assert torch.equal(pattern.to_dense(5, 9, num_heads=2), expected)
    layout = pattern.layout(5, 9, num_heads=2, block_size=16)
    assert torch.equal(layout.to_dense()[0].bool(), expected)


def test_a_mask_mod_of_the_batch_entry():
    lengths = torch.tensor([3, 9, 0])
    pattern = sr.from_mask_mod(lambda b, h, q, k: k < lengths[b], batch_size=3)
    args = [torch.randn(3, 2, 9, 4, dtype=torch.float64) for _ in range(3)]
    out = sr.attention(*args, pattern)
    assert_close(out, sr.attention(*args, sr.KeyPadding((3, 9, 0))), 1e-14)
    with pytest.raises(ValueError, match="3 batch entries"):
        sr.attention(*(x[:2] for x in args), pattern)


def test_a_mask_mod_that_looks_at_neither_head_nor_batch_has_one_table():
    pattern = sr.from_mask_mod(same_document, batch_size=5)
    assert pattern.num_batches() is None
    assert pattern.layout(75, num_heads=8).table_shape == (1, 1)
    by_head = sr.from_mask_mod(lambda b, h, q, k: (q >= k) & (int(h) == 0))  # no vmap over heads
    assert by_head.layout(75, num_heads=3).table_shape == (1, 3)


def test_flex_attentions_own_combinators_look_at_neither():
    from torch.nn.attention.flex_attention import and_masks, noop_mask, or_masks

    near = lambda b, h, q, k: q - k < 7  # noqa: E731
    for function in (and_masks(same_document, near), or_masks(same_document, near), noop_mask):
        pattern = sr.from_mask_mod(function)
        assert (pattern.num_batches(), pattern.layout(75, num_heads=4).table_shape[1]) == (None, 1)
    table = torch.tensor([3, 9])
    assert sr.from_mask_mod(lambda b, h, q, k: q - k < table[h]).by_head


DOCUMENTS, TABLE = torch.arange(40) // 7, torch.arange(40 * 40).view(40, 40) % 3 == 0


@pytest.mark.parametrize(
    "shapes",
    [((), ()), ((4,), (4,)), ((9, 1), (8,)), ((1, 1), (1, 6)), ((3, 5, 1), (3, 1, 6)),
     ((2, 1, 4), (2, 3, 4)), ((1, 6), (4, 1)), ((0, 4, 1), (0, 1, 4))],
)  # fmt: skip
@pytest.mark.parametrize(
    "function",
    [
        lambda b, h, q, k: torch.tensor(True),
        lambda b, h, q, k: k % 3 == 1,
        lambda b, h, q, k: (DOCUMENTS[q] == DOCUMENTS[k]) & (q >= k),
        lambda b, h, q, k: TABLE[q, k],
        lambda b, h, q, k: torch.stack([q > k + 3, k > q]).any(0),
        lambda b, h, q, k: TABLE[q].gather(0, k.unsqueeze(0))[0],
    ],
)
def test_a_mask_mod_gets_every_pair_of_indices_that_broadcast(function, shapes):
    generator = torch.Generator().manual_seed(1)
    p, k = (torch.randint(0, 40, shape, generator=generator) for shape in shapes)
    got = sr.from_mask_mod(function).holds(p, k, Frame.build(40, None, 1, 1, None))
    pairs = zip(*(x.flatten() for x in torch.broadcast_tensors(p, k)), strict=True)
    zero = torch.tensor(0)
    expected = [bool(function(zero, zero, *pair)) for pair in pairs]
    assert got.flatten().tolist() == expected
    assert got.shape == torch.broadcast_shapes(*shapes)


class Within:
    """A mask_mod that pickle can take along."""

    def __init__(self, reach):
        self.reach = reach

    def __call__(self, b, h, q, k):
        return (q >= k) & (q - k < self.reach)


def test_a_mask_mod_is_copied_and_pickled_with_its_function():
    pattern = sr.from_mask_mod(Within(4)) & sr.Causal()
    text = pickle.dumps(pattern)
    sr.from_mask_mod(Within(20))
    for again in (pickle.loads(text), copy.deepcopy(pattern)):
        assert torch.equal(again.to_dense(30), pattern.to_dense(30))


def test_functions_of_other_constants_or_values_have_other_names():
    def within(reach):
        return lambda b, h, q, k: q - k < reach

    functions = (
        within(4), within(5), within(torch.tensor(4)), within(torch.tensor(5)),
        lambda b, h, q, k: q - k < 4, lambda b, h, q, k: q - k < 5,
    )  # fmt: skip
    names = [mask_mods._registered(function).name for function in functions]
    assert len(set(names)) == len(names)


def test_a_tensor_that_is_too_short_for_the_sequence_is_told():
    labels = torch.arange(10)
    pattern = sr.from_mask_mod(lambda b, h, q, k: labels[q] == labels[k])
    with pytest.raises(ValueError, match=r"query indices up to 19 .* reach that far"):
        pattern.to_dense(20)


def test_equal_functions_are_one_pattern():
    assert sr.from_mask_mod(same_document) == sr.from_mask_mod(same_document)
    one, two = (sr.from_mask_mod(lambda b, h, q, k: q >= k) for _ in range(2))
    assert one == two and one != sr.from_mask_mod(lambda b, h, q, k: q > k)


def test_gradients_come_after_the_pattern_is_gone():
    args = [x.requires_grad_() for x in inputs()]
    shift = torch.tensor(4)
    out = sr.attention(*args, sr.from_mask_mod(lambda b, h, q, k: q - k >= shift))
    gc.collect()
    sr.layout_cache.clear()
    out.sum().backward()
    assert args[0].grad.any()


def test_functions_are_not_kept_forever(monkeypatch):
    monkeypatch.setattr(mask_mods, "_MOST_FUNCTIONS", 3)
    held = sr.from_mask_mod(lambda b, h, q, k: q >= k)
    texts = [str(sr.from_mask_mod(lambda b, h, q, k, n=n: q - k >= n)) for n in range(10)]
    gc.collect()
    with pytest.raises(ValueError, match="hold a reference to the pattern"):
        sr.parse(texts[0])
    assert str(sr.parse(texts[-1])) == texts[-1] and sr.parse(str(held)) == held


@pytest.mark.parametrize(
    ("mask_mod", "text"),
    [
        (3, "must be a function"),
        (lambda b, h, q, k: q - k, "bool tensor.*int64"),
        (lambda b, h, q, k: q - k > torch.arange(3), r"bool tensor.*bool \(3,\)"),
        (lambda b, h, q, k: True, "bool tensor.*bool"),
        (lambda b, h, q, k: q - k >= b, "batch_size"),
        (lambda q, k: q >= k, r"must take \(batch, head, q_idx, kv_idx\)"),
        (lambda b, h, q, k: (q >= k) and (q - k < 5), "Combine comparisons with & and |"),
    ],
)
def test_what_is_no_mask_mod(mask_mod, text):
    with pytest.raises(ValueError, match=text):
        sr.from_mask_mod(mask_mod)


def test_status_uses_the_conditions_numbers():
    assert FULL == 2
