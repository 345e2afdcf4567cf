"""The folder of a training run: what lies where.

run.json          the configuration, the corpus, and where, when and by which command it was started
metrics.jsonl     a line per update
checkpoints/      the last ones
model/            the trained model, when the run is finished
corpus/           shards of a large corpus
lock              held by the process that works here
"""

from __future__ import annotations

RUN, METRICS, CHECKPOINTS, MODEL, CORPUS = "run.json", "metrics.jsonl", "checkpoints", "model", "corpus"
