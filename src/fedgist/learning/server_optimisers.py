"""Adaptive optimisers on the server. Reddi et al. 2021, "Adaptive Federated Optimization", Algorithm 2.

The mean Δ of the clients' updates stands where a negative gradient would:

    m ← β₁ m + (1 − β₁) Δ,    v ← one of three,    x ← x + η m / (√v + τ),

with m = 0 and v = τ² at the start and no bias correction. The optimisers are frozen values with `init(x) -> state` and
`step(x, delta, state, lr) -> (x, state)`; x and Δ are dicts of tensors with the same keys.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from fedgist.core import tree
from fedgist.core.message import Params
from fedgist.core.tree import Tree


@dataclass(frozen=True)
class ServerOptimiser(ABC):
    """Abstract: all but the second moment v."""

    beta1: float = 0.9
    beta2: float = 0.99
    tau: float = 1e-3

    @abstractmethod
    def second_moment(self, v: Tensor, square: Tensor) -> Tensor:
        """The new v, given Δ²."""

    def init(self, x: Params) -> Tree:
        return {"m": tree.zeros_like(x), "v": tree.map(lambda t: torch.full_like(t, self.tau**2), x)}

    def step(self, x: Params, delta: Params, state: Tree, lr: float | Tensor) -> tuple[Params, Tree]:
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
