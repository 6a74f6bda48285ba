"""The convolution that encoders differentiate twice."""

import pytest
import torch
from torch import Tensor
from torch.autograd import grad, gradcheck, gradgradcheck

from fedgist.core.rng import Rng
from fedgist.models.gpu.convolution import convolution

FORMS = [((1, 1), (1, 1)), ((2, 2), (1, 1)), ((1, 1), (0, 0)), ((2, 1), (2, 0))]


def tensors(side: int = 3) -> tuple[Tensor, Tensor, Tensor]:
    rng = Rng(0)
    x, weight, bias = rng("x").normal(2, 3, 6, 5), rng("w").normal(4, 3, side, side), rng("b").normal(4)
    return x.double().requires_grad_(), weight.double().requires_grad_(), bias.double().requires_grad_()


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("side", [1, 3])
def test_derivatives(side: int, form: tuple[tuple[int, int], tuple[int, int]]) -> None:
    """First and second derivatives against finite differences."""
    with torch.random.fork_rng():
        assert gradcheck(lambda *t: convolution(*t, *form), tensors(side))
        assert gradgradcheck(lambda *t: convolution(*t, *form), tensors(side))


@pytest.mark.parametrize("asked", [(0,), (1,), (0, 1), (0, 1, 2)])
def test_equals_torch(asked: tuple[int, ...]) -> None:
    """Values, gradients, and the gradient of a function of gradients, whichever of them are asked for."""

    def found(function: object) -> list[Tensor]:
        given = [t if i in asked else t.detach() for i, t in enumerate(tensors())]
        wanted = [given[i] for i in asked]
        y = function(*given, (1, 1), (1, 1)).relu()  # type: ignore[operator]
        first = grad(y.square().sum(), wanted, create_graph=True)
        return [y, *first, *grad(sum(g.sin().sum() for g in first), wanted)]

    for ours, torchs in zip(found(convolution), found(torch.conv2d), strict=True):
        torch.testing.assert_close(ours, torchs)


def test_gradients_lie_as_the_weights_do() -> None:
    x, weight, bias = tensors()
    made = convolution(x, weight, bias, (1, 1), (1, 1))
    assert made.is_contiguous(memory_format=torch.channels_last)
    (found,) = grad(made.sum(), weight)
    assert found.is_contiguous()
