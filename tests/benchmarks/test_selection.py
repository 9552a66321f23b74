"""The proof that content selection learns, in small: tasks by definition, and learning in minutes.

The slow tests train the networks of `benchmarks/selection` for a fraction of its steps: what they
ask for is what no choice without content, and no scorer without gradients, can reach.
"""

import pytest
import torch

from benchmarks.selection import bars, captured, flagged, language, refine, tasks


def test_one_fact_of_a_block_is_flagged_and_flagged_keys_differ():
    facts = tasks.flagged_facts(3, 8, 64, tasks.generator(0))
    assert facts.flags.unflatten(1, (8, tasks.FACTS)).sum(2).eq(1).all()
    for row in range(3):
        flagged_keys = facts.keys[row][facts.flags[row]].tolist()
        assert len(set(flagged_keys)) == 8
        for key, answer, block in zip(
            *(x[row].tolist() for x in (facts.questions, facts.answers, facts.blocks)), strict=True
        ):
            place = flagged_keys.index(key)
            assert place == block
            assert facts.values[row][facts.flags[row]][place] == answer


def test_each_key_is_asked_for_once_and_its_value_lies_where_the_distance_says():
    pairs = tasks.recall_pairs(4, 128, 16, 256, tasks.generator(0))
    for tokens, targets, distances in zip(
        pairs.tokens.tolist(), pairs.targets.tolist(), pairs.distances.tolist(), strict=True
    ):
        known = dict(zip(tokens[:32:2], tokens[1:32:2], strict=True))
        asked = [place for place, target in enumerate(targets) if target >= 0]
        assert sorted(tokens[place] for place in asked) == sorted(known)
        for place in asked:
            assert targets[place] == known[tokens[place]] == tokens[place - distances[place]]
        fill = [token for place, token in enumerate(tokens) if place >= 32 and targets[place] < 0]
        assert not set(fill) & set(known)


def test_far_copies_are_bytes_whose_last_ones_occurred_only_far_back():
    text = torch.randint(4, (1, 60), generator=tasks.generator(0))
    text[0, 40:44], text[0, 50:54] = text[0, 2:6].clone(), text[0, 30:34].clone()
    line = text[0].tolist()
    found = tasks.far_copies(text, 20, width=4)[0].tolist()
    for end in range(4, 61):
        words = line[end - 4 : end]
        before = [end - e for e in range(4, end) if line[e - 4 : e] == words]
        assert found[end - 1] == (bool(before) and min(before) > 20), end
    assert any(found)


def test_a_bar_is_of_the_worst_run_and_of_none_it_is_not_met():
    assert bars.bar("", [0.9, 0.5], least=0.6) == {
        "bar": "", "at_least": 0.6, "worst": 0.5, "runs": 2, "met": False
    }  # fmt: skip
    assert bars.bar("", [0.1, 0.2], most=0.2)["met"]
    assert not bars.bar("", [], least=0.0)["met"] and not bars.bar("", [], most=1.0)["met"]


@pytest.mark.slow
def test_a_scorer_learns_which_block_holds_the_flagged_fact():
    found = {
        arm: flagged.trained(flagged.Reader(arm, flagged.SMALL, 0), steps)
        for arm, steps in (("kl", 1000), ("frozen", 400), ("mean", 400))
    }
    rows = {arm: reader.evaluate() for arm, reader in found.items()}
    assert rows["kl"]["accuracy"] >= 0.95 and rows["kl"]["recall"] >= 0.98
    assert rows["frozen"]["accuracy"] <= 0.25
    assert rows["mean"]["accuracy"] <= 0.5
    assert found["kl"].evaluate(shuffled="scores")["accuracy"] <= 0.25
    assert rows["kl"]["density"] == 4 / 32
    longer = found["kl"].evaluate(blocks=128)
    assert longer["recall"] >= 0.95 and longer["density"] == 4 / 128


@pytest.mark.slow
def test_a_refiner_finds_planted_blocks_and_not_without_looking_elsewhere():
    seeing, blind = refine.refined(1)
    assert seeing["found"] >= 0.95 and seeing["found_after_move"] >= 0.95
    assert blind["found"] <= 0.25
    assert seeing["captured"] > 5 * seeing["captured_first"]
    assert seeing["one_size"] and seeing["density"] == refine.K / refine.BLOCKS


@pytest.mark.slow
def test_scorers_fit_a_frozen_byte_model(tmp_path, monkeypatch):
    monkeypatch.setattr(language, "WORK", tmp_path)
    monkeypatch.setattr(language, "DENSE", 150)
    monkeypatch.setattr(language, "HELD_OUT", 4)
    language.held_out.cache_clear()
    model, scorers = language.dense_model(0), language.new_scorers(0, 32)
    inputs = captured.inputs_of_layers(model, language.held_out(2)[0])
    before = captured.recall(inputs, lambda i, q, k: scorers[i](q, k))
    losses = language.warmed(model, scorers, 0, steps=60)
    after = captured.recall(inputs, lambda i, q, k: scorers[i](q, k))
    assert after >= before + 0.15
    assert sum(losses[-10:]) < 0.9 * sum(losses[:10])
