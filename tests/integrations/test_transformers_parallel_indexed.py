"""Models whose layers choose keys or compressed entries, over ranks: all of one process."""

import re
from typing import Any

import pytest
import torch
from helpers.ring_workers import groups
from helpers.thinned import slow_except
from sharing_families import InFloat64, Row, batch_of, share
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers_families import tiny

import sparsering as sr
from sparsering.distributed import RingMismatchError, fetching
from sparsering.integrations import transformers as hf
from sparsering.integrations.transformers.call import override
from sparsering.patterns.selected import selections_of

CHOSEN = "chosen keys"
MASKS = {
    "deepseek_v32": ("causal", CHOSEN),
    "glm_moe_dsa": ("causal", CHOSEN),
    "axk2": ("causal", CHOSEN),
    "dots3_note": ("causal", CHOSEN, "window"),
    "dots3_note_text": ("causal", CHOSEN, "window"),
    "hy_v4": ("causal", CHOSEN, "sink"),
    "minimax_m3_vl_text": ("causal", CHOSEN),
    "deepseek_v4": ("chosen entries", "sink", "window"),
    "glm5_next": (CHOSEN,),  # its lists are within causality and padding
    "qwen4_exp_text": (CHOSEN,),
}
INDEXED = {"layer_types": ["indexed_attention"] * 2}
OPTIONS: dict[str, dict[str, Any]] = {  # without the layers of linear attention
    "glm5_next": {**INDEXED, "indexer_types": ["full", "shared"]},
    "qwen4_exp_text": INDEXED,
    "hy_v4": {"indexer_types": ["full", "shared"]},
    "glm_moe_dsa": {"indexer_types": ["full", "shared"]},
}
KINDS = ("left", "right", "packed", "whole", "short")
FAST = {
    *(("deepseek_v32", 4), ("deepseek_v4", 3), ("minimax_m3_vl_text", 2)),
    *(("qwen4_exp_text", 4), ("glm5_next", 3)),
}


@pytest.mark.parametrize(("family", "world"), slow_except(FAST, MASKS, [1, 2, 3, 4]))
def test_a_family_runs_as_in_one_process(four, family, world):
    arguments = family, world, False, KINDS, False, OPTIONS.get(family)
    for row in four.run(share, *arguments, world=world):
        assert row == Row(family, MASKS[family], "runs")


@pytest.mark.parametrize(
    ("family", "world"), slow_except({("deepseek_v32", 3), ("deepseek_v4", 2)}, MASKS, [2, 3])
)
def test_layers_that_the_backward_pass_runs_again(four, family, world):
    arguments = family, world, False, ("left", "packed", "short"), True, OPTIONS.get(family)
    for row in four.run(share, *arguments, world=world):
        assert row == Row(family, MASKS[family], "runs")


LARGE = {"index_block_size": 16, "index_topk_blocks": 2}


@pytest.mark.parametrize("kind", ["whole", "right"])
def test_blocks_of_16_keys_that_are_no_lists(four, kind):
    """Ring attention takes the whole table of such blocks."""
    for row in four.run(long_rows, kind, world=3):
        torch.testing.assert_close(*row, rtol=0, atol=1e-11)


def long_rows(rank: int, kind: str) -> tuple[Tensor, Tensor]:
    """Returns the logits of a rank's real tokens of 70, in blocks of 16: of 3 ranks and of one."""
    ids = torch.arange(140).view(2, 70) ** 2 % 59
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    if kind == "right":
        batch["attention_mask"][0, 33:] = 0
    with InFloat64(), torch.no_grad():
        model = tiny("minimax_m3_vl_text", **LARGE)
        wanted = model(**batch, use_cache=False).logits
        hf.parallelize(model, groups[3])
        got = model(**batch).logits
    where = hf.local_positions(model)
    real = batch["attention_mask"][:, where].bool()
    return got[real], wanted[:, where][real]


def compiled(rank: int, family: str, kind: str, options: dict[str, Any]) -> float:
    """Returns the largest difference that torch.compile makes on a rank of two, in any gradient."""
    model, batch = tiny(family, **options), batch_of(kind)
    hf.parallelize(model, groups[2])
    results = []
    for run in (model, torch.compile(model, backend="eager")):
        model.zero_grad()
        out = run(**batch)
        out.loss.backward()
        grads = [x.grad.flatten() for x in model.parameters() if x.grad is not None]
        results.append(torch.cat([out.logits.detach().flatten(), *grads]))
    where = hf.local_positions(model)
    assert results[0].abs().max() > 1e-3 and len(where) in (6, 7)
    return float((results[1] - results[0]).abs().max() / results[0].abs().max())


ONE_LAYER = {  # a trace of which takes half as long
    "num_hidden_layers": 1,
    "layer_types": ["indexed_attention"],
    "mlp_layer_types": ["dense"],
}
COMPILED = [
    pytest.param("deepseek_v32", "whole", ONE_LAYER, id="deepseek_v32, one layer"),
    *(
        pytest.param(x, kind, OPTIONS.get(x, {}), id=f"{x}-{kind}", marks=pytest.mark.slow)
        for x in MASKS
        for kind in ("whole", "packed")
    ),
]


@pytest.mark.parametrize(("family", "kind", "options"), COMPILED)
def test_inside_torch_compile(four, family, kind, options):
    assert max(four.run(compiled, family, kind, options, world=2)) <= 1e-12


def fully_sharded(rank: int, family: str) -> tuple[float, float]:
    """Returns the largest relative errors of loss and gradients with FSDP2 over the same ranks."""
    batch = batch_of("left")
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("tokens",))
    with InFloat64():
        model = tiny(family)
        wanted = model(**batch, use_cache=False).loss
        wanted.backward()
        names = [name for name, x in model.named_parameters() if x.grad is not None]
        alone = torch.cat([x.grad.flatten() for x in model.parameters() if x.grad is not None])
        model = tiny(family)
        hf.parallelize(model, mesh["tokens"])
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        loss = model(**batch).loss
        loss.backward()
    grads = {name: x.grad for name, x in model.named_parameters() if x.grad is not None}
    assert list(grads) == names
    shared = torch.cat([x.full_tensor().flatten() for x in grads.values()])
    total = loss.detach().clone()
    torch.distributed.all_reduce(total)
    error = (shared - alone).abs().max() / alone.abs().max()
    return abs(total.item() / 4 / wanted.item() - 1), error.item()


@pytest.mark.parametrize("family", ["deepseek_v32", "deepseek_v4"])
def test_beside_fsdp2(four, family):
    assert max(max(errors) for errors in four.run(fully_sharded, family)) <= 1e-10


def traffic(rank: int, length: int) -> list[tuple[int, int, int, int]]:
    """Returns for each layer of DeepSeek-V3.2 the bytes that this rank received.

    They are (keys and values, those that its queries list, index keys, all keys and values).
    """
    found = []
    ring, exchanges = override.ring_attention, []

    class Watched(fetching.Exchange):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            exchanges.append(self)

    def watched(query: Tensor, key: Tensor, value: Tensor, pattern: Any, **options: Any) -> Any:
        out = ring(query, key, value, pattern, **options)
        own = hf.local_positions(model)
        (lists,) = selections_of(pattern)
        heads, width = key.shape[1], (key.shape[3] + value.shape[3]) * key.element_size()
        listed = 0
        for of_entry in lists.indices[:, 0]:
            seen = of_entry[of_entry <= own[:, None]].unique()
            listed += int((~torch.isin(seen, own)).sum())
        rest = (length - len(own)) * len(query)
        of_index = exchanges.pop().traffic.received_bytes
        received = ring.last_traffic().received_bytes  # type: ignore[attr-defined]
        found.append((received, listed * heads * width, of_index, rest * heads * width))
        return out

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(override, "ring_attention", watched)
        patch.setattr(fetching, "Exchange", Watched)
        model = tiny("deepseek_v32")
        hf.parallelize(model, groups[4])
        with torch.no_grad():
            model(input_ids=torch.arange(length)[None] ** 2 // 7 % 59)
        assert "4 ranks, contiguous" in hf.explain(model)
    assert not exchanges
    return found


def test_listed_keys_move_and_not_all(four):
    length = 96
    for rank, layers in enumerate(four.run(traffic, length)):
        assert len(layers) == 2
        for received, listed, of_index, every in layers:
            assert received == listed
            assert of_index == rank * (length // 4) * 4 * 8  # earlier tokens, width 4, 8 bytes
            assert received + of_index < every


def refused(rank: int, defect: str) -> tuple[str, str, bool]:
    """Returns the error's type and text, and whether the group then runs a right call."""
    model = tiny("deepseek_v4", attention_dropout=0.5 if defect == "dropout" else 0.0)
    model.train(defect == "dropout")
    batch = batch_of("whole")
    wrong = {**batch}
    if defect == "other tokens" and rank == 1:
        wrong["input_ids"] = wrong["input_ids"] + 1
    error: Exception | None = None
    try:
        if defect == "zigzag":
            hf.parallelize(model, groups[3], sharding="zigzag")
        hf.parallelize(model, groups[3])
        if defect == "a pattern":
            with hf.using(model, sr.Causal()):
                model(**wrong)
        model(**wrong)
    except (NotImplementedError, ValueError) as raised:
        error = raised
    model.eval()
    hf.parallelize(model, groups[3])
    model(**batch).loss.backward()
    return type(error).__name__, str(error), True


@pytest.mark.parametrize(
    ("defect", "kind", "text"),
    [
        ("zigzag", NotImplementedError, 'contiguously, got sharding=.*pass sharding="auto"'),
        ("dropout", NotImplementedError, "set config.attention_dropout=0.0"),
        ("a pattern", NotImplementedError, "the model's own mask alone, got a pattern"),
        ("other tokens", RingMismatchError, "input_ids"),
    ],
)
def test_what_is_refused_is_so_on_all_ranks_and_the_group_goes_on(four, defect, kind, text):
    for name, message, is_usable in four.run(refused, defect, world=3):
        assert name == kind.__name__
        assert re.search(text, message), message
        assert is_usable


def test_linear_attention_is_still_refused():
    for family in ("glm5_next", "qwen4_exp_text"):
        with pytest.raises(NotImplementedError, match="its layers of type linear_attention"):
            hf.parallelize(tiny(family))
