"""Every benchmark by its name: what it measures, what can be changed, and how it runs into a file of results (record.py)."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_type_hints

from hypermlp.bench import decode, gpu, kernels, latency, layer, model, profile, table5
from hypermlp.bench.cases import BASELINE, BUILDERS
from hypermlp.bench.layer import DEFAULT_SHAPES, MIXER_SHAPES, Shape
from hypermlp.bench.record import ResultsFile
from hypermlp.bench.table5_mixers import choose_table5_mixers
from hypermlp.checks import at_least_one, choose_from
from hypermlp.files import free_path
from hypermlp.mixers.groups import choose_mixers
from hypermlp.overrides import read_overrides

Tell = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class LayerFields:
    shape: tuple[str, ...] = tuple("x".join(map(str, shape)) for shape in DEFAULT_SHAPES)
    only: tuple[str, ...] = tuple(BUILDERS)  # mixers
    rounds: int = 5
    threads: tuple[int, ...] = (2, 1)  # one thread is CPU time
    match: bool = False  # qk_rank such that parameters agree with softmax attention's
    against: str | None = None  # the authors' hyperglu.py, which is executed
    dtype: Literal["float32", "bfloat16"] = "float32"
    memory: bool = True  # each in a fresh process

    def __post_init__(self) -> None:
        check_names(self.only, self.against, given=self.only != LayerFields.only)


@dataclass(frozen=True, kw_only=True)
class MixerFields:
    mixers: str = "core"  # names, labels, groups, FILE.py:CLASS
    shape: tuple[str, ...] = tuple("x".join(map(str, shape)) for shape in MIXER_SHAPES)
    rounds: int = 5
    threads: tuple[int, ...] = (2, 1)
    dtype: Literal["float32", "bfloat16"] = "float32"
    memory: bool = True


@dataclass(frozen=True, kw_only=True)
class ModelFields:
    """Of Table 5; part=equal is the comparison at equal parameters, with the optimiser, whose sizes are its own."""

    scale: Literal["paper", "laptop", "quick"] = "laptop"
    part: Literal["all", "model", "growth", "long", "equal"] = "all"
    mixers: str = "all"
    batch: int | None = None
    rounds: int | None = None
    mad: str = "128x128x128"
    language: str = "1x1024x512"
    depth: int = 8
    vocabulary: int = 32000
    threads: tuple[int, ...] = (2, 1)


@dataclass(frozen=True, kw_only=True)
class DecodeFields:
    context: tuple[int, ...] = (256, 1024, 4096, 16384)  # each with a block_size to match
    batch: tuple[int, ...] = (1, 8)
    width: int = 768
    rounds: int = 15


@dataclass(frozen=True, kw_only=True)
class LatencyFields:
    context: tuple[int, ...] = (256, 1024, 4096, 16384)  # windows, which are full
    batch: tuple[int, ...] = (1, 8)
    weights: tuple[str, ...] = tuple(latency.WEIGHTS)
    only: tuple[str, ...] = ()  # mixers; none: all
    model: bool = False  # a language model of 1.1 M parameters, in one call and by its modules
    cold: bool = False  # streams take turns token by token, so each finds caches that others have used
    width: int = 768
    steps: int = 20000
    threads: int = 2


@dataclass(frozen=True, kw_only=True)
class ProfileFields:
    shape: tuple[str, ...] = ("8x1024x768", "128x128x128")
    only: tuple[str, ...] = ("hyperglu native", BASELINE)
    against: str | None = None

    def __post_init__(self) -> None:
        check_names(self.only, self.against, given=True)


@dataclass(frozen=True, kw_only=True)
class KernelFields:
    arch: tuple[int, ...] = kernels.ARCHITECTURES  # compute capabilities; 942 is AMD's gfx942
    dtype: tuple[str, ...] = kernels.TYPES

    def __post_init__(self) -> None:
        for name in self.dtype:
            choose_from("dtype", name, kernels.TYPES)
        for number in self.arch:
            choose_from("arch", str(number), tuple(map(str, kernels.SHARED_LIMIT)))


@dataclass(frozen=True, kw_only=True)
class GpuFields:
    rounds: int = 20
    against: str | None = None


def check_names(only: Sequence[str], against: str | None, *, given: bool) -> None:
    """Bad names fail before anything is measured."""
    for name in only:
        choose_from("only", name, tuple(BUILDERS))
    if given and "authors" in only and against is None:
        raise ValueError("only=authors needs against=, the path of the authors' hyperglu.py")
    if against is not None and not Path(against).is_file():
        raise ValueError(f"against ({against}) must be the authors' hyperglu.py")


@dataclass(frozen=True)
class BenchEntry:
    about: str
    takes: str  # time
    fields: type[Any]
    run: Callable[[Any, Path, Tell], list[Path]]  # what is asked for, the folder, who hears how it goes → the files


def fill(
    name: str, run: Callable[..., Any], fields: Any, out: Path, tell: Tell, picture: bool = True, **options: Any
) -> list[Path]:
    """Run a benchmark that gives row after row, into a new file; if there is one already, into a numbered one beside it."""
    path = free_path(out / f"{name}.json", *([".png"] if picture else []))
    results = ResultsFile(path, name, dataclasses.asdict(fields))
    run(**options, tell=tell, done=results.add)
    return [path]


def shapes(texts: Sequence[str]) -> list[Shape]:
    return [Shape.parse(text) for text in texts]


def run_layer(fields: LayerFields, out: Path, tell: Tell) -> list[Path]:
    return fill(
        "layer", layer.run, fields, out, tell,
        shapes=shapes(fields.shape), names=fields.only, rounds=fields.rounds, thread_counts=fields.threads,
        match=fields.match, against=fields.against, dtype=fields.dtype, with_memory=fields.memory,
    )  # fmt: skip


def run_mixers(fields: MixerFields, out: Path, tell: Tell) -> list[Path]:
    return fill(
        "mixers", layer.run, fields, out, tell,
        shapes=shapes(fields.shape), names=[BASELINE, *choose_mixers(fields.mixers)], rounds=fields.rounds,
        thread_counts=fields.threads, match=True, dtype=fields.dtype, with_memory=fields.memory,
    )  # fmt: skip


def run_model(fields: ModelFields, out: Path, tell: Tell) -> list[Path]:
    """Parts of Table 5 resume in their files, and take more mixers and rounds."""
    if fields.part == "equal":
        kinds = [
            model.mad(Shape.parse(fields.mad)),
            model.language(Shape.parse(fields.language), fields.depth, fields.vocabulary),
        ]
        options: dict[str, Any] = {"rounds": fields.rounds or 5, "thread_counts": fields.threads}
        return fill("equal", model.run, fields, out, tell, picture=False, kinds=kinds, **options)
    names = choose_table5_mixers(None if fields.mixers == "all" else fields.mixers)
    found = []
    if fields.part in ("model", "all"):
        found.append(table5.run_model(out, fields.scale, names, batch=fields.batch, rounds=fields.rounds, tell=tell))
    if fields.part in ("growth", "all"):
        found.append(table5.run_growth(out, fields.scale, names, rounds=fields.rounds, tell=tell))
    if fields.part in ("long", "all"):
        found.append(table5.run_long(out, fields.scale, names, tell=tell))
    return found


def run_decode(fields: DecodeFields, out: Path, tell: Tell) -> list[Path]:
    return fill(
        "decode", decode.run, fields, out, tell,
        lengths=fields.context, batches=fields.batch, width=fields.width, rounds=fields.rounds,
    )  # fmt: skip


def run_latency(fields: LatencyFields, out: Path, tell: Tell) -> list[Path]:
    """The same command resumes, with more contexts, batches and weights, too."""
    path = out / f"latency{'-model' if fields.model else ''}{'-cold' if fields.cold else ''}.json"
    latency.run(path, tell=tell, **vars(fields))
    return [path]


def run_profile(fields: ProfileFields, out: Path, tell: Tell) -> list[Path]:
    names = (*fields.only, *(["authors"] if fields.against and "authors" not in fields.only else []))
    options: dict[str, Any] = {"shapes": shapes(fields.shape), "names": names, "against": fields.against}
    return fill("profile", profile.run, fields, out, tell, picture=False, **options)


def run_kernels(fields: KernelFields, out: Path, tell: Tell) -> list[Path]:
    """Compile and count, and where everything that it needs was compiled, predict."""
    from hypermlp.bench import predictions, roofline
    from hypermlp.ops.triton.device import CURE, installed

    if installed() is None:
        raise ImportError(f"bench kernels needs triton: {CURE}")
    path = out / "kernels.json"
    results = ResultsFile(path, "kernels", dataclasses.asdict(fields), anew=True)
    kernels.run(fields.arch, fields.dtype, tell=tell, done=results.add)
    if {device.arch for device in roofline.DEVICES} <= set(fields.arch) and "bfloat16" in fields.dtype:
        tell("predicting")
        results.extend([], predicted=predictions.predict(), assumptions=roofline.ASSUMPTIONS)
    return [path]


def run_gpu(fields: GpuFields, out: Path, tell: Tell) -> list[Path]:
    gpu.need_gpu("gpu bench")
    return fill("gpu", gpu.run, fields, out, tell, picture=False, rounds=fields.rounds, against=fields.against)


BENCHMARKS: dict[str, BenchEntry] = {
    "layer": BenchEntry("HyperGLU's implementations beside softmax attention", "half an hour", LayerFields, run_layer),
    "mixers": BenchEntry("layers of any mixers at equal parameters", "minutes a mixer", MixerFields, run_mixers),
    "model": BenchEntry(
        "the paper's Table 5: whole models, growing layers, long contexts; part=equal: models of equal size", "half an hour",
        ModelFields, run_model,
    ),
    "decode": BenchEntry("one token after another: milliseconds and bytes of cache", "minutes", DecodeFields, run_decode),
    "latency": BenchEntry("every token timed alone: tail, deadlines, first token", "hours", LatencyFields, run_latency),
    "profile": BenchEntry("where a training step's time goes", "a minute", ProfileFields, run_profile),
    "kernels": BenchEntry("GPU kernels, compiled without a GPU", "minutes", KernelFields, run_kernels),
}  # fmt: skip
ON_GPU = BenchEntry("layers, GPT-2 small and decoding beside SDPA, after a check of all values", "minutes", GpuFields, run_gpu)


def read_fields(name: str, benchmark: BenchEntry, changes: Sequence[str]) -> Any:
    """A benchmark's fields with some changed: FIELD=VALUE."""
    kinds = {field.name: get_type_hints(benchmark.fields)[field.name] for field in dataclasses.fields(benchmark.fields)}
    fields = benchmark.fields(**read_overrides(changes, kinds, f"bench {name}"))
    for field, value in vars(fields).items():
        for number in value if isinstance(value, tuple) else (value,):
            if isinstance(number, int) and not isinstance(number, bool):
                at_least_one(field, number)
    return fields
