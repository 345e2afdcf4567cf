"""transformers' own tests of a model, on this package's classes: its common, generation and causal language model suites.

    pip download --no-deps --no-binary :all: transformers==5.22.2 && tar xf transformers-5.22.2.tar.gz
    python tests/models/transformers_suite.py transformers-5.22.2 checkout-of-transformers

Each folder has `tests/`; a module is taken from the first that has it. The source distribution holds the common tests; those of
generation and causal language models, `tests/generation/`, `tests/exporters/`, `tests/pipelines/` and `tests/causal_lm_tester.py`, are
in the repository alone, so a second folder, a checkout, gives them. Nothing is downloaded, and nothing of transformers is kept.
`pip install parameterized` for its test utilities.

Prints what failed, and with --write puts the counts and the reason of every skip into docs/clients/hugging-face.md.
"""

from __future__ import annotations

import argparse
import collections
import os
import re
import subprocess
import sys
import unittest
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

os.environ |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}

MIXERS = ("hyperglu", "gated_deltanet", "softmax")
FOLDERS = "TRANSFORMERS_SUITE"  # of the tests, for the process that pytest runs in
NEEDED = ("test_modeling_common.py", "causal_lm_tester.py", "generation/test_utils.py", "exporters/test_export.py", "pipelines")
PAGE = Path(__file__).parents[2] / "docs" / "clients" / "hugging-face.md"


def find_missing(folders: list[Path]) -> list[str]:
    return [name for name in NEEDED if not any((folder / "tests" / name).exists() for folder in folders)]


def import_suite(folder: str) -> ModuleType:
    sys.path.insert(0, folder)
    import tests.causal_lm_tester as suite  # type: ignore[import-not-found]
    from tests import test_fsdp_mixin, test_tensor_parallel_mixin  # type: ignore[attr-defined]

    # Kinds of models whose tests on several processes are run; they are few, to save time.
    test_fsdp_mixin.FSDP_DISTRIBUTED_TEST_MODEL_TYPES = test_tensor_parallel_mixin.TP_DISTRIBUTED_TEST_MODEL_TYPES = None
    return suite


def make_classes(suite: ModuleType) -> dict[str, type]:
    """A class of tests for every mixer."""
    from hypermlp.models import hf

    made = {}
    for mixer in MIXERS:
        tester = type(
            f"Tester_{mixer}",
            (suite.CausalLMModelTester,),
            {
                "config_class": hf.HyperConfig,
                "base_model_class": hf.HyperModel,
                "causal_lm_class": hf.HyperForCausalLM,
                "sequence_classification_class": hf.HyperForSequenceClassification,
                "token_classification_class": hf.HyperForTokenClassification,
                "mixer": mixer,
            },
        )
        name = f"Test_{mixer}"
        facts = {"model_tester_class": tester, "__module__": __name__, "has_attentions": mixer != "gated_deltanet"}
        made[name] = type(name, (OwnCache, suite.CausalLMModelTest, unittest.TestCase), facts)
    return made


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


class Outcomes:
    """What became of each test, as a plugin of pytest."""

    def __init__(self) -> None:
        self.found: dict[str, dict[str, tuple[str, str]]] = collections.defaultdict(dict)

    def pytest_runtest_logreport(self, report: Any) -> None:
        mixer, test = report.nodeid.split("::Test_")[1].split("::")
        if report.when == "call" or not report.passed:
            reason = report.longrepr[2].removeprefix("Skipped: ") if report.skipped else ""
            self.found[mixer][test] = (report.outcome, reason)


if FOLDERS in os.environ:
    globals().update(make_classes(import_suite(os.environ[FOLDERS])))
