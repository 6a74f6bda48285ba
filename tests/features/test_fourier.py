"""Random Fourier features: norms, the kernel that they stand for, and maps side by side."""

import math

import torch

from fedgist.core.rng import Rng
from fedgist.features import Beside, Fourier, ModelFeatures, Scattering, drawn
from fedgist.models import build

FIXED = Scattering((1, 8, 8), (0.0,), (1.0,), orientations=4, grid=2)
X = Rng(0).uniform(12, 1, 8, 8).double()


def test_products_are_nearly_a_gaussian_kernel() -> None:
    """⟨φ(x), φ(x')⟩ is a mean of d/2 cosines, whose error is below 1/√(d/2): five times that is never reached."""
    kernel = Fourier(FIXED, 4096, 0.4)
    made = kernel({name: tensor.double() for name, tensor in kernel.weights(Rng(1)).items()}, X)
    plain = FIXED(FIXED.weights(Rng(0)), X)
    wanted = torch.exp(-torch.cdist(plain, plain).square() / (2 * 0.4**2))
    assert wanted.min() < 0.9
    assert torch.allclose(made.norm(dim=1), torch.ones(12).double())
    assert (made @ made.T - wanted).abs().max() < 5 / math.sqrt(2048)


def test_maps_side_by_side_have_norm_1_and_their_own_randomness() -> None:
    model = ModelFeatures(build("mlp", (1, 8, 8), 10, hidden=(16,)))
    both = Beside((model, Fourier(FIXED, 8, 0.5), FIXED))
    w = both.weights(Rng(2))
    made = both({name: tensor.double() for name, tensor in w.items()}, X)
    assert made.shape == (12, 16 + 8 + FIXED.size) == (12, both.size)
    assert torch.allclose(made.norm(dim=1), torch.ones(12).double())
    assert torch.allclose(made[:, -FIXED.size :] * math.sqrt(3), FIXED(FIXED.weights(Rng(0)), X))


def test_a_seed_stands_for_the_weights() -> None:
    kernel = Fourier(FIXED, 8, 0.5)
    first = drawn(kernel, 1)["frequencies"]
    assert drawn(Fourier(FIXED, 8, 0.5), 1)["frequencies"] is first
    assert not torch.equal(drawn(kernel, 2)["frequencies"], first)
