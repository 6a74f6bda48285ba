"""Fed3R and AFL are the same algebra: on the same rows and with the same λ they have gist's W, in float64.

Ridge regression minimises Σ‖y − xW‖² + λ‖W‖², so that (Σxxᵀ + λI) W = Σxyᵀ. What the three take for x and λ differs:

    gist     x = φ − μ over all samples, and an intercept without a penalty; λ from the sums
    Fed3R    x = (φ, 1), so that the intercept has the penalty, too; λ = 0.01; then columns of W at norm 1
    AFL      x = φ, no intercept; each of K clients solves with γ = 1, the server takes off Kγ again: λ = 0
"""

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fedgist import methods
from fedgist.core.rng import Rng
from fedgist.engines import executor
from fedgist.engines.local import LocalEngine
from fedgist.experiments.config import resolve
from fedgist.experiments.inputs import from_dataset
from fedgist.features import drawn
from fedgist.learning.ridge import Ridge

Samples = Sequence[tuple[Tensor, Tensor]]


def afl(clients: Samples, gamma: float) -> tuple[Tensor, Tensor]:
    """AFL's W and C before γ is taken off: clients' own solutions, joined two at a time by its Theorem 1.

    With C_u = Σxxᵀ + γI and R_u = C_u⁻¹ of client u, W = A_u W_u + A_v W_v, where
    A_u = I − R_u C_v + R_u C_v (C_u + C_v)⁻¹ C_v, and A_v likewise.
    """
    one = torch.eye(clients[0][0].shape[1]).double()
    solved = [(torch.linalg.solve(x.T @ x + gamma * one, x.T @ y), x.T @ x + gamma * one) for x, y in clients]
    w, c = solved[0]
    for other, next_c in solved[1:]:
        both = torch.linalg.inv(c + next_c)

        def part(mine: Tensor, theirs: Tensor, both: Tensor = both) -> Tensor:
            return one - torch.linalg.solve(mine, theirs - theirs @ both @ theirs)

        w, c = part(c, next_c) @ w + part(next_c, c) @ other, c + next_c
    return w, c


def fed3r(clients: Samples, ridge: Tensor) -> Tensor:
    """Fed3R's W, the intercept last: sums of (φ, 1) on top of λ."""
    a, b = torch.diag(ridge), torch.zeros(len(ridge), clients[0][1].shape[1]).double()
    for x, y in clients:
        u = F.pad(x, (0, 1), value=1.0)
        a, b = a + u.T @ u, b + u.T @ y
    return torch.linalg.solve(a, b)


def made_up(sizes: Sequence[int] = (30, 1, 12, 40), d: int = 6, c: int = 3) -> list[tuple[Tensor, Tensor]]:
    """Clients of one class each, one of them with a single sample."""
    return [
        (Rng(k).normal(n, d).double() + 0.5, F.one_hot(torch.full((n,), k % c), c).double())
        for k, n in enumerate(sizes)
    ]


@pytest.mark.parametrize("gamma", [1.0, 0.05])
def test_afl_is_the_ridge_solution_of_the_union(gamma: float) -> None:
    """A_u W_u = (C_u + C_v)⁻¹ C_u W_u, as I − R_u C_v (I − (C_u + C_v)⁻¹ C_v) = I − R_u C_v (C_u + C_v)⁻¹ C_u, and
    C_u⁻¹ − (C_u + C_v)⁻¹ = C_u⁻¹ C_v (C_u + C_v)⁻¹. So W = (ΣC)⁻¹ Σxyᵀ, of λ = Kγ; with Kγ taken off, of λ = 0."""
    clients = made_up()
    x, y = (torch.cat(parts) for parts in zip(*clients, strict=True))
    ours = Ridge.of(x.T @ x, x.T @ y)
    w, c = afl(clients, gamma)
    assert torch.allclose(w, ours.weights(len(clients) * gamma), rtol=0, atol=1e-12)
    cleaned = torch.linalg.solve(c - len(clients) * gamma * torch.eye(len(w)).double(), c @ w)
    assert torch.allclose(cleaned, ours.weights(0.0), rtol=0, atol=1e-12)
    assert torch.allclose(cleaned, torch.linalg.lstsq(x, y).solution, rtol=0, atol=1e-12)


def test_fed3r_is_the_ridge_solution_of_rows_with_a_one() -> None:
    clients = made_up()
    x, y = (torch.cat(parts) for parts in zip(*clients, strict=True))
    u = F.pad(x, (0, 1), value=1.0)
    found = fed3r(clients, torch.full((7,), 0.01, dtype=torch.float64))
    assert torch.allclose(found, Ridge.of(u.T @ u, u.T @ y).weights(0.01), rtol=0, atol=1e-12)


def test_gist_is_both_where_they_take_its_rows_and_its_penalty() -> None:
    """A run with one class at each client, in float64. AFL on rows that are centred at everybody's mean, with γ = λ/K,
    is gist; so is Fed3R whose intercept has no penalty: the last row of its equations says b = ȳ − μW, which put into
    the others makes (Σφφᵀ − nμμᵀ + λI) W = Σφ(y − ȳ)ᵀ, gist's own."""
    ridge, clip = 0.01, 2.0
    settings = {"method": "gist", "features": "model", "ridge": str(ridge), "wire": "float64", "clip": clip}
    data = {"dataset": "digits", "limit": 300, "clients": 10, "device": "cpu", "model": "mlp:hidden=24"}
    config = resolve({**settings, **data})
    inputs = from_dataset(config)
    x, y = (torch.cat([getattr(site, name) for site in inputs.sites.values()]) for name in "xy")
    sites = {str(k): replace(inputs.sites["0"], x=x[y == k], y=y[y == k]) for k in range(10)}
    method = methods.find("gist")(config.options, inputs.task)
    info = {id: {"model": inputs.task.model} for id in sites}
    engine = LocalEngine(method, sites, seed=0, executor=executor("sequential", "cpu", torch.float64), info=info)
    engine.run_round()
    state = engine.state
    w = {name: tensor.double() for name, tensor in drawn(method.features, state["seed"]).items()}  # type: ignore[attr-defined]

    def rows(data: Tensor) -> Tensor:
        found: Tensor = method.features(w, data.double()) / clip  # type: ignore[attr-defined]
        return found

    mean = rows(x).mean(0)
    held = [(rows(site.x), F.one_hot(site.y, 10).double()) for site in sites.values()]
    centred = [(phi - mean, labels) for phi, labels in held]
    assert torch.allclose(afl(centred, ridge / 10)[0], state["weight"], rtol=0, atol=1e-8)
    found = fed3r(held, torch.tensor([ridge] * 24 + [0.0], dtype=torch.float64))
    assert torch.allclose(found[:-1], state["weight"], rtol=0, atol=1e-8)
    assert torch.allclose(found[-1], state["intercept"] - mean @ state["weight"], rtol=0, atol=1e-8)
