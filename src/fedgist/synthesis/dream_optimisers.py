"""The server's side of dreaming together: what it does with the mean of the clients' updates, and how these travel.

Co-Dream, Eq. 4 and Table 2: DistAdam (clients send gradients), FedAvg and FedAdam (pseudo-gradients after M local
steps; Reddi et al. 2021). `v` and `update` are dicts of tensors with the same keys.
"""

import math
from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch

from fedgist.core import tree
from fedgist.core.message import Params
from fedgist.core.rng import Rng
from fedgist.core.tree import Tree
from fedgist.learning.optimisers import Adam
from fedgist.learning.server_optimisers import ServerAdam

NAMES = ("distadam", "fedavg", "fedadam")


class DreamOptimiser(Protocol):
    def init(self, v: Params) -> Tree: ...

    def step(self, v: Params, update: Params, state: Tree) -> tuple[Params, Tree]: ...


@dataclass(frozen=True)
class DistAdam:
    """Adam on the mean gradient: with one client, plain model inversion."""

    lr: float
    adam: ClassVar[Adam] = Adam()

    def init(self, v: Params) -> Tree:
        return self.adam.init(v)

    def step(self, v: Params, update: Params, state: Tree) -> tuple[Params, Tree]:
        return self.adam.step(v, update, state, self.lr)


@dataclass(frozen=True)
class FedAvg:
    """v ← v + η_g Δ, where Δ is the mean of v_{k,M} − v."""

    lr: float

    def init(self, v: Params) -> Tree:
        return {}

    def step(self, v: Params, update: Params, state: Tree) -> tuple[Params, Tree]:
        return tree.map(lambda at, delta: at + self.lr * delta, v, update), state


@dataclass(frozen=True)
class FedAdam:
    """The adaptive server of Reddi et al. (2021) on Δ, as in FedAvg above."""

    lr: float
    adam: ClassVar[ServerAdam] = ServerAdam()

    def init(self, v: Params) -> Tree:
        return self.adam.init(v)

    def step(self, v: Params, update: Params, state: Tree) -> tuple[Params, Tree]:
        return self.adam.step(v, update, state, self.lr)


def dream_optimiser(name: str, lr: float, server_lr: float | None) -> DreamOptimiser:
    """The optimiser that a configuration names; `server_lr` is the rate of the two that take pseudo-gradients."""
    if name == "distadam":
        return DistAdam(lr)
    if name == "fedavg":
        return FedAvg(1.0 if server_lr is None else server_lr)
    return FedAdam(lr if server_lr is None else server_lr)


# How updates travel. A sum of rounded numbers is the rounded sum only if all clients round on the same grid, so the
# grid is announced by the server with the dreams: it is taken from the last mean update, which the server has seen,
# and not from any client's own. With 8 bits the numbers are whole, from 1 to 255 around a zero at 128, and their sum
# is exact, as secure aggregation wants it.

BITS = (32, 16, 8)
ZERO, LARGEST = 128, 127
HEADROOM = 4.0  # a client's update may be so much larger than the largest value of the last mean


def grid(update: Params, bits: int) -> float:
    """The unit in which the next updates are sent: a power of two, so that dividing by it rounds nothing by itself."""
    largest = max(float(part.abs().max()) for part in update.values()) if bits < 32 else 0.0
    if not largest > 0:
        return 1.0
    return 2.0 ** math.ceil(math.log2(largest * (HEADROOM / LARGEST if bits == 8 else 1.0)))


def encode(update: Params, bits: int, rng: Rng) -> Params:
    """What goes on the wire; 8 bits are rounded at random, so that small values survive in the mean."""
    if bits == 32:
        return update
    if bits == 16:
        return tree.map(lambda part: part.half(), update)
    sent: Params = {}
    for name, part in update.items():
        dither = rng("rounding", name).uniform(*part.shape).to(part)
        sent[name] = ((part + dither).floor().clamp(-LARGEST, LARGEST) + ZERO).to(torch.uint8)
    return sent


def decode(total: Params, answers: int, bits: int) -> Params:
    """The sum of the updates of so many clients."""
    if bits > 8:
        return total
    return tree.map(lambda part: part.to(torch.float32) - ZERO * answers, total)
