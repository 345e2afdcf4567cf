"""What `weights` shows is what the output was made from, in the order of the caller's tokens."""

import pytest
import torch

from helpers import assert_same, perturb, randn
from hypermlp import HyperGLU
from hypermlp.mixers import MIXERS, Mixer, build_mixer
from hypermlp.mixers.softmax import SoftmaxAttention
from hypermlp.mixers.weights import Weights

WIDTH, LENGTH, T = 16, 6, 10  # longer than HyperGLU's window
SHOWING = [name for name in sorted(MIXERS) if build_mixer(name, WIDTH, LENGTH).gives_weights]
each_mixer = pytest.mark.parametrize("name", SHOWING)


def made(name: str) -> Mixer:
    return perturb(build_mixer(name, WIDTH, LENGTH)).double().eval()


def shown(mixer: Mixer, x: torch.Tensor, **options: object) -> tuple[torch.Tensor, torch.Tensor]:
    kept = Weights(options.pop("mask", None))
    y = mixer(x, weights=kept, **options)
    assert kept.shown is not None
    return y, kept.shown


def test_who_has_them() -> None:
    assert {"hyperglu", "hypermlp", "softmax"} <= set(SHOWING)
    with pytest.raises(ValueError, match="no weights of single tokens to give: leave weights unset"):
        made("mamba2")(randn(1, 3, WIDTH), weights=Weights())


@each_mixer
def test_the_output_is_made_from_them(name: str) -> None:
    mixer, x = made(name), randn(2, T, WIDTH)
    y, w = shown(mixer, x)
    assert_same(y, mixer(x))
    assert w.shape == (2, 2, T, T)
    assert not w.triu(1).any()
    assert (w.abs().sum(-1) > 0).double().mean() > 0.7  # a ReLU may close a whole row
    if isinstance(mixer, SoftmaxAttention):
        assert_same(w.sum(-1), torch.ones(2, 2, T, dtype=w.dtype))
    else:
        assert not w.tril(-LENGTH).any()  # beyond the window
    w.retain_grad()
    y.sum().backward()
    assert w.grad is not None
    assert w.grad.norm() > 0


@each_mixer
def test_they_read_out_the_values(name: str) -> None:
    """o = w v in every head: twice the weights of one token are twice its share."""
    mixer, x = made(name), randn(1, T, WIDTH)
    heard = []
    assert isinstance(mixer, (HyperGLU, SoftmaxAttention))
    mixer.o.register_forward_pre_hook(lambda module, inputs: heard.append(inputs[0]))
    _, w = shown(mixer, x)
    p = mixer.project(mixer.prepare(x), None, "dense")
    o = torch.einsum("bhts,bshv->bthv", w, p.v).flatten(2)
    assert_same(o if p.gate_vo is None else o * torch.sigmoid(p.gate_vo), heard[0])


@each_mixer
def test_with_padding_wherever_it_lies(name: str) -> None:
    mixer, x = made(name), randn(2, T, WIDTH)
    real = torch.tensor([1, 0, 0, 1, 1, 1, 0, 1, 1, 0])
    _, alone = shown(mixer, x[:1, real == 1])
    y, w = shown(mixer, x, attention_mask=torch.stack([real, torch.ones_like(real)]))
    assert_same(w[0][:, real == 1][..., real == 1], alone[0])
    assert not w[0][:, real == 0].any()
    assert not w[0][..., real == 0].any()
    assert_same(w[1], shown(mixer, x[1:])[1][0])
    w.retain_grad()
    y.sum().backward()
    assert w.grad is not None
    assert w.grad[0].norm() > 0


@each_mixer
@torch.no_grad()
def test_step_by_step_from_a_cache_that_goes_around(name: str) -> None:
    mixer, x = made(name), randn(2, T, WIDTH)
    mask = torch.ones(2, T)
    mask[0, :2] = 0
    _, whole = shown(mixer, x, attention_mask=mask)
    cache = mixer.new_cache(2, rewind=0)
    for begin, end in ((0, 3), (3, 4), (4, 8), (8, 9), (9, 10)):
        _, w = shown(mixer, x[:, begin:end], cache=cache, attention_mask=mask[:, begin:end], mask=mask[:, :end])
        assert_same(w, whole[:, :, begin:end, :end])
    with pytest.raises(ValueError, match="the mask of the weights has 3 columns"):
        shown(mixer, x[:, :1], cache=cache, mask=mask[:, :3])
