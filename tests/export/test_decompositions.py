"""Programs that `torch.export` made become operators of aten, or the error says what cannot."""

import io

import pytest
import torch
from by_tables import ATTENTION, Calls, exported, others
from torch import Tensor

import sparsering as sr
import sparsering.distributed
from sparsering.export import decompositions

WINDOW = sr.SlidingWindow(40)


def drawn(tokens: int = 200, batch: int = 2, kv_heads: int = 2) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(batch, heads, tokens, 16) for heads in (4, kv_heads, kv_heads)]
    q, k, v = (torch.randn(shape, generator=generator) for shape in shapes)
    return q, k, v


def assert_same(got: object, expected: object) -> None:
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)


VALID = torch.rand(2, 200, generator=torch.Generator().manual_seed(1)) > 0.3
GIVEN = sr.Packed(torch.tensor([50, 150]), WINDOW)
BLOCKS = sr.Dense(VALID[:, :, None] | VALID[:, None])
CALLS = {
    "window": lambda q, k, v: sr.attention(q, k, v, WINDOW, return_lse=True),
    "longnet": lambda q, k, v: sr.attention(q, k, v, sr.LongNet((32, 64), (1, 2)) & sr.Causal()),
    "a row without keys": lambda q, k, v: sr.attention(
        q, k, v, WINDOW & sr.KeyMask(torch.arange(200) >= 90), return_lse=True
    ),
    "padding": lambda q, k, v: sr.attention(q, k, v, WINDOW & sr.KeyPadding((150, 200))),
    "documents": lambda q, k, v: sr.attention(q, k, v, sr.Packed((50, 150), WINDOW)),
    "given lengths": lambda q, k, v: sr.attention(q, k, v, GIVEN),
    "heads": lambda q, k, v: sr.attention(q, k, v, sr.PerHead((WINDOW, sr.Causal()))),
    "blocks of entries": lambda q, k, v: sr.attention(q, k, v, BLOCKS),
    "options": lambda q, k, v: sr.attention(
        q, k, v, WINDOW, scale=0.2, softcap=5.0, sink=torch.ones(4), distance_bias=sr.alibi(4, 20)
    ),
    "varlen": lambda q, k, v: sr.attention_varlen(
        *(x[0].transpose(0, 1) for x in (q, k, v)), [0, 50, 200], [0, 50, 200], WINDOW
    ),
    "fewer queries": lambda q, k, v: sr.attention(q[:, :, :70], k, v, WINDOW),
    "no keys": lambda q, k, v: sr.attention(q, k, v, sr.GlobalTokens(0), return_lse=True),
    "in order": sr.batch_invariant()(lambda q, k, v: sr.attention(q, k, v, WINDOW)),
    "half precision": lambda q, k, v: sr.attention(
        *(x.bfloat16() for x in (q, k, v)), WINDOW
    ).float(),
}
MASKS: dict[str, object] = {
    "mask of keys": (
        lambda q, k, v, valid: sr.attention(q, k, v, WINDOW & sr.KeyMask(valid)),
        (VALID, VALID.flip(0)),
    ),
    "lengths of rows": (
        lambda q, k, v, lengths: sr.attention(q, k, v, WINDOW & sr.KeyPadding(lengths)),
        (torch.tensor([150, 200]), torch.tensor([200, 30])),
    ),
    "mask of all rows": (
        lambda q, k, v, valid: sr.attention(q, k, v, WINDOW & sr.KeyMask(valid)),
        (VALID[0], VALID[1]),
    ),
    "chosen keys": (
        lambda q, k, v, keys: sr.attention(q, k, v, sr.SelectedBlocks(keys, 1) & sr.Causal()),
        tuple(torch.randint(-1, 200, (2, 2, 200, 20)) for _ in range(2)),
    ),
    "chosen blocks": (
        lambda q, k, v, blocks: sr.attention(
            q, k, v, (sr.SelectedBlocks(blocks, 16, 4) | WINDOW) & sr.Causal(), return_lse=True
        ),
        tuple(torch.randint(-1, 13, (2, 2, 50, 3)) for _ in range(2)),
    ),
    "chosen blocks of one row": (
        lambda q, k, v, blocks: sr.attention(q, k, v, sr.SelectedBlocks(blocks, 32)),
        tuple(torch.randint(-1, 7, (7, 3)) for _ in range(2)),
    ),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_call_becomes_operators_of_aten(name: str):
    module, inputs = Calls(CALLS[name]), drawn()
    tolerance = 1e-2 if name == "half precision" else 1e-5
    program = exported(module, inputs)
    torch.testing.assert_close(
        program.module()(*inputs), module(*inputs), rtol=tolerance, atol=tolerance
    )


@pytest.mark.parametrize("name", MASKS)
def test_masks_and_chosen_keys_are_inputs(name: str):
    call, masks = MASKS[name]
    module, inputs = Calls(call), drawn()
    program = exported(module, (*inputs, masks[0])).module()
    for mask in masks:
        assert_same(program(*inputs, mask), module(*inputs, mask))


def test_the_batch_may_be_dynamic():
    module, batch = Calls(CALLS["window"]), torch.export.Dim("batch", min=1, max=64)
    program = exported(module, drawn(), dynamic_shapes={"inputs": ({0: batch},) * 3}).module()
    for size in (1, 2, 5):
        inputs = drawn(batch=size)
        assert_same(program(*inputs), module(*inputs))


def test_the_batch_may_be_dynamic_where_entries_choose_keys():
    call, _ = MASKS["chosen keys"]
    module, batch = Calls(call), torch.export.Dim("batch", min=2, max=64)
    keys = torch.randint(-1, 200, (5, 2, 200, 20))
    shapes = {"inputs": ({0: batch},) * 4}
    program = exported(module, (*drawn(), keys[:2]), dynamic_shapes=shapes).module()
    for size in (2, 5):
        inputs = *drawn(batch=size), keys[:size]
        assert_same(program(*inputs), module(*inputs))


def test_without_decompositions_our_operators_stay_and_are_exact():
    module, inputs = Calls(CALLS["window"]), drawn()
    with torch.no_grad():
        program = torch.export.export(module, inputs)
    assert others(program) == {"sparsering::attention"}
    for a, b in zip(program.module()(*inputs), module(*inputs), strict=True):
        assert torch.equal(a, b)


def test_the_graph_does_not_grow_with_the_length_and_layers_share_tables():
    class Layers(torch.nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            for _ in range(3):
                q = sr.attention(q, k, v, sr.SlidingWindow(100))
            return sr.attention(q, k, v, sr.Causal())

    sizes, constants = set(), []
    for tokens in (1024, 2048):
        program = exported(Layers(), drawn(tokens, batch=1))
        sizes.add(len(program.graph.nodes))
        constants.append(sum(x.nbytes for x in program.constants.values()))
    assert len(sizes) == 1 and constants[1] < 2.2 * constants[0] < 2e5
    one = exported(Calls(lambda q, k, v: sr.attention(q, k, v, sr.Causal())), drawn(1024))
    three = exported(Layers(), drawn(1024))
    more = len(three.constants) - len(one.constants)
    assert more < 15  # the tables of one window, for three layers


def test_a_saved_program_is_decomposed_in_another_process():
    module, inputs = Calls(CALLS["longnet"]), drawn()
    file = io.BytesIO()
    torch.export.save(torch.export.export(module, inputs), file)
    file.seek(0)
    program = torch.export.load(file).run_decompositions(decompositions())
    assert not others(program)
    assert_same(program.module()(*inputs), module(*inputs))


def test_joined_with_torchs_own_table_all_operators_are_of_core_aten():
    class Projected(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.project = torch.nn.Linear(16, 16)

        def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return self.project(sr.attention(q, k, v, WINDOW))

    module, inputs = Projected().eval(), drawn()
    table = torch.export.default_decompositions()
    table.update(decompositions())
    program = torch.export.export(module, inputs).run_decompositions(table)
    assert not others(program)
    assert "linear" not in program.graph_module.code
    assert_same(program.module()(*inputs), module(*inputs))


def test_every_operator_of_ours_has_a_row():
    names = torch._C._dispatch_get_all_op_names()
    ours = {x.partition(".")[0] for x in names if x.startswith("sparsering::")}
    assert {x.name() for x in decompositions()} == ours


def refused(call, *inputs: Tensor, match: str, **options) -> None:
    program = torch.export.export(Calls(call), inputs, **options)
    with pytest.raises(NotImplementedError, match=match):
        program.run_decompositions(decompositions())


def test_what_cannot_leave_python_is_named():
    inputs = drawn()
    refused(
        lambda q, k, v: sr.attention(q, k, v, WINDOW, dropout_p=0.5, dropout_seed=1),
        *inputs,
        match=r"dropout .* model\.eval\(\)",
    )
    refused(
        lambda q, k, v: sr.attention(q, k, v, WINDOW, backend="reference"),
        *inputs,
        match=r"pair_counts .* leave out backend=",
    )
    refused(
        lambda q, k, v, edges: sr.attention(q, k, v, sr.Packed(edges.diff(), sr.Full())),
        *inputs,
        torch.tensor([0, 50, 200]),
        match="no tables of the pattern",
    )
    tokens = torch.export.Dim("tokens", min=2, max=4096)
    refused(
        lambda q, k, v: sr.attention(q, k, v, WINDOW),
        *inputs,
        match="export one program for each length",
        dynamic_shapes={"inputs": ({2: tokens},) * 3},
    )


@pytest.mark.parametrize(
    "change",
    [lambda s, b, h, q, k: s * 2, sr.coordinate_bias(torch.rand(1, 200, 2), torch.ones(4))],
)
def test_the_export_of_a_score_mod_is_refused_by_name(change):
    module = Calls(lambda q, k, v: sr.attention(q, k, v, WINDOW, score_mod=change))
    with pytest.raises(NotImplementedError, match=r"cannot carry a score_mod.*; write softcap"):
        torch.export.export(module, drawn())


def test_training_graphs_are_refused_by_name():
    q, k, v = (x.requires_grad_() for x in drawn())
    out = sr.attention(q, k, v, WINDOW)
    with pytest.raises(NotImplementedError, match=r"attention_backward .* torch\.no_grad"):
        decompositions()[torch.ops.sparsering.attention_backward.default](out)


def test_the_table_is_a_new_dict_for_each_caller():
    decompositions().clear()
    assert ATTENTION in decompositions()
