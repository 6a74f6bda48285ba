"""FedProx: federated averaging with a proximal term. Li et al. 2020, Algorithm 2.

Deviations from the paper:
1. Every client does the same amount of local work; the paper's γ-inexactness (stragglers do less) is `offline` here.
2. Averages are weighted by sample counts and clients drawn uniformly, as in FedAvg.
"""

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from fedgist.core.federation import Federation, Site
from fedgist.learning.global_model import Global, GlobalModel, GlobalModelOptions, Local, average
from fedgist.learning.optimisers import Weights
from fedgist.learning.training import cross_entropy, train, trainer
from fedgist.models.model import Output
from fedgist.options import option


@dataclass(frozen=True)
class Config(GlobalModelOptions):
    mu: float = option(0.01, "Weight μ of the proximal term; 0 is FedAvg.", low=0)


def proximal_loss(output: Output, y: Tensor, mask: Tensor, w: Weights, anchor: Weights, mu: Tensor) -> Tensor:
    """F_k(w) + μ/2 ‖w − w_t‖² (Eq. 2), over the weights that travel; buffers, which are not trained, are not in w."""
    distance = sum((w[name] - anchor[name]).square().sum() for name in w if name in anchor)
    return cross_entropy(output, y, mask, w) + mu / 2 * distance


class FedProx(GlobalModel):
    name = "fedprox"
    summary = "FedAvg with a proximal term that keeps clients near the global weights (Li et al. 2020)."
    citation = """@inproceedings{li2020federated,
  title     = {Federated Optimization in Heterogeneous Networks},
  author    = {Li, Tian and Sahu, Anit Kumar and Zaheer, Manzil and Sanjabi, Maziar and Talwalkar, Ameet and
               Smith, Virginia},
  booktitle = {MLSys},
  year      = {2020}
}"""
    Config = Config
    profiles = {
        "paper": {"dataset": "mnist", "model": "mlp", "partition": "shards", "clients": 1000, "rounds": 200}
        | {"active": 10, "epochs": 20, "batch": 10, "lr": 0.03, "mu": 1.0},
        "small": {"dataset": "mnist5k", "model": "lenet5", "rounds": 30, "steps": 20, "lr": 0.1}
        | {"note": "5,000 digits, 10 clients, 30 rounds of 20 steps"},
        "demo": {"model": "mlp", "rounds": 15, "steps": 20, "lr": 0.1, "note": "15 rounds of 20 steps"},
        "toy": {"model": "mlp:hidden=16", "rounds": 2, "steps": 3, "batch": 8, "lr": 0.1, "mu": 0.5},
    }

    async def round(self, state: Any, fed: Federation) -> Any:
        total = (await fed.ask(fed.sample(self.config.active), Global(state["w"]), Local)).sum
        return {"w": average(total, otherwise=state["w"])}

    async def update(self, me: Site, msg: Global) -> Local:
        learner = trainer(self.config, self.model_of(me), proximal_loss)
        w = await train(self.config, learner, me, self.start(me, msg.w), msg.w, self.config.mu)
        return self.share(me, w)
