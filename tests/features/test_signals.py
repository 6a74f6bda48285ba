"""Scattering of signals against numpy's own convolution, and against what must hold of it."""

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from fedgist.core.rng import Rng
from fedgist.features import SignalScattering
from fedgist.features.signals import RADIUS, WAVELETS, moduli, morlet

FILTERS = morlet()


def test_filters_have_mean_0_and_norm_1() -> None:
    real, imaginary = FILTERS[:WAVELETS, 0], FILTERS[WAVELETS:, 0]
    assert real.sum(1).abs().max() < 1e-12 and imaginary.sum(1).abs().max() < 1e-12
    assert torch.allclose(real.square().sum(1) + imaginary.square().sum(1), torch.ones(WAVELETS).double())


def test_moduli_are_those_of_numpy() -> None:
    x = Rng(0).normal(1, 2, 40).double()
    found = moduli(x, FILTERS)
    for row in range(2):
        padded = np.pad(x[0, row].numpy(), RADIUS, mode="edge")
        for k in range(WAVELETS):
            psi = FILTERS[k, 0].numpy() + 1j * FILTERS[WAVELETS + k, 0].numpy()
            wanted = np.abs(np.convolve(padded, psi[::-1], mode="valid"))
            assert np.allclose(found[0, row * WAVELETS + k].numpy(), wanted, atol=1e-12)


def test_a_wave_is_found_at_its_frequency() -> None:
    t = torch.arange(256).double()
    answers = [
        moduli(torch.sin(0.75 * math.pi * 2 ** (-k / WAVELETS) * t)[None, None], FILTERS)[0, :, 50:200].mean(1)
        for k in range(WAVELETS)
    ]
    assert [answer.argmax().item() for answer in answers] == list(range(WAVELETS))


@pytest.mark.parametrize(("shape", "octaves"), [((1, 187), 5), ((3, 64), 4), ((2, 16), 2)])
def test_paths_and_their_number(shape: tuple[int, int], octaves: int) -> None:
    """A path of two octaves is the modulus, at the coarser one, of the halved modulus of the finer one."""
    x = Rng(1).normal(4, *shape).double()
    scattering = SignalScattering(shape, grid=4)
    made = scattering(scattering.weights(Rng(0)), x)
    assert scattering.octaves == octaves and made.shape == (4, scattering.size)
    assert torch.allclose(made.norm(dim=1), torch.ones(4).double())
    second = F.adaptive_avg_pool1d(moduli(F.avg_pool1d(moduli(x, FILTERS), 2), FILTERS), 4).sqrt().flatten(1)
    begin = shape[0] * (1 + octaves * WAVELETS) * 4
    assert torch.allclose(F.normalize(made[:, begin : begin + second.shape[1]]), F.normalize(second))


def test_a_move_within_a_stretch_changes_little() -> None:
    """Where the values themselves become others."""
    wave = torch.sin(0.9 * torch.arange(300).double())
    x, moved = wave[:256][None, None], wave[3:259][None, None]
    scattering = SignalScattering((1, 256), grid=4)
    first, second = (scattering(scattering.weights(Rng(0)), each) for each in (x, moved))
    assert (first - second).norm() < 0.1 < 1 < (x - moved).norm() / x.norm()
