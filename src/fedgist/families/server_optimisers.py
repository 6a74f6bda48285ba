"""What methods share whose server takes the clients' mean update for a gradient. Reddi et al. 2021, Algorithm 2."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from fedgist.core import tree
from fedgist.core.federation import Federation, Site, State
from fedgist.core.message import Params, message, wire
from fedgist.core.method import handler
from fedgist.core.rng import Rng
from fedgist.core.task import Task
from fedgist.families.global_model import Global, GlobalModel, GlobalModelOptions, statistics_apart
from fedgist.families.local_training import learner, train
from fedgist.families.participation import client_weight
from fedgist.learning.server_optimisers import ServerOptimiser
from fedgist.options import option


@dataclass(frozen=True)
class AdaptiveOptions(GlobalModelOptions):
    """Options of the methods with an adaptive server."""

    server_lr: float = option(0.01, "Learning rate η of the server.", above=0)
    beta1: float = option(0.9, "Decay β₁ of the server's first moment.", low=0, high=0.9999)
    beta2: float = option(0.99, "Decay β₂ of the server's second moment; fedadagrad has none.", low=0, high=0.9999)
    tau: float = option(  # its square is within float32, and it is not rounded to 0
        1e-3, "Adaptivity τ: the larger, the nearer to plain averaging of updates.", low=1e-30, high=1e18
    )


def profiles(paper: float, small: float, **as_printed: object) -> Mapping[str, Mapping[str, object]]:
    """Those of a method with an adaptive server, whose optimisers differ in their rates and in what else the paper
    has."""
    return {
        "paper": {"dataset": "femnist", "model": "lenet5", "partition": "group", "clients": 3400, "active": 10}
        | {"rounds": 1500, "epochs": 1, "batch": 20, "lr": 0.0316, "server_lr": paper}
        | as_printed,
        "small": {"dataset": "mnist5k", "model": "lenet5", "rounds": 30, "steps": 20, "lr": 0.1, "server_lr": small}
        | {"note": "5,000 digits, 10 clients, 30 rounds of 20 steps"},
        "demo": {"model": "mlp", "rounds": 15, "steps": 20, "lr": 0.1, "server_lr": small}
        | {"note": "15 rounds of 20 steps"},
        "toy": {"model": "mlp:hidden=16", "rounds": 2, "steps": 3, "batch": 8, "lr": 0.1, "active": 0.6},
    }


@message
class Update:
    """p_k Δ_k and p_k, of which the server sees only the sums; Δ_k is how far client k moved the weights."""

    delta: Params = wire(shape="model", additive=True, per="p", holds="update")
    p: float = wire(additive=True, paper=False, low=0, high=1, holds="size")


class AdaptiveServer(GlobalModel[AdaptiveOptions]):
    """Abstract: clients as in FedAvg, and a server that takes the mean of their updates for a gradient."""

    rule: ClassVar[type[ServerOptimiser]]

    citation = "reddi2021adaptive"
    by_training = (Update,)

    def __init__(self, config: AdaptiveOptions, task: Task):
        super().__init__(config, task)
        self.optimiser = self.rule(config.beta1, config.beta2, config.tau)

    def server_init(self, rng: Rng) -> State:
        state = super().server_init(rng)
        return {**state, "optimiser": self.optimiser.init(self.trained(state["w"]))}

    async def round(self, state: State, fed: Federation) -> State:
        w: Params = state["w"]
        total = (await fed.ask(fed.sample(self.config.active), Global(w), Update)).sum
        if total.p == 0:  # nobody who answered holds any data
            return state
        delta = tree.scale(total.delta, 1 / total.p)
        trained, moments = self.optimiser.step(
            self.trained(w), self.trained(delta), state["optimiser"], self.config.server_lr
        )
        return {"w": {**tree.add(w, delta), **trained}, "optimiser": moments}  # BatchNorm statistics: the mean

    @handler
    async def update(self, me: Site, msg: Global) -> Update:
        w = await train(self.config, learner(self.config, self.model_of(me)), me, self.start(me, msg.w))
        self.keep(me, w)
        p = client_weight(self.config, me)
        return Update(tree.scale({name: w[name] - msg.w[name] for name in msg.w}, p), p)

    def trained(self, w: Params) -> Params:
        """All but the statistics of BatchNorm."""
        return statistics_apart(self.model.buffers, w)[0]
