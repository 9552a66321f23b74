"""A causal byte-level language model whose attention follows any sparsering pattern.

    model = LongNetLM(LongNet((1024, 4096), (1, 4)), width=128, num_layers=4, num_heads=2)
    loss = model.loss(tokens, targets)             # int64 [B, N] bytes and the bytes after them
    prompt = torch.tensor([list(b"def ")])
    text = bytes(int(token) for token in model.generate(prompt, 200))

It is a plain pre-norm transformer: RMSNorm, rotary positions, normalized queries and keys, an MLP
with squared ReLU, and one table of embeddings for inputs and logits.
"""

from collections.abc import Generator, Iterator, Sequence
from contextlib import closing, suppress
from functools import partial
from typing import Any, Literal, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ..checks import check_pattern, check_tensor, refuse_meta
from ..decoding import KVCache
from ..functional import attention
from ..ground import arguments
from ..ground.keywords import class_with_hints
from ..nn.transformer import Attend, Block, checked_sizes, rotary_table
from ..patterns.algebra import And, Mask, Pattern
from ..patterns.positions import Causal
from .next_token import Sampling
from .speculation import from_model, from_text, verified

READOUT_TOKENS = 4096  # `loss` computes the logits of this many tokens at a time


@class_with_hints
class LongNetLM(nn.Module):
    """Predicts each byte from the bytes before it.

    Args:
        pattern: any pattern; pairs whose key is after the query are removed (`& Causal()`).
        width: channels of the residual stream; the head dim, width / num_heads, must be even.
        num_layers, num_heads: transformer blocks, and attention heads in each.
        mlp_ratio: MLP channels per channel of width.
        vocab_size: number of tokens; 256 for bytes.
        rope_base: wavelengths of the rotary positions run from 2 pi to about 2 pi rope_base tokens.
        checkpoint_layers: store only each block's input for backward, which runs the block again.

    Weights are drawn from torch's global generator: call `torch.manual_seed` before.

    Raises: ValueError if an argument is invalid.

    Source: LongNet (arXiv 2307.02486), section 3.
    """

    def __init__(
        self,
        pattern: Pattern,
        *,
        width: int = 128,
        num_layers: int = 4,
        num_heads: int = 2,
        mlp_ratio: int = 4,
        vocab_size: int = 256,
        rope_base: float = 10000.0,
        checkpoint_layers: bool = False,
    ) -> None:
        super().__init__()
        check_pattern(pattern)
        sizes = width, num_heads, num_layers, mlp_ratio
        width, num_heads, num_layers, mlp_ratio = checked_sizes(*sizes)
        vocab_size = arguments.checked_integer("vocab_size", vocab_size, 1)
        self.pattern = _causal(pattern)
        self.attend: Attend = partial(attention, pattern=self.pattern)
        self.num_heads = num_heads
        self.rope_base = arguments.checked_number("rope_base", rope_base, 1)
        self.checkpoint_layers = arguments.checked_flag("checkpoint_layers", checkpoint_layers)
        self.embedding = nn.Embedding(vocab_size, width)
        blocks = (Block(width, num_heads, mlp_ratio * width) for _ in range(num_layers))
        self.blocks = nn.ModuleList(blocks)
        self.norm = nn.RMSNorm(width)
        nn.init.normal_(self.embedding.weight, std=0.02)  # small, because it also gives the logits

    def forward(self, tokens: Tensor, *, attend: Attend | Sequence[Attend] | None = None) -> Tensor:
        """Computes logits of the byte after each position.

        Args:
            tokens: int64 [B, N].
            attend: maps (query, key, value), each [B, H, N, D], to [B, H, N, D]; one function for
                all blocks or one for each; default: attention over the model's pattern.

        Returns: logits [B, N, vocab_size]; the logits at position i depend on tokens 0..i alone.
        """
        return F.linear(self.hidden(tokens, attend=attend), self.embedding.weight)

    def hidden(
        self,
        tokens: Tensor,
        *,
        attend: Attend | Sequence[Attend] | None = None,
        positions: Tensor | None = None,
    ) -> Tensor:
        """Returns the normalized residual stream [B, N, width], from which `forward` takes logits.

        `positions` int64 [N] is each token's index in the whole sequence, default 0 .. N - 1.
        """
        attend = attend or self.attend
        attends = [attend] * len(self.blocks) if callable(attend) else attend
        x = self.embedding(tokens)  # [B, N, width]
        x = F.rms_norm(x, x.shape[-1:])
        sizes = tokens.shape[1], x.shape[-1] // self.num_heads
        cos, sin = rotary_table(*sizes, self.rope_base, x.device, positions)
        for block, attend in zip(self.blocks, attends, strict=True):
            if self.checkpoint_layers and torch.is_grad_enabled():
                x = checkpoint(block, x, cos, sin, attend, use_reentrant=False)
            else:
                x = block(x, cos, sin, attend)
        return self.norm(x)

    def loss(
        self,
        tokens: Tensor,
        targets: Tensor,
        *,
        attend: Attend | Sequence[Attend] | None = None,
        positions: Tensor | None = None,
        num_targets: int | None = None,
    ) -> Tensor:
        """Returns the mean cross-entropy in nats per byte, without storing all logits at once.

        Args:
            tokens, targets: int64 [B, N]; `targets[b, i]` is the byte after `tokens[b, i]`.
            attend, positions: as `hidden`.
            num_targets: divisor of the summed loss, default the size of `targets`. Ranks that share
                a step's targets pass their total number, so that the ranks' losses sum to the mean.

        Cost: READOUT_TOKENS x vocab_size logits at a time; backward computes them again.
        """
        hidden = self.hidden(tokens, attend=attend, positions=positions).flatten(0, 1)
        weight = self.embedding.weight

        def summed_loss(x: Tensor, y: Tensor) -> Tensor:
            logits = F.linear(x, weight)  # [n, vocab_size]
            logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
            return F.cross_entropy(logits, y, reduction="sum")

        pairs = zip(*(x.split(READOUT_TOKENS) for x in (hidden, targets.flatten())), strict=True)
        sums = [checkpoint(summed_loss, x, y, use_reentrant=False) for x, y in pairs]
        return torch.stack(sums).sum() / (num_targets or targets.numel())

    def caches(
        self, batch_size: int = 1, *, max_length: int | None = None, rollback: int = 0
    ) -> list[KVCache]:
        """Returns an empty `KVCache` for each block, for `batch_size` texts.

        `max_length`: tokens of the sequence, if the pattern needs them. `rollback`: as `KVCache`.
        """
        with suppress(ValueError):  # raised for patterns that depend on the sequence's length
            self.pattern.live_keys(1, num_heads=self.num_heads)
            max_length = None
        sizes = batch_size, self.num_heads, self.embedding.embedding_dim // self.num_heads
        limits: dict[str, Any] = {"max_length": max_length, "rollback": rollback}
        return [KVCache(self.pattern, *sizes, **limits) for _ in self.blocks]

    def cache_bytes(self, caches: Sequence[KVCache]) -> tuple[int, int]:
        """Returns the caches' bytes, and the bytes of all keys and values if none were evicted."""
        weight = self.embedding.weight
        token_bytes = 2 * weight.shape[1] * weight.element_size()
        full = sum(token_bytes * sum(cache.lengths) for cache in caches)
        return sum(cache.nbytes for cache in caches), full

    @torch.no_grad()
    def next_logits(
        self, tokens: Tensor, caches: Sequence[KVCache], *, tree: Sequence[int] | None = None
    ) -> Tensor:
        """Adds tokens int64 [B, N] to the caches, and scores the next token: [B, vocab_size].

        The tokens follow the tokens that the caches hold. `self.caches` makes caches. With `tree`,
        they are one text's draft, as in `KVCache.attend`: scores of what follows each, [N, ...].

        Cost: attention to the keys that the N tokens visit.
        """
        depths = list(range(tokens.shape[1])) if tree is None else [-1]
        # The last depth stays -1: it belongs to the end of the text, which parent -1 names.
        for parent in tree or ():
            depths.insert(-1, depths[parent] + 1)
        positions = (caches[0].length if caches else 0) + torch.tensor(depths[: tokens.shape[1]])
        attends: list[Any] = [partial(cache.attend, tree=tree) for cache in caches]
        tokens = tokens.to(self.embedding.weight.device)
        x = self.hidden(tokens, attend=attends, positions=positions)
        return F.linear(x[:, -1] if tree is None else x[0], self.embedding.weight)

    def generate(
        self,
        tokens: Tensor,
        num_tokens: int,
        *,
        temperature: float = 0.7,
        top_k: int | None = None,
        top_p: float | None = None,
        stop: Sequence[int] | None = None,
        generator: torch.Generator | None = None,
        caches: Sequence[KVCache] | None = None,
        draft: "Literal['ngram'] | LongNetLM | None" = None,
    ) -> Iterator[Tensor]:
        """Continues texts token by token, drawing each token from the model's scores.

        The prompt runs in one forward, when the first token is requested. Each later token costs
        attention to the keys that it visits. Tokens see the same keys as in `forward`.

        Args:
            tokens: int64 [B, N], prompts of equal length, at least one token.
            num_tokens: largest number of tokens to add.
            temperature: divides the scores; 0 takes the most likely token.
            top_k: draw only from the k largest scores.
            top_p: draw only from the fewest most likely tokens whose probabilities, after
                `temperature` and `top_k`, sum to p or more.
            stop: one or more tokens; a text ends behind this sequence, which is still returned.
            generator: random generator on the CPU, for drawing tokens; default torch's global one.
            caches: as returned by `caches`, to inspect or to continue from; they do not contain the
                last token that was returned. Default: empty, with max_length N + num_tokens.
            draft: how the next tokens of one text are guessed, which one pass then verifies: from
                the text so far ("ngram"), or by a smaller model. The tokens stay the same.

        Returns: an iterator of int64 [B], on the CPU: the next token of each text, -1 for texts
            that have ended; it stops once all texts have ended.

        Raises: ValueError, at once; FloatingPointError, from the iterator, for scores not finite.

        Example:
            >>> for token in model.generate(torch.tensor([list(b"def ")]), 200, top_p=0.9):
            ...     print(chr(int(token)), end="", flush=True)
        """
        sampling = Sampling(temperature, top_k, top_p)
        num_tokens = arguments.checked_integer("num_tokens", num_tokens, 0)
        check_tensor("tokens", tokens, "int64 [B, N]")
        if tokens.dim() != 2 or tokens.dtype != torch.int64 or tokens.shape[1] == 0:
            got = f"{str(tokens.dtype).removeprefix('torch.')} {list(tokens.shape)}"
            raise ValueError(
                f"generate needs prompts int64 [B, N] of at least one token, got {got}; pass a "
                "newline to start without a text"
            )
        vocabulary = self.embedding.num_embeddings
        refuse_meta(tokens, named="tokens")
        if tokens.numel() and not 0 <= int(tokens.min()) <= int(tokens.max()) < vocabulary:
            raise ValueError(
                f"tokens must be from 0 to {vocabulary - 1}, got some from {int(tokens.min())} to "
                f"{int(tokens.max())}; construct the model with a larger vocab_size"
            )
        if stop is not None:
            stop = arguments.checked_integers("stop", stop, 0, vocabulary - 1)
            if not stop:
                raise ValueError("stop must have a token, got an empty sequence; or pass stop=None")
        on_cpu = isinstance(generator, torch.Generator) and generator.device.type == "cpu"
        if generator is not None and not on_cpu:
            got = arguments.shortened(repr(getattr(generator, "device", generator)))
            raise ValueError(f"generator must be on the CPU, got {got}; pass torch.Generator()")
        if caches is None:
            caches = self.caches(tokens.shape[0], max_length=tokens.shape[1] + num_tokens)
        is_list = isinstance(caches, Sequence) and all(isinstance(x, KVCache) for x in caches)
        if not is_list or len(caches) != len(self.blocks):
            got = str(len(caches)) if is_list else arguments.shortened(repr(caches))
            raise ValueError(
                f"caches must be a KVCache list, one for each of {len(self.blocks)} blocks, got "
                f"{got}; model.caches() makes them"
            )
        if draft is None:
            scores = self._scores(tokens, caches)
        else:
            smaller = isinstance(draft, LongNetLM) and draft.embedding.num_embeddings == vocabulary
            if not (smaller or draft == "ngram") or tokens.shape[0] != 1:
                got = arguments.shortened(repr(draft))
                raise ValueError(
                    "draft must be None, 'ngram' or a LongNetLM of the same vocab_size, and tokens "
                    f"one text, got draft {got} and {tokens.shape[0]} texts; pass draft=None"
                )
            end = tokens.shape[1] + num_tokens
            guess = from_model(draft, end) if isinstance(draft, LongNetLM) else from_text()
            scores = verified(self, tokens, caches, guess, num_tokens)

        def new_tokens() -> Iterator[Tensor]:
            active = torch.ones(tokens.shape[0], dtype=torch.bool)
            last: list[Tensor] = []
            token = None
            with closing(scores):
                for _ in range(num_tokens):
                    token = sampling.draw(scores.send(token), generator)
                    yield token.where(active, -1)
                    if stop is not None:
                        last = [*last, token][-len(stop) :]
                        if len(last) == len(stop):
                            active &= (torch.stack(last, 1) != torch.tensor(stop)).any(1)
                        if not active.any():
                            return

        return new_tokens()

    def _scores(self, tokens: Tensor, caches: Sequence[KVCache]) -> Generator[Tensor, Any, None]:
        """Yields scores [B, vocab_size] of the next token, again and again.

        After each, the caller sends the tokens that it chose, [B]. `tokens`, int64 [B, N], are the
        prompts. All tokens are added to the caches.
        """
        while True:
            tokens = (yield self.next_logits(tokens, caches))[:, None]


def _causal(pattern: Pattern) -> Pattern:
    """Returns `pattern & Causal()`, or the pattern itself if all its branches contain that mask."""
    for branch in pattern.branches:
        if Causal() not in (branch.masks if isinstance(branch, And) else (branch,)):
            return cast(Mask, pattern) & Causal()
    return pattern
