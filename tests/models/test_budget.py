"""Equal budgets: sizes that meet them, cases that cannot and say so, whole models that agree all the same."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial

import pytest
import torch
from rich.console import Console

from hypermlp.mixers import DISTINCT, MIXERS, build_mixer
from hypermlp.mixers.labels import TABLE1
from hypermlp.models.budget import TOLERANCE, Matched, match, match_models, size_of
from hypermlp.models.lm import LanguageModel, ModelConfig, count_parameters
from hypermlp.report.budget import feed_forward, show_budget, show_explanation, show_mixers

NAMES = [*sorted(DISTINCT), *TABLE1]
WIDTHS = (128, 256, 512, 768)
MIXING = ("hyperglu", "hypermlp", "R-cg-q-12o", "G-pcg-q-12o", "G-cg-q-1o")
ADJUSTABLE = [name for name in TABLE1 if not size_of(name)[2]]


def count(name: str, width: int, length: int, size: int | None = None) -> int:
    with torch.device("meta"):
        return count_parameters(build_mixer(name, width, length, size))


def within(count: int, target: int) -> bool:
    return abs(count - target) <= 0.01 * target


@pytest.mark.parametrize(
    "name, width, length",
    [
        *((name, width, 128) for name in (*sorted(DISTINCT), "S-g-q", "G-cg-q") for width in WIDTHS),
        *((name, width, length) for name in MIXING for width in WIDTHS for length in (512, 1024, 4096)),
    ],
)
def test_within_one_percent_or_a_reason(name: str, width: int, length: int) -> None:
    found = match(name, width, length)
    assert found.target == 4 * width**2
    assert count(name, width, length, found.size) == found.parameters
    assert found.reached == within(found.parameters, found.target)
    assert found.reached == (found.note == "")
    kind, step, _ = size_of(name)
    if "even the smallest" in found.note:
        least = -(-width // 16 // step) * step
        smallest = count(name, width, length, least)
        assert smallest > 1.01 * found.target
        assert found.size is None
        assert f"even the smallest {kind} ({least}) has {smallest / found.target:.2f} times the budget" == found.note
    elif not found.reached:
        nearer = [count(name, width, length, found.size + s) for s in (-step, step) if found.size + s]
        assert all(abs(found.parameters - found.target) <= abs(n - found.target) for n in nearer)


@pytest.mark.parametrize("name", ADJUSTABLE)
def test_every_label_that_pays_meets_the_budget_of_the_papers_model(name: str) -> None:
    found = match(name, 768, 1024)
    assert found.reached
    assert found.size is not None
    assert 128 <= found.size <= 256, "the paper: d/4 to d/8, more where less is added"


@pytest.mark.parametrize("name", [*sorted(DISTINCT), *ADJUSTABLE])
def test_parameters_grow_with_the_size(name: str) -> None:
    step = size_of(name)[1]
    counts = [count(name, 64, 32, n * step) for n in range(1, 9)]
    assert counts == sorted(counts)


@pytest.mark.parametrize("name", NAMES)
def test_counting_needs_no_memory_for_the_parameters(name: str) -> None:
    assert count(name, 64, 32) == count_parameters(build_mixer(name, 64, 32))


@pytest.mark.parametrize("target", [2 * 768**2, 5 * 768**2])
def test_a_target_of_ones_own(target: int) -> None:
    found = match("S-g-q", 768, 128, target)
    if target < 3 * 768**2:  # v, o and their gate alone have more
        assert not found.reached
        assert found.note.startswith("even the smallest qk_rank (48) has 1.5")
    else:
        assert found.reached
        assert within(count("S-g-q", 768, 128, found.size), target)


@pytest.mark.parametrize(
    "name, note",
    [
        ("G-c-12o!", "its full ranks stay, as its label says"),
        ("S-c-v", "its q and k have the full width, as its label says"),
        ("S-c-q", "compressed, as its label says, and nothing added: a matched rank would be the full one"),
    ],
)
def test_ranks_that_a_label_is_about_are_not_touched(name: str, note: str) -> None:
    found = match(name, 256, 128)
    assert (found.size, found.note, found.reached) == (None, note, False)
    assert found.parameters == count(name, 256, 128)


def test_the_published_size_is_kept_where_it_will_do() -> None:
    assert match("softmax", 256, 128) == Matched(name="softmax", size=None, parameters=4 * 256**2, target=4 * 256**2, note="")
    published = count("hyperglu", 256, 128)
    assert match("hyperglu", 256, 128, published + 1).size is None


def test_coarse_steps_are_told() -> None:
    found = match("G-pg-q", 32, 16)
    assert not found.reached
    assert found.note == "the nearest qk_rank, in steps of 8"
    counts = {n: count("G-pg-q", 32, 16, n) for n in (8, 16, 24)}
    assert found.size == min(counts, key=lambda n: abs(counts[n] - 4 * 32**2))


def test_an_unknown_name_is_no_label_either() -> None:
    with pytest.raises(ValueError, match="linear attention"):
        match("linear attention", 64, 32)


def language_model(width: int, length: int, name: str, size: int | None, inner: int) -> LanguageModel:
    return LanguageModel(ModelConfig(vocabulary=16, width=width, depth=2, length=length, mixer=name, size=size, inner=inner))


@pytest.mark.parametrize("width, length", [(64, 64), (128, 128), (128, 1024)])
def test_whole_models_agree_within_one_percent(width: int, length: int) -> None:
    names = [name for name in NAMES if not name.endswith("!")]
    build = partial(language_model, width, length)
    found = match_models(names, width, length, build, 2 * width)
    assert list(found) == names
    largest = max(m.parameters for m in found.values())
    assert min(m.inner for m in found.values()) == 2 * width
    for name, m in found.items():
        assert count_parameters(build(name, m.mixer.size, m.inner)) == m.parameters
        assert within(m.parameters, largest), name


def test_nobody_is_made_to_match_an_over_parameterised_model() -> None:
    names = ["G-c-12o!", "softmax", "S-c-q"]
    found = match_models(names, 64, 256, partial(language_model, 64, 256), 128)
    assert found["G-c-12o!"].inner == found["softmax"].inner == 128
    assert found["S-c-q"].inner > 128
    assert found["G-c-12o!"].parameters > 1.2 * found["softmax"].parameters
    assert within(found["S-c-q"].parameters, found["softmax"].parameters)


# What the terminal shows


def shown(show: Callable[..., None], *arguments: object) -> str:
    console = Console(width=100)
    with console.capture() as capture:
        show(console, *arguments)
    return capture.get()


def test_the_table_of_budgets_has_every_mixer_and_every_note() -> None:
    text = shown(show_budget, 128, 128, None)
    lines = [line.split() for line in text.splitlines()]
    firsts = [words[0] for words in lines if words]
    for name in NAMES:
        assert name in firsts
    assert re.search(r"^(.*, )?hyperglu\b.*: even the smallest qk_rank \(8\) has 1\.3", text, re.MULTILINE)
    row = next(words for words in lines if words[:1] == ["G-cg-q-12o"])
    assert row[1:] == ["0.50", "2.00", "1.26", "0.06", "1.54", "0.77", "100,352", "1.531", "rivals", "+91"]


def test_wider_feed_forwards_make_up_for_the_difference() -> None:
    own = Matched(name="S-c-q", size=None, parameters=1000, target=4000, note="")
    assert feed_forward(own, 10) == "its +100"
    assert feed_forward(Matched(**vars(own) | {"parameters": 7000}), 10) == "rivals +100"
    assert feed_forward(Matched(**vars(own) | {"parameters": round((1 + TOLERANCE / 2) * 4000)}), 10) == ""
    assert feed_forward(Matched(**vars(own) | {"parameters": 7000, "name": "R-12o!"}), 10) == ""


def test_an_explanation_names_the_model_and_its_size() -> None:
    text = shown(show_explanation, "G-cg-q-12o", 768, 1024)
    assert "G-cg-q-12o, HyperGLU" in text
    assert "Budget 2,359,296: qk_rank 132, 2,357,220 parameters (-0.1%)" in text
    assert "2,495,520" in text


def test_the_registry_as_a_table() -> None:
    text = shown(show_mixers, 64, 32)
    for name, entry in MIXERS.items():
        mixer = build_mixer(name, 64, 32)
        lines = text.splitlines()
        at = next(i for i, line in enumerate(lines) if line.split()[:1] == [name])
        row = "".join(lines[at : at + 2])  # a narrow table wraps
        assert str(entry.year) in row
        assert f"{count_parameters(mixer):,}" in row
        assert f"{mixer.new_cache(1, max_len=32).nbytes:,}" in row
