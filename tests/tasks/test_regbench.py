"""In-context languages: automata, their words, and n-grams that read them."""

import dataclasses
from functools import cache

import numpy as np
import pytest
import torch

from hypermlp.config import IGNORED
from hypermlp.tasks.base import Rows
from hypermlp.tasks.regbench import (
    BAR,
    REGBENCH,
    Automaton,
    RegbenchSetting,
    distance,
    draw_automata,
    minimise,
    ngram_shares,
)

SMALL = RegbenchSetting(seq_len=60, num_train=60, num_test=20, nodes=8)


@cache
def made() -> tuple[list[list[Automaton]], Rows]:
    return REGBENCH.automata(SMALL, 0), REGBENCH.evaluation(SMALL, 0, "test")["new automata"][0]


def test_walking_the_automaton_finds_every_letter_legal_and_the_same_letters_allowed() -> None:
    (automata, _, _), rows = made()
    for automaton, row, target, legal, word in zip(automata, *rows[:2], *rows.facts.values(), strict=True):
        tokens, state, number = [*row, target[-1] if target[-1] != IGNORED else BAR], 0, 1
        for place, token in enumerate(tokens):
            if token == BAR:
                state, number = 0, number + 1
                if place:
                    assert target[place - 1] == IGNORED, "where a word ends is not scored"
                continue
            out = dict(automaton[state])
            if place:
                assert target[place - 1] == token
                assert legal[place - 1] == sum(1 << letter for letter in out)
                assert word[place - 1] == min(number, SMALL.words)
            state = out[token]


def test_automata_are_all_different_minimal_and_have_one_to_three_letters_to_other_states() -> None:
    parts, _ = made()
    everything = [automaton for part in parts for automaton in part]
    assert [len(part) for part in parts] == [20, 10, 60]
    assert len(set(everything)) == len(everything)
    for automaton in everything:
        assert minimise(automaton) == automaton
        assert all(1 <= len(out) <= 3 for out in automaton)
    assert minimise([[(1, 1)], [(1, 2)], [(1, 0)]]) == (((1, 0),),), "three states of one language"
    assert minimise([[(5, 2)], [(9, 0)], [(6, 0), (7, 2)]]) == (((5, 1),), ((6, 0), (7, 1)))


def test_test_automata_do_not_depend_on_training_and_epochs_have_other_words() -> None:
    (test, _, train), _ = made()
    assert draw_automata(dataclasses.replace(SMALL, num_train=0), 0, (20,))[0] == test
    assert not set(test) & set(train)
    first, again, other = (REGBENCH.training(SMALL, 0, epoch)[0].inputs for epoch in (0, 0, 1))
    assert (first == again).all()
    assert (first != other).any()


def test_ngrams_count_what_the_row_has_shown() -> None:
    inputs = np.array([[1, 2, 1, 3, BAR, 1, 2]])
    one, two, three = (ngram_shares(inputs, order)[0] for order in (1, 2, 3))
    assert one[3, [1, 2, 3]].tolist() == [0.5, 0.25, 0.25]
    assert two[5, [2, 3]].tolist() == [0.5, 0.5], "after 1 came 2 and 3"
    assert two[4, 1] == 1, "words began with 1"
    assert three[6, 1] == 1, "after 1 2 came 1"
    assert np.allclose(three.sum(1), 1)


def test_baselines_of_ngrams_are_ordered_and_the_exact_distribution_has_distance_zero() -> None:
    found = REGBENCH.baselines(SMALL, 0)
    assert found["most frequent"]["accuracy"] < found["1-gram"]["accuracy"] < found["2-gram"]["accuracy"]
    assert found["2-gram"]["accuracy"] < found["3-gram"]["accuracy"] < 1
    assert found["3-gram"]["distance"] < found["1-gram"]["distance"]
    legal = torch.tensor([0b110, 0b1000])
    exact = torch.tensor([[0, 0.5, 0.5, 0], [0, 0, 0, 1.0]])
    assert distance(exact, legal).tolist() == [0, 0]
    assert distance(torch.tensor([[1.0, 0, 0, 0], [0, 0, 0.5, 0.5]]), legal).tolist() == [1, 0.5]


def test_a_legal_letter_is_right_whether_or_not_it_came() -> None:
    legal = {"legal": torch.tensor([0b110, 0b110, 0b110])}
    assert REGBENCH.right(torch.tensor([1, 2, 3]), torch.tensor([2, 2, 2]), legal).tolist() == [True, True, False]


def test_impossible_sizes_are_refused() -> None:
    with pytest.raises(ValueError, match="nodes"):
        RegbenchSetting(nodes=3)
