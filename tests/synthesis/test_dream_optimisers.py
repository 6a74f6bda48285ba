"""The server's optimisers against torch and numpy, and what rounding on the wire keeps."""

import numpy as np
import pytest
import torch
from torch import Tensor

from fedgist.core import tree
from fedgist.core.rng import Rng
from fedgist.synthesis.dream_optimisers import DistAdam, FedAdam, FedAvg, decode, dream_optimiser, encode, grid


def updates(count: int) -> list[dict[str, Tensor]]:
    return [{"x": Rng(0)(i).normal(3, 4).double()} for i in range(count)]


def test_distadam_is_adam() -> None:
    """The same trajectory as torch.optim.Adam given the same gradients."""
    v = {"x": Rng(1).normal(3, 4).double()}
    theirs = v["x"].clone().requires_grad_()
    adam = torch.optim.Adam([theirs], lr=0.05)
    ours = DistAdam(0.05)
    state = ours.init(v)
    for gradient in updates(20):
        theirs.grad = gradient["x"]
        adam.step()
        v, state = ours.step(v, gradient, state)
    torch.testing.assert_close(v["x"], theirs.detach(), rtol=1e-12, atol=1e-12)


def test_fedadam_is_that_of_reddi_et_al() -> None:
    """Algorithm 2 in numpy: no bias correction, second moments from τ², steps along +Δ."""
    lr, beta1, beta2, tau = 0.03, 0.9, 0.99, 1e-3
    v = {"x": Rng(1).normal(3, 4).double()}
    x, m, u = v["x"].numpy().copy(), np.zeros((3, 4)), np.full((3, 4), tau**2)
    ours = FedAdam(lr)
    state = ours.init(v)
    for delta in updates(20):
        d = delta["x"].numpy()
        m, u = beta1 * m + (1 - beta1) * d, beta2 * u + (1 - beta2) * d**2
        x = x + lr * m / (np.sqrt(u) + tau)
        v, state = ours.step(v, delta, state)
    np.testing.assert_allclose(v["x"].numpy(), x, rtol=1e-12)


def test_fedavg_adds_the_mean() -> None:
    v, (delta,) = {"x": torch.ones(3, 4).double()}, updates(1)
    moved, _ = FedAvg(0.5).step(v, delta, {})
    torch.testing.assert_close(moved["x"], 1 + 0.5 * delta["x"])


def test_rates_of_the_server() -> None:
    """Unless given: 1 for FedAvg, the dreams' rate for FedAdam; DistAdam has the dreams' rate only."""
    assert dream_optimiser("distadam", 0.2, 3.0) == DistAdam(0.2)
    assert dream_optimiser("fedavg", 0.2, None) == FedAvg(1.0) != dream_optimiser("fedavg", 0.2, 0.5)
    assert dream_optimiser("fedadam", 0.2, None) == FedAdam(0.2) != dream_optimiser("fedadam", 0.2, 0.5)


def test_eight_bits_add_up_exactly() -> None:
    """On a common grid the sum of rounded updates is a whole number for each value, whoever adds it up, and how."""
    parts = [tree.scale(update, 20.0) for update in updates(5)]
    sent = [encode(part, 8, Rng(9)(i)) for i, part in enumerate(parts)]
    assert all(one["x"].dtype == torch.uint8 for one in sent)
    total = {"x": sum(one["x"].long() for one in sent)}
    found = decode(total, len(sent), 8)["x"]
    each = sum(decode(one, 1, 8)["x"] for one in sent)
    assert torch.equal(found, each)
    exact = sum(part["x"] for part in parts)
    assert float((found - exact).abs().max()) < len(parts)  # each is off by less than one


def test_eight_bits_are_right_on_average_and_saturate() -> None:
    small = {"x": torch.full((200, 200), 0.3)}
    assert float(decode(encode(small, 8, Rng(0)), 1, 8)["x"].mean()) == pytest.approx(0.3, abs=0.01)
    large = {"x": torch.tensor([1e6, -1e6, 127.0, -127.0])}
    assert decode(encode(large, 8, Rng(0)), 1, 8)["x"].tolist() == [127, -127, 127, -127]


def test_sixteen_bits_keep_eleven_of_the_mantissa() -> None:
    """Gradients of a batch mean are so small that float16 would lose them; on the grid they are of the order of 1."""
    tiny = {"x": Rng(0).normal(1000) * 1e-9}
    assert encode(tiny, 16, Rng(0))["x"].count_nonzero() == 0
    unit = grid(tiny, 16)
    back = encode(tree.scale(tiny, 1 / unit), 16, Rng(0))["x"].float() * unit
    torch.testing.assert_close(back, tiny["x"], rtol=2**-11, atol=1e-13)


@pytest.mark.parametrize("bits", [16, 8])
def test_the_grid_is_a_power_of_two_with_headroom(bits: int) -> None:
    update = {"a": torch.tensor([0.3, -0.7]), "b": torch.tensor([0.1])}
    unit = grid(update, bits)
    assert np.log2(unit) == int(np.log2(unit))
    assert 0.7 / unit <= {16: 1, 8: 127 / 4}[bits] < 2 * 0.7 / unit
    assert grid(update, 32) == 1.0
    assert grid({"x": torch.zeros(2)}, bits) == 1.0
