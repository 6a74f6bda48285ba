"""The blocks of a ConvNet as one step: found where they are, and equal to their layers one after the other."""

from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fedgist import models
from fedgist.core.rng import Rng
from fedgist.core.work import Place
from fedgist.engines.scheduler import float32_arithmetic
from fedgist.models import fused
from fedgist.models.layers import AvgPool, Conv, Layers, Norm, Relu, bind_all

EXACT = Place(torch.device("cuda"))

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")


def block(inputs: int, channels: int = 6, norm: str = "instance", size: int = 2, stride: int = 1) -> Layers:
    """A convolution, a norm, ReLU and pooling."""
    conv = Conv(inputs, channels, kernel=3, padding=1, stride=stride)
    return (("conv", conv), ("norm", Norm(norm, channels)), ("relu", Relu()), ("pool", AvgPool(size)))


@pytest.mark.parametrize(
    ("layers", "steps"),
    [
        (block(3), 1),
        (block(8), 2),  # too large a patch: the convolution stays outside
        (block(3, norm="batch"), 4),
        (block(3, size=4), 4),
        (block(3, stride=2), 2),
        (block(3)[:3], 3),
        ((*block(3), *block(8), *block(3)), 4),
    ],
)
def test_which_layers_are_one(layers: Layers, steps: int) -> None:
    assert len(fused.bind_fused(layers)) == steps


def test_without_a_gpu_the_layers_run_as_they_are() -> None:
    net, rng = models.build("convnet", (3, 8, 8), 4, width=8), Rng(0)
    w, x = net.init(rng("w")), rng("x").normal(5, 3, 8, 8)
    assert torch.equal(net(w, x).features, net.segment(w, x))


def layer_by_layer(x: Tensor, conv: Tensor, weight: Tensor, bias: Tensor, padding: int) -> Tensor:
    made = F.conv2d(x, conv, padding=padding)
    return F.avg_pool2d(torch.relu(F.group_norm(made, len(weight), weight, bias, 1e-5)), 2)


@pytest.fixture
def exact() -> Iterator[None]:
    with float32_arithmetic(EXACT):
        yield


@needs_gpu
@pytest.mark.usefixtures("exact")
@pytest.mark.parametrize(("inputs", "side", "size", "padding"), [(3, 3, 32, 1), (1, 3, 28, 3), (2, 4, 9, 1)])
def test_kernels_equal_the_layers(inputs: int, side: int, size: int, padding: int) -> None:
    rng, clients, images, channels = Rng(0), 3, 7, 40
    x = rng("x").normal(clients, images, inputs, size, size).cuda()
    conv = rng("conv").normal(clients, channels, inputs, side, side).cuda()
    weight, bias = rng("weight").normal(clients, channels).cuda(), rng("bias").normal(clients, channels).cuda()
    expected = torch.stack([layer_by_layer(*one, padding) for one in zip(x, conv, weight, bias, strict=True)])
    found = fused.conv_norm_relu_pool(x, conv, weight, bias, padding, 1e-5)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    activations = torch.stack([F.conv2d(*one, padding=padding) for one in zip(x, conv, strict=True)])
    found = fused.norm_relu_pool(activations, weight, bias, 1e-5)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    rounded = fused.norm_relu_pool(activations.bfloat16(), weight.bfloat16(), bias.bfloat16(), 1e-5)
    torch.testing.assert_close(rounded.float(), expected, rtol=0.05, atol=0.05)


@needs_gpu
@pytest.mark.usefixtures("exact")
@pytest.mark.parametrize("way", [lambda call: call, torch.func.vmap], ids=["alone", "stacked"])
def test_a_net_without_gradients_takes_the_kernels(
    way: Callable[..., Callable[..., Tensor]], monkeypatch: pytest.MonkeyPatch
) -> None:
    net, rng = models.build("convnet", (3, 16, 16), 4, width=32), Rng(0)
    w = {name: tensor.cuda()[None].expand(2, *tensor.shape) for name, tensor in net.init(rng("w")).items()}
    x = rng("x").normal(2, 5, 3, 16, 16).cuda()
    stacked = way is torch.func.vmap
    given = (w, x) if stacked else ({name: tensor[0] for name, tensor in w.items()}, x[0])
    with torch.no_grad():
        found = way(lambda w, x: net(w, x).logits)(*given)
        monkeypatch.setattr(fused, "serves", lambda *_: False)
        expected = way(lambda w, x: net(w, x).logits)(*given)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    assert not torch.equal(found, expected)  # other kernels, other roundings


@needs_gpu
def test_where_a_gradient_is_asked_for_the_layers_run() -> None:
    layers = block(3)
    (step,) = fused.bind_fused(layers)
    rng = Rng(0)
    w = {
        "conv.weight": rng("c").normal(6, 3, 3, 3), "conv.bias": rng("b").normal(6),
        "norm.weight": rng("w").normal(6), "norm.bias": rng("n").normal(6),
    }  # fmt: skip
    w, x = {name: tensor.cuda() for name, tensor in w.items()}, rng("x").normal(2, 3, 8, 8).cuda()

    def one_after_the_other(x: Tensor) -> Tensor:
        for part in bind_all(layers):
            x = part(w, x, None, None)
        return x.square().sum()

    found = torch.func.grad(lambda x: step(w, x, None, None).square().sum())(x)
    torch.testing.assert_close(found, torch.func.grad(one_after_the_other)(x))
