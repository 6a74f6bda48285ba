"""Gist under differential privacy: no record moves a release by more than declared, whatever it is; an audit agrees."""

from dataclasses import replace
from functools import cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from auditing import least_mu
from fedgist import methods
from fedgist.core.errors import FedgistError
from fedgist.core.rng import Rng
from fedgist.data.client_data import ClientData
from fedgist.dp import gaussian
from fedgist.dp.randomness import exact, simulated
from fedgist.dp.releases import Mechanism, Sums
from fedgist.experiments.config import resolve
from fedgist.experiments.inputs import from_dataset
from fedgist.features import drawn
from fedgist.methods.gist import First, Gist, Second

SETTINGS = {"method": "gist", "dataset": "digits", "limit": 40, "clients": 1, "device": "cpu", "epsilon": 4.0}
SMALL = {"grid": 1, "scales": 1, "orientations": 2, "clip": 0.3}
MU = gaussian.mu(4.0, 1e-5)
N = 20_000


@cache
def setting(**options: object) -> tuple[Gist, ClientData]:
    config = resolve({**SETTINGS, **SMALL, **options})
    inputs = from_dataset(config)
    (data,) = inputs.sites.values()
    return methods.find("gist")(config.options, inputs.task), data  # type: ignore[return-value]


def sums(method: Gist, data: ClientData) -> dict[type, dict[str, Tensor]]:
    """What a client would send, without noise; the second around a mean that is not its own."""
    plan = data.epochs(Rng(0), 1, 64)
    public = {name: tensor.float() for name, tensor in drawn(method.features, 7).items()}
    mean = torch.full((method.features.size,), 0.3)
    first = method.moments.first(plan, data.pool, public)
    second = method.moments.second(plan, data.pool, public, mean)
    return {
        First: dict(zip(("features", "labels"), first, strict=True)),
        Second: dict(zip(("products", "targets"), second, strict=True)),
    }


def with_record(data: ClientData, record: Tensor, label: int) -> ClientData:
    return replace(data, x=torch.cat([data.x, record[None]]), y=torch.cat([data.y, torch.tensor([label])]))


def test_noise_is_not_multiplied_where_classes_are_rare() -> None:
    with pytest.raises(FedgistError, match="balance is for sums without noise"):
        setting(balance=True)


PIXELS = st.floats(allow_nan=True, allow_infinity=True, width=32)


@settings(deadline=None, max_examples=40)
@given(st.lists(PIXELS, min_size=64, max_size=64), st.integers(0, 9), st.sampled_from([0.0, 1e30, 1e-30]))
def test_no_record_moves_a_field_by_more_than_declared(pixels: list[float], label: int, scale: float) -> None:
    method, data = setting()
    record = torch.tensor(pixels).view(1, 8, 8) * (scale or 1.0)
    before, after = sums(method, data), sums(method, with_record(data, record, label))
    for reply, declared in method.releases.items():
        for name, one in declared.fields.items():
            moved = torch.linalg.vector_norm(after[reply][name] - before[reply][name]).item()
            assert moved <= one.sensitivity * (1 + 1e-9), name


def audited(method: Gist, record: Tensor, factor: float = 1.0, clip: float = 1.0) -> float:
    """The μ that both releases together have at least, by N of them with and without a record."""
    _, data = setting()
    without, moved = sums(method, data), sums(method, with_record(data, record, 3))
    mechanism, worlds = Mechanism(MU), []
    for there in (0, 1):
        score = torch.zeros(N, dtype=torch.float64)
        for reply, declared in method.releases.items():
            for name, one in declared.fields.items():
                difference = clip * (moved[reply][name] - without[reply][name])
                # What is seen along the direction in which the record moves the field: all that there is to see.
                along = torch.full((N,), there * torch.linalg.vector_norm(difference).item(), dtype=torch.float64)
                alone = Sums({name: one}, declared.times)
                noised = mechanism.noised(alone, {name: along}, exact(simulated(Rng(there, name))))[name]
                weight = torch.linalg.vector_norm(difference).item() / mechanism.sigma(one, declared) ** 2
                score = score + weight * (along + factor * (noised - along))
        worlds.append(score)
    return least_mu(*worlds)


def loud() -> Tensor:
    """A record far from the mean, so that it is clipped: what it adds is as long as it may be."""
    return torch.zeros(1, 8, 8).index_fill_(1, torch.tensor([0, 2, 4, 6]), 50.0)


def test_an_audit_of_both_asks_finds_what_is_promised_and_no_more() -> None:
    assert 0.9 * MU < audited(setting()[0], loud()) < MU


@pytest.mark.parametrize(("factor", "clip"), [(0.9, 1.0), (0.5, 1.0), (1.0, 3.0)])
def test_it_flags_nine_tenths_of_the_noise_half_of_it_and_a_broken_clip(factor: float, clip: float) -> None:
    assert audited(setting()[0], loud(), factor, clip) > MU


def test_all_of_the_budget_is_spent_and_no_more() -> None:
    """μ² = Δ₁²/σ₁² + 1/τ_S² + a/τ_V², which is what the releases are charged."""
    method, mechanism = setting()[0], Mechanism(MU)
    spent = sum(mechanism.release(declared).noise ** -2 for declared in method.releases.values())
    assert spent == pytest.approx(MU**2)
    by_hand = sum(
        (one.sensitivity / mechanism.sigma(one, declared)) ** 2
        for declared in method.releases.values()
        for one in declared.fields.values()
    )
    assert by_hand == pytest.approx(MU**2)
