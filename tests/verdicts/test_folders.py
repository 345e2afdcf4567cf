"""A folder of results has the verdicts of its parts, whichever folder above them is read."""

from __future__ import annotations

import json
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from hypermlp.models.lm import ModelConfig
from hypermlp.studies.protocol import digest
from hypermlp.verdicts.claims import Verdict
from hypermlp.verdicts.judged import judge_folder
from hypermlp.verdicts.registration import MARK, VERSIONS, judging_code
from made_up import language, mad, write

PROTOCOL = """
title = "registered"
mixers = ["G-cg-q-12o", "S-pc"]
seeds = 2

[mad]
protocol = "clean"
scale = "baseline"
tasks = ["compression"]

[terms]
seeds = 2

[[comparisons]]
title = "HyperGLU is ahead of softmax attention"
better = "G-cg-q-12o"
worse = "S-pc"
expect = "more"
on = ["compression", "loss"]
"""
Verdicts = Counter[tuple[tuple[str, ...], tuple[tuple[str, Verdict], ...]]]


@dataclass(frozen=True)
class Part:
    """A study that is put into a folder."""

    kind: str  # "registered", "halves", "alone" or "trained"
    gain: int
    seeds: int
    width: int  # studies of one width have the same plan


def put(part: Part, folder: Path) -> None:
    seeds, labels = range(part.seeds), (("G-cg-q-12o", 40 + part.gain), ("S-pc", 40))
    marks = {MARK: digest(PROTOCOL)} if part.kind == "registered" else {}
    mads = [mad(label, "compression", score, seed, **marks) for label, score in labels for seed in seeds]
    losses = [language(label, 3 - score / 100, seed, **marks) for label, score in labels for seed in seeds]
    if part.kind == "trained":
        for label, score in labels:
            put_training(folder / label, label, 3 - score / 100, part.width)
    elif part.kind == "alone":
        write(folder, mads, {"study": "mad", "width": part.width})
    else:
        write(folder / "mad", mads, {"study": "mad", "width": part.width})
        write(folder / "language", losses, {"study": "language", "width": part.width})
    if part.kind == "registered":
        version = {"digest": digest(PROTOCOL), "text": PROTOCOL, "date": "2026-01-01T00:00:00+00:00", "commit": "c" * 40}
        version |= {"committed": "2025-01-01T00:00:00+00:00", "records": 0, "judging": judging_code()}
        (folder / VERSIONS).write_text(json.dumps(version) + "\n")


def put_training(folder: Path, mixer: str, loss: float, width: int) -> None:
    folder.mkdir(parents=True)
    model = ModelConfig(vocabulary=32, width=width, depth=1, length=16, inner=48, mixer=mixer).to_dict()
    config = {"model": model, "data": {"context": 16}, "train": {"batch": 2, "seed": 0, "lr": 1e-3}}
    (folder / "run.json").write_text(json.dumps({"config": config, "starts": [], "parameters": 5}))
    point = {"step": 1, "loss": 4.0, "validation": loss, "tokens_per_second": 10.0}
    (folder / "metrics.jsonl").write_text(json.dumps(point) + "\n")


def verdicts(folder: Path, above: Path) -> Verdicts:
    """By the folders of the runs, which are named as they are seen from `above`."""
    found: Verdicts = Counter()
    for study in judge_folder(folder):
        places = tuple(sorted((folder / name).resolve().relative_to(above).as_posix() for name in study.results.folders))
        found[places, tuple((claim.title, claim.verdict) for claim in study.claims)] += 1
    return found


parts = st.builds(
    Part,
    kind=st.sampled_from(("registered", "halves", "alone", "trained")),
    gain=st.integers(-9, 9),
    seeds=st.integers(1, 3),
    width=st.sampled_from((16, 32)),
)


@settings(max_examples=40, deadline=None)
@given(
    st.dictionaries(st.tuples(st.sampled_from("abc"), st.sampled_from(("x", "mad", "language"))), parts, min_size=1, max_size=5)
)
def test_every_folder_above_has_the_verdicts_of_its_parts(tree: dict[tuple[str, str], Part]) -> None:
    """Named as badly as can be: a study may lie in a folder that is called like a half."""
    with tempfile.TemporaryDirectory() as path:
        root = Path(path).resolve()
        own: Verdicts = Counter()
        for (outer, inner), part in tree.items():
            place = root / outer / "studies" / inner / "study"
            put(part, place)
            own += verdicts(place, root)
        assert verdicts(root, root) == own
        for outer in {outer for outer, _ in tree}:
            within = {key: count for key, count in own.items() if key[0][0].startswith(f"{outer}/")}
            assert verdicts(root / outer, root) == within
            assert verdicts(root / outer / "studies", root) == within


def test_a_half_alone_of_a_registered_study_lacks_the_other(tmp_path: Path) -> None:
    """So that nobody can draw the half that suits."""
    put(Part("registered", 5, 2, 16), tmp_path)
    (whole,), (half,) = judge_folder(tmp_path), judge_folder(tmp_path / "mad")
    assert [claim.verdict.word for claim in whole.claims] == ["supported"]
    assert [(claim.verdict.word, claim.lacking) for claim in half.claims] == [("not run", ["loss"])]


def test_a_training_run_is_no_half_of_a_study_beside_it(tmp_path: Path) -> None:
    put(Part("alone", 5, 2, 16), tmp_path / "mad")
    put_training(tmp_path / "tiny", "hyperglu", 2.0, 16)
    assert [study.results.folders for study in judge_folder(tmp_path)] == [("mad",), ("tiny",)]
