"""Draws the next token from the model's logits by temperature, top-k and top-p."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from ..ground.arguments import checked_number, index_of, is_finite, shortened


@dataclass(frozen=True)
class Sampling:
    """Draws tokens as `LongNetLM.generate` says.

    Among tokens of equal scores, `top_k` and `top_p` keep those of smaller ids.
    """

    temperature: float = 0.7
    top_k: int | None = None
    top_p: float | None = None

    def __post_init__(self) -> None:
        k, p = self.top_k, self.top_p
        object.__setattr__(self, "temperature", checked_number("temperature", self.temperature, 0))
        if k is not None:
            if (whole := index_of(k)) is None or whole < 1:
                got = shortened(repr(k))
                raise ValueError(f"top_k must be an int above 0, got {got}; None keeps all tokens")
            object.__setattr__(self, "top_k", whole)
        if p is not None:
            if isinstance(p, bool) or not is_finite(p) or not 0 < p <= 1:
                got = shortened(repr(p))
                raise ValueError(f"top_p must be above 0 and at most 1, got {got}; 1 keeps all")
            object.__setattr__(self, "top_p", float(p))

    def chances(self, logits: Tensor) -> Tensor:
        """Computes the chance of drawing each token from float64 logits [B, vocab_size]."""
        # The largest score becomes 0, so that division by a small temperature cannot overflow.
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
        """Draws a token for each text from logits [B, vocab_size].

        Returns: int64 [B].

        Raises: FloatingPointError if a logit is infinite or NaN.
        """
        logits = logits.cpu().double()
        if not math.isfinite(logits.sum()):
            raise FloatingPointError(
                "expected finite scores of the next token, got infinity or NaN; the model's "
                "weights are unusable, so load another checkpoint"
            )
        if self.temperature == 0:
            return logits.argmax(1)
        return torch.multinomial(self.chances(logits), 1, generator=generator)[:, 0]
