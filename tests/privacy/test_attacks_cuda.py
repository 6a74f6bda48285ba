"""On a GPU the attacks find what they find on a CPU, up to rounding."""

from pathlib import Path
from typing import Any

import pytest
import torch

from fedgist.experiments import config as configs
from fedgist.experiments import curiosity, runner
from fedgist.experiments.folder import RunFolder

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")

GROUND = {"dataset": "digits", "clients": 4, "partition": "dirichlet", "alpha": 0.3, "limit": 300, "device": "cpu"}
RUNS: dict[str, dict[str, Any]] = {
    "fedavg": {"model": "mlp:hidden=32", "rounds": 2, "steps": 1, "batch": 4, "lr": 0.1},
    "feddm": {"model": "mlp:hidden=8", "rounds": 1, "steps": 2, "min_class": 2, "ipc": 2, "server_epochs": 1},
    "gist": {"rounds": 3, "offline": 0.2},
    "tofu": {"model": "mlp:hidden=8", "rounds": 3, "steps": 2, "batch": 4, "images": 2, "iterations": 5},
}


@pytest.mark.parametrize("method", RUNS)
def test_every_attack_scores_the_same_as_on_a_cpu(method: str, tmp_path: Path) -> None:
    runner.run(configs.resolve({**GROUND, **RUNS[method], "method": method, "record": ("all",)}), tmp_path / "run")
    here, there = (
        [one.as_json() for one in curiosity.attack_all(RunFolder(tmp_path / "run"), effort=5, device=device)]
        for device in ("cpu", "cuda")
    )
    assert any(one["value"] is not None for one in here)
    for a, b in zip(here, there, strict=True):
        numbers = {name: value for name, value in a.items() if isinstance(value, float)}
        assert {name: b[name] for name in numbers} == pytest.approx(numbers, rel=0.02, abs=0.02), a["attack"]
        assert {name: b[name] for name in b if name not in numbers} == {n: a[n] for n in a if n not in numbers}
