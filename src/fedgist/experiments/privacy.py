"""A run's differential privacy: what its configuration promises, the layer that keeps it, and how it is told."""

import dataclasses
import logging
import math
from bisect import bisect_left
from pathlib import Path
from typing import Any

import torch

from fedgist import methods
from fedgist.core.errors import FedgistError
from fedgist.core.method import Method
from fedgist.core.rng import Rng
from fedgist.dp import accountant, budget, randomness
from fedgist.dp.accountant import CLIENT, UNITS
from fedgist.dp.budget import Book, Limit, Plan
from fedgist.dp.releases import Declared, Noisy, declared, declares, trains, unit
from fedgist.engines.layer import Exchange, Layer, Plain
from fedgist.engines.private import Private, PrivateSite, Promise
from fedgist.experiments import adversaries, security
from fedgist.experiments.config import RunConfig
from fedgist.experiments.folder import RunFolder
from fedgist.experiments.inputs import Inputs
from fedgist.secure.graph import threshold

log = logging.getLogger("fedgist")


APART = "scores on samples of the clients' own, which have no noise"
"""What nothing is promised of: those that are held out of clients' data, or chosen by their labels."""


def promise(config: RunConfig, simulated: bool) -> Promise | None:
    """What the configuration promises of each client's data; None where it promises nothing."""
    if config.epsilon is None:
        return None
    if config.normalise == "train":
        raise FedgistError("normalise=train tells the mean of all training data: take another in a private run")
    if config.topology is not None or config.delay:
        raise FedgistError("a private run has a server and no late replies: leave out topology and delay")
    if config.finish is not None:
        raise FedgistError("a finish gets no noise: leave it out of a private run, or make one of gist alone")
    if config.dp_noise == "local":
        return Promise(config.epsilon, config.delta, "local", simulated=simulated)
    if not simulated and not config.secure:
        raise FedgistError(
            "dp_noise=sum protects sums alone: add --secure masks, which lets the server see nothing else"
        )
    if config.defence is not None:
        raise FedgistError(
            "a defence looks at single replies, or has them clipped one by one, and dp_noise=sum hides nothing but "
            "their sum: set dp_noise to local, or leave out defence"
        )
    if config.secure and security.read(config.secure).bits < 64:
        raise FedgistError(
            "32 bits have no room for all that a client may hold beside its part of the noise: leave out bits"
        )
    least = fewest(config)
    if config.colluders < (bad := adversaries.count(config)):
        raise FedgistError(
            f"bad clients may leave out their noise: set colluders to {bad} at least, or leave out adversary"
        )
    if config.colluders >= least:
        raise FedgistError(f"colluders must be fewer than the {least} clients that a sum is over at least")
    return Promise(config.epsilon, config.delta, "sum", least, config.colluders, simulated)


def planned(config: RunConfig) -> RunConfig:
    """The configuration with the noise that its budget allows, where that is left open."""
    options = config.options
    if config.epsilon is None or not isinstance(options, Noisy) or options.noise_multiplier:
        return config
    if not declares(methods.find(config.method)):
        return config  # it will be refused
    rate, steps = options.sampling, config.rounds * options.private_steps
    plan = plan_of(config)
    known = [one for one in budget.known_plans() if one.fits(config.epsilon, config.delta, rate, steps)]
    if plan or known:
        noise = (plan or known[0]).noise(rate, steps)
    else:
        noise = accountant.noise(config.epsilon, config.delta, rate, steps)
    return dataclasses.replace(config, options=dataclasses.replace(config.options, noise_multiplier=noise))


def plan_of(config: RunConfig) -> Plan | None:
    """The file that vouches for the noise, where one is given."""
    return None if config.plan is None else Plan.load(Path(config.plan))


def fewest(config: RunConfig) -> int:
    """The fewest clients whose sum is opened: all of them, or as many as a secure sum needs."""
    return threshold(config.clients) if config.secure else config.clients


def excess(made: Promise, clients: int) -> float:
    """The noise in a sum over all clients, as a multiple of what one party whom all trust would add."""
    return math.sqrt(clients / made.mechanism.addends)


def over_signal(method: Method, config: RunConfig, clients: int) -> float:
    """Where clients are the unit: how far noise moves the model in all rounds, over how far updates can at most.

    In the mean over n clients a round's noise has the norm f z C √D/n, and is another in every round: over R rounds it
    leads √R times as far. Updates of norm C lead R C far, where all agree and go straight on.
    """
    made = promise(dataclasses.replace(config, clients=clients), simulated=True)
    assert made is not None
    noise = excess(made, clients) * config.options.noise_multiplier
    return float(noise * math.sqrt(method.model.size / config.rounds) / clients)


def _check_clients(method: Method, config: RunConfig, releases: Declared, made: Promise) -> None:
    """Refuses to hide clients where they are too few for anything to be learned, or says that it is so."""
    n, rounds, size = config.clients, config.rounds, method.model.size
    if unit(releases) != CLIENT or (ratio := over_signal(method, config, n)) <= 1:
        return
    enough = bisect_left(range(1 << 40), -1.0, lo=n, key=lambda clients: -over_signal(method, config, clients))
    mean = ratio * math.sqrt(rounds)
    told = (
        f"{n:,} clients are too few to hide each of them with all of its records at ε = {config.epsilon:g}: noise of "
        f"{mean * n / math.sqrt(size):.3g} C in a round's sum of {size:,} numbers moves their mean by {mean:.3g} C, "
        f"√{size}/{n} times it, and the model by {ratio * rounds:.3g} C in {rounds:,} rounds, √{rounds} times that; "
        f"updates of norm C move it by {rounds:,} C at most, and {enough:,} clients could move it as far as the noise"
    )
    if not getattr(config.options, "few_clients", False):
        other = "dp_noise=sum, " if made.noise == "local" else ""
        raise FedgistError(
            f"{told}. Or take {other}a larger epsilon, a smaller model, or few_clients=true to see it fail"
        )
    log.warning(f"{told}; with few_clients=true it runs all the same")


def _settled(method: Method, config: RunConfig, simulated: bool) -> tuple[Promise, Declared, Limit] | None:
    """What is promised, what a method releases under it, and the budget; None where nothing is promised."""
    made = promise(config, simulated)
    if made is None:
        return None
    releases = declared(method, config.method)
    if trains(releases) and made.noise != "local":
        raise FedgistError(
            "clients that train have noise of their own, each enough for itself: set dp_noise to local, or take "
            "fedsgd, whose clients send sums of gradients"
        )
    _check_clients(method, config, releases, made)
    return made, releases, Limit(made.epsilon, made.delta, plan_of(config), unit(releases))


def simulated(
    method: Method, inputs: Inputs, config: RunConfig, inner: Layer | None, device: torch.device
) -> Layer | None:
    """The layer of a run in one process: noise from the run's seed, one book for each client's data."""
    if (settled := _settled(method, config, simulated=True)) is None:
        return inner
    (made, releases, limit), inner = settled, inner or Plain()
    if config.tf32 and hasattr(config.options, "record_clip"):
        raise FedgistError(
            "tf32 rounds what was clipped by a thousandth, and beyond the clip: leave it out of a private run"
        )
    number = len(inputs.sites) if limit.unit == CLIENT else max(data.n for data in inputs.sites.values())
    if warning := budget.risky(config.delta, number, limit.unit):
        log.warning(warning)
    if _apart(config):
        log.warning(f"ε does not count {APART}: with validation or client_test, they are in the metrics all the same")

    def site(id: str) -> PrivateSite:
        def draw(exchange: Exchange, tag: str) -> randomness.Noise:
            named = Rng(config.seed, "differential privacy", id, exchange.version, tag)
            return randomness.rounded(named, device)

        return PrivateSite(inner.site(id), made, releases, Book(), limit, draw)

    return Private(inner, made, releases, {id: site(id) for id in inputs.sites}, limit)


def across(method: Method, config: RunConfig, inner: Layer | None) -> Layer | None:
    """The server's half of the layer of a run across sites, which have books and noise of their own."""
    if (settled := _settled(method, config, simulated=False)) is None:
        return inner
    made, releases, limit = settled
    return Private(inner or Plain(), made, releases, {}, limit)


def _apart(config: RunConfig) -> bool:
    return bool(config.validation) or config.client_test == "own-labels"


def keep_books(layer: Layer, folder: RunFolder) -> None:
    """From now on what is released is written down in the run's folder."""
    if isinstance(layer, Private):
        for id, site in layer.sites.items():
            site.book = Book(folder.privacy / f"{id}.jsonl", synced=False)


def told(layer: Layer) -> dict[str, Any]:
    """What the row of a round says."""
    return {"epsilon": layer.spent(), "unit": layer.unit} if isinstance(layer, Private) else {}


def promised(layer: Layer, method: Method, config: RunConfig) -> dict[str, Any] | None:
    """What the result says: ε with all that belongs to it; None where there is none."""
    if not isinstance(layer, Private):
        return None
    made = layer.promise
    about: dict[str, Any] = {"unit": UNITS[layer.unit], "against": layer.against, "simulated": made.simulated}
    if made.noise == "sum" and layer.sites:
        about["noise over that of one trusted party"] = excess(made, len(layer.sites))
    if layer.unit == CLIENT:
        about["noise over the most that clients can move"] = over_signal(method, config, config.clients)
    if _apart(config):
        about["not counted"] = APART
    return {"epsilon": layer.spent(), "budget": made.epsilon, "delta": made.delta, **about}


def sentence(layer: Layer, config: RunConfig) -> str | None:
    """What a model card says; None where nothing is promised."""
    if not isinstance(layer, Private):
        return None
    return layer.sentence() + (f"; not counted are {APART}" if _apart(config) else "")
