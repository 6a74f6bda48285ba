"""Inputs standardised by everybody's numbers: one exchange of sums before the first round (`normalise=sums`).

Of each channel (of a table: column) for which no numbers are public, every client sends how many samples it has, Σx and
Σx². The server sees the sums over clients alone, and tells all of them

    mean = Σx / n        deviation = √(Σx² / n − mean²)

This is round 0, of a method of its own, on the same clients: engines and core know nothing of it, and whatever lies
between clients and server, as a secure sum, lies between them here.
"""

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from fedgist.core.errors import FedgistError
from fedgist.core.federation import Federation, Site, State
from fedgist.core.message import Bounds, Exactly, float64, message, wire
from fedgist.core.method import Method, handler
from fedgist.core.task import Samples, Task
from fedgist.core.work import compute
from fedgist.experiments.config import RunConfig
from fedgist.experiments.folder import RunFolder, read_json
from fedgist.experiments.inputs import Inputs
from fedgist.options import option

SUMS = "sums"
"""The value of `normalise` that asks for the exchange."""
CHUNK = 4096
"""Samples at once."""
CONSTANT = 1e-12
"""The share of Σx² / n below which a variance is nothing but rounding."""


@message
class Tell:
    """Send the sums of your samples."""


@message
class Sums:
    """How many samples there are, and of each channel the sum of its values and of their squares."""

    n: float = wire(float64, additive=True, low=0)
    total: Tensor = wire(float64, shape=("channels",), additive=True, per="n")
    squares: Tensor = wire(float64, shape=("channels",), additive=True, low=0, per="n")


@dataclass(frozen=True)
class Channels:
    """Which channels the exchange is about."""

    channels: tuple[int, ...] = option((), "Channels of an input, or columns of a table, from 0.", low=0)


class Standardise(Method[Channels]):
    """The exchange; the server's state is what came out, `mean` and `std` of the channels."""

    name = "standardise"
    summary = "Mean and deviation of each channel over all clients' samples, from sums."

    def __init__(self, config: Channels, task: Task):
        super().__init__(config, task)
        if not config.channels or max(config.channels) >= task.shape[0]:
            raise FedgistError(f"inputs with {task.shape[0]} channels have no sums of channels {config.channels}")

    def bounds(self, model: str) -> Bounds:
        return {**super().bounds(model), "channels": Exactly(len(self.config.channels))}

    async def round(self, state: State, fed: Federation) -> State:
        found = (await fed.ask(fed.ids, Tell(), Sums)).sum
        values = float(found.n) * math.prod(self.task.shape[1:])
        if not values:
            raise FedgistError("normalise=sums: nobody who answered has a sample, so that there is nothing to sum")
        mean, square = found.total.cpu().double() / values, found.squares.cpu().double() / values
        variance = square - mean**2
        known = variance > CONSTANT * square  # a constant channel has nothing to scale
        return {"mean": mean, "std": torch.where(known, variance, 1.0).sqrt()}

    async def evaluate(self, state: State, fed: Federation, test: Samples) -> dict[str, float]:
        return {}

    @handler
    async def tell(self, me: Site, msg: Tell) -> Sums:
        total, squares = await compute(column_sums, me.data.x, torch.tensor(self.config.channels))
        return Sums(float(me.data.n), total, squares)


def column_sums(x: Tensor, channels: Tensor) -> tuple[Tensor, Tensor]:
    """Of each channel the sum of its values and of their squares, in float64."""
    total, squares = (torch.zeros(len(channels), dtype=float64, device=x.device) for _ in range(2))
    for part in x.split(CHUNK):
        wide = part.index_select(1, channels.to(x.device)).double().movedim(1, 0).flatten(1)
        total, squares = total + wide.sum(1), squares + wide.square().sum(1)
    return total, squares


def method(inputs: Inputs) -> Standardise:
    """The method of the exchange for these inputs."""
    if not inputs.unstated:
        raise FedgistError(
            "normalise=sums: the data files state mean and deviation of every column, so that there is nothing to "
            "exchange; leave it out, or write {} for a column in columns.toml"
        )
    return Standardise(Channels(inputs.unstated), inputs.task)


def numbers(state: State) -> dict[str, list[float]]:
    """What came out, as it is kept in the folder of the run."""
    return {name: state[name].tolist() for name in ("mean", "std")}


def recalled(config: RunConfig, inputs: Inputs, folder: RunFolder) -> Inputs:
    """The inputs of a run as its clients agreed on them, once more."""
    return applied(inputs, read_json(folder.standardisation)) if config.normalise == SUMS else inputs


def applied(inputs: Inputs, found: dict[str, list[float]]) -> Inputs:
    """The inputs, of which those channels become (x − mean) / deviation; a tensor that is shared stays shared."""
    task, place = inputs.task, list(inputs.unstated)
    mean, std = torch.zeros(task.shape[0]), torch.ones(task.shape[0])
    mean[place], std[place] = (torch.tensor(found[name], dtype=torch.float32) for name in ("mean", "std"))
    done: dict[int, Tensor] = {}

    def scaled(x: Tensor) -> Tensor:
        if id(x) not in done:
            centre, scale = (one.to(x.device).view(-1, *[1] * (x.dim() - 2)) for one in (mean, std))
            done[id(x)] = (x - centre) / scale
        return done[id(x)]

    def both(samples: Samples) -> Samples:
        return scaled(samples[0]), samples[1]

    def whole(kept: tuple[float, ...], new: list[float], usual: float) -> tuple[float, ...]:
        values = list(kept) or [usual] * task.shape[0]
        for channel, value in zip(place, new, strict=True):
            values[channel] = value
        return tuple(values)

    def end(ends: tuple[float, ...]) -> tuple[float, ...]:
        return tuple(((torch.tensor(ends) - mean) / std).tolist())

    sites: dict[str, Any] = {
        id: replace(one, x=scaled(one.x), test=None if one.test is None else both(one.test))
        for id, one in inputs.sites.items()
    }
    proxy = None if task.proxy is None else scaled(task.proxy)
    about = whole(task.mean, found["mean"], 0.0), whole(task.std, found["std"], 1.0)
    task = replace(task, low=end(task.low), high=end(task.high), proxy=proxy, mean=about[0], std=about[1])
    return replace(inputs, task=task, sites=sites, test=both(inputs.test))
