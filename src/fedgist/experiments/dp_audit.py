"""Does a private run keep its promise? Its configuration once more, with canaries among the records of one client.

A canary is a test sample with a random label; a fair coin each decides whether it is among the records. An adversary
who knows everything but the coins and the noise looks for every canary in what was sent. So one run holds as many
experiments in two worlds as there are canaries (Steinke et al. 2023), and how well the worlds can be told apart bounds
μ, and so ε, from below (as Nasr et al. 2023 do for Gaussian noise). Where clients are the unit, they are the canaries:
a coin each decides whether it has its records or none.

An audit can show that a promise is broken, never that it is kept.
"""

import dataclasses
from collections.abc import Callable, Mapping
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
from fedgist.dp.accountant import CLIENT
from fedgist.dp.audit import least_mu_by_canaries
from fedgist.dp.discrete_gaussian import Bits
from fedgist.dp.releases import Sums, declared, unit
from fedgist.engines.engine import answer, client_rng
from fedgist.engines.layer import Exchange, SiteAround, SiteLayer
from fedgist.engines.local import LocalEngine
from fedgist.engines.private import Private, PrivateSite
from fedgist.engines.scheduler import drive_one
from fedgist.experiments import inputs as sources
from fedgist.experiments import runner
from fedgist.experiments.config import RunConfig
from fedgist.experiments.inputs import Inputs

Secret = Callable[[str], Bits] | None


@dataclass(frozen=True)
class Verdict:
    """What an audit found, beside what the run promises."""

    canaries: int
    included: int
    least: float
    """The ε that the run has at least."""
    promised: float
    delta: float
    unit: str

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
    """The run once more with canaries at its first client, or with clients as canaries, and what it gives away."""
    if config.epsilon is None:
        raise FedgistError("this run promises no differential privacy: there is nothing to audit")
    config = runner.prepare(config)
    inputs = sources.from_dataset(config)
    method, rng = methods.find(config.method)(config.options, inputs.task), Rng(seed, "canaries")
    if (whose := unit(declared(method, config.method))) == CLIENT:
        canaries, coins = len(inputs.sites), rng("coins").integers(2, len(inputs.sites)).bool()
        none = {id: replace(own, x=own.x[:0], y=own.y[:0]) for id, own in inputs.sites.items()}
        there = dict(zip(sorted(inputs.sites), coins.tolist(), strict=True))
        again = _again(config, method, inputs, {id: inputs.sites[id] if there[id] else none[id] for id in none})
        gram, along = again.of_clients(inputs.sites)
    else:
        if canaries > len(inputs.test[1]):
            raise FedgistError(f"canaries are test samples, of which there are {len(inputs.test[1])}: ask for fewer")
        chosen = rng("records").permutation(len(inputs.test[1]))[:canaries].to(inputs.test[1].device)
        labels = rng("labels").integers(inputs.task.classes, canaries).to(inputs.test[1])
        coins = rng("coins").integers(2, canaries).bool()
        who, x = min(inputs.sites), inputs.test[0][chosen]
        own = inputs.sites[who]
        inside = coins.to(labels.device)
        mixed = replace(own, x=torch.cat([own.x, x[inside].to(own.x)]), y=torch.cat([own.y, labels[inside]]))
        again = _again(config, method, inputs, {**inputs.sites, who: mixed})
        alone = [ClientData(x[i : i + 1].to(own.x), labels[i : i + 1], own.classes) for i in range(canaries)]
        gram, along = again.of_records(who, [own, *alone])
    found = least_mu_by_canaries(gram, along, coins)
    if found is None:
        raise FedgistError(
            "canaries that move so few numbers cannot be told from the noise: ask for more of them, or, where they are "
            "clients, make a run with more"
        )
    least = gaussian.epsilon(found, config.delta) if found > 0 else 0.0
    return Verdict(canaries, int(coins.sum()), least, again.layer.spent(), config.delta, whose)


def _again(config: RunConfig, method: Method, inputs: Inputs, sites: dict[str, ClientData]) -> "Again":
    """The run once more, by clients with such records, and all that they sent."""
    executor = engines.executor(config.engine, config.device, tf32=config.tf32)
    engine = runner.in_process(method, replace(inputs, sites=sites), config, executor)
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
    return Again(method, engine, layer, witnesses)


@dataclass(frozen=True, eq=False)
class Again:
    """A run that was seen. C Cᵀ and C r of all that was sent are as `least_mu_by_canaries` has them: c are what
    canaries give alone, r what was sent beyond what the adversary knows.
    """

    method: Method
    engine: LocalEngine
    layer: Private
    seen: Mapping[str, Witness]

    @property
    def local(self) -> bool:
        """Whether each client's reply is seen, and not their sum alone."""
        return self.layer.promise.noise == "local"

    def given(self, sight: Sight, who: str, own: ClientData, state: dict[str, object], bits: Secret = None) -> Leaves:
        """What such records of a client would have given, in its place."""
        codec, rng = self.engine.codecs[self.engine.info[who]["model"]], client_rng(self.engine.rng.root, who)
        named = rng(sight.exchange.phase, sight.exchange.round, sight.exchange.number)
        site = Site(who, sight.exchange.round, own, state, named, self.engine.info[who], bits)
        message: object = codec.unpack(sight.request, sight.asked)
        work = answer(self.method, handler_for(self.method, sight.request), site, message)
        return codec.pack(drive_one(work, self.engine.executor.place))

    def sigma(self, sight: Sight, name: str) -> float:
        sums = self.layer.releases[sight.reply]
        assert isinstance(sums, Sums)
        return self.layer.promise.mechanism.sigma(sums.fields[name.split("/")[0]], sums)

    def of_records(self, who: str, data: list[ClientData]) -> tuple[Tensor, Tensor]:
        """Canaries are records of one client; its own, which the adversary knows, are the first of `data`."""
        states: list[dict[str, object]] = [{} for _ in data]
        gram, along = _nothing(len(data) - 1)
        for turn, sight in enumerate(self.seen[who].sights):
            given: list[Leaves] = []
            for own, state in zip(data, states, strict=True):
                bits = _always if given else None  # a canary alone is in every batch; the others in the same as then
                given.append(self.given(sight, who, own, state, bits))
            for name, sent in sight.sent.items():
                rest = sent - given[0][name]
                if not self.local:  # the adversary sees the sum, and knows what the others' records give
                    others = [witness.sights[turn] for id, witness in self.seen.items() if id != who]
                    rest = rest + sum(other.sent[name] - other.given[name] for other in others)
                sigma = self.sigma(sight, name)
                canaries = torch.stack([one[name].flatten() for one in given[1:]]).cpu() / sigma
                gram += canaries @ canaries.T
                along += canaries @ (rest.flatten().cpu() / sigma - canaries.sum(0) / 2)
        return gram, along

    def of_clients(self, data: Mapping[str, ClientData]) -> tuple[Tensor, Tensor]:
        """Canaries are clients, each with all of its `data` or with none, in which case it gives 0."""
        ids = sorted(data)
        states: dict[str, dict[str, object]] = {id: {} for id in ids}
        gram, along = _nothing(len(ids))
        for turn in range(len(self.seen[ids[0]].sights)):
            sights = [self.seen[id].sights[turn] for id in ids]
            given = [self.given(sight, id, data[id], states[id]) for sight, id in zip(sights, ids, strict=True)]
            for name in sights[0].sent:
                sigma = self.sigma(sights[0], name)
                canaries = torch.stack([one[name].flatten() for one in given]).cpu() / sigma
                sent = torch.stack([sight.sent[name].flatten() for sight in sights]).cpu() / sigma
                if self.local:  # each is seen by itself
                    gram += canaries.square().sum(1).diag()
                    along += (canaries * (sent - canaries / 2)).sum(1)
                else:
                    gram += canaries @ canaries.T
                    along += canaries @ (sent.sum(0) - canaries.sum(0) / 2)
        return gram, along


def _nothing(count: int) -> tuple[Tensor, Tensor]:
    return torch.zeros(count, count, dtype=torch.float64), torch.zeros(count, dtype=torch.float64)


def _always(name: str) -> Bits:
    """Bits that let every record into every batch."""
    return lambda count: torch.zeros(count, dtype=torch.int64)
