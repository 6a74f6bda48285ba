"""FedDistill⁺: FedAvg whose clients also share the mean logits of each label. Zhu et al. 2021, Section 6.1.

Deviations: those of FedDistill (docs/feddistill.md) and of FedAvg.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fedgist.core import tree
from fedgist.core.federation import Federation, Site
from fedgist.core.message import Bounds, Params, message, wire
from fedgist.core.rng import Rng
from fedgist.learning.global_model import GlobalModel, GlobalModelOptions
from fedgist.learning.label_logits import LogitOptions, mean_logits, train_towards
from fedgist.learning.training import trainer


@dataclass(frozen=True)
class Config(LogitOptions, GlobalModelOptions):
    pass


@message
class Global:
    """The server's weights, the mean logits of each label, and which labels have one."""

    w: Params = wire(shape="weights")
    statistics: Params = wire(shape="statistics", paper=False)
    table: Tensor = wire(shape=("classes", "classes"))
    known: Tensor = wire(shape=("classes",), paper=False)


@message
class Local:
    """p_k w_k, the client's mean logits by label, which labels it holds, and p_k: all to be summed."""

    pw: Params = wire(shape="weights", additive=True)
    statistics: Params = wire(shape="statistics", additive=True, paper=False)
    means: Tensor = wire(shape=("classes", "classes"), additive=True)
    holders: Tensor = wire(shape=("classes",), additive=True, paper=False)
    p: float = wire(additive=True, paper=False)


class FedDistillPlus(GlobalModel):
    name = "feddistill+"
    summary = "FedAvg plus federated distillation: weights and mean logits by label travel (Zhu et al. 2021)."
    citation = """@inproceedings{zhu2021data,
  title     = {Data-Free Knowledge Distillation for Heterogeneous Federated Learning},
  author    = {Zhu, Zhuangdi and Hong, Junyuan and Zhou, Jiayu},
  booktitle = {ICML},
  year      = {2021}
}"""
    Config = Config
    profiles = {
        "paper": {"dataset": "mnist", "normalise": "half", "model": "cnn", "partition": "dirichlet-fedgen"}
        | {"ratio": 0.5, "alpha": 0.1, "partition_seed": 42, "clients": 20, "active": 10, "rounds": 200, "steps": 20}
        | {"batch": 32, "lr": 0.01, "schedule": "exponential", "decay": 0.99, "memory": "run", "published": True},
        "small": {"dataset": "mnist5k", "model": "cnn", "alpha": 0.1, "rounds": 60, "steps": 20}
        | {"lr": 0.05, "schedule": "exponential", "note": "5,000 digits, 10 clients, all active, 60 rounds, lr 0.05"},
        "demo": {"model": "cnn", "rounds": 15, "steps": 20, "lr": 0.05} | {"note": "15 rounds of 20 steps"},
        "toy": {"model": "mlp:hidden=16", "rounds": 2, "steps": 3, "batch": 8, "lr": 0.1, "active": 0.6},
    }

    def bounds(self, model: str) -> Bounds:
        return {**super().bounds(model), "classes": self.task.classes}

    def server_init(self, rng: Rng) -> Any:
        classes = self.task.classes
        return {**super().server_init(rng), "table": torch.zeros(classes, classes), "known": torch.zeros(classes)}

    async def round(self, state: Any, fed: Federation) -> Any:
        w, statistics = self.parts(self.model, state["w"])
        lesson = Global(w, statistics, state["table"], state["known"])
        total = (await fed.ask(fed.sample(self.config.active), lesson, Local)).sum
        if total.p == 0:  # nobody who answered holds any data
            return state
        return {
            "w": tree.scale({name: {**total.pw, **total.statistics}[name] for name in state["w"]}, 1 / total.p),
            "table": mean_logits(total.means, total.holders, otherwise=state["table"]),
            "known": torch.maximum(state["known"], (total.holders > 0).to(state["known"])),
        }

    async def update(self, me: Site, msg: Global) -> Local:
        w = self.start(me, {**msg.w, **msg.statistics})
        model = self.model_of(me)
        lesson = await train_towards(self.config, self.config, trainer(self.config, model), me, w, msg.table, msg.known)
        local = self.share(me, lesson.w)
        return Local(*self.parts(model, local.pw), lesson.means, lesson.held, local.p)
