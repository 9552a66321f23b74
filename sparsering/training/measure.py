"""Measures the speed of generation."""

import time
from collections.abc import Iterable, Iterator

from torch import Tensor


class TimedTokens:
    """Iterates over tokens of `LongNetLM.generate`; times the first token and the later ones."""

    def __init__(self, tokens: Iterable[Tensor]) -> None:
        self.tokens = tokens
        self.num_tokens = 0
        self.prompt_seconds = 0.0  # from the start to the first token
        self.seconds = 0.0  # from the first token to the last

    def __iter__(self) -> Iterator[Tensor]:
        began = time.perf_counter()
        for token in self.tokens:
            elapsed = time.perf_counter() - began
            if self.num_tokens == 0:
                self.prompt_seconds = elapsed
            self.seconds = elapsed - self.prompt_seconds
            self.num_tokens += 1
            yield token

    @property
    def tokens_per_s(self) -> float | None:
        """Tokens per second, without the first token; None for fewer than two tokens."""
        return (self.num_tokens - 1) / self.seconds if self.num_tokens > 1 else None
