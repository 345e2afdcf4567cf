"""The grammar of Table 1: every label is read, written, built and run; everything else is refused with an explanation."""

from __future__ import annotations

import re

import pytest
import torch

from helpers import assert_same, perturb, randn, run_layer
from hypermlp import HyperGLU
from hypermlp.mixers import SoftmaxAttention, build_mixer
from hypermlp.mixers.labels import TABLE1, Label, build, count_by_component, edits, every_label, explain

WIDTH, LENGTH = 32, 24
LABELS = [str(label) for label in every_label()]


def test_the_grammar_has_as_many_labels_as_its_rules_give() -> None:
    features, ranks_or_over = 2**3, 3  # q, v or !
    unmixed = 2**2 * 3 + 2**2 * ranks_or_over  # without gates there is no !, but there is the plain label
    mixed = features * ranks_or_over * 3 * 2  # 1, 2, 12; with and without o
    assert len(set(LABELS)) == len(LABELS) == 3 * unmixed + 2 * mixed
    assert len(set(TABLE1)) == 33
    assert set(TABLE1) <= set(LABELS)


@pytest.mark.parametrize("text", LABELS)
def test_every_label_is_read_written_built_and_trained(text: str) -> None:
    label = Label.parse(text)
    assert str(label) == text
    mixer = build(label, WIDTH, LENGTH)
    x, d_y = randn(2, LENGTH, WIDTH, dtype=torch.float32), randn(2, LENGTH, WIDTH, seed=1, dtype=torch.float32)
    for name, found in run_layer(perturb(mixer), x, d_y).items():
        assert found.isfinite().all(), name
        assert (found != 0).any(), name
    assert ("softmax" if label.base == "S" else label.base) == kind(mixer)
    parts = {name.split(".")[0] for name, _ in mixer.named_parameters()}
    assert ("conv_k" in parts, "gate_qk" in parts, "gate_vo" in parts) == (label.conv, label.gate, label.gate)
    assert ("op1" in parts, "op2" in parts) == (label.mix1, label.mix2)
    assert mixer.q.weight.shape == mixer.k.weight.shape == (WIDTH // 4 if label.compress_qk else WIDTH, WIDTH)
    assert mixer.v.weight.shape == mixer.o.weight.mT.shape == (WIDTH // 4 if label.compress_vo else WIDTH, WIDTH)


def test_ranks_behind_a_name_belong_to_its_label() -> None:
    label = Label.parse("hyperglu@8")
    assert str(label) == "G-cg-q-12o@8"
    assert Label.parse(str(label)) == label
    ours = build(label, WIDTH, LENGTH)
    assert isinstance(ours, HyperGLU)
    assert ours.config == build_mixer("hyperglu@8", WIDTH, LENGTH).config
    assert (ours.config.op1_rank, ours.config.op2_rank, ours.config.qk_rank) == (8, 8, WIDTH // 2)
    assert explain(label, WIDTH, LENGTH).words["@8"].startswith("mixing of rank 8")
    for text in ("S-p@8", "G-cg-q@8", "G-cg-q-12o@", "G-cg-q-12o@0", "mamba@8"):
        with pytest.raises(ValueError, match="NAME@RANK is for labels"):
            Label.parse(text)


def kind(mixer: torch.nn.Module) -> str:
    if isinstance(mixer, SoftmaxAttention):
        return "softmax"
    assert isinstance(mixer, HyperGLU)
    return {"glu": "G", "relu": "R"}[mixer.config.attn_kind]


@pytest.mark.parametrize(
    "text, rotates", [("S", False), ("S-p", True), ("R", False), ("R-p", True), ("G", False), ("G-p", True)]
)
def test_p_alone_knows_where_a_token_stands(text: str, rotates: bool) -> None:
    """Without positions the last row of attention does not care about the order of the others."""
    mixer, x = perturb(build(text, WIDTH, LENGTH).double()), randn(1, 6, WIDTH)
    turned = x[:, [2, 0, 4, 1, 3, 5]]
    assert (abs(mixer(x)[:, -1] - mixer(turned)[:, -1]).max() > 1e-6) == rotates


def test_relu_attention_is_its_formula() -> None:
    mixer, x = perturb(build("R", WIDTH, LENGTH).double()), randn(2, 9, WIDTH)
    q, k, v = (m(x).unflatten(-1, (2, -1)).transpose(1, 2) for m in (mixer.q, mixer.k, mixer.v))
    z = (q @ k.mT).tril()
    o = torch.relu(z / z.norm(dim=-1, keepdim=True)) @ v
    assert_same(mixer(x), mixer.o(o.transpose(1, 2).flatten(2)))


@pytest.mark.parametrize(
    "text, layout", [("R-12o!", "offset"), ("G-cg-q-1o", "offset"), ("R-2!", "identity"), ("R-c", "offset")]
)
def test_o_is_the_lag_layout(text: str, layout: str) -> None:
    assert build(text, WIDTH, LENGTH).config.aligner_kind == layout


def test_hyperglu_and_hypermlp_are_the_defaults_of_the_configuration() -> None:
    for text, name in (("G-cg-q-12o", "glu"), ("R-cg-q-12o", "relu")):
        config = build(text, WIDTH, LENGTH).config
        assert config == type(config)(n_embd=WIDTH, n_head=2, block_size=LENGTH, attn_kind=name)


def test_a_rank_of_ones_own() -> None:
    assert build("G-cg-q-12o", WIDTH, LENGTH, qk_rank=12).q.out_features == 12
    assert build("S-g-q", WIDTH, LENGTH, qk_rank=16, n_head=4).n_head == 4
    with pytest.raises(ValueError, match=r"qk_rank \(12\) is for labels with q; R-c has q and k of the full width"):
        build("R-c", WIDTH, LENGTH, qk_rank=12)


@pytest.mark.parametrize("text", [t for t in LABELS if "q" in t])
def test_rank_step_is_the_smallest_rank(text: str) -> None:
    label = Label.parse(text)
    assert build(label, WIDTH, LENGTH, qk_rank=label.rank_step()).q.out_features == label.rank_step()
    with pytest.raises(ValueError, match="must be divisible by"):
        build(label, WIDTH, LENGTH, qk_rank=label.rank_step() // 2)


# text, where the caret stands, what the message says besides, the nearest label
WRONG = [
    ("X", 0, "expected here: S softmax attention, R ReLU attention, G GLU attention", "S"),
    ("", 0, "expected here: S softmax attention", "S"),
    ("r-cg-q-12o", 0, "", "R-cg-q-12o"),
    ("HyperGLU", 0, "", "G-cg-q-12o"),
    ("R-gc-q-12o", 3, "expected here: ! full ranks, - the next part", "R-cg-q-12o"),
    ("R-cg-12o-q", 8, "expected here: !", "R-cg-12o!"),
    ("S-12o!", 2, "rows live on the probability simplex", "R-12o!"),
    ("S-g-q-1o", 5, "rows live on the probability simplex", "R-g-q-1o"),
    ("R-12o", 5, "gates and mixing at full ranks exceed the budget: compress with q or v, or mark it with !", "R-12o!"),
    ("S-g", 3, "exceed the budget", "S-g!"),
    ("S-c!", 3, "without gates (g) or mixing (1, 2) this one is within it", "S-c"),
    ("R-q!", 3, "nothing is compressed, so it excludes q and v", "R-q"),
    ("R-c-qv-12o", 5, "q or v, not both", "R-c-q-12o"),
    ("R-q-o", 4, "it needs 1, 2 or 12 before it", "R-q-1o"),
    ("R--q", 2, "expected here: p rotary embedding, c convolutions", "R-q"),
    ("R-c-", 4, "expected here: q QK compressed, v VO compressed, 1 mixing R1, 2 mixing R2", "R-c"),
    ("G-cg-q-12oo", 10, "expected here: the end", "G-cg-q-12o"),
    ("G-cg-q-21o", 8, "expected here: o lag layout, the end", "G-cg-q-12o"),
    ("G-ccg-q", 3, "expected here: g gates, - the next part, the end", "G-cg-q"),
    ("S-p ", 3, "expected here: c convolutions", "S-p"),
]


@pytest.mark.parametrize("text, caret, words, nearest", WRONG, ids=[repr(case[0]) for case in WRONG])
def test_an_error_shows_what_is_wrong(text: str, caret: int, words: str, nearest: str) -> None:
    with pytest.raises(ValueError, match=re.escape(f"{text!r} is no label of Table 1's grammar")) as error:
        Label.parse(text)
    lines = str(error.value).split("\n")
    assert lines[1:3] == [f"    {text}", "    " + " " * caret + "^"]
    assert words in str(error.value)
    assert lines[-1].startswith(f"the nearest label is {nearest};")


def test_a_label_made_by_hand_obeys_the_same_rules() -> None:
    with pytest.raises(ValueError, match="excludes q and v"):
        Label(base="R", mix1=True, compress_qk=True, over=True)
    with pytest.raises(ValueError, match=r"base \('T'\) must be one of 'S', 'R', 'G'"):
        Label(base="T")


@pytest.mark.parametrize(
    "a, b, distance", [("", "abc", 3), ("abc", "abc", 0), ("abc", "axc", 2), ("cg", "gc", 2), ("S-g", "S-g!", 1)]
)
def test_edits(a: str, b: str, distance: int) -> None:
    assert edits(a, b) == edits(b, a) == distance


@pytest.mark.parametrize("text", TABLE1)
def test_an_explanation_has_every_letter_and_every_parameter(text: str) -> None:
    found = explain(text, WIDTH, LENGTH)
    assert str(found.label) == text
    assert [letter for letter in found.words if letter != "no o"] == list(text.replace("-", ""))
    assert ("no o" in found.words) == (text in ("R-2!", "G-12!", "R-12!"))
    mixer = build(text, WIDTH, LENGTH)
    assert found.parameters == count_by_component(mixer)
    assert sum(found.parameters.values()) == sum(p.numel() for p in mixer.parameters())
    assert "other" not in found.parameters


def test_components_of_hyperglu_are_what_the_paper_counts() -> None:
    d, L, r = WIDTH, LENGTH, 16
    assert explain("G-cg-q-12o", d, L).alias == "HyperGLU"
    assert explain("R-cg-q-12o", d, L).alias == "HyperMLP"
    assert explain("G-cg-q-12o", d, L).parameters == {
        **{"q": d * d // 4, "k": d * d // 4, "v": d * d, "o": d * d},
        "convolutions": 2 * 4 * d,
        "gates": (d + 1) * (d // 4 + d),
        **{"R1 factors": 4 * 2 * L * r, "R1 diagonal": 4 * L, "R1 controls": (d + 1) * 4 * r},
        **{"R2 factors": 2 * 2 * L * r, "R2 diagonal": 2 * L, "R2 controls": (d + 1) * 2 * r},
    }
