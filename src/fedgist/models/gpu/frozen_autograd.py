"""How a block at fixed weights is differentiated: the gradient of its images by kernels, all other ones by its layers.

A block takes x and the weights of its layers, makes a result and the mean and variance that enter its BatchNorm, and
is as often differentiable as the layers are.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from fedgist.models.gpu.stacking import run_stacked

Outputs = tuple[Tensor, Tensor, Tensor]
"""Result, mean and variance."""


@dataclass(frozen=True)
class FrozenBlock:
    """The kernels of a block and the layers they stand for; all three take `settings` behind the tensors.

    `backward` takes the gradients of what `forward` makes, and the mean, before what `forward` takes.
    """

    forward: Callable[..., Outputs]
    backward: Callable[..., Tensor]
    layers: Callable[..., Outputs]
    settings: tuple[Any, ...]
    has_clients: bool
    """Whether all tensors begin with clients, so that the kernels know what to do under vmap."""

    def __call__(self, *tensors: Tensor) -> Outputs:
        outputs: Outputs = BlockFunction.apply(self, *tensors)
        return outputs

    def layer_by_layer(self, *tensors: Tensor) -> Outputs:
        return self.layers(*tensors, *self.settings)

    def gradient_by_layers(self, *tensors: Tensor) -> Any:
        """What `backward` computes; the given mean is not needed, because the layers compute it too."""
        return _gradients(self.layer_by_layer, tensors[4:], [True], tensors[:3])[0]


def _gradients(function: Callable[..., Any], at: Sequence[Tensor], needed: Sequence[bool], grads: Any) -> list[Any]:
    """Those of the tensors that are `needed`, None for the others, where `grads` are those of function(*at)."""
    places = [i for i, need in enumerate(needed) if need]

    def function_of_these(*tensors: Tensor) -> Any:
        inputs = dict(enumerate(at)) | dict(zip(places, tensors, strict=True))
        return function(*inputs.values())

    pull_back: Any = torch.func.vjp(function_of_these, *(at[i] for i in places))[1]
    results = dict(zip(places, pull_back(grads), strict=True))
    return [results.get(i) for i in range(len(at))]


class BlockFunction(Function):
    """`forward`; the gradient of x by kernels where it is the only one needed, else all by the layers."""

    @staticmethod
    def forward(block: FrozenBlock, *tensors: Tensor) -> Outputs:
        return block.forward(*tensors, *block.settings)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Outputs) -> None:
        ctx.block, *tensors = inputs
        ctx.save_for_backward(output[1], *tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        mean, *tensors = ctx.saved_tensors
        needed = ctx.needs_input_grad[1:]
        if any(needed[1:]):
            return (None, *_gradients(ctx.block.layer_by_layer, tensors, needed, grads))
        return (None, BlockGradient.apply(ctx.block, *grads, mean, *tensors), *[None] * (len(needed) - 1))

    @staticmethod
    def vmap(info: Any, dims: tuple[int | None, ...], block: FrozenBlock, *tensors: Tensor) -> Any:
        if block.has_clients:
            return run_stacked(BlockFunction.apply, info, dims, block, *tensors)
        return torch.func.vmap(block.layer_by_layer, dims[1:])(*tensors), (0, 0, 0)


class BlockGradient(Function):
    """`backward`; its own gradients by the layers."""

    @staticmethod
    def forward(block: FrozenBlock, *tensors: Tensor) -> Tensor:
        return block.backward(*tensors, *block.settings)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.block, *tensors = inputs
        ctx.save_for_backward(*tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        _, *needed = ctx.needs_input_grad
        return (None, *_gradients(ctx.block.gradient_by_layers, ctx.saved_tensors, needed, *grads))

    @staticmethod
    def vmap(info: Any, dims: tuple[int | None, ...], block: FrozenBlock, *tensors: Tensor) -> Any:
        if block.has_clients:
            return run_stacked(BlockGradient.apply, info, dims, block, *tensors)
        return torch.func.vmap(block.gradient_by_layers, dims[1:])(*tensors), 0
