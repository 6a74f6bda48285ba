"""FedDistill⁺: FedAvg whose clients also share the mean logits of each label. Zhu et al. 2021, Section 6.1.

Deviations: those of FedDistill (docs/feddistill.md) and of FedAvg.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

import fedgist.api as fg
from fedgist.learning.label_logits import mean_logits


@dataclass(frozen=True)
class Config(fg.LogitOptions, fg.GlobalModelOptions):
    pass


@fg.message
class Global:
    """The server's weights, the mean logits of each label, and which labels have one."""

    w: fg.Params = fg.wire(shape="weights", holds="weights")
    statistics: fg.Params = fg.wire(shape="statistics", paper=False, holds="statistics")
    table: Tensor = fg.wire(shape=("classes", "classes"))
    known: Tensor = fg.wire(shape=("classes",), paper=False)


@fg.message
class Local:
    """p_k w_k, the client's mean logits by label, which labels it holds, and p_k: all to be summed."""

    pw: fg.Params = fg.wire(shape="weights", additive=True, per="p", holds="weights")
    statistics: fg.Params = fg.wire(shape="statistics", additive=True, paper=False, per="p", holds="statistics")
    means: Tensor = fg.wire(shape=("classes", "classes"), additive=True, per="holders", holds="logits")
    holders: Tensor = fg.wire(shape=("classes",), additive=True, paper=False, low=0, high=1, holds="presence")
    p: float = fg.wire(additive=True, paper=False, low=0, high=1, holds="size")


class FedDistillPlus(fg.GlobalModel[Config]):
    name = "feddistill+"
    summary = "FedAvg plus federated distillation: weights and mean logits by label travel (Zhu et al. 2021)."
    citation = "zhu2021data"
    profiles = {
        "paper": {"dataset": "mnist", "normalise": "half", "model": "cnn", "partition": "dirichlet-fedgen"}
        | {"ratio": 0.5, "alpha": 0.1, "partition_seed": 42, "clients": 20, "active": 10, "rounds": 200, "steps": 20}
        | {"batch": 32, "lr": 0.01, "schedule": "exponential", "decay": 0.99, "memory": "run", "published": True},
        "small": {"dataset": "mnist5k", "model": "cnn", "alpha": 0.1, "rounds": 60, "steps": 20}
        | {"lr": 0.05, "schedule": "exponential", "note": "5,000 digits, 10 clients, all active, 60 rounds, lr 0.05"},
        "demo": {"model": "cnn", "rounds": 15, "steps": 20, "lr": 0.05} | {"note": "15 rounds of 20 steps"},
        "toy": {"model": "mlp:hidden=16", "rounds": 2, "steps": 3, "batch": 8, "lr": 0.1, "active": 0.6},
    }

    def server_init(self, rng: fg.Rng) -> fg.State:
        classes = self.task.classes
        return {**super().server_init(rng), "table": torch.zeros(classes, classes), "known": torch.zeros(classes)}

    async def round(self, state: fg.State, fed: fg.Federation) -> fg.State:
        w, statistics = fg.statistics_apart(self.model.buffers, state["w"])
        lesson = Global(w, statistics, state["table"], state["known"])
        total = (await fed.ask(fed.sample(self.config.active), lesson, Local)).sum
        if total.p == 0:  # nobody who answered holds any data
            return state
        return {
            "w": fg.tree.scale({name: {**total.pw, **total.statistics}[name] for name in state["w"]}, 1 / total.p),
            "table": mean_logits(total.means, total.holders, otherwise=state["table"]),
            "known": torch.maximum(state["known"], (total.holders > 0).to(state["known"])),
        }

    @fg.handler
    async def update(self, me: fg.Site, msg: Global) -> Local:
        w = self.start(me, {**msg.w, **msg.statistics})
        model = self.model_of(me)
        lesson = await fg.train_towards(
            self.config, self.config, fg.trainer(self.config, model), me, w, msg.table, msg.known
        )
        local = await self.sent(me, lesson.w)
        return Local(*fg.statistics_apart(model.buffers, local.pw), lesson.means, lesson.held, local.p)
