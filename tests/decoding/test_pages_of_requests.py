"""Rows of unlike requests over keys in pages: against each request alone, and bit for bit."""

import pytest
import torch

import sparsering as sr
from sparsering.decoding.pages import Reach, attend_pages, work_of_pages

PATTERNS = {
    "full": sr.Causal(),
    "sliding": sr.SlidingWindow(149),
    "chunked": sr.ChunkedCausal(200),
    "sinks": sr.Causal() & (sr.SlidingWindow(149) | sr.GlobalTokens(40)),
}
PAST, NEW = (700, 0, 130, 5, 511, 399), (1, 90, 1, 140, 3, 1)  # tokens of requests, in pages before
D = 32


def dense(pattern, length, new):
    """The last rows of a pattern, bool [new, length]."""
    return pattern.to_dense(int(length)).bool()[..., -new:, :].view(new, int(length))


class Pages:
    """A tensor of pages in random order, NaN where no request has keys."""

    def __init__(self, dtype, page, kv_heads=2, seed=0):
        generator = torch.Generator().manual_seed(seed)
        lengths = [a + b for a, b in zip(PAST, NEW, strict=True)]
        counts = [-(-n // page) for n in lengths]
        order = torch.randperm(sum(counts) + 3, generator=generator)[: sum(counts)].split(counts)
        self.rows = [
            (table[:, None] * page + torch.arange(page)).flatten()[:n]
            for table, n in zip(order, lengths, strict=True)
        ]
        shape = (sum(counts) + 3) * page, kv_heads, D
        self.key, self.value = (torch.full(shape, torch.nan, dtype=dtype) for _ in range(2))
        generator = torch.Generator().manual_seed(7)  # equal numbers for all pages and orders
        self.tokens = []
        for rows in self.rows:
            shapes = ((len(rows), 2 * kv_heads, D), *2 * [(len(rows), kv_heads, D)])
            query, key, value = (torch.randn(x, generator=generator).to(dtype) for x in shapes)
            self.key[rows], self.value[rows] = key, value
            self.tokens.append((query, key, value))

    def attend(self, reach, requests, new=NEW, live=False, **options):
        """Rows of the last `new` tokens of some requests, [tokens, heads, D], in one call.

        With `live`, only the keys that a row sees are named.
        """
        ends = torch.tensor([len(self.rows[i]) - 1 for i in requests])
        n = [new[i] for i in requests]
        first = [0] * len(n)
        if live:
            seen = [dense(PATTERNS[reach], end + 1, m) for end, m in zip(ends, n, strict=True)]
            first = [int(x.any(0).nonzero()[0]) for x in seen]
        rows = [self.rows[i][a:] for i, a in zip(requests, first, strict=True)]
        query = torch.cat([self.tokens[i][0][-m:] for i, m in zip(requests, n, strict=True)])
        query, key, value = (x.transpose(0, 1)[None] for x in (query, self.key, self.value))
        lengths = [len(x) for x in rows]
        work = work_of_pages(
            query, key, n, lengths, torch.cat(rows), ends, Reach.of(PATTERNS[reach])
        )
        return attend_pages(query, key, value, work, scale=D**-0.5, **options)[0].transpose(0, 1)

    def expected(self, reach, requests, new=NEW, **options):
        """Computes these rows of each request alone by the reference in float64."""
        found = []
        for i in requests:
            query, key, value = (x.double().transpose(0, 1)[None] for x in self.tokens[i])
            out = sr.attention(
                query[:, :, -new[i] :], key, value, PATTERNS[reach], backend="reference", **options
            )
            found.append(out[0].transpose(0, 1))
        return torch.cat(found)


EVERY = tuple(range(len(PAST)))
TOLERANCE = {torch.float32: 3e-6, torch.bfloat16: 2e-2, torch.float16: 2e-3}


@pytest.mark.parametrize("page", [16, 100, 256])
@pytest.mark.parametrize("reach", PATTERNS)
def test_rows_are_those_of_each_request_alone(reach, page):
    pages = Pages(torch.float32, page)
    got = pages.attend(reach, EVERY)
    torch.testing.assert_close(
        got.double(), pages.expected(reach, EVERY), rtol=0, atol=TOLERANCE[torch.float32]
    )
    assert torch.equal(pages.attend(reach, EVERY, live=True), got)  # dead keys need no rows


@pytest.mark.parametrize("backend", ["cpu", "gather"])
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_dtypes_sinks_and_softcap(backend, dtype):
    pages, sink = Pages(dtype, 64), torch.linspace(-1, 1, 4)
    got = pages.attend(
        "sliding", EVERY, backend=backend, softcap=2.0, sink=sink.to(dtype)[None, :, None]
    )
    expected = pages.expected("sliding", EVERY, softcap=2.0, sink=sink.to(dtype).double())
    assert got.dtype == dtype
    torch.testing.assert_close(got.double(), expected, rtol=0, atol=TOLERANCE[dtype])


def test_triton_reads_pages_too():
    pages, few = Pages(torch.float32, 32), (0, 1, 5)
    got = pages.attend("sliding", few, backend="triton")
    expected = pages.expected("sliding", few)
    torch.testing.assert_close(got.double(), expected, rtol=0, atol=3e-6)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("reach", PATTERNS)
def test_bits_do_not_depend_on_company_chunks_or_places(reach, dtype):
    pages, moved = Pages(dtype, 64), Pages(dtype, 100, seed=1)
    with sr.batch_invariant():
        together = pages.attend(reach, EVERY).split(NEW)
        for i in EVERY:
            assert torch.equal(pages.attend(reach, (i,)), together[i])
            assert torch.equal(moved.attend(reach, (i,)), together[i])
        last = pages.attend(reach, EVERY, new=len(EVERY) * (1,))  # the last tokens, one by one
        assert torch.equal(last, torch.stack([x[-1] for x in together]))


def test_only_rows_of_requests_are_read_and_each_kind_is_a_pass():
    pages = Pages(torch.float32, 64)
    assert pages.key.isnan().any()
    query = torch.zeros(1, 4, sum(NEW), D)
    key = pages.key.transpose(0, 1)[None]
    lengths = [len(x) for x in pages.rows]
    ends = torch.tensor(lengths) - 1
    rest = torch.cat(pages.rows), ends, Reach.of(PATTERNS["sliding"])
    layout = work_of_pages(query, key, [*NEW], lengths, *rest).layout
    single, several = layout.passes
    assert (single.query_stop - single.query_start).tolist() == [[1, 1, 1]]
    assert not single.bitmaps.numel()
    keys = (single.key_stop - single.key_start).sum(), (several.key_stop - several.key_start).sum()
    assert keys == (150 + 131 + 150, 90 + 145 + 152)
    live = {
        row for rows, n in zip(pages.rows, NEW, strict=True) for row in rows[-149 - n :].tolist()
    }
    visited = set()
    for p in layout.passes:
        for a, b in zip(p.key_start[0].tolist(), p.key_stop[0].tolist(), strict=True):
            visited |= set(range(a, b))
    assert visited == live
    dense = layout.to_dense()[0, 0]
    places = torch.cat([torch.arange(n - m, n) for n, m in zip(lengths, NEW, strict=True)])
    seen = [min(p + 1, 150) for p in places.tolist()]
    assert dense.sum(1).tolist() == seen and layout.num_pairs == sum(seen)


@pytest.mark.parametrize(
    ("pattern", "reach"),
    [
        (sr.Causal(), Reach()),
        (sr.Full(), Reach()),
        (sr.SlidingWindow(None), Reach()),
        (sr.SlidingWindow(7, 7), Reach(left=7)),
        (sr.ChunkedCausal(8), Reach(chunk=8)),
        (sr.SlidingWindow(7) | sr.GlobalTokens(3, rows=False), Reach(left=7, always=3)),
        (sr.Causal() & (sr.GlobalTokens(2) | sr.ChunkedCausal(8)), Reach(chunk=8, always=2)),
        (sr.SlidingWindow(7, 0, 2), None),
        (sr.SlidingWindow(7) | sr.GlobalTokens(3, columns=False), None),
        (sr.SlidingWindow(7) & sr.ChunkedCausal(8), None),
        (sr.SlidingWindow(7) | sr.ChunkedCausal(8), None),
        (sr.LongNet((8, 16), (1, 2)), None),
        (sr.SlidingWindow(7) - sr.GlobalTokens(3), None),
    ],
    ids=str,
)
def test_the_reach_of_a_pattern_has_its_causal_pairs(pattern, reach):
    assert Reach.of(pattern) == reach
    if reach is not None:
        p, k = torch.arange(40)[:, None], torch.arange(40)
        pairs = (k <= p) & ((k >= reach.first(p)) | (k < reach.always))
        assert torch.equal(pairs, dense(pattern & sr.Causal(), 40, 40))
