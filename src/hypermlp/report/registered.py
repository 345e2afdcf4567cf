"""The protocol of a registered study on its page: when it was fixed, what it says, what changed after the first record."""

from __future__ import annotations

from html import escape

from hypermlp.report.markup import facts, paragraph, plural
from hypermlp.report.study import Study
from hypermlp.report.table1 import TITLES
from hypermlp.studies.protocol import deviations


def protocol_section(study: Study) -> str:
    """Empty for a study without a protocol."""
    protocol = study.protocol
    if protocol is None:
        return ""
    first = study.versions[0]
    about = {
        "title": protocol.title,
        "registered": f"digest {first.digest}, commit {(first.commit or 'none')[:12]} of {first.committed or 'no date'}",
        "first run": f"after {first.date}",
        "seeds": f"{protocol.seeds} of the runs that count",
        **{name: text for name, text in protocol.why.items()},
    }
    html = facts(about)
    for problem in study.unregistered:
        html += paragraph(f"Not registered beforehand: {problem}.", "warning")
    changed = deviations(study.versions)
    if changed:
        html += paragraph(f"{plural(len(changed), 'deviation')} from the protocol after the first record:")
        for version, lines in changed:
            items = "".join(f"<li>{escape(line)}</li>" for line in lines)
            when = paragraph(f"{version.date}, after {plural(version.records, 'run')} (digest {version.digest})")
            html += f'<div class="finding inconclusive">{when}<ul>{items}</ul></div>'
    else:
        html += paragraph("Nothing was changed after the first record.")
    html += paragraph(limits(study))
    return html + f"<details><summary>the file</summary><pre>{escape(study.versions[-1].text)}</pre></details>"


def limits(study: Study) -> str:
    """Tasks that tell nothing, because all solve them or all guess."""
    found = []
    for task in study.tasks:
        bound = study.bound([mixer for mixer in study.mixers if study.score(mixer, task)], task)
        found += [f"{TITLES[task]} is {bound} for every mixer."] if bound else []
    return " ".join(found) or "No task is at ceiling or at floor for every mixer."
