"""FedProx: federated averaging with a proximal term. Li et al. 2020, Algorithm 2.

Deviations from the paper:
1. Every client does the same amount of local work; the paper's γ-inexactness (stragglers do less) is `offline` here.
2. Averages are weighted by sample counts and clients drawn uniformly, as in FedAvg.
"""

from dataclasses import dataclass

from torch import Tensor

import fedgist.api as fg


@dataclass(frozen=True)
class Config(fg.GlobalModelOptions):
    mu: float = fg.option(0.01, "Weight μ of the proximal term; 0 is FedAvg.", low=0)


def proximity(w: fg.Params, anchor: fg.Params, mu: Tensor) -> Tensor:
    """μ/2 ‖w − w_t‖² (Eq. 2), over the weights that travel; buffers, which are not trained, are not in w."""
    return mu / 2 * sum((w[name] - anchor[name]).square().sum() for name in w if name in anchor)


class FedProx(fg.GlobalModel[Config]):
    name = "fedprox"
    summary = "FedAvg with a proximal term that keeps clients near the global weights (Li et al. 2020)."
    citation = "li2020federated"
    by_training = (fg.Local,)
    profiles = {
        "paper": {"dataset": "mnist", "model": "mlp", "partition": "shards", "clients": 1000, "rounds": 200}
        | {"active": 10, "epochs": 20, "batch": 10, "lr": 0.03, "mu": 1.0},
        "small": {"dataset": "mnist5k", "model": "lenet5", "rounds": 30, "steps": 20, "lr": 0.1}
        | {"note": "5,000 digits, 10 clients, 30 rounds of 20 steps"},
        "demo": {"model": "mlp", "rounds": 15, "steps": 20, "lr": 0.1, "note": "15 rounds of 20 steps"},
        "toy": {"model": "mlp:hidden=16", "rounds": 2, "steps": 3, "batch": 8, "lr": 0.1, "mu": 0.5},
    }

    async def round(self, state: fg.State, fed: fg.Federation) -> fg.State:
        total = (await fed.ask(fed.sample(self.config.active), fg.Global(state["w"]), fg.Local)).sum
        return {"w": fg.average(total, otherwise=state["w"])}

    @fg.handler
    async def update(self, me: fg.Site, msg: fg.Global) -> fg.Local:
        learner = fg.learner(self.config, self.model_of(me), proximity)
        w = await fg.train(self.config, learner, me, self.start(me, msg.w), msg.w, self.config.mu)
        return await self.sent(me, w)
