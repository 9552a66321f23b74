"""Drafts in `LongNetLM.generate`: the same tokens in fewer passes, and caches as without drafts."""

import itertools

import pytest
import torch

import sparsering as sr
from sparsering.models import LongNetLM
from sparsering.models.speculation import from_text

PROMPT = b"abcdefgh abcdefgh abcdefgh abcd"
PATTERNS = {
    "longnet": sr.LongNet((16, 64), (1, 4)),
    "window and sinks": sr.SlidingWindow(20) | sr.GlobalTokens(2, rows=False),
    "bound to a length": sr.RandomBlocks(0.4, 16),
}


def model_of(pattern: sr.Pattern, width: int = 32, **sizes: int) -> LongNetLM:
    model = LongNetLM(pattern, **{"width": width, "num_layers": 2, "num_heads": 2} | sizes).double()
    for weight in model.parameters():
        torch.nn.init.normal_(weight, std=0.2) if weight.dim() == 2 else None
    return model


def tokens_of(text: bytes) -> torch.Tensor:
    return torch.tensor([list(text)])


class Counted:
    """Counts the passes of a model."""

    def __init__(self, model: LongNetLM) -> None:
        self.passes = 0
        model.norm.register_forward_hook(self.count)

    def count(self, *_: object) -> None:
        self.passes += 1


@pytest.mark.covering(1)
@pytest.mark.parametrize("temperature", [0, 0.5])
@pytest.mark.parametrize("name", PATTERNS)
def test_the_tokens_and_the_caches_are_those_without_a_draft(name, temperature):
    torch.manual_seed(1)
    model, smaller = model_of(PATTERNS[name]), model_of(sr.SlidingWindow(8), 16, num_layers=1)
    found, total = [], len(PROMPT) + 24
    for draft in (None, "ngram", smaller, *([] if temperature else [model])):
        caches = model.caches(max_length=total)
        drawn = model.generate(
            tokens_of(PROMPT), 24, temperature=temperature, draft=draft, caches=caches,
            top_p=0.9, generator=torch.Generator().manual_seed(5),
        )  # fmt: skip
        found.append([int(token) for token in drawn])
        assert [cache.length for cache in caches] == [total - 1] * 2
        kept = [cache.positions(head).tolist() for cache in caches for head in range(2)]
        found[-1] += kept
    assert all(tokens == found[0] for tokens in found)


def test_right_guesses_save_passes():
    torch.manual_seed(0)
    model = model_of(sr.Causal())
    counted, outs = Counted(model), []
    for draft in (None, "ngram"):
        counted.passes = 0
        drawn = model.generate(tokens_of(PROMPT), 80, temperature=0, draft=draft)
        outs.append(([int(x) for x in drawn], counted.passes))
    (plain, passes), (drafted, fewer) = outs
    assert plain == drafted and passes == 80 and fewer < 60
    copy = LongNetLM(sr.Causal(), width=32, num_layers=2, num_heads=2).double()
    copy.load_state_dict(model.state_dict())  # all its guesses are right: 16 and one more a pass
    counted.passes = 0
    drawn = model.generate(tokens_of(PROMPT), 80, temperature=0, draft=copy)
    assert [int(x) for x in drawn] == plain and counted.passes == 1 + -(-79 // 17)


def test_a_text_ends_and_goes_on_where_the_caller_stops():
    torch.manual_seed(2)
    model = model_of(PATTERNS["longnet"])
    caches = model.caches()
    drawn = model.generate(tokens_of(PROMPT), 50, temperature=0, draft="ngram", caches=caches)
    some = [int(token) for token in itertools.islice(drawn, 7)]
    drawn.close()
    assert caches[0].length == len(PROMPT) + 6
    last = torch.tensor([some[-1:]])
    rest = model.generate(last, 20, temperature=0, draft="ngram", caches=caches)
    expected = [int(x) for x in model.generate(tokens_of(PROMPT), 27, temperature=0)]
    assert some + [int(x) for x in rest] == expected
    stop = expected[10:12]
    ended = model.generate(tokens_of(PROMPT), 27, temperature=0, draft="ngram", stop=stop)
    plain = model.generate(tokens_of(PROMPT), 27, temperature=0, stop=stop)
    assert [int(x) for x in ended] == [int(x) for x in plain] != expected


def test_guesses_follow_earlier_places_and_share_their_beginnings():
    guess, text = from_text(), list(b"wxyzAB wxyzAC wxyz")
    tokens, parents = guess(text, 3)
    assert bytes(tokens) == b"zAC B " and parents == [-1, 0, 1, 2, 1, 4]
    assert guess([*text, ord("!")], 3) == ([ord("!")], [-1])
    assert guess(text, 0) == ([ord("z")], [-1])
    assert from_text()(list(b"abc"), 4) == ([ord("c")], [-1])


def test_wrong_drafts_are_told():
    model = model_of(sr.Causal())
    for draft in ("bigram", 3, model_of(sr.Causal(), vocab_size=100)):
        with pytest.raises(
            ValueError, match="draft must be None, 'ngram' or a LongNetLM of the sa"
        ):
            model.generate(tokens_of(PROMPT), 5, draft=draft)
    with pytest.raises(ValueError, match="one text, got draft 'ngram' and 2 texts; pass draft"):
        model.generate(tokens_of(PROMPT).expand(2, -1), 5, draft="ngram")
