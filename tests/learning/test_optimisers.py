"""The functional optimisers against torch.optim, alone and under vmap."""

import pytest
import torch

from fedgist.core import tree
from fedgist.core.rng import Rng
from fedgist.core.work import stacking
from fedgist.learning.optimisers import SGD, Adam, Optimiser, optimiser

CASES = [
    (SGD(), torch.optim.SGD, {}),
    (SGD(0.9, 0.01), torch.optim.SGD, {"momentum": 0.9, "weight_decay": 0.01}),
    (Adam(), torch.optim.Adam, {}),
    (Adam(0.5, 0.9, 1e-3, 0.1), torch.optim.Adam, {"betas": (0.5, 0.9), "eps": 1e-3, "weight_decay": 0.1}),
]


@pytest.mark.parametrize(("ours", "theirs", "settings"), CASES)
@pytest.mark.parametrize("under_vmap", [False, True])
def test_against_torch(ours: Optimiser, theirs: type, settings: dict[str, object], under_vmap: bool) -> None:
    """Five steps with changing gradients and learning rates, in float64, to a few units in the last place."""
    rng = Rng(0)
    w = {"a": rng("a").normal(3, 2).double(), "b": rng("b").normal(4).double()}
    reference = {name: value.clone().requires_grad_() for name, value in w.items()}
    optimizer = theirs(reference.values(), lr=1.0, **settings)
    state = ours.init(w)
    for step in range(5):
        grads = {name: rng("gradient", name, step).normal(*value.shape).double() for name, value in w.items()}
        lr = torch.tensor(0.1 / (step + 1), dtype=torch.float64)
        if under_vmap:
            with stacking():
                one = torch.func.vmap(ours.step, in_dims=(0, 0, 0, None))
                stacked = one(*tree.map(lambda t: t[None], (w, grads, state)), lr)
            w, state = tree.map(lambda t: t[0], stacked)
        else:
            w, state = ours.step(w, grads, state, lr)
        for name, value in reference.items():
            value.grad = grads[name]
        optimizer.param_groups[0]["lr"] = lr.item()
        optimizer.step()
    for name, value in reference.items():
        torch.testing.assert_close(w[name], value.detach(), rtol=1e-12, atol=1e-14)


def test_names() -> None:
    assert optimiser("sgd", 0.5, 0.1) == SGD(0.5, 0.1)
    assert optimiser("adam", 0.5, 0.1) == Adam(weight_decay=0.1)
