"""The configuration: the authors' defaults, frozen, lossless to dict and JSON, and errors that name rule, value and remedy."""

from __future__ import annotations

import dataclasses
import inspect
import json
import re
import subprocess
import sys

import pytest

import hypermlp
from helpers import make_config
from hypermlp import HyperGLU, HyperGLUConfig, HyperMLP

# The quick-start of the authors' README, in its order, with two differences: impl_default and chunk_T are chosen by the
# program unless they are given.
DEFAULTS = {
    "bias": False,
    "attn_kind": "glu",
    "attn_norm": "out_scale",
    "qk_rank": 32,  # n_embd // 4
    "vo_rank": 128,  # n_embd
    "do_masking": True,
    "aligner_kind": "offset",
    "use_kv_conv": True,
    "conv_kernel_size": 4,
    "use_rope": False,
    "rope_base": 10000.0,
    "gate_act": "sigmoid",
    "use_qk_gate": True,
    "use_vo_gate": True,
    "use_op1": True,
    "op1_rank": 16,
    "op1_per_head": True,
    "op1_use_diag": True,
    "op1_shortcut": True,
    "op1_do_masking": True,
    "use_op2": True,
    "op2_rank": 16,
    "op2_per_head": True,
    "op2_use_diag": True,
    "op2_shortcut": True,
    "op2_do_masking": True,
    "norm_eps": 1e-12,
    "impl_default": "auto",
    "chunk_T": None,
}
OTHER = {
    "bias": True,
    "attn_kind": "relu",
    "attn_norm": "l2",
    "aligner_kind": "identity",
    "do_masking": False,
    "use_op2": False,
    "op1_do_masking": False,
    "chunk_T": 5,
    "norm_eps": 1e-6,
    "init": "decays",
}


def test_defaults_are_the_authors() -> None:
    config = HyperGLUConfig(n_embd=128, n_head=4, block_size=64).to_dict()
    appendix_l = {"op1_init_std": 0.02, "op2_init_std": 0.02}
    ours = {"dropout": 0.0, "init": "paper", "registers": 0}
    assert config == {"n_embd": 128, "n_head": 4, "block_size": 64, **DEFAULTS, **appendix_l, **ours}


def test_sizes_have_no_default_and_no_place() -> None:
    with pytest.raises(TypeError, match="missing 3 required keyword-only arguments"):
        HyperGLUConfig()
    with pytest.raises(TypeError, match="positional"):
        HyperGLUConfig(128, 4, 64)


def test_frozen() -> None:
    config = make_config()
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.n_head = 4
    assert {config: 1}[make_config()] == 1  # equal and hashable


@pytest.mark.parametrize("changes", [{}, OTHER], ids=["defaults", "other"])
def test_round_trips(changes: dict) -> None:
    config = make_config(**changes)
    assert HyperGLUConfig.from_dict(config.to_dict()) == config
    assert HyperGLUConfig.from_json(config.to_json()) == config
    assert json.loads(config.to_json()) == config.to_dict()
    assert dataclasses.replace(config) == config == config.replace()


def test_replace_checks_again_and_leaves_the_original() -> None:
    config = make_config()
    assert config.replace(n_head=1).n_head == 1
    assert config.n_head == 2
    with pytest.raises(ValueError, match="n_head"):
        config.replace(n_head=3)


def test_routing_heads() -> None:
    assert make_config().routing_heads == 4
    assert make_config(attn_kind="relu").routing_heads == 2


def test_hypermlp_is_the_relu_layer() -> None:
    assert HyperMLP(make_config()).config == make_config(attn_kind="relu")


REFUSED = [
    ({"n_embd": 0}, "n_embd (0) must be a whole number of at least 1"),
    ({"n_head": -2}, "n_head (-2) must be a whole number of at least 1"),
    ({"block_size": 8.0}, "block_size (8.0) must be a whole number of at least 1"),
    ({"block_size": True}, "block_size (True) must be a whole number of at least 1"),
    ({"op1_rank": 0}, "op1_rank (0) must be a whole number of at least 1"),
    ({"op2_rank": "16"}, "op2_rank ('16') must be a whole number of at least 1"),
    ({"conv_kernel_size": 0}, "conv_kernel_size (0) must be a whole number of at least 1"),
    ({"chunk_T": 0}, "chunk_T (0) must be a whole number of at least 1"),
    ({"qk_rank": 0}, "qk_rank (0) must be a whole number of at least 1"),
    ({"bias": 1}, "bias (1) must be True or False"),
    ({"use_op1": None}, "use_op1 (None) must be True or False"),
    ({"norm_eps": "1e-12"}, "norm_eps ('1e-12') must be a number"),
    ({"norm_eps": 0.0}, "norm_eps (0.0) must be positive and finite"),
    ({"norm_eps": float("nan")}, "norm_eps (nan) must be positive and finite"),
    ({"rope_base": -1.0}, "rope_base (-1.0) must be positive and finite"),
    ({"op1_init_std": -0.1}, "op1_init_std (-0.1) must be at least 0 and finite"),
    ({"op2_init_std": float("inf")}, "op2_init_std (inf) must be at least 0 and finite"),
    ({"attn_kind": "softmax"}, "attn_kind ('softmax') must be one of 'glu', 'relu'"),
    ({"attn_norm": "rms"}, "attn_norm ('rms') must be one of 'out_scale', 'l2', 'none'"),
    ({"aligner_kind": "left"}, "aligner_kind ('left') must be one of 'offset', 'identity'"),
    ({"gate_act": "tanh"}, "gate_act ('tanh') must be one of 'sigmoid', 'none'"),
    ({"init": "zeros"}, "init ('zeros') must be one of 'paper', 'decays'"),
    ({"impl_default": "fast"}, "impl_default ('fast') must be one of 'auto', 'dense', 'chunked'"),
    ({"qk_rank": 50}, 'qk_rank (50) must be divisible by 2 * n_head (4) for attn_kind="glu"; try 48 or 52'),
    ({"qk_rank": 3}, 'qk_rank (3) must be divisible by 2 * n_head (4) for attn_kind="glu"; try 4'),
    (
        {"qk_rank": 51, "attn_kind": "relu"},
        'qk_rank (51) must be divisible by n_head (2) for attn_kind="relu"; try 50 or 52',
    ),
    ({"vo_rank": 15}, "vo_rank (15) must be divisible by n_head (2); try 14 or 16"),
    (
        {"qk_rank": 12, "use_rope": True},
        "qk_rank (12) must be divisible by 2 * routing heads (8) for use_rope=True; try 8 or 16",
    ),
    (
        {"n_embd": 3, "qk_rank": None},
        "qk_rank defaults to n_embd // 4, which is 0 for n_embd (3); give qk_rank",
    ),
]


@pytest.mark.parametrize("changes, message", REFUSED, ids=[str(changes) for changes, _ in REFUSED])
def test_refused(changes: dict, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        make_config(**changes)


def test_offset_layout_cannot_be_bidirectional() -> None:
    with pytest.raises(ValueError, match='do_masking=False needs aligner_kind="identity"'):
        make_config(do_masking=False)


@pytest.mark.parametrize("op", ["op1", "op2"])
@pytest.mark.parametrize("aligner", ["offset", "identity"])
def test_unmasked_mixing_in_a_causal_layer_is_ill_defined(op: str, aligner: str) -> None:
    changes = {f"{op}_do_masking": False, "aligner_kind": aligner}
    with pytest.raises(ValueError, match=f"{op}_do_masking=False with do_masking=True is ill-defined.*leave {op}_do_mask"):
        make_config(**changes)
    assert not getattr(make_config(**changes, **{f"use_{op}": False}), f"use_{op}")  # no operator, nothing to mask


def test_unknown_and_missing_fields_are_named() -> None:
    with pytest.raises(ValueError, match=r"unknown configuration fields \['heads'\]; known are .*'n_embd'"):
        HyperGLUConfig.from_dict({**make_config().to_dict(), "heads": 2})
    with pytest.raises(ValueError, match=r"lacks \['block_size', 'n_head'\]"):
        HyperGLUConfig.from_dict({"n_embd": 16})


def test_the_documentation_explains_every_option_and_argument() -> None:
    text = HyperGLUConfig.__doc__ or ""
    explained = {name.strip() for line in re.findall(r"^        ([\w, ]+):", text, re.M) for name in line.split(",")}
    assert explained == {field.name for field in dataclasses.fields(HyperGLUConfig)}
    for call in (HyperGLU.forward, HyperGLU.mix):
        arguments = set(re.findall(r"^            (\w+):", call.__doc__ or "", re.M))
        assert arguments == set(inspect.signature(call).parameters) - {"self"}


def test_a_dictionary_is_a_configuration() -> None:
    values = make_config().to_dict()
    assert HyperGLU(values).config == make_config()
    assert HyperMLP(values).config == make_config(attn_kind="relu")
    with pytest.raises(ValueError, match=r"unknown configuration fields \['width'\]"):
        HyperGLU({**values, "width": 3})
    with pytest.raises(ValueError, match="config is a int; give a HyperGLUConfig, or a dictionary"):
        HyperGLU(64)


def test_what_users_need_is_exported_by_name() -> None:
    """The layer at once; the others when they are asked for, so that the import stays light."""
    for name in ("LanguageModel", "ModelConfig", "build_mixer", "generate"):
        assert name in dir(hypermlp)
        assert getattr(hypermlp, name).__module__.startswith("hypermlp.")
    with pytest.raises(AttributeError, match="has no attribute 'nonsense'"):
        hypermlp.nonsense  # noqa: B018
    script = "import sys, hypermlp; print([m for m in sys.modules if m.startswith('hypermlp.models')])"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
