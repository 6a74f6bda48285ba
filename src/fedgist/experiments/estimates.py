"""How long the presets' runs take here: a table of reference times, by how fast this machine is beside its machine.

`benchmarks/reference_times.py` writes the table, presets/estimates.json: seconds of one core, by the names of runs.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from itertools import pairwise
from typing import Any

import torch

from fedgist import engines, methods
from fedgist.core.rng import Rng
from fedgist.experiments import config as configs
from fedgist.experiments import inputs as sources
from fedgist.experiments.config import RunConfig
from fedgist.experiments.folder import read_json
from fedgist.experiments.presets import HERE, run_of
from fedgist.experiments.runner import in_process

REFERENCE = HERE / "estimates.json"
NETS, STEPS, ROUNDS = ("lenet5", "convnet:width=32"), 10, 4


class Estimates:
    """What the table says of runs, for this machine."""

    def __init__(self) -> None:
        self.reference: dict[str, Any] = read_json(REFERENCE)

    def get(self, config: RunConfig) -> float | None:
        """Seconds of one core; None where nobody has timed such a run."""
        seconds = self.reference["seconds"].get(run_of(config))
        return None if seconds is None else seconds * self.factor

    @cached_property
    def factor(self) -> float:
        """How many times as long as the reference machine this one takes."""
        return calibration() / float(self.reference["calibration"])

    def how(self) -> str:
        """Where the figures come from."""
        return f"counted on another machine ({self.reference['machine']}), times {self.factor:.2g} here"


def calibration() -> float:
    """Milliseconds of one core for a training step of each of two nets: how fast this machine is."""
    with one_core():
        return sum(map(_milliseconds, NETS))


def _milliseconds(net: str) -> float:
    """Of a step, in the fastest of a few rounds: the first warms up, and others may be disturbed."""
    layer = {"method": "fedavg", "dataset": configs.OWN, "partition": configs.OWN, "clients": 1, "device": "cpu"}
    config = configs.resolve(layer, {"model": net, "steps": STEPS})
    data = Rng(0)("images").uniform(100, 1, 28, 28), torch.arange(100) % 10
    inputs = sources.from_memory(config, {"0": data}, data)
    method = methods.find(config.method)(config.options, inputs.task)
    engine = in_process(method, inputs, config, engines.executor("sequential"))
    clock = [time.process_time()]
    for _ in range(ROUNDS):
        engine.run_round()
        clock.append(time.process_time())
    return 1000 * min(after - before for before, after in pairwise(clock)) / STEPS


@contextmanager
def one_core() -> Iterator[None]:
    """The process's clock counts every core, those too that only wait for the others."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
