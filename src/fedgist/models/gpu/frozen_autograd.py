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

from fedgist.models.gpu.stacking import longer

Outputs = tuple[Tensor, Tensor, Tensor]
"""Result, mean and variance."""


@dataclass(frozen=True)
class Frozen:
    """The kernels of a block and the layers they stand for; all three take `settings` behind the tensors.

    `backward` takes the gradients of what `forward` makes, and the mean, before what `forward` takes.
    """

    forward: Callable[..., Outputs]
    backward: Callable[..., Tensor]
    layers: Callable[..., Outputs]
    settings: tuple[Any, ...]
    of_clients: bool
    """Whether all tensors begin with clients, so that the kernels know what to do under vmap."""

    def __call__(self, *tensors: Tensor) -> Outputs:
        made: Outputs = Block.apply(self, *tensors)
        return made

    def layer_by_layer(self, *tensors: Tensor) -> Outputs:
        return self.layers(*tensors, *self.settings)

    def gradient_by_layers(self, *tensors: Tensor) -> Any:
        """What `backward` computes; the given mean is not needed, because the layers compute it too."""
        return _gradients(self.layer_by_layer, tensors[4:], [True], tensors[:3])[0]


def _gradients(function: Callable[..., Any], at: Sequence[Tensor], asked: Sequence[bool], grads: Any) -> list[Any]:
    """Those of the tensors that are `asked` for, None for the others, where `grads` are those of function(*at)."""
    which = [i for i, needed in enumerate(asked) if needed]

    def of_these(*these: Tensor) -> Any:
        now = dict(enumerate(at)) | dict(zip(which, these, strict=True))
        return function(*now.values())

    made: Any = torch.func.vjp(of_these, *(at[i] for i in which))
    found = dict(zip(which, made[1](grads), strict=True))
    return [found.get(i) for i in range(len(at))]


def _stacked(function: type[Function], info: Any, dims: tuple[int | None, ...], given: tuple[Any, ...]) -> Any:
    """Under vmap, clients are a longer first dimension."""
    size = info.batch_size
    made = function.apply(*longer(size, given, dims))
    if isinstance(made, Tensor):
        return made.unflatten(0, (size, -1)), 0
    return tuple(each.unflatten(0, (size, -1)) for each in made), (0,) * len(made)


class Block(Function):
    """`forward`; the gradient of x by kernels where it is the only one asked for, else all by the layers."""

    @staticmethod
    def forward(frozen: Frozen, *tensors: Tensor) -> Outputs:
        return frozen.forward(*tensors, *frozen.settings)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Outputs) -> None:
        ctx.frozen, *tensors = inputs
        ctx.save_for_backward(output[1], *tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        mean, *tensors = ctx.saved_tensors
        asked = ctx.needs_input_grad[1:]
        if any(asked[1:]):
            return (None, *_gradients(ctx.frozen.layer_by_layer, tensors, asked, grads))
        return (None, Gradient.apply(ctx.frozen, *grads, mean, *tensors), *[None] * (len(asked) - 1))

    @staticmethod
    def vmap(info: Any, dims: tuple[int | None, ...], frozen: Frozen, *tensors: Tensor) -> Any:
        if frozen.of_clients:
            return _stacked(Block, info, dims, (frozen, *tensors))
        return torch.func.vmap(frozen.layer_by_layer, dims[1:])(*tensors), (0, 0, 0)


class Gradient(Function):
    """`backward`; its own gradients by the layers."""

    @staticmethod
    def forward(frozen: Frozen, *tensors: Tensor) -> Tensor:
        return frozen.backward(*tensors, *frozen.settings)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.frozen, *tensors = inputs
        ctx.save_for_backward(*tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        _, *asked = ctx.needs_input_grad
        return (None, *_gradients(ctx.frozen.gradient_by_layers, ctx.saved_tensors, asked, *grads))

    @staticmethod
    def vmap(info: Any, dims: tuple[int | None, ...], frozen: Frozen, *tensors: Tensor) -> Any:
        if frozen.of_clients:
            return _stacked(Gradient, info, dims, (frozen, *tensors))
        return torch.func.vmap(frozen.gradient_by_layers, dims[1:])(*tensors), 0
