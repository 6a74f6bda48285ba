"""The weight of a client, by every way of weighing."""

from dataclasses import dataclass

import pytest
import torch

from fedgist.core.errors import FedgistError
from fedgist.core.federation import Site
from fedgist.core.rng import Rng
from fedgist.data.client_data import ClientData
from fedgist.families.participation import active_option, client_weight, n_ref_option, weighting_option
from fedgist.options import build


@dataclass(frozen=True)
class Weighted:
    active: float = active_option()
    weighting: str = weighting_option("inverse")
    n_ref: int = n_ref_option()
    noise_multiplier: float = 0.0


def weight(n: int, **settings: object) -> float:
    data = ClientData(torch.zeros(n, 1, 1, 1), torch.zeros(n, dtype=torch.int64), 2)
    return client_weight(build(Weighted, settings), Site("7", 1, data, {}, Rng(0), {}))


@pytest.mark.parametrize(("weighting", "expected"), [("samples", 0.3), ("uniform", 1.0), ("inverse", 1 / 3)])
def test_three_samples(weighting: str, expected: float) -> None:
    assert weight(3, weighting=weighting, n_ref=10) == expected


@pytest.mark.parametrize("weighting", ["samples", "uniform", "inverse"])
def test_who_has_no_data_has_no_weight(weighting: str) -> None:
    assert weight(0, weighting=weighting) == 0


@pytest.mark.parametrize("weighting", ["samples", "uniform", "inverse"])
def test_the_reference_is_the_most_that_anybody_may_hold(weighting: str) -> None:
    """A weight above 1 would lose its last digits when it is summed with others."""
    assert 0 < weight(10, weighting=weighting, n_ref=10) <= 1
    with pytest.raises(FedgistError, match=r"^client 7 holds 11 samples: set n_ref to at least that$"):
        weight(11, weighting=weighting, n_ref=10)


def test_samples_are_the_usual_weight_and_all_take_part() -> None:
    assert weight(1 << 20) == 1
    assert Weighted().active == 0
    with pytest.raises(FedgistError, match="active must be at least 0"):
        build(Weighted, {"active": -1})
