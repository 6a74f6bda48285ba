"""Representation sharing: contrastive learning without a training server. Berdoz 2022, Algorithms 1 and 2.

It runs with a server that only relays, and between peers, where every client is its own relay.

Deviations from the paper:
1. Losses are means over features and classes, as in the published code (`reduction=code`); `paper` is as printed.
2. Class means travel as sums and counts, of which the relay sees only totals; a mean is over samples, not over clients.
3. What nobody has released is absent and adds nothing to a loss. So the first round is learning alone; Algorithm 1
   starts from random representations, and the code from those of untrained nets: `untrained_start`.
4. With M_down observations a loss is the mean over them, the expectation of the paper's random choice of one.
5. log(1 − ĥ) is computed exactly, where the code clamps it at −100.
6. A client that was away trains for the missed rounds when it is back, as if it had done so meanwhile.
7. Between peers a round is two exchanges: fetch what the neighbours released, then learn from it.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

import fedgist.api as fg
from fedgist.families.own_choices import OwnChoices
from fedgist.learning import contrastive
from fedgist.learning.contrastive import REDUCTIONS, Averager, Choices, RepresentationLoss, bounded, chosen, draw

log = logging.getLogger("fedgist")


@dataclass(frozen=True)
class Config(fg.OwnModelOptions, Choices):
    reduction: str = fg.option("code", "Losses are means (code) or sums (paper) over features and classes.", REDUCTIONS)
    n_avg: int = fg.option(
        10,
        "Samples that an observation averages, at most.",
        low=1,
        safe=("10..1000000",),
        reveals="An average over few samples is nearly their features, seen of each site.",
    )
    m_up: int = fg.option(
        1,
        "Observations of each class that a client sends in a round.",
        low=0,
        safe=("0..2",),
        reveals="From many averages over the same samples the samples' features can be worked out.",
    )
    m_down: int = fg.option(1, "Observations of each class that a client receives in a round.", low=0, safe=("0..100",))
    exclude_self: bool = fg.option(True, "A client never receives its own observations.")
    means: str = fg.option(
        "global", "Global class means from everybody's sums, or those of received observations.", ("global", "received")
    )
    max_age: int = fg.option(
        0, "Rounds after which a relay forgets an observation; 0 keeps the last of everybody.", low=0
    )
    train_offline: bool = fg.option(True, "A client that was away has gone on training with what it heard last.")
    untrained_start: bool = fg.option(False, "Round 1 learns from untrained nets' features.", role=fg.Role.LATER)
    choices: tuple[str, ...] = fg.option(
        (),
        "Choices of single clients, as in 3:lambda_kd=0:peers=1+2,4:share=0.5.",
        safe=(),
        reveals="They set the options above for one site.",
    )


@fg.message
class Lesson:
    """Learn from these: t̄^c for the classes that are known, and observations t^c_m for those that were observed."""

    means: Tensor = fg.wire(shape=("global", "classes", "features"))
    known: Tensor = fg.wire(torch.uint8, shape=("classes",), paper=False, high=1)
    observations: Tensor = fg.wire(shape=("down", "classes", "features"))
    observed: Tensor = fg.wire(torch.uint8, shape=("classes",), paper=False, high=1)


@fg.message
class Fetch:
    """Give what you released last."""


@fg.message
class Representations:
    """Sums of features by class with their counts, seen only as totals; and observations, means of a few features."""

    sums: Tensor = fg.wire(shape=("global", "classes", "features"), additive=True, per="counts", holds="features")
    counts: Tensor = fg.wire(shape=("classes",), additive=True, paper=False, low=0, holds="counts")
    observations: Tensor = fg.wire(shape=("up", "classes", "features"), holds="features")
    observed: Tensor = fg.wire(torch.uint8, shape=("classes",), paper=False, high=1, holds="presence")


class RepresentationSharing(fg.OwnModel[Config]):
    name = "repshare"
    summary = "Clients share mean features of each class and learn from them contrastively (Berdoz 2022)."
    citation = "berdoz2022scalable"
    peer_to_peer = True
    profiles = {
        "paper": {"dataset": "mnist", "limit": 1200, "normalise": "train", "partition": "stratified", "rounds": 100}
        | {"model": "lenet5-thesis", "optimiser": "adam", "lr": 0.001, "exclude_self": False, "eval_every": 0},
        "small": {"dataset": "mnist5k", "model": "lenet5-thesis", "rounds": 30, "optimiser": "adam", "lr": 0.001}
        | {"steps": 20, "eval_every": 5, "note": "5,000 digits, 10 clients, 30 rounds of 20 steps"},
        # The features of an MLP are not bounded as the paper's are, so that a distance weighs more.
        "compare": {"dataset": "mnist5k", "model": "mlp", "rounds": 30, "optimiser": "adam", "lr": 0.001, "steps": 20}
        | {"lambda_kd": 0.1, "note": "5,000 digits, 10 clients, 30 rounds of 20 steps, lambda_kd 0.1 for an MLP"},
        "demo": {"model": "mlp", "rounds": 15, "steps": 20, "optimiser": "adam", "lr": 0.001, "lambda_kd": 0.1}
        | {"note": "15 rounds of 20 steps"},
        "toy": {"model": "mlp:hidden=16", "rounds": 2, "steps": 3, "batch": 8, "lr": 0.1, "n_avg": 3, "m_up": 2},
    }

    def __init__(self, config: Config, task: fg.Task):
        super().__init__(config, task)
        fg.one_feature_size(self.name, task)
        if config.lambda_kd > 1 and not bounded(self.model):
            log.warning(
                f"repshare: the features of {self.model.name} are not between -1 and 1 as the paper's, so that "
                f"lambda_kd={config.lambda_kd:g} may outweigh the labels, and clients learn less than alone; try 0.1"
            )
        self.choices = OwnChoices(Choices, config, config.choices)
        for choices in self.choices.all():
            if (last := max(choices.released, default=0)) >= task.classes:
                raise fg.FedgistError(f"released: {last} is no class, the last one is {task.classes - 1}")

    def bounds(self, model: str) -> fg.Bounds:
        sizes = {"up": self.config.m_up, "down": self.config.m_down, "global": 1}
        return {**super().bounds(model), **sizes, "features": fg.Exactly(self.model.feature_size)}

    # The relay

    def server_init(self, rng: fg.Rng) -> fg.State:
        means = torch.zeros(int(self.config.means == "global"), *self._size)
        return {"means": means, "known": torch.zeros(self.task.classes), "buffers": {}}

    async def round(self, state: fg.State, fed: fg.Federation) -> fg.State:
        named = {*self.choices.single, *(peer for choices in self.choices.all() for peer in choices.peers)}
        for id in sorted(named - fed.info.keys()):
            raise fg.unknown("client", id, fed.info)
        if fed.node in fed.ids:  # a peer: it is its own relay
            fetched = await fed.ask(fed.ids, Fetch(), Representations)
            self.exhibit(fed, [id for id in fetched if id == fed.node], fetched)
            state = self.store(state, fetched, fed.round)
            await fed.ask({fed.node: self.lesson(state, fed.node, fed.rng)}, None, Representations)
            return state
        if self.config.untrained_start and fed.round == 1:
            state = self.store(state, await fed.ask(fed.ids, Fetch(), Representations), 0)
        lessons = {id: self.lesson(state, id, fed.rng) for id in fed.ids}
        answers = await fed.ask(lessons, None, Representations)
        self.exhibit(fed, answers.ids, answers)
        return self.store(state, answers, fed.round)

    def exhibit(self, fed: fg.Federation, ids: Sequence[str], answers: fg.Answers[Representations]) -> None:
        for id in ids:
            there, observations = answers[id].observed.nonzero().flatten(), answers[id].observations
            points, labels = observations[:, there].flatten(0, 1), there.repeat(len(observations))
            fed.show("class representations", points, labels, id)

    def store(self, state: fg.State, answers: fg.Answers[Representations], round: int) -> fg.State:
        """Class means over all samples of those who answered, and their observations in the place of older ones."""
        counts = answers.sum.counts
        fresh = counts > 0
        means = torch.where(fresh[:, None], answers.sum.sums / counts.clamp_min(1)[:, None], state["means"])
        new = {id: {**vars(answers[id]), "round": answers.late.get(id, round)} for id in answers}
        kept = {
            id: held
            for id, held in {**state["buffers"], **new}.items()
            if not self.config.max_age or round - held["round"] < self.config.max_age
        }
        return {"means": means, "known": torch.maximum(state["known"], fresh.to(means.dtype)), "buffers": kept}

    def lesson(self, state: fg.State, id: str, rng: fg.Rng) -> Lesson:
        """What a client downloads: the global means, and M_down random observations from the buffer of each class."""
        heard = [held for peer, held in sorted(state["buffers"].items()) if self.listens(id, peer)]
        nothing = state["means"].new_zeros(1, *self._size)
        values = torch.cat([nothing, *(held["observations"] for held in heard)])
        there = [held["observed"].cpu().expand(len(held["observations"]), -1) for held in heard]
        observed = torch.cat([torch.zeros(nothing.shape[:2], dtype=torch.uint8), *there]) > 0
        keys = rng("observations", id).uniform(*observed.shape)
        return Lesson(state["means"], state["known"], *draw(values, observed, keys, self.config.m_down))

    def listens(self, id: str, peer: str) -> bool:
        """Whether a client wants the observations of another, or of itself."""
        wanted = self.choices.of(id).peers
        return (not wanted or peer in wanted) and (peer != id or not self.config.exclude_self)

    # A client

    def client_init(self, me: fg.Site) -> fg.State:
        means, observations = torch.zeros(*self._size), torch.zeros(self.config.m_down, *self._size)
        none = torch.zeros(self.task.classes)
        heard = {"means": means, "known": none, "observations": observations, "observed": none}
        own = super().client_init(me)
        if self.choices.of(me.id).discriminator == "external":  # it trains with the model, and stays here
            own["w"] |= contrastive.critic(self.model.feature_size, me.rng)
        return {**own, "heard": heard, "round": 0}

    def client_weights(self, me: fg.Site, sent: fg.Params) -> fg.Params:
        return {name: value for name, value in me.state["w"].items() if not name.startswith(contrastive.CRITIC)}

    @fg.handler
    async def learn(self, me: fg.Site, msg: Lesson) -> Representations:
        config, mine, model = self.config, self.choices.of(me.id), self.model_of(me)
        weights = torch.tensor([mine.lambda_kd, mine.lambda_disc], dtype=torch.float64)
        learner = fg.trainer(config, model, RepresentationLoss(model, config.reduction, mine.discriminator))
        if config.train_offline and (missed := me.round - 1 - me.state["round"]):  # rounds without a word to us
            then = replace(config, steps=missed * config.steps, epochs=missed * config.epochs)
            alone = replace(me, rng=me.rng("alone"))
            me.state["w"] = await fg.train(then, learner, alone, me.state["w"], me.state["heard"], *weights)
        heard = {name: getattr(msg, name).to(msg.observations.dtype) for name in vars(msg)}
        if config.means == "received" or mine.peers:
            heard |= {"means": heard["observations"].sum(0) / max(1, config.m_down), "known": heard["observed"]}
        else:
            heard["means"] = heard["means"][0]
        me.state["w"] = await fg.train(config, learner, me, me.state["w"], heard, *weights)
        me.state |= {"heard": heard, "round": me.round, "released": await self.release(me)}
        return Representations(**me.state["released"])

    @fg.handler
    async def fetch(self, me: fg.Site, msg: Fetch) -> Representations:
        """What was released last; before a client has learned nothing, or what its untrained net gives."""
        if "released" in me.state or self.config.untrained_start:
            return Representations(**(me.state.get("released") or await self.release(me)))
        return Representations(**self._released(torch.zeros(self.task.classes), *self._zeros()))

    async def release(self, site: fg.Site) -> dict[str, Tensor]:
        """Sums over all samples that may be released, and M_up means of at most n_avg of them, for each class."""
        y, mine = site.data.y.cpu(), self.choices.of(site.id)
        held = y.bincount(minlength=self.task.classes).double()
        withheld = ((1 - mine.share) * held + 1e-9).floor()  # 0.7 · 50 is 35, however it is rounded
        counts = (held - withheld).float()
        counts *= torch.tensor([not mine.released or c in mine.released for c in range(self.task.classes)])
        # Which samples may be used is a lasting choice; which of them an observation averages is drawn every round.
        released = chosen(y, fg.Rng(site.rng.root)("client", site.id, "released").uniform(len(y)), counts)
        keys = site.rng("observations").uniform(self.config.m_up, len(y)) + 2 * ~released
        few = counts.clamp_max(self.config.n_avg)
        member = chosen(y, keys, few) / few.clamp_min(1)[y]
        # Forward only, so there is room for larger batches than in training.
        index, mask = site.data.epochs(site.rng("order"), 1, 4 * self.config.batch).values()
        plan = {"index": index, "weight": released[index] * mask, "member": member.T[index] * mask[..., None]}
        step = Averager(self.model_of(site)).step
        return self._released(counts, *await fg.scan(step, self._zeros(), plan, site.state["w"], site.data.pool))

    @property
    def _size(self) -> tuple[int, int]:
        return self.task.classes, self.model.feature_size

    def _zeros(self) -> tuple[Tensor, Tensor]:
        return torch.zeros(*self._size), torch.zeros(self.config.m_up, *self._size)

    def _released(self, counts: Tensor, sums: Tensor, observations: Tensor) -> dict[str, Tensor]:
        sent = sums[None] if self.config.means == "global" else sums[None][:0]
        return {"sums": sent, "counts": counts, "observations": observations, "observed": counts > 0}
