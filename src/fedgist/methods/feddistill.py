"""FedDistill (FD): clients share the mean logits of each label, and nothing else. Jeong et al. 2018, Algorithm 1.

Deviations from the paper and from its re-implementations (docs/feddistill.md):
1. A label that a client does not hold is absent from its table and from the average, not a row of zeros in it.
2. A client's own logits are part of the mean that it is drawn to, as in the codes of Zhu et al. 2021 and Berdoz 2022.
3. form="kl" is the loss of Zhu et al. 2021, form="mse" that of Berdoz 2022; Jeong et al. take cross-entropy.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

import fedgist.api as fg
from fedgist.learning.label_logits import mean_logits


@dataclass(frozen=True)
class Config(fg.LogitOptions, fg.OwnModelOptions):
    active: float = fg.active_option()
    untrained_start: bool = fg.option(
        False, "The first round draws to the logits of untrained models, not to nothing.", role=fg.Role.LATER
    )


@fg.message
class Begin:
    """Tell the mean logits of your model before it has learned anything (untrained_start=true)."""


@fg.message
class Global:
    """The mean logits of each label, and which labels have one."""

    table: Tensor = fg.wire(shape=("classes", "classes"))
    known: Tensor = fg.wire(shape=("classes",), paper=False)


@fg.message
class Local:
    """The client's mean logits by label (zeros for those it does not hold), and which it holds: to be summed."""

    means: Tensor = fg.wire(shape=("classes", "classes"), additive=True, per="holders", holds="logits")
    holders: Tensor = fg.wire(shape=("classes",), additive=True, paper=False, low=0, high=1, holds="presence")


class FedDistill(fg.OwnModel[Config]):
    name = "feddistill"
    summary = "Federated distillation: clients keep their models and share mean logits by label (Jeong et al. 2018)."
    citation = "jeong2018communication"
    profiles = {
        "paper": {"dataset": "mnist", "normalise": "half", "model": "cnn", "partition": "dirichlet-fedgen"}
        | {"ratio": 0.5, "alpha": 0.1, "partition_seed": 42, "clients": 20, "active": 10, "rounds": 200, "steps": 20}
        | {"batch": 32, "lr": 0.01, "schedule": "exponential", "decay": 0.99, "memory": "run", "common_start": True}
        | {"published": True, "eval_every": 10},
        "small": {"dataset": "mnist5k", "model": "cnn", "alpha": 0.1, "rounds": 30, "steps": 20}
        | {"lr": 0.05, "note": "5,000 digits, 10 clients, 30 rounds of 20 steps"},
        "demo": {"model": "cnn", "rounds": 10, "steps": 20, "lr": 0.05} | {"note": "10 rounds of 20 steps"},
        "toy": {"model": "mlp:hidden=16", "rounds": 2, "steps": 3, "batch": 8, "lr": 0.1, "active": 0.6},
    }

    def __init__(self, config: Config, task: fg.Task):
        super().__init__(config, task)
        self.leave_out({Begin: not config.untrained_start})

    def server_init(self, rng: fg.Rng) -> fg.State:
        classes = self.task.classes
        return {"table": torch.zeros(classes, classes), "known": torch.zeros(classes)}

    async def round(self, state: fg.State, fed: fg.Federation) -> fg.State:
        chosen = fed.sample(self.config.active)
        if self.config.untrained_start and fed.round == 1:
            state = self.told(state, (await fed.ask(chosen, Begin(), Local)).sum)
        lesson = Global(state["table"], state["known"])
        return self.told(state, (await fed.ask(chosen, lesson, Local)).sum)

    def told(self, state: fg.State, total: Local) -> fg.State:
        """The table with what clients said in its place, label by label."""
        known = torch.maximum(state["known"], (total.holders > 0).to(state["known"]))
        return {"table": mean_logits(total.means, total.holders, otherwise=state["table"]), "known": known}

    @fg.handler
    async def begin(self, me: fg.Site, msg: Begin) -> Local:
        learner = fg.trainer(self.config, self.model_of(me))
        lesson = await fg.tell(self.config, learner, me, me.state["w"], self.task.classes)
        return Local(lesson.means, lesson.held)

    @fg.handler
    async def update(self, me: fg.Site, msg: Global) -> Local:
        learner = fg.trainer(self.config, self.model_of(me))
        lesson = await fg.train_towards(self.config, self.config, learner, me, me.state["w"], msg.table, msg.known)
        me.state["w"] = lesson.w
        return Local(lesson.means, lesson.held)
