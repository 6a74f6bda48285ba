"""Named randomness: the same name gives the same numbers; the expanded noise has the law it claims."""

import math

import pytest
import torch
from scipy import stats

from fedgist.core.rng import Rng, normal, uniform


def test_names() -> None:
    a = Rng(1)("client", 3, "batches")
    assert torch.equal(a.normal(5), Rng(1)("client")(3, "batches").normal(5))
    others = [Rng(2)("client", 3, "batches"), Rng(1)("client", "3", "batches"), Rng(1)("client", 3), Rng(1)]
    assert len({a.seed, *(other.seed for other in others)}) == 5
    assert torch.equal(a.permutation(9).sort().values, torch.arange(9))
    assert a.integers(3, 100).unique().tolist() == [0, 1, 2]
    assert a.numpy().random() == a.numpy().random()


def test_expanded_noise_has_its_law() -> None:
    """Kolmogorov and Smirnov: 100,000 numbers, refused at one in a thousand; the seeds are fixed."""
    for seed in Rng(0).seeds(3):
        assert stats.kstest(uniform(seed, (100_000,)).numpy(), "uniform").pvalue > 1e-3
        assert stats.kstest(normal(seed, (100_000,)).numpy(), "norm").pvalue > 1e-3


def test_expanded_noise_is_uncorrelated_between_seeds_and_places() -> None:
    """Correlations of n = 100,000 independent numbers have deviation 1/√n; five of them are allowed."""
    a, b = (normal(torch.tensor(seed), (100_000,)) for seed in (7, 8))
    for x, y in ((a, b), (a[1:], a[:-1]), (a[:50_000], a[50_000:])):
        assert abs((x * y).mean().item()) < 5 / math.sqrt(len(x))


def test_uniform_never_reaches_its_ends() -> None:
    drawn = uniform(torch.tensor(0), (1_000_000,))
    assert drawn.min().item() > 0
    assert drawn.max().item() < 1


@pytest.mark.parametrize("shape", [(), (3,), (2, 5)])
def test_expanded_noise_under_vmap(shape: tuple[int, ...]) -> None:
    seeds = Rng(0).seeds(4)
    stacked = torch.func.vmap(lambda seed: normal(seed, shape, torch.float64))(seeds)
    assert torch.equal(stacked, torch.stack([normal(seed, shape, torch.float64) for seed in seeds]))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # the compiler's own
def test_expanded_noise_compiles() -> None:
    seed = torch.tensor(Rng(5).seed)
    assert torch.equal(torch.compile(uniform)(seed, (100,)), uniform(seed, (100,)))
