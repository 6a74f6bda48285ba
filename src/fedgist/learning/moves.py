"""Random crops and mirror images of training samples, as is usual for photographs.

How each image moves is drawn with the batches, ahead of the steps: a step stays a pure function of its batch.
"""

import torch
from torch import Tensor

from fedgist.core.rng import Rng


def draw_moves(shape: tuple[int, ...], crop: int, flip: bool, rng: Rng) -> Tensor:
    """How far down and right of its place each pixel of an image is read, and whether it is mirrored: [*shape, 3].

    A shift by up to `crop` pixels is a cut of the image's size out of one with a border of that width.
    """
    shifts = rng("shifts").integers(2 * crop + 1, *shape, 2) - crop
    mirrored = rng("mirrored").integers(2 if flip else 1, *shape, 1)
    return torch.cat([shifts, mirrored], -1)


def move(x: Tensor, moves: Tensor) -> Tensor:
    """Images [n, channels, height, width], each as its row of `moves` says; 0 is what lies outside of an image."""
    height, width = x.shape[2:]
    down, right, mirrored = moves[..., None].unbind(1)
    rows = torch.arange(height, device=x.device) + down
    columns = torch.arange(width, device=x.device)
    columns = torch.where(mirrored > 0, width - 1 - columns, columns) + right
    inside = _within(rows, height)[:, None, :, None] & _within(columns, width)[:, None, None, :]
    x = torch.take_along_dim(x, rows.clamp(0, height - 1)[:, None, :, None], 2)
    return torch.where(inside, torch.take_along_dim(x, columns.clamp(0, width - 1)[:, None, None, :], 3), 0.0)


def _within(positions: Tensor, side: int) -> Tensor:
    return (positions >= 0) & (positions < side)
