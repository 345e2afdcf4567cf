"""The pictures show what their captions say."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor

from hypermlp.analysis.memory import look
from hypermlp.theory import STATEMENTS, Instance, gallery
from hypermlp.theory.geometry import Plane, layer_field, partition
from hypermlp.theory.setting import make_static


def circle(points: Tensor) -> tuple[Tensor, float, float]:
    """Centre, radius and largest relative distance of the circle that fits points (n 2)."""
    lines = torch.cat([2 * points, torch.ones(len(points), 1).double()], dim=1)
    a, b, c = torch.linalg.lstsq(lines, points.square().sum(1, keepdim=True)).solution[:, 0]
    centre, radius = torch.stack([a, b]), float((c + a * a + b * b).sqrt())
    return centre, radius, float(((points - centre).norm(dim=1) - radius).abs().max()) / radius


@pytest.mark.parametrize("kind", ["relu", "glu"])
def test_field_of_a_layer_is_what_its_memory_shows(kind: str) -> None:
    """With convolutions, rotation and several heads, against analysis.memory at single points."""
    case = Instance(3)
    layer = case.layer(attn_kind=kind, use_kv_conv=True, use_rope=True, qk_rank=8)
    context, plane = case.normal(5, 6), Plane(case.normal(6), torch.eye(6).double()[:2])
    places = case.normal(3, 2)
    for head in (0, 1):
        found = layer_field(layer, context, plane, head)(places)
        for place, h in zip(places, found, strict=True):
            rows = torch.cat([context, plane.points(place[None])])[None]
            torch.testing.assert_close(h, look(layer, rows, 5, head).h.flip(0), rtol=0, atol=1e-12)


def test_pictures_without_training() -> None:
    static, dynamic, own = (item.partition for item in gallery.mixing(8))
    assert static.bend < 1e-12
    assert dynamic.bend > 0.1
    assert own.bend > 0.1
    for item in (*gallery.mixing(8), *gallery.examples()):
        assert item.partition.regions > 1
        assert all(number in STATEMENTS for number in item.statements)


def test_training_makes_discs_of_the_slots_by_the_own_token() -> None:
    """What the captions say: after training every slot is active on a near disc around its key, with fixed controls too."""
    layer = gallery.recall_layer(8)
    context = gallery.recall_batch(1, torch.Generator().manual_seed(8))[0][0, :-1]
    keys = torch.nn.functional.pad(context[:, : gallery.WIDTH // 2], (0, gallery.WIDTH // 2))
    axes = torch.linalg.qr(keys[:2].T).Q.T
    plane = Plane(torch.zeros(gallery.WIDTH).double(), axes)
    before = gallery.fresh_error(layer, 8)
    gallery.train_recall(layer, 8)
    after = gallery.fresh_error(layer, 8)
    assert after < before / 4
    fixed = make_static(copy.deepcopy(layer))
    assert gallery.fresh_error(fixed, 8) < 1.1 * after
    for m in (layer, fixed):
        found = partition(layer_field(m, context, plane), radius=3.0, steps=32)
        for slot in range(1, gallery.KEYS + 1):
            centre, _, gap = circle(found.boundary(slot))
            assert gap < 0.05
            key = keys[gallery.KEYS - slot] @ axes.T
            assert torch.cosine_similarity(centre, key, dim=0) > 0.9
