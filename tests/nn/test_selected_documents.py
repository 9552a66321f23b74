"""`SelectedAttention` with documents or padding: each document as alone."""

from typing import Any

import pytest
import torch
from torch import Tensor

from sparsering.nn import SelectedAttention
from sparsering.nn.transformer import rotary_table

WIDTH, SIZE = 24, 16

KINDS: dict[str, dict[str, Any]] = {
    "sub": {},
    "rows of 4": {"scorer": "mean", "query_block": 4},
    "learned": {"scorer": "learned"},
    "all three": {"pooled": (6, 5), "scorer": "pooled", "window": 7},
    "zero": {"pooled": (8, 4), "scorer": "pooled", "window": 7, "gate": "zero"},
    "queries pooled": {"pooled": (8, 4), "scorer": "pooled", "pool_queries": True},
    "encoder": {"causal": False, "window": 7},
    "dense below": {"dense_below": 70},
}


def made(**options: Any) -> SelectedAttention:
    """A layer in float64 of which no weight is 0: gates begin there."""
    layer = SelectedAttention(
        WIDTH, 4, **{"num_kv_heads": 2, "block_size": SIZE, "k": 2, **options}
    )
    with torch.no_grad():
        for weight in layer.double().parameters():
            weight.add_(0.2 * torch.randn_like(weight))
    return layer


def drawn(batch: int, length: int) -> Tensor:
    return torch.randn(batch, length, WIDTH, dtype=torch.float64)


def close(a: Tensor, b: Tensor) -> None:
    torch.testing.assert_close(a, b, rtol=0, atol=1e-10)


@pytest.mark.parametrize("kind", KINDS)
def test_a_packed_document_is_that_document_alone(kind):
    layer, x = made(**KINDS[kind]), drawn(2, 200)
    lengths = ((53, 90, 1, 56), (80, 53, 67))
    out = layer(x, documents=lengths)
    for row, entry, whole in zip(x, lengths, out, strict=True):
        for part, got in zip(row.split(entry), whole.split(entry), strict=True):
            close(got, layer(part[None])[0])
    shared = layer(x, documents=torch.tensor([53, 147]))
    close(shared, torch.cat([layer(x[:, :53]), layer(x[:, 53:])], 1))
    if kind == "sub":  # the documents do choose: one row of all has other results
        assert (layer(x) - shared)[:, 53:].abs().max() > 1e-3


@pytest.mark.parametrize("kind", KINDS)
def test_tokens_that_do_not_exist_change_nothing(kind):
    layer, x = made(**KINDS[kind]), drawn(3, 130)
    valid = torch.ones(3, 130, dtype=torch.bool)
    valid[0, :29], valid[1, 100:], valid[2, 40:61] = False, False, False
    out = layer(x, valid=valid)
    for row, there, got in zip(x, valid, out, strict=True):
        close(got[there], layer(row[there][None])[0])
        assert got[~there].eq(0).all()
    spoilt = layer(torch.where(valid[..., None], x, 1e3), valid=valid)
    close(spoilt, out)


def test_documents_with_holes_rotated_have_gradients_and_a_loss_of_all_rows():
    layer, x = made(scorer="learned", query_block=4), drawn(2, 120)
    valid = torch.ones(2, 120, dtype=torch.bool)
    valid[0, :13], valid[1, 90:] = False, False
    table = tuple(t.double() for t in rotary_table(120, 6, 1e4, x.device))
    documents = (50, 70)
    parts = [(b, (torch.arange(120) >= 50) == second) for b in (0, 1) for second in (False, True)]
    alone = [(b, torch.nonzero(of & valid[b])[:, 0]) for b, of in parts]

    def gradients(loss: Tensor) -> list[Tensor]:
        return list(torch.autograd.grad(loss, list(layer.parameters())))

    out, loss = layer(x, rope=table, documents=documents, valid=valid, return_loss=True)
    whole, total, rows = torch.zeros_like(out), 0.0, 0
    for b, at in alone:
        rope = tuple(t[at] for t in table)
        own, own_loss = layer(x[b, at][None], rope=rope, return_loss=True)
        whole = whole.index_put((torch.tensor(b), at), own[0])
        count = -(-len(at) // 4)
        total, rows = total + count * own_loss, rows + count
    close(out, whole)
    close(loss, total / rows)
    weight = torch.randn_like(out)
    for a, b in zip(
        gradients((out * weight).sum() + loss),
        gradients((whole * weight).sum() + total / rows),
        strict=True,
    ):
        close(a, b)


def test_documents_and_padding_that_do_not_fit_are_refused():
    layer, x = made(), drawn(2, 60)
    for wrong in ((20, 30), ((20, 40), (60,), (60,))):
        with pytest.raises(ValueError, match="documents must be lengths that sum to 60 tokens"):
            layer(x, documents=wrong)
    for wrong in (torch.ones(2, 60), torch.ones(60, dtype=torch.bool)):
        with pytest.raises(
            ValueError, match=r"valid must be bool \[2, 60\], False for padding, got"
        ):
            layer(x, valid=wrong)
    nothing = layer(x, valid=torch.zeros(2, 60, dtype=torch.bool))
    assert nothing.shape == x.shape and nothing.eq(0).all()
    assert layer(x[:0], documents=(20, 40)).shape == (0, 60, WIDTH)
