"""Layers for many clients at once on a GPU, where vmap turns a convolution into a grouped one.

cuDNN starts a kernel for each group when a group has few channels; a matrix product of all patches with all weights
starts one for all clients.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fedgist.core.work import stacked
from fedgist.models.gpu.convolution import Pair, convolution

LARGEST_PATCH = 256
"""Numbers in a patch up to which copying the patches out costs less than a grouped convolution."""


def convolve(x: Tensor, weight: Tensor, bias: Tensor | None, stride: Pair, padding: Pair) -> Tensor:
    """torch.conv2d."""
    if stacked() and x.is_cuda and weight[0].numel() <= LARGEST_PATCH:
        return by_patches(x, weight, bias, stride, padding)
    if x.is_cuda and torch.is_grad_enabled() and not torch._C._are_functorch_transforms_active():
        return convolution(x, weight, bias, stride, padding)
    return torch.conv2d(x, weight, bias, stride, padding)


def by_patches(x: Tensor, weight: Tensor, bias: Tensor | None, stride: Pair, padding: Pair) -> Tensor:
    """The convolution as a product of weights [outputs, patch] and patches [patch, batch · positions]."""
    outputs, _, height, width = weight.shape
    x = F.pad(x, (padding[1], padding[1], padding[0], padding[0])).transpose(0, 1)
    rows, columns = (x.shape[2] - height) // stride[0] + 1, (x.shape[3] - width) // stride[1] + 1
    shifted = [
        x[:, :, i : i + stride[0] * rows : stride[0], j : j + stride[1] * columns : stride[1]]
        for i in range(height)
        for j in range(width)
    ]
    patches = torch.stack(shifted).flatten(2).flatten(0, 1)
    out = (weight.permute(0, 2, 3, 1).reshape(outputs, -1) @ patches).unflatten(1, (-1, rows, columns)).transpose(0, 1)
    return out if bias is None else out + bias[:, None, None]


def average(x: Tensor, size: int) -> Tensor:
    """F.avg_pool2d; where squares tile the image, a mean over them is faster in its backward pass on a GPU."""
    if stacked() and x.is_cuda and x.shape[2] % size == 0 and x.shape[3] % size == 0:
        return by_tiles(x, size)
    return F.avg_pool2d(x, (size, size))


def by_tiles(x: Tensor, size: int) -> Tensor:
    return x.unflatten(3, (-1, size)).unflatten(2, (-1, size)).mean((3, 5))


def longer(size: int, given: Sequence[Any], dims: Sequence[int | None]) -> list[Any]:
    """What a kernel takes whose tensors begin with clients, under a vmap over `size` more: a longer first dimension.

    A tensor that all of them share is not copied.
    """

    def merged(one: Any, dim: int | None) -> Any:
        if not isinstance(one, Tensor):
            return one
        return (one.expand(size, *one.shape) if dim is None else one.movedim(dim, 0)).flatten(0, 1)

    return [merged(one, dim) for one, dim in zip(given, dims, strict=True)]
