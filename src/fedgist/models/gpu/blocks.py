"""The blocks of a net as one step each: by kernels on a GPU with Triton, elsewhere by their layers one after the other.

A ConvNet's blocks, with instance norm and average pooling, are `instance_norm`'s. Where no gradient is needed, as for
FedDM's real images and in every evaluation, a convolution of few channels before them is part of the kernel. Any other
runs without its bias, another pass over what it makes, which the norm would subtract again.

A LeNet's blocks, with BatchNorm and max pooling, are `frozen_conv`'s, and BatchNorm behind larger convolutions is
`frozen_norm`'s: both at frozen weights, in evaluation mode.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fedgist.core.message import Params
from fedgist.core.task import NormStatistics, Tap
from fedgist.core.work import triton_is_there
from fedgist.models.gpu import frozen_conv, frozen_norm, instance_norm
from fedgist.models.gpu.convolution import growth_of
from fedgist.models.layers import (
    EPSILON,
    AvgPool,
    Conv,
    Flatten,
    Layer,
    Layers,
    MaxPool,
    Norm,
    Relu,
    Residual,
    Step,
    bind_all,
)

LARGEST_FUSED_PATCH = 64
"""Numbers in a patch up to which a convolution is part of `instance_norm`'s kernel."""


@dataclass(frozen=True)
class Limits:
    """Which activations the kernels of a block can take."""

    dtypes: tuple[torch.dtype, ...] = (torch.float32,)
    pixels: float = math.inf
    """Of an activation that the norm works on, at most."""
    torch_func: bool = False
    """Whether torch.func may differentiate them."""
    only_gradients: bool = False
    """Whether they are worth it only where gradients are needed."""

    def admit(self, x: Tensor, growth: int = 0, pooled: bool = True) -> bool:
        """Whether they can take `x`; a convolution adds `growth` to its sides; `pooled`: then they are halved."""
        if not (x.is_cuda and x.dim() == 4 and x.dtype in self.dtypes and triton_is_there()):
            return False
        height, width = x.shape[2] + growth, x.shape[3] + growth
        gradients, functional = torch.is_grad_enabled(), torch._C._are_functorch_transforms_active()
        return (
            min(len(x), height, width) > 0
            and height * width <= self.pixels
            and not (pooled and (height % 2 or width % 2))
            and (self.torch_func or not (gradients and functional))
            and (gradients or not self.only_gradients)
        )


INSTANCE_NORM = Limits((torch.float32, torch.float16, torch.bfloat16), pixels=4096, torch_func=True)
"""A program holds all pixels of an image at once."""
FROZEN_CONV = Limits(torch_func=True)
FROZEN_NORM = Limits(only_gradients=True)
"""Under vmap, or where nothing is differentiated, convolutions do not hand on what lies channels last."""


@dataclass(frozen=True)
class Kernels:
    """A block as one step by kernels, and what they can take."""

    step: Step
    admit: Callable[[Tensor], bool]
    frozen: tuple[str, ...] = ()
    """Params that these kernels know in evaluation mode only; where one of them learns, the layers are better."""

    def take(self, w: Params, x: Tensor, buffers: Params | None) -> bool:
        if self.frozen and buffers is not None:
            return False
        return self.admit(x) and not any(w[name].requires_grad for name in self.frozen)


def bind_blocks(layers: Layers, prefix: str = "") -> tuple[Step, ...]:
    """The functions of a chain of layers, those of a block being one."""
    layers = tuple((prefix + name, layer) for name, layer in layers)
    steps: list[Step] = []
    while layers:
        count, kernels = _find_block(layers)
        steps.append(_bind(*layers[0]) if kernels is None else _bind_block(layers[:count], kernels))
        layers = layers[count:]
    return tuple(steps)


def _bind(name: str, layer: Layer) -> Step:
    return layer.bind(name, bind_blocks) if isinstance(layer, Residual) else layer.bind(name)


def _find_block(layers: Layers) -> tuple[int, Kernels | None]:
    """How many layers at the beginning of a chain can be one step, and their kernels."""
    match [layer for _, layer in layers[:4]]:
        case [Conv(stride=1), Norm(kind="instance"), Relu(), AvgPool(size=2)]:
            return 4, _instance_block(layers[:4], _is_flattened(layers[4:]))
        case [Norm(kind="instance"), Relu(), AvgPool(size=2), *_]:
            return 3, _instance_block(layers[:3], _is_flattened(layers[3:]))
        case [Conv() as conv, Norm(kind="batch"), Relu(), MaxPool(size=2)] if _fits_frozen_conv(conv):
            return 4, _frozen_conv_block(layers[:4])
        case [Norm(kind="batch"), Relu(), MaxPool(size=2), *_]:
            return 3, _frozen_norm_block(layers[:3])
        case [Norm(kind="batch"), Relu(), *_]:
            return 2, _frozen_norm_block(layers[:2])
        case [Norm(kind="batch"), *_]:
            return 1, _frozen_norm_block(layers[:1])
    return 1, None


def _is_flattened(rest: Layers) -> bool:
    return len(rest) > 0 and isinstance(rest[0][1], Flatten)


def _fits_frozen_conv(conv: Conv) -> bool:
    """Whether a block that begins so is small enough; larger convolutions are better off with cuDNN."""
    small = conv.kernel <= frozen_conv.LARGEST_KERNEL and max(conv.inputs, conv.outputs) <= frozen_conv.MOST_CHANNELS
    return small and conv.stride == 1 and conv.bias


def _bind_block(layers: Layers, kernels: Kernels) -> Step:
    """A block: its kernels where they can, its layers one after the other elsewhere."""
    parts = bind_all(layers)

    def step(w: Params, x: Tensor, buffers: Params | None, tap: Tap | None) -> Tensor:
        if kernels.take(w, x, buffers):
            return kernels.step(w, x, buffers, tap)
        for part in parts:
            x = part(w, x, buffers, tap)
        return x

    return step


def _instance_block(layers: Layers, flat: bool) -> Kernels:
    """Instance norm, ReLU and average pooling, perhaps behind a convolution; `flat`: flattened afterwards."""
    (name, first), norm = layers[0], layers[-3][0]
    if isinstance(first, Conv):
        growth = growth_of(first.kernel, first.padding)
        return Kernels(_conv_step(name, first, norm, flat), lambda x: INSTANCE_NORM.admit(x, growth))
    return Kernels(_norm_step(norm, flat), lambda x: INSTANCE_NORM.admit(x))


def _norm_step(norm: str, flat: bool) -> Step:
    """Norm, ReLU and pooling by a kernel."""
    weight, bias = f"{norm}.weight", f"{norm}.bias"
    pool = instance_norm.block
    return lambda w, x, buffers, tap: pool(x[None], w[weight][None], w[bias][None], EPSILON, flat).squeeze(0)


def _conv_step(name: str, conv: Conv, norm: str, flat: bool) -> Step:
    """The same behind a convolution, whose bias is left out."""
    conv_weight, conv_bias, weight, bias = f"{name}.weight", f"{name}.bias", f"{norm}.weight", f"{norm}.bias"
    convolve = replace(conv, bias=False).bind(name)
    is_small = conv.inputs * conv.kernel**2 <= LARGEST_FUSED_PATCH

    def step(w: Params, x: Tensor, buffers: Params | None, tap: Tap | None) -> Tensor:
        gamma, beta = w[weight][None], w[bias][None]
        if is_small and not torch.is_grad_enabled():
            kernel = w[conv_weight][None]
            return instance_norm.conv_norm_relu_pool(x[None], kernel, gamma, beta, conv.padding, EPSILON, flat)[0]
        if conv.bias and w[conv_bias].requires_grad:
            beta = beta + 0 * w[conv_bias]  # whoever asks for its gradient gets one: zeros
        y = convolve(w, x, buffers, tap)
        # not [0], whose gradient is copied into zeros
        return instance_norm.block(y[None], gamma, beta, EPSILON, flat).squeeze(0)

    return step


def _frozen_conv_block(layers: Layers) -> Kernels:
    """Convolution, BatchNorm, ReLU and max pooling in evaluation mode."""
    (name, conv), (norm, _) = layers[:2]
    assert isinstance(conv, Conv)
    padding, growth = conv.padding, growth_of(conv.kernel, conv.padding)
    running = f"{norm}.running_mean", f"{norm}.running_var"
    names = f"{name}.weight", f"{name}.bias", f"{norm}.weight", f"{norm}.bias", *running

    def step(w: Params, x: Tensor, buffers: Params | None, tap: Tap | None) -> Tensor:
        pooled, mean, variance = frozen_conv.block(x[None], *(w[key][None] for key in names), padding, EPSILON)
        if tap is not None:
            tap.append(NormStatistics(mean.squeeze(0), variance.squeeze(0), w[running[0]], w[running[1]]))
        return pooled.squeeze(0)

    return Kernels(step, lambda x: FROZEN_CONV.admit(x, growth), names)


def _frozen_norm_block(layers: Layers) -> Kernels:
    """BatchNorm in evaluation mode, perhaps with ReLU, perhaps with max pooling behind it."""
    norm, count = layers[0][0], len(layers)
    running = f"{norm}.running_mean", f"{norm}.running_var"
    names = f"{norm}.weight", f"{norm}.bias", *running

    def step(w: Params, x: Tensor, buffers: Params | None, tap: Tap | None) -> Tensor:
        out, mean, variance = frozen_norm.block(x, *(w[key] for key in names), count, EPSILON)
        if tap is not None:
            tap.append(NormStatistics(mean, variance, w[running[0]], w[running[1]]))
        return out

    return Kernels(step, lambda x: FROZEN_NORM.admit(x, pooled=count == 3), names)
