"""The protocol of a registered study on its page: when it was fixed, what it says, what was changed after that."""

from __future__ import annotations

from collections.abc import Sequence

from markupsafe import Markup

from hypermlp.report.markup import details, facts, paragraph, pieces, plural
from hypermlp.report.table1 import TITLES
from hypermlp.studies.protocol import read_protocol
from hypermlp.verdicts.claims import UNDECIDED
from hypermlp.verdicts.registration import Version, deviations, registered_version
from hypermlp.verdicts.results import Results


def protocol_section(study: Results) -> Markup:
    """Empty for a study without a protocol."""
    return registration(study.versions, study.objections, paragraph(limits(study))) if study.versions else Markup()


def registration(versions: Sequence[Version], objections: Sequence[str], more: Markup | None = None) -> Markup:
    """The version that counts, what keeps it from counting as registered, and what was changed later."""
    version = registered_version(versions) or versions[0]
    protocol = read_protocol(version.text)
    about = {
        "title": protocol.title,
        "registered": f"digest {version.digest}, commit {(version.commit or 'none')[:12]} of {version.committed or 'no date'}",
        "first run": f"after {version.date}",
        "seeds": f"{protocol.seeds} of the runs that count",
        **protocol.why,
    }
    html = facts(about)
    for objection in objections:
        html += paragraph(objection, "warning")
    changed = deviations(versions)
    if changed:
        html += paragraph(
            f"{plural(len(changed), 'deviation')} from the protocol after it was registered. They change no verdict."
        )
        for changes, lines in changed:
            when = paragraph(f"{changes.date}, after {plural(changes.records, 'run')} (digest {changes.digest})")
            html += pieces.finding(UNDECIDED, "", when + pieces.items(lines))
    else:
        html += paragraph("Nothing was changed after it was registered.")
    return html + (more or Markup()) + details("the file", pieces.pre(version.text))


def limits(study: Results) -> str:
    """Tasks that tell nothing, because all solve them or all guess."""
    found = []
    for task in study.tasks:
        bound = study.bound([mixer for mixer in study.mixers if study.score(mixer, task)], task)
        found += [f"{TITLES[task]} is at {bound} for every mixer."] if bound else []
    return " ".join(found) or "No task is at ceiling or at floor for every mixer."
