"""Heads of clients' own on features that all have in common: the common head, moved by what a client itself holds."""

from abc import abstractmethod
from dataclasses import dataclass
from typing import TypeVar, final

import torch
from torch import Tensor

from fedgist.core.federation import Federation, Site, State
from fedgist.core.message import Bounds, Done, Params, float32, float64, message, wire
from fedgist.core.method import Method, handler
from fedgist.core.task import Model, Samples, Task
from fedgist.families.evaluation import Evaluate, Score, over_clients, score, score_bounds
from fedgist.learning.evaluation import scores
from fedgist.learning.ridge import moved, symmetric
from fedgist.options import option


@dataclass(frozen=True)
class OwnHeadOptions:
    own: bool = option(
        False, "Every client keeps a head of its own: the common one, moved by its own sums, which nobody else sees."
    )


Options = TypeVar("Options", bound=OwnHeadOptions)


@message
class Head:
    """The common head, for a client to make its own of."""

    seed: int
    mean: Tensor = wire(float64, float32, shape=("features",))
    weight: Tensor = wire(float64, float32, shape=("features", "classes"))
    intercept: Tensor = wire(float64, float32, shape=("classes",))


class OwnHeads(Method[Options]):
    """Abstract: a linear classifier, of which `weights` makes a model. A client keeps its own as the server does."""

    def __init__(self, config: Options, task: Task):
        super().__init__(config, task)
        self.leave_out({Head: not config.own, Evaluate: not config.own})

    @abstractmethod
    async def own_sums(self, me: Site, head: Head) -> tuple[Tensor, Tensor]:
        """Σ uuᵀ as its upper triangle and Σ u(y − 1/c)ᵀ over a client's samples, u = (z, 1)."""

    @final
    def model_of(self, me: Site) -> Model:
        return self.model

    def bounds(self, model: str) -> Bounds:
        return {**super().bounds(model), **score_bounds(self.task)}

    async def evaluate(self, state: State, fed: Federation, test: Samples) -> dict[str, float]:
        """The common model; the mean over clients where each has its own."""
        if self.config.own:
            return await over_clients(fed, Evaluate())
        return await scores(self.model, self.weights(state) or {}, test)

    def client_weights(self, me: Site, sent: Params) -> Params | None:
        """None also at a client that was away when heads were made."""
        return self.weights(me.state) if "weight" in me.state else None

    @handler
    async def adapt(self, me: Site, msg: Head) -> Done:
        products, targets = await self.own_sums(me, msg)
        common = torch.cat([msg.weight, msg.intercept[None] - 1 / self.task.classes]).double()
        own = moved(common, symmetric(products), targets)
        weight, intercept = own[:-1], own[-1] + 1 / self.task.classes
        me.state |= {"seed": msg.seed, "mean": msg.mean, "weight": weight, "intercept": intercept}
        return Done()

    @handler
    async def test(self, me: Site, msg: Evaluate) -> Score:
        return await score(self.model, self.client_weights(me, {}), me)
