"""The benchmark of masks agrees with itself: pattern, definition and the loop are one mask."""

import pytest
import torch

from benchmarks import masks

TOKENS = 2048
CASES = masks.cases_of(TOKENS)


def definition(case: masks.Case) -> torch.Tensor:
    rows = torch.arange(case.start, case.tokens)[:, None]
    return case.holds(rows, torch.arange(case.tokens)).int()


@pytest.mark.parametrize("name", CASES)
def test_the_definition_is_the_pattern(name):
    case = CASES[name]
    found = case.make().to_dense(case.queries, case.tokens).int().squeeze()
    assert torch.equal(found, definition(case))


@pytest.mark.parametrize("name", CASES)
def test_the_loop_of_a_user_computes_the_mask_once(name):
    case = CASES[name]
    right, found = definition(case), torch.zeros(case.queries, case.tokens)
    for chunk in case.chunks():
        if chunk.keys.dim() == 2:
            found[chunk.rows[:, None], chunk.keys] += 1
            continue
        part = torch.ones(len(chunk.rows), len(chunk.keys))
        if chunk.mask is not None:
            part = chunk.mask()
            part = part.exp() if part.is_floating_point() else part.float()
        if chunk.causal:
            part = part.tril()
        found[chunk.rows[:, None], chunk.keys] += part
    torch.testing.assert_close(found, right.float())


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.spans])
def test_the_endpoints_for_cudnn_are_the_mask(name):
    case = CASES[name]
    ends = masks.endpoints(case, torch.device("cpu"))[0].long()  # [1 + 2 * intervals, rows]
    assert (ends.diff(dim=0) >= 0).all()
    keys = torch.arange(case.tokens)
    found = keys < ends[0][:, None]
    for first, stop in ends[1:].unflatten(0, (-1, 2)):
        found |= (keys >= first[:, None]) & (keys < stop[:, None])
    assert torch.equal(found.int(), definition(case))


def test_a_small_run_has_times_or_a_reason():
    case = CASES["tree of 63 drafts"]
    rows = masks.rows_of(case, torch.device("cpu"), 1, 1.0, list(masks.WAYS))
    assert {row["library"] for row in rows} == set(masks.WAYS)
    for row in rows:
        if "refused" in row:
            assert row["refused"] and "forward" not in row
        else:
            assert row["forward"]["ms"] > 0 and row["error"] < 1e-5 and row["error_backward"] < 1e-5
    assert sum("refused" in row for row in rows) == 4  # FlexAttention and what needs a GPU


def test_a_wrong_result_is_no_row(monkeypatch):
    case = CASES["causal window"]
    other = CASES["documents, causal"]
    monkeypatch.setitem(masks.WAYS, masks.CHUNKS, lambda _, inputs: masks.by_chunks(other, inputs))
    with pytest.raises(RuntimeError, match="sdpa by chunks on causal window is wrong by"):
        masks.rows_of(case, torch.device("cpu"), 1, 1.0, [masks.OURS, masks.CHUNKS])
