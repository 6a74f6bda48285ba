"""What methods share whose clients tell the mean logits of each label (FD, Jeong et al. 2018): a client's round."""

from dataclasses import dataclass

import torch
from torch import Tensor

from fedgist.core.federation import Site
from fedgist.core.message import Params
from fedgist.core.work import scan
from fedgist.families.local_training import LocalOptions
from fedgist.learning.label_logits import Averager, LogitTrainer
from fedgist.learning.training import Trainer
from fedgist.options import option


@dataclass(frozen=True)
class LogitOptions:
    """Options of the methods that share mean logits."""

    form: str = option("kl", "Pull to the mean logits: divergence of softmaxes, or squares.", choices=("kl", "mse"))
    pull: float = option(1.0, "Weight of that pull; 10 is usual with form=mse.", low=0)
    memory: str = option(
        "round",
        "Logits that a client averages: those while it trains, in the round or the whole run, or those after it.",
        choices=("round", "run", "after"),
    )


@dataclass(frozen=True)
class Learned:
    """What a client learned in a round, and what it has to tell."""

    w: Params
    means: Tensor
    """Mean logits by label, zeros where it holds none: [C, C]."""
    held: Tensor
    """1 for the labels that it holds, else 0: [C]."""


async def train_towards(
    options: LocalOptions, logits: LogitOptions, trainer: Trainer, me: Site, w: Params, table: Tensor, known: Tensor
) -> Learned:
    """One round of a client's training towards the mean logits `table` of the `known` labels."""
    plan = options.plan(me.data, me.rng("batches"))
    state = me.state.get("optimiser") if options.keep_momentum else None
    fresh = torch.zeros_like(table), torch.zeros_like(known)
    sums, counts = me.state.get("logits", fresh) if logits.memory == "run" else fresh
    lr, pull = torch.tensor([options.lr_at(me.round), logits.pull], dtype=torch.float64)  # rounded where they are used
    learner = LogitTrainer(trainer, logits.form)
    begun = ((w, state or trainer.init(w)), sums, counts)
    (w, state), sums, counts = await scan(learner.step, begun, plan, me.data.pool, lr, table, known, pull)
    if options.keep_momentum:
        me.state["optimiser"] = state
    if logits.memory == "run":
        me.state["logits"] = sums, counts
    return await tell(options, trainer, me, w, len(known)) if logits.memory == "after" else _learned(w, sums, counts)


async def tell(options: LocalOptions, trainer: Trainer, me: Site, w: Params, classes: int) -> Learned:
    """What a client would have to tell of `w` as it is: the mean logits of its samples, nothing being trained."""
    plan = me.data.epochs(me.rng("told"), 1, 4 * options.batch)  # forward only: there is room for larger batches
    none = torch.zeros(classes, classes), torch.zeros(classes)
    sums, counts = await scan(Averager(trainer.model, "logits").step, none, plan, me.data.pool, w)
    return _learned(w, sums, counts)


def _learned(w: Params, sums: Tensor, counts: Tensor) -> Learned:
    return Learned(w, sums / counts.clamp_min(1)[:, None], (counts > 0).to(counts.dtype))
