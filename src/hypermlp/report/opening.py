"""How a study's page begins: its title, what was found in one sentence, its verdicts, and where it comes from."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from hypermlp.report.markup import plural
from hypermlp.report.shown import unit_of
from hypermlp.report.table1 import task_title
from hypermlp.report.words import beside, claim_words, corrected_words, gain_words, measure_words
from hypermlp.verdicts.claims import CONTRADICTED, NOT_RUN, WORDS, Claim, Verdict
from hypermlp.verdicts.estimates import seeds_text
from hypermlp.verdicts.judged import Judged
from hypermlp.verdicts.predictions import HYPERGLU, HYPERMLP
from hypermlp.verdicts.registration import deviations
from hypermlp.verdicts.results import AVERAGE, LOSS, LOSSES, Results, plain_name


@dataclass(frozen=True)
class ClaimLine:
    word: str
    text: str  # the verdict, and what limits it
    title: str
    numbers: list[str]  # by pair of mixers


@dataclass(frozen=True)
class Opening:
    title: str
    lead: str
    whose: str  # the claims are
    tally: list[tuple[str, str]]  # verdict, and how many claims have it
    problems: Sequence[str]  # what keeps it from counting as registered
    claims: list[ClaimLine]
    origin: str


TOO_SHORT = (
    "A quick run: it shows that everything works. Its models were trained for too few steps to rank them, so nothing is "
    "judged here. To rank them, run the same study without the quick scale and with several seeds."
)


def opening(study: Judged) -> Opening:
    claims = shown_claims(study)
    counts = Counter(claim.verdict.word for claim in claims)
    return Opening(
        title(study.results),
        TOO_SHORT if study.results.quick else lead(study.results),
        "Claims of the paper" if study.results.protocol is None else "Claims that were registered",
        [(word, f"{counts[word]} {word}") for word in WORDS if counts[word]],
        study.results.objections,
        [ClaimLine(claim.verdict.word, claim_words(claim), claim.title, deciding(claim)) for claim in claims],
        origin(study.results),
    )


def shown_claims(study: Judged) -> Sequence[Claim]:
    """Its claims; none for a quick run, nor where no claim of the paper was tested at all."""
    tested = any(claim.verdict.word != NOT_RUN for claim in study.claims)
    return study.claims if not study.results.quick and (tested or study.results.protocol is not None) else ()


def deciding(claim: Claim) -> list[str]:
    """The gains that a reader needs first: of the halves, where there are such, and of tasks on which the claim fails."""
    whole = [item for item in claim.judged if item.measure in (AVERAGE, *LOSSES)]
    shown = [item for item in claim.judged if item in whole or not whole or item.verdict == Verdict(CONTRADICTED)]
    found: dict[str, list[str]] = {}
    for item in shown:
        pair = f"{with_name(item.better)} − {with_name(item.worse)}"
        found.setdefault(pair, []).append(f"{measure_words(item.measure)} {gain_words(item)}{beside(item)}")
    lines = [f"{pair}: {'; '.join(gains)}" for pair, gains in found.items()]
    corrected = corrected_words(claim)
    return [*lines, f"{corrected[0].upper()}{corrected[1:]}"] if corrected else lines


def with_name(mixer: str) -> str:
    name = plain_name(mixer)
    return mixer if name == mixer else f"{name} ({mixer})"


def title(study: Results) -> str:
    """That of its protocol, or what was trained."""
    if study.protocol is not None:
        return study.protocol.title
    tasks = [task_title(task) if i == 0 else inside(task_title(task)) for i, task in enumerate(study.tasks)]
    parts = [] if not tasks else [", ".join(tasks) if len(tasks) < 4 else f"MAD, {len(tasks)} tasks"]
    if "language" in study.plans:
        parts.append("language modelling")
    text = " and ".join(parts) or "a search that is under way"
    faithful = ", faithful protocol" if any(plan.get("protocol") == "faithful" for plan in study.plans.values()) else ""
    return f"{text[0].upper()}{text[1:]}{faithful}"


def titles(studies: Sequence[Judged]) -> list[str]:
    """A title for each; those that several would have, with the folder that tells them apart."""
    found = [title(study.results) for study in studies]
    places = [folder_of(study.results) for study in studies]
    return [f"{own} ({place})" if place and found.count(own) > 1 else own for own, place in zip(found, places, strict=True)]


def folder_of(study: Results) -> str:
    """Where a study lies below what was read; empty where that says nothing."""
    one = len(study.folders) == 1 and study.folders[0] not in ("mad", "language")
    where = study.folders[0] if one else os.path.commonpath(study.folders) if study.folders else ""
    return "" if where in (".", "mad", "language") else where


def lead(study: Results) -> str:
    """What was found: HyperGLU beside softmax attention, or else the two best, on each of at most two tasks."""
    tasks = study.tasks if len(study.tasks) < 3 else [AVERAGE]
    found = [sentence for measure in (*tasks, *study.losses[:1]) if (sentence := standing(study, measure))]
    if not found:
        return "No run has a score of every task yet."
    seeds = seeds_text(study.score(mixer, measure) for mixer in study.mixers for measure in study.measures)
    return f"{'; '.join(found)}. {plural(len(study.mixers), 'mixer')}, {seeds}{'' if seeds == 'one seed' else ' each'}."


def standing(study: Results, measure: str) -> str:
    scores = {mixer: score.mean for mixer in study.mixers if (score := study.score(mixer, measure)) is not None}
    lower = measure in LOSSES or study.measure != "accuracy"
    best = sorted(scores, key=lambda mixer: scores[mixer], reverse=not lower)
    main = next((mixer for mixer in (HYPERGLU, HYPERMLP) if mixer in scores), None)
    pair = [main, study.reference] if main is not None and study.reference in scores else best[:2]
    if not pair:
        return ""
    if measure in LOSSES:
        loss = "loss" if measure == LOSS else "validation loss"
        digits, unit, where = 3, "", f"nats of {loss} in language modelling (lower is better)"
    else:
        digits, percent = unit_of(study.measure)[1], "\N{NO-BREAK SPACE}%" if study.measure == "accuracy" else ""
        unit, where = percent, "on average over MAD" if measure == AVERAGE else f"at {inside(task_title(measure))}"
        where += "" if percent else f" ({study.measure}, lower is better)"
    shown = ", ".join(f"{plain_name(str(mixer))} {scores[str(mixer)]:.{digits}f}{unit}" for mixer in pair)
    return f"{shown} {where}"


def inside(words: str) -> str:
    """A title within a sentence; MQAR and RegBench stay as they are."""
    return words[0].lower() + words[1:] if words[1:].islower() else words


def origin(study: Results) -> str:
    """Commits, and what was fixed before."""
    commits = list(dict.fromkeys(str(start.get("commit") or "an unknown commit") for start in study.starts))
    told = f"Run at {', '.join(commits)}." if commits else "It was not recorded which code ran."
    if any(commit.endswith("+") for commit in commits):
        told += " A + marks changes that were not committed."
    version = study.registered
    if version is not None and version.commit is not None:
        changed = deviations(study.versions)
        after = f"{plural(len(changed), 'deviation')} after that" if changed else "nothing was changed after that"
        told += f" Registered at {version.commit[:12]} of {(version.committed or '')[:10]}, before the first run; {after}."
    return told
