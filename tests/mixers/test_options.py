"""NAME+option=value: any mixer with options changed, wherever a name stands."""

from __future__ import annotations

import pytest

from hypermlp.mixers import HyperGLU, build_mixer
from hypermlp.mixers.options import split
from hypermlp.models.budget import match
from hypermlp.models.lm import ModelConfig


def test_options_of_hyperglu_and_labels_are_fields_of_its_configuration() -> None:
    layer = build_mixer("hyperglu+op1_rank=8+n_head=4+use_qk_gate=false+qk_rank=24", 64, 32)
    assert isinstance(layer, HyperGLU)
    config = layer.config
    assert (config.op1_rank, config.op2_rank, config.n_head, config.use_qk_gate, config.qk_rank) == (8, 16, 4, False, 24)
    same = build_mixer("G-cg-q-12o+op1_rank=8+n_head=4+use_qk_gate=false+qk_rank=24", 64, 32)
    assert isinstance(same, HyperGLU)
    assert same.config == config
    layer = build_mixer("R-g-q-12o+op2_rank=4", 64, 32)
    assert isinstance(layer, HyperGLU)
    assert (layer.config.op2_rank, layer.config.use_kv_conv, layer.config.attn_kind) == (4, False, "relu")


def test_options_of_rivals_are_arguments_of_their_classes() -> None:
    assert build_mixer("deltanet+n_head=4", 64, 32).state_shapes() == {"S": (4, 16, 16)}  # type: ignore[operator]
    assert build_mixer("gsa+slowness=4", 64, 32).slowness == 4
    assert build_mixer("gated_deltanet+key_width=32", 64, 32).state_shapes() == {"S": (2, 16, 32)}  # type: ignore[operator]


def test_a_size_in_the_name_stays_and_every_other_is_matched() -> None:
    assert match("hyperglu+registers=4", 256, 32).size is not None
    kept = match("hyperglu+qk_rank=8", 256, 32)
    assert kept.size is None
    assert "that its name says" in kept.note
    assert match("hyperglu+n_head=4", 512, 32).size % 8 == 0  # type: ignore[operator]


def test_a_model_takes_such_names() -> None:
    config = ModelConfig(vocabulary=9, width=32, depth=1, length=8, mixer="hyperglu+op1_rank=2+op2_rank=2+n_head=1")
    layer = config.build_mixer(0)
    assert isinstance(layer, HyperGLU)
    assert (layer.config.op1_rank, layer.config.n_head) == (2, 1)


@pytest.mark.parametrize(
    "name, rule",
    [
        ("hyperglu+rank=3", "rank is no option of this mixer; its options are aligner_kind"),
        ("hyperglu+registers", r"written NAME\+option=value"),
        ("hyperglu+registers=1+registers=2", "each once"),
        ("gla+slowness=3", "its options are n_head, value_width"),
        ("S-pc+n_head=4", "it has none"),
        ("delta-net+n_head=4", "did you mean 'deltanet'"),
        ("hyperglu+registers=many", "registers"),
    ],
)
def test_what_is_no_option_is_refused(name: str, rule: str) -> None:
    with pytest.raises(ValueError, match=rule):
        build_mixer(name, 64, 32)


def test_somebodys_own_code_has_no_options() -> None:
    assert split("my+file.py:Mine") == ("my+file.py:Mine", {})
