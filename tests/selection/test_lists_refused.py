"""Lists of keys that a first user writes wrong: the message says what to write."""

import re

import pytest
import torch

import sparsering as sr

B, H, N, K = 2, 4, 48, 8
QUERY, KEY, VALUE = torch.randn(3, B, H, N, 16, generator=torch.Generator().manual_seed(0))
SCORES = torch.randn(B, N, N, generator=torch.Generator().manual_seed(1))
LISTS = SCORES.masked_fill(torch.ones(N, N).triu(1).bool(), -torch.inf).topk(K).indices


def attended(lists, **options):
    return sr.attention(QUERY, KEY, VALUE, sr.SelectedBlocks(lists, 1, **options) & sr.Causal())


@pytest.mark.parametrize(
    ("lists", "error", "way_out"),
    [
        (LISTS[:, None].numpy(), TypeError, "torch.as_tensor(..., dtype=torch.int64) makes one"),
        (LISTS[:, None].int(), TypeError, "convert with .to(torch.int64)"),
        (SCORES[:, None], TypeError, "these look like scores: pass scores.topk(k).indices"),
        (LISTS, ValueError, "[:, None] adds one head for all"),
    ],
)
def test_the_message_says_what_to_write(lists, error, way_out):
    with pytest.raises(error, match=re.escape(way_out)):
        attended(lists)


def test_a_step_of_decoding_names_its_first_row():
    lists = LISTS[:, None, -1:]
    with pytest.raises(ValueError, match=f"pass first_row={N - 1}, the row of the first query"):
        sr.attention(QUERY[:, :, -1:], KEY, VALUE, sr.SelectedBlocks(lists, 1))
    step = sr.attention(QUERY[:, :, -1:], KEY, VALUE, sr.SelectedBlocks(lists, 1, first_row=N - 1))
    torch.testing.assert_close(step, attended(LISTS[:, None])[:, :, -1:], rtol=0, atol=1e-5)
    with pytest.raises(ValueError, match="pass more rows, or q_start=0 for cross attention"):
        attended(lists)
