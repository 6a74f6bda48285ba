"""The blocks of a ConvNet as few passes over the activations: on a GPU, with Triton.

Instance norm, ReLU and average pooling, one after the other, read and write the largest tensors of the net half a dozen
times and take longer than its convolutions; as one kernel they read them once and write a quarter, and another does
the same for the gradient. Where none is asked for, as for FedDM's real images and in every evaluation, a convolution of
few channels before them joins in, and what it makes is never written at all. Any other before them runs without its
bias, another pass over what it makes, which the norm would subtract again.

A LeNet's blocks, with BatchNorm and max pooling, are `frozen`'s, and BatchNorm behind larger convolutions is
`frozen_norm`'s.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fedgist.core.work import triton_is_there
from fedgist.models import frozen, frozen_norm
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
from fedgist.models.stacking import longer

LARGEST_IMAGE = 4096
"""Pixels of an activation that a program holds at once, at most."""
LARGEST_PATCH = 64
"""Numbers in a patch up to which a convolution joins in."""
TILE, BACKWARD_TILE = 8192, 4096
"""Pooled values of a program, over pixels and channels."""

Served = Callable[[Weights, Tensor, Weights | None], bool]
"""Whether a block's kernels can take these weights, activations and buffers."""
Kernels = tuple[Step, Served]
"""A block as a step by kernels, and where they serve."""


def bind_fused(layers: Layers, prefix: str = "") -> tuple[Step, ...]:
    """The functions of a chain of layers, those of a block being one."""
    layers = tuple((prefix + name, layer) for name, layer in layers)
    steps: list[Step] = []
    while layers:
        count, kernels = _block(layers)
        steps.append(_bind(*layers[0]) if kernels is None else _in_one(layers[:count], *kernels))
        layers = layers[count:]
    return tuple(steps)


def _bind(name: str, layer: Layer) -> Step:
    return layer.bind(name, bind_fused) if isinstance(layer, Residual) else layer.bind(name)


def _block(layers: Layers) -> tuple[int, Kernels | None]:
    """How many layers at the beginning of a chain can be one step, and their kernels."""
    match [layer for _, layer in layers[:4]]:
        case [Conv(stride=1), Norm(kind="instance"), Relu(), AvgPool(size=2)]:
            return 4, _instance_block(layers[:4], _is_flattened(layers[4:]))
        case [Norm(kind="instance"), Relu(), AvgPool(size=2), *_]:
            return 3, _instance_block(layers[:3], _is_flattened(layers[3:]))
        case [Conv(stride=1, bias=True) as conv, Norm(kind="batch"), Relu(), MaxPool(size=2)] if frozen.takes(conv):
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
        pooled, mean, variance = frozen.block(x[None], *(w[key][None] for key in names), padding, EPSILON)
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
    return lambda w, x, buffers, tap: norm_relu_pool(x[None], w[weight][None], w[bias][None], EPSILON, flat).squeeze(0)


def _conv_block(name: str, conv: Conv, norm: str, flat: bool) -> Step:
    """The same behind a convolution, whose bias is left out."""
    conv_weight, conv_bias, weight, bias = f"{name}.weight", f"{name}.bias", f"{norm}.weight", f"{norm}.bias"
    convolve = replace(conv, bias=False).bind(name)
    joins = conv.inputs * conv.kernel**2 <= LARGEST_PATCH

    def step(w: Weights, x: Tensor, buffers: Weights | None, tap: Tap | None) -> Tensor:
        gamma, beta = w[weight][None], w[bias][None]
        if joins and not torch.is_grad_enabled():
            return conv_norm_relu_pool(x[None], w[conv_weight][None], gamma, beta, conv.padding, EPSILON, flat)[0]
        if conv.bias and w[conv_bias].requires_grad:
            beta = beta + 0 * w[conv_bias]  # whoever asks for its gradient gets one: zeros
        # not [0], whose gradient is copied into zeros
        return norm_relu_pool(convolve(w, x, buffers, tap)[None], gamma, beta, EPSILON, flat).squeeze(0)

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
    """The same for the kernels of `frozen`, which know images of all sizes and one dtype."""
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


@torch.library.custom_op("fedgist::norm_relu_pool", mutates_args=(), device_types="cuda")
def norm_relu_pool(x: Tensor, weight: Tensor, bias: Tensor, epsilon: float, flat: bool = False) -> Tensor:
    """avg_pool2d(relu(instance_norm(x)), 2) of [clients, images, channels, height, width]."""
    from fedgist.models import kernels

    out = _pooled(x, x.shape[2], x.shape[3], x.shape[4], flat)
    launch = _launch(out, TILE)
    kernels.norm_relu_pool[launch.pop("grid")](
        x, weight.contiguous(), bias.contiguous(), out, *out.shape[1:], *x.stride(), *out.stride(), epsilon, **launch
    )
    return out


@torch.library.custom_op("fedgist::norm_relu_pool_backward", mutates_args=(), device_types="cuda")
def norm_relu_pool_backward(
    x: Tensor, weight: Tensor, bias: Tensor, grad: Tensor, epsilon: float
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of x, weight and bias, where `grad` is that of the result."""
    from fedgist.models import kernels

    clients, images, channels = x.shape[:3]
    to_x = torch.empty_like(x)
    to_weight, to_bias = (weight.new_empty(clients, images, channels) for _ in range(2))
    launch = _launch(grad, BACKWARD_TILE)
    kernels.norm_relu_pool_backward[launch.pop("grid")](
        x, weight.contiguous(), bias.contiguous(), grad, to_x, to_weight, to_bias, *grad.shape[1:],
        *x.stride(), *grad.stride(), *to_x.stride(), epsilon, **launch,
    )  # fmt: skip
    return to_x, to_weight.sum(1), to_bias.sum(1)


@torch.library.custom_op("fedgist::conv_norm_relu_pool", mutates_args=(), device_types="cuda")
def conv_norm_relu_pool(
    x: Tensor, conv: Tensor, weight: Tensor, bias: Tensor, padding: int, epsilon: float, flat: bool = False
) -> Tensor:
    """The same of a convolution of stride 1 with weights [clients, channels, inputs, side, side]."""
    from fedgist.models import kernels

    _, images, inputs, height, width = x.shape
    side = conv.shape[-1]
    grows = 2 * padding - side + 1
    out = _pooled(x, conv.shape[1], height + grows, width + grows, flat)
    patch = max(16, 1 << (inputs * side * side - 1).bit_length())
    launch = _with_all_channels(_launch(out, TILE), x, patch)
    kernels.conv_norm_relu_pool[launch.pop("grid")](
        x, conv.contiguous(), weight.contiguous(), bias.contiguous(), out, images, inputs, height, width,
        *out.shape[2:], *x.stride(), *out.stride(), epsilon, side, padding, patch, _precision(), **launch,
    )  # fmt: skip
    return out


def _precision() -> str:
    """What torch computes convolutions in at the moment, as Triton calls it."""
    conv: Any = getattr(torch.backends.cudnn, "conv", None)  # torch 2.9 and later
    tf32 = torch.backends.cudnn.allow_tf32 if conv is None else conv.fp32_precision == "tf32"
    return "tf32" if tf32 else "ieee"


def _pooled(x: Tensor, channels: int, height: int, width: int, flat: bool) -> Tensor:
    """Channels last, those of all clients side by side: what a grouped convolution likes best.

    Where flattening follows, which goes by channels first, they lie so at once.
    """
    if flat:
        return x.new_empty(*x.shape[:2], channels, height // 2, width // 2)
    return x.new_empty(x.shape[1], height // 2, width // 2, x.shape[0], channels).permute(3, 0, 4, 1, 2)


def _launch(out: Tensor, tile: int) -> dict[str, Any]:
    """How a kernel is started whose pooled side is `out`."""
    clients, images, channels, height, width = out.shape
    positions = max(16, 1 << (height * width - 1).bit_length())
    block = min(128, max(16, tile // positions), max(16, 1 << (channels - 1).bit_length()))
    return {"grid": (clients * images, -(-channels // block)), "POSITIONS": positions, "BLOCK": block, "num_warps": 8}


def _with_all_channels(launch: dict[str, Any], x: Tensor, patch: int) -> dict[str, Any]:
    """One program an image, which keeps its patches, where they fit and there are images enough to occupy the GPU."""
    gpu = torch.cuda.get_device_properties(x.device)
    programs, blocks = launch["grid"]
    # in shared memory: four tiles of patches, and room for what is computed of them
    needed = launch["POSITIONS"] * (4 * patch + 2 * launch["BLOCK"]) * x.element_size()
    if programs >= 2 * gpu.multi_processor_count and needed <= gpu.shared_memory_per_multiprocessor:
        return {**launch, "grid": (programs, 1), "BLOCKS": blocks}
    return {**launch, "BLOCKS": 1}


@norm_relu_pool.register_fake
def _(x: Tensor, weight: Tensor, bias: Tensor, epsilon: float, flat: bool = False) -> Tensor:
    return _pooled(x, x.shape[2], x.shape[3], x.shape[4], flat)


@conv_norm_relu_pool.register_fake
def _(
    x: Tensor, conv: Tensor, weight: Tensor, bias: Tensor, padding: int, epsilon: float, flat: bool = False
) -> Tensor:
    grows = 2 * padding - conv.shape[-1] + 1
    return _pooled(x, conv.shape[1], x.shape[-2] + grows, x.shape[-1] + grows, flat)


@norm_relu_pool_backward.register_fake
def _(x: Tensor, weight: Tensor, bias: Tensor, grad: Tensor, epsilon: float) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(x), torch.empty_like(weight), torch.empty_like(bias)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    *tensors, ctx.epsilon, _ = inputs
    ctx.save_for_backward(*tensors)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
    x, weight, bias = ctx.saved_tensors
    if not torch.is_grad_enabled():
        return *norm_relu_pool_backward(x, weight, bias, grad, ctx.epsilon), None, None
    # a gradient of this gradient is asked for: torch knows how to differentiate its own layers twice
    asked = [tensor if tensor.requires_grad else tensor.detach().requires_grad_() for tensor in (x, weight, bias)]
    made = layer_by_layer(asked[0], asked[1], asked[2], ctx.epsilon)
    to_x, to_weight, to_bias = torch.autograd.grad(made, asked, grad, create_graph=True)
    return to_x, to_weight, to_bias, None, None


norm_relu_pool.register_autograd(_backward, setup_context=_keep)


def layer_by_layer(x: Tensor, weight: Tensor, bias: Tensor, epsilon: float) -> Tensor:
    """What `norm_relu_pool` computes, by torch's own layers."""
    clients = zip(x, weight, bias, strict=True)
    return torch.stack([F.avg_pool2d(F.group_norm(x, len(w), w, b, epsilon).relu(), 2) for x, w, b in clients])


def _stacked(op: Any) -> Any:
    """Under vmap, clients are a longer first dimension."""

    def rule(info: Any, dims: Any, *given: Any) -> tuple[Tensor, int]:
        return op(*longer(info.batch_size, given, dims)).unflatten(0, (info.batch_size, -1)), 0

    return rule


norm_relu_pool.register_vmap(_stacked(norm_relu_pool))
conv_norm_relu_pool.register_vmap(_stacked(conv_norm_relu_pool))
