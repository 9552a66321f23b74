"""Decoding that chooses blocks, against scores, selection and attention of the whole sequence."""

import itertools

import pytest
import torch
from helpers.thinned import thinned
from torch import Tensor

import sparsering as sr
from sparsering.selection import BlockScorer, BlockSummaries, block_scores, select_blocks

OPTIONS = {"k": 3, "block_size": 16, "num_heads": 4}


def sequence(length: int = 200, batch: int = 2) -> tuple[Tensor, Tensor, Tensor]:
    query = torch.randn(batch, 4, length, 8, dtype=torch.float64)
    key, value = torch.randn(2, batch, 2, length, 8, dtype=torch.float64)
    return query, key, value


def whole(inputs: tuple[Tensor, ...], k: int = 3, method: str = "sub", **selection) -> Tensor:
    query, key, value = inputs
    scores = block_scores(query, key, 16, method=method)
    chosen = select_blocks(scores, k, block_size=16, **selection)
    return sr.attention(query, key, value, sr.SelectedBlocks(chosen, 16, 1) & sr.Causal())


def attended(cache: sr.KVCache, inputs: tuple[Tensor, ...], *steps: int) -> Tensor:
    outs, first = [], cache.length
    for n in steps:
        outs.append(cache.attend(*(x[:, :, first : first + n] for x in inputs)))
        first += n
    return torch.cat(outs, 2)


def close(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and bool(((a - b).abs() <= 1e-12).all())


@pytest.mark.parametrize("method", ["mean", "sub", "gauss", "bounds", "exact"])
def test_steps_equal_the_whole_sequence(method):
    inputs = sequence()
    cache = sr.SelectedCache(2, 2, 8, method=method, page_size=32, **OPTIONS)
    found = attended(cache, inputs, 37, *[1] * 60, 2, 15, 16, 70)
    assert close(found, whole(inputs, method=method))
    assert cache.length == cache.kept == 200
    assert cache.positions(1).tolist() == list(range(200))


@pytest.mark.parametrize("steps", [(100,), (60, 40), (90, *[1] * 10), (97, 1, 2)])
def test_the_last_step_of_a_full_cache_sees_all_keys(steps):
    """Behind the last token no key is needed, so that the step itself drops them all."""
    inputs = sequence(100)
    for page_size in (16, 32):
        cache = sr.SelectedCache(2, 2, 8, page_size=page_size, max_length=100, **OPTIONS)
        assert close(attended(cache, inputs, *steps), whole(inputs))
        assert cache.length == 100


@pytest.mark.parametrize("selection", [{"top_p": 0.6}, {"sink": 0, "local": 2}, {"k": 12}])
def test_every_rule_of_selection(selection):
    inputs = sequence(150)
    cache = sr.SelectedCache(2, 2, 8, **{**OPTIONS, **selection})
    assert close(attended(cache, inputs, *[1] * 20, 100, *[1] * 30), whole(inputs, **selection))


def test_options_of_attention():
    inputs, sink = sequence(60), torch.randn(4, dtype=torch.float64)
    cache = sr.SelectedCache(2, 2, 8, **OPTIONS)
    out = attended(cache, inputs, 59)
    token = [x[:, :, 59:60] for x in inputs]
    out, lse = cache.attend(*token, scale=0.9, sink=sink, softcap=2.0, return_lse=True)
    scores = block_scores(*inputs[:2], 16, scale=0.9)
    chosen = select_blocks(scores, 3, block_size=16)
    pattern = sr.SelectedBlocks(chosen, 16, 1) & sr.Causal()
    expected = sr.attention(*inputs, pattern, scale=0.9, sink=sink, softcap=2.0, return_lse=True)
    assert close(out, expected[0][:, :, 59:]) and close(lse, expected[1][:, :, 59:])


@pytest.mark.parametrize(("begin", "back"), thinned(2, [160, 130, 180], [1, 5, 20, 64]))
def test_crop_takes_back_tokens_and_their_summaries(begin, back):
    inputs, guess = sequence(), sequence()
    cache = sr.SelectedCache(2, 2, 8, page_size=32, rollback=64, **OPTIONS)
    attended(cache, inputs, begin - back)
    attended(cache, guess, *[1] * (back - back // 2), back // 2)
    cache.crop(begin - back)
    found = attended(cache, inputs, *[1] * 10, 200 - begin + back - 10)
    assert close(found, whole(inputs)[:, :, begin - back :])


def test_crop_refuses_and_changes_nothing():
    inputs = sequence()
    cache = sr.SelectedCache(2, 2, 8, rollback=4, **OPTIONS)
    cache.crop(0)
    attended(cache, inputs, 150)
    for length in (145, 151):
        with pytest.raises(ValueError, match="crop takes"):
            cache.crop(length)
    assert close(attended(cache, inputs, 50), whole(inputs)[:, :, 150:])


def test_beams_reorder_repeat_and_select():
    inputs = sequence(120)
    cache = sr.SelectedCache(2, 2, 8, page_size=32, **OPTIONS)
    attended(cache, inputs, 90)
    cache.repeat(2)
    cache.reorder([3, 0, 1, 2])
    cache.select([0, 3, 1])  # of 1 0 0 1
    order = [1, 1, 0]
    taken = tuple(x[order] for x in inputs)
    assert close(attended(cache, taken, *[1] * 20, 10), whole(taken)[:, :, 90:])


def test_a_prompt_that_was_attended_elsewhere():
    inputs = sequence(100)
    cache = sr.SelectedCache(2, 2, 8, **OPTIONS)
    cache.load(inputs[1][:, :, :70], inputs[2][:, :, :70])
    assert close(attended(cache, inputs, *[1] * 30), whole(inputs)[:, :, 70:])
    with pytest.raises(ValueError, match="keys of all tokens"):
        sr.SelectedCache(2, 2, 8, **OPTIONS).load(*inputs[1:], torch.arange(100))


def test_a_step_compiles():
    torch._dynamo.reset()
    inputs = sequence(40)
    cache = sr.SelectedCache(2, 2, 8, **OPTIONS)
    step = torch.compile(lambda q, k, v: cache.attend(q, k, v), fullgraph=True, backend="eager")
    attended(cache, inputs, 30)
    outs = [step(*(x[:, :, i : i + 1] for x in inputs)) for i in range(30, 40)]
    assert close(torch.cat(outs, 2), whole(inputs)[:, :, 30:])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_halves(dtype):
    inputs = tuple(x.to(dtype) for x in sequence(100))
    cache = sr.SelectedCache(2, 2, 8, **OPTIONS)
    found = attended(cache, inputs, 60, *[1] * 40)
    assert found.dtype == dtype
    error = (found.double() - whole(inputs).double()).abs()
    assert error.max() <= (1e-5 if dtype == torch.float32 else 2e-2)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"k": 1}, "at most k=1"),
        ({"method": "median"}, "method must be one of"),
        ({"method": "antidiagonal"}, "parts must divide"),
        ({"parts": 3}, "parts must divide"),
        ({"block_size": 0}, "block_size must be at least 1"),
        ({"top_p": 2.0}, "top_p must be"),
        ({"num_heads": -1}, "num_heads must be at least 0"),
    ],
)
def test_what_does_not_fit_is_said(options, message):
    with pytest.raises(ValueError, match=message):
        sr.SelectedCache(2, 2, 8, **{**OPTIONS, **options})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lengths": [1, 2]}, "lengths must be 2 ints from 0 to 1"),
        ({"valid": torch.ones(2, 3).bool()}, "valid must be bool"),
        ({"tree": [-1]}, "no tree"),
        ({"stored": False}, "stored=False"),
        ({"q_start": 3}, "attend takes no q_start"),
        ({"softcap": -1.0}, "softcap"),
        ({"backend": "none"}, "backend"),
        ({"key": torch.ones(2, 2, 1, 8)}, "holds torch.float64|share a dtype"),
    ],
)
def test_a_step_that_does_not_fit_changes_nothing(options, message):
    inputs = sequence(100)
    cache = sr.SelectedCache(2, 2, 8, page_size=32, **OPTIONS)
    attended(cache, inputs, 64)
    token = {n: x[:, :, :1] for n, x in zip(("query", "key", "value"), inputs, strict=True)}
    with pytest.raises(ValueError, match=message):
        cache.attend(**{**token, **options})
    assert cache.length == 64
    assert close(attended(cache, inputs, *[1] * 36), whole(inputs)[:, :, 64:])


def test_a_refused_step_holds_no_more_memory():
    inputs = sequence(100)
    cache = sr.SelectedCache(2, 2, 8, page_size=32, **OPTIONS)
    attended(cache, inputs, 16)
    before, step = cache.nbytes, [x[:, :, 16:90] for x in inputs]  # fills several blocks
    with pytest.raises(ValueError, match="softcap"):
        cache.attend(*step, softcap=-1.0)
    assert cache.nbytes == before
    assert close(cache.attend(*step), whole(inputs)[:, :, 16:90])


def test_summaries_alone_score_as_block_scores_does():
    query, key, _ = sequence()
    summaries = BlockSummaries(16)
    for first, stop in ((0, 50), (50, 51), (51, 64), (64, 130), (130, 200)):
        found = summaries.scores(query[:, :, first:stop], key[:, :, :stop], scale=0.5)
        expected = block_scores(query[:, :, first:stop], key[:, :, :stop], 16, scale=0.5)
        assert torch.equal(found.isneginf(), expected.isneginf())
        seen = ~expected.isneginf()
        assert ((found - expected)[seen].abs() <= 1e-6).all()
    summaries.crop(70)
    key[:, :, 70:] += 1
    found = summaries.scores(query, key)
    assert ((found - block_scores(query, key, 16)).nan_to_num(0, 0, 0).abs() <= 1e-6).all()
    with pytest.raises(ValueError, match="as many queries as keys, 10, got 200"):
        summaries.scores(query, key[:, :, :10])
    assert summaries.nbytes == 2 * 2 * 4 * 13 * 8 * 8  # with room for one more block


def scorer_with_weights(**options) -> BlockScorer:
    """One whose pooling is not the mean that it begins as, in float64."""
    scorer = BlockScorer(8, 2, 16, index_dim=5, **options).double()
    torch.nn.init.normal_(scorer.pool)
    return scorer


def test_a_learned_scorer_scores_from_summaries_as_from_scratch():
    (query, key, _), scorer = sequence(), scorer_with_weights()
    summaries = BlockSummaries(16, method=scorer)
    steps = [0, 1, 15, 16, 17, 50, 51, 64, 130, 144, 145, 200]
    for first, stop in itertools.pairwise(steps):
        found = summaries.scores(query[:, :, first:stop], key[:, :, :stop], scale=0.5)
        expected = scorer(query[:, :, first:stop], key[:, :, :stop])
        assert found.dtype == expected.dtype == torch.float64
        assert not found.requires_grad
        assert torch.equal(found.isneginf(), expected.isneginf())
        assert close(found.nan_to_num(neginf=0), expected.nan_to_num(neginf=0))
    summaries.crop(70)
    key[:, :, 70:] += 1
    found = summaries.scores(query[:, :, 100:], key)
    expected = scorer(query[:, :, 100:], key)
    assert close(found.nan_to_num(neginf=0), expected.nan_to_num(neginf=0))


def test_a_step_of_a_learned_scorer_reads_its_own_block_of_keys_alone():
    (query, key, _), scorer = sequence(), scorer_with_weights()
    summaries = BlockSummaries(16, method=scorer)
    summaries.scores(query[:, :, :198], key[:, :, :198])
    unread = key.clone()
    unread[:, :, :192] = torch.nan
    found = summaries.scores(query[:, :, 198:199], unread[:, :, :199])
    assert close(found, scorer(query[:, :, 198:199], key[:, :, :199]))
    assert summaries.nbytes == 2 * 2 * 13 * 5 * 8


def test_steps_of_a_learned_scorer_equal_the_whole_sequence():
    inputs, scorer = sequence(), scorer_with_weights()
    cache = sr.SelectedCache(2, 2, 8, method=scorer, page_size=32, rollback=20, **OPTIONS)
    found = attended(cache, inputs, 37, *[1] * 60, 2, 15, 16)
    cache.crop(110)
    found = torch.cat((found[:, :, :110], attended(cache, inputs, 20, *[1] * 70)), 2)
    chosen = select_blocks(scorer(*inputs[:2]), 3, block_size=16)
    pattern = sr.SelectedBlocks(chosen, 16, 1) & sr.Causal()
    assert close(found, sr.attention(*inputs, pattern))
    of_means = BlockScorer(8, 2, 16, index_dim=5).double()  # or another scorer would do as well
    others = select_blocks(of_means(*inputs[:2]), 3, block_size=16)
    assert not torch.equal(chosen, others)


@pytest.mark.parametrize("options", [{"query_block": 16}, {"causal": False}])
def test_scorers_that_know_later_tokens_keep_no_summaries(options):
    with pytest.raises(ValueError, match="must have block_size=16, query_block=1 and causal=True"):
        sr.SelectedCache(1, 2, 8, method=scorer_with_weights(**options), **OPTIONS)
    with pytest.raises(ValueError, match="pass block_size=16"):
        BlockSummaries(32, method=scorer_with_weights())


def alone(inputs: tuple[Tensor, ...], entry: int, length: int) -> Tensor:
    """Output [1, H, length, D] of the first tokens of one entry in a cache of its own."""
    own = tuple(x[entry : entry + 1, :, :length] for x in inputs)
    return whole(own) if length else own[0]


def stepped(
    cache: sr.KVCache, inputs: tuple[Tensor, ...], new: list[int], n: int, **options
) -> list[Tensor]:
    """Feeds `new[i]` tokens of each entry, with NaN as padding up to n; returns their outputs."""
    starts = cache.lengths
    tokens = [torch.full((len(new), x.shape[1], n, x.shape[3]), torch.nan).to(x) for x in inputs]
    for entry, (first, count) in enumerate(zip(starts, new, strict=True)):
        for to, x in zip(tokens, inputs, strict=True):
            to[entry, :, :count] = x[entry, :, first : first + count]
    out, lse = cache.attend(*tokens, lengths=new, return_lse=True, **options)
    for entry, count in enumerate(new):
        assert not out[entry, :, count:].any() and lse[entry, :, count:].isneginf().all()
    return [out[entry, :, :count] for entry, count in enumerate(new)]


@pytest.mark.parametrize("page_size", [16, 32])
@pytest.mark.parametrize("method", ["sub", "bounds", "exact"])
def test_entries_of_unlike_lengths_choose_as_alone(method, page_size, monkeypatch):
    monkeypatch.setattr("sparsering.decoding.selected_cache._AT_A_TIME", 2000)
    inputs = sequence(200, 3)
    cache = sr.SelectedCache(3, 2, 8, method=method, page_size=page_size, **OPTIONS)
    found: list[list[Tensor]] = [[], [], []]
    steps = [([37, 90, 0], 95)] + [([1, 1, 1], 1)] * 20 + [([20, 1, 33], 33), ([0, 1, 16], 17)]
    steps += [([2, 2, 2], 2)] * 15
    for new, n in steps:
        for parts, out in zip(found, stepped(cache, inputs, new, n), strict=True):
            parts.append(out)
    for entry, parts in enumerate(found):
        length = cache.lengths[entry]
        own = tuple(x[entry : entry + 1, :, :length] for x in inputs)
        assert close(torch.cat(parts, 1)[None], whole(own, method=method))


def test_entries_of_unlike_lengths_with_a_learned_scorer_and_beams():
    inputs, scorer = sequence(150, 2), scorer_with_weights()
    cache = sr.SelectedCache(2, 2, 8, method=scorer, page_size=32, **OPTIONS)
    stepped(cache, inputs, [70, 33], 70)
    cache.select([1, 0, 1])
    inputs = tuple(x[[1, 0, 1]] for x in inputs)
    stepped(cache, inputs, [3, 3, 3], 3, keep=False)
    found = [stepped(cache, inputs, [1, 1, 1], 1) for _ in range(40)]
    for entry, length in enumerate([33, 70, 33]):
        own = tuple(x[entry : entry + 1, :, : length + 40] for x in inputs)
        chosen = select_blocks(scorer(*own[:2]), 3, block_size=16)
        pattern = sr.SelectedBlocks(chosen, 16, 1) & sr.Causal()
        out = torch.cat([step[entry] for step in found], 1)[None]
        assert close(out, sr.attention(*own, pattern)[:, :, length:])
    cache.select([0, 2])  # of equal lengths again, behind the slots of a longer entry
    inputs = tuple(x[[0, 2]] for x in inputs)
    out = stepped(cache, inputs, [5, 5], 5)
    own = tuple(x[:, :, :78] for x in inputs)
    chosen = select_blocks(scorer(*own[:2]), 3, block_size=16)
    pattern = sr.SelectedBlocks(chosen, 16, 1) & sr.Causal()
    assert close(torch.stack(out), sr.attention(*own, pattern)[:, :, 73:])


@pytest.mark.parametrize("kind", ["selected", "plain"])
def test_a_prompt_with_padding_on_the_left(kind):
    """Each text of a padded batch, whose padding is NaN, gets what it gets alone."""
    inputs, lengths = sequence(130, 3), [61, 90, 0]
    if kind == "selected":
        cache = sr.SelectedCache(3, 2, 8, page_size=16, **OPTIONS)
        right = alone
    else:
        cache = sr.KVCache(sr.SlidingWindow(20), 3, 2, 8, num_heads=4, page_size=16)

        def right(inputs, entry, length):
            own = tuple(x[entry : entry + 1, :, :length] for x in inputs)
            return sr.attention(*own, sr.SlidingWindow(20))

    padded = [torch.full((3, x.shape[1], 90, 8), torch.nan).to(x) for x in inputs]
    for to, x in zip(padded, inputs, strict=True):
        for entry, n in enumerate(lengths):
            to[entry, :, 90 - n :] = x[entry, :, :n]
    valid = torch.arange(90) >= 90 - torch.tensor(lengths)[:, None]
    out, lse = cache.attend(*padded, valid=valid, return_lse=True)
    assert cache.lengths == lengths
    for entry, n in enumerate(lengths):
        assert close(out[entry : entry + 1, :, 90 - n :], right(inputs, entry, n))
        assert not out[entry, :, : 90 - n].any() and lse[entry, :, : 90 - n].isneginf().all()
        assert lse[entry, :, 90 - n :].isfinite().all()
    found = [stepped(cache, inputs, [1, 1, 1], 1) for _ in range(40)]
    for entry, n in enumerate(lengths):
        out = torch.cat([step[entry] for step in found], 1)[None]
        assert close(out, right(inputs, entry, n + 40)[:, :, n:])


def test_what_goes_by_positions_needs_equal_lengths():
    inputs = sequence(60)
    cache = sr.SelectedCache(2, 2, 8, **OPTIONS)
    stepped(cache, inputs, [20, 30], 30)
    token = [x[:, :, :1] for x in inputs]
    slopes = torch.rand(4, dtype=torch.float64)
    with pytest.raises(ValueError, match="depends on positions only where all batch entries"):
        cache.attend(*token, distance_bias=slopes)
    with pytest.raises(ValueError, match="crop needs batch entries of equal length"):
        cache.crop(10)
    with pytest.raises(ValueError, match="needs lengths or valid, got both"):
        cache.attend(*token, lengths=[1, 1], valid=torch.ones(2, 1).bool())


def test_summaries_of_entries_of_unlike_lengths():
    query, key, _ = sequence(200, 3)
    summaries = BlockSummaries(16)
    for ends, n in (([50, 20, 9], 9), ([51, 21, 10], 1), ([130, 37, 10], 2), ([131, 64, 32], 1)):
        padded = key.masked_fill(
            torch.arange(200)[:, None] >= torch.tensor(ends)[:, None, None, None], torch.nan
        )
        queries = torch.stack([query[i, :, end - n : end] for i, end in enumerate(ends)])
        found = summaries.scores(queries, padded[:, :, : max(ends)], lengths=ends)
        for i, end in enumerate(ends):
            expected = block_scores(queries[i : i + 1], key[i : i + 1, :, :end], 16)
            own = found[i : i + 1, ..., : expected.shape[3]]
            assert torch.equal(own.isneginf(), expected.isneginf())
            assert ((own - expected).nan_to_num(0, 0, 0).abs() <= 1e-6).all()
            assert found[i, ..., expected.shape[3] :].isneginf().all()
        summaries.crop([end - 1 for end in ends])
    for wrong in ([1, 2], [1, 2, 300], [0, 1, 2], 3):
        with pytest.raises(ValueError, match="lengths must be 3 ints from 1 to 200"):
            summaries.scores(query[:, :, :1], key, lengths=wrong)
    with pytest.raises(ValueError, match="a length for each of 3 batch entries, got 2"):
        summaries.crop([1, 2])


@pytest.mark.parametrize("lengths", [[1], [1, 1]])
def test_padding_that_all_entries_share_is_not_counted(lengths):
    batch = len(lengths)
    tokens = torch.randn(3, batch, 1, 9, 8, dtype=torch.float64)
    padded, alone = (
        sr.SelectedCache(batch, 1, 8, k=1, block_size=4, sink=0, local=0, dtype=torch.float64)
        for _ in range(2)
    )
    for cache in (padded, alone):
        cache.attend(*tokens[:, :, :, :5])
    out = padded.attend(*tokens[:, :, :, 5:7], lengths=lengths)
    assert padded.lengths == [6] * batch
    assert not out[:, :, 1].any()
    torch.testing.assert_close(out[:, :, :1], alone.attend(*tokens[:, :, :, 5:6]))
    torch.testing.assert_close(
        padded.attend(*tokens[:, :, :, 6:]), alone.attend(*tokens[:, :, :, 6:])
    )
