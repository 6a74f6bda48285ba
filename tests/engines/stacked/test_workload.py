"""How much work a step is: what its operations write, forwards and backwards."""

import torch
from torch import Tensor

from fedgist.core.work import Chunks, Compute, Place, Scan, gradient
from fedgist.engines.stacked.workload import numbers_written


def sines(x: Tensor) -> Tensor:
    return x.sin().view(2, 3)[0].cos()


def slope(x: Tensor) -> Tensor:
    return gradient(lambda at: (at.exp(), ()), x)[0]


def step(carry: Tensor, x: Tensor, const: Tensor) -> Tensor:
    return carry + x * const


def test_views_write_nothing() -> None:
    assert numbers_written(Compute(sines, (torch.zeros(6),)), Place()) == 6 + 3


def test_gradients_count() -> None:
    """eˣ, the one that is its gradient's gradient, and their product."""
    assert numbers_written(Compute(slope, (torch.zeros(()),)), Place()) >= 3


def test_a_scan_counts_one_step_without_its_inputs() -> None:
    for xs in (torch.ones(7, 4), Chunks(lambda seed, first, count: torch.ones(count, 4), 0, 7)):
        assert numbers_written(Scan(step, torch.zeros(4), xs, (torch.ones(4),)), Place()) == 8
