"""The blocks of a net as one step each: by kernels on a GPU with Triton, elsewhere by their layers one after the other.

A ConvNet's blocks, with instance norm and average pooling, are `instance_norm`'s. Where no gradient is asked for, as
for FedDM's real images and in every evaluation, a convolution of few channels before them joins in. Any other runs
without its bias, another pass over what it makes, which the norm would subtract again.

A LeNet's blocks, with BatchNorm and max pooling, are `frozen_conv`'s, and BatchNorm behind larger convolutions is
`frozen_norm`'s.
"""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from fedgist.core.work import triton_is_there
from fedgist.models.gpu import frozen_conv, frozen_norm, instance_norm
from fedgist.models.layers import (
    EPSILON,
    AvgPool,
    Conv,
    Flatten,
    Layer,
    Layers,
    MaxPool,
    Norm,
    NormStatistics,
    Relu,
    Residual,
    Step,
    Tap,
    Weights,
    bind_all,
)

LARGEST_IMAGE = 4096
"""Pixels of an activation that a program holds at once, at most."""
LARGEST_PATCH = 64
"""Numbers in a patch up to which a convolution joins in."""

Served = Callable[[Weights, Tensor, Weights | None], bool]
"""Whether a block's kernels can take these weights, activations and buffers."""
Kernels = tuple[Step, Served]
"""A block as a step by kernels, and where they serve."""


def bind_blocks(layers: Layers, prefix: str = "") -> tuple[Step, ...]:
    """The functions of a chain of layers, those of a block being one."""
    layers = tuple((prefix + name, layer) for name, layer in layers)
    steps: list[Step] = []
    while layers:
        count, kernels = _block(layers)
        steps.append(_bind(*layers[0]) if kernels is None else _in_one(layers[:count], *kernels))
        layers = layers[count:]
    return tuple(steps)


def _bind(name: str, layer: Layer) -> Step:
    return layer.bind(name, bind_blocks) if isinstance(layer, Residual) else layer.bind(name)


def _block(layers: Layers) -> tuple[int, Kernels | None]:
    """How many layers at the beginning of a chain can be one step, and their kernels."""
    match [layer for _, layer in layers[:4]]:
        case [Conv(stride=1), Norm(kind="instance"), Relu(), AvgPool(size=2)]:
            return 4, _instance_block(layers[:4], _is_flattened(layers[4:]))
        case [Norm(kind="instance"), Relu(), AvgPool(size=2), *_]:
            return 3, _instance_block(layers[:3], _is_flattened(layers[3:]))
        case [Conv(stride=1, bias=True) as conv, Norm(kind="batch"), Relu(), MaxPool(size=2)] if frozen_conv.takes(
            conv
        ):
            return 4, _frozen_block(layers[:4])
        case [Norm(kind="batch"), Relu(), MaxPool(size=2), *_]:
            return 3, _frozen_norm_block(layers[:3])
        case [Norm(kind="batch"), Relu(), *_]:
            return 2, _frozen_norm_block(layers[:2])
        case [Norm(kind="batch"), *_]:
            return 1, _frozen_norm_block(layers[:1])
    return 1, None


def _is_flattened(behind: Layers) -> bool:
    return len(behind) > 0 and isinstance(behind[0][1], Flatten)


def _in_one(layers: Layers, by_kernels: Step, served: Served) -> Step:
    """A block: its kernels where they serve, its layers one after the other elsewhere."""
    parts = bind_all(layers)

    def step(w: Weights, x: Tensor, buffers: Weights | None, tap: Tap | None) -> Tensor:
        if served(w, x, buffers):
            return by_kernels(w, x, buffers, tap)
        for part in parts:
            x = part(w, x, buffers, tap)
        return x

    return step


def _instance_block(layers: Layers, flat: bool) -> Kernels:
    """Instance norm, ReLU and average pooling, perhaps behind a convolution; `flat`: flattened afterwards."""
    (name, first), norm = layers[0], layers[-3][0]
    if isinstance(first, Conv):
        by_kernels, grows = _conv_block(name, first, norm, flat), 2 * first.padding - first.kernel + 1
    else:
        by_kernels, grows = _norm_block(norm, flat), 0
    return by_kernels, lambda w, x, buffers: serves(x, grows)


def _frozen_block(layers: Layers) -> Kernels:
    """Convolution, BatchNorm, ReLU and max pooling in evaluation mode; where weights learn, the layers are better."""
    (name, conv), (norm, _) = layers[:2]
    assert isinstance(conv, Conv)
    padding, grows = conv.padding, 2 * conv.padding - conv.kernel + 1
    running = f"{norm}.running_mean", f"{norm}.running_var"
    names = f"{name}.weight", f"{name}.bias", f"{norm}.weight", f"{norm}.bias", *running

    def step(w: Weights, x: Tensor, buffers: Weights | None, tap: Tap | None) -> Tensor:
        pooled, mean, variance = frozen_conv.block(x[None], *(w[key][None] for key in names), padding, EPSILON)
        if tap is not None:
            tap.append(NormStatistics(mean.squeeze(0), variance.squeeze(0), w[running[0]], w[running[1]]))
        return pooled.squeeze(0)

    def served(w: Weights, x: Tensor, buffers: Weights | None) -> bool:
        return buffers is None and serves_frozen(x, grows) and not any(w[key].requires_grad for key in names)

    return step, served


def _frozen_norm_block(layers: Layers) -> Kernels:
    """BatchNorm in evaluation mode, perhaps with ReLU, perhaps with max pooling behind it."""
    norm, count = layers[0][0], len(layers)
    running = f"{norm}.running_mean", f"{norm}.running_var"
    names = f"{norm}.weight", f"{norm}.bias", *running

    def step(w: Weights, x: Tensor, buffers: Weights | None, tap: Tap | None) -> Tensor:
        out, mean, variance = frozen_norm.block(x, *(w[key] for key in names), count, EPSILON)
        if tap is not None:
            tap.append(NormStatistics(mean, variance, w[running[0]], w[running[1]]))
        return out

    def served(w: Weights, x: Tensor, buffers: Weights | None) -> bool:
        return buffers is None and serves_frozen_norm(x, count) and not any(w[key].requires_grad for key in names)

    return step, served


def _norm_block(norm: str, flat: bool) -> Step:
    """Norm, ReLU and pooling by a kernel."""
    weight, bias = f"{norm}.weight", f"{norm}.bias"
    pool = instance_norm.norm_relu_pool
    return lambda w, x, buffers, tap: pool(x[None], w[weight][None], w[bias][None], EPSILON, flat).squeeze(0)


def _conv_block(name: str, conv: Conv, norm: str, flat: bool) -> Step:
    """The same behind a convolution, whose bias is left out."""
    conv_weight, conv_bias, weight, bias = f"{name}.weight", f"{name}.bias", f"{norm}.weight", f"{norm}.bias"
    convolve = replace(conv, bias=False).bind(name)
    joins = conv.inputs * conv.kernel**2 <= LARGEST_PATCH

    def step(w: Weights, x: Tensor, buffers: Weights | None, tap: Tap | None) -> Tensor:
        gamma, beta = w[weight][None], w[bias][None]
        if joins and not torch.is_grad_enabled():
            kernel = w[conv_weight][None]
            return instance_norm.conv_norm_relu_pool(x[None], kernel, gamma, beta, conv.padding, EPSILON, flat)[0]
        if conv.bias and w[conv_bias].requires_grad:
            beta = beta + 0 * w[conv_bias]  # whoever asks for its gradient gets one: zeros
        y = convolve(w, x, buffers, tap)
        # not [0], whose gradient is copied into zeros
        return instance_norm.norm_relu_pool(y[None], gamma, beta, EPSILON, flat).squeeze(0)

    return step


def serves(x: Tensor, grows: int = 0) -> bool:
    """Whether a kernel can take `x`, whose height and width a convolution lets grow by so much before the norm."""
    height, width = x.shape[-2] + grows, x.shape[-1] + grows
    return (
        x.is_cuda
        and not (torch.is_grad_enabled() and torch._C._are_functorch_transforms_active())
        and x.dtype in (torch.float32, torch.float16, torch.bfloat16)
        and height % 2 == 0
        and width % 2 == 0
        and 0 < height * width <= LARGEST_IMAGE
        and triton_is_there()
    )


def serves_frozen(x: Tensor, grows: int) -> bool:
    """The same for the kernels of `frozen_conv`, which know images of all sizes and one dtype."""
    height, width = x.shape[-2] + grows, x.shape[-1] + grows
    return (
        x.is_cuda
        and x.dtype == torch.float32
        and height % 2 == 0
        and width % 2 == 0
        and min(len(x), height, width) > 0
        and triton_is_there()
    )


def serves_frozen_norm(x: Tensor, count: int) -> bool:
    """The same for the kernels of `frozen_norm`, which clients take one by one, and for gradients only.

    Under vmap, or where nothing is differentiated, convolutions do not hand on what lies channels last.
    """
    return (
        x.is_cuda
        and torch.is_grad_enabled()
        and not torch._C._are_functorch_transforms_active()
        and x.dtype == torch.float32
        and x.dim() == 4
        and min(x.shape) > 0
        and (count < 3 or x.shape[2] % 2 == x.shape[3] % 2 == 0)
        and triton_is_there()
    )
