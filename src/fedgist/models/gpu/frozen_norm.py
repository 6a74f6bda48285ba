"""BatchNorm in evaluation mode and the ReLU and max pooling behind it, where images are differentiated and weights are
not: on a GPU, with Triton.

Where dreams pass a ResNet (Co-Dream), its convolutions are cuDNN's and the smaller part of the time. Statistics, norm,
ReLU and pooling, one after the other, read and write what a convolution makes a dozen times; here it is read once,
forward and back, and what is made of it written once. Where more is asked for, the layers run, as in `frozen_conv`.
"""

from typing import Any

import torch
from torch import Tensor

from fedgist.core.task import Tap
from fedgist.models.gpu.frozen_autograd import FrozenBlock, Outputs
from fedgist.models.gpu.frozen_conv import contiguous
from fedgist.models.layers import batch_norm

WARPS, VALUES, BACKWARD_VALUES = 8, 8192, 4096
"""Of x, what a program works on: 32 numbers for each thread, and 16 where gradients come on top of them."""
WIDEST = 128
"""Channels of a program, at most: what a warp reads at once, 16 bytes a thread."""


def block(*inputs: Any) -> Outputs:
    """max_pool2d(relu(batch_norm(x)), 2), or the first of these layers, and x's mean and variance in each channel.

    Takes what `forward` takes; as often differentiable as the layers are.
    """
    *tensors, count, epsilon = inputs
    return FrozenBlock(forward, backward, layer_by_layer, (count, epsilon), has_clients=False)(*tensors)


@torch.library.custom_op("fedgist::frozen_norm", mutates_args=(), device_types="cuda")
def forward(
    x: Tensor, gamma: Tensor, beta: Tensor, running_mean: Tensor, running_variance: Tensor, count: int, epsilon: float
) -> Outputs:
    """The first `count` of norm, ReLU and pooling; x [images, channels, height, width], the others [channels].

    Height and width are even where they are pooled. The statistics are found as in `frozen_conv.forward`.
    """
    from fedgist.models.gpu import frozen_norm_kernels

    x, out = _channels_last(x), _result(x, count)
    launch = _launch(out, count, VALUES)
    programs, _ = grid = launch.pop("grid")
    shares = x.new_empty(programs, 2, x.shape[1])
    frozen_norm_kernels.forward[grid](
        x, *contiguous(gamma, beta, running_mean, running_variance), out, shares, *_sizes(out), epsilon, **launch
    )
    shift, squared = shares.sum(0)
    return out, running_mean + shift, torch.addcmul(squared, shift, shift, value=-1)


@torch.library.custom_op("fedgist::frozen_norm_backward", mutates_args=(), device_types="cuda")
def backward(
    to_out: Tensor, to_mean: Tensor, to_variance: Tensor, mean: Tensor, x: Tensor, gamma: Tensor, beta: Tensor,
    running_mean: Tensor, running_variance: Tensor, count: int, epsilon: float,
) -> Tensor:  # fmt: skip
    """The gradient of x, which is that of y in `frozen_conv.backward`; without pooling, every value is the largest."""
    from fedgist.models.gpu import frozen_norm_kernels

    x, to_out = _channels_last(x), _channels_last(to_out)
    to_x, launch = torch.empty_like(x), _launch(to_out, count, BACKWARD_VALUES)
    frozen_norm_kernels.backward[launch.pop("grid")](
        x, *contiguous(gamma, beta, running_mean, running_variance, mean), to_out, *contiguous(to_mean, to_variance),
        to_x, *_sizes(to_out), epsilon, **launch,
    )  # fmt: skip
    return to_x


def _channels_last(x: Tensor) -> Tensor:
    return x.contiguous(memory_format=torch.channels_last)


def _result(x: Tensor, count: int) -> Tensor:
    images, channels, height, width = x.shape
    side = 2 if count == 3 else 1
    return x.new_empty(images, height // side, width // side, channels).movedim(3, 1)


def _sizes(out: Tensor) -> tuple[int, int, int]:
    """Positions, columns and channels of a result."""
    images, channels, rows, columns = out.shape
    return images * rows * columns, columns, channels


def _launch(out: Tensor, count: int, values: int) -> dict[str, Any]:
    """How a kernel is started for a result like `out`, when a program works on so many values of x."""
    total, _, channels = _sizes(out)
    width = min(WIDEST, max(16, 1 << (channels - 1).bit_length()))
    positions = values // width // (4 if count == 3 else 1)
    grid = -(-total // positions), -(-channels // width)
    return {"grid": grid, "COUNT": count, "POSITIONS": positions, "BLOCK": width, "num_warps": WARPS}


@forward.register_fake
def _(
    x: Tensor, gamma: Tensor, beta: Tensor, running_mean: Tensor, running_variance: Tensor, count: int, epsilon: float
) -> Outputs:
    return _result(x, count), torch.empty_like(running_mean), torch.empty_like(running_mean)


@backward.register_fake
def _(
    to_out: Tensor, to_mean: Tensor, to_variance: Tensor, mean: Tensor, x: Tensor, gamma: Tensor, beta: Tensor,
    running_mean: Tensor, running_variance: Tensor, count: int, epsilon: float,
) -> Tensor:  # fmt: skip
    return torch.empty_like(x, memory_format=torch.channels_last)


def layer_by_layer(
    x: Tensor, gamma: Tensor, beta: Tensor, running_mean: Tensor, running_variance: Tensor, count: int, epsilon: float
) -> Outputs:
    """What `forward` computes, by torch's own layers."""
    tap = Tap()
    out = batch_norm(x, gamma, beta, running_mean, running_variance, ("", ""), buffers=None, tap=tap, epsilon=epsilon)
    if count > 1:
        out = out.relu()
    if count > 2:
        out = torch.max_pool2d(out, 2)
    return out, tap[0].mean, tap[0].variance
