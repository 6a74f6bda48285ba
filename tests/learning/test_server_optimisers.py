"""The adaptive servers' second moments, by hand; tests/methods/test_weight_baselines.py has whole rounds in numpy."""

import pytest
import torch

from fedgist.learning.server_optimisers import ServerAdagrad, ServerAdam, ServerYogi


def test_the_three_second_moments() -> None:
    """For v = 1: Adagrad adds Δ²; Adam goes (1 − β₂) of the way to Δ²; Yogi goes (1 − β₂) Δ² towards it, up or down."""
    v, square = torch.tensor([1.0, 1.0, 1.0]), torch.tensor([0.25, 1.0, 4.0])
    for optimiser, expected in (
        (ServerAdagrad(), [1.25, 2.0, 5.0]),
        (ServerAdam(beta2=0.9), [0.925, 1.0, 1.3]),
        (ServerYogi(beta2=0.9), [0.975, 1.0, 1.4]),
    ):
        assert optimiser.second_moment(v, square).tolist() == pytest.approx(expected)
