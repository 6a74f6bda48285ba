"""What methods share whose clients start from weights that the server sends: which travel, how they are summed.

A method that inherits from `GlobalModel` writes only what makes it itself: its `round` and its client's answer.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import TypeVar, final

from fedgist.core import tree
from fedgist.core.errors import FedgistError, MixedModels
from fedgist.core.federation import Federation, Site, State
from fedgist.core.message import Bounds, Params, message, wire
from fedgist.core.method import handler
from fedgist.core.rng import Rng
from fedgist.core.task import Model, Samples, Task
from fedgist.families.evaluation import (
    EvaluateThis,
    EvaluateThisOnOwnLabels,
    Hits,
    Score,
    hits_on_own_labels,
    over_clients,
    pooled_over_clients,
    score,
    score_bounds,
)
from fedgist.families.local_training import LocalOptions
from fedgist.families.participation import active_option, client_weight, n_ref_option, weighted, weighting_option
from fedgist.families.private_training import PrivatelyTrained
from fedgist.learning.evaluation import scores
from fedgist.options import option

T = TypeVar("T")


@dataclass(frozen=True)
class GlobalModelOptions(LocalOptions):
    """Options of the methods that average weights."""

    active: float = active_option()
    weighting: str = weighting_option()
    share: str = option(
        "all", "What travels: all weights, the head alone, or all but it.", choices=("all", "head", "body")
    )
    batch_norm: str = option("aggregate", "BatchNorm statistics: averaged, or local.", choices=("aggregate", "local"))
    common_start: bool = option(True, "Clients begin at the server's weights; false reproduces a missing broadcast.")
    published: bool = option(
        False,
        "Evaluate also as FedGen's released code does: own BatchNorm statistics, test images of own labels.",
        safe=(False,),
        reveals="The server chooses how small a share of the test images is counted.",
    )
    n_ref: int = n_ref_option()


Options = TypeVar("Options", bound=GlobalModelOptions)


@message
class Global:
    """The server's weights w_t."""

    w: Params


@message
class Local:
    """p_k w_k and p_k, of which the server sees only the sums."""

    pw: Params = wire(shape="model", additive=True, per="p", holds="weights")
    p: float = wire(additive=True, paper=False, low=0, high=1, holds="size")


def average(total: Local, otherwise: Params) -> Params:
    """Σ p_k w_k / Σ p_k, or what there was before if nobody who answered holds any data."""
    return tree.scale(total.pw, 1 / total.p) if total.p > 0 else otherwise


def statistics_apart(buffers: Collection[str], w: Mapping[str, T]) -> tuple[dict[str, T], dict[str, T]]:
    """Trained weights and BatchNorm statistics, for messages of which a paper counts only the former."""
    return (
        {name: value for name, value in w.items() if name not in buffers},
        {name: value for name, value in w.items() if name in buffers},
    )


@dataclass(frozen=True)
class Travel:
    """Which tensors of a model travel; the others stay with the client."""

    share: str
    batch_norm: str
    head_from: str | None = None
    """The layer at which a head begins; without it, the classifier."""

    def head(self, model: Model) -> frozenset[str]:
        return model.names_from(self.head_from or model.classifier)

    def names(self, model: Model) -> list[str]:
        """What is sent, in the order of the model."""
        home = model.buffers if self.batch_norm == "local" else frozenset()
        head = self.head(model)
        shared = {"all": model.shapes.keys(), "head": head, "body": model.shapes.keys() - head}[self.share]
        return [name for name in model.shapes if name in shared and name not in home]

    def shapes(self, model: Model) -> dict[str, tuple[int, ...]]:
        return {name: model.shapes[name] for name in self.names(model)}


class SentWeights(PrivatelyTrained[Options]):
    """Abstract: clients complete the weights that come with those that stayed, train, and give back what travels."""

    def __init__(self, config: Options, task: Task, head_from: str | None = None):
        super().__init__(config, task)
        self.travel = Travel(config.share, config.batch_norm, head_from)
        self._sent_names = {name: self.travel.names(model) for name, model in task.models.items()}
        whole = all(len(self._sent_names[name]) == len(model.shapes) for name, model in task.models.items())
        # What is whole, the server tests itself.
        self.leave_out({EvaluateThis: whole, EvaluateThisOnOwnLabels: not config.published})

    def bounds(self, model: str) -> Bounds:
        """`model`: all that travels, which is `weights` (trained) and `statistics` (of BatchNorm) together."""
        net = self.task.models[model]
        template = self.travel.shapes(net)
        weights, statistics = statistics_apart(net.buffers, template)
        parts = {"model": template, "weights": weights, "statistics": statistics}
        return {**super().bounds(model), **parts, **score_bounds(self.task)}

    def client_init(self, me: Site) -> State:
        model = self.model_of(me)
        kept = set(model.shapes) - set(self.travel.names(model)) | (model.buffers if self.config.published else set())
        if not kept and self.config.common_start:  # as with most of a hundred thousand clients
            return {"home": {}}
        w = model.init(Rng(me.rng.root)("common start") if self.config.common_start else me.rng)
        return {"home": {name: w[name] for name in w if name in kept}} | (
            {} if self.config.common_start else {"own start": w}
        )

    @final
    def start(self, me: Site, w: Params) -> Params:
        """Where a client begins: what came and what stayed (or, to reproduce an omission, its own net)."""
        own: Params = me.state.pop("own start", {})
        return own or {**me.state["home"], **w}

    @final
    def keep(self, me: Site, w: Params) -> None:
        """Put away, after training, what stays with the client."""
        me.state["home"] = {name: w[name] for name in me.state["home"]}

    @final
    async def sent(self, me: Site, w: Params) -> Local:
        """What a client sends of its weights, of which it keeps what stays."""
        self.keep(me, w)
        p = client_weight(self.config, me)
        return Local(await weighted({name: w[name] for name in self._sent_names[me.info["model"]]}, p), p)

    def client_weights(self, me: Site, sent: Params) -> Params | None:
        """None where all of it travels, so that the server's model is also the client's."""
        model = self.model_of(me)
        if me.info["model"] == self.task.model and len(self.travel.names(model)) == len(model.shapes):
            return None
        return self.completed(me, sent)

    @final
    def completed(self, me: Site, w: Params) -> Params:
        """A client's model: of these weights what travels, the rest its own."""
        return {**me.state["home"], **{name: w[name] for name in self._sent_names[me.info["model"]]}}

    @handler
    async def test(self, me: Site, msg: EvaluateThis) -> Score:
        return await score(self.model_of(me), self.completed(me, msg.w), me)

    @handler
    async def test_on_own_labels(self, me: Site, msg: EvaluateThisOnOwnLabels) -> Hits:
        return await hits_on_own_labels(self.model_of(me), {**msg.w, **me.state["home"]}, me, msg.shares)


class GlobalModel(SentWeights[Options]):
    """Abstract: one server model `w`; of another architecture is a client only where no more than the head travels."""

    def __init__(self, config: Options, task: Task, head_from: str | None = None):
        super().__init__(config, task, head_from)
        for name, model in task.models.items():
            if self.travel.shapes(model) != self.travel.shapes(self.model):
                what = {"all": "weights", "head": "heads", "body": "bodies"}[config.share]
                raise MixedModels(f"{self.name} averages {what}: {name} and {task.model} have different ones")

    def server_init(self, rng: Rng) -> State:
        w = self.model.init(rng)
        return {"w": {name: w[name] for name in self.travel.names(self.model)}}

    async def evaluate(self, state: State, fed: Federation, test: Samples) -> dict[str, float]:
        """The global model on all test images; the mean over clients where they complete it with parts of their own."""
        if len(self.travel.names(self.model)) < len(self.model.shapes):
            found = await over_clients(fed, EvaluateThis(state["w"]))
        else:
            found = await scores(self.model, state["w"], test)
        if self.config.published:
            request = EvaluateThisOnOwnLabels(state["w"], len(fed.ids))
            found["accuracy_published"] = await pooled_over_clients(fed, request)
        return found

    def weights(self, state: State, model: str | None = None) -> Params | None:
        w: Params = state["w"]
        return w


def check_updates(method: str, options: GlobalModelOptions) -> None:
    """Refuse the options with which an update is not a weighted sum of the round's gradients."""
    if options.optimiser != "sgd":
        raise FedgistError(f"{method} divides updates by the steps that sgd takes: set optimiser to sgd")
    if options.keep_momentum:
        raise FedgistError(f"{method} counts on momentum that starts at zero in each round: set keep_momentum to false")
    if not options.common_start:
        raise FedgistError(f"{method} sends updates of the server's weights: set common_start to true")
