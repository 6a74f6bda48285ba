"""Convolutions on a GPU: the one that encoders differentiate twice, and that of many clients, are torch's."""

import pytest
import torch
from torch import Tensor
from torch.autograd import grad, gradcheck, gradgradcheck
from torch.func import vmap

from fedgist.core.rng import Rng
from fedgist.models.gpu.convolution import by_channels_last, by_patches

FORMS = [((1, 1), (1, 1)), ((2, 2), (1, 1)), ((1, 1), (0, 0)), ((2, 1), (2, 0))]
SHAPES = [(1, 6, 5, 1, 2, 12), (6, 4, 5, 1, 0, 9), (3, 4, 3, 2, 1, 9), (2, 3, 1, 1, 0, 4)]


def tensors(side: int = 3) -> tuple[Tensor, Tensor, Tensor]:
    rng = Rng(0)
    x, weight, bias = rng("x").normal(2, 3, 6, 5), rng("w").normal(4, 3, side, side), rng("b").normal(4)
    return x.double().requires_grad_(), weight.double().requires_grad_(), bias.double().requires_grad_()


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("side", [1, 3])
def test_derivatives(side: int, form: tuple[tuple[int, int], tuple[int, int]]) -> None:
    """First and second derivatives against finite differences."""
    with torch.random.fork_rng():
        assert gradcheck(lambda *t: by_channels_last(*t, *form), tensors(side))
        assert gradgradcheck(lambda *t: by_channels_last(*t, *form), tensors(side))


@pytest.mark.parametrize("asked", [(0,), (1,), (0, 1), (0, 1, 2)])
def test_equals_torch(asked: tuple[int, ...]) -> None:
    """Values, gradients, and the gradient of a function of gradients, whichever of them are asked for."""

    def found(function: object) -> list[Tensor]:
        given = [t if i in asked else t.detach() for i, t in enumerate(tensors())]
        wanted = [given[i] for i in asked]
        y = function(*given, (1, 1), (1, 1)).relu()  # type: ignore[operator]
        first = grad(y.square().sum(), wanted, create_graph=True)
        return [y, *first, *grad(sum(g.sin().sum() for g in first), wanted)]

    for ours, torchs in zip(found(by_channels_last), found(torch.conv2d), strict=True):
        torch.testing.assert_close(ours, torchs)


def test_gradients_lie_as_the_weights_do() -> None:
    x, weight, bias = tensors()
    made = by_channels_last(x, weight, bias, (1, 1), (1, 1))
    assert made.is_contiguous(memory_format=torch.channels_last)
    (found,) = grad(made.sum(), weight)
    assert found.is_contiguous()


@pytest.mark.parametrize(("inputs", "outputs", "kernel", "stride", "padding", "side"), SHAPES)
def test_patches(inputs: int, outputs: int, kernel: int, stride: int, padding: int, side: int) -> None:
    """Values, gradients and their gradients of a convolution, for three clients at once, in float64."""
    rng = Rng(0)
    x = rng("x").normal(3, 2, inputs, side, side).double()
    weight = rng("w").normal(3, outputs, inputs, kernel, kernel).double()
    bias = rng("b").normal(3, outputs).double()
    strides, paddings = (stride, stride), (padding, padding)

    def loss(function: object) -> object:
        def value(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
            return function(x, weight, bias, strides, paddings).sin().sum()  # type: ignore[operator]

        return value

    def twice(function: object) -> object:
        grad = torch.func.grad(loss(function), (0, 1))  # type: ignore[arg-type]
        return torch.func.grad(lambda *at: sum(each.square().sum() for each in grad(*at)), (0, 1, 2))

    found, expected = (vmap(torch.func.grad(loss(f), (0, 1, 2)))(x, weight, bias) for f in (by_patches, torch.conv2d))
    more, wanted = (vmap(twice(f))(x, weight, bias) for f in (by_patches, torch.conv2d))  # type: ignore[arg-type]
    found, expected = (*found, *more), (*expected, *wanted)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)
    one, other = (f(x[0], weight[0], None, strides, paddings) for f in (by_patches, torch.conv2d))
    torch.testing.assert_close(one, other)
