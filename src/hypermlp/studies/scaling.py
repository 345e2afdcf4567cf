"""Scaling curves: language models of several widths, trained on tokens in proportion to their parameters.

A setting is a width and a number of tokens per parameter. Learning rates are searched at the smallest widths and follow from
there (`transfer_rate`); at the next width twice and half of what followed is tried, once. Before the largest models are
trained, the curves of the smaller ones say what their losses will be, and that is written down (predictions.json).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Self

from hypermlp.bench import flops
from hypermlp.data.corpus import INDEX
from hypermlp.files import Record, read_json, read_json_lines, write_json
from hypermlp.models.budget import MatchedModel
from hypermlp.models.lm import LanguageModel
from hypermlp.provenance import provenance
from hypermlp.runs.configs import build_without_memory
from hypermlp.runs.cost import operations
from hypermlp.studies import language
from hypermlp.studies.folder import is_record
from hypermlp.studies.language import LanguageJob, LanguageStudy
from hypermlp.studies.scaling_law import LEAST, FittedLaw, fit_power_law, forecast
from hypermlp.studies.search import FINAL, Choices, Chosen, Outcome, Place, Search, Tuned, Where
from hypermlp.studies.study import Pairing, Study
from hypermlp.studies.worker import Job, RunContext, Work

PREDICTIONS = "predictions.json"
TRANSFER = "transfer"  # phase of the runs that test a rate which was not searched
STEEPEST = 1.0  # of the exponent of the width, with which a rate falls
AROUND = (0.5, 2.0)  # times the rate that followed: what the test tries
RULE = (
    "The rate falls as width^−a through the best rates of both searched widths, each taken at the lowest point of a parabola "
    f"in the logarithm of the rate; a stays between 0 and {STEEPEST:g}. The initial scale is the best one of the larger width."
)


class ScalingSetting(NamedTuple):
    width: int
    ratio: float  # tokens per parameter

    @property
    def key(self) -> str:
        return f"width={self.width},ratio={self.ratio:g}"


@dataclass(frozen=True, kw_only=True)
class ScalingStudy(LanguageStudy):
    """Every number that the runs have in common; width, steps and lr are those of one run, which `at` sets."""

    width: int = 1
    steps: int = 1
    lr: float = 1e-3
    widths: tuple[int, ...]
    ratios: tuple[float, ...] = (20.0,)  # tokens per parameter; curves and predictions are those of the last
    searched: int = 2  # how many of the smallest widths have searches of their own
    largest_seeds: int = 2  # at the largest width

    kind: ClassVar[str] = "scaling"
    flat: ClassVar[bool] = False
    chosen: ClassVar[tuple[str, ...]] = ("width", "steps", "widths", "ratios", "largest_seeds")

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, values, least in (("widths", self.widths, 2), ("ratios", self.ratios, 1)):
            if len(values) < least or list(values) != sorted(set(values)) or values[0] <= 0:
                raise ValueError(f"{name} {values} must be at least {least}, above 0, and rise")
        if not 2 <= self.searched <= len(self.widths) or self.largest_seeds < 1:
            raise ValueError(
                f"searched ({self.searched}) must be at least 2 and at most the number of widths ({len(self.widths)}), "
                f"largest_seeds ({self.largest_seeds}) at least 1"
            )
        if self.given is not None or (self.search is not None and self.search.ranks):
            raise ValueError(
                "a scaling study searches its rates, or has one for all (lr): leave out given, and ranks of the search"
            )

    @property
    def work(self) -> Work:
        return train

    @property
    def largest(self) -> ScalingSetting:
        return ScalingSetting(self.widths[-1], self.ratios[-1])

    def check(self, mixers: Sequence[str], seeds: int) -> None:
        """The corpus is asked for when the models are matched."""
        Study.check(self, mixers, seeds)

    def settings(self) -> dict[str, ScalingSetting]:
        """Small models first."""
        found = [ScalingSetting(width, ratio) for width in self.widths for ratio in self.ratios]
        return {setting.key: setting for setting in found}

    def shape(self, setting: ScalingSetting) -> tuple[int, int]:
        return setting.width, self.length

    def match(self, setting: ScalingSetting, mixers: Sequence[str]) -> dict[str, MatchedModel]:
        if self.corpus != "stdlib" and not (Path(self.corpus) / INDEX).is_file():
            raise ValueError(
                f"there is no corpus in {self.corpus} yet: hypermlp data prepare packages --out {self.corpus}; or say another "
                "one, corpus=FOLDER (corpus=stdlib does for small models)"
            )
        return self.language(setting, 1).match(None, mixers)

    def language(self, setting: ScalingSetting, steps: int) -> LanguageStudy:
        """The study of the language models of one setting."""
        own = {field.name: getattr(self, field.name) for field in dataclasses.fields(LanguageStudy)}
        return LanguageStudy(**{**own, "width": setting.width, "steps": steps, "search": None})

    def jobs(self, setting: ScalingSetting, mixer: str, model: MatchedModel, seed: int) -> list[Any]:
        steps = math.ceil(setting.ratio * model.parameters / (self.batch * self.length))
        return [
            ScalingJob(
                mixer=mixer,
                seed=seed,
                setting=setting,
                study=self.language(setting, steps),
                inner=model.inner,
                size=model.mixer.size,
                note=model.mixer.note,
            )
        ]

    # ---- the search at small widths, and what follows from it ----

    def seeds_of(self, key: str, seeds: int) -> int:
        return min(seeds, self.largest_seeds) if self.settings()[key].width == self.widths[-1] else seeds

    def is_searched(self, key: str) -> bool:
        setting = self.settings()[key]
        return setting.width in self.widths[: self.searched] and setting.ratio == self.ratios[-1]

    def transfer(self, choices: Mapping[Where, Tuned], found: Mapping[Place, Outcome], pairings: Sequence[Pairing]) -> Choices:
        """Rates of all settings, once the searches of a mixer are finished; other ratios have the rate of their width."""
        searched = [key for key in self.settings() if self.is_searched(key)][-2:]
        settings, all_choices = self.settings(), dict(choices)
        for pairing in pairings:
            place, width = (pairing.mixer, pairing.key), pairing.setting.width
            alike = (pairing.mixer, ScalingSetting(width, self.ratios[-1]).key)
            if place in choices or not all((pairing.mixer, key) in choices for key in searched):
                continue
            if alike in choices:
                all_choices[place] = choices[alike]
                continue
            scale = choices[pairing.mixer, searched[-1]].scale  # the larger model's
            best = {settings[key].width: optimum(found[Place(pairing.mixer, key, scale)]) for key in searched}
            all_choices[place] = Tuned(pairing.mixer, transfer_rate(best, width), scale)
        return all_choices

    @property
    def tested(self) -> ScalingSetting | None:
        """Where transferred rates are tested: at the first width without a search, unless it is the largest."""
        return ScalingSetting(self.widths[self.searched], self.ratios[-1]) if self.searched < len(self.widths) - 1 else None

    def rate_tests(self, choices: Mapping[Where, Tuned], pairings: Sequence[Pairing]) -> list[Job]:
        found: list[Job] = []
        for pairing in pairings:
            tuned = choices.get((pairing.mixer, pairing.key))
            if pairing.setting == self.tested and tuned is not None:
                for factor in AROUND:
                    rate = rounded(factor * tuned.rate)
                    (job,) = self.at(rate, tuned.scale).jobs(pairing.setting, pairing.mixer, pairing.model, seed=0)
                    found.append(TransferTest(job=job, work=self.work, mixer=pairing.mixer, variant=pairing.mixer))
        return found

    def planned_runs(self, pairing: Pairing, mixers: Sequence[str], seeds: int, each: int) -> float:
        tests = len(AROUND) if self.search is not None and pairing.setting == self.tested else 0
        return super().planned_runs(pairing, mixers, seeds, each) + tests

    # ---- first all but the largest, then a prediction, then the largest ----

    def run(self, out: Path, mixers: Sequence[str], **how: Any) -> list[Record]:
        """As Study.run; what the curves of the smaller models predict is in the folder before the largest are trained."""
        if len(self.widths) > max(LEAST, self.searched):
            self.smaller().run_all(out, mixers, **how)
            self.predict(out, mixers)
        return self.run_all(out, mixers, **how)

    def run_all(self, out: Path, mixers: Sequence[str], **how: Any) -> list[Record]:
        return super().run(out, mixers, **how)

    def smaller(self) -> Self:
        """Without the largest models; the seeds of all that are left are those of the whole study."""
        return dataclasses.replace(self, widths=self.widths[:-1], largest_seeds=2**30)

    def predict(self, out: Path, mixers: Sequence[str]) -> None:
        """Write down the losses of the largest models, of all mixers of which none has been trained or predicted."""
        records = [r for r in read_json_lines(out / "runs.jsonl", is_record)[0] if r.get("phase", FINAL) == FINAL]
        file, largest = out / PREDICTIONS, self.largest
        known: list[Record] = read_json(file)["predictions"] if file.exists() else []
        done = {r["mixer"] for r in records if r["setting"] == largest.key}
        done |= {p["mixer"] for p in known if p["setting"] == largest.key}
        models = self.match(largest, mixers)
        new = []
        for mixer in (mixer for mixer in mixers if mixer not in done):
            (job,) = self.jobs(largest, mixer, models[mixer], seed=0)
            points = curve_points(records, mixer, self.ratios[-1])
            if len(points) < LEAST:
                continue
            compute = training_flops(job)[0]
            losses = [list(own.values()) for own in points.values()]
            fitted = fit_power_law(list(points), losses)
            interval = forecast(fitted, losses, compute, seeds=self.largest_seeds)
            numbers = {"loss": fitted.law.loss(compute), "low": interval.low, "high": interval.high}
            about = {"mixer": mixer, "setting": largest.key, "flops": compute}
            new.append({**about, **numbers, "records": sum(map(len, losses)), "made": provenance()})
        if new:
            write_json(file, {"predictions": [*known, *new]})


def optimum(outcome: Outcome) -> float:
    """The best rate of a search: where a parabola through it and its neighbours, in the logarithm of the rate, is lowest."""
    assert outcome.rate is not None
    scores = {rate: loss for (rate, rung), loss in outcome.scores.items() if rung == 1 and math.isfinite(loss)}
    rates = sorted(scores)
    at = rates.index(outcome.rate) if outcome.rate in scores else -1
    if not 0 < at < len(rates) - 1:
        return outcome.rate
    (x0, y0), (x1, y1), (x2, y2) = ((math.log(rate), scores[rate]) for rate in rates[at - 1 : at + 2])
    left, right = (y1 - y0) / (x1 - x0), (y2 - y1) / (x2 - x1)
    bend = (right - left) / (x2 - x0)
    if bend <= 0:
        return outcome.rate
    return math.exp(min(max((x0 + x1) / 2 - left / (2 * bend), x0), x2))


def transfer_rate(best: Mapping[int, float], width: int) -> float:
    """The rate at a width from the best ones at two others, by RULE; where a is cut off, the line keeps their mean."""
    (w1, r1), (w2, r2) = sorted(best.items())
    exponent = min(max(-math.log(r2 / r1) / math.log(w2 / w1), 0.0), STEEPEST)
    return rounded(math.sqrt(r1 * r2) * (width / math.sqrt(w1 * w2)) ** -exponent)


def rounded(rate: float) -> float:
    return float(f"{rate:.3g}")


# quick: to see it work.
QUICK: dict[str, Any] = {
    "corpus": "stdlib",
    "widths": (16, 32, 48, 64),
    "ratios": (1.0,),
    "length": 64,
    "batch": 16,
    "evaluations": 8,
    "sample": 4,
    "search": Search(rates=(2e-3, 4e-3, 8e-3), rungs=(1.0,), widen=0),
}


def scaling_study(standard: ScalingStudy, *, quick: bool, search: bool | None, **changes: Any) -> ScalingStudy:
    """The standard study at a scale, with other numbers where they are given.

    search: whether rates are searched; without a search, `lr` is the rate of all.
    """
    numbers: dict[str, Any] = {"search": standard.search, **(QUICK if quick else {}), **changes}
    rates = numbers.pop("lr", None)
    if search is False:
        if rates is None or len(rates) != 1:
            raise ValueError("without a search all models have one learning rate: say lr=NUMBER")
        return dataclasses.replace(standard, **numbers | {"search": None, "lr": rates[0]})
    if rates is not None:
        numbers["search"] = dataclasses.replace(numbers["search"], rates=tuple(sorted(rates)))
    return dataclasses.replace(standard, **numbers)


# ---- points and curves ----

Points = dict[float, dict[int, float]]  # operations of training → seed → loss


def curve_points(records: Sequence[Record], mixer: str, ratio: float) -> Points:
    """The validation losses of a mixer's runs that count, small models first."""
    found: Points = {}
    for record in records:
        if record["mixer"] == mixer and record["ratio"] == ratio and record["error"] is None and record["final"] is not None:
            found.setdefault(record["flops"], {})[record["seed"]] = record["final"]["validation_loss"]
    return dict(sorted(found.items()))


def fit_points(points: Points) -> FittedLaw:
    return fit_power_law(list(points), [list(losses.values()) for losses in points.values()])


# ---- one run ----


@dataclass(frozen=True, kw_only=True)
class ScalingJob(LanguageJob):
    """A language model of one setting; its rate and initial scale are part of its name."""

    setting: ScalingSetting

    @property
    def key(self) -> str:
        scale = "" if self.study.init_scale == "0.02" else f",scale={self.study.init_scale}"
        return f"scaling/{self.mixer}/{self.setting.key}/seed={self.seed},lr={self.study.lr:g}{scale}"

    @property
    def identity(self) -> Record:
        about = {
            "kind": ScalingStudy.kind,
            "setting": self.setting.key,
            "width": self.setting.width,
            "ratio": self.setting.ratio,
        }
        return {**super().identity, **about}

    @property
    def tokens(self) -> int:
        return self.study.steps * self.study.batch * self.study.length

    @property
    def cost(self) -> float:
        """In the unit of operations: six for each parameter and token, about."""
        return float(self.tokens) * self.setting.width**2


@dataclass(frozen=True, kw_only=True)
class TransferTest(Chosen):
    """A run at a rate beside the one that followed."""

    @property
    def identity(self) -> Record:
        return {**super().identity, "phase": TRANSFER}


def training_flops(job: ScalingJob) -> tuple[float, list[str]]:
    """Operations of a whole run, and the mixers whose mixing is not in them, since nobody has counted it (bench/flops.py)."""
    config = job.study.config(job.mixer, job.size, job.inner)
    parts, uncounted = operations(config, job.study.length)
    if uncounted:
        return sum(parts.values()) * job.tokens, list(uncounted)
    per_row = flops.model(build_without_memory(config), 1, job.study.length).training
    return per_row / job.study.length * job.tokens, []


def state_bytes(model: LanguageModel, length: int) -> int | None:
    """What decoding keeps of a context of this length; None where a layer has no cache."""
    return model.new_cache(1, max_len=length, device="meta").nbytes if model.has_cache else None


@cache
def corpus_tokens(corpus: str) -> int:
    return len(language.load_corpus(corpus).split("train"))


def train(job: ScalingJob, context: RunContext | None = None) -> Record:
    """The record of a language model, with what it took: tokens, operations, bytes."""
    record = language.train(job, context)
    compute, uncounted = training_flops(job)
    model = build_without_memory(job.study.config(job.mixer, job.size, job.inner))
    took = {
        "tokens": job.tokens,
        "epochs": job.tokens / corpus_tokens(job.study.corpus),
        "flops": compute,
        "uncounted": uncounted,
        "bytes": {"weights": 4 * record["parameters"], "state": state_bytes(model, job.study.length)},
    }
    return {**record, **took}
