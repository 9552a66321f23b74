"""Which token comes next: drawn from the scores of all of them."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from ..patterns.arguments import checked_number, is_finite, shortened


@dataclass(frozen=True)
class Sampling:
    """How tokens are drawn: tempered, then the `top_k`, then of these the `top_p`.

    Attributes:
        temperature: divides the scores; 0 takes the likeliest token.
        top_k: only the k largest scores; None: all. Of equal ones the lower token is larger.
        top_p: only the fewest of the likeliest tokens whose chances, as `temperature` and `top_k`
            leave them, sum to p or more; None: all.

    Raises: ValueError for a temperature that is not finite or below 0, a top_k below 1, a top_p
        that is not above 0 and at most 1.
    """

    temperature: float = 0.7
    top_k: int | None = None
    top_p: float | None = None

    def __post_init__(self) -> None:
        k, p = self.top_k, self.top_p
        temperature = checked_number("temperature", self.temperature, 0)  # 0: the likeliest
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
        """The chance of each token, float64: scores [B, vocab_size] to the same shape."""
        logits = logits.double()
        if self.temperature == 0:
            return torch.zeros_like(logits).scatter_(1, logits.argmax(1, keepdim=True), 1)
        # the largest is 0, so that no temperature makes it infinite
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
        """A token for each row of scores [B, vocab_size]: int64 [B] on the CPU.

        The generator is of the CPU, default torch's; a temperature of 0 draws nothing from it.

        Raises: FloatingPointError where scores are not finite.
        """
        logits = logits.cpu().double()
        if not math.isfinite(logits.sum()):
            raise FloatingPointError(
                "expected finite scores of the next token, got infinity or NaN; the model's "
                "weights are unusable: take those of another checkpoint"
            )
        if self.temperature == 0:
            return logits.argmax(1)
        return torch.multinomial(self.chances(logits), 1, generator=generator)[:, 0]
