"""From the folders of studies to verdicts: what was measured, how far it may be trusted, and what it says of each claim.

    folders.py        a folder → Results, one for each study in it
    results.py        scores by mixer, measure and seed; gains of one mixer over another
    estimates.py      a mean over seeds and its interval
    claims.py         what a protocol expects of each comparison → a verdict; paper.toml has the paper's claims
    predictions.py    the paper's Table 4
    registration.py   which version of a protocol was fixed before the runs, and what changed after it

Nothing here draws, prints or runs anything.
"""
