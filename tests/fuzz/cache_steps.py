"""The steps of one drawn case on a decoding cache, each compared with one pass by the oracle."""

import copy
import itertools
import pickle
import re
from collections.abc import Callable, Sequence
from itertools import product
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from oracles.attention_oracle import arranged
from oracles.patterns_oracle import Spec, build, leaves
from torch import Tensor

from sparsering.kernels.rounding import from_store, to_store
from sparsering.selection import block_scores, select_blocks

from . import oracle
from .attack import Refused
from .calls import DTYPES, compare, present_pairs

if TYPE_CHECKING:
    from .caches import Decoding


class Run:
    """Runs the steps on a cache, and records the whole sequences of its entries, zero-padded."""

    def __init__(self, case: "Decoding") -> None:
        torch.manual_seed(case.seed)
        self.case, self.batch = case, case.batch
        self.refusal = ""  # why the contract refuses a step
        self.lengths, self.highest = [0] * case.batch, [0] * case.batch
        heads, dtype = case.num_heads, case.precision()
        self.widths = {"query": case.head_dim, "key": case.head_dim, "value": case.value_dim}
        shapes = {name: (heads if name == "query" else case.num_kv_heads, case.total, width)
                  for name, width in self.widths.items()}  # fmt: skip
        shapes |= {"out": (heads, case.total, case.value_dim)}
        self.rows = {name: torch.zeros(case.batch, *shape, dtype=dtype)
                     for name, shape in shapes.items()}  # fmt: skip
        of_sums = torch.float64 if dtype == torch.float64 else torch.float32
        for name in ("lse", "sink"):
            self.rows[name] = torch.zeros(case.batch, heads, case.total, dtype=of_sums)
        self.rows["fresh"] = torch.zeros(case.batch, case.total, dtype=torch.int64)
        self.here = [True] * case.total
        self.tables = case.tables(case.batch, heads, None)
        self.cache = case.cache()
        self.live: dict[int, int] = {}

    def run(self) -> None:
        self._check_held()
        for kind, *numbers in self.case.steps:
            getattr(self, f"_{kind}")(*numbers)
            self._check_held()
        self._verify()
        if self.refusal:
            raise Refused(self.refusal)

    # Each step fits its numbers to the lengths, and runs.

    def _attend(
        self,
        n: int,
        cut: tuple[int, ...] | None,
        stored: bool,
        plain: bool,
        with_lse: bool,
        keep: bool = True,
    ) -> None:
        case = self.case
        rest = [case.total - length for length in self.lengths]
        asked, n = n, min([n, *rest]) if cut is None else min(n, max(rest, default=0))
        if asked and not n:
            return
        new = [n] * self.batch
        if cut is not None and self.batch:
            new = [min(cut[b % len(cut)] % (n + 1), rest[b]) for b in range(self.batch)]
        stored = stored or len(set(zip(self.lengths, new, strict=True))) > 1
        given: dict[str, Any] = {} if stored else {"stored": False}
        given |= {} if keep else {"keep": False}
        if cut is not None:
            given["lengths"] = torch.tensor(new, dtype=torch.int64) if case.seed % 2 else new
        inputs = self._inputs(n)
        options, sink = self._options(n, plain)
        of_positions = {"distance_bias", "dropout_p"} & {*options}
        unlike = len(set(self.lengths)) > 1 or (any(self.lengths) and len(set(new)) > 1)
        if case.selection is not None and (not stored or (unlike and of_positions and any(new))):
            self.refusal = self._refused(lambda: self._call(inputs, **given, **options))
            return
        if not self._ends_well(new):
            message = self._refused(lambda: self._call(inputs, **given, **options))
            self._check_names_a_pair(message, new)
            if cut is None and (longer := self._next_length()) is not None:
                self._attend(longer - self.lengths[0], None, stored, plain, with_lse, keep)
            return
        out, lse = self._call(inputs, **given, **options, with_lse=with_lse)
        for b, (length, m) in enumerate(zip(self.lengths, new, strict=True)):
            found = {"out": out, "lse": lse, "sink": sink, **inputs}
            self._record(b, length, range(m), found, (1 + 2 * plain) + (lse is None))
            assert not out[b, :, m:].any(), "rows that are not new are not 0"
            assert lse is None or (lse[b, :, m:] == -torch.inf).all(), "lse of rows not new"
        if not stored and new:
            place = range(self.lengths[0], self.lengths[0] + new[0])
            self.here = [x and i not in place for i, x in enumerate(self.here)]
        self.lengths = [length + m for length, m in zip(self.lengths, new, strict=True)]
        self.highest = [max(x) for x in zip(self.highest, self.lengths, strict=True)]
        self._did("no tokens", n == 0)
        self._did("chunks", n > 1)
        self._did("return_lse", with_lse and n > 0)
        self._did("stored=False", not stored and n > 0)
        self._did("unlike lengths", len(set(self.lengths)) > 1)
        self._did("fewer than given", cut is not None and set(new) - {n})
        self._did("keep=False", not keep and n > 0)

    def _trial(self, *step: Any) -> None:
        """Attends from tokens that are not kept; the next steps go on as if it had not been."""
        self._verify()
        before, rows = self._state(), {name: x.clone() for name, x in self.rows.items()}
        counts = self.lengths, self.highest, self.here
        self._attend(*step, keep=False)
        self._verify()
        self.lengths, self.highest, self.here = counts
        self.rows = rows
        assert self._state() == before, "tokens that are not kept changed the cache"

    def _draft(
        self, n: int, numbers: tuple[int, ...], pick: int, plain: bool, with_lse: bool
    ) -> None:
        """Verifies a tree of n tokens, and keeps the path to token `pick`, or none."""
        case, cycle = self.case, itertools.cycle(numbers)
        room = case.total - max(self.lengths, default=0)
        parents: list[int] = []
        paths: dict[int, list[int]] = {-1: []}
        for token in range(n if all(self.here) and self.batch else 0):
            parent = token - 1 - next(cycle) % (token + 1)
            paths[token] = [*paths[parent], token]
            if len(paths[token]) > room:
                break
            parents.append(parent)
        if not (n := len(parents)):
            return
        inputs, (options, sink) = self._inputs(n), self._options(n, plain)
        tree: Any = torch.tensor(parents) if case.seed % 2 else parents
        if case.looks_ahead:  # within causality, which the oracle's rows are not
            return
        if case.selection is not None or any(name == "Tree" for name, *_ in leaves(case.spec)):
            self.refusal = self._refused(lambda: self._call(inputs, tree=tree, **options))
            return
        before = self._state()
        out, lse = self._call(inputs, tree=tree, **options, with_lse=with_lse)
        assert self.cache.lengths == self.lengths, "a draft counts before `keep`"
        self._refused(lambda: self._call(inputs, **options))
        path = paths[pick % (n + 1) - 1]
        self.cache.keep(torch.tensor(path) if case.seed % 2 else path)
        if not path:
            assert self._state() == before, "a draft of which nothing was kept changed the cache"
        dropped = not plain and case.dropout is not None  # drafts count tokens, not depths
        for b, length in enumerate(self.lengths):
            found = {"out": out, "lse": lse, "sink": sink, **inputs}
            fresh = 0 if dropped else (1 + 2 * plain) + (lse is None)
            self._record(b, length, path, found, fresh)
        self.lengths = [length + len(path) for length in self.lengths]
        self.highest = [max(x) for x in zip(self.highest, self.lengths, strict=True)]
        self._did("draft", path)

    def _ahead(self, entry: int, begin: int, end: int) -> np.ndarray:
        """[tokens of a call, keys after it] whether a query of the call sees the key."""
        if not self.case.looks_ahead:
            return np.zeros((0, 0), bool)
        scene = self.case.scene  # entries that were added have the masks of all
        pairs = present_pairs(self.case.whole, scene)[:, entry if entry < scene.batch else 0]
        return pairs[..., begin:end, end:].any((0, 1))

    def _ends_well(self, new: Sequence[int]) -> bool:
        """Whether no token of a call sees a key that comes after it."""
        calls = enumerate(zip(self.lengths, new, strict=True))
        return not any(self._ahead(b, begin, begin + n).any() for b, (begin, n) in calls)

    def _next_length(self) -> int | None:
        """The smallest length at which all entries may end a call; None if they differ."""
        if len(set(self.lengths)) != 1:
            return None
        begin, most = self.lengths[0], self.case.total
        ends = (n for n in range(begin + 1, most + 1) if self._ends_well([n - begin] * self.batch))
        return next(ends, None)

    def _check_names_a_pair(self, message: str, new: Sequence[int]) -> None:
        """Checks the token, the key and the end that an error names."""
        found = re.match(r"token (\d+) sees key (\d+), which has not come: the call ends", message)
        assert found, message
        query, key = map(int, found.groups())
        named = False
        for b, (begin, n) in enumerate(zip(self.lengths, new, strict=True)):
            ahead, end = self._ahead(b, begin, begin + n), begin + n
            if begin <= query < end <= key and ahead[query - begin, key - end]:
                named = True
                later = re.search(r"let the call end at (\d+) tokens", message)
                assert later and not self._ahead(b, begin, int(later[1])).any(), message
        assert named, f"no token sees that key: {message}"
        self._did("looks ahead", True)

    def _tokens(self, count: int, plain: bool, with_lse: bool) -> None:
        for _ in range(count):
            before = list(self.lengths)
            self._attend(1, None, True, plain, with_lse)
            assert self.cache.lengths == self.lengths
            self._did("single tokens", before != self.lengths)

    def _crop(self, back: int) -> None:
        if not self.batch or len(set(self.lengths)) > 1:
            return
        self._verify()
        length, case = self.lengths[0], self.case
        target = max(0, length - back)
        if target < length - case.rollback:
            self._refused(lambda: self.cache.crop(target))
            self._did("refused step", True)
            return
        if any(self._ahead(b, 0, target).any() for b in range(self.batch)):
            message = self._refused(lambda: self.cache.crop(target))
            assert "has seen" in message or "crop takes" in message, message
            return
        if target < max(self.highest) - case.rollback:  # the contract allows either outcome
            before = self._state()
            try:
                self.cache.crop(target)
            except ValueError:
                assert self._state() == before, "a refused crop changed the cache"
                return
        else:
            self.cache.crop(target)
        self.lengths = [target] * self.batch
        self.rows["fresh"][:, target:] = 0
        self.here = [x or i >= target for i, x in enumerate(self.here)]
        self._did("crop", target < length)

    def _take(self, kind: str, numbers: tuple[int, ...]) -> None:
        if not self.batch:
            return
        self._verify()
        if kind == "repeat":
            given: Any = 1 + numbers[0] % 2
            index = [b for b in range(self.batch) for _ in range(given)]
        else:
            cycle = itertools.islice(itertools.cycle(numbers), self.batch)
            listed = list(cycle) if kind == "reorder" else list(numbers)
            index = [i % self.batch for i in listed]
            given = torch.tensor(index) if self.case.seed % 2 else index
        take = getattr(self.cache, kind)
        if kind == "join":
            index, given = list(range(self.batch)), copy.deepcopy(self.cache)
        joins_none = kind == "join" and self.case.selection is not None
        if joins_none or build(self.case.spec).num_batches() is not None:
            self.refusal = self._refused(lambda: take(given))
            return
        if kind == "join":  # the first entries with the others
            cut = numbers[0] % (self.batch + 1)
            given.select(index[cut:])
            self.cache.select(index[:cut])
        take(given)
        self.batch = len(index)
        self.rows = {name: x[index] for name, x in self.rows.items()}
        self.lengths, self.highest = ([x[i] for i in index] for x in (self.lengths, self.highest))
        self._did(kind, True)

    def _load(self, n: int, missing: tuple[int, ...], more: int) -> None:
        case = self.case
        if any(self.lengths) or not self.batch:
            return
        n = min(n, case.total)
        length = min(n + more, case.total)
        inputs = self._inputs(length)
        gone = {i % n for i in missing} if n else set()
        here = [i for i in range(n) if i not in gone]
        key, value = (inputs[name].to(case.precision()) for name in ("key", "value"))
        if case.selection is not None and len(here) < length:
            load = lambda: self.cache.load(key[:, :, here], value[:, :, here], here, length=length)  # noqa: E731
            self.refusal = self._refused(load)
            return
        if not self._ends_well([length] * self.batch):
            message = self._refused(lambda: self.cache.load(key[:, :, :length], value))
            self._check_names_a_pair(message, [length] * self.batch)
            return
        passed: list[Tensor] = [x[:, :, here].clone() for x in (key, value)]
        if len(here) == length:
            self.cache.load(*passed)
        else:
            self.cache.load(*passed, torch.tensor(here), length=length)
        _overwrite(*passed)
        for name, x in inputs.items():
            self.rows[name][:, :, :length] = x.to(self.rows[name].dtype)
        self.here = [i in here or i >= length for i in range(case.total)]
        self.lengths, self.highest = [length] * self.batch, [length] * self.batch
        self._did("load", True)

    def _copy(self, by_pickle: bool) -> None:
        """Continues with a copy, after a step of the original, which must not change the copy."""
        first = self.cache
        by_pickle = by_pickle and "MaskMod" not in str(self.case.spec)  # a lambda has no pickle
        self.cache = pickle.loads(pickle.dumps(first)) if by_pickle else copy.deepcopy(first)
        before = self._state()
        n = min([3, *(self.case.total - length for length in self.lengths)])
        if self._ends_well([n] * self.batch):
            self._call(self._inputs(n), cache=first)
        assert self._state() == before, "a copy shares its state"
        self._did("copy", True)

    def _wrong(self, which: str) -> None:
        """Runs a step that must raise and leave the cache unchanged."""
        case, cache, inputs = self.case, self.cache, self._inputs(1)
        longest, dtype = max(self.lengths, default=0), case.precision()
        key, value = inputs["key"], inputs["value"]
        attend: Callable[..., Any] = lambda **given: lambda: self._call(inputs, **given)  # noqa: E731
        other = torch.float32 if dtype != torch.float32 else torch.float64
        twice = {**inputs, **{name: torch.cat((inputs[name],) * 2, 2) for name in ("key", "value")}}
        wide = {**inputs, "key": torch.cat((key, key), 3)}
        many = self._inputs(case.total - longest + 1) if which == "past max_length" else inputs
        sink = torch.zeros(case.num_heads + 1, dtype=case.table_dtype)
        steps: dict[str, Callable[[], Any] | None] = {
            "lengths too large": attend(lengths=[2] * self.batch) if self.batch else None,
            "lengths of too few entries": attend(lengths=[1] * (self.batch + 1)),
            "crop forwards": lambda: cache.crop(longest + 1),
            "crop too far": lambda: cache.crop(longest - case.rollback - 1),
            "keys of another dtype": (
                None if case.autocast else lambda: self._call({**inputs, "key": key.to(other)})
            ),
            "keys of another width": lambda: self._call(wide),
            "more keys than queries": lambda: self._call(twice),
            "unknown backend": lambda: cache.attend(*inputs.values(), backend="none"),
            "negative softcap": attend(softcap=-1.0),
            "q_start": attend(q_start=longest),
            "sink of another shape": attend(sink=sink),
            "index out of range": lambda: cache.select([self.batch]),
            "past max_length": (
                (lambda: self._call(many)) if case.has_max_length and self.batch else None
            ),
            "load after tokens": (lambda: cache.load(key, value)) if longest else None,
        }
        step = steps[which]
        if step is None:
            return
        before = self._state()
        try:
            step()
        except (ValueError, NotImplementedError):
            pass
        else:
            raise AssertionError(f"no error: {which}")
        assert self._state() == before, f"a refused step changed the cache: {which}"
        self._did("refused step", True)

    # Helpers of the steps.

    def _record(
        self,
        entry: int,
        length: int,
        tokens: Sequence[int],
        found: dict[str, Tensor | None],
        fresh: int,
    ) -> None:
        """Adds some new tokens to the whole sequence of an entry, and how to compare their rows."""
        place = slice(length, length + len(tokens))
        for name, x in found.items():
            if x is not None:
                self.rows[name][entry, :, place] = x[entry, :, list(tokens)].to(
                    self.rows[name].dtype
                )
        self.rows["fresh"][entry, place] = fresh

    def _did(self, name: str, really: Any) -> None:
        if really:
            self.case.done.add(name)

    def _inputs(self, n: int) -> dict[str, Tensor]:
        case = self.case
        found = {}
        for name, width in self.widths.items():
            heads = case.num_heads if name == "query" else case.num_kv_heads
            arrange = case.arrange
            if arrange == "one head expanded" and (name == "query" or not heads):
                arrange = "contiguous"
            x = arranged((self.batch, heads, n, width), arrange, DTYPES[case.dtype])
            if case.store is not None and name != "query":  # numbers that 8 bits hold
                rounded = from_store(to_store(x, case.store), x.dtype)
                x = rounded if arrange == "one head expanded" else x.copy_(rounded)
            found[name] = x
        found["query"] = found["query"] * case.magnitude if case.magnitude > 1 else found["query"]
        return found

    def _options(self, n: int, plain: bool) -> tuple[dict[str, Any], Tensor | None]:
        """Returns options of `attend`, and the sink of each new token."""
        case = self.case
        if plain:
            return {}, None
        names = ("scale", "softcap", "block_size")
        found = {name: x for name in names if (x := getattr(case, name)) is not None}
        found |= self.tables
        if case.dropout is not None:
            found["dropout_p"], found["dropout_seed"] = case.dropout
        if case.sink is None:
            return found, None
        if case.sink == "[B, H, N]":
            found["sink"] = torch.randn(self.batch, case.num_heads, n).to(case.table_dtype)
            return found, found["sink"]
        return found, found["sink"].view(1, -1, 1).expand(self.batch, -1, n)

    def _call(
        self, inputs: dict[str, Tensor], cache: Any = None, with_lse: bool = False, **options: Any
    ) -> tuple[Tensor, Tensor | None]:
        case, cache = self.case, self.cache if cache is None else cache
        if case.backend != "default":
            options["backend"] = case.backend
        if with_lse:
            options["return_lse"] = True
        before, own = self._state(), {name: x.clone() for name, x in inputs.items()}
        passed, options = list(inputs.values()), {n: _copied(x) for n, x in options.items()}
        inputs.update(own)
        try:
            with torch.autocast("cpu", torch.bfloat16, enabled=case.autocast):
                found = cache.attend(*passed, **options)
        except (NotImplementedError, ImportError) as refusal:
            assert self._state() == before, "a refused step changed the cache"
            missing = isinstance(refusal, ImportError)
            assert case.backend not in ("default", "reference") or missing, refusal
            raise Refused(str(refusal)) from None
        _overwrite(*passed, *options.values())  # what the caller does to its tensors is its own
        out, lse = found if with_lse else (found, None)
        n = inputs["query"].shape[2]
        assert out.dtype == case.precision(), out.dtype
        assert out.shape == (self.batch, case.num_heads, n, case.value_dim), out.shape
        assert lse is None or lse.shape == out.shape[:3], lse
        return out, lse

    def _refused(self, step: Callable[[], Any]) -> str:
        """Runs a step that must be refused and change nothing; returns the error message."""
        before = self._state()
        try:
            step()
        except ValueError as error:
            assert self._state() == before, f"a refused step changed the cache: {error}"
            return str(error)
        raise AssertionError("a step was taken that must be refused")

    def _state(self) -> tuple[Any, ...]:
        cache = self.cache
        held = [
            cache.positions(head, entry).tolist()
            for entry, head in product(range(len(cache.lengths)), range(self.case.num_kv_heads))
        ]
        # A step that raises may leave empty memory for block summaries allocated.
        nbytes = cache.nbytes if self.case.selection is None else 0
        return cache.lengths, cache.length, cache.kept, nbytes, repr(cache), held

    def _check_held(self) -> None:
        """Checks that the cache has all keys that later queries visit, and at most a page more."""
        case, cache = self.case, self.cache
        assert cache.lengths == self.lengths, f"lengths {cache.lengths}, not {self.lengths}"
        assert cache.length == max(self.lengths, default=0)
        most = [0] * case.num_kv_heads
        for entry, length in enumerate(self.lengths):
            for head in range(case.num_kv_heads):
                found = cache.positions(head, entry).tolist()
                assert found == sorted(set(found)), f"positions {found}"
                assert all(0 <= k < length for k in found), f"positions {found}"
                least = {k for k in self._visited(head, length) if self.here[k]}
                assert least <= set(found), f"evicted, yet visited: {sorted(least - set(found))}"
                gone = [k for k in found if not self.here[k]]
                assert not gone, f"held, yet stored elsewhere: {gone}"
                most[head] = max(most[head], len(found))
        assert cache.kept == max(most, default=0), f"kept {cache.kept}, positions {most}"
        if not self.lengths:
            return
        back = case.rollback + case.page_size // 8
        first = max(0, min(self.lengths) - back)
        bound = max(self._most_live(x) for x in range(first, cache.length + 1)) + case.page_size
        assert cache.kept <= bound + case.rollback, f"kept {cache.kept} of at most {bound}"
        slot = (case.head_dim + case.value_dim) * torch.empty(
            0, dtype=case.precision()
        ).element_size()
        if case.store is not None:  # a byte for each number, and two scales
            slot = case.head_dim + case.value_dim + 8
        least = self.batch * sum(most) * slot
        assert cache.nbytes >= least, f"nbytes {cache.nbytes} below {least}"

    def _visited(self, head: int, length: int) -> list[int]:
        """Returns the keys below a length that later queries visit, by the oracle."""
        case = self.case
        if case.selection is not None:
            return list(range(length)) if length < case.total else []
        group = case.num_heads // case.num_kv_heads
        present = present_pairs(case.whole, case.scene)[:, :, head * group : (head + 1) * group]
        return np.nonzero(present[..., length:, :length].any((0, 1, 2, 3)))[0].tolist()

    def _most_live(self, length: int) -> int:
        """Most live keys of a head, by the library, since it includes queries beyond `total`."""
        case = self.case
        if case.selection is not None:
            return length
        if length not in self.live:
            max_length = self.case.total if case.has_max_length else None
            heads = {"num_heads": case.num_heads, "num_kv_heads": case.num_kv_heads}
            found = build(case.spec).live_keys(length, **heads, max_length=max_length)
            self.live[length] = max((len(x) for x in found), default=0)
        return self.live[length]

    def _verify(self) -> None:
        """Compares all rows since the last comparison."""
        case, fresh = self.case, self.rows["fresh"]
        for with_options in (True, False):
            variant = (1, 2) if with_options else (3, 4)
            asked = (fresh == variant[0]) | (fresh == variant[1])
            if not asked.any():
                continue
            spec = case.whole
            scale = case.scale if with_options else None
            if case.selection is not None:
                spec, stable = self._selected(scale)
                asked &= stable
            if not all(self.here):
                spec = ("&", spec, ("KeyMask", tuple(self.here)))
            call = case.call(with_options, spec, self.batch)
            tensors = {name: self.rows[name] for name in ("query", "key", "value")}
            if with_options:
                tensors |= self.tables | ({"sink": self.rows["sink"]} if case.sink else {})
            nothing = [torch.zeros_like(self.rows[name]) for name in ("out", "lse")]
            whole = call.expected(tensors, *nothing)
            with_lse = asked & (fresh == variant[0])
            for name, rows in (("out", asked), ("lse", with_lse)):
                chosen = rows.numpy()
                got = {name: self.rows[name].transpose(1, 2)[rows]}
                exact, magnitude = (
                    {name: x[name].swapaxes(1, 2)[chosen]} for x in (whole.exact, whole.magnitude)
                )
                part = oracle.Results(exact, magnitude, whole.largest_score)
                compare(got, part, case.precision())
        self.rows["fresh"] = torch.zeros_like(fresh)

    def _selected(self, scale: float | None) -> tuple[Spec, Tensor]:
        """Returns the selected blocks, and the tokens whose selection rounding cannot change."""
        chosen = self.case.selection
        assert chosen is not None
        query, key = self.rows["query"], self.rows["key"]
        scores = block_scores(query, key, chosen.block_size, method=chosen.method, scale=scale)
        found = []
        rules = {"top_p": chosen.top_p, "sink": chosen.sink, "local": chosen.local}
        for noise in (0.0, 1e-4, 1e-4, 1e-4):
            near = scores + noise * torch.randn(scores.shape) * (
                1 + scores.abs().nan_to_num(0, 0, 0)
            )
            found.append(select_blocks(near, chosen.k, block_size=chosen.block_size, **rules))
        sets = [x.sort(-1).values for x in found]
        stable = torch.stack([(x == sets[0]).all(-1).all(1) for x in sets]).all(0)
        table = _tuples(found[0])
        return ("&", ("SelectedBlocks", table, chosen.block_size, 1, 0), ("Causal",)), stable


def _copied(x: Any) -> Any:
    return x.clone() if isinstance(x, Tensor) else x


def _overwrite(*tensors: Any) -> None:
    """Fills the memory of tensors, also of those whose elements share it."""
    for x in tensors:
        if isinstance(x, Tensor) and x.numel():
            whole = torch.empty(0, dtype=x.dtype).set_(x.untyped_storage())
            whole.fill_(torch.nan if x.is_floating_point() else 0)


def _tuples(x: Tensor) -> Any:
    def nested(part: Any) -> Any:
        return tuple(map(nested, part)) if isinstance(part, list) else part

    return nested(x.tolist())
