"""Trains the models that come with the package and writes them to src/hypermlp/bundled, with their cards and digests.

OMP_NUM_THREADS=1 python docs/make_models.py     (a quarter of an hour on one core; what is trained is kept)

The same seeds on another machine, or with other threads, give other bits and nearly the same scores.
"""

from pathlib import Path
from typing import Any

import torch

from hypermlp.cli.train import run_training
from hypermlp.data.corpus import TokenStream
from hypermlp.evals.perplexity import measure
from hypermlp.files import delete, file_sha256, write_json
from hypermlp.models.bundled import ABOUT, BUNDLED
from hypermlp.models.hf.card import model_card
from hypermlp.models.lm import count_parameters
from hypermlp.models.saved import CONFIG, WEIGHTS, load_model, save_model, save_weights
from hypermlp.provenance import provenance
from hypermlp.report.terminal import new_console
from hypermlp.runs.generate import corpus_for, open_model
from hypermlp.studies import demo, mad
from hypermlp.studies.task_models import model_folder, open_task_model, save_task_model, task_accuracy
from hypermlp.train.run_folder import RunFolder

RUNS = Path("runs/bundled")
TASK, MIXER = demo.TASKS[0], demo.SHOWN
PIECE = 32768  # tokens from the beginning of the held-out text, whose loss a test measures again
TEXT_LICENCE = "PSF-2.0"
LONGER = ("train.steps=2800", "train.warmup=140")
COMMAND = " ".join(("hypermlp train tiny", *LONGER))


def main() -> None:
    found = provenance()  # before anything changes in the source's folder
    origin = {"provenance": {key: found[key] for key in ("date", "commit", "hypermlp", "python", "torch")}}
    about = {"language": make_language(RUNS / "language"), "copying": make_copying(RUNS / "copying")}
    write_json(BUNDLED / ABOUT, {name: {**own, **origin} for name, own in about.items()})


def make_language(run: Path) -> dict[str, Any]:
    """`hypermlp train tiny` for about one pass over its text; its weights, rounded to bfloat16."""
    folder, trained = BUNDLED / "language", RunFolder(run)
    if trained.finished_model() is None:
        run_training(new_console(), "tiny", LONGER, out=run, resume=trained.run.is_file())
    net, tokenizer = open_model(run)
    delete(folder)
    save_model(net.to(torch.bfloat16), folder, tokenizer.to_dict())

    model, corpus = load_model(folder).eval(), corpus_for("stdlib", tokenizer)
    held_out = corpus.split("validation")
    piece = TokenStream([held_out.read(0, PIECE)], [])
    found = {"loss": measure(model, held_out, tokenizer).loss, "loss_of_piece": measure(model, piece, tokenizer).loss}
    last = [record for record in trained.read_metrics() if "validation" in record][-1]
    last = {key: value for key, value in last.items() if key != "validation"}
    card = model_card(net, trained.read(), last).partition("```python")[0] + LANGUAGE_USE
    text = LANGUAGE_TEXT.format(command=COMMAND, corpus=corpus.name, loss=found["loss"])
    (folder / "README.md").write_text(card + text, encoding="utf-8")
    return {
        "what": "writes Python, byte by byte",
        "command": COMMAND,
        "text": corpus.name,
        "text_licence": TEXT_LICENCE,
        **facts(folder, count_parameters(net)),
        **found,
        "piece": PIECE,
    }


LANGUAGE_USE = """    hypermlp generate "def main(" --model hypermlp:language

```python
import hypermlp.models.hf  # registers the model with transformers
from hypermlp.models.bundled import find_model
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained(find_model("hypermlp:language"))
tokenizer = AutoTokenizer.from_pretrained(find_model("hypermlp:language"))
```

## Text and licence

"""
LANGUAGE_TEXT = """It was trained by `{command}`, and its weights were rounded to
bfloat16. It learned the source of the {corpus}, which the Python Software Foundation distributes under the PSF License 2.0
(<https://docs.python.org/3/license.html>). A twentieth of the files was held out; on all of that text, which `hypermlp eval
--model hypermlp:language` reads with the same Python, its loss is {loss:.4f} nats per byte.

The weights are part of hypermlp and under its MIT licence. The model shows how the program works. It is far too small to be
useful: it writes what looks like Python and means nothing.
"""


def make_copying(run: Path) -> dict[str, Any]:
    """HyperGLU of the demo at selective copying, seed 0, at the size that the demo gives it."""
    folder, saved = BUNDLED / "copying", model_folder(run, TASK, MIXER)
    if not (saved / CONFIG).is_file():
        study = demo.demo_study()
        (setting,) = study.settings_of(TASK)
        (job,) = study.jobs(setting, MIXER, study.match(setting, demo.MIXERS)[MIXER], 0)
        model, record = mad.train_model(job)
        save_task_model(run, model, job, record)
    model = open_task_model(saved).model
    delete(folder)
    folder.mkdir(parents=True)
    save_weights(model.to(torch.bfloat16), folder)
    (folder / CONFIG).write_bytes((saved / CONFIG).read_bytes())
    again = open_task_model(folder)
    accuracy, parameters = task_accuracy(again), count_parameters(model)
    text = COPYING_TEXT.format(parameters=parameters, accuracy=accuracy, examples=len(again.inputs))
    (folder / "README.md").write_text(text, encoding="utf-8")
    return {
        "what": "copies what it has read",
        "command": "hypermlp demo",
        "text": "made by the program: selective copying of MAD",
        "text_licence": "MIT",
        **facts(folder, parameters),
        "accuracy": accuracy,
    }


COPYING_TEXT = """# A model that copies

HyperGLU (G-cg-q-12o) of `hypermlp demo`, trained on selective copying: data tokens lie among blanks, and behind the token
`copy` the model writes them down in order. {parameters:,} parameters, rounded to bfloat16; it gets {accuracy:.1%} of the
answers of {examples} test examples right (`hypermlp eval --model hypermlp:copying`).

    hypermlp explore --model hypermlp:copying

The program makes the examples itself; nobody's text is in the model. It is part of hypermlp and under its MIT licence.
"""


def facts(folder: Path, parameters: int) -> dict[str, Any]:
    return {
        "parameters": parameters,
        "bytes": (folder / WEIGHTS).stat().st_size,
        "sha256": file_sha256(folder / WEIGHTS),
    }


if __name__ == "__main__":
    main()
