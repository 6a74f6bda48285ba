"""CCVR: classifier calibration with virtual representations. Luo et al. 2021, Algorithm 1, Eqs. 4 to 6.

Deviations from the paper (docs/ccvr.md tells more):
1. Clients send n_c, Σz and Σzzᵀ of each class instead of mean and covariance: sums, of which the server sees only
   totals. The Gaussians that follow from them are those of Eqs. 4 and 5.
2. The calibration is round `after` + 1, and the training before it FedAvg's. Later rounds ask nobody.
3. How many features are drawn and how the head is trained on them are options, with defaults of our own.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

import fedgist.api as fg
from fedgist.data.client_data import ClientData
from fedgist.learning.class_statistics import ClassSums, Gaussian, HeadLoss
from fedgist.learning.optimisers import SGD
from fedgist.learning.training import Carry, Trainer


@dataclass(frozen=True)
class Config(fg.GlobalModelOptions):
    after: int = fg.option(10, "Rounds of FedAvg before the calibration, which is the round after them.", low=0)
    virtual: int = fg.option(500, "Features that the server draws of each class, M_c.", low=1)
    head_epochs: int = fg.option(20, "Passes of the server over them.", low=0)
    head_batch: int = fg.option(128, "Features in a batch of the server.", low=1)
    head_lr: float = fg.option(0.01, "Learning rate of the head, with momentum 0.9.", above=0)


@fg.message
class Describe:
    """Give the moments of each class of the features of this model."""

    w: fg.Params


@fg.message
class Statistics:
    """n, Σz and Σzzᵀ (upper triangles) of each class, seen only as totals."""

    counts: Tensor = fg.wire(fg.float32, shape=("classes",), additive=True, low=0, holds="counts")
    sums: Tensor = fg.wire(fg.float32, shape=("classes", "features"), additive=True, per="counts", holds="features")
    products: Tensor = fg.wire(fg.float32, shape=("classes", "triangle"), additive=True, per="counts", holds="products")


@dataclass(frozen=True)
class HeadTrainer:
    """Descends on the last layer alone: no other weight is in the loss."""

    trainer: Trainer
    loss: HeadLoss

    def step(self, carry: Carry, batch: fg.Tree, pool: fg.Tree, lr: Tensor) -> Carry:
        z, y = pool["x"][batch["index"]], pool["y"][batch["index"]]

        def objective(trained: fg.Params, buffers: fg.Params) -> tuple[Tensor, fg.Params, tuple[()]]:
            return self.loss({**trained, **buffers}, z, y, batch["mask"]), {}, ()

        return self.trainer.descend(carry, lr, objective)[0]


class CCVR(fg.GlobalModel[Config]):
    name = "ccvr"
    summary = "FedAvg, then its head is trained on features drawn from Gaussians of all classes (Luo et al. 2021)."
    citation = "luo2021fear"
    profiles = {
        "paper": {"dataset": "cifar10", "model": "convnet", "clients": 10, "alpha": 0.1, "rounds": 101, "after": 100}
        | {"epochs": 10, "batch": 64, "lr": 0.01, "momentum": 0.9},
        "small": {"dataset": "mnist5k", "model": "lenet5", "rounds": 31, "after": 30, "steps": 20, "lr": 0.1}
        | {"note": "5,000 digits, 10 clients, 30 rounds of 20 steps and the calibration"},
        "demo": {"model": "mlp", "rounds": 16, "after": 15, "steps": 20, "lr": 0.1}
        | {"note": "15 rounds of 20 steps and the calibration"},
        "toy": {"model": "mlp:hidden=16", "rounds": 2, "after": 1, "steps": 3, "batch": 8, "lr": 0.1}
        | {"virtual": 10, "head_epochs": 2},
    }

    def __init__(self, config: Config, task: fg.Task):
        super().__init__(config, task)
        if config.share != "all" or config.batch_norm == "local":
            raise fg.FedgistError(
                "ccvr describes features of one whole model: set share to all, batch_norm to aggregate"
            )
        self.sums = ClassSums(self.model, task.classes)
        trainer = Trainer(self.model, SGD(momentum=0.9))
        self.calibrator = HeadTrainer(trainer, HeadLoss(self.model))

    def bounds(self, model: str) -> fg.Bounds:
        size = self.model.feature_size
        return {**super().bounds(model), "features": fg.Exactly(size), "triangle": fg.Exactly(size * (size + 1) // 2)}

    def server_init(self, rng: fg.Rng) -> fg.State:
        return {**super().server_init(rng), "calibrated": False}

    async def round(self, state: fg.State, fed: fg.Federation) -> fg.State:
        if state["calibrated"]:
            return state
        if fed.round <= self.config.after:
            total = (await fed.ask(fed.sample(self.config.active), fg.Global(state["w"]), fg.Local)).sum
            return {**state, "w": fg.average(total, otherwise=state["w"])}
        found = (await fed.ask(fed.ids, Describe(state["w"]), Statistics)).sum
        return {"w": await self.calibrate(state["w"], found, fed.rng("virtual")), "calibrated": True}

    async def calibrate(self, w: fg.Params, found: Statistics, rng: fg.Rng) -> fg.Params:
        """The head, trained on `virtual` features of each class that somebody has (Eq. 6)."""
        held = (found.counts > 0.5).nonzero().flatten().tolist()
        if not held:
            return w
        gaussians = [Gaussian.of(float(found.counts[c]), found.sums[c], found.products[c]) for c in held]
        z = torch.cat([g.draw(rng(c), self.config.virtual) for c, g in zip(held, gaussians, strict=True)])
        y = torch.tensor(held, device=z.device).repeat_interleave(self.config.virtual)
        pool = ClientData(z.to(found.sums.dtype), y, self.task.classes)
        plan = pool.epochs(rng("batches"), self.config.head_epochs, self.config.head_batch)
        lr = torch.tensor(self.config.head_lr, dtype=torch.float64)
        w, _ = await fg.scan(self.calibrator.step, (w, self.calibrator.trainer.init(w)), plan, pool.pool, lr)
        return w

    @fg.handler
    async def update(self, me: fg.Site, msg: fg.Global) -> fg.Local:
        w = await fg.train(self.config, fg.trainer(self.config, self.model_of(me)), me, self.start(me, msg.w))
        return await self.sent(me, w)

    @fg.handler
    async def describe(self, me: fg.Site, msg: Describe) -> Statistics:
        plan = me.data.epochs(me.rng("order"), 1, min(256, max(1, me.data.n)))
        counts, sums, products = await fg.compute(self.sums.of, plan, me.data.pool, msg.w)
        return Statistics(counts.float(), sums.float(), products.float())
