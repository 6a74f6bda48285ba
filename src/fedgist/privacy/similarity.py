"""How alike two sets of images are: PSNR, SSIM (Wang et al. 2004), and which image is which by optimal assignment.

Images are [count, channels, height, width] with pixels between 0 and 1.

Deviation from Wang et al.: on images smaller than their window of 11×11, the largest odd window that fits is used.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

WINDOW, SIGMA, K1, K2 = 11, 1.5, 0.01, 0.03
LARGEST_PSNR = 100.0  # what equal images are given, instead of infinity


def pixels(x: Tensor, low: Tensor, high: Tensor) -> Tensor:
    """Normalised inputs as values between 0 and 1 of the range of each channel; what lies outside is cut off."""
    low, high = (end.view(-1, *[1] * (x.dim() - 2)) for end in (low, high))
    return ((x - low) / (high - low)).clamp(0, 1)


def psnr(a: Tensor, b: Tensor) -> Tensor:
    """10 log₁₀(1 / mean squared error) of each pair of images, in dB."""
    error = (a - b).square().flatten(1).mean(1)
    return (-10 * error.clamp_min(1e-30).log10()).clamp_max(LARGEST_PSNR)


def ssim(a: Tensor, b: Tensor) -> Tensor:
    """The mean structural similarity of each pair of images (Eq. 13), over all windows inside and all channels."""
    channels, height, width = a.shape[1:]
    side = min(WINDOW, *(size - 1 + size % 2 for size in (height, width)))
    offset = torch.arange(side, dtype=a.dtype, device=a.device) - side // 2
    bell = torch.exp(-offset.square() / (2 * SIGMA**2))
    kernel = torch.outer(bell, bell) / bell.sum().square()
    kernel = kernel.expand(channels, 1, side, side)

    def local(x: Tensor) -> Tensor:
        return F.conv2d(x, kernel, groups=channels)

    mean_a, mean_b = local(a), local(b)
    var_a, var_b = local(a * a) - mean_a.square(), local(b * b) - mean_b.square()
    covariance = local(a * b) - mean_a * mean_b
    c1, c2 = K1**2, K2**2
    luminance = (2 * mean_a * mean_b + c1) / (mean_a.square() + mean_b.square() + c1)
    structure = (2 * covariance + c2) / (var_a + var_b + c2)
    return (luminance * structure).flatten(1).mean(1)


@dataclass(frozen=True, eq=False)
class Match:
    """Which of the images is which of the true ones, and how alike each pair is."""

    image: Tensor
    """For each pair, the position among the images …"""
    truth: Tensor
    """… and among the true ones, in their order."""
    psnr: Tensor
    ssim: Tensor


def match(images: Tensor, truth: Tensor) -> Match:
    """The assignment with the smallest sum of squared errors; where one set is smaller, all of it is assigned."""
    from scipy.optimize import linear_sum_assignment  # slow to import

    errors = torch.cdist(truth.flatten(1).double(), images.flatten(1).double()).square()
    rows, columns = linear_sum_assignment(errors.cpu().numpy())
    true, found = (torch.as_tensor(index, device=truth.device) for index in (rows, columns))
    pairs = images[found], truth[true]
    return Match(found, true, psnr(*pairs), ssim(*pairs))
