"""Federated distillation's way of teaching: the mean logits of each label. Jeong et al. 2018 (FD).

A client sums up the logits that its model gives while it trains, label by label, and is drawn towards the mean of all
clients' means. Zhu et al. 2021 (FedGen) draw by the divergence of softmaxes, Berdoz 2022 by the squared distance.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from fedgist.core.federation import Site
from fedgist.core.tree import Tree
from fedgist.core.work import scan
from fedgist.learning.optimisers import Weights
from fedgist.learning.training import LocalOptions, Trainer, cross_entropy, samples
from fedgist.options import option


@dataclass(frozen=True)
class LogitOptions:
    """Options of the methods that share mean logits."""

    form: str = option("kl", "Pull to the mean logits: divergence of softmaxes, or squares.", choices=("kl", "mse"))
    pull: float = option(1.0, "Weight of that pull; 10 is usual with form=mse.", low=0)
    memory: str = option(
        "round", "Logits that a client averages: those of the round, or of the whole run.", choices=("round", "run")
    )


@dataclass(frozen=True)
class LogitTrainer:
    """Training on own samples and towards `table`, the mean logits of every label; sums up the own logits by label."""

    trainer: Trainer
    form: str = "kl"

    def distance(self, logits: Tensor, target: Tensor) -> Tensor:
        """KL(softmax(target) ‖ softmax(logits)), or the mean squared difference, for each sample."""
        if self.form == "mse":
            return (logits - target).square().mean(1)
        inputs, targets = F.log_softmax(logits, 1), F.log_softmax(target, 1)
        return F.kl_div(inputs, targets, reduction="none", log_target=True).sum(1)

    def step(
        self, carry: Tree, batch: Tree, pool: Tree, lr: Tensor, table: Tensor, known: Tensor, pull: Tensor
    ) -> Tree:
        """One step: (weights and optimiser state, sums of logits [C, C], counts [C]) -> the same after it."""
        inner, sums, counts = carry
        (x, y), mask = samples(batch, pool), batch["mask"]

        def objective(trained: Weights, buffers: Weights) -> tuple[Tensor, Weights, Tree]:
            output = self.trainer.model({**trained, **buffers}, x, train=True)
            drawn = (self.distance(output.logits, table[y]) * known[y] * mask).sum() / mask.sum()
            return cross_entropy(output, y, mask, trained) + pull * drawn, output.buffers, output.logits

        inner, logits = self.trainer.descend(inner, lr, objective)
        held = (y[:, None] == torch.arange(len(known), device=y.device)).to(logits.dtype) * mask[:, None]
        return inner, sums + held.T @ logits, counts + held.sum(0)


@dataclass(frozen=True)
class Lesson:
    """What a client learned in a round, and what it has to tell."""

    w: Weights
    means: Tensor
    """Mean logits by label, zeros where it holds none: [C, C]."""
    held: Tensor
    """1 for the labels that it holds, else 0: [C]."""


async def train_towards(
    options: LocalOptions, logits: LogitOptions, trainer: Trainer, me: Site, w: Weights, table: Tensor, known: Tensor
) -> Lesson:
    """One round of a client's training towards the mean logits `table` of the `known` labels."""
    plan = options.plan(me.data, me.rng("batches"))
    state = me.state.get("optimiser") if options.keep_momentum else None
    fresh = torch.zeros_like(table), torch.zeros_like(known)
    sums, counts = me.state.get("logits", fresh) if logits.memory == "run" else fresh
    lr, pull = torch.tensor([options.lr_at(me.round), logits.pull], dtype=torch.float64)  # rounded where they are used
    learner = LogitTrainer(trainer, logits.form)
    carry = ((w, state or trainer.init(w)), sums, counts)
    (w, state), sums, counts = await scan(learner.step, carry, plan, me.data.pool, lr, table, known, pull)
    if options.keep_momentum:
        me.state["optimiser"] = state
    if logits.memory == "run":
        me.state["logits"] = sums, counts
    return Lesson(w, sums / counts.clamp_min(1)[:, None], (counts > 0).to(known.dtype))


def mean_logits(means: Tensor, holders: Tensor, otherwise: Tensor) -> Tensor:
    """The mean over the clients that hold a label, from sums over clients; what nobody holds stays as it was."""
    return torch.where(holders[:, None] > 0, means / holders.clamp_min(1)[:, None], otherwise)
