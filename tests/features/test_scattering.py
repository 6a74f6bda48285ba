"""Scattering against loops over pixels, and against what must hold of it: mirrors, moves and brightness."""

import cmath
import math

import pytest
import torch
import torch.nn.functional as F

from fedgist.core.errors import FedgistError
from fedgist.core.rng import Rng
from fedgist.features import Scattering
from fedgist.features.scattering import RADIUS, moduli, morlet, scatter

FILTERS = morlet(8)


def features(x: torch.Tensor, **sizes: int) -> torch.Tensor:
    channels = x.shape[1]
    found = Scattering(tuple(x.shape[1:]), (0.0,) * channels, (1.0,) * channels, **sizes)
    made = found(found.weights(Rng(0)), x)
    assert made.shape == (len(x), found.size)
    return made


def test_filters_have_mean_0_and_norm_1_and_turn() -> None:
    """Turned by a right angle, ψ_θ is ψ_{θ+90°}: half of the orientations further."""
    real, imaginary = FILTERS[:8, 0], FILTERS[8:, 0]
    assert real.sum((1, 2)).abs().max() < 1e-12 and imaginary.sum((1, 2)).abs().max() < 1e-12
    assert torch.allclose(real.square().sum((1, 2)) + imaginary.square().sum((1, 2)), torch.ones(8).double())
    for k in range(4):
        assert torch.allclose(torch.rot90(real[k], -1), real[k + 4]) and torch.allclose(
            torch.rot90(imaginary[k], -1), imaginary[k + 4]
        )


def test_moduli_are_those_of_a_loop_over_pixels() -> None:
    """|Σ_d x(p + d) ψ(d)| with mirrored borders, from the formula of ψ in complex numbers."""
    x, side, angle = Rng(0).uniform(1, 1, 6, 6).double(), 6, math.pi * 3 / 8
    around = range(-RADIUS, RADIUS + 1)
    envelope, wave = {}, {}
    for i in around:
        for j in around:
            u, v = j * math.cos(angle) + i * math.sin(angle), i * math.cos(angle) - j * math.sin(angle)
            envelope[i, j] = math.exp(-(u**2 + v**2 / 4) / (2 * 0.8**2))
            wave[i, j] = envelope[i, j] * cmath.exp(0.75j * math.pi * u)
    kappa = sum(wave.values()) / sum(envelope.values())
    psi = {d: wave[d] - kappa * envelope[d] for d in wave}
    norm = math.sqrt(sum(abs(value) ** 2 for value in psi.values()))

    def mirrored(i: int) -> int:
        return -i if i < 0 else 2 * (side - 1) - i if i >= side else i

    for r in range(side):
        for c in range(side):
            sums = sum(x[0, 0, mirrored(r + i), mirrored(c + j)].item() * value for (i, j), value in psi.items())
            assert moduli(x, FILTERS)[0, 3, r, c].item() == pytest.approx(abs(sums) / norm, abs=1e-12)


def test_paths_go_from_fine_to_coarse() -> None:
    """With three scales: 1 + 3·8 + 3·64 paths; the first of second order is fine, then the next scale."""
    x = Rng(1).uniform(2, 1, 16, 16).double()
    paths = scatter(x, FILTERS, 3, 2)
    assert paths.shape == (2, 1 + 24 + 192, 4, 4)
    fine = F.avg_pool2d(moduli(x, FILTERS), 2)
    assert torch.allclose(paths[:, 1:9], F.avg_pool2d(fine, 2))
    assert torch.allclose(paths[:, 25 : 25 + 64], F.avg_pool2d(moduli(fine, FILTERS), 2))


def test_a_mirror_image_has_the_same_features_elsewhere() -> None:
    """Mirrored, orientation θ becomes −θ and cells change sides: a permutation."""
    x = Rng(2).uniform(3, 3, 32, 32).double()
    straight, mirrored = features(x), features(x.flip(-1))
    assert not torch.allclose(straight, mirrored)
    assert torch.allclose(straight.sort(1).values, mirrored.sort(1).values)


def test_what_moves_by_a_cell_moves_its_features_by_a_cell() -> None:
    """On black, by 8 of 32 pixels, with a grid of 4 cells: paths reach 3 + 1 + 6 pixels, so no border is touched."""
    x = torch.zeros(1, 1, 32, 32, dtype=torch.float64)
    x[..., 11:13, 11:13] = Rng(3).uniform(2, 2).double()
    before, after = (features(image).view(-1, 4, 4) for image in (x, x.roll((8, 8), (2, 3))))
    assert torch.allclose(before[:, :3, :3], after[:, 1:, 1:]) and after[:, 1:, 1:].norm() > 0.99


def test_brightness_changes_nothing_and_black_has_no_features() -> None:
    x = Rng(4).uniform(2, 3, 16, 16).double()
    assert torch.allclose(features(0.3 * x, grid=2), features(x, grid=2))
    assert torch.allclose(features(x, grid=2).norm(dim=1), torch.ones(2).double())
    assert features(0 * x, grid=2).abs().max() == 0


def test_images_that_are_too_small_or_strange() -> None:
    with pytest.raises(FedgistError, match=r"needs images of 16×16, not 8×8"):
        Scattering((1, 8, 8), (0.0,), (1.0,), scales=3, grid=2)
    with pytest.raises(FedgistError, match="not 2 channels"):
        Scattering((2, 8, 8), (0.0,), (1.0,))
