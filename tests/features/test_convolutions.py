"""Random convolutions against a loop over pixels, what they must not see, and what they refuse."""

import pytest
import torch

from fedgist.core.errors import FedgistError
from fedgist.core.rng import Rng
from fedgist.features import Convolutions
from fedgist.features.convolutions import SIDE

X = Rng(0).uniform(3, 2, 7, 7).double()
MAP = Convolutions((2, 7, 7), filters=3, grid=2)
W = {name: tensor.double() for name, tensor in MAP.weights(Rng(1)).items()}


def test_features_are_those_of_a_loop_over_pixels() -> None:
    """7 − 4 + 1 = 4 places along a side, two in a cell."""
    wanted = torch.zeros(3, 2, 3, 2, 2).double()
    for n, f, r, c in torch.cartesian_prod(*map(torch.arange, (3, 3, 4, 4))).tolist():
        value = (X[n, :, r : r + SIDE, c : c + SIDE] * W["filters"][f]).sum()
        wanted[n, 0 if value > 0 else 1, f, r // 2, c // 2] += value.abs() / 4
    wanted = wanted.flatten(1).sqrt()
    made = MAP(W, X)
    assert made.shape == (3, MAP.size) == (3, 24)
    assert torch.allclose(made, wanted / wanted.norm(dim=1, keepdim=True))


def test_brightness_and_tint_do_not_count() -> None:
    assert torch.allclose(MAP(W, 2 * X + torch.tensor([0.3, -0.7]).double()[:, None, None]), MAP(W, X))


def test_too_small() -> None:
    with pytest.raises(FedgistError, match="grid=4 need dimensions=32 and images of 7×7"):
        Convolutions((1, 6, 6), filters=2, grid=4)
    with pytest.raises(FedgistError, match="convolutions is for images"):
        Convolutions((8,), filters=2, grid=4)
