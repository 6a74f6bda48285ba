"""Sums of features as a GPU records them: no number may come from the host while it does."""

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from fedgist.core.rng import Rng
from fedgist.features import Ground, Moments, Sizes, build
from fedgist.models import build as build_model


class FromTheHost(TorchDispatchMode):
    """Notes what makes a tensor of Python's numbers, whose copy no CUDA graph can record."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.ops.aten.lift_fresh.default:
            self.seen.append(str(function))
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("names", ["scattering", "fourier", "convolutions", "model+scattering"])
def test_no_number_comes_from_the_host(names: str) -> None:
    shape, sizes = (3, 16, 16), Sizes(grid=2, scales=2, orientations=4, dimensions=16, bandwidth=1.0)
    ground = Ground(shape, (0.0,) * 3, (1.0,) * 3, build_model("mlp", shape, 3, hidden=(8,)))
    moments = Moments(build(names, ground, sizes), 3, clip=2.0, mirrored=True)
    w = {name: tensor.float() for name, tensor in moments.features.weights(Rng(0)).items()}
    pool = {"x": Rng(1).uniform(5, *shape), "y": torch.arange(5) % 3}
    plan = {"index": torch.arange(5)[None], "mask": torch.ones(1, 5)}
    mean = torch.zeros(moments.features.size)
    with FromTheHost() as host:
        moments.first(plan, pool, w)
        moments.second(plan, pool, w, mean)
        moments.hits(plan, pool, w, mean, torch.zeros(2, len(mean), 3), torch.zeros(3))
        assert not host.seen
        torch.tensor(1.0)
    assert len(host.seen) == 1
