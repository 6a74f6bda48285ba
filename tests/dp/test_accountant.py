"""What releases cost: pinned to published values, held to a second accountant, and to what must hold of any."""

import builtins
import math
from typing import Any

import pytest

from fedgist.core.errors import FedgistError
from fedgist.dp import accountant, gaussian
from fedgist.dp.accountant import CLIENT, RECORD, MissingLibrary, Release, epsilon, noise, read, together, units


def test_sampled_releases_are_pinned() -> None:
    """q = 0.01, σ = 1, 1,000 steps, δ = 1e-5: prv_accountant gives (1.8182, 1.8282, 1.8383), opacus' PRV 1.8384."""
    assert 1.818 < epsilon([Release(1.0, 0.01, 1000)], 1e-5) < 1.839


def test_a_second_accountant_agrees() -> None:
    """Rényi differential privacy bounds the same from above (2.1014 here), and for full batches from not far."""
    from dp_accounting import dp_event, rdp

    def renyi(release: Release) -> float:
        second = rdp.RdpAccountant()
        event = dp_event.PoissonSampledDpEvent(release.rate, dp_event.GaussianDpEvent(release.noise))
        return float(second.compose(event, release.times).get_epsilon(1e-5))

    assert renyi(Release(1.0, 0.01, 1000)) == pytest.approx(2.1014, abs=1e-3)
    for release in (Release(1.0, 0.01, 1000), Release(2.0, 0.1, 50), Release(5.0, 0.999999, 3)):
        assert 0.7 * renyi(release) < epsilon([release], 1e-5) < renyi(release)


def test_the_closed_form_and_the_library_agree_on_gaussians() -> None:
    """A rate just below 1 goes through the library, 1 through the closed form; and Gaussians compose by μ² = Σ μᵢ²."""
    exact = epsilon([Release(2.0), Release(3.0, times=4)], 1e-5)
    assert epsilon([Release((1 / 4 + 4 / 9) ** -0.5)], 1e-5) == pytest.approx(exact, rel=1e-9)
    assert exact <= epsilon([Release(2.0, 1 - 1e-9), Release(3.0, times=4)], 1e-5) < exact * 1.002


def test_noise_is_enough_and_not_much_more() -> None:
    for rate, times in ((1.0, 7), (0.05, 30)):
        needed = noise(1.0, 1e-5, rate, times)
        assert epsilon([Release(needed, rate, times)], 1e-5) <= 1.0 + 1e-12
        assert epsilon([Release(needed * 0.998, rate, times)], 1e-5) > 1.0


def test_noise_that_is_next_to_none_costs_more_than_any_budget() -> None:
    """The table of a sampled release grows with 1/σ²: at 1e-6 it would be larger than any memory."""
    assert epsilon([Release(1e-6, 0.1), Release(1.0, 0.1, 9)], 1e-5) == math.inf
    assert 100 < epsilon([Release(0.05, 0.1)], 1e-5) < math.inf


def test_equal_releases_are_counted() -> None:
    assert together([Release(2.0), Release(1.0, 0.5, 3), Release(2.0), Release(9.0, times=0)]) == (
        Release(1.0, 0.5, 3),
        Release(2.0, times=2),
    )


@pytest.mark.parametrize(
    "wrong",
    [
        {"noise": 0.0},
        {"noise": 1.0, "rate": 1.5},
        {"noise": float("nan")},
        {"noise": 1.0, "unit": "house"},
        {"noise": 1.0, "rate": 0.5, "unit": CLIENT},
    ],
)
def test_impossible_releases_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="no release"):
        Release(**wrong)


def test_without_the_library_only_sampled_releases_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def missing(name: str, *rest: Any) -> Any:
        if name.startswith("dp_accounting"):
            raise ImportError(name)
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", missing)
    accountant._epsilon.cache_clear()
    assert epsilon([Release(3.7306)], 1e-5) == pytest.approx(1, rel=1e-4)
    with pytest.raises(MissingLibrary, match=r"pip install 'fedgist\[privacy\]'.*plan=FILE"):
        epsilon([Release(3.0, 0.1)], 1e-5)


def test_units_are_never_mixed() -> None:
    """A client's contribution of norm C becomes another by a record: 2C, so half the noise. The way back is closed."""
    client, record = Release(10.0, times=3, unit=CLIENT), Release(5.0, times=2)
    assert client.counted_by(RECORD) == Release(5.0, times=3) and record.counted_by(RECORD) is record
    assert epsilon([client], 1e-5, CLIENT) == gaussian.epsilon(3**0.5 / 10, 1e-5)
    assert epsilon([client], 1e-5) == gaussian.epsilon(2 * 3**0.5 / 10, 1e-5)
    assert epsilon([client, record], 1e-5) == pytest.approx(gaussian.epsilon(5**0.5 / 5, 1e-5))
    with pytest.raises(FedgistError, match="hides no client"):
        epsilon([client, record], 1e-5, CLIENT)
    assert units([client]) == (CLIENT, RECORD) and units([client, record]) == units([record]) == units([]) == (RECORD,)
    assert len(together([Release(5.0, unit=CLIENT), record])) == 2
    assert [read(one.row()) for one in (client, record)] == [client, record] and "unit" not in record.row()
