"""Adaptive optimisers on the server. Reddi et al. 2021, "Adaptive Federated Optimization", Algorithm 2.

The mean Δ of the clients' updates stands where a negative gradient would:

    m ← β₁ m + (1 − β₁) Δ,    v ← one of three,    x ← x + η m / (√v + τ),

with m = 0 and v = τ² at the start and no bias correction. The optimisers are frozen values with `init(x) -> state` and
`step(x, delta, state, lr) -> (x, state)`; x and Δ are dicts of tensors with the same keys.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor

from fedgist.core import tree
from fedgist.core.federation import Federation, Site
from fedgist.core.message import Params, message, wire
from fedgist.core.rng import Rng
from fedgist.core.tree import Tree
from fedgist.learning.global_model import Global, GlobalModel, GlobalModelOptions
from fedgist.learning.optimisers import Weights
from fedgist.learning.training import train, trainer
from fedgist.options import option


@dataclass(frozen=True)
class ServerOptimiser(ABC):
    """Abstract: all but the second moment v."""

    beta1: float = 0.9
    beta2: float = 0.99
    tau: float = 1e-3

    @abstractmethod
    def second_moment(self, v: Tensor, square: Tensor) -> Tensor:
        """The new v, given Δ²."""

    def init(self, x: Weights) -> Tree:
        return {"m": tree.zeros_like(x), "v": tree.map(lambda t: torch.full_like(t, self.tau**2), x)}

    def step(self, x: Weights, delta: Weights, state: Tree, lr: float | Tensor) -> tuple[Weights, Tree]:
        m = tree.map(lambda m, d: self.beta1 * m + (1 - self.beta1) * d, state["m"], delta)
        v = tree.map(lambda v, d: self.second_moment(v, d * d), state["v"], delta)
        moved = tree.map(lambda x, m, v: x + lr * m / (v.sqrt() + self.tau), x, m, v)
        return moved, {"m": m, "v": v}


@final
@dataclass(frozen=True)
class ServerAdagrad(ServerOptimiser):
    """v ← v + Δ²; β₂ has no part in it."""

    def second_moment(self, v: Tensor, square: Tensor) -> Tensor:
        return v + square


@final
@dataclass(frozen=True)
class ServerYogi(ServerOptimiser):
    """v ← v − (1 − β₂) Δ² sign(v − Δ²)."""

    def second_moment(self, v: Tensor, square: Tensor) -> Tensor:
        return v - (1 - self.beta2) * square * (v - square).sign()


@final
@dataclass(frozen=True)
class ServerAdam(ServerOptimiser):
    """v ← β₂ v + (1 − β₂) Δ²."""

    def second_moment(self, v: Tensor, square: Tensor) -> Tensor:
        return self.beta2 * v + (1 - self.beta2) * square


@dataclass(frozen=True)
class AdaptiveOptions(GlobalModelOptions):
    """Options of the methods with an adaptive server."""

    server_lr: float = option(0.01, "Learning rate η of the server.", above=0)
    beta1: float = option(0.9, "Decay β₁ of the server's first moment.", low=0, high=0.9999)
    beta2: float = option(0.99, "Decay β₂ of the server's second moment; fedadagrad has none.", low=0, high=0.9999)
    tau: float = option(  # its square is within float32, and it is not rounded to 0
        1e-3, "Adaptivity τ: the larger, the nearer to plain averaging of updates.", low=1e-30, high=1e18
    )


def profiles(paper: float, small: float) -> dict[str, dict[str, Any]]:
    """Those of a method with an adaptive server, whose optimisers differ in their rates."""
    return {
        "paper": {"dataset": "femnist", "model": "lenet5", "partition": "group", "clients": 3400, "active": 10}
        | {"rounds": 1500, "epochs": 1, "batch": 20, "lr": 0.0316, "server_lr": paper},
        "small": {"dataset": "mnist5k", "model": "lenet5", "rounds": 30, "steps": 20, "lr": 0.1, "server_lr": small}
        | {"note": "5,000 digits, 10 clients, 30 rounds of 20 steps"},
        "demo": {"model": "mlp", "rounds": 15, "steps": 20, "lr": 0.1, "server_lr": small}
        | {"note": "15 rounds of 20 steps"},
        "toy": {"model": "mlp:hidden=16", "rounds": 2, "steps": 3, "batch": 8, "lr": 0.1, "active": 0.6},
    }


@message
class Update:
    """p_k Δ_k and p_k, of which the server sees only the sums; Δ_k is how far client k moved the weights."""

    delta: Params = wire(shape="model", additive=True)
    p: float = wire(additive=True, paper=False)


class AdaptiveServer(GlobalModel):
    """Abstract: clients as in FedAvg, and a server that takes the mean of their updates for a gradient."""

    citation = r"""@inproceedings{reddi2021adaptive,
  title     = {Adaptive Federated Optimization},
  author    = {Reddi, Sashank J. and Charles, Zachary and Zaheer, Manzil and Garrett, Zachary and Rush, Keith and
               Kone{\v{c}}n{\'y}, Jakub and Kumar, Sanjiv and McMahan, H. Brendan},
  booktitle = {ICLR},
  year      = {2021}
}"""
    Config = AdaptiveOptions

    @property
    @abstractmethod
    def optimiser(self) -> ServerOptimiser:
        """The server's optimiser."""

    def server_init(self, rng: Rng) -> Any:
        state = super().server_init(rng)
        return {**state, "optimiser": self.optimiser.init(self.trained(state["w"]))}

    async def round(self, state: Any, fed: Federation) -> Any:
        w, total = state["w"], (await fed.ask(fed.sample(self.config.active), Global(state["w"]), Update)).sum
        if total.p == 0:  # nobody who answered holds any data
            return state
        delta = tree.scale(total.delta, 1 / total.p)
        trained, moments = self.optimiser.step(
            self.trained(w), self.trained(delta), state["optimiser"], self.config.server_lr
        )
        return {"w": {**tree.add(w, delta), **trained}, "optimiser": moments}  # BatchNorm statistics: the mean

    async def update(self, me: Site, msg: Global) -> Update:
        w = await train(self.config, trainer(self.config, self.model_of(me)), me, self.start(me, msg.w))
        self.keep(me, w)
        p = self.weight(me)
        return Update(tree.scale({name: w[name] - msg.w[name] for name in msg.w}, p), p)

    def trained(self, w: Weights) -> Weights:
        """All but the statistics of BatchNorm."""
        return {name: value for name, value in w.items() if name not in self.model.buffers}
