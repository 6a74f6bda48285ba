"""What all methods share in which every client keeps a model of its own, of an architecture of its own."""

from dataclasses import dataclass
from typing import TypeVar

from fedgist.core.errors import FedgistError
from fedgist.core.federation import Federation, Site, State
from fedgist.core.message import Bounds, Params
from fedgist.core.method import Method, handler
from fedgist.core.rng import Rng
from fedgist.core.task import Samples, Task
from fedgist.families.evaluation import (
    Evaluate,
    EvaluateOwnLabels,
    Hits,
    Score,
    hits_on_own_labels,
    over_clients,
    pooled_over_clients,
    score,
    score_bounds,
)
from fedgist.families.local_training import LocalOptions
from fedgist.options import option


@dataclass(frozen=True)
class OwnModelOptions(LocalOptions):
    """Options of the methods whose clients keep their models."""

    keep_momentum: bool = option(True, "Keep the optimiser's state from round to round instead of starting anew.")
    common_start: bool = option(False, "All clients of one architecture begin at the same weights.")
    published: bool = option(
        False,
        "Evaluate also as FedGen's released code does: on the test images of own labels.",
        safe=(False,),
        reveals="The server chooses how small a share of the test images is counted.",
    )


Options = TypeVar("Options", bound=OwnModelOptions)


class OwnModel(Method[Options]):
    """Abstract: the weights `w` of a client's model live in its state, and are tested where they are."""

    def __init__(self, config: Options, task: Task):
        super().__init__(config, task)
        self.leave_out({EvaluateOwnLabels: not config.published})

    def bounds(self, model: str) -> Bounds:
        return {**super().bounds(model), **score_bounds(self.task)}

    def client_init(self, me: Site) -> State:
        rng = Rng(me.rng.root)("common start") if self.config.common_start else me.rng
        return {"w": self.model_of(me).init(rng)}

    async def evaluate(self, state: State, fed: Federation, test: Samples) -> dict[str, float]:
        found = await over_clients(fed, Evaluate())
        if self.config.published:
            found["accuracy_published"] = await pooled_over_clients(fed, EvaluateOwnLabels(len(fed.ids)))
        return found

    def client_weights(self, me: Site, sent: Params) -> Params | None:
        w: Params = me.state["w"]
        return w

    @handler
    async def test(self, me: Site, msg: Evaluate) -> Score:
        return await score(self.model_of(me), me.state["w"], me)

    @handler
    async def test_on_own_labels(self, me: Site, msg: EvaluateOwnLabels) -> Hits:
        return await hits_on_own_labels(self.model_of(me), me.state["w"], me, msg.shares)


def one_feature_size(method: str, task: Task) -> int:
    """The number of features that the models of all clients have; refused where it differs."""
    sizes = {name: model.feature_size for name, model in task.models.items()}
    if len(set(sizes.values())) > 1:
        found = ", ".join(f"{name} has {size}" for name, size in sizes.items())
        raise FedgistError(f"{method} needs models with one number of features, but {found}; set feature_size")
    return task.models[task.model].feature_size
