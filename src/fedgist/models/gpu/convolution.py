"""Convolutions on a GPU: of many clients as one product, or with second derivatives that are convolutions too.

vmap turns the convolutions of many clients into a grouped one, and cuDNN starts a kernel for each group when a group
has few channels; a matrix product of all patches with all weights starts one for all clients.

torch differentiates a convolution's gradient with kernels as large as the images, and by the weights although nobody
asks. Encoding an update as the gradient of images (TOFU) does little else than take that derivative.
"""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

from fedgist.core.work import stacked
from fedgist.models.gpu.stacking import run_stacked

Pair = tuple[int, int]

LARGEST_COPIED_PATCH = {True: 256, False: 2048}
"""Numbers in a patch up to which copying the patches out costs less than a grouped convolution, with TF32 and without:
then cuDNN starts kernels for every single client."""


def convolve(x: Tensor, weight: Tensor, bias: Tensor | None, stride: Pair, padding: Pair) -> Tensor:
    """torch.conv2d."""
    if stacked() and x.is_cuda and weight[0].numel() <= LARGEST_COPIED_PATCH[uses_tf32()]:
        return by_patches(x, weight, bias, stride, padding)
    if x.is_cuda and torch.is_grad_enabled() and not torch._C._are_functorch_transforms_active():
        return by_channels_last(x, weight, bias, stride, padding)
    return torch.conv2d(x, weight, bias, stride, padding)


def uses_tf32() -> bool:
    """Whether torch may round the inputs of convolutions at the moment."""
    conv: Any = getattr(torch.backends.cudnn, "conv", None)  # torch 2.9 and later
    return torch.backends.cudnn.allow_tf32 if conv is None else bool(conv.fp32_precision == "tf32")


def growth_of(side: int, padding: int) -> int:
    """By how many pixels a convolution of stride 1 makes images higher and wider, or if negative smaller."""
    return 2 * padding - side + 1


def by_patches(x: Tensor, weight: Tensor, bias: Tensor | None, stride: Pair, padding: Pair) -> Tensor:
    """The convolution as a product of weights [outputs, patch] and patches [patch, batch · positions]."""
    height, width = weight.shape[2:]
    if any(padding):
        x = F.pad(x, (padding[1], padding[1], padding[0], padding[0]))
    rows, columns = (x.shape[2] - height) // stride[0] + 1, (x.shape[3] - width) // stride[1] + 1
    patches = Patches.apply(x[None], (height, width), stride).squeeze(0)
    out = (weight.flatten(1) @ patches).unflatten(1, (-1, rows, columns)).transpose(0, 1)
    return out if bias is None else out + bias[:, None, None]


class Patches(Function):
    """The patches of images [clients, images, channels, height, width] as the columns of a matrix for each client."""

    @staticmethod
    def forward(x: Tensor, kernel: Pair, stride: Pair) -> Tensor:
        windows = x.unfold(3, kernel[0], stride[0]).unfold(4, kernel[1], stride[1])
        return windows.permute(0, 2, 5, 6, 1, 3, 4).reshape(len(x), x.shape[2] * math.prod(kernel), -1)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        x, *ctx.form = inputs
        ctx.shape = tuple(x.shape[1:])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return Folded.apply(*grads, ctx.shape, *ctx.form), None, None

    @staticmethod
    def vmap(info: Any, dims: tuple[int | None, ...], *inputs: Any) -> Any:
        return run_stacked(Patches.apply, info, dims, *inputs)


class Folded(Function):
    """The adjoint of `Patches`: every pixel gets what came to it in all patches; `shape` is that of a client's x."""

    @staticmethod
    def forward(patches: Tensor, shape: tuple[int, ...], kernel: Pair, stride: Pair) -> Tensor:
        images, channels, height, width = shape
        rows = (height - kernel[0]) // stride[0] + 1
        windows = patches.view(len(patches), channels, *kernel, images, rows, -1).permute(0, 4, 1, 5, 6, 2, 3)
        undo = torch.ops.aten.unfold_backward
        lines = undo(windows, [*windows.shape[:4], width, kernel[0]], 4, kernel[1], stride[1])
        return undo(lines, [len(patches), *shape], 3, kernel[0], stride[0])

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.form = inputs[2:]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return Patches.apply(*grads, *ctx.form), None, None, None

    @staticmethod
    def vmap(info: Any, dims: tuple[int | None, ...], *inputs: Any) -> Any:
        return run_stacked(Folded.apply, info, dims, *inputs)


def by_channels_last(x: Tensor, weight: Tensor, bias: Tensor | None, stride: Pair, padding: Pair) -> Tensor:
    """The convolution as cuDNN computes it, channels last, or it would turn every tensor round before and after."""
    out: Tensor = Convolution.apply(x, ChannelsLast.apply(weight), stride, padding)
    return out if bias is None else out + bias[:, None, None]


class ChannelsLast(Function):
    """The same weights as cuDNN wants them; their gradient lies as they do, so that optimisers take all at once."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor) -> Tensor:
        return weight.contiguous(memory_format=torch.channels_last)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0].contiguous()


class Convolution(Function):
    """y = x ∗ W, without a bias."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, stride: Pair, padding: Pair) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.form = stride, padding
        return torch.conv2d(x, weight, None, stride, padding)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        needed = tuple(ctx.needs_input_grad[:2])
        return (*Gradients.apply(*grads, *ctx.saved_tensors, ctx.form, needed), None, None)


class Gradients(Function):
    """x̄ and W̄, the gradients of x and W where ȳ is that of y; None for what is not `needed`."""

    @staticmethod
    def forward(
        ctx: Any, grad: Tensor, x: Tensor, weight: Tensor, form: tuple[Pair, Pair], needed: tuple[bool, bool]
    ) -> tuple[Tensor | None, Tensor | None]:
        ctx.save_for_backward(grad, x, weight)
        ctx.form = form
        ctx.set_materialize_grads(False)
        return _gradients(grad, x, weight, form, needed)

    @staticmethod
    def backward(ctx: Any, *seconds: Tensor | None) -> Any:
        """x̄ = x̄(ȳ, W) and W̄ = W̄(ȳ, x) are linear in each argument, so their derivatives are maps of the same kind."""
        (to_x, to_weight), (grad, x, weight), form = seconds, ctx.saved_tensors, ctx.form
        for_grad, for_x, for_weight = ctx.needs_input_grad[:3]
        results: list[Tensor | None] = [None, None, None]
        if for_grad and to_x is not None:
            results[0] = torch.conv2d(to_x, weight, None, *form)
        if for_grad and to_weight is not None:
            term = torch.conv2d(x, to_weight, None, *form)
            results[0] = term if results[0] is None else results[0] + term
        if for_x and to_weight is not None:
            results[1], _ = _gradients(grad, x, to_weight, form, (True, False))
        if for_weight and to_x is not None:
            _, results[2] = _gradients(grad, to_x, weight, form, (False, True))
        return (*results, None, None)


def _gradients(
    grad: Tensor, x: Tensor, weight: Tensor, form: tuple[Pair, Pair], needed: tuple[bool, bool]
) -> tuple[Tensor | None, Tensor | None]:
    fixed = (1, 1), False, (0, 0), 1  # dilation, transposed, output padding, groups
    results = torch.ops.aten.convolution_backward(grad, x, weight, None, *form, *fixed, (*needed, False))
    return results[0], results[1]
