"""Fair by construction: every mixer gets the same number of runs of a search, over rates and initial scales."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hypermlp.studies.folder import Folder
from hypermlp.studies.language import LanguageStudy
from hypermlp.studies.mad import TaskStudy
from hypermlp.studies.protocol import PACKAGED, load_protocol, read_protocol
from hypermlp.studies.search import PHASE, Place, Search, Tuned, choose, read_search
from hypermlp.studies.study import Agenda, Study
from hypermlp.verdicts.folders import read_studies
from made_up import PROTOCOL

SEARCH = Search(rates=(1e-3, 2e-3, 4e-3), scales=("0.02", "torch", "width"), rungs=(0.25, 1.0), seeds=2, widen=0, level=0.0)
STUDY = TaskStudy(
    protocol="clean",
    tasks=("memorization",),
    scale="baseline",
    width=16,
    depth=1,
    batch=16,
    examples=64,
    tests=32,
    epochs=None,
    steps={"memorization": 8},
    decays=(0.1,),
    changes={"memorization": {"vocab_size": 16, "seq_len": 8}},
    search=SEARCH,
)


def made_up_search(study: Study, out: Path, mixers: list[str], seeds: int = 2) -> list[dict[str, Any]]:
    """All records of a study whose losses are made up: of each mixer others, and now and then none at all."""
    draw = random.Random(0)
    with Folder(out) as folder:
        agenda = Agenda(study, folder, study.plan_pairings(folder, mixers), seeds)
        todo = agenda.ready()
        for job in todo:  # which grows
            score = None if draw.random() < 0.3 else draw.choice([1.0, draw.random()])
            found = {"score": score} if "rung" in job.identity else {"metrics": {"accuracy": 0.5, "validation_loss": 1.0}}
            folder.append({"key": job.key, **job.identity, "error": None, "curve": [], "seconds": 1.0, **found})
            todo += agenda.follow(folder.records[job.key])
        return list(folder.records.values())


def counts(records: list[dict[str, Any]]) -> dict[tuple[str, str], int]:
    found: dict[tuple[str, str], int] = {}
    for record in records:
        if record.get("phase") == PHASE:
            place = (record["mixer"], record.get("setting", ""))
            found[place] = found.get(place, 0) + 1
    return found


def test_every_scale_is_searched_with_every_rate_and_the_best_pair_counts(tmp_path: Path) -> None:
    records = made_up_search(STUDY, tmp_path, ["S", "G-cg-q-12o"])
    found = counts(records)
    assert set(found.values()) == {3 * 2 * (3 + 2)}, "three scales, two seeds, three rates of which two go on"
    outcomes = read_search(SEARCH, records)
    assert {place.scale for place in outcomes} == {"0.02", "torch", "width"}
    ((where, tuned),) = [(w, t) for w, t in choose(SEARCH, outcomes).items() if w[0] == "S"]
    losses = {p: o.scores[o.rate, 1.0] for p, o in outcomes.items() if p.mixer == "S" and o.rate is not None}
    best = min(losses, key=lambda place: losses[place])
    assert tuned == Tuned("S", outcomes[best].rate or 0, best.scale)
    finals = [r for r in records if r.get("phase") != PHASE and r["mixer"] == "S"]
    assert {(r["lr"], r["init_scale"]) for r in finals} == {(tuned.rate, tuned.scale)}
    (study,) = read_studies(tmp_path)
    assert Place(*where, tuned.scale) in study.tuned
    assert {r["init_scale"] for r in study.mad if r["mixer"] == "S"} == {tuned.scale}


def test_a_search_resumes_with_scales(tmp_path: Path) -> None:
    whole = made_up_search(STUDY, tmp_path / "a", ["S"])
    kept = whole[: len(whole) // 2]
    again = made_up_search(STUDY, tmp_path / "b", ["S"])
    assert len(again) == len(whole)
    with Folder(tmp_path / "c") as folder:
        agenda = Agenda(STUDY, folder, STUDY.plan_pairings(folder, ["S"]), 2)
        for record in kept:
            folder.append(record)
        assert all(job.key not in {record["key"] for record in kept} for job in agenda.ready())


def test_the_scale_reaches_the_models(tmp_path: Path) -> None:
    for study in (STUDY, LanguageStudy(width=16, depth=1, length=16, batch=2, steps=4, lr=1e-3, evaluations=2, sample=1)):
        with Folder(tmp_path / study.kind) as folder:
            (pairing,) = study.plan_pairings(folder, ["S-pc"])
        keys = set()
        for scale in ("0.02", "torch"):
            (job,) = replace(study, search=None).at(1e-3, scale).jobs(pairing.setting, "S-pc", pairing.model, 0)
            assert job.identity["init_scale"] == scale
            keys.add(job.key)
            config = job.study.config("S-pc", None, 16) if study.kind == "language" else None
            assert config is None or config.init_scale == scale
            if config is None:
                weight = job.build().blocks[0].mixer.q.weight
                assert weight.std().item() == pytest.approx(0.02 if scale == "0.02" else 1 / math.sqrt(3 * 16), rel=0.2)
        assert len(keys) == 2


FAIR = [path for path in sorted(PACKAGED.glob("*.toml")) if read_protocol(path.read_text()).fair]


@pytest.mark.parametrize("path", FAIR, ids=lambda path: path.stem)
def test_in_a_fair_protocol_every_mixer_has_as_many_runs_of_the_search(path: Path, tmp_path: Path) -> None:
    protocol = load_protocol(path)
    for name, study in protocol.studies.items():
        if isinstance(study, TaskStudy):
            study = replace(study, tasks=study.tasks[:1])  # each has a search of its own
        found = counts(made_up_search(study, tmp_path / name, list(protocol.mixers), seeds=1))
        assert {mixer for mixer, _ in found} == set(protocol.mixers)
        assert len(set(found.values())) == 1
        assert study.search is not None
        assert study.search.seeds >= 2
        assert set(study.search.scales) == {"0.02", "torch", "width"}


@pytest.mark.parametrize(
    "old, new, message",
    [
        ("widen = 0", "widen = 1, level = 0.0", "fair = true needs widen = 0"),
        ("widen = 0", "widen = 0, level = 0.01", "fair = true needs level = 0"),
        (
            "widen = 0",
            "widen = 0, level = 0.0, ranks = [8]",
            "fair = true needs ranks = .*rows of their own, such as hyperglu@8",
        ),
        ("search = {rates = [1e-3, 1e-2], rungs = [1.0], widen = 0}", "rates = [1e-3]", "fair = true needs a search"),
        ("widen = 0", 'widen = 0, level = 0.0, scales = ["big"]', r"search: scales \('big'\) must be one of"),
        ("widen = 0", 'widen = 0, level = 0.0, scales = ["torch", "torch"]', "must be named once each"),
    ],
)
def test_searches_that_are_not_equal_are_refused(old: str, new: str, message: str, tmp_path: Path) -> None:
    text = PROTOCOL.replace("seeds = 5\n", "seeds = 5\nfair = true\n", 1).replace(old, new)
    (tmp_path / "mine.toml").write_text(text)
    with pytest.raises(ValueError, match=rf"^mine.toml: \[mad\]: .*{message}"):
        load_protocol(tmp_path / "mine.toml")
