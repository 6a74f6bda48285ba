"""The layers that stacked clients use on a GPU compute what torch's own layers do."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import grad, vmap

from fedgist.core.rng import Rng
from fedgist.models.gpu.stacking import by_patches, by_tiles

SHAPES = [(1, 6, 5, 1, 2, 12), (6, 4, 5, 1, 0, 9), (3, 4, 3, 2, 1, 9), (2, 3, 1, 1, 0, 4)]


@pytest.mark.parametrize(("inputs", "outputs", "kernel", "stride", "padding", "side"), SHAPES)
def test_patches(inputs: int, outputs: int, kernel: int, stride: int, padding: int, side: int) -> None:
    """Values and gradients of a convolution, for three clients at once, in float64."""
    rng = Rng(0)
    x = rng("x").normal(3, 2, inputs, side, side).double()
    weight = rng("w").normal(3, outputs, inputs, kernel, kernel).double()
    bias = rng("b").normal(3, outputs).double()
    strides, paddings = (stride, stride), (padding, padding)

    def loss(function: object) -> object:
        def value(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
            return function(x, weight, bias, strides, paddings).sin().sum()  # type: ignore[operator]

        return value

    found, expected = (vmap(grad(loss(f), (0, 1, 2)))(x, weight, bias) for f in (by_patches, torch.conv2d))
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)
    one, other = (f(x[0], weight[0], None, strides, paddings) for f in (by_patches, torch.conv2d))
    torch.testing.assert_close(one, other)


@pytest.mark.parametrize("size", [2, 3])
def test_tiles(size: int) -> None:
    x = Rng(1).normal(2, 3, 6, 12).double()
    torch.testing.assert_close(by_tiles(x, size), F.avg_pool2d(x, size))
