"""BatchNorm at fixed weights with what follows it as one step: found where it is, and equal to its layers in turn."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import grad, gradcheck, gradgradcheck

from fedgist import models, storage
from fedgist.core.message import Params
from fedgist.core.rng import Rng
from fedgist.core.task import Tap
from fedgist.core.work import Place, compute
from fedgist.engines.sequential import Sequential
from fedgist.engines.stacked import Stacked, executor
from fedgist.models.gpu import blocks, frozen_norm
from fedgist.models.layers import Conv, Layers, MaxPool, Norm, Relu, Residual, Step, Tanh, bind_all, named_entries
from fedgist.synthesis.dream_spaces import FreeDreams
from fedgist.synthesis.inversion import Dreamer, Objective

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
GPU = Place(torch.device("cuda"))
EPSILON = 1e-5
Admit = Callable[[str, bool], None]


def block(count: int = 3, channels: int = 3, norm: str = "batch", size: int = 2) -> Layers:
    """The first layers of a norm, ReLU and pooling."""
    return (("norm", Norm(norm, channels)), ("relu", Relu()), ("pool", MaxPool(size)))[:count]


RESIDUAL = Residual(
    (("conv1", Conv(3, 3, 1)), *((f"{name}1", layer) for name, layer in block(2)), *block(1)),
    (("conv_shortcut", Conv(3, 3, 1)), ("norm_shortcut", Norm("batch", 3))),
)


def weights(layers: Layers, seed: int = 0) -> Params:
    """Some gammas are negative, so that the smallest of a square becomes its largest."""
    rng = Rng(seed)
    w = {name: rng(name).normal(*entry.shape).double() for name, entry in named_entries(layers).items()}
    return {name: tensor.square() + 0.1 if name.endswith("running_var") else tensor for name, tensor in w.items()}


def images(*shape: int) -> Tensor:
    """Noise above and the same number below, where all of a square are equally large and the first of them counts."""
    x = Rng(1)("x").normal(*shape).double()
    x[..., shape[-2] // 2 :, :] = 0.25
    return x


def run(chain: tuple[Step, ...], w: Params, x: Tensor, tap: Tap | None = None, new: Params | None = None) -> Tensor:
    for step in chain:
        x = step(w, x, new, tap)
    return x


@pytest.fixture
def taken(admit: Admit, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many layers the kernels take at a time, in the order in which they run."""
    counts: list[int] = []

    def block(*inputs: Any) -> frozen_norm.Outputs:
        counts.append(inputs[-2])
        return frozen_norm.layer_by_layer(*inputs)

    monkeypatch.setattr(frozen_norm, "block", block)
    admit("FROZEN_NORM", True)
    return counts


@pytest.mark.parametrize(
    ("layers", "counts"),
    [
        (block(1), [1]),
        (block(2), [2]),
        (block(3), [3]),
        ((*block(2), ("conv", Conv(3, 3, 1, bias=False)), *((f"{name}2", layer) for name, layer in block())), [2, 3]),
        ((("conv", Conv(3, 3, 1)), *block()), []),  # all four are one
        (block(size=4), [2]),
        ((block()[0], block()[2]), [1]),
        ((block()[0], ("tanh", Tanh())), [1]),
        (block(norm="group"), []),
        (block(norm="instance"), []),
        ((("residual", RESIDUAL), ("relu", Relu())), [2, 1, 1]),
    ],
)
def test_which_layers_are_one(layers: Layers, counts: list[int], taken: list[int]) -> None:
    run(blocks.bind_blocks(layers), weights(layers), images(2, 3, 8, 8))
    assert taken == counts


@pytest.mark.parametrize(
    ("name", "counts"),
    [
        ("resnet9", [2, 3, 2, 2, 3, 3, 2, 2]),
        ("resnet18", [2, *[2, 1] * 2, *[2, 1, 1, 2, 1] * 3]),
        ("resnet18-thesis", [2, *[2, 2] * 2, *[2, 2, 1, 2, 2] * 3]),
        ("vgg13", [2, 3] * 5),
    ],
)
def test_every_norm_of_a_net_is_found(name: str, counts: list[int], taken: list[int]) -> None:
    net = models.build(name, (3, 32, 32), 4, norm="batch")
    net(net.init(Rng(0)), torch.zeros(1, 3, 32, 32))
    assert taken == counts


@pytest.mark.parametrize("train", [False, True])
def test_without_a_gpu_a_block_is_its_layers(train: bool) -> None:
    layers, x = (*block(), ("residual", RESIDUAL)), images(5, 3, 8, 8)
    made: list[Any] = []
    for chain in (blocks.bind_blocks(layers), bind_all(layers)):
        tap = Tap()
        new: Params | None = {} if train else None
        made.append((run(chain, weights(layers), x, tap, new), [list(one) for one in tap], new or {}))
    assert storage.digest(made[0]) == storage.digest(made[1])


def in_torch(
    to_out: Tensor, to_mean: Tensor, to_variance: Tensor, mean: Tensor, x: Tensor, gamma: Tensor, beta: Tensor,
    running_mean: Tensor, running_variance: Tensor, count: int, epsilon: float,
) -> Tensor:  # fmt: skip
    """The formula of `frozen_conv.backward` up to the convolution, word by word."""
    each = (slice(None), None, None)
    scale = gamma[each] / (running_variance[each] + epsilon).sqrt()
    normed = (x - running_mean[each]) * scale + beta[each]
    if count == 3:
        best, place = F.max_pool2d(normed, 2, return_indices=True)
        arrived = F.max_unpool2d(to_out * (best > 0), place, 2)
    else:
        arrived = to_out * (normed > 0) if count == 2 else to_out
    values = x.numel() / len(mean)
    return arrived * scale + to_mean[each] / values + 2 * to_variance[each] / values * (x - mean[each])


@pytest.fixture(scope="module")
def kernels() -> None:
    """Kernels that are no kernels, so that what is made of them can be tested without a GPU."""

    @frozen_norm.forward.register_kernel("cpu")
    def _(*given: Any) -> frozen_norm.Outputs:
        return frozen_norm.layer_by_layer(*given)

    @frozen_norm.backward.register_kernel("cpu")
    def _(*given: Any) -> Tensor:
        return in_torch(*given)


@pytest.fixture
def calls(kernels: None, admit: Admit, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """All blocks take the kernels; which of them are called."""
    seen: list[str] = []

    def counted(name: str) -> Callable[..., Any]:
        op = getattr(frozen_norm, name)
        return lambda *given: (seen.append(name), op(*given))[1]

    for name in ("forward", "backward"):
        monkeypatch.setattr(frozen_norm, name, counted(name))
    admit("FROZEN_NORM", True)
    return seen


def tensors(x: Tensor) -> list[Tensor]:
    """What a block takes: x, and the norm's weights in their order."""
    return [x, *weights(block(channels=x.shape[1])).values()]


def as_a_sum(made: frozen_norm.Outputs) -> Tensor:
    """A number that depends on all of what a block makes, by weights of different sizes."""
    rng = Rng(2)
    return torch.stack([(rng(str(i)).normal(*one.shape).double() * one).sum() for i, one in enumerate(made)]).sum()


@pytest.mark.parametrize("output", [0, 1, 2, None])
@pytest.mark.parametrize("count", [1, 2, 3])
def test_the_gradient_of_the_images(count: int, output: int | None, calls: list[str]) -> None:
    """That of the result, of the mean, of the variance, and of all together."""
    given = tensors(images(3, 4, 6, 4).requires_grad_())

    def gradient(function: Callable[..., frozen_norm.Outputs]) -> Tensor:
        made = function(*given, count, EPSILON)
        return grad(as_a_sum(made) if output is None else made[output].square().sum(), given[0])[0]

    torch.testing.assert_close(gradient(frozen_norm.block), gradient(frozen_norm.layer_by_layer))
    assert calls == ["forward", "backward"]


def objective(chain: tuple[Step, ...], w: Params, x: Tensor, listens: bool = True) -> Tensor:
    """Of what leaves a chain, and of the statistics on the way."""
    tap = Tap()
    out = run(chain, w, x, tap if listens else None)
    return out.square().sum() + sum(((s.mean - s.running_mean).sin() + s.variance.square()).sum() for s in tap)


CHAIN = (*block(), ("residual", RESIDUAL), ("relu2", Relu()), ("norm2", Norm("batch", 3)))


@pytest.mark.parametrize("listens", [True, False])
def test_the_gradient_of_a_chain(listens: bool, calls: list[str]) -> None:
    """All three forms, behind each other, inside of a sum and its shortcut."""
    w, x = weights(CHAIN), images(5, 3, 8, 8).requires_grad_()
    (expected,) = grad(objective(bind_all(CHAIN), w, x, listens), x)
    assert not calls
    torch.testing.assert_close(grad(objective(blocks.bind_blocks(CHAIN), w, x, listens), x)[0], expected)
    assert calls == ["forward"] * 5 + ["backward"] * 5


def test_in_train_mode_the_layers_run(calls: list[str]) -> None:
    run(blocks.bind_blocks(CHAIN), weights(CHAIN), images(5, 3, 8, 8), new={})
    assert not calls


@pytest.mark.parametrize("name", ["norm.weight", "norm.bias"])
def test_where_a_weight_learns_the_layers_run(name: str, calls: list[str]) -> None:
    layers = block()
    w = weights(layers)
    w[name].requires_grad_()
    found, expected = (
        grad(objective(c, w, images(5, 3, 8, 8)), w[name]) for c in (blocks.bind_blocks(layers), bind_all(layers))
    )
    assert torch.equal(found[0], expected[0])
    assert not calls


@pytest.mark.parametrize("learning", [[0], [0, 1], [1, 2], [0, 1, 2]], ids=str)
@pytest.mark.parametrize("count", [1, 2, 3])
def test_derivatives(count: int, learning: list[int], calls: list[str]) -> None:
    """First and second ones against finite differences, of x alone and together with weights."""
    given = tensors(Rng(3)("x").normal(2, 3, 4, 4).double())  # no ties, where there are no derivatives
    at = [given[i].requires_grad_() for i in learning]

    def made(*at: Tensor) -> frozen_norm.Outputs:
        now = dict(enumerate(given)) | dict(zip(learning, at, strict=True))
        return frozen_norm.block(*now.values(), count, EPSILON)

    with torch.random.fork_rng():  # the checks draw directions
        assert gradcheck(made, at)
        assert gradgradcheck(made, at)
    assert ("backward" in calls) == (learning == [0])


@pytest.mark.parametrize("count", [1, 2, 3])
def test_under_vmap_the_layers_run(count: int, calls: list[str]) -> None:
    """For a block that nobody should call there, and for many gradients at once of one that was made before."""
    x = images(2, 5, 3, 8, 8)
    w = tensors(x[0])[1:]
    each = [frozen_norm.layer_by_layer(one, *w, count, EPSILON) for one in x]
    found = torch.func.vmap(lambda x: frozen_norm.block(x, *w, count, EPSILON))(x)
    torch.testing.assert_close(list(found), [torch.stack(one) for one in zip(*each, strict=True)])
    assert not calls
    at = x[0].clone().requires_grad_()
    made, *_ = frozen_norm.block(at, *w, count, EPSILON)
    arriving = Rng(4)("grads").normal(2, *made.shape).double()
    expected = [grad(made, at, one, retain_graph=True)[0] for one in arriving]
    at_once = torch.func.vmap(lambda one: grad(made, at, one, retain_graph=True)[0])(arriving)
    torch.testing.assert_close(at_once, torch.stack(expected))
    assert calls == ["forward", "backward", "backward"]


def dreamer(name: str, count: int, side: int, width: int, **terms: Any) -> Dreamer:
    net = models.build(name, (3, side, side), 10, width=width, norm="batch")
    return Dreamer(Objective(net, tv=0.1, **terms), FreeDreams(count, (3, side, side)))


def dreams(dreamer: Dreamer, runner: Any, clients: int = 2, rounds: int = 1) -> Any:
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
@pytest.mark.parametrize(("name", "norms"), [("resnet9", 8), ("resnet18", 20)])
def test_dreams(name: str, norms: int, robust: float, calls: list[str], admit: Admit) -> None:
    """The whole objective; robust dreams differentiate inside of what is differentiated."""
    mine, place = dreamer(name, 3, side=16, width=4, robust=robust), Place(dtype=torch.float64)
    found = dreams(mine, Sequential(place))
    # of the dreams, and of the attack and of the attacked dreams
    assert calls.count("backward") == 2 * norms * (3 if robust else 1)
    calls.clear()
    admit("FROZEN_NORM", False)
    torch.testing.assert_close(found, dreams(mine, Sequential(place)))
    assert not calls


def share_off(found: Tensor, expected: Tensor, tolerance: float) -> float:
    """Of the numbers, the share that are wrong by more than so much of the largest."""
    off = (found.double() - expected.double()).abs() > tolerance * expected.abs().max()
    return float(off.double().mean())


@needs_gpu
@pytest.mark.parametrize("channels_last", [True, False])
@pytest.mark.parametrize(
    ("number", "channels", "height", "width"),
    [(64, 64, 32, 32), (7, 128, 16, 16), (3, 512, 4, 4), (5, 20, 6, 10), (2, 3, 8, 2), (1, 1, 2, 2)],
)
@pytest.mark.parametrize("count", [1, 2, 3])
def test_kernels_equal_the_layers(
    count: int, number: int, channels: int, height: int, width: int, channels_last: bool
) -> None:
    """Against the layers in float64. Rounding may let another of a square be the largest, but hardly ever does."""
    given = [one.cuda() for one in tensors(images(number, channels, height, width))]
    singles = [one.float() for one in given]
    if channels_last:
        singles[0] = singles[0].contiguous(memory_format=torch.channels_last)
    given[0].requires_grad_()
    expected = frozen_norm.layer_by_layer(*given, count, EPSILON)
    found = frozen_norm.forward(*singles, count, EPSILON)
    for one, other in zip(found, expected, strict=True):
        assert one.shape == other.shape
        assert share_off(one, other, 1e-5) == 0
    assert found[0].is_contiguous(memory_format=torch.channels_last)
    for chosen in (slice(0, 1), slice(1, 2), slice(2, 3), slice(0, 3)):
        grads = [torch.zeros_like(one) for one in expected]
        grads[chosen] = [Rng(4)(str(i)).normal(*one.shape).to(one) for i, one in enumerate(expected)][chosen]
        (to_x,) = grad(expected, given[0], grads, retain_graph=True)
        made = frozen_norm.backward(*(one.float() for one in grads), found[1], *singles, count, EPSILON)
        assert made.is_contiguous(memory_format=torch.channels_last)
        assert share_off(made, to_x, 1e-4) < 1e-3


@needs_gpu
def test_sizes_that_no_pooling_divides() -> None:
    given = [one.cuda() for one in tensors(images(5, 40, 7, 5))]
    for count in (1, 2):
        found = frozen_norm.forward(*(one.float() for one in given), count, EPSILON)
        for one, other in zip(found, frozen_norm.layer_by_layer(*given, count, EPSILON), strict=True):
            assert share_off(one, other, 1e-5) == 0


@needs_gpu
@pytest.mark.usefixtures("exact")
def test_second_derivatives_on_a_gpu() -> None:
    """The gradient of the squared length of the images' gradient."""
    w = {name: tensor.float().cuda() for name, tensor in weights(CHAIN).items()}
    x = Rng(3)("x").normal(4, 3, 8, 8).cuda().requires_grad_()

    def gradient(chain: tuple[Step, ...]) -> Tensor:
        (slope,) = grad(objective(chain, w, x), x, create_graph=True)
        return grad(slope.square().sum(), x)[0]

    assert share_off(gradient(blocks.bind_blocks(CHAIN)), gradient(bind_all(CHAIN)), 1e-3) == 0


@needs_gpu
@pytest.mark.parametrize("robust", [0.0, 0.1])
@pytest.mark.parametrize("name", ["resnet9", "resnet18"])
def test_dreams_on_a_gpu(name: str, robust: float, replays: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Both engines, and the stacked one's recorded graph, against the layers in float64."""
    monkeypatch.setattr(executor, "FILLS_A_GPU", 1)  # clients run one by one, as those of larger batches do
    mine = dreamer(name, 32, side=32, width=32, robust=robust)
    seen: list[str] = []
    whole = frozen_norm.backward
    monkeypatch.setattr(frozen_norm, "backward", lambda *given: (seen.append("backward"), whole(*given))[1])
    runner = Stacked(GPU)
    found = []
    for way, rounds in ((Sequential(GPU), 1), (runner, 1), (runner, 4)):
        found.append(dreams(mine, way, rounds=rounds))
        assert seen
        seen.clear()
    assert replays
    expected = dreams(mine, Sequential(Place(GPU.device, torch.float64)))
    assert not seen
    for one in found:
        for made, truth in zip(one, expected, strict=True):
            assert share_off(made["x"], truth["x"], 1e-3) < 1e-2
