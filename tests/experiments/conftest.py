"""A small comparison that the tests of the report share: methods of every kind, one of them with two seeds."""

from pathlib import Path

import pytest

from fedgist.experiments import config as configs
from fedgist.experiments import runner

GROUND = {"dataset": "digits", "clients": 3, "device": "cpu"}


@pytest.fixture(scope="session")
def comparison(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a folder for every method."""
    base = tmp_path_factory.mktemp("comparison")
    for method in ("independent", "feddm", "codream", "tofu", "repshare"):
        runner.run(configs.resolve({"method": method, **GROUND}, profile="toy"), base / method)
    for seed in (0, 1):
        config = configs.resolve({"method": "fedavg", **GROUND, "rounds": 3, "seed": seed}, profile="toy")
        runner.run(config, base / "fedavg" / f"seed-{seed}")
    return base
