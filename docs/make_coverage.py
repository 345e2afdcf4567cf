"""Writes docs/coverage.md: everything that the paper has, and where it is here.

python docs/make_coverage.py

A pointer is a file or a folder, "file:name" for something defined in a file, "theory:NUMBER" for the check of a statement,
"hypermlp …" for a command, or "not here: …" with the reason. All are looked up, and the protocols' numbers are compared
with the configurations, before the page is written; tests/test_coverage.py does the same.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
import typer

from hypermlp.bench.table5 import SCALES
from hypermlp.bench.table5_mixers import TABLE5_MIXERS
from hypermlp.cli import app
from hypermlp.config import HyperGLUConfig
from hypermlp.evals.harness import SUITES
from hypermlp.mixers import HyperGLU, build_mixer
from hypermlp.mixers.labels import ALIASES
from hypermlp.models.budget import Matched, match_qk
from hypermlp.paper.published import SIZES, TABLE2_MIXERS
from hypermlp.paper.tables import BENCHMARKS, TABLE1, TABLE2, TABLE5, THRESHOLDS
from hypermlp.report.markdown import markdown_table
from hypermlp.runs.configs import CONFIGS, configure, count
from hypermlp.studies.language import LAST
from hypermlp.theory import STATEMENTS, select
from hypermlp.train.config import RunConfig

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "coverage.md"
CORE, HYPER, MEMORY = "src/hypermlp/ops/reference.py", "src/hypermlp/mixers/hyper.py", "src/hypermlp/analysis/memory.py"
LAST_EQUATION = 97


class Entry(NamedTuple):
    """Something of the paper, and the pointers to it."""

    name: str
    what: str
    pointers: tuple[str, ...]


def entry(name: str, what: str, *pointers: str) -> Entry:
    return Entry(name, what, pointers)


def protocol(name: str) -> tuple[str, ...]:
    """Pointers to a protocol and to its runs, once they are there."""
    runs = f"results/{name}" if (ROOT / "results" / name).is_dir() else f"not here: the runs of protocol `{name}`"
    return f"src/hypermlp/studies/protocols/{name}.toml", runs


# Equations by their numbers: "3-6" are four.
EQUATIONS = [
    entry("1", "a two-layer ReLU MLP", "theory:C.2"),
    entry("2", "attention with a general activation", "src/hypermlp/mixers/softmax.py:SoftmaxAttention", "theory:C.3"),
    entry("3-6", "attention as a dynamic two-layer MLP", "theory:C.3", "theory:2.1"),
    entry("7-10", "the head: h, o, W1 and W2 of core and context", f"{CORE}:mix", f"{HYPER}:project", "theory:C.3"),
    entry("11", "HyperGLU's activation", f"{CORE}:mix", "theory:2.4"),
    entry("12", "ReLU of L2Norm, and its scalar form", f"{CORE}:mix", "theory:B.2"),
    entry("13-14", "addresses α and readouts β", f"{MEMORY}:HyperTrace", "theory:C.5"),
    entry("15-19", "dynamic MLP, pool and activated readout", "theory:2.1", "theory:C.5"),
    entry("20", "extension consistency", "theory:2.3", "src/hypermlp/mixers/lags.py:extend_layer"),
    entry("21", "a rank-r adapter on W2 adds r directions", "theory:2.6"),
    entry("22-25", "the one-head block and its activation", f"{CORE}:mix", "theory:C.3"),
    entry("26-30", "slots, dictionary, pool and activated measure", f"{MEMORY}:HyperTrace", "theory:E.2", "theory:E.3"),
    entry("31-32", "selection of a sub-network", "theory:C.1", "theory:C.2"),
    entry("33-34", "extension consistency and padding invariance", "theory:C.6", "theory:C.7"),
    entry("35-37", "scores, output and boundaries of a head", "src/hypermlp/theory/geometry.py:layer_field", "theory:C.13"),
    entry("38-41", "the polyhedral case: U, V, B(X), cells", "theory:C.10"),
    entry("42", "mixing of hyperplane normals", "theory:C.12"),
    entry("43", "deformation of boundaries", "theory:C.14"),
    entry("44-45", "the readout as an operator on measures", "theory:D.4", "theory:D.5"),
    entry("46-47", "the dictionary and the block as its integral", "theory:E.1"),
    entry("48-51", "length-ℓ blocks, their norm, extension, truncation", "theory:F.1"),
    entry("52-56", "rank of W1 and of W2 in a residual MLP", "theory:F.3", "theory:F.5"),
    entry(
        "57",
        "the allocation: d/4, d and r_s = 16",
        "src/hypermlp/config.py:HyperGLUConfig",
        "src/hypermlp/models/budget.py:match_qk",
    ),
    entry("58-61", "gate and scale decoupled", f"{CORE}:mix", "theory:2.4"),
    entry("62-63", "scores and the attention baseline", f"{CORE}:mix", "src/hypermlp/mixers/registry.py:relu"),
    entry("64-65", "cost of attention", "src/hypermlp/bench/flops.py:softmax", "theory:G.2"),
    entry("66-67", "the head with DPLR mixing", f"{CORE}:mix", f"{CORE}:apply"),
    entry("68", "a vector times a DPLR matrix", f"{CORE}:apply", "theory:G.1"),
    entry("69-73", "time and state of a step", "src/hypermlp/bench/flops.py:hyper", "theory:G.2", "theory:G.3"),
    entry("74-75", "time of training", "src/hypermlp/bench/flops.py:hyper", "theory:G.4"),
    entry("76", "contractions along lags are convolutions", "theory:G.5"),
    entry("77-79", "slots as combinations of the context", "theory:H.3"),
    entry("80", "linear attention reads the whole pool", "theory:H.10"),
    entry("81-82", "LoRA on the readout side", "theory:2.6", "src/hypermlp/mixers/lora.py:AdaptedLinear"),
    entry("83-86", "a gate between V and O", "src/hypermlp/studies/protocols/gates.toml", "theory:2.6"),
    entry("87-90", "token-wise attention beside HyperMLP", "theory:I.1"),
    entry("91-96", "paying for mixing with d_qk", "src/hypermlp/models/budget.py:match_qk", "theory:I.2"),
    entry("97", "the skewed layout", "src/hypermlp/ops/chunked.py:Sheet", "docs/skew.png"),
]

SECTIONS = [
    entry("2.4", "HyperMLP and HyperGLU", f"{HYPER}:HyperGLU", f"{HYPER}:HyperMLP", "src/hypermlp/config.py:HyperGLUConfig"),
    entry("2.6", "parameters: q and k pay", "src/hypermlp/models/budget.py:match_qk", "hypermlp mixers --budget"),
    entry("3.a", "labels Base-Feat-Rank-TmixLayout", "src/hypermlp/mixers/labels.py:Label", "hypermlp mixers G-cg-q-12o"),
    entry("3.b", "language models of 340M and 1.3B", "src/hypermlp/paper/configs.py:fineweb", "hypermlp train"),
    entry("3.a", "six findings: result analysis (1) to (6)", "src/hypermlp/verdicts/paper.toml", "docs/reproduction.md"),
    entry("3.a", "(3), (4), (5) on ReLU and GLU alike", *protocol("labels")),
    entry("F.2.2", "q and k pay for mixing: ranks and heads", "src/hypermlp/models/budget.py:match_qk", *protocol("ranks")),
    entry("H.3", "learned registers", "src/hypermlp/mixers/registers.py:join", *protocol("registers")),
    entry("H.6", "LoRA on V and O rather than Q and K", "theory:2.6", *protocol("lora")),
    entry("H.7", "gates between V and O", *protocol("gates")),
    entry("I.3.1", "noisy recall: how many noise slots are active", "theory:I.3", *protocol("noise")),
    entry("I.3.2", "compression: summaries of the context", "results/compression", "docs/reproduction.md"),
    entry("I.3.3", "fuzzy recall: curved regions of acceptance", "theory:C.13", "results/table1"),
    entry("I.3.4", "selective copying: shifts in the readout", "src/hypermlp/tasks/copying.py", "results/tasks/copy-offsets"),
    entry("I.3.5, I.3.6", "clean recall and memorisation: little to gain", "results/table1", "docs/reproduction.md"),
    entry("J.1", "parameters in lag order, of any length", f"{HYPER}:SequenceMixing"),
    entry("J.2", "skewed blocks of rows", "src/hypermlp/ops/chunked.py:strip_scores", "src/hypermlp/ops/triton/skew.py"),
    entry("J.3", "mixing without forming R", "src/hypermlp/ops/chunked.py:Operator", f"{CORE}:apply"),
    entry("J.4", "fused kernels, and a fallback", "src/hypermlp/ops/triton", "src/hypermlp/ops/native", "docs/gpu.md"),
    entry("J", "autoregressive inference", "src/hypermlp/cache.py:Cache"),
    entry("K", "an L40S with compiled models", "hypermlp bench model", "docs/gpu.md", "not here: no GPU was available"),
    entry("L", "initialisation N(0, 0.02²), biases zero", f"{HYPER}:reset_parameters"),
    entry(
        "L",
        "embeddings initialised to zero",
        "not here: N(0, 0.02²), as nanoGPT and MAD have it; a tied embedding of zeros has no gradient",
        "src/hypermlp/models/lm.py:_init_around_mixers",
    ),
    entry("M", "Open LLM Leaderboard and general tasks", "src/hypermlp/evals/harness.py:SUITES", "hypermlp eval"),
    entry(
        "M",
        "acc_n: a random baseline subtracted and rescaled",
        "not here: Table 2 prints scores that are not rescaled, and so do we",
        "docs/evaluation.md",
    ),
    entry("M", "MAD", "src/hypermlp/tasks/mad.py", "hypermlp study run mad"),
    entry("M", "OpenWebText2 (jsonl.zst)", "src/hypermlp/data/text.py:read_compressed", "hypermlp data prepare"),
    entry("M", "FineWeb-Edu", "src/hypermlp/data/text.py:hub", "hypermlp data prepare"),
]

TABLES = [
    entry(
        "Table 1",
        "33 labels on MAD and NanoGPT",
        "hypermlp study run table1",
        "results/table1",
        *protocol("labels"),
        "not here: the runs at the paper's size",
    ),
    entry("Table 1, printed", "the paper's numbers", "src/hypermlp/paper/tables.py:TABLE1_TEXT"),
    entry(
        "Table 2",
        "language models on 16 benchmarks",
        "hypermlp train",
        "hypermlp eval",
        "not here: the runs, 15 and 100 billion tokens",
    ),
    entry("Table 2, printed", "the paper's numbers", "src/hypermlp/paper/tables.py:TABLE2_TEXT"),
    entry("Table 3", "asymptotic overhead", "theory:G.2", "theory:G.3", "theory:G.4"),
    entry("Table 4", "which tasks gain", "src/hypermlp/paper/tables.py:TABLE4", "docs/reproduction.md"),
    entry("Table 5", "cost of a GPT-2 with each system", "hypermlp bench model", "results/table5", "docs/efficiency.md"),
    entry("Table 5, printed", "the paper's numbers", "src/hypermlp/paper/tables.py:TABLE5_TEXT"),
    entry("Figure 1", "the head, drawn", "docs/make_picture.py", "docs/layer.png"),
    entry(
        "Figure 2", "variants as edits of one backbone", "src/hypermlp/mixers/labels.py:MEANING", "not here: a drawing of it"
    ),
    entry("Figure 3", "lag layout and blocks", "docs/make_skew_picture.py", "docs/skew.png"),
    entry("Figure 4", "map of the statements", "hypermlp theory"),
    entry(
        "Figure 5",
        "curves of the training loss",
        "hypermlp study report",
        "results/table1/report.html",
        "not here: the runs at the paper's size",
    ),
    entry("Algorithms", "none is numbered", f"{CORE}:mix"),
]

# The systems of Tables 2 and 5 by the paper's names; Table 1's are its labels.
TABLE5_SYSTEMS = {
    "HyperGLU": "hyperglu",
    "RWKV7": "rwkv7",
    "LinAttn": "linear",
    "HGRN2": "hgrn2",
    "SM(Naive)": "softmax",
    "SM(Flash)": "softmax",
    "GLA": "gla",
    "Mamba": "mamba",
    "GSA": "gsa",
    "PaTH": "path",
}
FILES = {"hyperglu": "hyper", "hypermlp": "hyper", "R-c": "labels"}


class Number(NamedTuple):
    """A number that the paper gives, and the same one here."""

    place: str
    what: str
    paper: Any
    here: Callable[[], Any]
    where: str
    within: float = 0  # share by which it may differ, where the paper rounds

    @property
    def is_equal(self) -> bool:
        here = self.here()
        return bool(abs(here / self.paper - 1) <= self.within if self.within else here == self.paper)


@cache
def table2(name: str) -> RunConfig:
    return configure(name)


def budgeted() -> Matched:
    found = match_qk("hyperglu", 768, 1024)
    assert found is not None
    return found


def update(config: RunConfig) -> float:
    return config.train.batch * config.data.context / 1e6


NANOGPT, LAYER = CONFIGS["nanogpt-owt2"], HyperGLUConfig(n_embd=768, n_head=2, block_size=1024)
SHOTS = {benchmark.name: benchmark.shots for suite in SUITES.values() for benchmark in suite}
ASKED = {"MMLU-P": 5, "GPQA": 0, "BBH": 3, "MATH": 4, "MuSR": 0}  # Table 2's caption; "others 0-shot"
COST = SCALES["paper"]


def millions(name: str) -> int:
    """Parameters of a model of Table 2 without its head, rounded as the paper's names are."""
    model = table2(name).model
    return round((count(model) - model.vocabulary * model.width) / 1e6)


def heads_of(system: str) -> int:
    with torch.device("meta"):
        layer: Any = TABLE5_MIXERS[system].build(COST.width, COST.time)
    return int(layer.n_head)


def linear_weights() -> float:
    """The deviation with which q begins, as the recipe that is released has it."""
    torch.manual_seed(0)
    return round(float(HyperGLU(LAYER).q.weight.detach().std()), 3)


NUMBERS = [
    *(
        Number("section 3", f"heads of {mixer}", 2, lambda m=mixer: build_mixer(m, 64, 64).n_head, "mixers/registry.py")
        for mixer in ("hyperglu", "S-pc", "R-c", "G-12o!")
    ),
    Number("section 2.6", "budget of a layer, in widths squared", 4, lambda: budgeted().target / 768**2, "models/budget.py"),
    Number("section 3.a", "evaluations", 80, lambda: NANOGPT.train.steps // NANOGPT.train.evaluate_every, "nanogpt-owt2"),
    Number("section 3.a", "steps between evaluations", 500, lambda: NANOGPT.train.evaluate_every, "nanogpt-owt2"),
    Number("section 3.a", "labels of Table 1", 33, lambda: len(TABLE1), "paper/tables.py"),
    Number("section 3.a", "evaluations of the final loss", 5, lambda: LAST, "studies/language.py"),
    Number("section 3.a", "thresholds of the loss", (3.3, 3.2, 3.1, 3.0), lambda: THRESHOLDS, "paper/tables.py"),
    *(
        Number("section 3.b", f"{what}, {name}", paper, here, name, within)
        for name, size, tokens in (("340m-15b", 340, 15.0), ("1.3b-100b", 1300, 100.0))
        for what, paper, here, within in (
            ("million parameters without the head", size, lambda n=name: millions(n), 0.025),
            ("corpus", "hub:HuggingFaceFW/fineweb-edu", lambda n=name: table2(n).data.corpus, 0),
            ("peak learning rate", 4e-4, lambda n=name: table2(n).train.lr, 0),
            ("weight decay", 0.1, lambda n=name: table2(n).train.weight_decay, 0),
            ("gradient clipping", 1.0, lambda n=name: table2(n).train.clip, 0),
            ("context", 4096, lambda n=name: table2(n).data.context, 0),
            ("vocabulary", 32000, lambda n=name: table2(n).model.vocabulary, 0),
            ("million tokens of a step", 0.5, lambda n=name: round(update(table2(n)), 1), 0),
            ("billion tokens of warm-up", 1.0, lambda n=name: round(table2(n).train.warmup * update(table2(n)) / 1e3, 2), 0),
            ("billion tokens", tokens, lambda n=name: round(table2(n).tokens / 1e9, 1), 0),
            ("precision", "bfloat16", lambda n=name: table2(n).train.precision, 0),
        )
    ),
    Number("appendix L", "d_vo, in widths", 1.0, lambda: (LAYER.vo_rank or 0) / LAYER.n_embd, "config.py"),
    Number("appendix L", "largest d_qk, in widths", 0.25, lambda: (LAYER.qk_rank or 0) / LAYER.n_embd, "config.py"),
    Number(
        "appendix L", "d_qk at 340M, in widths: d/8", 0.125, lambda: (table2("340m-15b").model.size or 0) / 1024, "340m-15b"
    ),
    Number("appendix L", "r_s of R1 and of R2", (16, 16), lambda: (LAYER.op1_rank, LAYER.op2_rank), "config.py"),
    Number("appendix L", "deviation of linear weights", 0.02, linear_weights, "mixers/hyper.py"),
    Number("appendix L", "routing heads for each head", 2, lambda: LAYER.routing_heads // LAYER.n_head, "config.py"),
    Number("appendix L", "taps of the convolutions", 4, lambda: LAYER.conv_kernel_size, "config.py"),
    Number("appendix L", "ε", 1e-12, lambda: LAYER.norm_eps, "config.py"),
    Number("appendix L", "φ", "sigmoid", lambda: LAYER.gate_act, "config.py"),
    Number("appendix L", "precision of Table 1's language models", "bfloat16", lambda: NANOGPT.train.precision, "nanogpt-owt2"),
    *(
        Number("appendix M", f"shots of {name}", ASKED.get(name, 0), lambda n=name: SHOTS[n], "evals/harness.py")
        for name in BENCHMARKS
    ),
    Number("Table 5", "layers, width", (12, 768), lambda: (COST.depth, COST.width), "bench/table5.py"),
    Number("Table 5", "tokens, batch", (1024, 8), lambda: (COST.time, COST.batch), "bench/table5.py"),
    Number("Table 5", "heads of attention, HyperGLU", (12, 2), lambda: tuple(map(heads_of, ("sdpa", "hyperglu"))), "bench"),
]


def systems() -> Iterator[Entry]:
    for name, size in SIZES.items():
        for title, mixer in TABLE2_MIXERS[size].items():
            yield entry(f"Table 2, {size}", title, file_of(mixer), f"hypermlp train {name} model.mixer={mixer}")
    for title, mixer in TABLE5_SYSTEMS.items():
        yield entry("Table 5", title, file_of(mixer), "hypermlp bench model")
    for label in TABLE1:
        what = f"{label} ({ALIASES[label]})" if label in ALIASES else label
        yield entry("Table 1", what, "src/hypermlp/mixers/labels.py:build", f"hypermlp mixers {label}")


def file_of(mixer: str) -> str:
    return f"src/hypermlp/mixers/{FILES.get(mixer, mixer)}.py"


def statements() -> Iterator[Entry]:
    for found in select([]):
        pointer = f"theory:{found.number}" if found.check else f"not here: {found.unchecked}"
        yield entry(f"{found.kind} {found.number}", found.title, pointer)


# ---- looking up ----


def problem(pointer: str) -> str | None:
    """Why a pointer leads nowhere; None if it does lead somewhere."""
    kind, _, rest = pointer.partition(":")
    if kind == "not here":
        return None if rest.strip() else "a reason is missing"
    if kind == "theory":
        known = rest in STATEMENTS or any(number.startswith(f"{rest} (") for number in STATEMENTS)
        return None if known else f"there is no statement {rest}"
    if pointer.startswith("hypermlp "):
        return None if command_exists(pointer.split()[1:]) else f"there is no command {pointer}"
    path = ROOT / kind
    if not path.exists():
        return f"there is no {kind}"
    if rest and not re.search(rf"^\s*(def|class) {rest}\b|^{rest}\b", path.read_text(encoding="utf-8"), re.M):
        return f"{kind} defines no {rest}"
    return None


def command_exists(words: list[str]) -> bool:
    found: Any = typer.main.get_command(app)
    for word in words:
        if not hasattr(found, "commands"):
            return True  # an argument
        if word not in found.commands:
            return False
        found = found.commands[word]
    return True


def numbers_of(equations: str) -> range:
    first, _, last = equations.partition("-")
    return range(int(first), int(last or first) + 1)


def problems() -> list[str]:
    """What is wrong with the page: pointers that lead nowhere, things of the paper without one, numbers that differ."""
    every = [*EQUATIONS, *SECTIONS, *TABLES, *systems(), *statements()]
    found = [f"{e.name}: {why}" for e in every for pointer in e.pointers if (why := problem(pointer))]
    found += [f"{e.name} has no pointer" for e in every if not e.pointers]
    counted = [number for e in EQUATIONS for number in numbers_of(e.name)]
    if counted != list(range(1, LAST_EQUATION + 1)):
        found.append(f"equations are not 1 to {LAST_EQUATION}, each once: {counted}")
    if set(SHOTS) != set(BENCHMARKS):
        found.append(f"benchmarks of Table 2 differ: {set(SHOTS) ^ set(BENCHMARKS)}")
    if set(TABLE5_SYSTEMS) != set(TABLE5):
        found.append(f"systems of Table 5 differ: {set(TABLE5_SYSTEMS) ^ set(TABLE5)}")
    for size in SIZES.values():
        if set(TABLE2_MIXERS[size]) != set(TABLE2[size]):
            found.append(f"models of Table 2 differ: {set(TABLE2_MIXERS[size]) ^ set(TABLE2[size])}")
    found += [f"{n.place}, {n.what}: {n.paper} in the paper, {n.here()} in {n.where}" for n in NUMBERS if not n.is_equal]
    return found


# ---- writing ----


def shown(pointer: str) -> str:
    kind, _, rest = pointer.partition(":")
    if kind == "not here":
        return f"not here: {rest.strip()}"
    if kind == "theory":
        return f"`hypermlp theory {shlex.quote(rest)}`"
    if pointer.startswith("hypermlp "):
        return f"`{pointer}`"
    return f"`{kind}`, `{rest}`" if rest else f"`{kind}`"


def table(heads: tuple[str, str, str], entries: list[Entry]) -> str:
    lines = markdown_table(heads, [[e.name, e.what.replace("|", "\\|"), "; ".join(map(shown, e.pointers))] for e in entries])
    return lines.replace("| ---: ", "| --- ")


def page() -> str:
    absent = sum(any(p.startswith("not here") for p in e.pointers) for e in [*SECTIONS, *TABLES, *statements()])
    numbers = [[n.place, n.what, str(n.paper), str(n.here()), n.where] for n in NUMBERS]
    return (
        "\n\n".join(
            [
                "# Where the paper's things are",
                "Every system, equation, table, figure, number of a protocol and numbered statement of the paper, with the "
                f"file, command or record that has it here. {absent} are not here, and the page says why. "
                "`python docs/make_coverage.py` writes this page after looking up every pointer and comparing every number.",
                "## Numbers of the protocols",
                markdown_table(("where", "what", "the paper", "here", "in"), numbers).replace("| ---: ", "| --- "),
                "## Tables and figures",
                table(("the paper", "what it is", "here"), TABLES),
                "## Sections",
                table(("section", "what it says", "here"), SECTIONS),
                "## Systems",
                table(("where", "system", "here"), list(systems())),
                "## Equations",
                table(("equation", "what it says", "here"), EQUATIONS),
                "## Numbered statements",
                table(("statement", "title", "here"), list(statements())),
            ]
        )
        + "\n"
    )


def main() -> None:
    if found := problems():
        raise SystemExit("\n".join(found))
    PAGE.write_text(page(), encoding="utf-8")


if __name__ == "__main__":
    main()
