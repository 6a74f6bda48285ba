"""SCAFFOLD: stochastic controlled averaging. Karimireddy et al. 2020, Algorithm 1 with option II.

Deviations from the paper:
1. With momentum ρ, which the paper does not use, (x − y_i) / (K η) would overstate the mean gradient by up to
   1 / (1 − ρ). K is replaced by Σ_s a_s (learning/local_updates.py): c_i⁺ is then a weighted mean of the gradients
   again. The correction c − c_i enters before the momentum, as part of the gradient. Without momentum K is K.
2. Averages are weighted by sample counts, and c is the mean of the c_i with the same weights: a plain c would lead to
   the minimum of another objective. weighting="uniform" is the paper's. The server must know Σ p_i over all N clients;
   each sends its p_i to be summed when it is first asked, and who was not asked yet counts with the mean weight.
3. BatchNorm, which the paper does not use: its statistics are averaged as in FedAvg, or stay local, uncontrolled.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

import fedgist.api as fg
from fedgist.learning.local_updates import effective_steps


@dataclass(frozen=True)
class Config(fg.GlobalModelOptions):
    server_lr: float = fg.option(1.0, "Learning rate η_g of the server.", above=0)


@fg.message
class Controlled:
    """The server's weights x and its control variate c."""

    x: fg.Params
    c: fg.Params = fg.wire(shape="weights")


@fg.message
class Changes:
    """p_i Δy_i, p_i Δc_i and p_i, of which the server sees only the sums; `joined` is 1, once, and `joined_p` p_i."""

    dy: fg.Params = fg.wire(shape="model", additive=True, per="p", holds="update")
    dc: fg.Params = fg.wire(shape="weights", additive=True, per="p", holds="gradient")
    p: float = fg.wire(additive=True, paper=False, low=0, high=1, holds="size")
    joined: int = fg.wire(fg.int64, additive=True, paper=False, low=0, high=1)
    joined_p: float = fg.wire(additive=True, paper=False, low=0, high="p")


def controlled(w: fg.Params, correction: fg.Params) -> Tensor:
    """⟨c − c_i, y⟩: with f_i(y) its gradient is that of line 10, g_i(y) − c_i + c."""
    return sum(((correction[name] * w[name]).sum() for name in correction), start=torch.zeros(()))


class Scaffold(fg.GlobalModel[Config]):
    name = "scaffold"
    summary = "Control variates cancel the drift of clients with different data (Karimireddy et al. 2020)."
    citation = "karimireddy2020scaffold"
    by_training = (Changes,)
    profiles = {
        "paper": {"dataset": "emnist-byclass", "model": "mlp", "partition": "shards", "shards_per_client": 1}
        | {"clients": 100, "active": 20, "rounds": 1000, "steps": 5, "batch": 1396, "lr": 0.1, "weighting": "uniform"},
        "small": {"dataset": "mnist5k", "model": "lenet5", "rounds": 30, "steps": 20, "lr": 0.1}
        | {"note": "5,000 digits, 10 clients, 30 rounds of 20 steps"},
        "demo": {"model": "mlp", "rounds": 15, "steps": 20, "lr": 0.1, "note": "15 rounds of 20 steps"},
        "toy": {"model": "mlp:hidden=16", "rounds": 2, "steps": 3, "batch": 8, "lr": 0.1, "momentum": 0.9}
        | {"active": 0.6},
    }

    def __init__(self, config: Config, task: fg.Task):
        fg.check_updates(self.name, config)
        if config.clip:
            raise fg.FedgistError("scaffold's control variates are means of whole gradients: set clip to 0")
        super().__init__(config, task)

    def controls(self, model: fg.Model) -> fg.Params:
        """Control variates, at zero, for what is trained and travels."""
        names = [name for name in self.travel.names(model) if name not in model.buffers]
        return {name: torch.zeros(model.shapes[name]) for name in names}

    def server_init(self, rng: fg.Rng) -> fg.State:
        return {**super().server_init(rng), "sum of pc": self.controls(self.model), "joined": 0, "joined_p": 0.0}

    def client_init(self, me: fg.Site) -> fg.State:
        return {**super().client_init(me), "c": self.controls(self.model_of(me)), "joined": False}

    async def round(self, state: fg.State, fed: fg.Federation) -> fg.State:
        x, request = state["w"], Controlled(state["w"], self.mean_control(state, len(fed.ids)))
        total = (await fed.ask(fed.sample(self.config.active), request, Changes)).sum
        if total.p > 0:  # somebody who answered holds data
            mean = fg.tree.scale(total.dy, 1 / total.p)
            trained = {name: self.config.server_lr * mean[name] for name in state["sum of pc"]}
            x = fg.tree.add(x, {**mean, **trained})  # line 16
        return {
            "w": x,
            "sum of pc": fg.tree.add(state["sum of pc"], total.dc),  # line 17
            "joined": state["joined"] + total.joined,
            "joined_p": state["joined_p"] + total.joined_p,
        }

    def mean_control(self, state: fg.State, clients: int) -> fg.Params:
        """c = Σ_i p_i c_i / Σ_i p_i over all N clients, of whom those never asked have c_i = 0 and the mean weight."""
        weight = state["joined_p"] * clients / max(1, state["joined"])
        c: fg.Params = fg.tree.scale(state["sum of pc"], 1 / weight if weight else 0.0)
        return c

    @fg.handler
    async def update(self, me: fg.Site, msg: Controlled) -> Changes:
        model, before = self.model_of(me), me.state["c"]
        x, correction = self.start(me, msg.x), fg.tree.sub(msg.c, before)
        learner = fg.learner(self.config, model, controlled)
        plan = fg.plan_of(self.config, learner, me)
        y = await fg.train(self.config, learner, me, x, correction, plan=plan)
        self.keep(me, y)
        p, steps = fg.client_weight(self.config, me), effective_steps(len(plan["index"]), self.config.momentum)
        if rate := steps * self.config.lr_at(me.round):  # who has not moved (no data, a rate of 0) learns no gradient
            me.state["c"] = {name: (x[name] - y[name]) / rate - correction[name] for name in correction}  # option II
        dy, dc = {name: y[name] - msg.x[name] for name in msg.x}, fg.tree.sub(me.state["c"], before)
        joined, me.state["joined"] = int(not me.state["joined"]), True
        return Changes(fg.tree.scale(dy, p), fg.tree.scale(dc, p), p, joined, joined * p)
