"""FedHead: FedAvg of the body, while the head is everybody's exact ridge classifier and held. Our own, after Fed3R.

    ask 1    server: w = (body, head)          client: trains the body under that head    weighted mean → body
    ask 2    server: w                         client: (Σ φφᵀ, Σ φ (y − 1/c)ᵀ), φ = (features, 1)    sum → head

Under label skew the heads of clients drift apart most of all. Here no client trains one: the head of all data follows
from sums, as in gist, and is the same for everybody until the bodies have been averaged again.

Relatives: Fed3R's fine-tuning (Fanì et al. 2024) holds a ridge head that was made once, on pretrained features; FedBABU
(Oh et al. 2022) holds a random one, SphereFed (Dong et al. 2022) an orthogonal one, which is replaced at the end.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

import fedgist.api as fg
from fedgist.features import Moments
from fedgist.learning.ridge import symmetric


@dataclass(frozen=True)
class Config(fg.GlobalModelOptions):
    ridge: float = fg.option(0.1, "λ of the head, as a multiple of the mean eigenvalue of Σ zzᵀ.", above=0)
    length: float = fg.option(1.0, "Root mean square of the norms of the head's rows; it changes no argmax.", above=0)


@fg.message
class Describe:
    """Give the sums of the features of this model and of their products."""

    w: fg.Params


@fg.message
class Sums:
    """Σ φφᵀ as its upper triangle and Σ φ (y − 1/c)ᵀ, seen only as totals; the last of φ is 1, so that n is in it."""

    products: Tensor = fg.wire(fg.float32, shape=("triangle",), additive=True, holds="products")
    targets: Tensor = fg.wire(fg.float32, shape=("features", "classes"), additive=True, holds="features")


@dataclass(frozen=True)
class FeaturesAndOne:
    """What enters the last layer of a model, and a 1 for its bias; in float64, as means are taken off the products."""

    model: fg.Model

    @property
    def size(self) -> int:
        return self.model.feature_size + 1

    def weights(self, rng: fg.Rng) -> fg.Params:
        return {}

    def __call__(self, w: fg.Params, x: Tensor) -> Tensor:
        return F.pad(self.model(w, x).features.double(), (0, 1), value=1.0)


class FedHead(fg.GlobalModel[Config]):
    name = "fedhead"
    summary = "FedAvg of the body under the exact head of everybody's data, made from sums in every round."
    profiles = {
        "paper": {"dataset": "cifar10", "model": "convnet", "clients": 10, "alpha": 0.1, "rounds": 20}
        | {"epochs": 10, "batch": 256, "lr": 0.01, "momentum": 0.9},
        "small": {"dataset": "mnist5k", "model": "lenet5", "rounds": 30, "steps": 20, "lr": 0.1}
        | {"note": "5,000 digits, 10 clients, 30 rounds of 20 steps"},
        "demo": {"model": "mlp", "rounds": 15, "steps": 20, "lr": 0.1, "note": "15 rounds of 20 steps"},
        "toy": {"model": "mlp:hidden=16", "rounds": 2, "steps": 3, "batch": 8, "lr": 0.1, "active": 0.6},
    }

    def __init__(self, config: Config, task: fg.Task):
        super().__init__(config, task)
        if config.share != "all" or config.batch_norm == "local":
            raise fg.FedgistError("fedhead has one head for one body: set share to all, batch_norm to aggregate")
        self.moments = Moments(FeaturesAndOne(self.model), task.classes, clip=0.0)

    def bounds(self, model: str) -> fg.Bounds:
        size = self.moments.features.size
        return {**super().bounds(model), "features": fg.Exactly(size), "triangle": fg.Exactly(size * (size + 1) // 2)}

    def server_init(self, rng: fg.Rng) -> fg.State:
        return {**super().server_init(rng), "held": False}

    async def round(self, state: fg.State, fed: fg.Federation) -> fg.State:
        asked = fed.sample(self.config.active)  # for all of a round, as a secure sum wants it
        w = state["w"] if state["held"] else await self.with_head(state["w"], asked, fed)
        total = (await fed.ask(asked, fg.Global(w), fg.Local)).sum
        return {"w": await self.with_head(fg.average(total, otherwise=w), asked, fed), "held": True}

    async def with_head(self, w: fg.Params, asked: Sequence[str], fed: fg.Federation) -> fg.Params:
        """The same body with the head of these clients' data."""
        total = (await fed.ask(asked, Describe(w), Sums)).sum
        weight, bias = self.head(symmetric(total.products.double()), total.targets.double())
        last = self.model.classifier
        head = {f"{last}.weight": weight.T, f"{last}.bias": bias}
        return {**w, **{name: value.to(w[name]) for name, value in head.items()}}

    def head(self, products: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """W and b that minimise Σ‖y − b − zW‖² + λ‖W‖², times what makes W as long as it shall be."""
        n, sums, labels = products[-1, -1].clamp_min(1), products[:-1, -1], targets[-1]
        mean, prior = sums / n, labels / n + 1 / self.task.classes
        spread = products[:-1, :-1] - torch.outer(sums, mean)
        ridge = self.config.ridge * spread.diagonal().mean()
        ridge = torch.where(ridge > 0, ridge, 1.0)  # 0 where all features are the same for all samples
        weight = torch.linalg.solve(
            spread + ridge * torch.eye(len(mean)).to(spread), targets[:-1] - torch.outer(mean, labels)
        )
        rows = torch.linalg.vector_norm(weight) / self.task.classes**0.5
        factor = torch.where(rows > 0, self.config.length / rows, 1.0)  # 0 where nobody has data
        return factor * weight, factor * (prior - mean @ weight)

    @fg.handler
    async def update(self, me: fg.Site, msg: fg.Global) -> fg.Local:
        learner = replace(fg.trainer(self.config, self.model), held=self.travel.head(self.model))
        return await self.sent(me, await fg.train(self.config, learner, me, self.start(me, msg.w)))

    @fg.handler
    async def describe(self, me: fg.Site, msg: Describe) -> Sums:
        plan = me.data.epochs(me.rng("order"), 1, min(256, max(1, me.data.n)))
        origin = torch.zeros(self.moments.features.size, device=me.data.y.device)
        products, targets = await fg.compute(self.moments.second, plan, me.data.pool, msg.w, origin)
        return Sums(products.float(), targets.float())
