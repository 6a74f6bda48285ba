"""Normal numbers by a kernel: those that torch's operations make."""

import pytest
import torch

from fedgist.core import rng
from fedgist.core.rng import Rng
from fedgist.synthesis.gaussian import gaussian, normal

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")


def test_without_a_gpu_they_are_those_of_rng() -> None:
    seed = Rng(0).seeds(1)[0]
    assert torch.equal(normal(seed, (3, 5)), rng.normal(seed, (3, 5)))


@needs_gpu
@pytest.mark.parametrize("count", [0, 1, 2, 7, 2047, 320_778])
def test_the_kernel_makes_the_same_numbers(count: int) -> None:
    for seed in Rng(1).seeds(3).cuda():
        made = normal(seed, (count,))
        torch.testing.assert_close(made, rng.normal(seed, (count,)), rtol=2e-6, atol=2e-6)
        assert torch.equal(made, gaussian(seed, count))


@needs_gpu
def test_it_vmaps() -> None:
    seeds = Rng(2).seeds(5).cuda()
    apart = torch.stack([normal(seed, (3, 5)) for seed in seeds])
    assert torch.equal(torch.func.vmap(lambda seed: normal(seed, (3, 5)))(seeds), apart)
    same = torch.func.vmap(lambda x: normal(seeds[0], (4,)) + x)(torch.zeros(2, device="cuda"))
    assert torch.equal(same, normal(seeds[0], (4,)).expand(2, 4))


@needs_gpu
def test_other_types_have_torch_s_own_operations() -> None:
    seed = Rng(3).seeds(1)[0]
    found = normal(seed.cuda(), (100,), torch.float64)
    torch.testing.assert_close(found.cpu(), normal(seed, (100,), torch.float64))
