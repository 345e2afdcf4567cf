"""transformers' own tests of a model, on this package's classes: its common, generation and causal language model suites.

    pip download --no-deps --no-binary :all: transformers==5.22.2 && tar xf transformers-5.22.2.tar.gz
    python tests/models/transformers_suite.py transformers-5.22.2 checkout-of-transformers --write

Each folder has `tests/`; a file is taken from the first that has it. The source distribution holds the common tests. Those of
generation and of causal language models are in the repository alone, so a second folder, a checkout, gives them. Nothing is
downloaded, and nothing of transformers is kept. Their tests need `pip install parameterized httpx`.

Prints what failed, and with --write puts counts, and the reason of every skip, into docs/clients/hugging-face.md.
"""

from __future__ import annotations

import argparse
import collections
import os
import re
import shutil
import sys
import tempfile
import unittest
from importlib.metadata import version
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

os.environ |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}

MIXERS = ("hyperglu", "gated_deltanet", "softmax")
FOLDER, PROCESSES = "TRANSFORMERS_SUITE", "TRANSFORMERS_SUITE_PROCESSES"  # of the tests; whether those on two processes run
NEEDED = ("test_modeling_common.py", "causal_lm_tester.py", "generation/test_utils.py", "exporters", "pipelines", "utils")
PAGE = Path(__file__).parents[2] / "docs" / "clients" / "hugging-face.md"
# What a skip says, as patterns, and what that means for these models.
MEANS = {
    r"Flash|flash_attn|flash attention|attention mask API|test requires.*kernels": "flash attention is not used",
    r"distributed tests are not enabled": "tests on two processes, which run with `--processes` alone",
    r"test requires|is slow|SDPA flash|NVIDIA|Nvidia": "needs a GPU, or a package that is not installed; or is marked slow",
    r"pipeline|tiny models": "tests of pipelines with models of the Hub, or for images and sound",
    r"4D": "no 4-D masks: the error names the cure",
    r"DynamicCache": "asks for transformers' own DynamicCache",
    r"RoPE|axial": "rotary embedding is not configured as in transformers, or not used",
    r"MoE|experts|router|expert|MTP|grouped_mm": "no experts and no multi-token heads",
    r"composite|subconfig|sub-config": "not made of several models",
    r"conversion": "no other layout of weights to convert from",
    r"fp32_modules": "no modules that must stay in float32",
    r"apture": "hidden states are collected without transformers' hooks",
    r"attentions|SDPA|sdpa": "no weights of single tokens: a state has none",
    r"sequence-to-sequence|question answering|encoder": "no such head",
    r"position embeddings|sliding window|recurrent layer types|prioritized|padding": "asks for options that these models lack",
}


def find_missing(folders: list[Path]) -> list[str]:
    return [name for name in NEEDED if not any((folder / "tests" / name).exists() for folder in folders)]


def lay_together(folders: list[Path], into: Path) -> None:
    """One folder with the tests of all, the first folder's before the others', and the source that they look into."""
    for folder in reversed(folders):
        shutil.copytree(folder / "tests", into / "tests", dirs_exist_ok=True)
    for name in ("src", "utils"):
        found = next((folder / name for folder in folders if (folder / name).is_dir()), None)
        if found is not None:
            (into / name).symlink_to(found.resolve())
    (into / "tests" / "__init__.py").touch()


def import_suite(folder: str) -> ModuleType:
    sys.path.insert(0, folder)
    import tests.causal_lm_tester as suite  # type: ignore[import-not-found]
    from tests import test_fsdp_mixin, test_tensor_parallel_mixin  # type: ignore[attr-defined]

    if PROCESSES in os.environ:  # kinds of models for which they run; None: all
        test_fsdp_mixin.FSDP_DISTRIBUTED_TEST_MODEL_TYPES = test_tensor_parallel_mixin.TP_DISTRIBUTED_TEST_MODEL_TYPES = None
    return suite


class OwnCache:
    """Where the suite looks into a cache it asks models with a cache of their own to say what is right."""

    def _check_past_key_values_for_generate(self, batch_size: int, past_key_values: Any, seq_length: int, config: Any) -> None:
        assert len(past_key_values) == config.depth
        assert past_key_values.batch_size == batch_size
        assert past_key_values.get_seq_length() == seq_length

    def _check_caches_are_equal(self, one: Any, other: Any) -> None:
        assert one.columns == other.columns
        states, others = one.memory.state_dict(), other.memory.state_dict()
        assert states.keys() == others.keys()
        for name, state in states.items():
            torch.testing.assert_close(state, others[name])

    def test_generate_compile_model_forward_fullgraph(self) -> None:
        """It asks first for a DynamicCache as the usual one; tests/models/test_hf_generation.py has the same without that."""
        self.skipTest("the usual cache must be transformers' DynamicCache")  # type: ignore[attr-defined]

    def test_custom_4d_attention_mask(self) -> None:
        self.skipTest("no 4D masks")  # type: ignore[attr-defined]


def make_classes(suite: ModuleType) -> dict[str, type]:
    """A class of tests for every mixer."""
    from hypermlp.models import hf

    made = {}
    models = {
        "config_class": hf.HyperConfig,
        "base_model_class": hf.HyperModel,
        "causal_lm_class": hf.HyperForCausalLM,
        "sequence_classification_class": hf.HyperForSequenceClassification,
        "token_classification_class": hf.HyperForTokenClassification,
    }
    for mixer in MIXERS:
        recurrent = mixer == "gated_deltanet"
        tester = type(f"Tester_{mixer}", (suite.CausalLMModelTester,), {**models, "mixer": mixer})
        bases = (OwnCache, suite.CausalLMModelTest, unittest.TestCase)
        facts = {"model_tester_class": tester, "has_attentions": not recurrent, "__module__": __name__}
        made[f"Test_{mixer}"] = type(f"Test_{mixer}", bases, facts)
    return made


class Outcomes:
    """What became of each test, as a plugin of pytest."""

    def __init__(self) -> None:
        self.found: dict[str, dict[str, tuple[str, str]]] = collections.defaultdict(dict)

    def pytest_runtest_logreport(self, report: Any) -> None:
        mixer, test = report.nodeid.split("::Test_")[1].split("::")
        before = self.found[mixer].get(test, ("passed", ""))[0]
        if (report.when == "call" or not report.passed) and before != "failed":
            reason = report.longrepr[2].removeprefix("Skipped: ") if report.skipped else ""
            self.found[mixer][test] = (report.outcome, reason)


def table(found: dict[str, dict[str, tuple[str, str]]]) -> str:
    """The counts of every mixer, and why tests are skipped."""
    counts = {mixer: collections.Counter(outcome for outcome, _ in tests.values()) for mixer, tests in found.items()}
    lines = ["| | " + " | ".join(counts) + " |", "| --- |" + " ---: |" * len(counts)]
    for outcome in ("passed", "failed", "skipped"):
        lines.append(f"| {outcome} | " + " | ".join(str(count[outcome]) for count in counts.values()) + " |")
    why: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    for mixer, tests in found.items():
        for outcome, reason in tests.values():
            if outcome == "skipped":
                meant = next((meaning for pattern, meaning in MEANS.items() if re.search(pattern, reason)), reason)
                why[meant][mixer] += 1
    rows = sorted(why.items(), key=lambda row: -sum(row[1].values()))
    lines += [f"| skipped: {meaning} | " + " | ".join(str(row[mixer]) for mixer in counts) + " |" for meaning, row in rows]
    return "\n".join([*lines, "", f"With transformers {version('transformers')} and torch {version('torch')}, on a CPU."])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="+", type=Path, help="source distribution and checkout of transformers, with tests/")
    parser.add_argument("-k", default="", help="which tests, as for pytest")
    parser.add_argument(
        "--processes", action="store_true", help="also those on two processes; transformers runs few, to save time"
    )
    parser.add_argument("--write", action="store_true", help=f"put the table into {PAGE.name}")
    given = parser.parse_args()
    missing = find_missing(given.folders)
    if missing:
        print(f"not in {', '.join(map(str, given.folders))}, give a checkout of transformers too: {', '.join(missing)}")
        return 2
    import pytest

    from hypermlp.report.markdown import fill

    outcomes = Outcomes()
    with tempfile.TemporaryDirectory() as folder:
        lay_together(given.folders, Path(folder))
        os.environ |= {FOLDER: folder, **({PROCESSES: "1"} if given.processes else {})}
        options = ["-qq", "-c", os.devnull, "--rootdir", folder, "-p", "no:cacheprovider", "--tb=short", "-W", "ignore", "-rfE"]
        pytest.main([__file__, *options, "-k", given.k], plugins=[outcomes])
    text = table(outcomes.found)
    print(text)
    if given.write:
        PAGE.write_text(fill(PAGE.read_text(), {"suite": text}))
    return int(any(outcome == "failed" for tests in outcomes.found.values() for outcome, _ in tests.values()))


if __name__ == "__main__":
    sys.exit(main())
if FOLDER in os.environ and __name__ != "__mp_main__":  # not in the processes that a test starts
    globals().update(make_classes(import_suite(os.environ[FOLDER])))
