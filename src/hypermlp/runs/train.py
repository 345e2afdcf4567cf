"""A training run: data, model and training joined in a folder of its own (train/run_folder.py)."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TextIO, get_args

import torch

from hypermlp import notice
from hypermlp.batch import Batch
from hypermlp.checks import choose_from, same_settings
from hypermlp.data.corpus import INDEX, SPLITS, Corpus, SplitName, open_corpus, read_corpus
from hypermlp.data.packing import Batches
from hypermlp.data.shards import prepare
from hypermlp.data.text import find_source
from hypermlp.data.tokenizers import Tokenizer, find_tokenizer
from hypermlp.files import TOKENIZER
from hypermlp.interrupts import stop_signals
from hypermlp.mixers import own
from hypermlp.mixers.lags import LagExtension
from hypermlp.models.lm import LanguageModel
from hypermlp.models.saved import CONFIG, MODEL_TYPE
from hypermlp.provenance import provenance
from hypermlp.runs.configs import count
from hypermlp.runs.generate import open_model, write_text
from hypermlp.train.checkpoint import Checkpoints
from hypermlp.train.config import DataConfig, RunConfig
from hypermlp.train.distributed import World
from hypermlp.train.language import TrainConfig, new_training, train
from hypermlp.train.metrics import check_loggers
from hypermlp.train.optimisation import Recipe
from hypermlp.train.run_folder import RunFolder
from hypermlp.train.training import Step, Training

IN_MEMORY = 2**26  # bytes of text up to which a corpus is tokenised at every start
SHARED = ("vocabulary", "width", "depth", "mixer", "style", "tied")  # of a model and the one it begins with
# Fields that change how a run is computed, watched and kept, not what it computes.
FREE = {f.name for f in dataclasses.fields(TrainConfig)} - {f.name for f in dataclasses.fields(Recipe)} - {"batch"}


@dataclass(frozen=True)
class Run:
    """A run that is ready to train."""

    config: RunConfig
    folder: RunFolder
    world: World
    corpus: Corpus
    batches: Batches  # of training
    validation: Sequence[Batch]
    training: Training
    parameters: int
    checkpoints: Checkpoints
    lock: TextIO | None  # of the first process
    loggers: Sequence[str] = ("tensorboard",)
    begin: Path | None = None  # whose weights it began with

    @property
    def stopped(self) -> bool:
        """Before its last step."""
        return self.training.step < self.config.train.steps

    def steps(self) -> Iterator[Step]:
        """Train; SIGTERM and Ctrl-C end it after the step it is at, with a checkpoint."""
        metrics = None
        if self.world.main:
            metrics = self.folder.open_metrics(self.training.step, self.loggers, self.config.to_dict())
        try:
            with stop_signals("stopping, saving a checkpoint …" if self.world.main else None) as signals:
                yield from train(
                    self.training,
                    self.config.train,
                    self.batches.passes,
                    self.checkpoints,
                    metrics,
                    validation=self.validation,
                    sample=self.sample if self.config.train.sample else None,
                    stopping=lambda: bool(signals),
                )
            if self.world.main and not self.stopped:
                self.folder.save_model()
        finally:
            if metrics is not None:
                metrics.close()
            if self.lock is not None:
                self.lock.close()

    def sample(self, model: LanguageModel) -> str:
        return "".join(write_text(model, self.corpus.tokenizer, "", self.config.train.sample, seed=self.config.train.seed))


def start(
    config: RunConfig,
    out: Path,
    world: World | None = None,
    *,
    resume: bool = False,
    loggers: Sequence[str] = ("tensorboard",),
    begin: Path | None = None,
    lag_extension: str | None = None,
) -> Run:
    """Check everything, take the folder, and load the last checkpoint where there is one.

    Args:
        config: what is trained, on what, and how.
        out: the run's folder; a new one, unless `resume`.
        world: the processes; None: this one alone.
        resume: continue the run in that folder.
        loggers: where metrics go besides metrics.jsonl (train/metrics.py: LOGGERS).
        begin: a saved model or a run whose weights it begins with, and whose model may differ in length alone. The optimiser
            begins anew.
        lag_extension: what HyperGLU gets at the new lags of such a model (mixers/lags.py).
    """
    check_loggers(loggers)
    if lag_extension is not None:
        choose_from("--lag-extension", lag_extension, get_args(LagExtension))
        if begin is None:
            raise ValueError("--lag-extension says what the new lags of a trained model get: give that model too, with --from")
    world = (world or World()).arranged(config.train.mesh)
    trained = None
    if begin is not None:
        trained, tokenizer = trained_model(config, begin, lag_extension)
        config = dataclasses.replace(config, model=trained.config)  # its own sizes, whatever the name stands for
    config.train.share(world.along("dp"))  # a batch that cannot be divided fails here,
    parameters = count(config.model)  # and a model that cannot be built here
    folder = RunFolder(out)
    held = folder.take(resume) if world.main else None
    world.share(None)  # others wait for the folder
    try:
        corpus = find_corpus(config.data, folder.corpus, world)
        if corpus.tokenizer.vocabulary > config.model.vocabulary:
            raise ValueError(
                f"the tokenizer has {corpus.tokenizer.vocabulary} tokens, more than model.vocabulary "
                f"({config.model.vocabulary}); give model.vocabulary={corpus.tokenizer.vocabulary}"
            )
        if trained is not None and tokenizer.fingerprint != corpus.tokenizer.fingerprint:
            raise ValueError(f"{begin} has another tokenizer ({tokenizer.name}) than {corpus.name} ({corpus.tokenizer.name})")
        batches, validation = (make_batches(config, corpus, split, world) for split in SPLITS)
        if world.main:
            source = {} if begin is None else {"begin": {"model": str(begin), "lag_extension": lag_extension}}
            write_down(config, corpus, parameters, folder, source)
        world.share(None)
        torch.manual_seed(config.train.seed)
        model = trained or LanguageModel(config.model)
        training = new_training(model, config.train, world)
        files = {
            CONFIG: json.dumps({"model_type": MODEL_TYPE, **config.model.to_dict()}, indent=2),
            TOKENIZER: json.dumps(corpus.tokenizer.to_dict()),
        }
        checkpoints = folder.open_checkpoints(world, config.train.keep, files)
        latest = checkpoints.latest()
        if latest is not None:
            training.restore(partial(checkpoints.load, latest))
        steps = range(min(len(validation), config.train.evaluate_batches))
        held_out = [one for step in steps for one in validation.passes(step)]
        return Run(config, folder, world, corpus, batches, held_out, training, parameters, checkpoints, held, loggers, begin)
    except BaseException:
        if held is not None:
            held.close()
        raise


def trained_model(config: RunConfig, folder: Path, lag_extension: Any) -> tuple[LanguageModel, Tokenizer]:
    """The trained model of a folder in the length of this run, and its tokenizer."""
    trained, tokenizer = open_model(folder)
    there, here = trained.config.to_dict(), config.model.to_dict()
    differing = [f"model.{name} is {there[name]!r} there, not {here[name]!r}" for name in SHARED if there[name] != here[name]]
    if differing:
        raise ValueError(f"{folder} holds another model: {'; '.join(differing)}")
    if there["length"] != (length := config.model.length):
        return trained.extended(length, lag_extension).train(), tokenizer
    if lag_extension is not None:
        raise ValueError(
            f"{folder} has model.length={length} as well, so there are no new lags: leave out --lag-extension, or give a "
            "greater model.length"
        )
    return trained.train(), tokenizer


def make_batches(config: RunConfig, corpus: Corpus, split: SplitName, world: World) -> Batches:
    """Those of this process; training's are shuffled, and validation's are one epoch in order."""
    return Batches(
        corpus,
        split,
        context=config.data.context,
        batch=config.train.batch,
        micro=config.train.micro,
        seed=config.train.seed if split == "train" else None,
        documents=config.data.documents,
        rank=world.batch_rank,
        world=world.along("dp"),
    )


def write_down(config: RunConfig, corpus: Corpus, parameters: int, folder: RunFolder, source: dict[str, Any]) -> None:
    """Add this start to run.json; refused if it would compute something else than earlier starts."""
    described = {
        "name": corpus.name,
        "tokenizer": corpus.tokenizer.fingerprint,
        "tokens": {name: len(tokens) for name, tokens in corpus.splits.items()},
    }
    code = own.adopt(dict.fromkeys(config.model.mixers))  # what the caller named, and has registered
    new = json.loads(json.dumps({"config": config.to_dict(), "corpus": described, "own": code, **source}))
    old = folder.read()
    starts = old.pop("starts", [])
    if old:
        old.pop("parameters", None)
        check_same(old, new, folder.path)
    folder.write({**new, "parameters": parameters, "starts": [*starts, provenance(config.train.seed)]})


def check_same(old: dict[str, Any], new: dict[str, Any], out: Path) -> None:
    """Refuse what would compute something else than the run in `out`, by what run.json says and would say."""
    free = {f"train.{name}" for name in FREE}
    before, after = old["config"]["train"], new["config"]["train"]
    if after["steps"] > before["steps"]:
        free.add("train.steps")
        end = before["decay"] or before["steps"]
        if after["decay"] == end:
            free.add("train.decay")
        elif after["decay"] is None:
            notice.once(f"more train.steps also stretch the cosine; train.decay={end} leaves it as it was")
    same_settings(out, *({**run, **run["config"], "config": None} for run in (old, new)), free=free)


def find_corpus(data: DataConfig, shards: Path, world: World) -> Corpus:
    """Open a prepared corpus, or tokenise: a small one in memory, a large one once, into shards in the run's folder."""
    prepared = next((folder for folder in (Path(data.corpus), shards) if (folder / INDEX).is_file()), None)
    if prepared is not None:
        return open_corpus(prepared)
    source = find_source(data.corpus)
    tokenizer = find_tokenizer(data.tokenizer or "bytes", source)
    if source.size <= IN_MEMORY and not data.corpus.startswith("hub:"):
        return read_corpus(source, tokenizer)
    if world.size > 1:
        raise ValueError(f"data.corpus ({data.corpus}) is large; prepare it once, then give the folder of the prepared one")
    notice.once(f"tokenising {data.corpus} into {shards}; if that is stopped, the same command continues it")
    return prepare(source, shards, tokenizer, workers=os.cpu_count() or 1, provenance=provenance())
