"""`KVCache`: stores the keys and values that later queries of a pattern can visit."""

from collections.abc import Sequence
from typing import Any, Literal, Self, overload

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn.functional import pad

from .. import checks
from ..call import Inputs
from ..ground.arguments import (
    MOST_TOKENS,
    checked_dtype,
    checked_flag,
    checked_integer,
    index_of,
    is_shape_alone,
    shortened,
)
from ..ground.keywords import class_with_hints
from ..ground.numerics import autocasting
from ..ground.once import unseen, unseen_beside
from ..kernels.rounding import Store, checked_store, to_store
from ..layouts.compile import BLOCK_SIZES
from ..layouts.lifetimes import last_visits, own_length
from ..patterns.algebra import Pattern, check_fits
from ..route.decision import decided
from ..route.options import ANYWHERE, refuse_options
from .cache_state import SIZES, CacheState, History, are_alike, ordinary_tensors
from .compiled import attend_op, operator_options, register
from .drafts import attend_draft, draft_of, kept
from .later_keys import LaterKeys
from .padded_tokens import padding_last, taken
from .steps import NewTokens, attend_page, attend_spans, empty_results, fits_page, page_layout

_OWN = ("lengths", "valid", "stored", "tree", "keep", "return_lse")
_OPTIONS = ("backend", "scale", "block_size", *ANYWHERE)
_REFUSED = {  # why `attend` refuses other options of `attention`, by name or by `Option.by`
    "q_start": "the cache knows the positions of its tokens",
    "block": "it needs the blocks of a whole sequence; call attention on all tokens",
    "slot": "it needs the rows of a whole sequence; call attention on all tokens",
}


@class_with_hints
class KVCache:
    """Stores keys and values for decoding, as long as later queries can visit them.

    Args:
        pattern: pattern of the whole sequence. Where it lets tokens see later ones, a call must
            bring all keys that its tokens see: `BlockCausal(8)` is decoded by whole blocks. Write
            `& Causal()` to leave later keys out.
        batch_size, num_kv_heads, head_dim: sizes of the keys.
        num_heads: query heads, default `num_kv_heads`.
        value_dim: head dim of the values, default `head_dim`.
        max_length: upper bound of a sequence's tokens. Patterns that depend on the total length
            (`RandomBlocks`) need it; others, such as `Documents`, fix it themselves.
        rollback: largest number of latest tokens that `crop` can remove.
        page_size: new tokens between two evictions, a multiple of 16 from 16 to 256.
        store: "int8" or "fp8" rounds keys and values to 8 bits, with a scale for each token and
            head; default None keeps their dtype. Results are those of the rounded keys and values,
            of the call's own tokens too. An int8 differs by at most max|x| / 254 of its row.
        dtype, device: dtype and device of keys and values; default those of the first keys.

    It stores the keys that `pattern.live_keys` returns for its length, and for the `rollback`
    lengths before. Other (dead) keys remain until the next eviction. An eviction comes `page_size`
    tokens after the last one, or earlier (but not before `page_size / 8` tokens) if a head of the
    largest batch entry has over `page_size` dead keys. On a CPU there is memory for an eighth more,
    pages included, so that most evictions which keep each head's latest keys copy nothing.
    Gradients do not pass through the cache: it is for decoding, not for training.

    Raises: ValueError if an argument is invalid.

    Example:
        >>> cache = KVCache(SlidingWindow(4095), 1, num_kv_heads=8, head_dim=64)
        >>> out = cache.attend(query, key, value)  # the prompt, whole or in parts
        >>> out = cache.attend(query, key, value)  # then token by token
    """

    _takes_parts = True  # whether `load` takes the keys of only some positions
    _takes_shapes = True  # whether tokens may have a shape but no numbers

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
        store: Store | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        checks.check_pattern(pattern)
        num_heads = num_kv_heads if num_heads is None else num_heads
        value_dim = head_dim if value_dim is None else value_dim
        batch_size = checked_integer("batch_size", batch_size, 0)
        num_kv_heads = checked_integer("num_kv_heads", num_kv_heads, 1)
        num_heads = checked_integer("num_heads", num_heads, 0)
        rollback = checked_integer("rollback", rollback, 0)
        head_dim = checked_integer("head_dim", head_dim, 0)
        self._dims = head_dim, checked_integer("value_dim", value_dim, 0)
        if (page := index_of(page_size)) is None or page not in BLOCK_SIZES:
            raise ValueError(
                "page_size must be a multiple of 16 from 16 to 256, got "
                f"{shortened(repr(page_size))}; for example 128"
            )
        checks.check_batch(pattern, batch_size, "batch_size=")
        heads = {"num_heads": num_heads, "num_kv_heads": num_kv_heads}
        last_visits(pattern, 0, 0, **heads, max_length=max_length)  # raises if a bound is missing
        with unseen():
            none = torch.zeros(1 + len(pattern.branches), 0, dtype=torch.int64)
        alike = are_alike(pattern, num_heads, num_kv_heads)
        empty = History(
            length=0, base=0, keys=none, counts=(0,) * num_kv_heads, width=0, alike=alike
        )
        histories = [empty] * batch_size
        total = own_length(pattern, max_length)
        self.pattern = pattern
        self._state = CacheState(
            pattern=pattern,
            heads=num_heads,
            kv_heads=num_kv_heads,
            total=total,
            rollback=rollback,
            page_size=page,
            store=checked_store(store),
            histories=histories,
        )
        self._later_keys = LaterKeys(self._state)
        if total is not None:
            check_fits(pattern, self._state.frame(0, 0))
        self._first_kind = checked_dtype("dtype", dtype), checks.checked_device(device)
        self._clock = register(self)

    def __copy__(self) -> Self:
        """Copies the keys and values as well, because steps write new ones in place."""
        other = object.__new__(type(self))
        other.__setstate__(self.__getstate__())
        with ordinary_tensors(self._state.keys.rows):
            other._state = self._state.copied()
        return other

    def __getstate__(self) -> dict[str, Any]:
        self._check_no_draft("a copy")
        return self.__dict__

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._clock = register(self)  # two caches must not share a clock

    def __repr__(self) -> str:
        kept = f"{self.kept} of {self.length} tokens"
        kept += f" in {self._state.store}" if self._state.store else ""
        return f"<KVCache of {shortened(str(self.pattern))}: {kept}>"

    @property
    def lengths(self) -> list[int]:
        """Number of tokens seen, for each batch entry."""
        return self._state.lengths

    @property
    def length(self) -> int:
        """Number of tokens seen by the longest entry."""
        return max(self.lengths, default=0)

    @property
    def _kind(self) -> tuple[torch.dtype | None, torch.device | None]:
        """Dtype and device of stored keys; None where the first keys will decide them."""
        keys = self._state.keys
        if self._state.store is not None:
            return self._first_kind
        return (keys.rows.dtype, keys.rows.device) if keys.num_slots else self._first_kind

    @property
    def kept(self) -> int:
        """Largest number of keys stored for a kv head of a batch entry."""
        state = self._state
        most = max((history.num_keys for history in state.distinct()), default=0)
        return most + state.page_length - len(state.remote)

    @property
    def nbytes(self) -> int:
        """Bytes of the keys, the values, and their positions."""
        state = self._state
        held = [state.keys, state.values, *(state.draft or ())[:2]]
        return sum(x.nbytes for x in (*held, *(history.keys for history in state.distinct())))

    def positions(self, head: int, entry: int = 0) -> Tensor:
        """Positions of the keys stored for a kv head of a batch entry, ascending int64."""
        entry = checked_integer("entry", entry, 0, len(self.lengths) - 1)
        head = checked_integer("head", head, 0, self._state.kv_heads - 1)
        history = self._state.histories[entry]
        with unseen():
            remote = torch.tensor(self._state.remote, dtype=torch.int64)
            of_heads = history.positions_with(history.length - history.base)
            positions = of_heads[head % len(of_heads)]
            return positions[(positions >= 0) & ~torch.isin(positions, remote)].sort().values

    @overload
    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, *, return_lse: Literal[True], **rest: Any
    ) -> tuple[Tensor, Tensor]: ...

    @overload
    def attend(self, query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor: ...

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        lengths: Sequence[int] | Tensor | None = None,
        valid: Tensor | None = None,
        stored: bool = True,
        tree: Sequence[int] | Tensor | None = None,
        keep: bool = True,
        return_lse: bool = False,
        **options: Any,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Attends from new tokens to all visible tokens, old and new; then may evict keys.

        The result equals the same rows of one call of `attention` on the whole sequence. The new
        tokens see each other, backwards and forwards, where the pattern says so.

        Args:
            query, key, value: the new tokens, [B, H, n, D] as in `attention`.
            lengths: number of new tokens of each batch entry, default n; the other tokens of the
                entry are padding. Batch entries may thus have sequences of different lengths.
            valid: in place of `lengths`, bool [B, n], False for tokens that are padding, on the
                left too. The others follow one another in the sequence of their entry.
            stored: False if another rank's cache stores the new tokens. This cache then only counts
                them in its length. `merge_attention` joins the results of the ranks.
            tree: the new tokens are guesses: parent of each, an earlier one, or -1 for the last
                cached token. Each sees its path and the cache, from its depth. `keep` then says
                which of them the sequence has, and until then the cache takes nothing else.
            keep: False leaves the cache as it was before the call, for tokens that are not final,
                such as those of a denoising step of block diffusion, or that are only scored.
            return_lse: also return lse [B, Hq, n].
            options: options of `attention`, except `q_start`, `block_bias` and `slot_bias`.

        Returns: [B, Hq, n, Dv]; rows of padding have out 0 and lse -inf.

        Raises: ValueError if an argument is invalid, or a new token sees a key that comes after
            this call; the cache is then unchanged.
        """
        stored, return_lse = checked_flag("stored", stored), checked_flag("return_lse", return_lse)
        keep = checked_flag("keep", keep)
        if options:
            refuse_options("attend", options, (*_OPTIONS, *_OWN), _REFUSED)
        given = (query, key, value, *options.values())
        if forward_ad._current_level >= 0:
            checks.refuse_forward_mode("attend", *given)
        learning = [x for x in given if isinstance(x, Tensor) and x.requires_grad]
        if learning and torch.is_grad_enabled():
            raise ValueError(
                "attend keeps no gradients, got tensors that require them; call it under "
                "torch.no_grad(), or train with attention() on whole sequences"
            )
        if torch.compiler.is_compiling():
            if not stored or return_lse or tree is not None or valid is not None:
                raise ValueError(
                    "attend takes no stored, tree, valid or return_lse inside torch.compile; call "
                    "it outside"
                )
            inputs = checks.autocast_inputs(query, key, value)
            options |= {"lengths": lengths, "keep": keep}
            return attend_op(*inputs, self._clock, **operator_options(options))
        self._check_no_draft("attend")
        if tree is not None and not (lengths is None and valid is None and stored and keep):
            raise ValueError(
                "tree= needs stored=True, keep=True and no lengths or valid, got others; leave "
                "them out, and call keep([]) afterwards to drop the tokens of a tree"
            )
        given, place = (query, key, value), None
        if valid is not None:
            given, lengths, place = padding_last(given, lengths, valid)
        if self._takes_shapes and is_shape_alone(query):
            with unseen():
                results = self._attend(given, lengths, stored, tree, keep, **options)
        else:
            results = self._attend(given, lengths, stored, tree, keep, **options)
        if place is not None:
            out, lse = results
            results = taken(out, place), lse.gather(2, place[:, None].expand_as(lse))
        return results if return_lse else results[0]

    def keep(self, path: Sequence[int] | Tensor) -> None:
        """Adds some tokens of the latest `attend(tree=)` to the cache, and drops the others.

        Later results are those of a cache that was fed the path's tokens alone.

        Args:
            path: indices of new tokens, the first with parent -1, each the parent of the next; []
                drops all.

        Raises: ValueError if there is no draft or the path is none; the cache is then unchanged.
        """
        with ordinary_tensors():
            self._state = kept(self._state, path)

    def load(
        self,
        key: Tensor,
        value: Tensor,
        positions: Tensor | Sequence[int] | None = None,
        *,
        length: int | None = None,
    ) -> None:
        """Stores keys and values of a prompt that was attended elsewhere, for example by a ring.

        Args:
            key, value: [B, Hkv, n, D].
            positions: positions of the keys, [n] ascending; default 0 to n - 1.
            length: tokens of the prompt, default the last position + 1. The keys of positions that
                are not given must be in the caches of other ranks.

        Raises: ValueError if an argument is invalid, or the cache is not empty.
        """
        self._check_no_draft("load")
        checks.check_tensor("key", key, "[batch, heads, tokens, head dim]")
        n = key.shape[2] if key.dim() == 4 else 0
        if not self._takes_parts and (positions is not None or length not in (None, n)):
            raise ValueError(
                "a SelectedCache needs the keys of all tokens of a prompt, got positions, or a "
                "length other than the number of keys; leave positions and length out"
            )
        shape = len(self.lengths), self._state.heads, n, self._dims[0]
        query = torch.empty(shape, dtype=key.dtype, device=key.device)
        checks.check_inputs(query, key, value, self._state.pattern)
        self._check(query, key, value)
        with unseen_beside(key):
            return self._load(key, value, positions, length)

    def _load(self, key: Tensor, value: Tensor, positions: Any, length: int | None) -> None:
        """Stores a checked prompt in an empty cache, after checks of its positions and length."""
        places = torch.arange(key.shape[2])
        if positions is not None:
            places = checks.checked_index("positions", positions, MOST_TOKENS)
        end = int(places[-1]) + 1 if len(places) else 0
        length = end if length is None else checked_integer("length", length, end)
        if self.length:
            raise ValueError(
                f"load needs an empty cache, got one that has seen {self.length} tokens; make "
                "another KVCache"
            )
        new = self._state.new_tokens([length] * len(self.lengths), length)
        rising = bool((places.diff() > 0).all()) and bool((places[:1] >= 0).all())
        if len(places) != key.shape[2] or not rising:
            raise ValueError(
                f"positions must be {key.shape[2]} ascending ints, one per key, got "
                f"{shortened(str(places.tolist()))}; sort positions and keys together"
            )
        self._later_keys.check_call(self._state, new)
        kind, store = (key.dtype, key.device), self._state.store
        with ordinary_tensors():
            if store is not None:
                key, value = to_store(key, store), to_store(value, store)
            self._state = self._state.loaded(key, value, places, length)
        self._first_kind = kind

    def _attend(
        self, inputs: Inputs, lengths: Any, stored: bool, tree: Any, keep: bool, **options: Any
    ) -> tuple[Tensor, Tensor]:
        """Runs one step: in the page if the new tokens fit there, else over ranges of positions."""
        state, given, choices = self._state, inputs, (None, None, None, None)
        if options:
            backend, scale, size = [options.pop(name, None) for name in _OPTIONS[:3]]
            choices = backend, scale, None, size
        call, decision = decided(given, state.pattern, choices, options, in_cache=True)
        inputs = call.query, call.key, call.value
        if tree is not None or state.page.decision is not decision:
            self._check(*given)
            self._check_dtype(inputs[1])
        tokens, n = NewTokens(*inputs, call.options).in_store(state.store), inputs[0].shape[2]
        if tree is not None:
            with ordinary_tensors():
                draft = draft_of(state, tokens, tree)
                results = attend_draft(state, decision, tokens, draft)
                self._state = state.changed(draft=draft)
            return results
        new = self._state.new_tokens(lengths, n)
        most = n if lengths is None else max(new, default=0)
        if not stored and len(set(zip(self.lengths, new, strict=True))) > 1:
            raise ValueError(
                "stored=False needs batch entries of equal length, got lengths "
                f"{shortened(str(self.lengths))}; pick entries with select()"
            )
        if most == 0:
            return empty_results(inputs[0], self._dims[1])
        self._later_keys.check_call(self._state, new)
        if not stored:
            state = state.changed(remote=(*state.remote, *range(self.length, self.length + most)))
        tokens = tokens if most == n else tokens.first(most)
        in_page = fits_page(state, decision.backend, new, tokens)
        if is_shape_alone(tokens.query):
            out, lse = empty_results(tokens.query, self._dims[1])
        elif in_page:
            if (layout := state.page.layouts.get(most)) is None:
                with ordinary_tensors():
                    layout = page_layout(state, most)
            out, lse = attend_page(state, layout, decision, tokens)
            state.page.decision = decision if decision.is_plain else None
        else:
            with ordinary_tensors():
                out, lse = attend_spans(state, decision, tokens, new)
        if keep:  # without `keep`, the new keys are in slots that count as empty
            state = state.advanced(new, state.page_length + (most if in_page else 0))
            beside = () if in_page else (tokens.key, tokens.value)
            if beside or state.page_length >= state.page_limit:
                with ordinary_tensors():
                    state = state.evicted(*beside)
            self._state = state
            if state.store is not None:  # the rounded rows do not tell which dtype they had
                self._first_kind = inputs[1].dtype, inputs[1].device
        if padding := n - most:
            out, lse = pad(out, (0, 0, 0, padding)), pad(lse, (0, padding), value=-torch.inf)
        return out, lse

    def crop(self, length: int) -> None:
        """Removes the tokens from `length` on, such as wrong guesses of speculative decoding.

        Raises: ValueError if it would remove more than `rollback` tokens, or keys that a token
            before them has seen, or `length` is beyond the length of the cache; the cache is then
            unchanged.
        """
        self._check_no_draft("crop")
        length = checked_integer("length", length, 0)
        if len(set(self.lengths)) > 1:
            raise ValueError(
                "crop needs batch entries of equal length, got lengths "
                f"{shortened(str(self.lengths))}; pick entries with select()"
            )
        oldest = max((history.oldest for history in self._state.histories), default=0)
        least = max(oldest, self.length - self._state.rollback)
        if not least <= length <= self.length:
            raise ValueError(
                f"crop takes a length from {least} to {self.length}, got {length}: the cache has "
                f"{self.length} tokens and rollback={self._state.rollback}; use a larger rollback"
            )
        self._later_keys.check_crop(self._state, length)
        with ordinary_tensors(self._state.keys.rows):
            self._state = self._state.cropped(length)

    def reorder(self, index: Tensor | Sequence[int]) -> None:
        """Replaces batch entry i by entry `index[i]`, as beam search needs, in place."""
        self._take("reorder", index, len(self.lengths))

    def repeat(self, n: int) -> None:
        """Repeats each batch entry n times, copies adjacent (0 0 1 1), as beam search needs."""
        n = checked_integer("n", n, 1)
        self._take("repeat", [entry for entry in range(len(self.lengths)) for _ in range(n)])

    def select(self, index: Tensor | Sequence[int]) -> None:
        """Keeps only the batch entries that an index lists, in its order."""
        self._take("select", index)

    def join(self, other: "KVCache") -> None:
        """Adds copies of another cache's batch entries behind these, such as a new request.

        Raises: ValueError if the other cache was not made with the same arguments, but for its
            batch size, or the pattern depends on the batch entry; both are then unchanged.
        """
        self.check_join(other)
        with ordinary_tensors(self._state.keys.rows):
            self._state = self._state.joined(other._state)

    def check_join(self, other: "KVCache") -> None:
        """Raises ValueError as `join` does, which changes nothing."""
        if not isinstance(other, KVCache) or not self._is_like(other):
            raise ValueError(
                "join needs caches made with the same arguments but for the batch size, got "
                f"{shortened(repr(other))} for {shortened(repr(self))}; make both alike"
            )
        for cache in (self, other):
            cache._check_no_draft("join")
        if self.pattern.num_batches() is not None or not self._takes_parts:
            raise ValueError(
                "join needs a KVCache whose entries all follow one pattern, got "
                f"{shortened(repr(self))}; make a cache for each request"
            )

    def _is_like(self, other: "KVCache") -> bool:
        """Whether `other` was made with the arguments of this cache, but for the batch size."""
        one, two = (
            (type(x), x.pattern, x._dims, *(getattr(x._state, name) for name in SIZES))
            for x in (self, other)
        )
        kinds = zip(self._kind, other._kind, strict=True)  # None if the first keys will decide
        return one == two and all(None in pair or pair[0] == pair[1] for pair in kinds)

    def _take(self, name: str, index: Tensor | Sequence[int], size: int | None = None) -> None:
        """Keeps the batch entries that `index` lists, for `reorder`, `repeat` and `select`."""
        self._check_no_draft(name)
        if self.pattern.num_batches() is not None:
            raise ValueError(
                f"{name} cannot exchange batch entries, because they have different masks in the "
                f"pattern {shortened(str(self.pattern))}; make a cache for each entry"
            )
        with unseen_beside(self._state.keys.rows):
            entries = checks.checked_index(name, index, len(self.lengths))
        if size not in (None, len(entries)):
            raise ValueError(
                f"{name} needs an index of {size} entries, got {len(entries)}; select() takes an "
                "index of any size"
            )
        with ordinary_tensors(self._state.keys.rows):
            self._state = self._state.of_entries(entries.clone())  # a clone is no inference tensor

    def _check_no_draft(self, what: str) -> None:
        """Raises ValueError if a draft waits for `keep`.

        `what` is the refused call, for the error.
        """
        if self._state.draft is not None:
            raise ValueError(
                f"{what} needs a cache without a draft, got one of "
                f"{len(self._state.draft.parents)} tokens; call keep(path) first, or keep([])"
            )

    def _check(self, query: Tensor, key: Tensor, value: Tensor) -> None:
        """Raises ValueError unless new tokens have the shapes and the device of the cache."""
        if not (self._takes_shapes and is_shape_alone(query)):
            checks.refuse_tracers(query, key, value)
        batch, new, (width, value_width) = len(self.lengths), query.shape[2], self._dims
        expected = (
            (batch, self._state.heads, new, width),
            (batch, self._state.kv_heads, new, width),
            (batch, self._state.kv_heads, new, value_width),
        )
        shapes = query.shape, key.shape, value.shape
        if shapes != expected:
            raise ValueError(
                "attend needs query, key and value of equally many new tokens, with the shapes "
                f"{', '.join(map(str, expected))}, got "
                f"{', '.join(str(tuple(x)) for x in shapes)}; leave out tokens that are cached"
            )
        if (device := self._kind[1]) not in (None, key.device):
            raise ValueError(
                f"the cache is on {device}, got keys on {key.device}; move them with .to()"
            )

    def _check_dtype(self, key: Tensor) -> None:
        """Raises ValueError unless new keys have the dtype of the stored ones.

        Explains autocast.
        """
        if (dtype := self._kind[0]) not in (None, key.dtype):
            kind = key.device.type
            if autocasting(key) and key.dtype == torch.get_autocast_dtype(kind):
                raise ValueError(
                    f"the cache holds {dtype}, got keys that autocast makes {key.dtype}; call it "
                    f'under torch.autocast("{kind}", enabled=False), or make another cache with '
                    f"dtype={key.dtype}"
                )
            raise ValueError(
                f"the cache holds {dtype}, got keys of {key.dtype}; cast them with .to({dtype}), "
                "or make another cache"
            )
