"""Co-Dream: clients optimise inputs together and learn from them. Singh et al. 2024, Eqs. 1 and 4 to 6.

Deviations from the paper (docs/codream.md tells more):
1. A client weighs n_k / n or 1 / K; the paper's 1 / |D_k|, which is not normalised, is weighting="inverse".
2. What the paper leaves open is as in its released code: weights of the regularisers, T = 20, logits are averaged.
3. Local Adam (FedAvg, FedAdam) starts anew in each exchange: clients keep nothing while dreaming.
4. Clients learn from dreams and from their own data in the same steps; their BatchNorm statistics are of their data.
5. The generator of the fast variant goes on from round to round as it is, without a Reptile step.
6. Dreaming alone (collaborate=false): every client makes a whole batch and shows its share of it, with its own labels.
"""

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fedgist.core import tree
from fedgist.core.errors import FedgistError
from fedgist.core.federation import Answers, Federation, Site
from fedgist.core.message import Bounds, Done, Params, float16, float32, message, uint8, wire
from fedgist.core.method import Task
from fedgist.core.rng import Rng
from fedgist.core.work import compute, scan
from fedgist.learning.knowledge import Lesson, Taught, TaughtOptions, Train, Trained
from fedgist.models.model import Model
from fedgist.options import option
from fedgist.synthesis.dream_optimisers import BITS, NAMES, decode, dream_optimiser, encode, grid
from fedgist.synthesis.dream_spaces import SpaceOptions, dream_space
from fedgist.synthesis.dream_traffic import warn_of_traffic
from fedgist.synthesis.inversion import Dreamer, DreamOptions, Unsure, has_statistics

log = logging.getLogger("fedgist")


@dataclass(frozen=True)
class Config(TaughtOptions, DreamOptions, SpaceOptions):
    collaborate: bool = option(True, "Dream together; false is the control, each client alone, pooled at the server.")
    offload: bool = option(False, "Clients show their models, and the server dreams in their place.")
    exchanges: int = option(2000, "Exchanges in which a batch is dreamt.", low=1)
    dream_optimiser: str = option("distadam", "How clients' updates of the dreams are combined.", choices=NAMES)
    local_steps: int = option(5, "fedavg, fedadam: Adam steps M of a client in an exchange.", low=1)
    dream_lr: float = option(0.05, "Learning rate of the dreams.", above=0)
    server_lr: float | None = option(None, "fedavg, fedadam: rate of the server, if not 1 and dream_lr.", above=0)
    adaptive: float = option(0.0, "distadam: weight of seeking where the student is unsure, once it learns.", low=0)
    bits: int = option(32, "Bits of a number in an update: 32, 16, or 8 (then dreams travel in 16).", choices=BITS)
    labels: str = option("logits", "What is averaged to a soft label.", choices=("logits", "probabilities"))


@message
class Dreams:
    """The dreams x̂, or the codes and the generator that make them; reply in this unit, in so many bits."""

    v: Params = wire(float32, float16, shape="dreams")
    unit: float = wire(paper=False)
    bits: int = wire(torch.int64, paper=False)


@message
class DreamUpdate:
    """The gradient of ℓ̃_k (or what M local steps did to the dreams) times p_k / unit, and p_k / unit."""

    update: Params = wire(float32, float16, uint8, shape="dreams", additive=True)
    p: float = wire(additive=True, paper=False)


@message
class Label:
    """The finished dreams."""

    v: Params = wire(float32, float16, shape="dreams")


@message
class SoftLabels:
    """p_k times what the client's model says about the dreams, and p_k."""

    outputs: Tensor = wire(shape=("count", "classes"), additive=True)
    p: float = wire(additive=True, paper=False)


@message
class DreamAlone:
    """Dream by yourself (collaborate=false), and show so many of your dreams."""

    share: int


@message
class OwnDreams:
    """A client's own dreams and its outputs on them, which the server sees."""

    x: Tensor = wire(float32, float16, shape=("count", "size"))
    outputs: Tensor = wire(shape=("count", "classes"))


@message
class ShowModel:
    """Show your model (offload=true)."""


@message
class ShownModel:
    """A client's model and p_k, which the server sees."""

    w: Params
    p: float = wire(paper=False)


class CoDream(Taught):
    name = "codream"
    summary = "Clients optimise inputs together through sums of gradients and distil from them (Co-Dream, 2023)."
    citation = """@article{singh2024codream,
  title   = {CoDream: Exchanging Dreams Instead of Models for Federated Aggregation with Heterogeneous Models},
  author  = {Singh, Abhishek and Gupta, Gauri and Kapila, Ritvik and Shi, Yichuan and Dang, Alex and Shankar, Sheshank
             and Ehab, Mohammed and Raskar, Ramesh},
  journal = {arXiv preprint arXiv:2402.15968},
  year    = {2024}
}"""
    Config = Config
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

    def __init__(self, config: Any, task: Task):
        super().__init__(config, task)
        self.space = dream_space(config, task)
        self.inputs, self.layer = self.space.shape, config.layer
        self.optimiser = dream_optimiser(config.dream_optimiser, config.dream_lr, config.server_lr)
        self.dream_lr = torch.tensor(config.dream_lr, dtype=torch.float64)  # one for all: brought to a GPU once
        models = task.models.values()
        self.dreamers = {model: Dreamer(config.objective(model, config.layer), self.space) for model in models}
        together = config.collaborate and not config.layer
        if config.adaptive and not (together and config.dream_optimiser == "distadam"):
            raise FedgistError("adaptive needs dream_optimiser=distadam, collaborate=true and no layer")
        if config.generator and not (together and config.bits > 8):
            raise FedgistError("generator needs collaborate=true and bits=16 or more")
        if config.offload and not config.collaborate:
            raise FedgistError("offload needs collaborate=true: who dreams alone shows its dreams, not its model")
        if config.layer and config.learners == "server":
            raise FedgistError("learners=server has nobody learn with layer, where there is no student: set it to all")
        # A client answers nothing that its configuration does not need: together, only sums ever leave it.
        needless = {DreamAlone: config.collaborate, ShowModel: not config.offload}
        vars(self)["handlers"] = {request: h for request, h in self.handlers.items() if not needless.get(request)}
        for name, model in task.models.items():
            if config.statistics and not has_statistics(model, config.layer):
                log.warning(f"codream: dreams pass no BatchNorm in {name}, so its BatchNorm term (Eq. 6) is absent")
        warn_of_traffic(config, self.space, self.model, task.classes)

    def bounds(self, model: str) -> Bounds:
        sizes = {"count": self.config.dreams, "size": math.prod(self.space.shape), "classes": self.task.classes}
        return {**super().bounds(model), "dreams": self.space.shapes, **sizes}

    # The server

    def server_init(self, rng: Rng) -> Any:
        state = {**self.student_init(rng), "dreams": torch.zeros(0, *self.inputs)}
        return {**state, "v": self.space.start(rng("generator"))} if self.config.generator else state

    async def round(self, state: Any, fed: Federation) -> Any:
        trained = await fed.ask(fed.sample(self.config.active), Train(), Trained)
        if trained.sum.p == 0:  # nobody who answered holds any data
            return state
        cohort = trained.ids  # the same clients for the whole round, so that a batch is dreamt of by one set of models
        if self.config.collaborate:
            v = await self.dream(state, fed, cohort, trained.sum.p / len(cohort))
            labels = (await fed.ask(cohort, Label(tree.map(self.light, v)), SoftLabels)).sum
            if labels.p == 0:  # those who hold data are gone by now
                return state
            x, outputs = await compute(self.space.render, v), labels.outputs / labels.p
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
        state = {**state, "dreams": x, "buffer": self.remember(state["buffer"], x, logits)}
        if self.config.learners == "all":
            await fed.ask(cohort, Lesson(self.light(x.flatten(1)), logits), Done)
        return {**state, "w": await self.teach_student(state, fed)}

    async def dream(self, state: Any, fed: Federation, cohort: Sequence[str], mean_p: float) -> Params:
        """Knowledge extraction: exchange by exchange, the cohort's mean update moves the dreams (Eq. 4)."""
        v = await compute(tree.copy, self.space.start(fed.rng("dreams")))  # brings it to where it is computed on
        if self.config.generator:
            v = {**state["v"], "z": v["z"]}
        moments, printed = self.optimiser.init(v), self.config.weighting == "inverse"
        shown = await fed.ask(cohort, ShowModel(), ShownModel) if self.config.offload else None
        scale, bits = 1.0, 32  # the first updates are sent whole: how large they are is not known yet
        for _ in range(self.config.exchanges):
            unit = scale if printed else scale * mean_p
            if shown is None:
                answers = await fed.ask(cohort, Dreams(tree.map(self.light, v), unit, bits), DreamUpdate)
                total, p = decode(answers.sum.update, len(answers), bits), answers.sum.p
            else:
                total, p = await self.offloaded(fed, shown, v, unit)
            update = tree.scale(total, unit if printed else 1 / p if p else 0.0)
            if self.config.adaptive and len(state["buffer"]["x"]):
                unsure = await compute(Unsure(self.model, self.space).gradient, v, state["w"])
                update = tree.add(update, tree.scale(unsure, self.config.adaptive))
            v, moments = await compute(self.optimiser.step, v, update, moments)
            bits = self.config.bits
            scale = grid(update, bits)
        return v

    async def offloaded(self, fed: Federation, shown: Answers, v: Params, unit: float) -> tuple[Params, float]:
        """What the clients would have sent, from the models that they have shown."""
        total, p = tree.zeros_like(v), 0.0
        for id in shown:
            share = shown[id].p / unit
            if share > 0:
                moved = await self.move(self.task.models[fed.info[id]["model"]], shown[id].w, v)
                total, p = tree.add(total, tree.scale(moved, share)), p + share
        return total, p

    def light(self, x: Tensor) -> Tensor:
        """Dreams as they travel."""
        return x if self.config.bits == 32 else x.half()

    # A client, or the server in its place

    async def move(self, model: Model, w: Params, v: Params) -> Params:
        """A model's gradient, or its pseudo-gradient after M local steps."""
        if self.config.dream_optimiser == "distadam":
            found: Params = await compute(self.dreamers[model].gradient, v, w)
            return found
        return tree.sub(await self.descend(model, w, v, self.config.local_steps), v)

    async def descend(self, model: Model, w: Params, v: Params, steps: int) -> Params:
        dreamer, device = self.dreamers[model], next(iter(v.values())).device
        v, _ = await scan(dreamer.step, (v, dreamer.adam.init(v)), torch.arange(steps, device=device), w, self.dream_lr)
        return v

    # A client

    async def update(self, me: Site, msg: Dreams) -> DreamUpdate:
        p = self.p(me) / msg.unit
        if p > 0:
            update = tree.scale(await self.move(self.model_of(me), me.state["w"], msg.v), p)
        else:  # a client without data has nothing to say
            update = tree.zeros_like(msg.v)
        return DreamUpdate(encode(update, msg.bits, me.rng), p)

    async def label(self, me: Site, msg: Label) -> SoftLabels:
        return SoftLabels(self.p(me) * await self.outputs(me, msg.v), self.p(me))

    async def outputs(self, site: Site, v: Params) -> Tensor:
        logits: Tensor = await compute(self.dreamers[self.model_of(site)].logits, v, site.state["w"])
        return logits if self.config.labels == "logits" else logits.softmax(1)

    async def alone(self, me: Site, msg: DreamAlone) -> OwnDreams:
        steps = self.config.exchanges * (1 if self.config.dream_optimiser == "distadam" else self.config.local_steps)
        v = await self.descend(self.model_of(me), me.state["w"], self.space.start(me.rng("dreams")), steps)
        shown = msg.share if me.data.n else 0
        return OwnDreams(self.light(v["x"].flatten(1))[:shown], (await self.outputs(me, v))[:shown])

    async def show(self, me: Site, msg: ShowModel) -> ShownModel:
        return ShownModel(me.state["w"], self.p(me))
