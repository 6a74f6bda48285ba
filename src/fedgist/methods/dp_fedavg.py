"""DP-FedAvg: clients train and send one clipped update each, and noise hides any of them. McMahan et al. 2018.

    client   Δ_k = w_k − w_t by training on its data;   Δ_k · min(1, C/‖Δ_k‖), over all tensors together
    server   w_{t+1} = w_t + η Σ_k Δ_k / n

In a private run the unit is the client with all of its records: with its data or with none, what it sends has the norm
C at most, and that is how far it moves a sum. Nothing is assumed of how it trained.

Deviations from McMahan et al.:
1. Every client is asked in every round: against a server that knows whom it asked, asking fewer hides nobody better.
2. Every client weighs 1, and the sum is divided by how many were asked, which everybody knows.
3. One bound C over all tensors ("flat clipping"), made in float64; what is not finite counts as 0.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

import fedgist.api as fg
from fedgist.learning.optimisers import optimiser
from fedgist.learning.training import Trainer


@dataclass(frozen=True)
class Config(fg.TrainingOptions):
    update_clip: float = fg.option(1.0, "Bound C on the norm of a client's update, over all its tensors.", low=1e-12)
    server_lr: float = fg.option(1.0, "Learning rate η of the server; 1 adds the mean update.", above=0)
    noise_multiplier: float = fg.option(
        0.0,
        "Deviation of a round's noise over update_clip; 0: in a private run the least that ε allows in all rounds, "
        "otherwise no noise.",
        low=0,
        role=fg.Role.LATER,
    )
    few_clients: bool = fg.option(
        False, "Run also where there are so few clients that noise drowns what they send.", role=fg.Role.LATER
    )
    private_steps = 1
    """A round is one release."""
    sampling = 1.0
    """Of all clients."""


@fg.message
class Clipped:
    """Δ_k · min(1, C/‖Δ_k‖), one number after the other; seen only as totals."""

    total: Tensor = fg.wire(fg.float64, shape=("numbers",), additive=True, holds="update")


@dataclass(frozen=True)
class Bound:
    """C, as a value: a tensor of it would be rounded to the precision of the weights."""

    limit: float

    def clipped(self, w: fg.Params, start: fg.Params) -> Tensor:
        """How far `w` is from `start`, in their order, shortened to the norm C; 0 where that is not finite."""
        moved = torch.cat([(w[name].double() - start[name].double()).flatten() for name in start])
        norm = torch.linalg.vector_norm(moved)
        return torch.where(norm.isfinite(), moved * (self.limit / norm.clamp_min(self.limit)), 0.0)


class DPFedAvg(fg.ServerModel[Config]):
    name = "dp-fedavg"
    summary = (
        "FedAvg of clipped updates; with epsilon, noise hides whole clients where they are many (McMahan et al. 2018)."
    )
    citation = "mcmahan2018learning"
    profiles = {
        "paper": {"dataset": "mnist", "model": "mlp:hidden=32", "clients": 1000, "rounds": 40}
        | {"epochs": 2, "batch": 10, "lr": 0.1, "update_clip": 1.0},
        "small": {"dataset": "mnist5k", "model": "mlp:hidden=32", "clients": 500, "rounds": 30, "steps": 5, "batch": 10}
        | {"lr": 0.1, "note": "5,000 digits, 500 clients of ten, 30 rounds of 5 steps"},
        "toy": {"model": "mlp:hidden=16", "rounds": 2, "steps": 3, "batch": 8, "lr": 0.1, "update_clip": 0.1},
    }

    def __init__(self, config: Config, task: fg.Task):
        super().__init__(config, task)
        fg.check_noise(config.noise_multiplier, task)
        if any(model != self.model for model in task.models.values()):
            raise fg.MixedModels("dp-fedavg averages updates: all clients need the same model")
        if self.model.buffers:
            raise fg.FedgistError(
                f"noise would make BatchNorm's variances negative: take a model without it, not {self.model.name}"
            )
        chosen = optimiser(config.optimiser, config.momentum, config.weight_decay)
        self.trainer, self.bound = Trainer(self.model, chosen, clip=config.clip), Bound(config.update_clip)

    def bounds(self, model: str) -> fg.Bounds:
        return {**super().bounds(model), "numbers": fg.Exactly(self.model.size)}

    @property
    def releases(self) -> fg.Declared:
        """Where the run is private: a client moves a sum by its clip at most, with all of its records."""
        if not self.config.noise_multiplier:
            raise fg.FedgistError("set noise_multiplier: sums without noise are not private")
        if self.config.keep_momentum:
            raise fg.FedgistError(
                "a site says if its state changed, as it does where records are: leave out keep_momentum"
            )
        cost = fg.Release(self.config.noise_multiplier, unit=fg.CLIENT)
        return {Clipped: fg.Sums({"total": fg.Sum(self.config.update_clip, 0.0)}, release=cost)}

    async def round(self, state: fg.State, fed: fg.Federation) -> fg.State:
        w: fg.Params = state["w"]
        total = (await fed.ask(fed.ids, fg.Global(w), Clipped)).sum.total
        parts = (total * (self.config.server_lr / len(fed.ids))).split([leaf.numel() for leaf in w.values()])
        moved = zip(w.items(), parts, strict=True)
        return {"w": {name: leaf + part.view_as(leaf).to(leaf) for (name, leaf), part in moved}}

    @fg.handler
    async def update(self, me: fg.Site, msg: fg.Global) -> Clipped:
        w = await fg.train(self.config, self.trainer, me, msg.w)
        return Clipped(await fg.compute(self.bound.clipped, w, msg.w))
