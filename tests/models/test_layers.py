"""Norm layers against torch's own."""

import pytest
import torch
from torch import nn
from torch.func import grad, vmap

from fedgist.core.rng import Rng
from fedgist.core.task import Tap
from fedgist.models.layers import AvgPool, MaxPool, Moments, Norm, channel_moments

RNG = Rng(3)("norms")


def close(a, b):
    torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)


def norm_weights(channels):
    return {
        "n.weight": RNG("w").normal(channels).double(),
        "n.bias": RNG("b").normal(channels).double(),
        "n.running_mean": RNG("m").normal(channels).double(),
        "n.running_var": RNG("v").uniform(channels).double() + 0.5,
    }


@pytest.mark.parametrize(("oracle", "size"), [(nn.BatchNorm2d, (3, 5)), (nn.BatchNorm1d, ())])
def test_batch_norm_equals_torch_over_several_steps(oracle, size):
    step, module = Norm("batch", 4).bind("n"), oracle(4).double()
    w = norm_weights(4)
    module.load_state_dict({k.removeprefix("n."): v for k, v in w.items()} | {"num_batches_tracked": torch.tensor(0)})
    for i in range(4):
        x = 3 * RNG("x", i).normal(6, 4, *size).double() + 1
        new = {}
        close(step(w, x, new, None), module.train()(x))
        assert new.keys() == {"n.running_mean", "n.running_var"}
        w |= new
        close(w["n.running_mean"], module.running_mean)
        close(w["n.running_var"], module.running_var)
        close(step(w, x, None, None), module.eval()(x))


def test_batch_norm_in_float32_keeps_a_small_variance():
    """The variance comes back from 1/√(v + ε): a channel that hardly varies must not lose it to rounding."""
    step, module = Norm("batch", 2).bind("n"), nn.BatchNorm2d(2)
    w = {k: v.float() for k, v in norm_weights(2).items()} | {"n.running_var": torch.zeros(2)}
    module.running_var.zero_()
    x = RNG("tiny").normal(8, 2, 4, 4) * torch.tensor([1e-3, 1e2]).view(2, 1, 1)
    new = {}
    step(w, x, new, None)
    module(x)
    torch.testing.assert_close(new["n.running_var"], module.running_var, rtol=1e-5, atol=1e-12)


def test_a_constant_channel_never_gets_a_negative_variance():
    step = Norm("batch", 64).bind("n")
    w = {k: v.float() for k, v in norm_weights(64).items()} | {"n.running_var": torch.zeros(64)}
    new = {}
    step(w, torch.linspace(-9, 9, 64).expand(7, 64), new, None)
    assert (new["n.running_var"] >= 0).all()


@pytest.mark.parametrize("size", [(1, 1), ()])
def test_one_value_a_channel_gives_the_bias_and_keeps_the_variance(size):
    step, w = Norm("batch", 4).bind("n"), norm_weights(4)
    x = RNG("one").normal(1, 4, *size).double()
    new = {}
    close(step(w, x, new, None).flatten(), w["n.bias"])
    close(new["n.running_mean"], 0.9 * w["n.running_mean"] + 0.1 * x.flatten())
    assert torch.equal(new["n.running_var"], w["n.running_var"])


@pytest.mark.parametrize(
    ("kind", "channels", "oracle"),
    [
        ("instance", 6, nn.InstanceNorm2d(6, affine=True)),
        ("group", 6, nn.GroupNorm(1, 6)),  # groups of two channels or more
        ("group", 16, nn.GroupNorm(8, 16)),
        ("group", 5, nn.GroupNorm(1, 5)),
        ("group", 64, nn.GroupNorm(32, 64)),
        ("group", 512, nn.GroupNorm(32, 512)),
    ],
)
def test_stateless_norms_equal_torch(kind, channels, oracle):
    w = {k: v for k, v in norm_weights(channels).items() if "running" not in k}
    oracle = oracle.double()
    oracle.load_state_dict({k.removeprefix("n."): v for k, v in w.items()})
    x = RNG("x").normal(5, channels, 3, 4).double()
    new, tap = {}, []
    close(Norm(kind, channels).bind("n")(w, x, new, tap), oracle(x))
    assert new == {}
    assert tap == []


@pytest.mark.parametrize("train", [False, True])
def test_tap_gives_what_enters_against_what_is_remembered(train):
    """The statistics that train mode mixes into the running ones are the tapped ones: r' = 0.9 r + 0.1 s."""
    step, w = Norm("batch", 4).bind("n"), norm_weights(4)
    x = 2 * RNG("x").normal(6, 4, 3, 5).double() - 1
    tap, new = [], {} if train else None
    tapped = step(w, x, new, tap)
    close(tapped, step(w, x, {} if train else None, None))
    [entry] = tap
    assert entry.running_mean is w["n.running_mean"]
    assert entry.running_variance is w["n.running_var"]
    close(entry.mean, x.mean((0, 2, 3)))
    close(entry.variance, x.var((0, 2, 3), correction=0))
    if train:
        close(new["n.running_mean"], 0.9 * w["n.running_mean"] + 0.1 * entry.mean)
        close(new["n.running_var"], 0.9 * w["n.running_var"] + 0.1 * entry.variance * 90 / 89)


def test_tapped_statistics_are_differentiable_and_vmap():
    """d/dx of Σ mean = 1/n for every value; d/dx of Σ variance = 2 (x − mean)/n."""
    step, w = Norm("batch", 4).bind("n"), norm_weights(4)
    x = RNG("x").normal(3, 6, 4, 2, 2).double()

    def total(x, which):
        tap = Tap()
        step(w, x, None, tap)
        return tap[0][which].sum()

    close(vmap(grad(lambda x: total(x, 0)))(x), torch.full_like(x, 1 / 24))
    close(vmap(grad(lambda x: total(x, 1)))(x), 2 * (x - x.mean((1, 3, 4), keepdim=True)) / 24)


@pytest.mark.parametrize("shape", [(5, 3), (2, 3, 4, 5)])
def test_moments_in_one_pass(shape):
    """What a GPU takes: values, first and second derivatives, and many clients at once, as by plain means."""
    x = Rng(0).normal(3, *shape).double()
    plain, fast = channel_moments, Moments.apply

    def loss(function):
        return lambda x: sum((moment * (1 + moment)).sin().sum() for moment in function(x))

    for one, other in zip(fast(x[0]), plain(x[0]), strict=True):
        close(one, other)
    close(vmap(grad(loss(fast)))(x), vmap(grad(loss(plain)))(x))
    with torch.random.fork_rng():
        assert torch.autograd.gradcheck(fast, x[0].requires_grad_())
        assert torch.autograd.gradgradcheck(fast, x[0].detach().requires_grad_())


@pytest.mark.parametrize(
    ("shape", "size"), [((16, 6, 8, 8), 2), ((3, 2, 7, 9), 2), ((12, 1, 9, 10), 3), ((0, 2, 4, 4), 2)]
)
def test_max_pooling_is_torchs_to_the_bit(shape, size):
    """With two derivatives, and where none is asked for; also where values are equal, as after a ReLU, and where one is
    no number."""
    step, found = MaxPool(size).bind("p"), []
    for pool in (lambda x: step({}, x, None, None), lambda x: torch.max_pool2d(x, (size, size))):
        x = RNG("pool").normal(*shape).relu().round(decimals=1)
        x[2:3, 0, :2, 1] = torch.nan
        x.requires_grad_()
        out = pool(x)
        up = RNG("up").normal(*out.shape).requires_grad_()
        (down,) = torch.autograd.grad(out, x, up, create_graph=True)
        (second,) = torch.autograd.grad(down, up, RNG("down").normal(*shape))
        found.append([out, down, second, pool(x.detach())])
    for ours, torchs in zip(*found, strict=True):
        assert torch.equal(ours.nan_to_num(nan=7.0), torchs.nan_to_num(nan=7.0))


@pytest.mark.parametrize(
    ("shape", "size"), [((6, 3, 8, 8), 2), ((3, 2, 7, 9), 2), ((2, 1, 9, 10), 3), ((2, 2, 3, 3), 1), ((0, 2, 4, 4), 2)]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_average_pooling_is_torchs_to_the_bit(shape, size, dtype):
    """With its gradient, and where none is asked for."""
    step, found = AvgPool(size).bind("p"), []
    for pool in (lambda x: step({}, x, None, None), lambda x: torch.nn.functional.avg_pool2d(x, size)):
        x = RNG("pool").normal(*shape).to(dtype).requires_grad_()
        out = pool(x)
        (down,) = torch.autograd.grad(out, x, RNG("up").normal(*out.shape).to(dtype))
        with torch.no_grad():
            found.append([out, down, pool(x)])
    for ours, torchs in zip(*found, strict=True):
        assert torch.equal(ours, torchs)


def test_average_pooling_has_two_derivatives():
    step, x = AvgPool().bind("p"), RNG("pool").normal(2, 3, 4, 6).double().requires_grad_()
    with torch.random.fork_rng():
        assert torch.autograd.gradcheck(lambda x: step({}, x, None, None), x)
        assert torch.autograd.gradgradcheck(lambda x: step({}, x, None, None).square(), x)
