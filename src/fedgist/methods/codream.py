"""Co-Dream: clients optimise inputs together and learn from them. Singh et al. 2024, Eqs. 1 and 4 to 6.

Deviations from the paper (docs/codream.md tells more):
1. A client weighs n_k / n or 1 / K; the paper's 1 / |D_k|, which is not normalised, is weighting="inverse".
2. What the paper leaves open is as in its released code: weights of the regularisers, T = 20, logits are averaged.
3. Local Adam (FedAvg, FedAdam) starts anew in each exchange: clients keep nothing while dreaming.
4. Clients learn from dreams and from their own data in the same steps; their BatchNorm statistics are of their data.
5. The generator of the fast variant goes on from round to round as it is, without a Reptile step.
6. Dreaming alone (collaborate=false): every client makes a whole batch and shows its share of it, with its own labels.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

import fedgist.api as fg
from fedgist.families.traffic import payload, warn_if_dearer
from fedgist.synthesis.dream_optimisers import BITS, NAMES, decode, dream_optimiser, encode, grid
from fedgist.synthesis.dream_spaces import SpaceOptions, dream_space
from fedgist.synthesis.inversion import DreamOptions, Unsure


@dataclass(frozen=True)
class Config(fg.TaughtOptions, DreamOptions, SpaceOptions):
    collaborate: bool = fg.option(
        True,
        "Dream together; false is the control, each client alone, pooled at a server.",
        safe=(True,),
        reveals="Alone, the server sees each site's dreams.",
    )
    offload: bool = fg.option(False, "Clients show their models, and the server dreams for them.", safe=(False,))
    exchanges: int = fg.option(2000, "Exchanges in which a batch is dreamt.", low=1)
    dream_optimiser: str = fg.option("distadam", "How clients' updates of the dreams are combined.", choices=NAMES)
    local_steps: int = fg.option(5, "fedavg, fedadam: Adam steps M of a client an exchange.", low=1, safe=("1..100",))
    dream_lr: float = fg.option(0.05, "Learning rate of the dreams.", above=0)
    server_lr: float | None = fg.option(None, "fedavg, fedadam: rate of the server, if not 1 and dream_lr.", above=0)
    adaptive: float = fg.option(0.0, "distadam: weight of seeking where the student is unsure, once it learns.", low=0)
    adaptive_from: int = fg.option(1, "The first round in which adaptive counts.", low=1, role=fg.Role.LATER)
    bits: int = fg.option(32, "Bits of a number in an update: 32, 16, or 8 (then dreams travel in 16).", choices=BITS)
    labels: str = fg.option("logits", "What is averaged to a soft label.", choices=("logits", "probabilities"))


@fg.message
class Dreams:
    """The dreams x̂, or the codes and the generator that make them; reply in this unit, in so many bits."""

    v: fg.Params = fg.wire(fg.float32, fg.float16, shape="dreams")
    unit: float = fg.wire(paper=False, low=0)
    bits: int = fg.wire(torch.int64, paper=False)


@fg.message
class DreamUpdate:
    """The gradient of ℓ̃_k (or what M local steps did to the dreams) times p_k / unit, and p_k / unit."""

    update: fg.Params = fg.wire(fg.float32, fg.float16, fg.uint8, shape="dreams", additive=True, per="p", holds="slope")
    p: float = fg.wire(additive=True, paper=False, low=0, holds="size")


@fg.message
class Label:
    """The finished dreams."""

    v: fg.Params = fg.wire(fg.float32, fg.float16, shape="dreams")


@fg.message
class SoftLabels:
    """p_k times what the client's model says about the dreams, and p_k."""

    outputs: Tensor = fg.wire(shape=("count", "classes"), additive=True, per="p", holds="logits")
    p: float = fg.wire(additive=True, paper=False, low=0, high=1, holds="size")


@fg.message
class DreamAlone:
    """Dream by yourself (collaborate=false), and show so many of your dreams."""

    share: int


@fg.message
class OwnDreams:
    """A client's own dreams and its outputs on them, which the server sees."""

    x: Tensor = fg.wire(fg.float32, fg.float16, shape=("count", "size"), holds="images")
    outputs: Tensor = fg.wire(shape=("count", "classes"), holds="logits")


@fg.message
class ShowModel:
    """Show your model (offload=true)."""


@fg.message
class ShownModel:
    """A client's model and p_k, which the server sees."""

    w: fg.Params
    p: float = fg.wire(paper=False, low=0, high=1, holds="size")


class CoDream(fg.Taught[Config]):
    name = "codream"
    summary = "Clients optimise inputs together through sums of gradients and distil from them (Co-Dream, 2023)."
    citation = "singh2024codream"
    profiles = {
        "paper": {"dataset": "cifar10", "model": "resnet18", "clients": 2, "partition": "iid", "limit": 6000}
        | {"rounds": 400, "epochs": 5, "batch": 256, "lr": 0.1, "momentum": 0.9, "weight_decay": 1e-4}
        | {"crop": 4, "flip": True, "distil_every": 5, "distil_steps": 1000},
        "small": {"dataset": "mnist5k", "model": "mlp:norm=batch", "rounds": 5, "steps": 20, "lr": 0.1}
        | {"momentum": 0.9, "dreams": 256, "exchanges": 20, "distil_batch": 64, "distil_lr": 0.05, "bits": 8}
        | {"note": "5,000 digits, 10 clients, 5 batches of 256 dreams in 20 exchanges each, 8-bit gradients"},
        "demo": {"model": "mlp:hidden=100:norm=batch", "rounds": 2, "steps": 20, "warm_up": 10, "lr": 0.1}
        | {"momentum": 0.9, "dreams": 256, "exchanges": 20, "distil_steps": 60, "distil_batch": 64, "distil_lr": 0.05}
        | {"bits": 8, "note": "2 batches of 256 dreams in 20 exchanges each, 8-bit gradients"},
        "toy": {"model": "mlp:hidden=16:norm=batch", "rounds": 2, "warm_up": 1, "steps": 2, "batch": 8, "lr": 0.05}
        | {"dreams": 6, "exchanges": 3, "active": 0.6, "buffer": 9, "distil_steps": 2, "distil_batch": 4},
    }

    def __init__(self, config: Config, task: fg.Task):
        self.space = dream_space(config, task)
        super().__init__(config, task, self.space.shape, config.layer)
        self.optimiser = dream_optimiser(config.dream_optimiser, config.dream_lr, config.server_lr)
        self.local_steps = 0 if config.dream_optimiser == "distadam" else config.local_steps
        self.dream_lr = torch.tensor(config.dream_lr, dtype=torch.float64)  # one for all: brought to a GPU once
        self.dreamers = config.dreamers(task.models, self.space, config.layer)
        together = config.collaborate and not config.layer
        if config.adaptive and not (together and config.dream_optimiser == "distadam"):
            raise fg.FedgistError("adaptive needs dream_optimiser=distadam, collaborate=true and no layer")
        if config.generator and not (together and config.bits > 8):
            raise fg.FedgistError("generator needs collaborate=true and bits=16 or more")
        if config.offload and not config.collaborate:
            raise fg.FedgistError("offload needs collaborate=true: who dreams alone shows its dreams, not its model")
        # Together, only sums ever leave a client.
        self.leave_out({DreamAlone: config.collaborate, ShowModel: not config.offload})

    def bounds(self, model: str) -> fg.Bounds:
        sizes = {"count": self.config.dreams, "size": fg.Exactly(math.prod(self.space.shape))}
        return {**super().bounds(model), "dreams": self.space.shapes, **sizes}

    def traffic(self) -> int:
        """The payload of a client and round, up and down."""
        config, blank = self.config, self.space.start(fg.Rng(0))
        v, x = fg.tree.map(self.light, blank), self.light(torch.zeros(config.dreams, math.prod(self.space.shape)))
        outputs, dreamt = torch.zeros(config.dreams, self.task.classes), encode(blank, config.bits, fg.Rng(0))
        taught = payload(self, fg.Lesson(x, outputs)) * (config.learners == "all")
        if not config.collaborate:
            return taught + payload(self, OwnDreams(x, outputs))
        exchange = config.exchanges * payload(self, Dreams(v, 1.0, config.bits), DreamUpdate(dreamt, 1.0))
        shown = payload(self, ShownModel(self.model.init(fg.Rng(0)), 1.0))
        return taught + (shown if config.offload else exchange) + payload(self, Label(v), SoftLabels(outputs, 1.0))

    def server_init(self, rng: fg.Rng) -> fg.State:
        warn_if_dearer(self, self.traffic(), "fewer exchanges, fewer dreams or bits=8 make it cheaper")  # once a run
        state = {**self.student_init(rng), "dreams": torch.zeros(0, *self.inputs)}
        return {**state, "v": self.space.start(rng("generator"))} if self.config.generator else state

    async def round(self, state: fg.State, fed: fg.Federation) -> fg.State:
        trained = await fed.ask(fed.sample(self.config.active), fg.Train(), fg.Trained)
        if trained.sum.p == 0:  # nobody who answered holds any data
            return state
        cohort = trained.ids  # the same clients for the whole round, so that a batch is dreamt of by one set of models
        if self.config.collaborate:
            v = await self.dream(state, fed, cohort, trained.sum.p / len(cohort))
            labels = (await fed.ask(cohort, Label(fg.tree.map(self.light, v)), SoftLabels)).sum
            if labels.p == 0:  # those who hold data are gone by now
                return state
            x, outputs = await fg.compute(self.space.render, v), labels.outputs / labels.p
            state = state | {"v": v} if self.config.generator else state
        else:
            alone = await fed.ask(cohort, DreamAlone(math.ceil(self.config.dreams / len(cohort))), OwnDreams)
            x, outputs = (torch.cat([getattr(alone[id], name) for id in alone]) for name in ("x", "outputs"))
            if len(x) == 0:  # as above
                return state
            x, outputs = x[: self.config.dreams].unflatten(1, self.space.shape), outputs[: self.config.dreams]
        logits = outputs if self.config.labels == "logits" else outputs.clamp_min(1e-8).log()
        if self.layer is None:  # activations are no pictures
            fed.show("dreams", x, logits.softmax(1))
        return await self.teach({**state, "dreams": x}, fed, cohort, x, logits, sent=self.light(x))

    async def dream(self, state: fg.State, fed: fg.Federation, cohort: Sequence[str], mean_p: float) -> fg.Params:
        """Knowledge extraction: exchange by exchange, the cohort's mean update moves the dreams (Eq. 4)."""
        v: fg.Params = await fg.compute(fg.tree.copy, self.space.start(fed.rng("dreams")))  # to where it computes
        v = {**state["v"], "z": v["z"]} if self.config.generator else v
        moments, printed = self.optimiser.init(v), self.config.weighting == "inverse"
        shown = await fed.ask(cohort, ShowModel(), ShownModel) if self.config.offload else None
        scale, bits = 1.0, 32  # the first updates are sent whole: how large they are is not known yet
        for _ in range(self.config.exchanges):
            unit = scale if printed else scale * mean_p
            if shown is None:
                answers = await fed.ask(cohort, Dreams(fg.tree.map(self.light, v), unit, bits), DreamUpdate)
                total, p = decode(answers.sum.update, len(answers), bits), answers.sum.p
            else:
                total, p = await self.offloaded(fed, shown, v, unit)
            update = fg.tree.scale(total, unit if printed else 1 / p if p else 0.0)
            if self.config.adaptive and fed.round >= self.config.adaptive_from and len(state["buffer"]["x"]):
                unsure = await fg.compute(Unsure(self.model, self.space).gradient, v, state["w"])
                update = fg.tree.add(update, fg.tree.scale(unsure, self.config.adaptive))
            v, moments = await fg.compute(self.optimiser.step, v, update, moments)
            bits, scale = self.config.bits, grid(update, self.config.bits)
        return v

    async def offloaded(
        self, fed: fg.Federation, shown: fg.Answers[ShownModel], v: fg.Params, unit: float
    ) -> tuple[fg.Params, float]:
        """What the clients would have sent, from the models that they have shown."""
        total, p = fg.tree.zeros_like(v), 0.0
        for id in shown:
            if (share := shown[id].p / unit) > 0:
                dreamer = self.dreamers[self.task.models[fed.info[id]["model"]]]
                update = await dreamer.update(v, shown[id].w, self.local_steps, self.dream_lr)
                total, p = fg.tree.add(total, fg.tree.scale(update, share)), p + share
        return total, p

    def light(self, x: Tensor) -> Tensor:
        """Dreams as they travel."""
        return x if self.config.bits == 32 else x.half()

    @fg.handler
    async def update(self, me: fg.Site, msg: Dreams) -> DreamUpdate:
        p, update = fg.client_weight(self.config, me) / msg.unit, fg.tree.zeros_like(msg.v)
        if p > 0:  # a client without data has nothing to say
            dreamer = self.dreamers[self.model_of(me)]
            update = fg.tree.scale(await dreamer.update(msg.v, me.state["w"], self.local_steps, self.dream_lr), p)
        return DreamUpdate(encode(update, msg.bits, me.rng), p)

    @fg.handler
    async def label(self, me: fg.Site, msg: Label) -> SoftLabels:
        p = fg.client_weight(self.config, me)
        return SoftLabels(p * await self.outputs(me, msg.v), p)

    async def outputs(self, me: fg.Site, v: fg.Params) -> Tensor:
        logits = await fg.compute(self.dreamers[self.model_of(me)].logits, v, me.state["w"])
        return logits if self.config.labels == "logits" else logits.softmax(1)

    @fg.handler
    async def alone(self, me: fg.Site, msg: DreamAlone) -> OwnDreams:
        dreamer, steps = self.dreamers[self.model_of(me)], self.config.exchanges * max(1, self.local_steps)
        v = await dreamer.descend(self.space.start(me.rng("dreams")), me.state["w"], steps, self.dream_lr)
        shown = msg.share if fg.client_weight(self.config, me) else 0
        return OwnDreams(self.light(v["x"].flatten(1))[:shown], (await self.outputs(me, v))[:shown])

    @fg.handler
    async def show(self, me: fg.Site, msg: ShowModel) -> ShownModel:
        return ShownModel(me.state["w"], fg.client_weight(self.config, me))
