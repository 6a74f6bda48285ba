"""The blocks of a LeNet in evaluation mode, where images are differentiated and weights are not: on a GPU, with Triton.

Dreams are found by thousands of gradients of images at fixed weights (Co-Dream). Convolution, BatchNorm, ReLU and max
pooling, one after the other, read and write what the convolution makes a dozen times; here it is never written on the
way forward, and once on the way back. The layers one after the other say what is right, and take over where more is
asked for: gradients of the weights, or of the gradient.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fedgist.core.task import Tap
from fedgist.models.gpu.convolution import growth_of
from fedgist.models.gpu.frozen_autograd import FrozenBlock, Outputs
from fedgist.models.layers import batch_norm

LARGEST_KERNEL, MOST_CHANNELS = 5, 16
"""Up to these sizes a thread can keep what it computes in registers."""
SQUARES, PIXELS = 128, 256
"""Squares of the pooling, and pixels of an image's gradient, that a program works on: one and two for each thread."""
PRODUCTS = 32
"""Of a pixel's gradient, at most so many are computed at a place before the next place is looked at."""


def block(*inputs: Any) -> Outputs:
    """max_pool2d(relu(batch_norm(y)), 2) of y = conv2d(x) with stride 1, and y's mean and variance in each channel.

    Takes what `forward` takes; plainly or under `torch.func`, and as often differentiable as the layers are.
    """
    *tensors, padding, epsilon = inputs
    return FrozenBlock(forward, backward, layer_by_layer, (padding, epsilon), has_clients=True)(*tensors)


@torch.library.custom_op("fedgist::frozen_conv", mutates_args=(), device_types="cuda")
def forward(
    x: Tensor, weight: Tensor, bias: Tensor, gamma: Tensor, beta: Tensor, running_mean: Tensor,
    running_variance: Tensor, padding: int, epsilon: float,
) -> Outputs:  # fmt: skip
    """x [clients, images, inputs, height, width], where clients may share one by a stride of 0; the convolution's
    weight [clients, channels, inputs, side, side]; all others [clients, channels]. Height and width of y are even.

    With s = y − running mean, mean y = running mean + mean s and var y = mean s² − (mean s)². The subtraction costs no
    digits unless the images are many standard deviations away from what the norm remembers.
    """
    from fedgist.models.gpu import frozen_conv_kernels

    clients, channels, images, rows, columns = *weight.shape[:2], x.shape[1], *_pooled_size(x, weight, padding)
    programs = -(-images * rows * columns // SQUARES)
    pooled = x.new_empty(clients, images, channels, rows, columns)
    shares = x.new_empty(clients, programs, 2, channels)
    weights = _pad_last(weight, 1)
    frozen_conv_kernels.forward[programs, clients](
        x, weights, *contiguous(bias, gamma, beta, running_mean, running_variance), pooled, shares, *x.shape[1:],
        *pooled.shape[2:], *x.stride(), epsilon, weight.shape[-1], padding, SQUARES, weights.shape[-1],
    )  # fmt: skip
    shift, squared = shares.sum(1).unbind(1)
    return pooled, running_mean + shift, torch.addcmul(squared, shift, shift, value=-1)


@torch.library.custom_op("fedgist::frozen_conv_backward", mutates_args=(), device_types="cuda")
def backward(
    to_pooled: Tensor, to_mean: Tensor, to_variance: Tensor, mean: Tensor,
    x: Tensor, weight: Tensor, bias: Tensor, gamma: Tensor, beta: Tensor, running_mean: Tensor,
    running_variance: Tensor, padding: int, epsilon: float,
) -> Tensor:  # fmt: skip
    """The gradient of x, for every client its own, where those of the block's outputs are given.

    For the n values y of a channel: ∂ mean/∂y = 1/n, and ∂ variance/∂y = 2 (y − mean)/n, in which the derivative of
    the mean has no part because Σ (y − mean) = 0. With p̄, m̄ and v̄ the gradients of pooled value, mean and variance,

        ȳ = p̄ · gamma / √(running variance + ε) · [y is the first of the largest of its square, and not cut by ReLU]
            + m̄/n + (2 v̄/n) (y − mean),

    and x̄ is ȳ convolved back.
    """
    from fedgist.models.gpu import frozen_conv_kernels

    clients, channels, images, rows, columns = *weight.shape[:2], x.shape[1], *_pooled_size(x, weight, padding)
    to_y = x.new_empty(clients, images, channels, 2 * rows, 2 * columns)
    side, weights = weight.shape[-1], _pad_last(weight, 1)
    frozen_conv_kernels.backward_to_y[-(-images * rows * columns // SQUARES), clients](
        x, weights, *contiguous(bias, gamma, beta, running_mean, running_variance, mean),
        *contiguous(to_pooled, to_mean, to_variance), to_y, *x.shape[1:], channels, rows, columns, *x.stride(), epsilon,
        side, padding, SQUARES, weights.shape[-1],
    )  # fmt: skip
    to_x, weights = x.new_empty(clients, *x.shape[1:]), _pad_last(weight, 2)
    width = weights.shape[-1]
    group = max(n for n in range(1, 1 + min(8, PRODUCTS // width)) if channels % n == 0)
    frozen_conv_kernels.backward_to_x[-(-images * x[0, 0, 0].numel() // PIXELS), clients](
        to_y, weights, to_x, *to_y.shape[1:], *to_x.shape[2:], side, padding, PIXELS, width, group
    )
    return to_x


def _pooled_size(x: Tensor, weight: Tensor, padding: int) -> tuple[int, int]:
    growth = growth_of(weight.shape[-1], padding)
    return (x.shape[-2] + growth) // 2, (x.shape[-1] + growth) // 2


def _pad_last(weight: Tensor, dim: int) -> Tensor:
    """Params whose dimension `dim` comes last, with zeros up to a power of two: what a thread reads in one go."""
    weight, size = weight.movedim(dim, -1), weight.shape[dim]
    missing = (1 << (size - 1).bit_length()) - size
    return (F.pad(weight, (0, missing)) if missing else weight).contiguous()


def contiguous(*tensors: Tensor) -> list[Tensor]:
    return [tensor.contiguous() for tensor in tensors]


@forward.register_fake
def _(
    x: Tensor, weight: Tensor, bias: Tensor, gamma: Tensor, beta: Tensor, running_mean: Tensor,
    running_variance: Tensor, padding: int, epsilon: float,
) -> Outputs:  # fmt: skip
    clients, channels = weight.shape[:2]
    pooled = x.new_empty(clients, x.shape[1], channels, *_pooled_size(x, weight, padding))
    return pooled, torch.empty_like(running_mean), torch.empty_like(running_mean)


@backward.register_fake
def _(
    to_pooled: Tensor, to_mean: Tensor, to_variance: Tensor, mean: Tensor,
    x: Tensor, weight: Tensor, bias: Tensor, gamma: Tensor, beta: Tensor, running_mean: Tensor,
    running_variance: Tensor, padding: int, epsilon: float,
) -> Tensor:  # fmt: skip
    return x.new_empty(len(weight), *x.shape[1:])


def layer_by_layer(
    x: Tensor, weight: Tensor, bias: Tensor, gamma: Tensor, beta: Tensor, running_mean: Tensor,
    running_variance: Tensor, padding: int, epsilon: float,
) -> Outputs:  # fmt: skip
    """What `forward` computes, by torch's own layers."""
    tap = Tap()
    pooled = []
    for client, images in enumerate(x):
        y = torch.conv2d(images, weight[client], bias[client], padding=padding)
        norm = gamma[client], beta[client], running_mean[client], running_variance[client]
        normed = batch_norm(y, *norm, ("", ""), buffers=None, tap=tap, epsilon=epsilon)
        pooled.append(torch.max_pool2d(normed.relu(), 2))
    return torch.stack(pooled), torch.stack([s.mean for s in tap]), torch.stack([s.variance for s in tap])
