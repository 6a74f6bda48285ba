"""Federated distillation's way of teaching: the mean logits of each label. Jeong et al. 2018 (FD).

A client sums up the logits that its model gives while it trains, or after it, label by label, and is drawn towards the
mean of all clients' means. Zhu et al. 2021 (FedGen) draw by the divergence of softmaxes, Berdoz 2022 by the squared
distance.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from fedgist.core.message import Params
from fedgist.core.task import Model
from fedgist.core.tree import Tree
from fedgist.learning.distillation import divergences
from fedgist.learning.training import Carry, Trainer, cross_entropy, samples

Told = tuple[Carry, Tensor, Tensor]
"""Weights and optimiser state, the sums of logits by label [C, C] and how many there are of each [C]."""


@dataclass(frozen=True)
class LogitTrainer:
    """Training on own samples and towards `table`, the mean logits of every label; sums up the own logits by label."""

    trainer: Trainer
    form: str = "kl"

    def distance(self, logits: Tensor, target: Tensor) -> Tensor:
        """KL(softmax(target) ‖ softmax(logits)), or the mean squared difference, for each sample."""
        if self.form == "mse":
            return (logits - target).square().mean(1)
        return divergences(target, logits)

    def step(
        self, carry: Told, batch: Tree, pool: Tree, lr: Tensor, table: Tensor, known: Tensor, pull: Tensor
    ) -> Told:
        """One step: (weights and optimiser state, sums of logits [C, C], counts [C]) -> the same after it."""
        inner, sums, counts = carry
        (x, y), mask = samples(batch, pool), batch["mask"]

        def objective(trained: Params, buffers: Params) -> tuple[Tensor, Params, Tensor]:
            output = self.trainer.model({**trained, **buffers}, x, train=True)
            drawn = (self.distance(output.logits, table[y]) * known[y] * mask).sum() / mask.sum()
            return cross_entropy(output, y, mask, trained) + pull * drawn, output.buffers, output.logits

        inner, logits = self.trainer.descend(inner, lr, objective)
        return inner, *add_by_label(sums, counts, logits, y, mask)


@dataclass(frozen=True)
class Averager:
    """Sums up, label by label, the logits (the code of Berdoz 2022) or features a model gives when it is evaluated."""

    model: Model
    of: Literal["logits", "features"]

    def step(self, carry: tuple[Tensor, Tensor], batch: Tree, pool: Tree, w: Params) -> tuple[Tensor, Tensor]:
        """(sums [C, d], counts [C]) -> the same with one more batch."""
        x, y = samples(batch, pool)
        return add_by_label(*carry, getattr(self.model(w, x), self.of), y, batch["mask"])


def add_by_label(sums: Tensor, counts: Tensor, values: Tensor, y: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Sums [C, d] and counts [C] by label with a batch's values [B, d] added."""
    held = (y[:, None] == torch.arange(len(counts), device=y.device)).to(values.dtype) * mask[:, None]
    return sums + held.T @ values, counts + held.sum(0)


def mean_logits(means: Tensor, holders: Tensor, otherwise: Tensor) -> Tensor:
    """The mean over the clients that hold a label, from sums over clients; what nobody holds stays as it was."""
    return torch.where(holders[:, None] > 0, means / holders.clamp_min(1)[:, None], otherwise)
