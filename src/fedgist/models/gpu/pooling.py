"""Average pooling; for many clients on a GPU as a mean over squares, whose backward pass is faster than torch's."""

import torch.nn.functional as F
from torch import Tensor

from fedgist.core.work import stacked


def average_pool(x: Tensor, size: int) -> Tensor:
    """F.avg_pool2d."""
    if stacked() and x.is_cuda and x.shape[2] % size == 0 and x.shape[3] % size == 0:
        return by_tiles(x, size)
    return F.avg_pool2d(x, (size, size))


def by_tiles(x: Tensor, size: int) -> Tensor:
    """Where squares tile the image."""
    return x.unflatten(3, (-1, size)).unflatten(2, (-1, size)).mean((3, 5))
