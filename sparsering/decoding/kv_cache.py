"""`KVCache`: keeps the keys and values that some later query of a pattern can still visit."""

from collections.abc import Sequence
from typing import Any, Literal, overload

import torch
from torch import Tensor

from ..call_recipe import recipe_of
from ..checks import (
    autocast_inputs,
    check_batch,
    check_inputs,
    check_pattern,
    check_tensor,
    checked_device,
    checked_index,
    refuse_meta,
)
from ..layouts.compile import BLOCK_SIZES
from ..layouts.lifetimes import last_visits, own_length
from ..patterns.algebra import Pattern, check_fits
from ..patterns.arguments import (
    MOST_TOKENS,
    checked_dtype,
    checked_flag,
    checked_integer,
    shortened,
)
from .compiled import attend_op, operator_options, register
from .held import Held, Row, keeping_tensors, looking_back
from .new_tokens import check_dtype, checked_lengths, nothing_new, with_padding
from .steps import attend_page, attend_spans, fits_page, laid_page, of_first

_REFUSED = {
    "q_start": "the cache knows where its tokens are",
    "block_bias": "blocks are those of whole sequences",
    "slot_bias": "rows are those of whole sequences",
}


class KVCache:
    """Keeps keys and values for decoding, as long as a later query of the pattern can visit them.

    Args:
        pattern: pattern of the whole sequence; pairs that look ahead are removed (`& Causal()`).
        batch_size, num_kv_heads, head_dim: sizes of the keys.
        num_heads: query heads, default `num_kv_heads`.
        value_dim: head dim of the values, default `head_dim`.
        max_length: most tokens of a sequence. Patterns that depend on the total length
            (`RandomBlocks`) need it; some patterns define it themselves.
        rollback: how many of the last tokens `crop` can take back.
        page_size: new tokens between two evictions, a multiple of 16 from 16 to 256.
        dtype, device: of the keys and values; by default, as the first ones have them.

    It holds the keys of `pattern.live_keys(length)` (with `rollback=n`, those of the last n
    lengths) and at most a page more per head. An eviction copies the keys that stay, once a page.
    Gradients do not pass through the cache: it is for decoding, not for training.

    Raises: ValueError where arguments do not fit.

    Example:
        >>> cache = KVCache(SlidingWindow(4095), 1, num_kv_heads=8, head_dim=64)
        >>> out = cache.attend(query, key, value)  # the prompt, whole or in parts
        >>> out = cache.attend(query, key, value)  # then token by token
    """

    def __init__(
        self,
        pattern: Pattern,
        batch_size: int,
        num_kv_heads: int,
        head_dim: int,
        *,
        num_heads: int | None = None,
        value_dim: int | None = None,
        max_length: int | None = None,
        rollback: int = 0,
        page_size: int = 128,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        check_pattern(pattern)
        num_heads = num_kv_heads if num_heads is None else num_heads
        value_dim = head_dim if value_dim is None else value_dim
        batch_size = checked_integer("batch_size", batch_size, 0)
        num_kv_heads = checked_integer("num_kv_heads", num_kv_heads, 0)
        num_heads = checked_integer("num_heads", num_heads, 0)
        rollback = checked_integer("rollback", rollback, 0)
        dims = checked_integer("head_dim", head_dim, 0), checked_integer("value_dim", value_dim, 0)
        if type(page_size) is not int or page_size not in BLOCK_SIZES:
            raise ValueError(
                "page_size must be a multiple of 16 from 16 to 256, got "
                f"{shortened(repr(page_size))}; 128 is one"
            )
        check_batch(pattern, batch_size, "batch_size=")
        heads = {"num_heads": num_heads, "num_kv_heads": num_kv_heads}
        last_visits(pattern, 0, 0, **heads, max_length=max_length)  # raises where it is needed
        none = torch.zeros(len(pattern.branches), num_kv_heads, 0, dtype=torch.int64)
        rows = [Row(0, 0, none[0], none)] * batch_size
        total = own_length(pattern, max_length)
        self.pattern = pattern
        self._held = Held(
            looking_back(pattern), num_heads, num_kv_heads, total, rollback, page_size, rows
        )
        if total is not None:
            check_fits(pattern, self._held.frame(0, 0))
        self._dims = dims
        self._asked = checked_dtype("dtype", dtype), checked_device(device)
        with torch.inference_mode(False):
            self._clock = register(self)

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        with torch.inference_mode(False):
            self._clock = register(self)  # a copy needs a clock of its own

    def __repr__(self) -> str:
        return f"<KVCache of {shortened(str(self.pattern))}: {self.kept} of {self.length} tokens>"

    @property
    def lengths(self) -> list[int]:
        """Number of tokens seen, for each batch entry."""
        return self._held.lengths

    @property
    def length(self) -> int:
        """Number of tokens seen by the longest entry."""
        return max(self.lengths, default=0)

    @property
    def _dtype(self) -> torch.dtype | None:
        """Dtype of the keys and values; None if the first keys will decide it."""
        keys = self._held.keys
        return keys.dtype if keys.shape[2] else self._asked[0]

    @property
    def _device(self) -> torch.device | None:
        keys = self._held.keys
        return keys.device if keys.shape[2] else self._asked[1]

    @property
    def kept(self) -> int:
        """Largest number of keys that any kv head of any entry holds."""
        held = self._held
        counts = [(row.positions >= 0).sum(1) for row in held.distinct()]
        most = max((int(n.max()) for n in counts if len(n)), default=0)
        return most + held.since - len(held.elsewhere)

    @property
    def nbytes(self) -> int:
        """Bytes of the keys, the values, and their positions."""
        held = self._held
        tensors = [held.keys, held.values]
        tensors += [x for row in held.distinct() for x in (row.positions, row.last)]
        return sum(x.numel() * x.element_size() for x in tensors)

    def positions(self, head: int, entry: int = 0) -> Tensor:
        """Positions of the keys that a kv head of a batch entry holds, ascending int64."""
        entry = checked_integer("entry", entry, 0, len(self.lengths) - 1)
        head = checked_integer("head", head, 0, self._held.kv_heads - 1)
        row, elsewhere = self._held.rows[entry], torch.tensor(self._held.elsewhere).long()
        found = row.positions_with(row.length - row.base)[head]
        return found[(found >= 0) & ~torch.isin(found, elsewhere)].sort().values

    @overload
    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        lengths: Sequence[int] | Tensor | None = ...,
        stored: bool = ...,
        return_lse: Literal[False] = ...,
        **options: Any,
    ) -> Tensor: ...

    @overload
    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        lengths: Sequence[int] | Tensor | None = ...,
        stored: bool = ...,
        return_lse: Literal[True],
        **options: Any,
    ) -> tuple[Tensor, Tensor]: ...

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        lengths: Sequence[int] | Tensor | None = None,
        stored: bool = True,
        return_lse: bool = False,
        **options: Any,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Attends from new tokens to all visible tokens, old and new; then evicts dead keys.

        The result equals the same rows of one call of `attention` on the whole sequence.

        Args:
            query, key, value: the new tokens, [B, H, n, D] as in `attention`.
            lengths: number of new tokens of each batch entry, default n; further tokens of the
                entry are padding. The lengths of entries then differ.
            stored: False where another rank's cache stores the new tokens: they count towards the
                length here, but are neither seen nor kept. `merge_attention` joins the results of
                the ranks.
            return_lse: also return lse [B, Hq, n].
            options: those of `attention` but `q_start`, `block_bias` and `slot_bias`.

        Returns: [B, Hq, n, Dv]; rows of padding have out 0 and lse -inf.

        Raises: ValueError where arguments do not fit; the cache is then unchanged.
        """
        stored, return_lse = checked_flag("stored", stored), checked_flag("return_lse", return_lse)
        for name in _REFUSED.keys() & options.keys() if options else ():
            raise ValueError(f"attend takes no {name}, for {_REFUSED[name]}; leave it out")
        if torch.is_grad_enabled():
            given = (query, key, value, *options.values())
            if any(isinstance(x, Tensor) and x.requires_grad for x in given):
                raise ValueError(
                    "attend keeps no gradients, got tensors that require them; call it under "
                    "torch.no_grad(), or attention() on whole sequences to train"
                )
        if torch.compiler.is_compiling():
            if lengths is not None or not stored or return_lse:
                raise ValueError(
                    "attend takes no lengths, stored or return_lse inside torch.compile; call it "
                    "outside"
                )
            inputs = autocast_inputs(query, key, value)
            out: Tensor = attend_op(*inputs, self._clock, **operator_options(options))
            return out
        found = self._attend(query, key, value, lengths, stored, **options)
        return found if return_lse else found[0]

    def load(
        self,
        key: Tensor,
        value: Tensor,
        positions: Tensor | Sequence[int] | None = None,
        *,
        length: int | None = None,
    ) -> None:
        """Stores the keys and values of a prompt whose attention ran elsewhere, as over ranks.

        Args:
            key, value: [B, Hkv, n, D].
            positions: positions of the keys, [n] ascending; default 0 to n - 1.
            length: length of the prompt, default the last position + 1. Keys that are not given are
                on other ranks.

        Raises: ValueError where arguments do not fit, or the cache has seen tokens.
        """
        check_tensor("key", key, "[batch, heads, tokens, head dim]")
        n = key.shape[2] if key.dim() == 4 else 0
        shape = len(self.lengths), self._held.heads, n, self._dims[0]
        query = torch.empty(shape, dtype=key.dtype, device=key.device)
        check_inputs(query, key, value, self._held.pattern)
        self._check(query, key, value)
        places = torch.arange(n)
        if positions is not None:
            places = checked_index("positions", positions, MOST_TOKENS)
        end = int(places[-1]) + 1 if len(places) else 0
        length = end if length is None else checked_integer("length", length, end)
        if self.length:
            raise ValueError(
                f"load needs a cache that has seen nothing, got one of {self.length} tokens; make "
                "another one"
            )
        self._new_tokens([length] * len(self.lengths), length)
        rising = bool((places.diff() > 0).all()) and bool((places[:1] >= 0).all())
        if len(places) != key.shape[2] or not rising:
            raise ValueError(
                f"positions must be {key.shape[2]} ascending ones, of each key, got "
                f"{shortened(str(places.tolist()))}; sort both"
            )
        with keeping_tensors():
            self._held = self._held.loaded(key, value, places, length)

    def _attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        lengths: Sequence[int] | Tensor | None = None,
        stored: bool = True,
        *,
        backend: str | None = None,
        scale: float | None = None,
        block_size: int | None = None,
        **options: Any,
    ) -> tuple[Tensor, Tensor]:
        held, asked = self._held, (backend, scale, None, block_size)
        recipe, inputs, extras = recipe_of(query, key, value, held.pattern, asked, options)
        if held.steps.checked is not recipe:
            self._check(query, key, value)
            check_dtype(self._dtype, inputs[1])
        given = query.shape[2]
        new = self._new_tokens(lengths, given)
        most = given if lengths is None else max(new, default=0)
        if not stored and len(set(zip(self.lengths, new, strict=True))) > 1:
            raise ValueError(
                "stored=False needs entries of one length, got "
                f"{shortened(str(self.lengths))}; select some"
            )
        if most == 0:
            return nothing_new(inputs[0], self._dims[1])
        if not stored:
            last = range(self.length, self.length + most)
            held = held.changed(elsewhere=(*held.elsewhere, *last))
        part, of_part = (inputs, extras) if most == given else of_first(most, inputs, extras)
        if fits_page(held, recipe.backend, new, of_part):
            layout = held.steps.layouts.get(most)
            if layout is None:
                with keeping_tensors():
                    layout = laid_page(held, most)
            found = attend_page(held, layout, recipe, part, of_part)
            held.steps.checked = recipe if recipe.plain else None
            after = held.advanced(new, held.since + most)
            if after.since >= after.limit:
                with keeping_tensors():
                    after = after.evicted()
        else:
            with keeping_tensors():
                found = attend_spans(held, recipe, part, new, of_part)
                after = held.advanced(new, held.since).evicted(*part[1:])
        self._held = after
        return with_padding(found, given - most)

    def crop(self, length: int) -> None:
        """Forgets the tokens from `length` on, as speculative decoding does with wrong guesses.

        Raises: ValueError where that is more than `rollback` tokens back, or beyond the length of
            the cache; the cache is then unchanged.
        """
        length = checked_integer("length", length, 0)
        if len(set(self.lengths)) > 1:
            raise ValueError(
                f"crop needs entries of one length, got {shortened(str(self.lengths))}; select some"
            )
        oldest = max((row.oldest for row in self._held.rows), default=0)
        least = max(oldest, self.length - self._held.rollback)
        if not least <= length <= self.length:
            raise ValueError(
                f"crop takes a cache of {self.length} tokens and rollback={self._held.rollback} "
                f"back to {least} at least, got {length}; give KVCache a larger rollback"
            )
        with keeping_tensors():
            self._held = self._held.cropped(length)

    def reorder(self, index: Tensor | Sequence[int]) -> None:
        """Replaces entry i by entry `index[i]`, as beam search needs; the batch size stays."""
        chosen = self._checked_index("reorder", index)
        if len(chosen) != len(self.lengths):
            raise ValueError(
                f"reorder needs an index of {len(self.lengths)} entries, got {len(chosen)}; select "
                "takes any number"
            )
        self._take(chosen)

    def repeat(self, n: int) -> None:
        """Repeats each entry n times, copies adjacent (0 0 1 1), as beam search needs."""
        n = checked_integer("n", n, 1)
        every = torch.arange(len(self.lengths)).repeat_interleave(n)
        self._take(self._checked_index("repeat", every))

    def select(self, index: Tensor | Sequence[int]) -> None:
        """Keeps only the entries that an index lists, in its order."""
        self._take(self._checked_index("select", index))

    def _take(self, entries: Tensor) -> None:
        with keeping_tensors():
            self._held = self._held.taken(entries.clone())  # may be an inference tensor

    def _checked_index(self, name: str, index: Tensor | Sequence[int]) -> Tensor:
        if self.pattern.num_batches() is not None:
            raise ValueError(
                f"{name} needs entries that may be any, but the pattern has one table for each, in "
                f"{shortened(str(self.pattern))}; make a cache for each entry"
            )
        return checked_index(name, index, len(self.lengths))

    def _check(self, query: Tensor, key: Tensor, value: Tensor) -> None:
        refuse_meta(query, key, value)
        batch, new, (width, value_width) = len(self.lengths), query.shape[2], self._dims
        wanted = (
            (batch, self._held.heads, new, width),
            (batch, self._held.kv_heads, new, width),
            (batch, self._held.kv_heads, new, value_width),
        )
        given = query.shape, key.shape, value.shape
        if given != wanted:
            raise ValueError(
                "attend needs query, key and value of as many new tokens, "
                f"{', '.join(map(str, wanted))} here, got "
                f"{', '.join(str(tuple(x)) for x in given)}; the cache has those before"
            )
        if (device := self._device) not in (None, key.device):
            raise ValueError(
                f"the cache is on {device}, got keys on {key.device}; move them with .to()"
            )

    def _new_tokens(self, lengths: Sequence[int] | Tensor | None, most: int) -> list[int]:
        entries, total = len(self._held.rows), self._held.total
        new = [most] * entries if lengths is None else checked_lengths(lengths, entries, most)
        if total is None:
            return new
        for length, n in zip(self.lengths, new, strict=True):
            if length + n > total:
                raise ValueError(
                    f"the cache is for {total} tokens, got {n} more after {length}; give KVCache a "
                    "larger max_length (and the pattern as many tokens)"
                )
        return new
