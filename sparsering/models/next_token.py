"""Draws the next token from the scores of all tokens."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from ..patterns.arguments import checked_number, is_finite, shortened


@dataclass(frozen=True)
class Sampling:
    """Rules for drawing a token, as in `LongNetLM.generate`: `temperature`, then `top_k`, `top_p`.

    Among equal scores, `top_k` and `top_p` keep the lower token first.

    Raises: ValueError for a temperature that is not finite or below 0, a top_k below 1, a top_p
        that is not above 0 and at most 1.
    """

    temperature: float = 0.7
    top_k: int | None = None
    top_p: float | None = None

    def __post_init__(self) -> None:
        k, p = self.top_k, self.top_p
        temperature = checked_number("temperature", self.temperature, 0)  # 0 takes the most likely
        object.__setattr__(self, "temperature", temperature)
        if k is not None and (not isinstance(k, int) or isinstance(k, bool) or k < 1):
            raise ValueError(
                f"top_k must be an int above 0, got {shortened(repr(k))}; None keeps all tokens"
            )
        if p is not None:
            if isinstance(p, bool) or not is_finite(p) or not 0 < p <= 1:
                got = shortened(repr(p))
                raise ValueError(f"top_p must be above 0 and at most 1, got {got}; 1 keeps all")
            object.__setattr__(self, "top_p", float(p))

    def chances(self, logits: Tensor) -> Tensor:
        """Probability of each token, float64 [B, vocab_size], from scores of that shape."""
        logits = logits.double()
        if self.temperature == 0:
            return torch.zeros_like(logits).scatter_(1, logits.argmax(1, keepdim=True), 1)
        # the largest score becomes 0, so that a small temperature does not overflow
        scores = (logits - logits.amax(1, keepdim=True)) / self.temperature
        if self.top_k is None and self.top_p is None:
            return scores.softmax(1)
        scores, token = scores.sort(dim=1, descending=True, stable=True)
        if self.top_k is not None:
            scores[:, self.top_k :] = -math.inf
        chances = scores.softmax(1)
        if self.top_p is not None and self.top_p < 1:
            before = chances.cumsum(1).roll(1, 1)
            before[:, 0] = 0
            chances = chances.masked_fill(before >= self.top_p, 0)
            chances = chances / chances.sum(1, keepdim=True)
        return torch.zeros_like(chances).scatter_(1, token, chances)

    def draw(self, logits: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """Draws a token for each row of scores [B, vocab_size]: int64 [B] on the CPU.

        The generator is on the CPU, default torch's; with temperature 0 it is not used.

        Raises: FloatingPointError where scores are not finite.
        """
        logits = logits.cpu().double()
        if not math.isfinite(logits.sum()):
            raise FloatingPointError(
                "expected finite scores of the next token, got infinity or NaN; the model's "
                "weights are unusable: load another checkpoint"
            )
        if self.temperature == 0:
            return logits.argmax(1)
        return torch.multinomial(self.chances(logits), 1, generator=generator)[:, 0]
