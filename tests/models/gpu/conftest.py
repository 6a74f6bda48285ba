"""What the tests of kernels share."""

from collections.abc import Callable, Iterator
from types import SimpleNamespace

import pytest
import torch

from fedgist.core.work import Place
from fedgist.engines.scheduler import gpu_arithmetic
from fedgist.models.gpu import blocks


@pytest.fixture
def exact() -> Iterator[None]:
    """No TF32."""
    with gpu_arithmetic(Place(torch.device("cuda"))):
        yield


@pytest.fixture
def admit(monkeypatch: pytest.MonkeyPatch) -> Callable[[str, bool], None]:
    """Lets kernels, by the name of their limits, take all activations or none."""

    def change(limits: str, everything: bool) -> None:
        monkeypatch.setattr(blocks, limits, SimpleNamespace(admit=lambda *_, **__: everything))

    return change


@pytest.fixture
def replays(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Grows with every replay of a CUDA graph."""
    seen: list[str] = []
    replay = torch.cuda.CUDAGraph.replay
    monkeypatch.setattr(torch.cuda.CUDAGraph, "replay", lambda graph: (seen.append("replay"), replay(graph))[1])
    return seen
