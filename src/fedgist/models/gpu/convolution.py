"""A convolution whose second derivatives are convolutions too.

torch differentiates a convolution's gradient with kernels as large as the images, and by the weights although nobody
asks. Encoding an update as the gradient of images (TOFU) does little else than take that derivative.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

Pair = tuple[int, int]


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
        asked = tuple(ctx.needs_input_grad[:2])
        return (*Gradients.apply(*grads, *ctx.saved_tensors, ctx.form, asked), None, None)


class Gradients(Function):
    """x̄ and W̄, the gradients of x and W where ȳ is that of y; None for what is not `asked`."""

    @staticmethod
    def forward(
        ctx: Any, grad: Tensor, x: Tensor, weight: Tensor, form: tuple[Pair, Pair], asked: tuple[bool, bool]
    ) -> tuple[Tensor | None, Tensor | None]:
        ctx.save_for_backward(grad, x, weight)
        ctx.form = form
        ctx.set_materialize_grads(False)
        return _gradients(grad, x, weight, form, asked)

    @staticmethod
    def backward(ctx: Any, *seconds: Tensor | None) -> Any:
        """x̄ = x̄(ȳ, W) and W̄ = W̄(ȳ, x) are linear in each argument, so their derivatives are maps of the same kind."""
        (to_x, to_weight), (grad, x, weight), form = seconds, ctx.saved_tensors, ctx.form
        for_grad, for_x, for_weight = ctx.needs_input_grad[:3]
        found: list[Tensor | None] = [None, None, None]
        if for_grad and to_x is not None:
            found[0] = torch.conv2d(to_x, weight, None, *form)
        if for_grad and to_weight is not None:
            more = torch.conv2d(x, to_weight, None, *form)
            found[0] = more if found[0] is None else found[0] + more
        if for_x and to_weight is not None:
            found[1], _ = _gradients(grad, x, to_weight, form, (True, False))
        if for_weight and to_x is not None:
            _, found[2] = _gradients(grad, to_x, weight, form, (False, True))
        return (*found, None, None)


def _gradients(
    grad: Tensor, x: Tensor, weight: Tensor, form: tuple[Pair, Pair], asked: tuple[bool, bool]
) -> tuple[Tensor | None, Tensor | None]:
    found = torch.ops.aten.convolution_backward(grad, x, weight, None, *form, (1, 1), False, (0, 0), 1, (*asked, False))
    return found[0], found[1]


def convolution(x: Tensor, weight: Tensor, bias: Tensor | None, stride: Pair, padding: Pair) -> Tensor:
    """torch.conv2d; channels last, as cuDNN computes, or it would turn every tensor round before and after."""
    out: Tensor = Convolution.apply(x, ChannelsLast.apply(weight), stride, padding)
    return out if bias is None else out + bias[:, None, None]
