"""Noise for declared sums: as much as declared, on a grid, and found out by an audit where it is less."""

import math
from dataclasses import dataclass

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from scipy import stats
from torch import Tensor

import fedgist.api as fg
from auditing import least_mu
from fedgist.core.rng import Rng
from fedgist.dp import gaussian
from fedgist.dp.discrete_gaussian import LARGEST
from fedgist.dp.randomness import exact, simulated
from fedgist.dp.releases import Mechanism, Sum, Sums, declared, samples, unit

MU = gaussian.mu(4.0, 1e-5)
SUMS = Sums({"a": Sum(2.0, 0.3), "b": Sum(0.5, 0.7)})
N = 20_000


def scores(mechanism: Mechanism, record: dict[str, float], factor: float = 1.0) -> tuple[Tensor, Tensor]:
    """N releases without and with a record: how much each looks like it was there, by the likelihood of Gaussians."""
    worlds = []
    for there in (0.0, 1.0):
        leaves = {name: torch.full((N,), there * size, dtype=torch.float64) for name, size in record.items()}
        noised = mechanism.noised(SUMS, leaves, exact(simulated(Rng(int(there)))))
        weights = {name: size / mechanism.sigma(SUMS.fields[name], SUMS) ** 2 for name, size in record.items()}
        clean = sum(leaves[name] * weight for name, weight in weights.items())
        found = sum(noised[name] * weight for name, weight in weights.items())
        worlds.append(clean + factor * (found - clean))
    return worlds[0], worlds[1]


def test_the_audit_finds_all_that_was_promised_and_no_more() -> None:
    audited = least_mu(*scores(Mechanism(MU), {"a": 2.0, "b": 0.5}))
    assert 0.94 * MU < audited < MU


@pytest.mark.parametrize(
    ("record", "factor"),
    [({"a": 2.0, "b": 0.5}, 0.9), ({"a": 2.0, "b": 0.5}, 0.5), ({"a": 6.0, "b": 0.5}, 1.0)],
    ids=["nine tenths of the noise", "half the noise", "a broken clip"],
)
def test_the_audit_flags_planted_faults(record: dict[str, float], factor: float) -> None:
    assert least_mu(*scores(Mechanism(MU), record, factor)) > MU


def test_the_noise_of_a_field_is_its_own() -> None:
    """σ = Δ/(μ√s); the cost of all fields is that of the reply; chi-square on every field, within one in a million."""
    mechanism = Mechanism(MU)
    cost = sum((one.sensitivity / mechanism.sigma(one, SUMS)) ** 2 for one in SUMS.fields.values())
    assert mechanism.release(SUMS).noise ** -2 == pytest.approx(cost) == pytest.approx(MU**2)
    noised = mechanism.noised(SUMS, {name: torch.zeros(N).double() for name in "ab"}, exact(simulated(Rng(4))))
    for name, one in SUMS.fields.items():
        spread = (noised[name] / mechanism.sigma(one, SUMS)).square().sum().item()
        assert 1e-6 < stats.chi2.cdf(spread, N) < 1 - 1e-6


def test_parts_of_the_noise_add_up() -> None:
    """Ten addends with a tenth of σ² each: their sum has the noise of one party whom all trust."""
    alone, shared = Mechanism(MU), Mechanism(MU, addends=10)
    zeros = {name: torch.zeros(N).double() for name in "ab"}
    parts = [shared.noised(SUMS, zeros, exact(simulated(Rng(k)))) for k in range(10)]
    total = sum(part["a"] for part in parts)
    assert 1e-6 < stats.chi2.cdf((total / alone.sigma(SUMS.fields["a"], SUMS)).square().sum().item(), N) < 1 - 1e-6
    assert shared.release(SUMS) == alone.release(SUMS)


@settings(deadline=None, max_examples=60)
@example(mu=0.001953125, sensitivity=99.0, share=0.01, numbers=716393)
@given(st.floats(1e-3, 1e3), st.floats(1e-3, 1e3), st.floats(0.01, 1.0), st.integers(1, 10_000_000))
def test_the_grid(mu: float, sensitivity: float, share: float, numbers: int) -> None:
    """σ is a whole number of steps, a step a power of two, and what rounding may add to Δ is paid for."""
    one, mechanism = Sum(sensitivity, share), Mechanism(mu)
    if 2 * math.sqrt(numbers) / (mu * math.sqrt(share)) > LARGEST / 2:
        with pytest.raises(fg.FedgistError, match="finds no room on a grid"):
            mechanism.grid(one, Sums({}), numbers)
        return
    step, steps = mechanism.grid(one, Sums({}), numbers)
    assert math.log2(step).is_integer() and LARGEST // 8 < steps <= LARGEST
    with_rounding = sensitivity + 2 * math.sqrt(numbers) * step
    assert with_rounding / (steps * step) <= mu * math.sqrt(share) * (1 + 1e-9)


def test_what_would_break_the_promise_is_refused() -> None:
    for leaf, says in ((torch.zeros(3), "float64"), (torch.full((3,), math.nan).double(), "not finite")):
        with pytest.raises((TypeError, ValueError), match=says):
            Mechanism(MU).noised(SUMS, {"a": leaf}, exact(simulated(Rng(0))))


@fg.message
class Total:
    """Sums."""

    a: Tensor = fg.wire(fg.float64, shape=("n",), additive=True)


@fg.message
class Shown:
    """Seen of each."""

    a: Tensor = fg.wire(fg.float64, shape=("n",))


@fg.message
class Two:
    """Two sums."""

    a: Tensor = fg.wire(fg.float64, shape=("n",), additive=True)
    b: Tensor = fg.wire(fg.float64, shape=("n",), additive=True)


@dataclass
class Declares:
    given: dict[type, Sums]

    @property
    def releases(self) -> dict[type, Sums]:
        return self.given


def test_declarations_are_whole() -> None:
    good = {Total: Sums({"a": Sum(1.0, 1.0)})}
    assert declared(Declares(good), "toy") is good
    with pytest.raises(fg.FedgistError, match="fedavg has no differentially private form"):
        declared(object(), "fedavg")
    with pytest.raises(fg.FedgistError, match=r"must add up to 1, not to 0\.5"):
        declared(Declares({Total: Sums({"a": Sum(1.0, 0.5)})}), "toy")
    for wrong in ({Total: Sums({})}, {Shown: Sums({"a": Sum(1.0, 1.0)})}):
        with pytest.raises(TypeError, match="every field of a release"):
            declared(Declares(wrong), "toy")


def test_a_cost_is_of_one_field() -> None:
    """The planted fault: two fields with noise z each cost √2 of what one is charged."""
    one, cost = Sum(1.0, 0.0), fg.Release(2.0)
    assert declared(Declares({Total: Sums({"a": one}, release=cost)}), "toy")
    wrong = Sums({"a": one, "b": one}, release=cost)
    truly = sum((field.sensitivity / Mechanism(MU).sigma(field, wrong)) ** 2 for field in wrong.fields.values())
    assert truly == pytest.approx(2 * Mechanism(MU).release(wrong).noise ** -2)
    with pytest.raises(TypeError, match="a release with a cost of its own has one field"):
        declared(Declares({Two: wrong}), "toy")


def test_all_of_a_run_is_about_one_unit() -> None:
    records, clients = (Sums({"a": Sum(1.0, 0.0)}, release=fg.Release(2.0, unit=one)) for one in ("record", "client"))
    assert unit({Total: records}) == "record" and unit({Total: clients}) == "client"
    assert unit({Total: Sums({"a": Sum(1.0, 1.0)})}) == "record"
    with pytest.raises(TypeError, match="about the same unit"):
        declared(Declares({Total: clients, Shown: fg.NoisySteps(fg.Release(1.0))}), "toy")  # type: ignore[dict-item]


def test_only_releases_of_some_records_are_about_secret_samples() -> None:
    for told, expected in ((None, False), (fg.Release(2.0), False), (fg.Release(2.0, rate=0.5), True)):
        assert samples({Total: Sums({"a": Sum(1.0, 0.0 if told else 1.0)}, release=told)}) is expected
