"""How far local steps go, by an optimiser whose gradients are unit vectors."""

import pytest
import torch

from fedgist.learning.local_updates import effective_steps
from fedgist.learning.optimisers import SGD


@pytest.mark.parametrize("momentum", [0.0, 0.5, 0.9])
@pytest.mark.parametrize("steps", [0, 1, 7])
def test_effective_steps_are_what_sgd_takes(momentum: float, steps: int) -> None:
    """The gradient of step s is the s-th unit vector, so that −w/η is the vector a itself, and Σ_s a_s its sum."""
    optimiser, w = SGD(momentum), {"w": torch.zeros(max(1, steps), dtype=torch.float64)}
    state = optimiser.init(w)
    for unit in torch.eye(max(1, steps), dtype=torch.float64)[:steps]:
        w, state = optimiser.step(w, {"w": unit}, state, 0.25)
    assert effective_steps(steps, momentum) == pytest.approx(-w["w"].sum().item() / 0.25, rel=1e-12)
