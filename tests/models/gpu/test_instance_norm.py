"""The blocks of a ConvNet as one step: found where they are, and equal to their layers one after the other."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fedgist import models
from fedgist.core.message import Params
from fedgist.core.rng import Rng
from fedgist.models.gpu import blocks, instance_norm
from fedgist.models.layers import AvgPool, Conv, Flatten, Layers, Norm, Relu, Step, bind_all, named_entries

Admit = Callable[[str, bool], None]

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")


def block(inputs: int, channels: int = 6, norm: str = "instance", size: int = 2, stride: int = 1) -> Layers:
    """A convolution, a norm, ReLU and pooling."""
    conv = Conv(inputs, channels, kernel=3, padding=1, stride=stride)
    return (("conv", conv), ("norm", Norm(norm, channels)), ("relu", Relu()), ("pool", AvgPool(size)))


@pytest.mark.parametrize(
    ("layers", "steps"),
    [
        (block(3), 1),
        (block(8), 1),
        (block(3, norm="group"), 4),
        (block(3, norm="batch"), 3),
        (block(3, size=4), 4),
        (block(3, stride=2), 2),
        (block(3)[:3], 3),
        (block(3)[1:], 1),
        ((*block(3), *block(8), *block(3)), 3),
    ],
)
def test_which_layers_are_one(layers: Layers, steps: int) -> None:
    assert len(blocks.bind_blocks(layers)) == steps


@pytest.mark.parametrize(("behind", "flat"), [((), False), ((("flatten", Flatten()),), True), (block(6), False)])
@pytest.mark.parametrize("first", [0, 1])
def test_what_is_flattened_next_lies_flat(
    behind: Layers, flat: bool, first: int, admit: Admit, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a convolution's block, with and without gradients, and of a norm's."""
    flags = []

    def kernel(x: Tensor, *given: Any) -> Tensor:
        flags.append(given[-1])
        return x

    admit("INSTANCE_NORM", True)
    for name in ("block", "conv_norm_relu_pool"):
        monkeypatch.setattr(instance_norm, name, kernel)
    layers = block(3)[first:]
    step = blocks.bind_blocks((*layers, *behind))[0]
    for gradients in (True, False):
        with torch.set_grad_enabled(gradients):
            step(weights(layers), torch.zeros(2, 6 if first else 3, 8, 8).double(), None, None)
    assert flags == [flat, flat]


def test_without_a_gpu_the_layers_run_as_they_are() -> None:
    net, rng = models.build("convnet", (3, 8, 8), 4, width=8), Rng(0)
    w, x = net.init(rng("w")), rng("x").normal(5, 3, 8, 8)
    one_by_one = x
    for step in bind_all(net.layers[:-1]):
        one_by_one = step(w, one_by_one, None, None)
    assert torch.equal(net(w, x).features, one_by_one)


@pytest.fixture(scope="module")
def on_a_cpu() -> None:
    """Kernels that are no kernels, so that how they are differentiated can be tested without a GPU."""

    @instance_norm.norm_relu_pool.register_kernel("cpu")
    def _(x: Tensor, weight: Tensor, bias: Tensor, epsilon: float, flat: bool = False) -> Tensor:
        return instance_norm.layer_by_layer(x, weight, bias, epsilon)

    @instance_norm.norm_relu_pool_backward.register_kernel("cpu")
    def _(x: Tensor, weight: Tensor, bias: Tensor, grad: Tensor, epsilon: float) -> tuple[Tensor, Tensor, Tensor]:
        weight, bias = weight[:, None, :, None, None], bias[:, None, :, None, None]
        centred = x - x.mean((3, 4), keepdim=True)
        scale = (centred.square().mean((3, 4), keepdim=True) + epsilon).rsqrt()
        normed = centred * scale
        g = (normed * weight + bias > 0) * grad.repeat_interleave(2, 3).repeat_interleave(2, 4) / 4
        level, slope = (each.mean((3, 4), keepdim=True) for each in (g, g * normed))
        return weight * scale * (g - level - normed * slope), (g * normed).sum((1, 3, 4)), g.sum((1, 3, 4))


@pytest.mark.usefixtures("on_a_cpu")
@pytest.mark.parametrize("differentiated", [(True, True, True), (True, False, False)])
def test_gradients_and_their_gradients(differentiated: tuple[bool, ...]) -> None:
    rng = Rng(0)
    given = rng("x").normal(2, 2, 3, 4, 4), rng("w").normal(2, 3), rng("b").normal(2, 3)
    at = [x.double().requires_grad_(asked) for x, asked in zip(given, differentiated, strict=True)]
    with torch.random.fork_rng():  # the checks draw directions
        assert torch.autograd.gradcheck(lambda *at: instance_norm.block(*at, 1e-5), at)
        assert torch.autograd.gradcheck(lambda *at: instance_norm.block(*at, 1e-5, True), at)
        assert torch.autograd.gradgradcheck(lambda *at: instance_norm.block(*at, 1e-5), at)


def run(chain: tuple[Step, ...], w: Params, x: Tensor) -> Tensor:
    for step in chain:
        x = step(w, x, None, None)
    return x


def weights(layers: Layers) -> Params:
    rng = Rng(0)
    return {name: rng(name).normal(*entry.shape).double() for name, entry in named_entries(layers).items()}


@pytest.mark.parametrize("inputs", [3, 8])
def test_without_a_gpu_a_block_is_its_layers(inputs: int) -> None:
    layers = block(inputs)
    w, x = weights(layers), Rng(1)("x").normal(5, inputs, 8, 8).double()
    assert torch.equal(run(blocks.bind_blocks(layers), w, x), run(bind_all(layers), w, x))


@pytest.mark.usefixtures("on_a_cpu")
@pytest.mark.parametrize("inputs", [3, 8])
def test_a_convolution_before_the_norm_needs_no_bias(inputs: int, admit: Admit) -> None:
    """The bias changes nothing, and its gradient is not missing but zero; the others are those of the layers, twice."""
    admit("INSTANCE_NORM", True)
    layers = block(inputs)
    w = {name: tensor.requires_grad_() for name, tensor in weights(layers).items()}
    x = Rng(1)("x").normal(5, inputs, 8, 8).double().requires_grad_()
    at = [x, *w.values()]

    def gradients(chain: tuple[Step, ...]) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        once = torch.autograd.grad(run(chain, w, x).square().sum(), at, create_graph=True)
        return once, torch.autograd.grad(sum(each.square().sum() for each in once), at)

    for found, expected in zip(gradients(blocks.bind_blocks(layers)), gradients(bind_all(layers)), strict=True):
        torch.testing.assert_close(found, expected)
        assert not found[1 + list(w).index("conv.bias")].any()


@pytest.mark.usefixtures("on_a_cpu")
def test_a_convolution_of_many_clients_needs_no_bias(admit: Admit) -> None:
    layers, x = block(8), Rng(1)("x").normal(2, 5, 8, 8, 8).double()
    w = {name: torch.stack([tensor, -tensor]) for name, tensor in weights(layers).items()}
    expected = torch.func.vmap(partial(run, bind_all(layers)))(w, x)
    admit("INSTANCE_NORM", True)
    with torch.no_grad():
        found = torch.func.vmap(partial(run, blocks.bind_blocks(layers)))(w, x)
    torch.testing.assert_close(found, expected)


@pytest.mark.usefixtures("on_a_cpu")
@pytest.mark.parametrize("inputs", [3, 8])
def test_the_gradients_of_many_clients_take_the_kernels(inputs: int, admit: Admit) -> None:
    """By torch.func, once and twice, as an engine stacks them: those of the layers."""
    layers, x = block(inputs), Rng(1)("x").normal(2, 5, inputs, 8, 8).double()
    w = {name: torch.stack([tensor, -tensor]) for name, tensor in weights(layers).items()}

    def gradients(chain: tuple[Step, ...]) -> tuple[Params, Params]:
        once = torch.func.grad(lambda w, x: run(chain, w, x).square().sum())
        twice = torch.func.grad(lambda w, x: sum(each.square().sum() for each in once(w, x).values()))
        return torch.func.vmap(once)(w, x), torch.func.vmap(twice)(w, x)

    expected = gradients(bind_all(layers))
    admit("INSTANCE_NORM", True)
    torch.testing.assert_close(gradients(blocks.bind_blocks(layers)), expected)


def layer_by_layer(x: Tensor, conv: Tensor, weight: Tensor, bias: Tensor, padding: int) -> Tensor:
    made = F.conv2d(x, conv, padding=padding)
    return F.avg_pool2d(torch.relu(F.group_norm(made, len(weight), weight, bias, 1e-5)), 2)


@needs_gpu
@pytest.mark.usefixtures("exact")
@pytest.mark.parametrize(("inputs", "side", "size", "padding"), [(3, 3, 32, 1), (1, 3, 28, 3), (2, 4, 9, 1)])
def test_kernels_equal_the_layers(inputs: int, side: int, size: int, padding: int) -> None:
    rng, clients, images, channels = Rng(0), 3, 7, 40
    x = rng("x").normal(clients, images, inputs, size, size).cuda()
    conv = rng("conv").normal(clients, channels, inputs, side, side).cuda()
    weight, bias = rng("weight").normal(clients, channels).cuda(), rng("bias").normal(clients, channels).cuda()
    expected = torch.stack([layer_by_layer(*one, padding) for one in zip(x, conv, weight, bias, strict=True)])
    found = instance_norm.conv_norm_relu_pool(x, conv, weight, bias, padding, 1e-5)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    flat = instance_norm.conv_norm_relu_pool(x, conv, weight, bias, padding, 1e-5, True)
    torch.testing.assert_close(flat, found)
    assert flat.is_contiguous() and not found.is_contiguous()
    activations = torch.stack([F.conv2d(*one, padding=padding) for one in zip(x, conv, strict=True)])
    found = instance_norm.norm_relu_pool(activations, weight, bias, 1e-5)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    flat = instance_norm.norm_relu_pool(activations, weight, bias, 1e-5, True)
    torch.testing.assert_close(flat, found)
    assert flat.is_contiguous() and not found.is_contiguous()
    rounded = instance_norm.norm_relu_pool(activations.bfloat16(), weight.bfloat16(), bias.bfloat16(), 1e-5)
    torch.testing.assert_close(rounded.float(), expected, rtol=0.05, atol=0.05)


@needs_gpu
@pytest.mark.usefixtures("exact")
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-4), (torch.float16, 1e-2)])
@pytest.mark.parametrize(("inputs", "size", "channels"), [(3, 32, 128), (1, 28, 128), (3, 32, 40), (3, 32, 10)])
def test_with_many_images_a_program_takes_all_channels(
    inputs: int, size: int, channels: int, dtype: torch.dtype, tolerance: float
) -> None:
    rng, clients, images = Rng(0), 2, 2 * torch.cuda.get_device_properties("cuda").multi_processor_count
    given = {
        "x": (clients, images, inputs, size, size),
        "conv": (clients, channels, inputs, 3, 3),
        "weight": (clients, channels),
        "bias": (clients, channels),
    }
    x, conv, weight, bias = (rng(name).normal(*shape).cuda().to(dtype) for name, shape in given.items())
    each = zip(x.float(), conv.float(), weight.float(), bias.float(), strict=True)
    expected = torch.stack([layer_by_layer(*one, padding=1) for one in each])
    found = instance_norm.conv_norm_relu_pool(x, conv, weight, bias, 1, 1e-5)
    torch.testing.assert_close(found.float(), expected, rtol=tolerance, atol=tolerance)


@needs_gpu
@pytest.mark.usefixtures("exact")
@pytest.mark.parametrize("way", [lambda call: call, torch.func.vmap], ids=["alone", "stacked"])
def test_a_net_without_gradients_takes_the_kernels(way: Callable[..., Callable[..., Tensor]], admit: Admit) -> None:
    net, rng = models.build("convnet", (3, 16, 16), 4, width=32), Rng(0)
    w = {name: tensor.cuda()[None].expand(2, *tensor.shape) for name, tensor in net.init(rng("w")).items()}
    x = rng("x").normal(2, 5, 3, 16, 16).cuda()
    stacked = way is torch.func.vmap
    given = (w, x) if stacked else ({name: tensor[0] for name, tensor in w.items()}, x[0])
    with torch.no_grad():
        found = way(lambda w, x: net(w, x).logits)(*given)
        admit("INSTANCE_NORM", False)
        expected = way(lambda w, x: net(w, x).logits)(*given)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    assert not torch.equal(found, expected)  # other kernels, other roundings


@needs_gpu
@pytest.mark.usefixtures("exact")
@pytest.mark.parametrize("inputs", [3, 8])
def test_gradients_are_those_of_the_layers(inputs: int) -> None:
    """Of images and weights, by torch's autograd and by torch.func."""
    layers = block(inputs, channels=40)
    steps = blocks.bind_blocks(layers)
    w = {name: tensor.float().cuda() for name, tensor in weights(layers).items()}
    x = Rng(0)("x").normal(5, inputs, 32, 32).cuda()

    def loss(x: Tensor, w: Params, chain: tuple[Step, ...]) -> Tensor:
        return run(chain, w, x).square().sum()

    at = [x.clone().requires_grad_(), *(tensor.clone().requires_grad_() for tensor in w.values())]
    named = dict(zip(w, at[1:], strict=True))
    expected = torch.autograd.grad(loss(at[0], named, bind_all(layers)), at)
    found = torch.autograd.grad(loss(at[0], named, steps), at)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-3)
    functional = torch.func.grad(lambda x: loss(x, w, steps))(x)
    torch.testing.assert_close(functional, expected[0], rtol=1e-3, atol=1e-3)
