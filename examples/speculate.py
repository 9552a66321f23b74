"""Verifies a tree of guesses in each step: the text of plain decoding, in fewer steps.

    python examples/speculate.py

The model repeats a phrase with changes, so that guesses from its own text are often right. Guesses
for the next tokens are what followed the last tokens earlier in the text; several places give
several guesses, which form a tree. The weights are random: shown is that the text is the same.
"""

import time

import torch
from torch import Tensor, nn

import sparsering as sr
from sparsering.cli.argument_types import positive
from sparsering.mistakes import OneLineParser, one_line_errors

VOCABULARY, WIDTH, HEADS = 64, 64, 4


class Layer(nn.Module):
    """A layer of attention over a cache, and a residual path."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, cache: sr.KVCache, tree: list[int] | None) -> Tensor:
        """Attends with x [N, WIDTH], the new tokens of the cache or a draft of them."""
        q, k, v = self.qkv(x).view(1, len(x), 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        attended = cache.attend(q, k, v, tree=tree)[0]  # [HEADS, N, WIDTH / HEADS]
        return x + self.out(attended.transpose(0, 1).flatten(1))


class Model(nn.Module):
    """A small decoder with learned positions, whose layers have a window and sinks."""

    def __init__(self, length: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.positions = nn.Embedding(length, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(3))
        self.pattern = sr.Causal() & (sr.SlidingWindow(255) | sr.GlobalTokens(4, rows=False))

    def caches(self) -> list[sr.KVCache]:
        """Empty caches of all layers."""
        return [sr.KVCache(self.pattern, 1, HEADS, WIDTH // HEADS) for _ in self.layers]

    def forward(
        self, tokens: list[int], depths: list[int], caches: list[sr.KVCache], tree: list[int] | None
    ) -> list[int]:
        """Returns the likeliest next token behind each token; depths are their positions."""
        x = self.tokens(torch.tensor(tokens)) + 0.1 * self.positions(torch.tensor(depths))
        for layer, cache in zip(self.layers, caches, strict=True):
            x = layer(x, cache, tree)
        return (x @ self.tokens.weight.T).argmax(1).tolist()


def guesses(text: list[int], most: int, ways: int = 3) -> tuple[list[int], list[int]]:
    """Guesses what follows a text: what followed its last two tokens earlier, as a tree.

    Returns: tokens and the parent of each. The first is the text's last token, which is certain.
    """
    tokens, parents = [text[-1]], [-1]
    places = [i for i in range(1, len(text) - 1) if text[i - 1 : i + 1] == text[-2:]]
    for place in reversed(places[-ways:]):
        at = 0
        for token in text[place + 1 : place + 1 + most]:
            known = [i for i, up in enumerate(parents) if up == at and tokens[i] == token]
            if not known:
                tokens.append(token)
                parents.append(at)
                known = [len(tokens) - 1]
            at = known[0]
    return tokens, parents


def generate(model: Model, prompt: list[int], new: int, most: int) -> tuple[list[int], int]:
    """Writes `new` tokens, with guesses of up to `most` tokens; returns the text and the steps."""
    text, caches, steps = list(prompt), model.caches(), 0
    model(text[:-1], list(range(len(text) - 1)), caches, None)
    while len(text) < len(prompt) + new:
        tokens, parents = guesses(text, most)
        depths = [len(text) - 1]
        for parent in parents[1:]:
            depths.append(depths[parent] + 1)
        tree = parents if len(tokens) > 1 else None  # without guesses: a plain step
        answers = model(tokens, depths, caches, tree)
        path = [0]
        while True:
            text.append(answers[path[-1]])
            right = [i for i, up in enumerate(parents) if up == path[-1] and tokens[i] == text[-1]]
            if not right:
                break
            path.append(right[0])
        for cache in caches if tree else ():
            cache.keep(path)
        steps += 1
    return text[: len(prompt) + new], steps


@torch.no_grad()
def main(prompt: int = 600, new: int = 200, most: int = 8) -> dict[str, float]:
    """Generates twice; returns the figures that it prints."""
    torch.manual_seed(0)
    model = Model(prompt + new + most + 1).double()
    start = torch.randint(VOCABULARY, (20,)).repeat(prompt // 20 + 1)[:prompt].tolist()
    texts, steps, seconds = [], [], []
    for guessed in (0, most):
        begin = time.perf_counter()
        text, number = generate(model, start, new, guessed)
        seconds.append(time.perf_counter() - begin)
        texts.append(text)
        steps.append(number)
    same = sum(a == b for a, b in zip(*texts, strict=True)) - prompt
    print(f"{same} of {new} tokens are the same")
    for name, number, spent in zip(("plain", "with guesses"), steps, seconds, strict=True):
        print(f"{name}: {number} steps, {new / number:.1f} tokens a step, {spent:.2f} s")
    return {"same": same, "new": new, "plain": steps[0], "steps": steps[1]}


if __name__ == "__main__":
    with one_line_errors("speculate"):
        parser = OneLineParser(description=__doc__.splitlines()[0])
        parser.add_argument("--prompt", type=positive, default=600)
        parser.add_argument("--new", type=positive, default=200)
        parser.add_argument("--most", type=int, default=8, help="tokens of a guess")
        main(**vars(parser.parse_args()))
