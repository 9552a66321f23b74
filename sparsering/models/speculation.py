"""Speculative decoding: guesses of the next tokens, and their verification in one pass.

Guesses are a tree: a list of tokens, and for each token the index of its parent. The first token,
with parent -1, is the last token of the text; all others are guesses.
"""

from collections.abc import Callable, Generator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..decoding import KVCache

if TYPE_CHECKING:
    from .longnet import LongNetLM

_MOST = 16  # largest number of guesses along one path
# Guesses follow at most `_PATHS` earlier places, where the `_CONTEXT` tokens before were the same.
_CONTEXT, _PATHS = 4, 3

Tree = tuple[list[int], list[int]]
Guess = Callable[[list[int], int], Tree]  # gets the text, and the most guesses along a path


def from_text() -> Guess:
    """Returns a function that guesses what has followed earlier where the same tokens occurred."""
    places: dict[tuple[int, ...], list[int]] = {}
    seen = _CONTEXT

    def guess(text: list[int], most: int) -> Tree:
        nonlocal seen
        for place in range(seen, len(text)):
            context = tuple(text[place - _CONTEXT : place])
            places[context] = [*places.get(context, ()), place][-_PATHS:]
        seen, tokens, parents = max(seen, len(text)), text[-1:], [-1]
        for place in reversed(places.get(tuple(text[-_CONTEXT:]), [])):
            node = 0
            for token in text[place : place + most]:
                if (child := _child(tokens, parents, node, token)) is None:
                    child, tokens, parents = len(tokens), [*tokens, token], [*parents, node]
                node = child
        return tokens, parents

    return guess


def from_model(model: "LongNetLM", max_length: int) -> Guess:
    """Returns a function that guesses the tokens which a smaller model finds likeliest."""
    caches = model.caches(max_length=max_length, rollback=_MOST)

    def guess(text: list[int], most: int) -> Tree:
        tokens, fed = text[-1:], text[caches[0].length if caches else 0 :]
        for _ in range(most):
            fed = model.next_logits(torch.tensor([fed]), caches).argmax(1).tolist()
            tokens += fed
        for cache in caches:
            cache.crop(min(cache.length, len(text)))
        return tokens, list(range(-1, len(tokens) - 1))

    return guess


def verified(
    model: "LongNetLM", tokens: Tensor, caches: Sequence[KVCache], guess: Guess, num_tokens: int
) -> Generator[Tensor, Any, None]:
    """Yields scores [1, vocab_size] of each next token; the caller sends the token that it draws.

    One pass of the model scores a guessed tree. As long as drawn tokens are in the tree, their
    scores come from it; then the caches keep their path alone, and the next guess begins.
    """
    text, end = tokens[0].tolist(), tokens.shape[1] + num_tokens
    text += (yield model.next_logits(tokens, caches)).tolist()
    while True:
        draft, parents = guess(text, min(_MOST, end - len(text)))
        tree = parents if len(draft) > 1 else None  # without guesses a plain step costs less
        scores, path = model.next_logits(torch.tensor([draft]), caches, tree=tree), [0]
        try:
            while True:
                text += (yield scores[path[-1], None]).tolist()
                if (node := _child(draft, parents, path[-1], text[-1])) is None:
                    break
                path.append(node)
        finally:  # also if the caller wants no more tokens
            for cache in caches if tree else ():
                cache.keep(path)


def _child(tokens: list[int], parents: list[int], node: int, token: int) -> int | None:
    """Returns the index of the child of `node` that has this token, or None."""
    children = (i for i, parent in enumerate(parents) if parent == node and tokens[i] == token)
    return next(children, None)
