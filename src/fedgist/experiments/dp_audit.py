"""Does a private run keep its promise? Its configuration once more, with canaries among the records of one client.

A canary is a test sample with a random label; a fair coin each decides whether it is among the records. An adversary
who knows everything but the coins and the noise looks for every canary in what was sent. So one run holds as many
experiments in two worlds as there are canaries (Steinke et al. 2023), and how well the worlds can be told apart bounds
μ, and so ε, from below (as Nasr et al. 2023 do for Gaussian noise).

An audit can show that a promise is broken, never that it is kept.
"""

import dataclasses
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fedgist import engines, methods
from fedgist.core.codec import Leaves
from fedgist.core.errors import FedgistError
from fedgist.core.federation import Site
from fedgist.core.method import Method, handler_for
from fedgist.core.rng import Rng
from fedgist.data.client_data import ClientData
from fedgist.dp import gaussian
from fedgist.dp.audit import least_mu_by_canaries
from fedgist.dp.discrete_gaussian import Bits
from fedgist.dp.releases import Sums
from fedgist.engines.engine import answer, client_rng
from fedgist.engines.layer import Exchange, SiteAround, SiteLayer
from fedgist.engines.local import LocalEngine
from fedgist.engines.private import Private, PrivateSite
from fedgist.engines.scheduler import drive_one
from fedgist.experiments import inputs as sources
from fedgist.experiments import runner
from fedgist.experiments.config import RunConfig

CONFIDENCE = 0.999
"""So sure is the bound: an audit of a run that keeps its promise finds fault with it once in a thousand times."""


@dataclass(frozen=True)
class Verdict:
    """What an audit found, beside what the run promises."""

    canaries: int
    included: int
    least: float
    """The ε that the run has at least."""
    promised: float
    delta: float

    @property
    def broken(self) -> bool:
        return self.least > self.promised


@dataclass(eq=False)
class Sight:
    """What is seen of one reply: what was asked, what the records gave, and what was sent of it."""

    exchange: Exchange
    request: type
    asked: Leaves
    reply: type = object
    given: Leaves = dataclasses.field(default_factory=dict)
    sent: Leaves = dataclasses.field(default_factory=dict)


class Sent(SiteAround):
    """Between the noise of a site and what lies inside it: what really goes out."""

    def __init__(self, inner: SiteLayer, sights: list[Sight]):
        super().__init__(inner)
        self.sights = sights

    def wrap(self, exchange: Exchange, invitation: Leaves, reply: type, leaves: Leaves) -> Leaves:
        self.sights[-1].sent = dict(leaves)
        return super().wrap(exchange, invitation, reply, leaves)


class Witness(SiteAround):
    """Around a private site: what it is asked, and what its records give before the noise."""

    def __init__(self, site: PrivateSite):
        super().__init__(site)
        self.sights: list[Sight] = []
        site.inner = Sent(site.inner, self.sights)

    def hear(self, exchange: Exchange, request: type, leaves: Leaves) -> None:
        self.sights.append(Sight(exchange, request, dict(leaves)))
        super().hear(exchange, request, leaves)

    def wrap(self, exchange: Exchange, invitation: Leaves, reply: type, leaves: Leaves) -> Leaves:
        self.sights[-1].reply, self.sights[-1].given = reply, dict(leaves)
        return super().wrap(exchange, invitation, reply, leaves)


def audit(config: RunConfig, canaries: int, seed: int) -> Verdict:
    """One run with canaries at its first client, and what it gives away of them."""
    if config.epsilon is None:
        raise FedgistError("this run promises no differential privacy: there is nothing to audit")
    config = runner.prepare(config)
    inputs = sources.from_dataset(config)
    if canaries > len(inputs.test[1]):
        raise FedgistError(f"canaries are test samples, of which there are {len(inputs.test[1])}: ask for fewer")
    rng = Rng(seed, "canaries")
    chosen = rng("records").permutation(len(inputs.test[1]))[:canaries].to(inputs.test[1].device)
    labels = rng("labels").integers(inputs.task.classes, canaries).to(inputs.test[1])
    coins = rng("coins").integers(2, canaries).bool()
    who, x = min(inputs.sites), inputs.test[0][chosen]
    own = inputs.sites[who]
    inside = coins.to(labels.device)
    mixed = replace(own, x=torch.cat([own.x, x[inside].to(own.x)]), y=torch.cat([own.y, labels[inside]]))
    method = methods.find(config.method)(config.options, inputs.task)
    executor = engines.executor(config.engine, config.device, tf32=config.tf32)
    engine = runner.in_process(method, replace(inputs, sites={**inputs.sites, who: mixed}), config, executor)
    layer = engine.layer
    if not (isinstance(engine, LocalEngine) and isinstance(layer, Private)):
        raise FedgistError("only a run with a server, whose clients are all here, can be audited")
    if not all(isinstance(sums, Sums) for sums in layer.releases.values()):
        raise FedgistError(
            f"{config.method} has its noise inside training: the audit is of sums that are released, as gist's, "
            "fedsgd's and feddm-released's"
        )
    witnesses = {id: Witness(site) for id, site in layer.sites.items()}
    layer.sites = witnesses  # type: ignore[assignment]
    for _ in range(config.rounds):
        engine.run_round()
    alone = [ClientData(x[i : i + 1].to(own.x), labels[i : i + 1], own.classes) for i in range(canaries)]
    found = least_mu_by_canaries(*_seen(method, engine, layer, witnesses, who, [own, *alone]), coins, CONFIDENCE)
    if found is None:
        raise FedgistError("canaries that move so few numbers cannot be told from the noise: ask for more of them")
    least = gaussian.epsilon(found, config.delta) if found > 0 else 0.0
    return Verdict(canaries, int(coins.sum()), least, layer.spent(), config.delta)


def _seen(
    method: Method, engine: LocalEngine, layer: Private, seen: dict[str, Witness], who: str, data: list[ClientData]
) -> tuple[Tensor, Tensor]:
    """C Cᵀ and C r of all that was sent, as `least_mu_by_canaries` has them: c are what canaries give alone, r what was
    sent beyond what the client's own records (the first of `data`) give, which the adversary knows.
    """
    states: list[dict[str, object]] = [{} for _ in data]
    mechanism, codec = layer.promise.mechanism, engine.codecs[engine.info[who]["model"]]
    count, local = len(data) - 1, layer.promise.noise == "local"
    gram, along = torch.zeros(count, count, dtype=torch.float64), torch.zeros(count, dtype=torch.float64)
    for turn, sight in enumerate(seen[who].sights):
        message: object = codec.unpack(sight.request, sight.asked)
        handler = handler_for(method, sight.request)
        named = client_rng(engine.rng.root, who)(sight.exchange.phase, sight.exchange.round, sight.exchange.number)
        given: list[Leaves] = []
        for own, state in zip(data, states, strict=True):
            bits = _always if given else None  # a canary alone is in every batch; the others in the same as then
            site = Site(who, sight.exchange.round, own, state, named, engine.info[who], bits)
            given.append(codec.pack(drive_one(answer(method, handler, site, message), engine.executor.place)))
        sums = layer.releases[sight.reply]
        assert isinstance(sums, Sums)
        for name, sent in sight.sent.items():
            rest = sent - given[0][name]
            if not local:  # the adversary sees the sum, and knows what the others' records give
                others = [witness.sights[turn] for id, witness in seen.items() if id != who]
                rest = rest + sum(other.sent[name] - other.given[name] for other in others)
            sigma = mechanism.sigma(sums.fields[name.split("/")[0]], sums)
            canaries = torch.stack([one[name].flatten() for one in given[1:]]).cpu() / sigma
            gram += canaries @ canaries.T
            along += canaries @ (rest.flatten().cpu() / sigma - canaries.sum(0) / 2)
    return gram, along


def _always(name: str) -> Bits:
    """Bits that let every record into every batch."""
    return lambda count: torch.zeros(count, dtype=torch.int64)
