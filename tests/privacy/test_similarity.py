"""PSNR and SSIM against their definitions, and the assignment against all permutations."""

import itertools
import math

import numpy as np
import pytest
import torch

from fedgist.core.rng import Rng
from fedgist.privacy.similarity import match, psnr, ssim


def test_psnr_of_a_known_error():
    """Every pixel off by 0.1: mean squared error 0.01, so 20 dB; equal images get 100, not infinity."""
    a = torch.full((1, 1, 4, 4), 0.3)
    assert psnr(a, a + 0.1).item() == pytest.approx(20, abs=1e-4)
    assert psnr(a, a).item() == 100


def ssim_by_definition(a, b):
    """Wang et al. 2004, Eq. 13 with weights of Eq. 14 to 16, one window after the other, in plain numpy."""
    bell = [math.exp(-((i - 5) ** 2) / (2 * 1.5**2)) for i in range(11)]
    weight = np.array([[p * q for q in bell] for p in bell])
    weight /= weight.sum()
    values = []
    for top in range(a.shape[0] - 10):
        for left in range(a.shape[1] - 10):
            x, y = (image[top : top + 11, left : left + 11] for image in (a, b))
            mean_x, mean_y = (weight * x).sum(), (weight * y).sum()
            var_x, var_y = (weight * (x - mean_x) ** 2).sum(), (weight * (y - mean_y) ** 2).sum()
            both = (weight * (x - mean_x) * (y - mean_y)).sum()
            c1, c2 = 0.01**2, 0.03**2
            values.append(
                (2 * mean_x * mean_y + c1) * (2 * both + c2) / ((mean_x**2 + mean_y**2 + c1) * (var_x + var_y + c2))
            )
    return np.mean(values)


def test_ssim_is_its_definition():
    a, b = Rng(0)("a").uniform(2, 3, 14, 13).double(), Rng(0)("b").uniform(2, 3, 14, 13).double()
    b = 0.5 * a + 0.5 * b
    expected = [np.mean([ssim_by_definition(a[i, c].numpy(), b[i, c].numpy()) for c in range(3)]) for i in range(2)]
    assert ssim(a, b).tolist() == pytest.approx(expected, abs=1e-10)
    assert 0.3 < expected[0] < 0.9


def test_ssim_of_equal_and_opposite_images():
    a = Rng(1).uniform(1, 1, 12, 12).double()
    assert ssim(a, a).item() == pytest.approx(1)
    assert ssim(a, 1 - a).item() < -0.5
    assert ssim(a[..., :8, :7], a[..., :8, :7]).item() == pytest.approx(1)  # smaller than the window


def test_the_match_is_the_best_of_all_permutations():
    truth, images = Rng(2)("truth").uniform(4, 1, 5, 5), Rng(2)("images").uniform(4, 1, 5, 5)
    found = match(images, truth)
    assert found.truth.tolist() == [0, 1, 2, 3]

    def error(order):
        return (images[list(order)] - truth).square().sum().item()

    assert tuple(found.image.tolist()) == min(itertools.permutations(range(4)), key=error)
    torch.testing.assert_close(found.psnr, psnr(images[found.image], truth))
    torch.testing.assert_close(found.ssim, ssim(images[found.image], truth))


def test_shuffled_images_are_found_again():
    truth = Rng(3).uniform(5, 1, 6, 6)
    order = torch.tensor([3, 0, 4, 1, 2])
    found = match(truth[order], truth)
    assert order[found.image].tolist() == [0, 1, 2, 3, 4]
    assert found.psnr.tolist() == [100] * 5
    assert match(truth[:3], truth).truth.tolist() == [0, 1, 2]  # fewer images than true ones
