"""The search of a study on its page: every initial scale and learning rate that was tried, what was chosen, ties, and ends of
the grid."""

from __future__ import annotations

import math
from collections.abc import Sequence

from markupsafe import Markup

from hypermlp.report.markup import TableCell, cell, details, duration, name_cell, paragraph, plural, table, words
from hypermlp.report.table1 import task_title
from hypermlp.studies.search import Outcome, Place, Search
from hypermlp.verdicts.estimates import NONE
from hypermlp.verdicts.results import Results, table_order


def search_section(study: Results) -> Markup:
    """Empty without a search."""
    if not study.searches:
        return Markup()
    html = Markup().join(paragraph(how(kind, plan), "note") for kind, plan in study.plans.items() if plan.get("search"))
    html += paragraph(findings(study))
    for setting in dict.fromkeys(place.setting for place in study.searches):
        found = {place: outcome for place, outcome in study.searches.items() if place.setting == setting}
        scales = {place.scale for place in found}
        title = "Language modelling" if not setting else setting_title(setting)
        rates = sorted({rate for outcome in found.values() for rate in outcome.rates})
        scale = ["initial scale"] if scales != {"0.02"} else []
        heads = ["mixer", *scale, "chosen", *(f"{rate:g}" for rate in rates), "notes"]
        rows = []
        for place in sorted(found, key=lambda place: (table_order(place.mixer), place.scale)):
            outcome = found[place]
            picked = [*pick(study, place), *notes(outcome)]
            chosen = cell(NONE if outcome.rate is None else f"{outcome.rate:g}", outcome.rate)
            own = [cell(place.scale)] if scale else []
            rows.append([name_cell(place.mixer), *own, chosen, *losses(outcome, rates), words("; ".join(picked))])
        html += details(title, table(heads, rows, left=("notes",)))
    return html


def pick(study: Results, place: Place) -> list[str]:
    """What of a mixer's was chosen here, where it had more to choose from than rates."""
    if place not in study.tuned:
        return []
    own = [one for one in study.searches if one.setting == place.setting and base(one.mixer) == base(place.mixer)]
    found = ["these ranks were chosen"] if len({one.mixer for one in own}) > 1 else []
    return [*found, "this scale was chosen"] if len({one.scale for one in own}) > 1 else found


def base(mixer: str) -> str:
    return mixer.partition("@")[0]


def setting_title(setting: str) -> str:
    task, _, changes = setting.partition("/")
    return task_title(task) + ("" if changes in ("", "baseline") else f": {changes.replace('_', ' ').replace(',', ', ')}")


def how(kind: str, plan: dict[str, object]) -> str:
    rules = plan["search"]
    assert isinstance(rules, dict)
    search = Search.from_plan(rules)
    rungs = ", ".join(f"{rung:.0%}" for rung in search.rungs)
    return (
        f"{'MAD' if kind == 'mad' else kind.capitalize()}: losses on the validation split, after {rungs} of the steps, with "
        f"{plural(search.seeds, 'seed')} of the search’s own; {search.keep:.0%} of the runs continue after a rung"
        + (f", and those within {search.level:.1%} of them. " if search.level else ". ")
        + (f"A best rate at the end of the grid widens it, up to {search.widen} times. " if search.widen else "")
        + (f"Initial scales {', '.join(search.scales)}, each with all rates. " if search.scales else "")
        + "What was chosen then trains with fresh seeds."
    )


def findings(study: Results) -> str:
    """How many searches there are, and what to be careful about."""
    found = list(study.searches.values())
    parts = [f"{len(found)} search{'' if len(found) == 1 else 'es'}."]
    for text, count in {
        "are under way": sum(outcome.rate is None for outcome in found),
        "widened the grid": sum(outcome.widened > 0 for outcome in found),
        "end at the last rate tried": sum(bool(outcome.end) for outcome in found),
        "have rates that are level with the chosen one": sum(bool(outcome.ties) for outcome in found),
    }.items():
        parts += [f"{count} of them {text}."] if count else []
    runs: dict[tuple[object, ...], float] = {}  # a run's records have its seconds up to each rung
    for record in study.searched:
        run = tuple(record.get(name) for name in ("mixer", "setting", "seed", "lr", "init_scale"))
        runs[run] = max(runs.get(run, 0.0), record.get("seconds") or 0.0)
    each = ", ".join(f"{mixer} {count}" for mixer, count in study.search_runs.items())
    return " ".join([*parts, f"{plural(len(runs), 'run')}, {duration(sum(runs.values()))} of training: {each}."])


def notes(outcome: Outcome) -> list[str]:
    """What a reader should know about a choice."""
    found = []
    if outcome.rate is None:
        found.append("under way")
    elif math.isinf(outcome.scores[outcome.rate, 1.0]):
        found.append("no rate has a finite loss; the lowest was taken")
    if outcome.end:
        found.append(f"the {outcome.end} rate that was tried")
    if outcome.ties:
        found.append(f"level with {', '.join(f'{rate:g}' for rate in outcome.ties)}")
    if outcome.widened:
        found.append(f"grid widened by {outcome.widened}")
    return found


def losses(outcome: Outcome, rates: Sequence[float]) -> list[TableCell]:
    """The loss of each rate at the last rung that it came to."""
    cells = []
    for rate in rates:
        if rate not in outcome.rates:
            cells.append(cell(NONE))
            continue
        rung = outcome.reached(rate)
        loss = outcome.scores[rate, rung]
        text = f"{loss:.3f}" if math.isfinite(loss) else "not finite"
        kind = "chosen" if rate == outcome.rate else ""
        cells.append(cell(text, loss, small="" if rung == 1 else f"after {rung:.0%}", kind=kind))
    return cells
