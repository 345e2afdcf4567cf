"""The laws of mixers/base.py over the whole registry and Table 1; a new mixer is included by its line there."""

from __future__ import annotations

import re
from itertools import pairwise

import pytest
import torch
from torch import nn

from helpers import assert_same, perturb, randn, run_layer
from hypermlp.mixers import MIXERS, build_mixer
from hypermlp.mixers.labels import TABLE1

WIDTH, T = 16, 13
REGISTERS = ("hyperglu+registers=3", "R-pcg-q-12o+registers=2")
each_mixer = pytest.mark.parametrize("name", [*sorted(MIXERS), *TABLE1, *REGISTERS])


def build(name: str) -> nn.Module:
    return perturb(build_mixer(name, WIDTH, 24).double())


@each_mixer
@pytest.mark.parametrize("cut", [1, 6, T - 1])
def test_future_never_changes_the_past(name: str, cut: int) -> None:
    mixer, x = build(name), randn(2, T, WIDTH)
    changed = x.clone()
    changed[:, cut:] = 5 * randn(2, T - cut, WIDTH, seed=1)
    assert_same(mixer(changed)[:, :cut], mixer(x)[:, :cut])
    assert (mixer(changed)[:, cut:] != mixer(x)[:, cut:]).any()


@each_mixer
@pytest.mark.parametrize("cut", [1, 6, T - 1])
def test_past_outputs_have_no_gradient_in_the_future(name: str, cut: int) -> None:
    mixer, x = build(name), randn(2, T, WIDTH).requires_grad_()
    mixer(x)[:, :cut].square().sum().backward()
    assert x.grad is not None
    assert (x.grad[:, cut:] == 0).all()
    assert (x.grad[:, :cut] != 0).any()


@each_mixer
def test_padding_changes_nothing(name: str) -> None:
    mixer, x, d_y = build(name), randn(3, T, WIDTH), randn(3, T, WIDTH, seed=1)
    real = torch.tensor([[0] * 5 + [1] * 8, [1] * 7 + [0] * 6, [1, 0, 1, 1, 0, 0, 1, 1, 1, 0, 1, 0, 1]]).bool()
    found = run_layer(mixer, x, d_y, attention_mask=real)
    for b, r in enumerate(real):
        alone = run_layer(mixer, x[b : b + 1, r], d_y[b : b + 1, r])
        for key in ("y", "dx"):
            assert_same(found[key][b, r], alone[key][0])
            assert (found[key][b, ~r] == 0).all()


@each_mixer
def test_packed_documents_are_computed_alone(name: str) -> None:
    mixer, x, d_y = build(name), randn(1, T, WIDTH), randn(1, T, WIDTH, seed=1)
    bounds = [0, 4, 5, T]
    found = run_layer(mixer, x, d_y, cu_seqlens=torch.tensor(bounds))
    for a, b in pairwise(bounds):
        alone = run_layer(mixer, x[:, a:b], d_y[:, a:b])
        for key in ("y", "dx"):
            assert_same(found[key][:, a:b], alone[key])


@each_mixer
def test_batch_equals_its_rows(name: str) -> None:
    mixer, x, d_y = build(name), randn(3, T, WIDTH), randn(3, T, WIDTH, seed=1)
    found = run_layer(mixer, x, d_y)
    for b in range(3):
        alone = run_layer(mixer, x[b : b + 1], d_y[b : b + 1])
        for key in ("y", "dx"):
            assert_same(found[key][b : b + 1], alone[key])


@each_mixer
@pytest.mark.parametrize("size", [1e-4, 1e2, 1e4])
def test_gradients_are_finite_however_far_gates_and_decays_are_driven(name: str, size: float) -> None:
    """Inputs of this size drive every gate and decay of a perturbed mixer to its limits."""
    mixer, x = build(name), size * randn(2, 70, WIDTH)
    if name in TABLE1:
        mixer = perturb(build_mixer(name, WIDTH, 70).double())
    found = run_layer(mixer, x, randn(2, 70, WIDTH, seed=1))
    for key, value in found.items():
        assert value.isfinite().all(), key


@pytest.mark.parametrize(
    "name, meant",
    [
        *[("GLA", "gla"), ("RetNet", "retnet"), ("RWKV7", "rwkv7"), ("RWKV-7", "rwkv7"), ("Softmax", "softmax")],
        *[("linear attention", "linear"), ("Gated DeltaNet", "gated_deltanet"), ("sofmax", "softmax")],
        ("HyperGLU", "hyperglu"),
    ],
)
def test_an_unknown_mixer_is_told_the_nearest_and_all_others(name: str, meant: str) -> None:
    known = f"unknown mixer {name!r}; did you mean {meant!r}? Known are {', '.join(sorted(MIXERS))}, and the labels of Table 1"
    with pytest.raises(ValueError, match=re.escape(known)):
        build_mixer(name, WIDTH, T)


def test_a_name_near_to_none_is_told_the_known_ones() -> None:
    with pytest.raises(ValueError, match="unknown mixer 'xyz'; known are deltanet, "):
        build_mixer("xyz", WIDTH, T)


@pytest.mark.parametrize("name", ["G-gc-q", "S!", "R-cg-q-12oo"])
def test_a_label_with_a_mistake_is_explained_as_a_label(name: str) -> None:
    with pytest.raises(ValueError, match="is no label of Table 1's grammar"):
        build_mixer(name, WIDTH, T)
