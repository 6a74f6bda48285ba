"""FedSGD: clients send the gradient of a random batch, and the server takes the step. McMahan et al. 2017, Section 2.

In a private run this is DP-SGD (Abadi et al. 2016) of everybody's data: each exchange releases one sum of clipped
gradients, to which the layer of the run adds noise, each client its own, or once for all under a secure sum.

Deviations from McMahan et al.:
1. A record is in a batch with the chance `sampling`, whatever else is; sums are divided by the public `batch`.
2. Every record's gradient is clipped to `record_clip`, without noise too.
3. The server may have momentum, or Adam. With `features` a linear layer is learned on a public map of the inputs.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

import fedgist.api as fg
from fedgist import models
from fedgist.features import FeatureMap, Ground, Sizes, build, drawn, linear_model
from fedgist.learning.optimisers import optimiser
from fedgist.learning.private_training import gradients, poisson
from fedgist.learning.training import samples


@dataclass(frozen=True)
class Config(fg.LocalOptions):
    steps: int = fg.option(50, "Steps a round, each an exchange of sums of gradients.", low=1)
    sampling: float = fg.option(
        0.1,
        "The chance of a record to be in a batch. Sums are divided by `batch`, whatever is in them.",
        above=0,
        high=1,
        safe=("0.05..1",),
        reveals="A gradient of very few records, of one site alone, gives them away.",
    )
    features: str | None = fg.option(
        None,
        "Learn a linear layer on this public map instead of the run's model: contrast (scattering less its mean), "
        "scattering, fourier, or a+b.",
    )
    grid: int = fg.option(4, "Scattering: cells along a side of the image, over which it is averaged.", low=1)
    dimensions: int = fg.option(2048, "Fourier: how many features, half of them cosines and half sines.", low=2)


@fg.message
class Point:
    """The server's weights: where gradients are taken; the seed is that of the feature map."""

    w: fg.Params = fg.wire(shape="learned", holds="weights")
    seed: int = fg.wire(fg.int64)


@fg.message
class GradientSum:
    """Σ g · min(1, C/‖g‖) over the records of a batch, one number after the other; seen only as totals."""

    total: Tensor = fg.wire(fg.float64, shape=("numbers",), additive=True, holds="gradient")


@dataclass(frozen=True)
class Descent:
    """What a client computes; a value."""

    net: fg.Model
    features: FeatureMap | None
    clip: float

    def total(self, w: fg.Params, public: fg.Params, batch: fg.Tree, pool: fg.Tree) -> Tensor:
        """The sum of clipped gradients of a batch, in the order of the weights."""
        x, y = samples(batch, pool)
        found = gradients(self.net, w, self.features(public, x) if self.features else x, y)
        total = found.clipped_sum(batch["mask"], self.clip)
        return torch.cat([total[name].flatten() for name in w]).double()


class FedSGD(fg.ServerModel[Config]):
    name = "fedsgd"
    summary = "Clients send clipped gradients of a random batch, the server steps: DP-SGD of all data with epsilon."
    citation = "mcmahan2017communication"
    profiles = {
        "paper": {"dataset": "mnist", "model": "mlp", "partition": "shards", "clients": 100, "rounds": 20}
        | {"sampling": 1.0, "batch": 600, "lr": 0.1},
        "small": {"dataset": "mnist5k", "model": "lenet5", "rounds": 6, "sampling": 0.1, "batch": 50, "lr": 0.2}
        | {"momentum": 0.9, "note": "5,000 digits, 10 clients, 300 steps"},
        "toy": {"model": "mlp:hidden=16", "rounds": 2, "steps": 3, "batch": 8, "sampling": 0.3, "lr": 0.1},
    }

    def __init__(self, config: Config, task: fg.Task):
        super().__init__(config, task)
        fg.check_by_record(config)
        fg.check_noise(config.noise_multiplier, task)
        net = task.models[task.model]
        self.net = net
        self.features: FeatureMap | None = None
        if config.features is not None:
            ground = Ground(task.shape, task.low, task.high, net)
            sizes = Sizes(config.grid, scales=2, orientations=8, dimensions=config.dimensions, bandwidth=1.0)
            self.features = build(config.features, ground, sizes)
            self.linear = linear_model(config.features, ground, sizes)
            self.net = models.build("mlp", (self.features.size,), task.classes, hidden=())
            self.learns = f"linear on {config.features}"
        elif any(model != net for model in task.models.values()):
            raise fg.FedgistError("fedsgd needs one model for all: a gradient means the same only at the same weights")
        fg.check_statistics(self.net)
        self.optimiser = optimiser(config.optimiser, config.momentum, config.weight_decay)
        self.descent = Descent(self.net, self.features, config.record_clip)

    @property
    def model(self) -> fg.Model:
        """What comes out."""
        return self.linear if self.features else self.net

    def bounds(self, model: str) -> fg.Bounds:
        return {**super().bounds(model), "learned": self.net.shapes, "numbers": fg.Exactly(self.net.size)}

    @property
    def releases(self) -> fg.Declared:
        """Where the run is private: a record moves a sum by its clip at most, where it is in the batch."""
        if not self.config.noise_multiplier:
            raise fg.FedgistError("set noise_multiplier: training without noise is not private")
        cost = fg.Release(self.config.noise_multiplier, self.config.sampling)
        return {GradientSum: fg.Sums({"total": fg.Sum(self.config.record_clip, 0.0)}, release=cost)}

    def server_init(self, rng: fg.Rng) -> fg.State:
        learned = self.net.init(rng)
        return {"learned": learned, "optimiser": self.optimiser.init(learned), "seed": rng("features").seed}

    async def round(self, state: fg.State, fed: fg.Federation) -> fg.State:
        w, moments = state["learned"], state["optimiser"]
        lr = torch.tensor(self.config.lr_at(fed.round), dtype=torch.float64)
        for _ in range(self.config.steps):
            answers = await fed.ask(fed.ids, Point(w, state["seed"]), GradientSum)
            mean = (answers.sum.total / (self.config.batch * len(answers))).split([leaf.numel() for leaf in w.values()])
            slope = {name: part.view_as(leaf).to(leaf) for (name, leaf), part in zip(w.items(), mean, strict=True)}
            w, moments = await fg.compute(self.optimiser.step, w, slope, moments, lr)
        return {**state, "learned": w, "optimiser": moments}

    async def evaluate(self, state: fg.State, fed: fg.Federation, test: fg.Samples) -> dict[str, float]:
        return await fg.scores(self.model, self.weights(state), test)

    def weights(self, state: fg.State, model: str | None = None) -> fg.Params:
        w: fg.Params = state["learned"]
        if self.features is None:
            return w
        last, public = w["classifier.weight"], self.public(state["seed"])
        # φ W + b, of φ − 0, of which no norm is above 1
        head = {"mean": last.new_zeros(self.features.size), "clip": last.new_ones(()), "weight": last.T}
        head |= {"bias": w["classifier.bias"]}
        fixed = {f"features.{name}": value.to(last) for name, value in public.items()}
        return {**fixed, **{f"head.{name}": value for name, value in head.items()}}

    def public(self, seed: int) -> fg.Params:
        """What the feature map computes with."""
        return drawn(self.features, seed) if self.features else {}

    @fg.handler
    async def descend(self, me: fg.Site, msg: Point) -> GradientSum:
        data = me.data
        plan = poisson(data.n, 1, self.config.sampling, fg.bits_of(me, "batch"))
        plan = {name: value.to(data.y.device) for name, value in plan.items()}
        plan = self.config.with_moves(data, plan, fg.moves_of(me, me.rng))
        batch = fg.tree.index(plan, 0)
        work = msg.w, self.public(msg.seed), batch, fg.pool_of(data)
        return GradientSum(await fg.compute(self.descent.total, *work))
