"""Square: its squares, its patterns, and that the loss never decreases."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from dat.attacks import AttackTarget, Loss, Square
from dat.attacks.square import _pattern
from dat.core.losses import margin
from dat.core.rng import Streams
from dat.core.threat import ThreatModel
from tests.attacks.cases import answers, both_norms, images, wavy, wrong

SHAPES = [(4, 3, 1, 1), (4, 1, 1, 5), (4, 3, 7, 4), (4, 1, 11, 12)]

every_shape = pytest.mark.parametrize("shape", SHAPES, ids=str)


class Queries:
    """A loss that records its inputs."""

    def __init__(self, loss: Loss | None = None) -> None:
        self.loss = loss
        self.points: list[Tensor] = []

    def __call__(self, x: Tensor) -> Tensor:
        self.points.append(x)
        return torch.zeros(len(x), dtype=x.dtype) if self.loss is None else self.loss(x)


def grey(*shape: int) -> Tensor:
    """Images far enough from 0 and 1 for the box not to matter."""
    return torch.full(shape, 0.5, dtype=torch.float64)


@pytest.mark.parametrize("share", [0.8, 0.05])
def test_a_square_covers_ever_less_of_the_image(share: float) -> None:
    """The schedule of the paper: halved after 10, 50, 200, ... queries."""
    attack = Square(share=share)
    halvings = [(0, 0), (10, 0), (11, 1), (50, 1), (51, 2), (200, 2), (201, 3), (501, 4)]
    halvings += [(1001, 5), (2001, 6), (4001, 7), (6001, 8), (8000, 8), (8001, 9), (10**6, 9)]
    for query, times in halvings:
        assert attack.covered(query) == pytest.approx(share / 2**times)


@pytest.mark.parametrize("size", [(12, 12), (9, 14), (14, 9), (3, 20)])
def test_a_linf_square_has_the_side_of_its_share(size: tuple[int, int]) -> None:
    """If no query improves, each differs from the start by its square alone. With sixteen channels,
    a square that equals what it covers is practically impossible."""
    height, width = size
    x, asked = grey(2, 16, height, width), Queries()
    attack = Square(queries=60, share=0.3, loss="given")
    attack(asked, x, ThreatModel(norm="linf", eps=0.1))
    start, *tried = asked.points
    assert len(tried) == 60
    for query, point in enumerate(tried):
        rounded = round(math.sqrt(attack.covered(query) * height * width))
        side = min(max(rounded, 1), height, width)
        for changed in (point != start).any(1):
            rows, columns = changed.any(1), changed.any(0)
            assert changed.sum() == side**2 == rows.sum() * columns.sum()
            for line in (rows, columns):
                first = int(line.int().argmax())
                assert line[first : first + side].all()


def test_linf_squares_are_of_one_color_and_anywhere() -> None:
    x, asked = grey(1, 16, 8, 8), Queries()
    Square(queries=200, share=0.2, loss="given")(asked, x, ThreatModel(norm="linf", eps=0.1))
    start, *tried = asked.points
    covered = torch.zeros(8, 8)
    colors = []
    for point in tried:
        inside = (point != start).any(1)[0]
        covered += inside
        values = point[0][:, inside]
        assert (values == values[:, :1]).all()
        colors.append(values[:, 0])
    assert (covered > 0).all()
    up = (torch.stack(colors) > 0.5).double().mean(0)
    assert ((up > 0.3) & (up < 0.7)).all()


def test_linf_starts_from_vertical_stripes() -> None:
    x, asked = grey(50, 3, 4, 5), Queries()
    Square(queries=1, loss="given")(asked, x, ThreatModel(norm="linf", eps=0.1))
    delta = asked.points[0] - x
    torch.testing.assert_close(delta.abs(), torch.full_like(x, 0.1))
    assert (delta == delta[:, :, :1]).all()
    up = (delta[:, :, 0] > 0).double()
    assert 0.4 < up.mean() < 0.6
    assert up.var(0).min() > 0 and up.var(1).max() > 0 and up.var(2).max() > 0


@both_norms
@every_shape
def test_every_query_is_at_the_edge_of_the_ball(norm: str, shape: tuple[int, ...]) -> None:
    """As long as the box does not interfere."""
    threat, x = ThreatModel(norm=norm, eps=0.1), grey(*shape)
    asked = Queries(lambda z: wavy(x[0].numel(), dtype=torch.float64)(z).sum(1))
    Square(queries=30, loss="given")(asked, x, threat)
    for point in asked.points:
        size = threat.size(point, x)
        torch.testing.assert_close(size, torch.full_like(size, 0.1), rtol=0, atol=1e-9)


@both_norms
@every_shape
@pytest.mark.parametrize("eps", [0.05, 3.0])
def test_every_query_is_in_ball_and_box(norm: str, shape: tuple[int, ...], eps: float) -> None:
    eps = min(eps, 1.0) if norm == "linf" else eps
    x, threat = images(shape, dtype=torch.float64), ThreatModel(norm=norm, eps=eps)
    asked = Queries(lambda z: wavy(x[0].numel(), dtype=torch.float64)(z).sum(1))
    Square(queries=30, loss="given")(asked, x, threat)
    for point in asked.points:
        assert point.isfinite().all()
        assert (threat.size(point, x) <= eps + 1e-9).all()
        assert point.min() >= 0 and point.max() <= 1


@both_norms
@every_shape
def test_the_loss_never_falls_over_the_queries(norm: str, shape: tuple[int, ...]) -> None:
    """A run with few queries is a prefix of a longer one, so it shows the state in between."""
    x = images(shape, dtype=torch.float64)
    network, threat = wavy(x[0].numel(), dtype=torch.float64), ThreatModel(norm=norm, eps=0.3)
    y = answers(network, x)
    asked = Queries(lambda z: margin(network(z), y))
    Square(queries=30, loss="given")(asked, x, threat)
    seen = torch.stack([margin(network(point), y) for point in asked.points])
    for queries in (1, 9, 30):
        x_adv = Square(queries=queries)(AttackTarget(network, y), x, threat)
        highest = seen[: queries + 1].max(0).values
        torch.testing.assert_close(margin(network(x_adv), y), highest, rtol=0, atol=1e-12)


@both_norms
def test_queries_raise_the_loss_of_most_images(norm: str) -> None:
    x, threat = images((32, 1, 6, 6), dtype=torch.float64), ThreatModel(norm=norm, eps=0.1)
    network = wavy(36, dtype=torch.float64)
    y = answers(network, x)
    reached = [
        margin(network(Square(queries=queries)(AttackTarget(network, y), x, threat)), y)
        for queries in (1, 10, 150)
    ]
    assert (reached[1] > reached[0]).float().mean() > 0.5
    assert (reached[2] > reached[1]).float().mean() > 0.8


@both_norms
def test_a_break_in_a_later_block_is_the_same_alone(norm: str) -> None:
    """Random numbers are generated for blocks of a hundred queries and the remaining images."""
    x, threat = images((6, 1, 4, 4), dtype=torch.float64), ThreatModel(norm=norm, eps=0.04)
    network = wavy(16, dtype=torch.float64)
    y, draws = answers(network, x), Streams.of(3, "t", index=torch.arange(6))
    by_then = [
        wrong(network, Square(queries=queries)(AttackTarget(network, y), x, threat, draws), y)
        for queries in (1, 100)
    ]
    assert 0 < by_then[1].sum() < 6
    attack = Square(queries=110)
    together = attack(AttackTarget(network, y, until_broken=True), x, threat, draws)
    for row in torch.arange(6).split(1):
        target = AttackTarget(network, y[row], until_broken=True)
        alone = attack(target, x[row], threat, draws.select(row))
        torch.testing.assert_close(alone, together[row], rtol=0, atol=1e-12)


def eta(side: int) -> NDArray[np.float64]:
    """The pattern of section 3.4 of the paper, pixel by pixel."""

    def peak(height: int, width: int) -> NDArray[np.float64]:
        values = np.zeros((height, width))
        for row in range(height):
            for column in range(width):
                ring = max(abs(row - height // 2), abs(column - width // 2))
                last = max(height // 2, width // 2)
                values[row, column] = sum(1 / (k + 1) ** 2 for k in range(ring, last + 1))
        return values / max(float(np.linalg.norm(values)), 1e-300)

    both = np.concatenate((peak(side // 2, side), -peak(side - side // 2, side)))
    pattern: NDArray[np.float64] = both / np.linalg.norm(both)
    return pattern


@pytest.mark.parametrize("side", [1, 2, 3, 4, 5, 8, 9])
def test_the_l2_pattern_is_two_peaks_of_opposite_sign(side: int) -> None:
    pattern = _pattern(side, grey(1, 1, 1, 1))
    assert pattern.shape == (side, side)
    np.testing.assert_allclose(pattern.numpy(), eta(side), atol=1e-6)
    above, below = pattern[: side // 2], pattern[side // 2 :]
    assert (above > 0).all() and (below < 0).all()
    assert float(pattern.norm()) == pytest.approx(1, abs=1e-6)
    if side > 1:  # a single pixel has no room for two
        assert float(above.norm()) == pytest.approx(math.sqrt(0.5), abs=1e-6)
    if side % 2 == 0:  # else the lower one has a row more
        assert abs(float(pattern.sum())) < 1e-6


def l2_queries(x: Tensor, attack: Square, eps: float) -> Iterator[tuple[int, Tensor, Tensor]]:
    """If no query improves: the side of each query's squares, the pixels it changed, and those it
    emptied."""
    asked = Queries()
    attack(asked, x, ThreatModel(norm="l2", eps=eps))
    start, *tried = (point - x for point in asked.points)
    height, width = x.shape[2:]
    for query, delta in enumerate(tried):
        side = max(3, round(math.sqrt(attack.covered(query) * height * width)))
        side = min(side + 1 - side % 2, height, width)  # odd, if the image has room for it
        for before, after in zip(start, delta, strict=True):
            changed = (before - after).abs().amax(0) > 1e-9
            yield side, changed, changed & (after.abs().amax(0) < 1e-12)


@pytest.mark.parametrize("size", [(12, 12), (9, 14), (14, 9), (4, 20), (2, 2)])
def test_an_l2_query_empties_one_square_into_another(size: tuple[int, int]) -> None:
    for side, changed, emptied in l2_queries(
        grey(2, 2, *size), Square(queries=60, loss="given"), 0.1
    ):
        filled = changed & ~emptied
        assert filled.any(1).sum() == filled.any(0).sum() == side
        assert filled.sum() == side**2
        assert emptied.sum() <= side**2


@pytest.mark.parametrize("channels", [1, 2, 3])
def test_what_the_box_took_from_an_l2_perturbation_goes_into_the_square(channels: int) -> None:
    """Exactly, so that nothing changes around the squares."""
    x = images((3, channels, 12, 12), dtype=torch.float64)
    attack = Square(queries=40, share=0.1, loss="given")
    for side, changed, _ in l2_queries(x, attack, 0.5):
        assert 0 < changed.sum() <= 2 * side**2


def test_an_l2_start_is_a_grid_of_patterns() -> None:
    x, asked = grey(4, 2, 10, 15), Queries()
    Square(queries=1, loss="given")(asked, x, ThreatModel(norm="l2", eps=0.1))
    delta = asked.points[0] - x
    assert not delta[..., 14].any()  # no room for another tile
    tiles = delta[..., :14].reshape(4, 2, 5, 2, 7, 2)
    upright = torch.tensor(eta(2))
    for tile in tiles.permute(0, 1, 2, 4, 3, 5).reshape(-1, 2, 2):
        shape = tile / tile.norm()
        turned = (s * p for s in (1, -1) for p in (upright, upright.T))
        assert any((shape - one).abs().max() < 1e-6 for one in turned)


def test_image_sides_with_no_room_for_five_tiles_get_a_grid_of_pixels() -> None:
    x, asked = grey(3, 1, 2, 3), Queries()
    Square(queries=1, loss="given")(asked, x, ThreatModel(norm="l2", eps=0.1))
    delta = asked.points[0] - x
    torch.testing.assert_close(delta.abs(), torch.full_like(x, 0.1 / math.sqrt(6)))


@both_norms
def test_no_gradient_is_asked_for(norm: str) -> None:
    def step(x: Tensor) -> Tensor:
        assert not torch.is_grad_enabled()
        return (x.flatten(1).sum(1) * 10).floor()

    x = images((3, 1, 4, 4))
    x_adv = Square(queries=20, loss="given")(step, x, ThreatModel(norm=norm, eps=0.2))
    with torch.no_grad():
        assert (step(x_adv) >= step(x)).all()
