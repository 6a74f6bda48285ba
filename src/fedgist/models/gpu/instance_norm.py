"""Instance norm, ReLU and average pooling as one pass over the activations: on a GPU, with Triton.

One after the other they read and write the largest tensors of a ConvNet half a dozen times and take longer than its
convolutions; as one kernel they read them once and write a quarter, and another does the same for the gradient. With a
convolution before them, of few channels and where no gradient is asked for, what it makes is never written at all.
"""

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

from fedgist.models.gpu.convolution import growth_of, uses_tf32
from fedgist.models.gpu.stacking import run_stacked

TILE, BACKWARD_TILE = 8192, 4096
"""Pooled values of a program, over pixels and channels."""


@torch.library.custom_op("fedgist::norm_relu_pool", mutates_args=(), device_types="cuda")
def norm_relu_pool(x: Tensor, weight: Tensor, bias: Tensor, epsilon: float, flat: bool = False) -> Tensor:
    """avg_pool2d(relu(instance_norm(x)), 2) of [clients, images, channels, height, width]."""
    from fedgist.models.gpu import instance_norm_kernels

    out = _pooled(x, x.shape[2], x.shape[3], x.shape[4], flat)
    launch = _launch(out, TILE)
    instance_norm_kernels.norm_relu_pool[launch.pop("grid")](
        x, weight.contiguous(), bias.contiguous(), out, *out.shape[1:], *x.stride(), *out.stride(), epsilon, **launch
    )
    return out


@torch.library.custom_op("fedgist::norm_relu_pool_backward", mutates_args=(), device_types="cuda")
def norm_relu_pool_backward(
    x: Tensor, weight: Tensor, bias: Tensor, grad: Tensor, epsilon: float
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of x, weight and bias, where `grad` is that of the result."""
    from fedgist.models.gpu import instance_norm_kernels

    clients, images, channels = x.shape[:3]
    to_x = torch.empty_like(x)
    to_weight, to_bias = (weight.new_empty(clients, images, channels) for _ in range(2))
    launch = _launch(grad, BACKWARD_TILE)
    instance_norm_kernels.norm_relu_pool_backward[launch.pop("grid")](
        x, weight.contiguous(), bias.contiguous(), grad, to_x, to_weight, to_bias, *grad.shape[1:],
        *x.stride(), *grad.stride(), *to_x.stride(), epsilon, **launch,
    )  # fmt: skip
    return to_x, to_weight.sum(1), to_bias.sum(1)


@torch.library.custom_op("fedgist::conv_norm_relu_pool", mutates_args=(), device_types="cuda")
def conv_norm_relu_pool(
    x: Tensor, conv: Tensor, weight: Tensor, bias: Tensor, padding: int, epsilon: float, flat: bool = False
) -> Tensor:
    """The same of a convolution of stride 1 with weights [clients, channels, inputs, side, side]."""
    from fedgist.models.gpu import instance_norm_kernels

    _, images, inputs, height, width = x.shape
    side = conv.shape[-1]
    growth = growth_of(side, padding)
    out = _pooled(x, conv.shape[1], height + growth, width + growth, flat)
    patch = max(16, 1 << (inputs * side * side - 1).bit_length())
    launch = _with_all_channels(_launch(out, TILE), x, patch)
    instance_norm_kernels.conv_norm_relu_pool[launch.pop("grid")](
        x, conv.contiguous(), weight.contiguous(), bias.contiguous(), out, images, inputs, height, width,
        *out.shape[2:], *x.stride(), *out.stride(), epsilon, side, padding, patch, _precision(), **launch,
    )  # fmt: skip
    return out


def _precision() -> str:
    """What torch computes convolutions in at the moment, as Triton calls it."""
    return "tf32" if uses_tf32() else "ieee"


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
    growth = growth_of(conv.shape[-1], padding)
    return _pooled(x, conv.shape[1], x.shape[-2] + growth, x.shape[-1] + growth, flat)


@norm_relu_pool_backward.register_fake
def _(x: Tensor, weight: Tensor, bias: Tensor, grad: Tensor, epsilon: float) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(x), torch.empty_like(weight), torch.empty_like(bias)


class Block(Function):
    """`norm_relu_pool`, as often differentiable as the layers are, by torch.func too; its gradient is a kernel."""

    @staticmethod
    def forward(x: Tensor, weight: Tensor, bias: Tensor, epsilon: float, flat: bool) -> Tensor:
        return norm_relu_pool(x, weight, bias, epsilon, flat)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        *tensors, ctx.epsilon, _ = inputs
        ctx.save_for_backward(*tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return *BlockGradient.apply(*ctx.saved_tensors, *grads, ctx.epsilon), None, None

    @staticmethod
    def vmap(info: Any, dims: tuple[int | None, ...], *inputs: Any) -> Any:
        return run_stacked(Block.apply, info, dims, *inputs)


class BlockGradient(Function):
    """`norm_relu_pool_backward`; its own gradients by the layers, which torch knows how to differentiate twice."""

    @staticmethod
    def forward(x: Tensor, weight: Tensor, bias: Tensor, grad: Tensor, epsilon: float) -> tuple[Tensor, Tensor, Tensor]:
        return norm_relu_pool_backward(x, weight, bias, grad, epsilon)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        *tensors, ctx.epsilon = inputs
        ctx.save_for_backward(*tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        def by_layers(x: Tensor, weight: Tensor, bias: Tensor, grad: Tensor) -> Any:
            layers = partial(layer_by_layer, epsilon=ctx.epsilon)
            return torch.func.vjp(layers, x, weight, bias)[1](grad)

        pull_back: Any = torch.func.vjp(by_layers, *ctx.saved_tensors)[1]
        return *pull_back(grads), None

    @staticmethod
    def vmap(info: Any, dims: tuple[int | None, ...], *inputs: Any) -> Any:
        return run_stacked(BlockGradient.apply, info, dims, *inputs)


def block(x: Tensor, weight: Tensor, bias: Tensor, epsilon: float, flat: bool = False) -> Tensor:
    """`norm_relu_pool` with gradients."""
    out: Tensor = Block.apply(x, weight, bias, epsilon, flat)
    return out


def layer_by_layer(x: Tensor, weight: Tensor, bias: Tensor, epsilon: float) -> Tensor:
    """What `norm_relu_pool` computes, by torch's own layers."""
    clients = zip(x, weight, bias, strict=True)
    return torch.stack([F.avg_pool2d(F.group_norm(x, len(w), w, b, epsilon).relu(), 2) for x, w, b in clients])


conv_norm_relu_pool.register_vmap(partial(run_stacked, conv_norm_relu_pool))
