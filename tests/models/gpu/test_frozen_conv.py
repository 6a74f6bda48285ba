"""A LeNet's blocks at fixed weights as one step: found where they are, and equal to their layers in turn."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import grad, gradcheck, gradgradcheck
from torch.fx.experimental.proxy_tensor import make_fx

from fedgist import models, storage
from fedgist.core import tree
from fedgist.core.message import Params
from fedgist.core.rng import Rng
from fedgist.core.task import Tap
from fedgist.core.work import Place, compute, stacking
from fedgist.engines.sequential import Sequential
from fedgist.engines.stacked import Stacked
from fedgist.models.gpu import blocks, frozen_conv
from fedgist.models.layers import Conv, Layers, MaxPool, Norm, Relu, Step, bind_all, named_entries
from fedgist.synthesis.dream_spaces import FreeDreams
from fedgist.synthesis.inversion import Dreamer, Objective

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
GPU = Place(torch.device("cuda"))
EPSILON = 1e-5
Admit = Callable[[str, bool], None]


def block(
    inputs: int = 2,
    channels: int = 3,
    norm: str = "batch",
    size: int = 2,
    kernel: int = 3,
    stride: int = 1,
    padding: int = 1,
    bias: bool = True,
) -> Layers:
    """A convolution, a norm, ReLU and pooling."""
    conv = Conv(inputs, channels, kernel, stride, padding, bias)
    return (("conv", conv), ("norm", Norm(norm, channels)), ("relu", Relu()), ("pool", MaxPool(size)))


@pytest.mark.parametrize(
    ("layers", "steps"),
    [
        (block(), 1),
        (block(16, 16, kernel=5), 1),
        ((*block(), *block(3)), 2),
        (block()[:3], 2),
        (block(norm="group"), 4),
        (block(size=4), 3),
        (block(stride=2), 2),
        (block(bias=False), 2),
        (block(kernel=6), 2),
        (block(17), 2),
        (block(channels=17), 2),
        (models.build("lenet5", (1, 28, 28), 10, norm="batch").layers[:-1], 7),
        (models.build("vgg13", (3, 32, 32), 10, norm="batch").layers[:-1], 21),
    ],
)
def test_which_layers_are_one(layers: Layers, steps: int) -> None:
    """Where convolutions stay on their own, norm and ReLU, and pooling behind them, are one: `frozen_norm`'s."""
    assert len(blocks.bind_blocks(layers)) == steps


def weights(layers: Layers, seed: int = 0) -> Params:
    """Some gammas are negative, so that the smallest of a square becomes its largest."""
    rng = Rng(seed)
    w = {name: rng(name).normal(*entry.shape).double() for name, entry in named_entries(layers).items()}
    return {name: tensor.square() + 0.1 if name.endswith("running_var") else tensor for name, tensor in w.items()}


def images(*shape: int) -> Tensor:
    """Noise above and nothing below, where all of a square are equally large and the first of them counts."""
    x = Rng(1)("x").normal(*shape).double()
    x[..., shape[-2] // 2 :, :] = 0.0
    return x


def run(chain: tuple[Step, ...], w: Params, x: Tensor, tap: Tap | None = None, new: Params | None = None) -> Tensor:
    for step in chain:
        x = step(w, x, new, tap)
    return x


@pytest.mark.parametrize("train", [False, True])
def test_without_a_gpu_a_block_is_its_layers(train: bool) -> None:
    layers, x = block(), images(5, 2, 8, 8)
    made: list[Any] = []
    for chain in (blocks.bind_blocks(layers), bind_all(layers)):
        tap = Tap()
        new: Params | None = {} if train else None
        made.append((run(chain, weights(layers), x, tap, new), [list(one) for one in tap], new or {}))
    assert storage.digest(made[0]) == storage.digest(made[1])


def in_torch(
    to_pooled: Tensor, to_mean: Tensor, to_variance: Tensor, mean: Tensor, x: Tensor, weight: Tensor, bias: Tensor,
    gamma: Tensor, beta: Tensor, running_mean: Tensor, running_variance: Tensor, padding: int, epsilon: float,
) -> Tensor:  # fmt: skip
    """The formula of `frozen_conv.backward`, word by word, for one client."""
    y = F.conv2d(x, weight, bias, padding=padding)
    each = (slice(None), None, None)
    scale = gamma[each] / (running_variance[each] + epsilon).sqrt()
    normed = (y - running_mean[each]) * scale + beta[each]
    best, place = F.max_pool2d(normed, 2, return_indices=True)
    to_y = F.max_unpool2d(to_pooled * (best > 0), place, 2) * scale
    values = y.numel() / len(mean)
    to_y = to_y + to_mean[each] / values + 2 * to_variance[each] / values * (y - mean[each])
    return F.conv_transpose2d(to_y, weight, padding=padding)


@pytest.fixture(scope="module")
def kernels() -> None:
    """Kernels that are no kernels, so that what is made of them can be tested without a GPU."""

    @frozen_conv.forward.register_kernel("cpu")
    def _(*given: Any) -> frozen_conv.Outputs:
        return frozen_conv.layer_by_layer(*given)

    @frozen_conv.backward.register_kernel("cpu")
    def _(*given: Any) -> Tensor:
        *tensors, padding, epsilon = given
        return torch.stack([in_torch(*one, padding, epsilon) for one in zip(*tensors, strict=True)])


@pytest.fixture
def calls(kernels: None, admit: Admit, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """All blocks take the kernels; which of them are called."""
    seen: list[str] = []

    def counted(name: str) -> Callable[..., Any]:
        op = getattr(frozen_conv, name)
        return lambda *given: (seen.append(name), op(*given))[1]

    for name in ("forward", "backward"):
        monkeypatch.setattr(frozen_conv, name, counted(name))
    admit("FROZEN_CONV", True)
    return seen


def tensors(clients: int = 2) -> list[Tensor]:
    """What a block of each client takes: x, and its weights in their order."""
    each = [weights(block(), seed).values() for seed in range(clients)]
    return [images(clients, 3, 2, 6, 4), *(torch.stack(one) for one in zip(*each, strict=True))]


def as_a_sum(made: frozen_conv.Outputs) -> Tensor:
    """A number that depends on all of what a block makes, by weights of different sizes."""
    rng = Rng(2)
    return torch.stack([(rng(str(i)).normal(*one.shape).double() * one).sum() for i, one in enumerate(made)]).sum()


@pytest.mark.parametrize("output", [0, 1, 2, None])
def test_the_gradient_of_the_images(output: int | None, calls: list[str]) -> None:
    """That of the pooled values, of the mean, of the variance, and of all together."""
    given = tensors()
    given[0].requires_grad_()

    def gradient(function: Callable[..., frozen_conv.Outputs]) -> Tensor:
        made = function(*given, 1, EPSILON)
        return grad(as_a_sum(made) if output is None else made[output].square().sum(), given[0])[0]

    torch.testing.assert_close(gradient(frozen_conv.block), gradient(frozen_conv.layer_by_layer))
    assert calls == ["forward", "backward"]


def objective(chain: tuple[Step, ...], w: Params, x: Tensor, listens: bool = True) -> Tensor:
    """Of what leaves a chain, and of the statistics on the way."""
    tap = Tap()
    out = run(chain, w, x, tap if listens else None)
    return out.square().sum() + sum(((s.mean - s.running_mean).sin() + s.variance.square()).sum() for s in tap)


TWO = (*block(), *((f"{name}2", layer) for name, layer in block(3, 4, kernel=4, padding=0)[:3]), ("pool2", MaxPool()))


@pytest.mark.parametrize("listens", [True, False])
@pytest.mark.parametrize("shared", [True, False])
def test_for_many_clients(shared: bool, listens: bool, calls: list[str]) -> None:
    """Under vmap(grad), two blocks in a row, whose images are the same for all clients or each client's own."""
    w = tree.stack([weights(TWO, seed) for seed in range(3)])
    x = images(5, 2, 10, 10) if shared else images(3, 5, 2, 10, 10)

    def gradients(chain: tuple[Step, ...]) -> Tensor:
        each = torch.func.grad(lambda x, w: objective(chain, w, x, listens))
        with torch.no_grad(), stacking():
            return torch.func.vmap(each, in_dims=(None if shared else 0, 0))(x, w)

    expected = gradients(bind_all(TWO))
    assert not calls
    torch.testing.assert_close(gradients(blocks.bind_blocks(TWO)), expected)
    assert calls == ["forward", "forward", "backward", "backward"]


def test_images_that_clients_share_are_not_copied(calls: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    layers, x, strides = block(), images(5, 2, 8, 8), []
    w = tree.stack([weights(layers, seed) for seed in range(3)])
    whole = frozen_conv.forward
    monkeypatch.setattr(frozen_conv, "forward", lambda x, *given: (strides.append(x.stride(0)), whole(x, *given))[1])
    with torch.no_grad():
        torch.func.vmap(lambda w: run(blocks.bind_blocks(layers), w, x))(w)
    assert strides == [0]


@pytest.mark.parametrize("name", ["conv.weight", "conv.bias", "norm.weight", "norm.bias"])
def test_where_a_weight_learns_the_layers_run(name: str, calls: list[str]) -> None:
    layers = block()
    w = weights(layers)
    w[name].requires_grad_()
    found, expected = (
        grad(objective(c, w, images(5, 2, 8, 8)), w[name]) for c in (blocks.bind_blocks(layers), bind_all(layers))
    )
    assert torch.equal(found[0], expected[0])
    assert not calls


def three_clients(layers: Layers) -> tuple[Params, Params]:
    """Their weights, and apart from them the running statistics, which torch does not differentiate by."""
    w = tree.stack([weights(layers, seed) for seed in range(3)])
    running = {name: w.pop(name) for name in ("norm.running_mean", "norm.running_var")}
    return w, running


@pytest.mark.parametrize("way", ["alone", "nested", "stacked"])
def test_gradients_of_weights(way: str, calls: list[str]) -> None:
    """Under vmap inside of grad, weights do not look differentiated and the kernels are taken: the block knows it."""
    layers, x = block(), images(3, 5, 2, 8, 8)
    w, running = three_clients(layers)

    def gradients(chain: tuple[Step, ...]) -> Params:
        def loss(w: Params, running: Params, x: Tensor) -> Tensor:
            return objective(chain, w | running, x)

        if way == "alone":
            return torch.func.grad(loss)(tree.index(w, 0), tree.index(running, 0), x[0])
        if way == "stacked":
            return torch.func.vmap(torch.func.grad(loss))(w, running, x)
        return torch.func.grad(lambda w: torch.func.vmap(loss)(w, running, x).sum())(w)

    torch.testing.assert_close(gradients(blocks.bind_blocks(layers)), gradients(bind_all(layers)))
    assert calls == (["forward"] if way == "nested" else [])


@pytest.mark.parametrize("learning", [[0], [0, 1], [2, 3], [0, 1, 2, 3, 4]], ids=str)
def test_derivatives(learning: list[int], calls: list[str]) -> None:
    """First and second ones against finite differences, of x alone and together with weights."""
    given = tensors()
    given[0] = Rng(3)("x").normal(2, 2, 2, 4, 4).double()  # no ties, where there are no derivatives
    at = [given[i].requires_grad_() for i in learning]

    def made(*at: Tensor) -> frozen_conv.Outputs:
        now = dict(enumerate(given)) | dict(zip(learning, at, strict=True))
        return frozen_conv.block(*now.values(), 1, EPSILON)

    with torch.random.fork_rng():  # the checks draw directions
        assert gradcheck(made, at)
        assert gradgradcheck(made, at)
    assert ("backward" in calls) == (learning == [0])


@pytest.mark.parametrize("learning", [False, True])
def test_second_derivatives_under_torch_func(learning: bool, calls: list[str]) -> None:
    """The gradient of the squared length of the images' gradient, for each of three clients."""
    layers, x = block(), Rng(3)("x").normal(3, 4, 2, 6, 6).double()
    w, running = three_clients(layers)

    def gradients(chain: tuple[Step, ...]) -> Any:
        def length(x: Tensor, w: Params, running: Params) -> Tensor:
            return torch.func.grad(lambda x: objective(chain, w | running, x))(x).square().sum()

        return torch.func.vmap(torch.func.grad(length, argnums=(0, 1) if learning else 0))(x, w, running)

    torch.testing.assert_close(gradients(blocks.bind_blocks(layers)), gradients(bind_all(layers)))
    # the outer gradient passes the kernels' gradient by layers, and what that was computed of by kernels again
    assert calls == ([] if learning else ["forward", "backward", "backward"])


def dreamer(shape: tuple[int, int, int], count: int, **terms: Any) -> Dreamer:
    net = models.build("lenet5", shape, 10, norm="batch")
    return Dreamer(Objective(net, tv=0.1, **terms), FreeDreams(count, shape))


def dreams(dreamer: Dreamer, runner: Any, clients: int = 3, rounds: int = 1) -> Any:
    """What clients answer to the same dreams; BatchNorm's statistics are not those of a fresh net."""
    each, start = [], dreamer.space.start(Rng(5))  # type: ignore[attr-defined]
    for client in range(clients):
        rng = Rng(client)
        w = dreamer.objective.model.init(rng("w"))
        for name in dreamer.objective.model.buffers:
            w[name] = w[name] + 0.3 * rng(name).uniform(*w[name].shape)
        each.append(w)
    for _ in range(rounds):  # a GPU records what is repeated
        made = runner.drive([compute(dreamer.gradient, start, w) for w in each])
    return made


@pytest.mark.parametrize("robust", [0.0, 0.1])
def test_dreams(robust: float, calls: list[str], admit: Admit) -> None:
    """LeNet5's whole objective, by both engines; robust dreams differentiate inside of what is differentiated."""
    mine, place = dreamer((1, 28, 28), 4, robust=robust), Place(dtype=torch.float64)
    # of the dreams, of the attack and of the attacked dreams; or of the dreams
    count, clients = 6 if robust else 2, 3
    alone = dreams(mine, Sequential(place), clients)
    assert calls.count("backward") == count * clients
    calls.clear()
    together = dreams(mine, Stacked(place, workers=1), clients)
    assert calls.count("backward") == count
    calls.clear()
    admit("FROZEN_CONV", False)
    expected = dreams(mine, Sequential(place), clients)
    assert not calls
    torch.testing.assert_close(alone, expected)
    torch.testing.assert_close(together, expected)


def test_as_traced_for_compilation(calls: list[str]) -> None:
    """The plain operations that a trace of many clients consists of: kernels among them, and the same numbers."""
    layers, x = block(), images(5, 2, 8, 8)
    w = tree.stack([weights(layers, seed) for seed in range(3)])

    def gradients(x: Tensor) -> Tensor:
        each = torch.func.grad(lambda x, w: objective(blocks.bind_blocks(layers), w, x))
        with torch.no_grad():
            return torch.func.vmap(each, in_dims=(None, 0))(x, w)

    trace = make_fx(gradients)(x)
    assert "fedgist.frozen_conv_backward" in trace.code
    other = images(5, 2, 8, 8).roll(1, 0)
    torch.testing.assert_close(trace(other), gradients(other))


def share_off(found: Tensor, expected: Tensor, tolerance: float) -> float:
    """Of the numbers, the share that are wrong by more than so much of the largest."""
    off = (found.double() - expected.double()).abs() > tolerance * expected.abs().max()
    return float(off.double().mean())


FORMS = [(1, 28, 6, 5, 2), (6, 14, 16, 5, 0), (3, 32, 16, 3, 1), (2, 9, 3, 4, 1)]


@needs_gpu
@pytest.mark.usefixtures("exact")
@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("count", [256, 7])
@pytest.mark.parametrize(("inputs", "side", "channels", "kernel", "padding"), FORMS)
def test_kernels_equal_the_layers(
    inputs: int, side: int, channels: int, kernel: int, padding: int, count: int, shared: bool
) -> None:
    """Against the layers in float64. Rounding may let another of a square be the largest, but hardly ever does."""
    layers = block(inputs, channels, kernel=kernel, padding=padding)
    w = tree.stack([weights(layers, seed) for seed in range(3)])
    x = images(1 if shared else 3, count, inputs, side, side).expand(3, -1, -1, -1, -1)
    given = [one.cuda() for one in (x, *w.values())]
    singles = [one.float() for one in given]
    if shared:
        singles[0] = singles[0][:1].expand(3, -1, -1, -1, -1)
    given[0] = given[0].clone().requires_grad_()
    expected = frozen_conv.layer_by_layer(*given, padding, EPSILON)
    grads = [Rng(4)(str(i)).normal(*one.shape).double().cuda() for i, one in enumerate(expected)]
    (to_x,) = grad(expected, given[0], grads)
    found = frozen_conv.forward(*singles, padding, EPSILON)
    for one, other in zip(found, expected, strict=True):
        assert share_off(one, other, 1e-5) == 0
    made = frozen_conv.backward(*(one.float() for one in grads), found[1], *singles, padding, EPSILON)
    assert share_off(made, to_x, 1e-4) < 1e-3


@needs_gpu
@pytest.mark.usefixtures("exact")
@pytest.mark.parametrize("learning", [False, True])
@pytest.mark.parametrize("stacked", [False, True])
def test_second_derivatives_on_a_gpu(stacked: bool, learning: bool) -> None:
    """The gradient of the squared length of the images' gradient, by torch's autograd and for many clients."""
    layers, x = block(), Rng(3)("x").normal(3, 4, 2, 6, 6).cuda()
    w, running = (tree.map(lambda t: t.float().cuda(), one) for one in three_clients(layers))
    if not stacked:
        x, w, running = x[0].requires_grad_(), tree.index(w, 0), tree.index(running, 0)
    if not stacked and learning:
        w = tree.map(lambda t: t.requires_grad_(), w)

    def gradients(chain: tuple[Step, ...]) -> Any:
        def length(x: Tensor, w: Params, running: Params) -> Tensor:
            return torch.func.grad(lambda x: objective(chain, w | running, x))(x).square().sum()

        if stacked:
            return torch.func.vmap(torch.func.grad(length, argnums=(0, 1) if learning else 0))(x, w, running)
        (slope,) = grad(objective(chain, w | running, x), x, create_graph=True)
        return grad(slope.square().sum(), [x, *w.values()] if learning else x)

    found, expected = tree.leaves(gradients(blocks.bind_blocks(layers))), tree.leaves(gradients(bind_all(layers)))
    assert len(found) == (5 if learning else 1)
    for one, other in zip(found, expected, strict=True):
        assert share_off(one, other, 1e-3) == 0


@needs_gpu
@pytest.mark.parametrize("robust", [0.0, 0.1])
@pytest.mark.parametrize("count", [256, 37])
def test_dreams_on_a_gpu(count: int, robust: float, replays: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Both engines, and the stacked one's recorded graph, against the layers in float64."""
    mine = dreamer((1, 28, 28), count, robust=robust)
    seen: list[str] = []
    whole = frozen_conv.backward
    monkeypatch.setattr(frozen_conv, "backward", lambda *given: (seen.append("backward"), whole(*given))[1])
    runner = Stacked(GPU)
    found = [dreams(mine, Sequential(GPU)), dreams(mine, runner), dreams(mine, runner, rounds=4)]
    assert replays and seen
    seen.clear()
    expected = dreams(mine, Sequential(Place(GPU.device, torch.float64)))
    assert not seen
    for one in found:
        for made, truth in zip(one, expected, strict=True):
            assert share_off(made["x"], truth["x"], 1e-3) < 1e-2
