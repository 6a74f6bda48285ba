"""Which engine `auto` is."""

import logging
from typing import Any

import pytest
import torch

from fedgist.experiments import config as configs
from fedgist.experiments.engine_choice import WORTH_COMPILING, fitting_engine, samples_trained_on


def config(**given: Any) -> configs.RunConfig:
    return configs.resolve({"method": "fedavg", "dataset": "mnist", "clients": 100, "model": "lenet5", **given})


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedgist.engines.find_device", lambda name: torch.device("cuda" if name == "auto" else name))


def test_samples_of_a_run() -> None:
    assert samples_trained_on(config(rounds=10, steps=20, batch=32)) == 10 * 100 * 20 * 32
    assert samples_trained_on(config(rounds=10, steps=20, batch=1000)) == 10 * 100 * 20 * 600  # all that a client has
    assert samples_trained_on(config(rounds=10, epochs=2)) == 10 * 2 * 60_000
    assert samples_trained_on(config(rounds=10, epochs=2, limit=5000)) == 10 * 2 * 5000
    assert samples_trained_on(config(rounds=10, epochs=2, active=10)) == 10 * 2 * 6000
    assert samples_trained_on(config(rounds=10, epochs=2, active=0.1)) == 10 * 2 * 6000
    assert samples_trained_on(config(rounds=10, dataset="my-own")) == 0
    assert samples_trained_on(config(rounds=10, partition=configs.OWN)) == 0  # sites train, on machines of their own
    assert samples_trained_on(config(method="gist", rounds=10)) == 0


def test_long_runs_of_small_nets_are_compiled(gpu: None, caplog: pytest.LogCaptureFixture) -> None:
    long = {"epochs": 10, "rounds": WORTH_COMPILING // 600_000}
    assert fitting_engine(config(**long | {"rounds": long["rounds"] - 1})) == "stacked"
    assert not caplog.records
    with caplog.at_level(logging.WARNING, "fedgist"):
        assert fitting_engine(config(**long)) == "compiled"
    assert "steps are compiled, because clients are to train on 150 million samples" in caplog.text
    assert "engine=stacked" in caplog.text


@pytest.mark.parametrize("net", ["convnet", "resnet18", "vgg13"])
def test_nets_whose_time_is_convolutions_are_not(gpu: None, net: str) -> None:
    assert fitting_engine(config(model=net, epochs=100, rounds=1000)) == "stacked"
    assert fitting_engine(config(architectures=("lenet5", net), epochs=100, rounds=1000)) == "stacked"


def test_on_a_cpu_nothing_is_compiled(gpu: None) -> None:
    assert fitting_engine(config(epochs=100, rounds=1000, device="cpu")) == "threaded"
    assert fitting_engine(config(model="mlp", epochs=100, rounds=1000, device="cpu")) == "stacked"
