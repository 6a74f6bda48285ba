"""The bound of an audit by canaries: it finds what there is, also where canaries have much in common, and no more."""

import pytest
import torch
from torch import Tensor

from fedgist.dp.audit import least_mu_by_canaries

COUNT, NUMBERS = 400, 600


def release(seed: int, noise: float = 1.0, counted: float = 1.0, common: float = 0.0) -> tuple[Tensor, Tensor, Tensor]:
    """C Cᵀ, C r and the coins of a release whose canaries move it by 1.5 each, partly in the same direction."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    own, shared = normal(COUNT, NUMBERS), normal(NUMBERS)
    canaries = own / own.norm(dim=1, keepdim=True) + common * shared / shared.norm()
    canaries = 1.5 * canaries / canaries.norm(dim=1, keepdim=True)
    coins = torch.rand(COUNT, generator=generator) < 0.5
    seen = (counted * coins.double() - 0.5) @ canaries + noise * normal(NUMBERS)
    return canaries @ canaries.T, canaries @ seen, coins


@pytest.mark.parametrize("common", [0.0, 1.0])
def test_it_stays_below_what_there_is_and_comes_near_it(common: float) -> None:
    found = [least_mu_by_canaries(*release(seed, common=common)) or 0.0 for seed in range(20)]
    assert max(found) < 1.5 and sum(found) / 20 > 0.5 * 1.5


@pytest.mark.parametrize("fault", [{"noise": 0.5}, {"counted": 3.0}])
def test_it_sees_half_the_noise_and_records_that_count_three_times(fault: dict[str, float]) -> None:
    assert all((least_mu_by_canaries(*release(seed, **fault)) or 0.0) > 1.5 for seed in range(10))


def test_too_few_canaries_say_nothing() -> None:
    gram, seen, coins = release(0)
    assert least_mu_by_canaries(gram[:20, :20], seen[:20], coins[:20]) is None
