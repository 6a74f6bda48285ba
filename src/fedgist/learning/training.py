"""Supervised training: the pure step that a client scans."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from fedgist.core.message import Params
from fedgist.core.task import Model, Output
from fedgist.core.tree import Tree
from fedgist.core.work import gradient, stacked
from fedgist.learning.moves import move
from fedgist.learning.optimisers import Optimiser

R = TypeVar("R")

Loss = Callable[..., Tensor]
"""loss(output, labels, mask, trained weights, *extra constants) -> scalar."""

Penalty = Callable[..., Tensor]
"""penalty(trained weights, *extra constants) -> scalar: a part of an objective that is not about samples."""

Objective = Callable[[Params, Params], tuple[Tensor, Params, R]]
"""objective(trained weights, buffers) -> (scalar, new buffers, other tensors)."""

Carry = tuple[Params, Tree]
"""Weights and the optimiser's state."""


def samples(batch: Tree, pool: Tree) -> tuple[Tensor, Tensor]:
    """A batch's images, moved where its plan says so, and their labels."""
    index = batch["index"]
    # on a CPU torch indexes number by number, and selects rows as a whole; vmap would turn that into the former
    x, y = (pool[name][index] if stacked() else pool[name].index_select(0, index) for name in ("x", "y"))
    return (move(x, batch["moves"]) if "moves" in batch else x), y


def cross_entropy(output: Output, y: Tensor, mask: Tensor, w: Params) -> Tensor:
    """The mean cross-entropy over the samples that count."""
    return (losses(output.logits, y) * mask).sum() / mask.sum()


def losses(logits: Tensor, y: Tensor) -> Tensor:
    """The cross-entropy of each sample; under vmap without indices, which it reads and writes by a dozen operations."""
    if not stacked():
        return F.cross_entropy(logits, y, reduction="none")
    others = y[:, None] != torch.arange(logits.shape[1], device=y.device)
    return -logits.log_softmax(1).masked_fill(others, 0.0).sum(1)


@dataclass(frozen=True)
class Penalised:
    """The mean cross-entropy with a penalty; a loss."""

    penalty: Penalty

    def __call__(self, output: Output, y: Tensor, mask: Tensor, w: Params, *extra: Any) -> Tensor:
        return cross_entropy(output, y, mask, w) + self.penalty(w, *extra)


@dataclass(frozen=True)
class Trainer:
    """Supervised training of one model. A value, so that equal trainers of many clients are one computation."""

    model: Model
    optimiser: Optimiser
    loss: Loss = cross_entropy
    clip: float = 0.0
    held: frozenset[str] = frozenset()
    """Weights that stay as they are, as buffers do: no gradient and no weight decay moves them."""

    def init(self, w: Params) -> Tree:
        """The optimiser's state at the start."""
        return self.optimiser.init({name: w[name] for name in w if name not in self.model.buffers | self.held})

    def step(self, carry: Carry, batch: Tree, pool: Tree, lr: Tensor, *extra: Any) -> Carry:
        """One step on one batch: (weights, optimiser state) -> the same after it."""
        x, y = samples(batch, pool)

        def objective(trained: Params, buffers: Params) -> tuple[Tensor, Params, tuple[()]]:
            output = self.model({**trained, **buffers}, x, train=True)
            return self.loss(output, y, batch["mask"], trained, *extra), output.buffers, ()

        return self.descend(carry, lr, objective)[0]

    def descend(self, carry: Carry, lr: Tensor, objective: Objective[R]) -> tuple[Carry, R]:
        """One step down any objective: the new carry, and what the objective returned besides loss and buffers."""
        w, state = carry
        buffers = {name: w[name] for names in (self.model.buffers, self.held) for name in names}
        trained = {name: w[name] for name in w if name not in buffers}

        def loss(trained: Params) -> tuple[Tensor, tuple[Params, R]]:
            value, new, besides = objective(trained, buffers)
            return value, (new, besides)

        grads, (_, (new, besides)) = gradient(loss, trained)
        if self.clip:
            grads = clip(grads, self.clip)
        trained, state = self.optimiser.step(trained, grads, state, lr)
        return ({**trained, **buffers, **new}, state), besides


def clip(grads: Params, limit: float) -> Params:
    """Scale a gradient down to the norm `limit` if it is longer."""
    norm = torch.stack([grad.square().sum() for grad in grads.values()]).sum().sqrt()
    factor = (limit / norm.clamp_min(1e-12)).clamp_max(1.0)
    return {name: grad * factor for name, grad in grads.items()}
