"""Local training: the options that the papers vary, and the pure step that a client scans."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from fedgist.core.errors import FedgistError
from fedgist.core.federation import Site
from fedgist.core.rng import Rng
from fedgist.core.tree import Tree
from fedgist.core.work import gradient, scan
from fedgist.learning.moves import draw, moved
from fedgist.learning.optimisers import Optimiser, Weights, optimiser
from fedgist.models.model import Model, Output
from fedgist.options import option

Loss = Callable[..., Tensor]
"""loss(output, labels, mask, trained weights, *extra constants) -> scalar."""

Objective = Callable[[Weights, Weights], tuple[Tensor, Weights, Tree]]
"""objective(trained weights, buffers) -> (scalar, new buffers, other tensors)."""


@dataclass(frozen=True)
class LocalOptions:
    """How a client trains on its own data; method configurations inherit these."""

    steps: int = option(0, "Local steps a round; 0 counts epochs instead.", low=0)
    epochs: int = option(1, "Local epochs a round, when steps is 0.", low=1)
    batch: int = option(32, "Samples in a batch.", low=1)
    lr: float = option(0.05, "Learning rate of the first round.", above=0)
    schedule: str = option(
        "constant", "How the learning rate falls over the rounds.", choices=("constant", "exponential", "cosine")
    )
    decay: float = option(0.99, "Factor a round of the exponential schedule.", above=0, high=1)
    horizon: int = option(100, "Rounds until the cosine schedule reaches zero.", low=1)
    optimiser: str = option("sgd", "Local optimiser.", choices=("sgd", "adam"))
    momentum: float = option(0.0, "Momentum of sgd.", low=0, high=0.9999)
    weight_decay: float = option(0.0, "L2 penalty in the optimiser.", low=0)
    keep_momentum: bool = option(False, "Keep the optimiser's state from round to round instead of starting anew.")
    clip: float = option(0.0, "Largest norm of a gradient; 0 does not clip.", low=0)
    crop: int = option(0, "Pixels by which images are shifted at random in each step, at most.", low=0)
    flip: bool = option(False, "Mirror half of the images at random in each step.")

    def lr_at(self, round: int) -> float:
        """The learning rate of a round (the first is 1)."""
        if self.schedule == "exponential":
            return self.lr * self.decay ** (round - 1)
        if self.schedule == "cosine":
            return self.lr * 0.5 * (1 + math.cos(math.pi * min(1.0, (round - 1) / self.horizon)))
        return self.lr

    def plan(self, data: Any, rng: Rng) -> dict[str, Tensor]:
        """The batches of one round, as indices."""
        steps, epochs, batch = self.steps, self.epochs, self.batch
        plan = data.steps(rng, steps, batch) if steps else data.epochs(rng, epochs, batch)
        return self.changed(data, plan, rng)

    def changed(self, data: Any, plan: dict[str, Tensor], rng: Rng) -> dict[str, Tensor]:
        """Batches of `data` with what is to happen to each of their images, if anything is."""
        if not (self.crop or self.flip):
            return plan
        height, width = data.x.shape[2:]
        if self.crop >= min(height, width):
            raise FedgistError(
                f"crop={self.crop} shifts images of {height} × {width} pixels out of sight: make it smaller"
            )
        index = plan["index"]
        return plan | {"moves": draw(tuple(index.shape), self.crop, self.flip, rng("moves")).to(index.device)}


def samples(batch: Tree, pool: Tree) -> tuple[Tensor, Tensor]:
    """A batch's images, moved where its plan says so, and their labels."""
    x, y = pool["x"][batch["index"]], pool["y"][batch["index"]]
    return (moved(x, batch["moves"]) if "moves" in batch else x), y


def cross_entropy(output: Output, y: Tensor, mask: Tensor, w: Weights) -> Tensor:
    """The mean cross-entropy over the samples that count."""
    losses = F.cross_entropy(output.logits, y, reduction="none")
    return (losses * mask).sum() / mask.sum()


@dataclass(frozen=True)
class Trainer:
    """Supervised training of one model. A value, so that equal trainers of many clients are one computation."""

    model: Model
    optimiser: Optimiser
    loss: Loss = cross_entropy
    clip: float = 0.0

    def init(self, w: Weights) -> Tree:
        """The optimiser's state at the start."""
        return self.optimiser.init({name: w[name] for name in w if name not in self.model.buffers})

    def step(self, carry: Tree, batch: Tree, pool: Tree, lr: Tensor, *extra: Any) -> Tree:
        """One step on one batch: (weights, optimiser state) -> the same after it."""
        x, y = samples(batch, pool)

        def objective(trained: Weights, buffers: Weights) -> tuple[Tensor, Weights, Tree]:
            output = self.model({**trained, **buffers}, x, train=True)
            return self.loss(output, y, batch["mask"], trained, *extra), output.buffers, ()

        return self.descend(carry, lr, objective)[0]

    def descend(self, carry: Tree, lr: Tensor, objective: Objective) -> tuple[Tree, Tree]:
        """One step down any objective: the new carry, and what the objective returned besides loss and buffers."""
        w, state = carry
        buffers = {name: w[name] for name in self.model.buffers}
        trained = {name: w[name] for name in w if name not in buffers}

        def loss(trained: Weights) -> tuple[Tensor, tuple[Weights, Tree]]:
            value, new, besides = objective(trained, buffers)
            return value, (new, besides)

        grads, (_, (new, besides)) = gradient(loss, trained)
        if self.clip:
            grads = clip(grads, self.clip)
        trained, state = self.optimiser.step(trained, grads, state, lr)
        return ({**trained, **buffers, **new}, state), besides


def clip(grads: Weights, limit: float) -> Weights:
    """Scale a gradient down to the norm `limit` if it is longer."""
    norm = torch.stack([grad.square().sum() for grad in grads.values()]).sum().sqrt()
    factor = (limit / norm.clamp_min(1e-12)).clamp_max(1.0)
    return {name: grad * factor for name, grad in grads.items()}


def trainer(options: LocalOptions, model: Model, loss: Loss = cross_entropy) -> Trainer:
    """The trainer that a method's options describe."""
    chosen = optimiser(options.optimiser, options.momentum, options.weight_decay)
    return Trainer(model, chosen, loss, options.clip)


class Learner(Protocol):
    """What `train` needs of a trainer."""

    def init(self, w: Weights) -> Tree: ...

    def step(self, carry: Tree, batch: Tree, pool: Tree, lr: Tensor, *extra: Any) -> Tree: ...


def client_weight(config: Any, site: Site) -> float:
    """A client's weight p_k: n_k / n_ref, or 1, or with weighting=inverse 1 / n_k; without data it is 0."""
    if site.data.n > config.n_ref:
        raise FedgistError(f"client {site.id} holds {site.data.n:,} samples: set n_ref to at least that")
    if config.weighting == "samples" or site.data.n == 0:
        return site.data.n / config.n_ref
    return 1.0 if config.weighting == "uniform" else 1 / site.data.n


async def train(
    options: LocalOptions, learner: Learner, me: Site, w: Weights, *extra: Any, plan: Tree | None = None
) -> Weights:
    """One round of a client's own training from `w`; the optimiser's state stays in the site's state if it is kept.

    A `plan` may hold more for each step than the batches of `options.plan`. A client without data returns `w` as it is.
    """
    plan = plan or options.plan(me.data, me.rng("batches"))
    state = me.state.get("optimiser") if options.keep_momentum else None
    lr = torch.tensor(options.lr_at(me.round), dtype=torch.float64)  # rounded once, where it is used
    w, state = await scan(learner.step, (w, state or learner.init(w)), plan, me.data.pool, lr, *extra)
    if options.keep_momentum:
        me.state["optimiser"] = state
    return w
