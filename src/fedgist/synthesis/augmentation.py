"""Differentiable siamese augmentation: one random change, the same for real and synthetic images. Zhao and Bilen 2021.

A change is a row of numbers, drawn from a seed ahead of the steps that apply it. It is of one of the named kinds, and
whatever the kind, the same operations run, with neutral numbers for the others: nothing branches on data, so it vmaps
and compiles, and equal seeds give equal changes.

Deviations from the paper:
1. One draw serves all classes of a step.
2. Scaling has one ratio for both axes, as rotation and flipping share its interpolation, and draws its logarithm.
3. Crops by the most pixels are half as likely as others: the shift is a rounded uniform number.
"""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from fedgist.core.errors import FedgistError, unknown
from fedgist.core.rng import uniform

KINDS = ("color", "crop", "cutout", "flip", "scale", "rotate")
BRIGHTNESS, SATURATION, CONTRAST = 1.0, 2.0, 0.5
CROP, CUTOUT = 1 / 8, 1 / 2  # parts of the image's side
SCALE, DEGREES = 1.2, 15.0
OUTSIDE = 1e6
"""Where the hole of a change is that cuts nothing out, in pixels."""
BEYOND = 4.0
"""Where pixels in a hole are read, in halves of a side: outside of every image, which is 0."""


@dataclass(frozen=True)
class Augmentation:
    """The kinds to draw from, for images of that height and width. Digits should not be flipped."""

    kinds: tuple[str, ...]
    size: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.size) != 2:
            raise FedgistError("an augmentation is for images, and an input here is none: leave it out")
        for kind in self.kinds:
            if kind not in KINDS:
                raise unknown("augmentation", kind, KINDS)

    def draw(self, seeds: Tensor, one_kind: bool = False) -> Tensor:
        """A change for each of the seeds: [*seeds, numbers], in the order of `Change`; in a row, all of one kind."""
        u = torch.vmap(lambda seed: uniform(seed, (4,)))(seeds.flatten()).T
        kind = u[0].reshape(seeds.shape)
        kind = kind[..., :1].expand(seeds.shape) if one_kind else kind
        chosen = (kind.flatten() * len(self.kinds)).floor()
        active = {kind: chosen == (self.kinds.index(kind) if kind in self.kinds else -1) for kind in KINDS}
        numbers = [*_color(u[1:], active), *_reading(u[1:3], active, self.size), *_hole(u[1:3], active, self.size)]
        return torch.stack(numbers, -1).reshape(*seeds.shape, len(numbers))


def _color(u: Tensor, active: dict[str, Tensor]) -> list[Tensor]:
    """Factors of the image, of its grey image and of its mean, and what is added.

    Brightness adds; saturation is the distance from the grey image, contrast that from the mean.
    """
    brightness = torch.where(active["color"], (u[0] - 0.5) * BRIGHTNESS, 0.0)
    saturation = torch.where(active["color"], u[1] * SATURATION, 1.0)
    contrast = torch.where(active["color"], u[2] + CONTRAST, 1.0)
    return [contrast * saturation, contrast * (1 - saturation), 1 - contrast, brightness]


def _reading(u: Tensor, active: dict[str, Tensor], size: tuple[int, ...]) -> list[Tensor]:
    """Shift by whole pixels, mirror, enlarge or reduce, turn: where a pixel's value is read, as an affine map.

    Its two rows, for across and down, take how far the pixel is right of the centre, how far below, and 1.
    """
    height, width = size
    mirror = torch.where(active["flip"] & (u[0] < 0.5), -1.0, 1.0)
    ratio = torch.where(active["scale"], SCALE ** (2 * u[0] - 1), 1.0)
    angle = torch.where(active["rotate"], (2 * u[0] - 1) * math.radians(DEGREES), 0.0)
    down, right = (
        torch.where(active["crop"], ((2 * v - 1) * CROP * side).round(), 0.0) for v, side in zip(u, size, strict=True)
    )
    cos, sin = angle.cos() * ratio, angle.sin() * ratio
    # grid_sample counts a side as 2, so a pixel is 2 / side
    across = [part * 2 / width for part in (cos * mirror, -sin, right)]
    return across + [part * 2 / height for part in (sin * mirror, cos, down)]


def _hole(u: Tensor, active: dict[str, Tensor], size: tuple[int, ...]) -> list[Tensor]:
    """How far the middle of a hole, which is anywhere, is below the centre of the image and right of it."""

    def middle(v: Tensor, side: int) -> Tensor:
        # side positions, so floor(v · side) is uniform over them
        around = _cut(side)
        return torch.where(active["cutout"], (v * side).floor() + (around[0] + around[-1] - side + 1) / 2, OUTSIDE)

    return [middle(v, side) for v, side in zip(u, size, strict=True)]


class Change:
    """Changes images [n, channels, height, width] such as `like`: all by one row of numbers, or each by its own."""

    def __init__(self, numbers: Tensor, like: Tensor):
        numbers = numbers.to(like.dtype).reshape(-1, numbers.shape[-1], 1, 1)
        self.color = numbers[:, :4, None]
        across_by_x, across_by_y, across, down_by_x, down_by_y, down, *hole = numbers[:, 4:].unbind(1)
        y, x = (_from_centre(side, like) for side in like.shape[2:])
        y = y[:, None]
        along_rows = torch.addcmul(across, across_by_x, x) + across_by_y * y
        along_columns = torch.addcmul(down, down_by_x, x) + down_by_y * y
        reach = [len(_cut(side)) / 2 for side in like.shape[2:]]
        cut = ((y - hole[0]).abs() < reach[0]) & ((x - hole[1]).abs() < reach[1])
        self.grid = torch.where(cut[..., None], BEYOND, torch.stack([along_rows, along_columns], -1))

    def __call__(self, x: Tensor) -> Tensor:
        """Color, then the reading, bilinear and 0 outside and in the hole."""
        of_image, of_grey, of_mean, brightness = self.color.unbind(1)
        grey = x.mean(1, keepdim=True)
        flat = torch.addcmul(brightness, grey.mean((2, 3), keepdim=True), of_mean)
        x = torch.addcmul(torch.addcmul(flat, grey, of_grey), x, of_image)
        grid = self.grid.expand(len(x), *self.grid.shape[1:])
        return F.grid_sample(x, grid, align_corners=False)


def _from_centre(side: int, like: Tensor) -> Tensor:
    """How far each pixel is from the middle of a side."""
    return torch.arange((1 - side) / 2, side / 2, device=like.device, dtype=like.dtype)


def _cut(side: int) -> range:
    """The pixels of a side that a hole takes, relative to where it was drawn."""
    half = side * CUTOUT / 2
    return range(math.ceil(-half), math.ceil(half))
