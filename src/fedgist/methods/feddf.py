"""FedDF: the users' ensemble is distilled into the global model on unlabelled images. Lin et al. 2020, Algorithms 1, 3.

Clients may have several architectures; then there is a global model (prototype) for each, started at the average of its
own clients, and all learn from the ensemble of everybody.

Deviations from the paper:
1. A fixed number of distillation steps instead of early stopping on a validation set, which the server does not have.
2. share="head" (Zhu et al. 2021, Table 4): whole models go up, but only heads come down.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch

import fedgist.api as fg
from fedgist.learning.ensembles import Ensemble, distil


@dataclass(frozen=True)
class Config(fg.GlobalModelOptions):
    distil_steps: int = fg.option(100, "Distillation steps of the server a round; 0 is FedAvg.", low=0)
    distil_batch: int = fg.option(128, "Unlabelled images in a batch.", low=1)
    distil_lr: float = fg.option(1e-3, "Learning rate of the distillation (Adam), falling along a cosine.", above=0)


@fg.message
class Whole:
    """All of w_k, which the ensemble needs, and p_k."""

    w: fg.Params = fg.wire(shape="whole", holds="weights")
    p: float = fg.wire(paper=False, low=0, high=1, holds="size")


class FedDF(fg.SentWeights[Config]):
    name = "feddf"
    summary = "Ensemble distillation on unlabelled proxy images, also across architectures (Lin et al. 2020)."
    citation = "lin2020ensemble"
    by_training = (Whole,)
    profiles = {
        "paper": {"dataset": "mnist", "normalise": "half", "model": "cnn", "partition": "dirichlet-fedgen"}
        | {"ratio": 0.5, "alpha": 0.1, "partition_seed": 42, "clients": 20, "active": 10, "rounds": 200, "steps": 20}
        | {"batch": 32, "lr": 0.01, "schedule": "exponential", "decay": 0.99, "published": True, "proxy": "2000"},
        "small": {"dataset": "mnist5k", "model": "cnn", "alpha": 0.1, "rounds": 30, "steps": 20}
        | {"lr": 0.05, "proxy": "500", "note": "5,000 digits, 500 of them unlabelled, 10 clients, 30 rounds"},
        "demo": {"model": "cnn", "rounds": 15, "steps": 20, "lr": 0.05, "proxy": "500"}
        | {"distil_steps": 30, "note": "15 rounds of 20 steps, 500 unlabelled images"},
        "toy": {"model": "mlp:hidden=16", "rounds": 2, "steps": 3, "batch": 8, "lr": 0.1, "active": 0.6}
        | {"proxy": "50", "distil_steps": 3, "distil_batch": 16},
    }

    def __init__(self, config: Config, task: fg.Task):
        super().__init__(config, task)
        if task.proxy is None or len(task.proxy) == 0:
            raise fg.FedgistError("feddf needs unlabelled images: set proxy to their number, as in proxy=2000")
        self.proxy = task.proxy

    def bounds(self, model: str) -> fg.Bounds:
        return {**super().bounds(model), "whole": self.task.models[model].shapes}

    def server_init(self, rng: fg.Rng) -> fg.State:
        """Every prototype; that of the server's architecture begins where the global model of other methods does."""
        own = {name: rng if name == self.task.model else rng("model", name) for name in self.task.models}
        return {"w": {name: model.init(own[name]) for name, model in self.task.models.items()}}

    def requests(self, state: fg.State, fed: fg.Federation, make: Callable[[fg.Params], object]) -> dict[str, object]:
        """For each client the message that `make` makes of what its architecture's prototype sends down."""
        made = {
            name: make({key: w[key] for key in self.travel.names(self.task.models[name])})
            for name, w in state["w"].items()
        }
        return {id: made[fed.info[id]["model"]] for id in fed.ids}

    async def round(self, state: fg.State, fed: fg.Federation) -> fg.State:
        requests = self.requests(state, fed, fg.Global)
        answers = await fed.ask({id: requests[id] for id in fed.sample(self.config.active)}, None, Whole)
        users = [id for id in answers if answers[id].p > 0]  # who holds no data has nothing to say
        if not users:
            return state
        fused, teacher = dict(state["w"]), torch.zeros(())
        for name in sorted({fed.info[id]["model"] for id in users}):
            group = [answers[id] for id in users if fed.info[id]["model"] == name]
            members = fg.tree.stack([user.w for user in group])
            p = torch.tensor([user.p for user in group]).to(next(iter(members.values())))
            fused[name] = fg.tree.map(lambda each, p=p: torch.tensordot(p, each, 1) / p.sum(), members)
            shares = torch.full((len(group),), 1 / len(users))
            teacher = teacher.to(p) + await fg.compute(
                Ensemble(self.task.models[name]).logits, members, shares, self.proxy
            )
        steps, batch, lr = self.config.distil_steps, self.config.distil_batch, self.config.distil_lr
        for name, w in fused.items():  # a prototype without clients learns too, from the ensemble alone
            model, rng = self.task.models[name], fed.rng("distil", name)
            fused[name] = await distil(model, w, self.proxy, teacher, steps, batch, lr, rng)
        return {"w": fused}

    @fg.handler
    async def update(self, me: fg.Site, msg: fg.Global) -> Whole:
        w = await fg.train(self.config, fg.learner(self.config, self.model_of(me)), me, self.start(me, msg.w))
        self.keep(me, w)
        return Whole(w, fg.client_weight(self.config, me))

    async def evaluate(self, state: fg.State, fed: fg.Federation, test: fg.Samples) -> dict[str, float]:
        """The mean over prototypes, and each of several; the mean over clients where these complete the model."""
        if any(len(self.travel.names(model)) < len(model.shapes) for model in self.task.models.values()):
            found = await fg.over_clients(fed, self.requests(state, fed, fg.EvaluateThis))
        else:
            each = {name: await fg.scores(self.task.models[name], w, test) for name, w in state["w"].items()}
            found = {key: sum(of[key] for of in each.values()) / len(each) for key in next(iter(each.values()))}
            if len(each) > 1:
                found |= {f"accuracy_{name}": of["accuracy"] for name, of in each.items()}
        if self.config.published:
            requests = self.requests(state, fed, lambda w: fg.EvaluateThisOnOwnLabels(w, len(fed.ids)))
            found["accuracy_published"] = await fg.pooled_over_clients(fed, requests)
        return found

    def weights(self, state: fg.State, model: str | None = None) -> fg.Params | None:
        w: fg.Params = state["w"][model or self.task.model]
        return w
