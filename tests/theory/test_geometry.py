"""Boundaries are where the scores are zero, straight where they should be, and the picture says what it shows."""

from __future__ import annotations

import math
import xml.etree.ElementTree as ElementTree

import pytest
import torch
from torch import Tensor

from hypermlp.theory.geometry import Plane, find_roots, partition, random_plane, straightness
from hypermlp.theory.registry import Instance
from hypermlp.theory.setting import hidden, make_static


def circle(places: Tensor) -> Tensor:
    return 1 - places.square().sum(1, keepdim=True)


def lines(places: Tensor) -> Tensor:
    """x = 0, y = 0 and x + y = 1.03: seven cells."""
    x, y = places.unbind(1)
    return torch.stack([x - 0.01, y - 0.01, x + y - 1.03], dim=1)


def test_roots_are_exact_also_of_steep_and_flat_scores() -> None:
    begin, end = torch.tensor([[0.0, 0.0]] * 3).double(), torch.tensor([[1.0, 0.0]] * 3).double()
    scores = [lambda x: x**3 - 0.2, lambda x: torch.tanh(1e4 * (x - 0.37)), lambda x: torch.exp(9 * x) - 3]
    field = lambda places: torch.stack([f(places[:, 0]) for f in scores], dim=1)  # noqa: E731
    found = find_roots(field, begin, end, torch.arange(3))[:, 0]
    expected = torch.tensor([0.2 ** (1 / 3), 0.37, math.log(3) / 9], dtype=torch.float64)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-13)
    assert find_roots(field, begin[:0], end[:0], torch.arange(0)).shape == (0, 2)


def test_known_curves() -> None:
    found = partition(circle)
    points = found.boundary(0)
    assert len(points) > 50
    torch.testing.assert_close(points.norm(dim=1), torch.ones(len(points)).double(), rtol=0, atol=1e-13)
    assert found.regions == 2
    assert found.bend == pytest.approx(1, abs=0.01)

    straight = partition(lines)
    assert straight.regions == 7
    assert straight.bend < 1e-12
    ends = straight.boundary(2)
    assert straightness(ends[:2]) == 0.0
    torch.testing.assert_close(ends.sum(1), torch.full((len(ends),), 1.03, dtype=torch.float64), rtol=0, atol=1e-13)


def test_pieces_join_into_closed_curves() -> None:
    """Every point of a closed boundary belongs to exactly two pieces."""
    points = partition(circle).boundary(0)
    _, counts = torch.unique(points.round(decimals=12), dim=0, return_counts=True)
    assert counts.tolist() == [2] * len(counts)


def test_boundaries_of_a_real_layer_are_its_zeros() -> None:
    case = Instance(8)
    layer, X, plane = case.layer(n_head=1), case.normal(6, 6), random_plane(6, case.generator)
    torch.testing.assert_close(plane.axes @ plane.axes.T, torch.eye(2).double())
    dynamic = partition(lambda places: hidden(layer, plane.points(places), X)[:, 0], steps=24)
    seen = 0
    for slot in range(6):
        points = dynamic.boundary(slot)
        if len(points):
            seen += 1
            assert hidden(layer, plane.points(points), X)[:, 0, slot].abs().max() < 1e-12
    assert seen >= 2
    assert dynamic.bend > 1e-3

    make_static(layer)
    static = partition(lambda places: hidden(layer, plane.points(places), X)[:, 0], steps=24)
    assert any(len(pieces) for pieces in static.segments)
    assert static.bend < 1e-12


def test_pattern_is_the_sign_of_the_scores() -> None:
    plane = Plane(torch.zeros(2).double(), torch.eye(2).double())
    found = partition(lambda places: lines(plane.points(places)), steps=4, radius=2.0)
    assert found.pattern.shape == (5, 5, 3)
    assert found.pattern[0, 0].tolist() == [False, False, False]  # lower left
    assert found.pattern[0, 4].tolist() == [True, False, False]  # lower right: first coordinate along columns
    assert found.pattern[4, 4].tolist() == [True, True, True]


def test_picture_is_well_formed_and_described() -> None:
    shown = partition(lines, title="three < lines", slots=("a", "b & c", "d"))
    root = ElementTree.fromstring(shown.svg())
    assert root.attrib["aria-label"].startswith("three < lines: 7 activated sets, 3 boundaries")
    paths = [child for child in root if child.tag == "path"]
    assert [path[0].text for path in paths] == ["a", "b & c", "d"]
    assert partition(lambda places: places[:, :1] * 0 - 1).svg().count("<path") == 0


def test_a_grid_needs_cells() -> None:
    with pytest.raises(ValueError, match=r"steps \(1\) must be at least 2"):
        partition(circle, steps=1)
