"""The MAD tasks: bit for bit the benchmark's data, and what each of them promises."""

import dataclasses
import hashlib
import io
from functools import cache

import numpy as np
import pytest
from rich.console import Console

from hypermlp.config import IGNORED
from hypermlp.report.examples import show
from hypermlp.tasks.mad import MAD as TASKS
from hypermlp.tasks.mad import SAMPLERS, Data, RandomStreams, Split, clean_targets, generate
from hypermlp.tasks.mad_settings import MADSetting, vocabulary

# The first 16 digits of sha256 over train inputs, train targets, test inputs and test targets as the benchmark generates them.
FINGERPRINTS = {
    "compression": "772183cb20e9b7c7 772183cb20e9b7c7 4b751d3882fb3558 4b751d3882fb3558",
    "fuzzy-recall": "2ace4cffe5326a65 be0c004caeedd255 665bd3aab4dd791b e691d917c1b275c0",
    "in-context-recall": "4def3b034c43358f df1f5a83139c5b2f b1dff59a6e8bcf35 3a037cfacf5fa008",
    "memorization": "3732a8933ac51323 6aa6df0033e44eed 9c1132ff8678cfe3 2a4e4f46462e5f28",
    "noisy-recall": "78a263e323605bc6 c9df90de54b02d9d e897d823b02a7f0e f190b2b1274ef60b",
    "selective-copying": "2d6e2456739ad177 1d8b7de1e6286b21 a8ddfe6fbedba640 8c71cebd3aa7ca4f",
}
RECALL = ("fuzzy-recall", "in-context-recall", "noisy-recall")


@cache
def baseline(task: str) -> Data:
    return generate(TASKS[task].baseline)


def few(task: str, **changes: float) -> MADSetting:
    return dataclasses.replace(TASKS[task].baseline, **{"num_train": 20, "num_test": 20, **changes})


def fingerprint(array: np.ndarray) -> str:
    return hashlib.sha256(np.ascontiguousarray(array, dtype="<i8").tobytes()).hexdigest()[:16]


def numbers(line: str) -> list[int]:
    return [IGNORED if word == "." else int(word) for word in line.replace("|", " ").split()]


@pytest.mark.parametrize("task", TASKS)
def test_the_baseline_is_the_benchmarks_own(task: str) -> None:
    data = baseline(task)
    arrays = [*data.train, *data.test]
    assert " ".join(map(fingerprint, arrays)) == FINGERPRINTS[task]
    assert all(array.dtype == np.int64 for array in arrays)


def test_numbers_below_n_are_numpys_own() -> None:
    """The draw and what it leaves of the stream, rejections included, between numpy's own draws."""
    source, rng = RandomStreams(3, exact=True), np.random.default_rng(3)
    for n in (1, 2, 3, 7, 210, 3 * 2**30) * 40:
        assert source.below(n) == rng.choice(n)
        assert source.rng.random() == rng.random()
    assert source.below(10) == rng.choice(10)


WORKED = {
    "in-context-recall, train": (
        MADSetting(task="in-context-recall", vocab_size=8, seq_len=16, num_train=1),
        "0 7 1 4 3 6 2 7 1 4 3 6 1 4 3",
        "7 1 4 3 6 2 7 1 4 3 6 1 4 3 6",
    ),
    "in-context-recall, test": (
        MADSetting(task="in-context-recall", vocab_size=8, seq_len=16, num_train=1),
        "0 7 1 4 3 6 2 7 1 4 3 6 1 4 3",
        ". . . . . . . . 4 . 6 . 4 . 6",
    ),
    "single query, test": (
        MADSetting(task="in-context-recall", vocab_size=9, seq_len=16, num_train=1, multi_query=False),
        "0 7 1 4 3 6 2 7 1 4 3 6 1 4 8 3",
        ". . . . . . . . . . . . . . . 6",
    ),
    "noisy-recall, test": (
        MADSetting(task="noisy-recall", vocab_size=12, seq_len=20, noise_vocab_size=4, frac_noise=0.4, num_train=1),
        "8 8 3 7 9 10 10 8 2 6 0 6 2 6 9 9 1 6 3",
        ". . . . . .  .  . . . . . 6 . . . . . 7",
    ),
    "fuzzy-recall, train": (
        MADSetting(task="fuzzy-recall", vocab_size=9, seq_len=40, k_motif=3, v_motif=3, num_train=1),
        "8 8 8 8 8 8 | 2 5 | 2 1 4 6 | 1 3 4 | 0 3 6 | 3 1 0 7 4 | 3 1 4 | 3 2 1 4 | 2 1 0 4 6 | 0 1 4 6 | 2",
        "8 8 8 8 8 2 | 5 2 | 1 4 6 1 | 3 4 0 | 3 6 3 | 1 0 7 4 3 | 1 4 3 | 2 1 4 2 | 1 0 4 6 0 | 1 4 6 2 | 5",
    ),
    "fuzzy-recall, test": (
        MADSetting(task="fuzzy-recall", vocab_size=9, seq_len=40, k_motif=3, v_motif=3, num_train=1),
        "8 8 8 8 8 8 8 | 1 3 2 4 7 6 | 2 1 3 5 4 6 | 0 3 2 6 | 2 3 0 7 | 1 2 3 5 7 | 2 3 1 6 | 1 2 3 5",
        ". . . . . . . | . . . . . . | . . . . . . | . . . . | . . . . | . . . . . | . . . . | . . 5 7",
    ),
    "memorization, train": (
        MADSetting(task="memorization", vocab_size=10, seq_len=12, num_train=1),
        "2 9 1 9 0 9 2 9 1 9 3 9",
        ". 8 . 6 . 7 . 8 . 6 . 4",
    ),
    "compression, train": (
        MADSetting(task="compression", vocab_size=8, seq_len=10, num_train=1),
        "4 1 5 2 1 5 4 4 6 7",
        "4 1 5 2 1 5 4 4 6 7",
    ),
    "selective-copying, train": (
        MADSetting(task="selective-copying", vocab_size=8, seq_len=16, num_tokens_to_copy=4, num_train=1),
        "6 4 6 6 6 6 1 6 6 4 1 7 6 6 6 6",
        ". . . . . . . . . . . . 4 1 4 1",
    ),
}


@pytest.mark.parametrize("name", WORKED)
def test_worked_examples(name: str) -> None:
    """The first row of a stream, drawn as a train or as a test row."""
    setting, inputs, targets = WORKED[name]
    split = SAMPLERS[setting.task](setting, RandomStreams(12345, exact=True), 1, name.endswith("test"))
    assert split.inputs[0].tolist() == numbers(inputs)
    assert split.targets[0].tolist() == numbers(targets)


@pytest.mark.parametrize("task", ["in-context-recall", "noisy-recall"])
def test_recall_is_solved_by_looking_up_the_key(task: str) -> None:
    keys = vocabulary(TASKS[task].baseline)["key"]
    for row, target in zip(*(array.tolist() for array in baseline(task).test), strict=True):
        value_of: dict[int, int] = {}
        for place in range(0, len(row), 2):
            if row[place] in keys:
                assert target[place] == value_of.get(row[place], IGNORED)
                if place + 1 < len(row):
                    assert value_of.setdefault(row[place], row[place + 1]) == row[place + 1]
            else:
                assert target[place] == IGNORED
        assert row[-1] in value_of
        assert set(target[1::2]) == {IGNORED}


def test_recall_scores_all_slots_but_first_showings() -> None:
    inputs, targets = baseline("in-context-recall").test
    for row, target in zip(inputs, targets, strict=True):
        assert (target != IGNORED).sum() == 64 - len(set(row[::2].tolist()))


@pytest.mark.parametrize("frac, scored", [(0.2, 43.5), (0.4, 31.2), (0.6, 19.1), (0.8, 7.7)])
def test_noise_leaves_fewer_scored_positions(frac: float, scored: float) -> None:
    targets = generate(few("noisy-recall", frac_noise=frac, num_test=640)).test.targets
    assert (targets != IGNORED).sum(1).mean() == pytest.approx(scored, rel=0.05)


@pytest.mark.parametrize("task", RECALL)
def test_recall_trains_on_every_next_token(task: str) -> None:
    inputs, targets = baseline(task).train
    assert (targets[:, :-1] == inputs[:, 1:]).all()
    assert (targets >= 0).all()


Pair = tuple[tuple[int, ...], tuple[int, ...], list[bool]]


def pairs(setting: MADSetting, inputs: list[int], targets: list[int]) -> list[Pair]:
    """Key, value and which of their tokens count, of each pair of a fuzzy row."""
    roles = vocabulary(setting)
    tokens = [*inputs, targets[-1]]
    counts = [False, *(target != IGNORED for target in targets)]
    found: list[Pair] = []
    place = tokens.count(roles["pad"][0])
    while place < len(tokens):
        middle = next(i for i in range(place, len(tokens)) if tokens[i] in roles["value"])
        end = next((i for i in range(middle, len(tokens)) if tokens[i] in roles["key"]), len(tokens))
        found.append((tuple(tokens[place:middle]), tuple(tokens[middle:end]), counts[place:end]))
        place = end
    return found


def fuzzy_rows(setting: MADSetting, split: Split) -> list[list[Pair]]:
    return [pairs(setting, *row) for row in zip(split.inputs.tolist(), split.targets.tolist(), strict=True)]


def check_fuzzy_row(row: list[Pair]) -> bool:
    """Checks one row; whether the last key was shown before."""
    value_of: dict[tuple[int, ...], tuple[int, ...]] = {}
    for i, (key, value, counts) in enumerate(row):
        assert len(set(key)) == len(key) == 3
        assert len(set(value)) == len(value) <= 3
        assert counts == [False] * 3 + [key in value_of or i == len(row) - 1] * len(value)
        assert value_of.setdefault(key, value) == value
    return row[-1][0] in {key for key, _, _ in row[:-1]}


def test_fuzzy_keys_keep_their_values() -> None:
    shown = [check_fuzzy_row(row) for row in fuzzy_rows(TASKS["fuzzy-recall"].baseline, baseline("fuzzy-recall").test)]
    assert 0.01 < 1 - np.mean(shown) < 0.04  # the benchmark asks for some keys it never showed


@pytest.mark.parametrize("vocab_size, scored", [(16, 4.4), (128, 2.0)])
def test_fuzzy_recall_that_always_shows_the_key_it_asks_for(vocab_size: int, scored: float) -> None:
    setting = few("fuzzy-recall", vocab_size=vocab_size, num_test=1280)
    data = generate(setting, exact=False)
    assert all(check_fuzzy_row(row) for row in fuzzy_rows(setting, data.test))
    assert (data.test.targets != IGNORED).sum(1).mean() == pytest.approx(scored, rel=0.08)


@pytest.mark.parametrize("exact", [True, False])
def test_fuzzy_training_keys_have_one_to_three_tokens(exact: bool) -> None:
    setting = few("fuzzy-recall", num_train=400)
    rows = fuzzy_rows(setting, generate(setting, exact=exact).train)
    sizes = np.bincount([len(key) for row in rows for key, _, _ in row])
    assert sizes[0] == 0
    assert sizes[1:] / sizes.sum() == pytest.approx([1 / 3] * 3, abs=0.02)
    for row in rows:
        assert len({(key, value) for key, value, _ in row}) == len({key for key, _, _ in row})


def test_a_single_fuzzy_query_scores_the_whole_last_value() -> None:
    setting = few("fuzzy-recall", multi_query=False, num_test=200)
    inputs, targets = generate(setting).test
    for row, target in zip(inputs.tolist(), targets.tolist(), strict=True):
        behind = row.index(15) + 1  # of the copy token
        assert all(token in vocabulary(setting)["key"] for token in row[behind : behind + 3])
        assert target[: behind + 2] == [IGNORED] * (behind + 2)
        assert target[behind + 2 : -1] == row[behind + 3 :]
        assert target[-1] in vocabulary(setting)["value"]


def test_fuzzy_rows_start_with_two_to_seven_pads() -> None:
    for split in baseline("fuzzy-recall")[:2]:
        pads = (split.inputs == 15).sum(1)
        assert set(pads.tolist()) <= set(range(2, 8))
        assert (np.argmin(split.inputs == 15, axis=1) == pads).all()


def test_copying_answers_in_order_behind_the_copy_token() -> None:
    for inputs, targets in baseline("selective-copying")[:2]:
        data = inputs < 14
        assert (data.sum(1) == 16).all()
        assert data[:, 238].all()
        assert (inputs[:, 239] == 15).all()
        assert (inputs[:, 240:] == 14).all()
        assert (targets[:, :240] == IGNORED).all()
        assert (targets[:, 240:] == inputs[data].reshape(-1, 16)).all()


def test_memorization_has_one_injective_map() -> None:
    value_of: dict[int, int] = {}
    for inputs, targets in baseline("memorization")[:2]:
        assert (inputs[:, 1::2] == 255).all()
        assert (targets[:, ::2] == IGNORED).all()
        for key, value in zip(inputs[:, ::2].ravel().tolist(), targets[:, 1::2].ravel().tolist(), strict=True):
            assert value_of.setdefault(key, value) == value
    assert sorted(value_of) == list(range(127))
    assert sorted(value_of.values()) == [value for value in range(127, 255) if value != 149]


def test_compression_ends_with_its_own_token_which_clean_targets_leave_out() -> None:
    setting, (inputs, targets) = TASKS["compression"].baseline, baseline("compression").test
    assert (inputs[:, -1] == 15).all()
    assert (inputs[:, :-1] < 15).all()
    clean = clean_targets(setting, targets)
    assert (clean[:, -1] == IGNORED).all()
    assert (clean[:, :-1] == inputs[:, :-1]).all()
    assert (targets[:, -1] == 15).all()  # the caller's array is as it was
    recall = baseline("in-context-recall").test.targets
    assert (clean_targets(TASKS["in-context-recall"].baseline, recall) == recall).all()


@pytest.mark.parametrize("task", TASKS)
def test_no_test_row_was_trained_on(task: str) -> None:
    data = baseline(task)
    train = {row.tobytes() for row in data.train.inputs}
    assert not any(row.tobytes() in train for row in data.test.inputs)


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("exact", [True, False])
def test_a_validation_split_changes_nothing_before_it(task: str, exact: bool) -> None:
    without, with_it = (generate(few(task), exact=exact, validation=count) for count in (0, 7))
    for before, after in zip([*without.train, *without.test], [*with_it.train, *with_it.test], strict=True):
        assert (before == after).all()
    assert [len(array) for array in without.validation] == [0, 0]
    assert [array.shape for array in with_it.validation] == [(7, array.shape[1]) for array in without.test]
    assert not (with_it.validation.inputs == with_it.test.inputs[:7]).all()


@pytest.mark.parametrize("task", TASKS)
def test_data_depend_on_the_seed_alone(task: str) -> None:
    np.random.seed(1)  # noqa: NPY002 (numpy's global stream is what is tested)
    first = generate(few(task), seed=5)
    untouched = np.random.randint(10**9)  # noqa: NPY002
    np.random.seed(1)  # noqa: NPY002
    assert np.random.randint(10**9) == untouched  # noqa: NPY002
    for other in TASKS:
        generate(few(other))
    again, different = generate(few(task), seed=5), generate(few(task), seed=6)
    assert all((a == b).all() for a, b in zip([*first.train, *first.test], [*again.train, *again.test], strict=True))
    assert not (first.train.inputs == different.train.inputs).all()


def test_the_benchmark_has_66_settings() -> None:
    assert [len(TASKS[task].settings("full")) for task in TASKS] == [11, 11, 11, 6, 14, 13]
    assert all(TASKS[task].settings("baseline") == [TASKS[task].baseline] for task in TASKS)
    everything = [setting for task in TASKS for setting in TASKS[task].settings("full")]
    assert len({setting.key for setting in everything}) == 66
    assert [setting.task for setting in everything if setting.baseline] == list(TASKS)
    assert TASKS["in-context-recall"].settings("full")[0].key == "in-context-recall/baseline"
    assert TASKS["in-context-recall"].settings("full")[1].key == "in-context-recall/vocab_size=32"


@pytest.mark.parametrize("task", TASKS)
def test_every_setting_gives_rows_of_its_length_and_vocabulary(task: str) -> None:
    for setting in TASKS[task].settings("full"):
        data = generate(dataclasses.replace(setting, num_train=2, num_test=2), exact=False)
        length = setting.seq_len - (task in ("in-context-recall", "noisy-recall"))
        for array in (*data.train, *data.test):
            assert array.shape == (2, length)
            assert array.max() < setting.vocab_size
        assert all(split.inputs.min() >= 0 for split in data[:2])
        assert (data.test.targets != IGNORED).any(1).all()


@pytest.mark.parametrize(
    "task, changes, message",
    [
        ("in-context-recall", {"seq_len": 127}, r"seq_len \(127\) must be divisible by 2: .*; try 126 or 128"),
        ("memorization", {"seq_len": 31}, r"seq_len \(31\) must be divisible by 2"),
        ("in-context-recall", {"seq_len": 2}, r"seq_len \(2\) is too short .*; try 4"),
        ("in-context-recall", {"vocab_size": 1}, r"vocab_size \(1\) is too small .*; try 2"),
        ("noisy-recall", {"vocab_size": 16}, r"vocab_size \(16\) is too small .*; try 18"),
        ("noisy-recall", {"frac_noise": 1.0}, r"frac_noise \(1.0\) must be at least 0 and below 1"),
        ("noisy-recall", {"noise_vocab_size": 0}, r"needs noise tokens; set noise_vocab_size to at least 1"),
        ("noisy-recall", {"noise_vocab_size": -1}, r"noise_vocab_size \(-1\) must be at least 0"),
        ("fuzzy-recall", {"vocab_size": 6}, r"vocab_size \(6\) is too small .*; try 7"),
        ("fuzzy-recall", {"seq_len": 12}, r"seq_len \(12\) is too short .*; try 13"),
        ("selective-copying", {"seq_len": 33}, r"seq_len \(33\) is too short .*; try 34"),
        ("selective-copying", {"num_tokens_to_copy": 0}, r"num_tokens_to_copy \(0\) must be at least 1"),
        ("compression", {"frac_noise": 0.2}, r"frac_noise has no effect on compression; leave it at 0.0"),
        ("compression", {"num_train": 0}, r"num_train \(0\) must be at least 1"),
        ("compression", {"task": "sorting"}, r"task \('sorting'\) must be one of 'compression'"),
    ],
)
def test_impossible_settings_are_refused_with_a_remedy(task: str, changes: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(TASKS[task].baseline, **changes)


@pytest.mark.parametrize(
    "task, changes",
    [
        ("fuzzy-recall", {"vocab_size": 7}),
        ("fuzzy-recall", {"seq_len": 13}),
        ("selective-copying", {"seq_len": 34}),
        ("in-context-recall", {"seq_len": 4}),
        ("in-context-recall", {"vocab_size": 2}),
        ("memorization", {"vocab_size": 3}),
        ("compression", {"vocab_size": 2, "seq_len": 2}),
    ],
)
def test_the_smallest_settings_that_are_allowed_work(task: str, changes: dict[str, int]) -> None:
    for exact in (True, False):
        generate(few(task, **changes), exact=exact)


def test_rows_of_noise_alone_are_refused_with_a_remedy() -> None:
    with pytest.raises(ValueError, match=r"noise alone; lower frac_noise \(0.9\) or raise seq_len"):
        generate(few("noisy-recall", seq_len=4, frac_noise=0.9, num_train=200))


def test_names_that_do_not_exist_are_answered_with_those_that_do() -> None:
    with pytest.raises(ValueError, match="must be one of 'baseline', 'full'"):
        TASKS["compression"].settings("huge")


@pytest.mark.parametrize("task", TASKS)
def test_examples_are_printed_with_a_mark_under_each_scored_target(task: str) -> None:
    out = io.StringIO()
    show(Console(file=out, width=80), TASKS[task], 3, seed=1)
    lines = out.getvalue().splitlines()
    assert lines[0].startswith(f"{task}: ")
    assert max(map(len, lines)) <= 80
    starts = [i for i, line in enumerate(lines) if line.startswith("inputs")]
    assert len(starts) == 3
    for i in starts:
        inputs, targets, marks = lines[i].split()[1:], lines[i + 1].split()[1:], lines[i + 2]
        assert len(inputs) == len(targets)
        assert marks.count("^") == sum(target != "·" for target in targets) > 0


def test_long_examples_are_cut_to_the_width() -> None:
    out = io.StringIO()
    show(Console(file=out, width=40), TASKS["fuzzy-recall"], 1, seed=1)
    rows = [line.split()[1:] for line in out.getvalue().splitlines() if line.startswith("inputs")]
    assert [len(row) for row in rows] == [16, 16, 4]
