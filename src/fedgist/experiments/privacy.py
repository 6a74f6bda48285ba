"""A run's differential privacy: what its configuration promises, the layer that keeps it, and how it is told."""

import logging
import math
from collections.abc import Mapping
from typing import Any

from fedgist.core.errors import FedgistError
from fedgist.core.method import Method
from fedgist.core.rng import Rng
from fedgist.dp import budget, randomness
from fedgist.dp.budget import Book, Limit
from fedgist.dp.discrete_gaussian import Bits
from fedgist.dp.releases import declared
from fedgist.engines.layer import Exchange, Layer
from fedgist.engines.private import Private, PrivateSite, Promise
from fedgist.engines.scheduler import Executor
from fedgist.experiments.config import RunConfig
from fedgist.experiments.folder import RunFolder

log = logging.getLogger("fedgist")


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
    if config.colluders >= config.clients:
        raise FedgistError(f"colluders must be fewer than the {config.clients} clients that there are")
    return Promise(config.epsilon, config.delta, "sum", config.clients, config.colluders, simulated)


def simulated(method: Method, config: RunConfig, records: Mapping[str, int], inner: Layer, executor: Executor) -> Layer:
    """The layer of a run in one process: noise from the run's seed, one book for each client's data."""
    made = promise(config, simulated=True)
    if made is None:
        return inner
    releases = declared(method, config.method)
    if warning := budget.risky(config.delta, max(records.values())):
        log.warning(warning)
    if made.noise == "sum":
        share = math.sqrt(len(records) / made.mechanism.addends)
        log.info(f"the noise of the sum is {share:.3g} times that of one party whom all trust")
    limit = Limit(made.epsilon, made.delta)

    def site(id: str) -> PrivateSite:
        def draw(exchange: Exchange, tag: str) -> Bits:
            named = Rng(config.seed, "differential privacy", id, exchange.version, tag)
            return randomness.simulated(named, executor.place.device)

        return PrivateSite(inner.site(id), made, releases, Book(), limit, draw)

    return Private(inner, made, releases, {id: site(id) for id in records})


def keep_books(layer: Layer, folder: RunFolder) -> None:
    """From now on what is released is written down in the run's folder."""
    if isinstance(layer, Private):
        for id, site in layer.sites.items():
            site.book = Book(folder.privacy / f"{id}.jsonl")


def told(layer: Layer) -> dict[str, Any]:
    """What the row of a round says."""
    return {"epsilon": layer.spent()} if isinstance(layer, Private) else {}


def promised(layer: Layer) -> dict[str, Any] | None:
    """What the result says: ε with all that belongs to it; None where there is none."""
    if not isinstance(layer, Private):
        return None
    made, about = layer.promise, {"unit": budget.UNIT, "against": layer.promise.against}
    return {"epsilon": layer.spent(), "budget": made.epsilon, "delta": made.delta, **about, "simulated": made.simulated}


def sentence(layer: Layer) -> str | None:
    """What a model card says; None where nothing is promised."""
    return layer.promise.sentence() if isinstance(layer, Private) else None
