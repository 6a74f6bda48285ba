"""FedEnsemble: FedAvg's training, judged by what all users' models say together. A baseline of Zhu et al. 2021.

Deviations from the released code of Zhu et al.:
1. Users that were not asked in a round stand in the ensemble as the global model that was sent in it, with averaged
   BatchNorm statistics; in the code they hold the global weights with statistics of their own.
"""

import torch
from torch import Tensor

import fedgist.api as fg
from fedgist.learning.ensembles import Ensemble


@fg.message
class Shown:
    """w_k and p_k of one user: an ensemble needs its members."""

    w: fg.Params
    p: float = fg.wire(paper=False, low=0, high=1, holds="size")


@fg.message
class WhichLabels:
    """Which labels do you hold?"""


@fg.message
class Holders:
    """1 for each label held; the server learns how many users hold each."""

    users: Tensor = fg.wire(torch.int64, shape=("classes",), additive=True, low=0, high=1, holds="presence")


class FedEnsemble(fg.GlobalModel[fg.GlobalModelOptions]):
    name = "fedensemble"
    summary = "FedAvg judged by the ensemble of all users' models (a baseline of Zhu et al. 2021)."
    citation = "zhu2021data"
    by_training = (Shown,)
    profiles = {
        "paper": {"dataset": "mnist", "normalise": "half", "model": "cnn", "partition": "dirichlet-fedgen"}
        | {"ratio": 0.5, "alpha": 0.1, "partition_seed": 42, "clients": 20, "active": 10, "rounds": 200, "steps": 20}
        | {"batch": 32, "lr": 0.01, "schedule": "exponential", "decay": 0.99, "published": True, "eval_every": 10},
        "small": {"dataset": "mnist5k", "model": "cnn", "alpha": 0.1, "rounds": 60, "steps": 20}
        | {"lr": 0.05, "schedule": "exponential", "eval_every": 5}
        | {"note": "5,000 digits, 10 clients, all active, 60 rounds, lr 0.05"},
        "demo": {"model": "cnn", "rounds": 15, "steps": 20, "lr": 0.05} | {"note": "15 rounds of 20 steps"},
        "toy": {"model": "mlp:hidden=16", "rounds": 2, "steps": 3, "batch": 8, "lr": 0.1, "active": 0.6},
    }

    def __init__(self, config: fg.GlobalModelOptions, task: fg.Task):
        super().__init__(config, task)
        if config.share != "all" or (config.batch_norm == "local" and self.model.buffers):
            raise fg.FedgistError("fedensemble needs whole models: set share=all and batch_norm=aggregate")

    async def round(self, state: fg.State, fed: fg.Federation) -> fg.State:
        answers = await fed.ask(fed.sample(self.config.active), fg.Global(state["w"]), Shown)
        members = fg.tree.stack([state["w"], *(answers[id].w for id in answers)])
        p = torch.tensor([answers[id].p for id in answers]).to(next(iter(members.values())))
        w = state["w"]
        if p.sum() > 0:
            w = fg.tree.map(lambda each: torch.tensordot(p, each[1:], 1) / p.sum(), members)
        shares = torch.tensor([len(fed.ids) - len(p), *[1] * len(p)]).to(p)
        return {"w": w, "members": members, "shares": shares}

    @fg.handler
    async def update(self, me: fg.Site, msg: fg.Global) -> Shown:
        w = await fg.train(self.config, fg.learner(self.config, self.model_of(me)), me, self.start(me, msg.w))
        self.keep(me, w)
        return Shown({name: w[name] for name in self.travel.names(self.model)}, fg.client_weight(self.config, me))

    async def evaluate(self, state: fg.State, fed: fg.Federation, test: fg.Samples) -> dict[str, float]:
        """The ensemble's accuracy, and that of FedAvg's global model, which this run trains as well."""
        alone = {
            name.replace("accuracy", "accuracy_fedavg"): v
            for name, v in (await super().evaluate(state, fed, test)).items()
            if name.startswith("accuracy")
        }
        if "members" not in state:  # before the first round there is only the global model
            return {"accuracy": alone["accuracy_fedavg"]}
        found = await fg.scores(Ensemble(self.model), {"members": state["members"], "shares": state["shares"]}, test)
        if self.config.published:
            x, y = test
            hits = await fg.compute(Ensemble(self.model).hits, state["members"], state["shares"], x, y)
            images = torch.bincount(y, minlength=self.task.classes)
            users = (await fed.ask(fed.ids, WhichLabels(), Holders)).sum.users
            found["accuracy_published"] = int((hits * users).sum()) / max(1, int((images * users).sum()))
        return found | alone

    @fg.handler
    async def labels(self, me: fg.Site, msg: WhichLabels) -> Holders:
        return Holders((me.data.counts() > 0).long())
