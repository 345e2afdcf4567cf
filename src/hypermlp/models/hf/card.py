"""The model card of an exported model: what it is, and the figures of the run that trained it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from hypermlp.models.lm import LanguageModel, count_parameters


def model_card(net: LanguageModel, run: Mapping[str, Any] | None = None, last: Mapping[str, Any] | None = None) -> str:
    """The text of README.md. run: what run.json holds. last: the last record of metrics.jsonl with a validation loss."""
    config = net.config
    mixers = ", ".join(dict.fromkeys(config.mixers))
    rows = {
        "parameters": f"{count_parameters(net):,}",
        "mixer": mixers,
        "width, depth, context": f"{config.width}, {config.depth}, {config.length}",
        "vocabulary": f"{config.vocabulary:,}",
    }
    rows |= figures(run or {}, last or {})
    table = "\n".join(f"| {name} | {value} |" for name, value in rows.items())
    return f"""---
library_name: transformers
pipeline_tag: text-generation
tags: [hypermlp, {mixers}]
---

# A language model with {mixers}

| | |
| --- | --- |
{table}

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

# pip install 'hypermlp[hf]'; trust_remote_code=True runs modeling_hypermlp.py, which imports it
model = AutoModelForCausalLM.from_pretrained(FOLDER, trust_remote_code=True)
tokenizer = AutoTokenizer.from_pretrained(FOLDER)
```

The mixer and its rivals are described in HyperMLP: An Integrated Perspective for Sequence Modeling (arXiv 2602.12601).
"""


def figures(run: Mapping[str, Any], last: Mapping[str, Any]) -> dict[str, str]:
    """What the record of the run says, and nothing more."""
    found: dict[str, str] = {}
    corpus, starts = run.get("corpus") or {}, run.get("starts") or [{}]
    if "name" in corpus:
        found["corpus"] = str(corpus["name"])
    if "tokens" in last:
        found["trained on"] = f"{last['tokens']:,} tokens, {last['step']:,} updates"
    if "validation" in last:
        loss = float(last["validation"])
        found["validation loss"] = f"{loss:.3f} nats per token (perplexity {math.exp(loss):.2f})"
    for name in ("date", "commit", "hypermlp", "torch"):
        if starts[-1].get(name):
            found[name] = str(starts[-1][name])
    return found
