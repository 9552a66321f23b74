"""Patterns with lists of single keys, joined in every way to other masks, for 90 tokens."""

import torch

import sparsering as sr

TOKENS = 90
LISTED = torch.randint(-1, TOKENS, (2, TOKENS, 12), generator=torch.Generator().manual_seed(0))
CHOSEN = sr.SelectedBlocks(LISTED, 1)  # heads: 2 tables
WINDOW = sr.SlidingWindow(7, 3)
_SHORT = torch.randint(-1, 60, (TOKENS, 12), generator=torch.Generator().manual_seed(3))
INNER = sr.SelectedBlocks(_SHORT, 1)
_NESTED = torch.randint(-1, 40, (2, 1, TOKENS, 5), generator=torch.Generator().manual_seed(4))
_TABLE = torch.rand(TOKENS, TOKENS, generator=torch.Generator().manual_seed(5)) < 0.7
_NODES, _PARENTS = (30, 20, 25, 15), (-1, 0, 0, 1)

JOINS: dict[str, sr.Pattern] = {
    "causal": CHOSEN & sr.Causal(),
    "beside a window": (CHOSEN | WINDOW) & sr.Causal(),
    "in a mixture": CHOSEN + (INNER & sr.Causal()) + WINDOW,
    "a union of lists": CHOSEN | sr.SelectedBlocks(LISTED.flip(0), 1),
    "a list in a list": CHOSEN & sr.SelectedBlocks(LISTED.flip(0), 4, 1),
    "a list or a window, in a list": (CHOSEN | WINDOW) & sr.SelectedBlocks(LISTED.flip(1), 4, 1),
    "unions that meet": (CHOSEN | WINDOW) & (INNER | sr.Causal()),
    "beside global tokens": (INNER | sr.GlobalTokens(3)) - sr.SlidingWindow(2, 2),
    "inside documents": sr.Packed((40, 50), INNER),
    "beside a window in documents": sr.Packed((40, 50), (INNER | WINDOW) & sr.Causal()),
    "in documents of documents": sr.Packed((45, 45), sr.Packed((10, 35), INNER) | WINDOW),
    "documents by batch entry": sr.Packed(((40, 50), (7, 83)), INNER & sr.Causal()),
    "lists by batch entry": sr.SelectedBlocks(_NESTED, 1) | sr.SlidingWindow(2),
    "lists by batch entry in documents": sr.Packed(
        ((40, 50), (7, 83)), sr.SelectedBlocks(_NESTED, 1)
    ),
    "along a tree": sr.Tree(_NODES, _PARENTS, INNER & sr.Causal(), length=TOKENS),
    "along a tree, looking ahead": sr.Tree(_NODES, (-1, 0, -1, 2), INNER | WINDOW, length=TOKENS),
    "trees by batch entry": sr.Tree(
        (_NODES, (5, 80, 5)), (_PARENTS, (-1, 0, 0)), INNER, length=TOKENS
    ),
    "in the nodes of a tree": (CHOSEN & sr.Tree(_NODES, _PARENTS)) + WINDOW,
    "pairs of a table": CHOSEN & sr.Dense(_TABLE) | WINDOW,
    "blocks of unlike sizes": (CHOSEN | INNER) & sr.BlockCausal((20, 3, 40, 27)),
    "valid keys": (CHOSEN | WINDOW) & sr.KeyMask(torch.arange(TOKENS) % 7 > 0),
    "padding": (CHOSEN + WINDOW) & sr.KeyPadding((70, TOKENS)),
}
WITHOUT_DISTANCES = {
    "along a tree, looking ahead",
    "trees by batch entry",
    "in the nodes of a tree",
}
"""Joins in which branches or batch entries have other trees: they have no distances."""
