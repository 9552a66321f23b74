"""A mask of a function or of a class follows what the code reads when the mask is created."""

import collections
import copy
import enum
import functools
import os
import pickle
import subprocess
import sys
import types

import numpy as np
import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

import sparsering as sr
from sparsering.patterns.function_state import Reads

LENGTH = 24
PLACE = torch.arange(LENGTH)
settings = types.ModuleType("settings_of_a_test")
width, table = 9, torch.tensor([9])


def allowed(reach):
    return (PLACE[:, None] >= PLACE) & (PLACE[:, None] - PLACE <= reach)


def mask_mod(reach):
    return lambda b, h, q, k: (k <= q) & (q - k <= reach())


def helper():
    return width


def by_global(b, h, q, k):
    return (k <= q) & (q - k <= width)


def by_helper(b, h, q, k):
    return (k <= q) & (q - k <= helper())


def by_import(b, h, q, k):
    from settings_of_a_test import reach  # type: ignore[import-not-found]

    return (k <= q) & (q - k <= reach)


def by_own_attribute(b, h, q, k):
    return (k <= q) & (q - k <= by_own_attribute.reach)


def by_default(b, h, q, k, *, sizes=[9]):  # noqa: B006
    return (k <= q) & (q - k <= sizes[0])


def by_list(sizes, b, h, q, k):
    return (k <= q) & (q - k <= sizes[0])


def by_text(b, h, q, k):
    return (k <= q) & (q - k <= globals()["width"])


class Rule:
    reach = 9

    def __call__(self, b, h, q, k):
        return self.mask(b, h, q, k)

    def mask(self, b, h, q, k):
        return (k <= q) & (q - k <= self.size())

    def size(self):
        return self.reach


class Slots:
    __slots__ = ("reach",)

    def __getitem__(self, key):
        return self.reach


class Module(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("reach", torch.tensor(9))

    def mask(self, b, h, q, k):
        return (k <= q) & (q - k <= self.reach)


class Size(enum.Enum):
    LARGE = 9
    SMALL = 3


def set_width(value):
    global width
    width = value


def set_attribute(owner):
    return lambda value: setattr(owner, "reach", value)


def set_first(items):
    return lambda value: items.__setitem__(0, value)


def case_of(name):
    """A mask_mod of reach 9, and what changes the reach."""
    tensor, array, items, many = torch.tensor(9), np.array([9]), [9], collections.deque([9])
    space, rule, slots, module = types.SimpleNamespace(reach=9), Rule(), Slots(), Module()
    settings.reach = by_own_attribute.reach = slots.reach = 9
    sizes, shared = {"reach": 9}, torch.from_numpy(array)
    choice = [Size.LARGE]
    cell = 9

    def set_cell(value):
        nonlocal cell
        cell = value

    cases = {
        "tensor": (mask_mod(lambda: tensor), lambda value: tensor.fill_(value)),
        "memory of NumPy": (mask_mod(lambda: shared[0]), set_first(array)),
        "array": (mask_mod(lambda: int(array[0])), set_first(array)),
        "closure": (mask_mod(lambda: cell), set_cell),
        "dict": (mask_mod(lambda: sizes["reach"]), lambda value: sizes.update(reach=value)),
        "deque": (mask_mod(lambda: many[0]), set_first(many)),
        "namespace": (mask_mod(lambda: space.reach), set_attribute(space)),
        "global": (by_global, set_width),
        "helper": (by_helper, set_width),
        "text": (by_text, set_width),
        "import": (by_import, set_attribute(settings)),
        "module": (mask_mod(lambda: settings.reach), set_attribute(settings)),
        "own attribute": (by_own_attribute, set_attribute(by_own_attribute)),
        "default": (by_default, set_first(by_default.__kwdefaults__["sizes"])),
        "partial": (functools.partial(by_list, items), set_first(items)),
        "object": (rule, set_attribute(rule)),
        "method": (rule.mask, set_attribute(rule)),
        "class": (rule, set_attribute(Rule)),
        "slots": (mask_mod(lambda: slots[0]), set_attribute(slots)),
        "nn.Module": (module.mask, lambda value: module.reach.fill_(value)),
        "enum": (
            mask_mod(lambda: 9 if choice[0] is Size.LARGE else 3),
            lambda value: set_first(choice)(Size(value)),
        ),
    }
    return cases[name] if name else list(cases)


def error_of(pattern, reach):
    query, key, value = torch.randn(3, 1, 1, LENGTH, 8)
    expected = scaled_dot_product_attention(query, key, value, attn_mask=allowed(reach))
    return (sr.attention(query, key, value, pattern) - expected).abs().max()


@pytest.mark.parametrize("name", case_of(None))
def test_a_mask_made_anew_is_what_the_function_says_now(name, monkeypatch):
    monkeypatch.setitem(sys.modules, "settings_of_a_test", settings)
    function, change = case_of(name)
    masks = []
    try:
        for reach in (9, 3, 9):
            change(reach)
            masks.append(sr.from_mask_mod(function))
            assert error_of(masks[-1], reach) < 1e-5
            if name != "text":  # what `globals()` gives cannot be read: no two masks are equal
                assert sr.from_mask_mod(function) == masks[-1]
        assert masks[0] != masks[1] and (masks[0] == masks[2]) == (name != "text")
    finally:
        change(9)


def test_functions_made_in_a_loop_share_a_layout():
    sr.layout_cache.clear()
    for _ in range(5):
        sr.from_mask_mod(lambda b, h, q, k: q - k <= 4).layout(40)
    assert sr.layout_cache.info().misses == 1


def test_a_kept_mask_keeps_its_layouts_and_refuses_others():
    reach = torch.tensor(9)
    function = mask_mod(lambda: reach)
    kept = sr.from_mask_mod(function)
    assert error_of(kept, 9) < 1e-5
    reach.fill_(3)
    assert error_of(kept, 9) < 1e-5
    for use in (lambda: kept.layout(50), lambda: kept.to_dense(5)):
        with pytest.raises(ValueError, match=r"changed since from_mask_mod.*call from_mask_mod"):
            use()
    assert copy.deepcopy(kept) == kept
    reach.fill_(9)
    assert torch.equal(kept.to_dense(LENGTH)[0], allowed(9))


def test_what_a_function_changes_itself_is_no_change():
    calls = []

    def counted(b, h, q, k):
        calls.append(1)
        return k <= q

    pattern = sr.from_mask_mod(counted)
    for length in (20, 40):
        assert torch.equal(pattern.to_dense(length), sr.Causal().to_dense(length))
    assert len(calls) > 2


def test_a_rule_that_changed_is_pickled_as_it_is():
    rule = Rule()
    text = pickle.dumps(sr.from_mask_mod(rule))
    rule.reach = 3
    assert error_of(pickle.loads(text), 9) < 1e-5
    assert error_of(pickle.loads(pickle.dumps(sr.from_mask_mod(rule))), 3) < 1e-5


@pytest.mark.slow
def test_names_are_the_same_in_every_process():
    """Ranks compare them; strings hash differently in each process."""
    code = (
        "import sparsering as sr, types\n"
        "space = types.SimpleNamespace(names={'a', 'b', 'c'})\n"
        "def f(b, h, q, k):\n"
        "    return (q >= k) & ('a' in space.names) & ('d' in {'d', 'e', 'f'})\n"
        "print(str(sr.from_mask_mod(f)))"
    )
    texts = {
        subprocess.check_output([sys.executable, "-c", code], env={**os.environ, **seed})
        for seed in ({"PYTHONHASHSEED": "1"}, {"PYTHONHASHSEED": "2"})
    }
    assert len(texts) == 1


def test_cycles_and_huge_states_end():
    items = [1]
    items.append(items)
    assert Reads(lambda: items).now() == Reads(lambda: items).now() != None  # noqa: E711
    huge = [[x] for x in range(20_000)]
    assert Reads(lambda: huge).now() is None


@sr.register_pattern
class ByGlobal(sr.Mask):
    factor: int = 1

    def holds(self, p, k, frame):
        return (k <= p) & (p - k <= width * self.factor)


@sr.register_pattern
class ByAttribute(sr.Mask):
    reach = 9

    def holds(self, p, k, frame):
        return (k <= p) & (p - k <= self.size)

    @property
    def size(self):
        return self.reach


@sr.register_pattern
class ByTable(sr.Mask):
    within: sr.Mask = sr.Full()

    def holds(self, p, k, frame):
        return (k <= p) & (p - k <= table[0]) & self.within.holds(p, k, frame)


@sr.register_pattern
class ByText(sr.Mask):
    def holds(self, p, k, frame):
        return (k <= p) & (p - k <= globals()["width"])


OWN = {
    "global": (ByGlobal, set_width),
    "attribute": (ByAttribute, set_attribute(ByAttribute)),
    "table": (ByTable, lambda value: table.fill_(value)),
    "inside": (lambda: ByTable(sr.Dilated(32, 1)), lambda value: table.fill_(value)),
    "combined": (lambda: sr.Packed((LENGTH,), ByGlobal()) & sr.Causal(), set_width),
    "text": (ByText, set_width),
}


@pytest.mark.parametrize("name", OWN)
def test_a_pattern_of_a_class_follows_too(name):
    make, change = OWN[name]
    masks = []
    try:
        for reach in (9, 3, 9):
            change(reach)
            masks.append(make())
            assert error_of(masks[-1], reach) < 1e-5
            assert (make() == masks[-1]) == (name != "text")
            assert sr.parse(masks[-1].expression) == masks[-1]
            assert "state" not in str(masks[-1])
        assert masks[0] != masks[1]
        if name != "text":
            assert error_of(masks[1], 3) < 1e-5
            with pytest.raises(ValueError, match=r"changed since it was created.*create it again"):
                sr.layout_cache.clear()
                masks[1].layout(LENGTH)
    finally:
        change(9)


def test_what_a_class_changes_itself_is_no_change():
    calls = []

    @sr.register_pattern
    class Counted(sr.Mask):
        seen = {}  # noqa: RUF012

        def holds(self, p, k, frame):
            calls.append(1)
            self.seen[len(calls)] = p
            return k <= p

    pattern = Counted()
    for length in (20, 300):
        assert torch.equal(pattern.to_dense(length), sr.Causal().to_dense(length))
        assert pattern.layout(length, block_size=16).num_pairs == length * (length + 1) // 2
    assert len(calls) > 2


def test_a_changed_class_crosses_torch_compile():
    torch.compiler.reset()
    set_width(3)
    try:
        inputs, pattern = torch.randn(3, 1, 1, LENGTH, 8), ByGlobal()
        attend = torch.compile(sr.attention, backend="aot_eager", fullgraph=True)
        sr.layout_cache.clear()
        assert torch.equal(attend(*inputs, pattern), sr.attention(*inputs, pattern))
    finally:
        set_width(9)
    torch.compiler.reset()
