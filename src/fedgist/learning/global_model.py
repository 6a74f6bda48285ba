"""What all methods with one global model share: which weights travel, how they are summed, what is evaluated.

A method that inherits from `GlobalModel` writes only what makes it itself: its `round` and its client's handler.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from fedgist.core import tree
from fedgist.core.errors import FedgistError
from fedgist.core.federation import Federation, Site
from fedgist.core.message import Bounds, Params, message, wire
from fedgist.core.method import Method, Task
from fedgist.core.rng import Rng
from fedgist.learning.evaluation import (
    EvaluateThis,
    EvaluateThisOnOwnLabels,
    Hits,
    Score,
    accuracy,
    hits_on_own_labels,
    over_clients,
    pooled_over_clients,
    score,
)
from fedgist.learning.training import LocalOptions, client_weight
from fedgist.models.model import Model
from fedgist.options import option


@dataclass(frozen=True)
class GlobalModelOptions(LocalOptions):
    """Options of the methods that average weights."""

    active: float = option(0.0, "Clients asked in a round: a number, a fraction below 1, or 0 for all.", low=0)
    weighting: str = option("samples", "Weight of a client in the average.", choices=("samples", "uniform"))
    share: str = option("all", "What travels: all weights, or the head alone.", choices=("all", "head"))
    batch_norm: str = option("aggregate", "BatchNorm statistics: averaged, or local.", choices=("aggregate", "local"))
    common_start: bool = option(True, "Clients begin at the server's weights; false reproduces a missing broadcast.")
    published: bool = option(
        False, "Evaluate also as FedGen's released code does: own BatchNorm statistics, test images of own labels."
    )
    n_ref: int = option(1 << 20, "Sample count that weighs 1; no client may hold more.", low=1)


@message
class Global:
    """The server's weights w_t."""

    w: Params


@message
class Local:
    """p_k w_k and p_k, of which the server sees only the sums."""

    pw: Params = wire(shape="model", additive=True)
    p: float = wire(additive=True, paper=False)


class GlobalModel(Method):
    """Abstract: a server whose weights every client starts from. What does not travel stays in a client's state."""

    prototypes: ClassVar[bool] = False
    """Whether there is a global model for each architecture, instead of one for all."""

    def __init__(self, config: Any, task: Task):
        super().__init__(config, task)
        for name, model in task.models.items():
            if not self.prototypes and self._template(model) != self._template(self.model):
                what = "weights" if config.share == "all" else "heads"
                raise FedgistError(f"{self.name} averages {what}: {name} and {task.model} have different ones")

    def model_of(self, me: Site) -> Model:
        """A client's architecture: the server's, unless only the head travels."""
        model: Model = self.task.models[me.info["model"]]
        return model

    def head(self, model: Model) -> frozenset[str]:
        """The names that travel when only the head does."""
        return model.head_names

    def travelling(self, model: Model) -> list[str]:
        """The names that are sent, in the order of the model."""
        home = model.buffers if self.config.batch_norm == "local" else frozenset()
        shared = self.head(model) if self.config.share == "head" else model.shapes
        return [name for name in model.shapes if name in shared and name not in home]

    def _template(self, model: Model) -> dict[str, tuple[int, ...]]:
        return {name: model.shapes[name] for name in self.travelling(model)}

    def bounds(self, model: str) -> Bounds:
        """`model`: all that travels, which is `weights` (trained) and `statistics` (of BatchNorm) together."""
        buffers, template = self.task.models[model].buffers, self._template(self.task.models[model])
        return {
            "model": template,
            "weights": {name: shape for name, shape in template.items() if name not in buffers},
            "statistics": {name: shape for name, shape in template.items() if name in buffers},
        }

    def parts(self, model: Model, w: Params) -> tuple[Params, Params]:
        """`w` as trained weights and BatchNorm statistics, for messages of which a paper counts only the former."""
        return (
            {name: value for name, value in w.items() if name not in model.buffers},
            {name: value for name, value in w.items() if name in model.buffers},
        )

    def server_init(self, rng: Rng) -> Any:
        w = self.model.init(rng)
        return {"w": {name: w[name] for name in self.travelling(self.model)}}

    def client_init(self, me: Site) -> Any:
        model = self.model_of(me)
        w = model.init(Rng(me.rng.root)("common start") if self.config.common_start else me.rng)
        kept = set(model.shapes) - set(self.travelling(model)) | (model.buffers if self.config.published else set())
        return {"home": {name: w[name] for name in w if name in kept}} | (
            {} if self.config.common_start else {"own start": w}
        )

    def start(self, me: Site, w: Params) -> Params:
        """Where a client begins: what came and what stayed (or, to reproduce an omission, its own net)."""
        own: Params = me.state.pop("own start", {})
        return own or {**me.state["home"], **w}

    def keep(self, me: Site, w: Params) -> None:
        """Put away, after training, what stays with the client."""
        me.state["home"] = {name: w[name] for name in me.state["home"]}

    def share(self, me: Site, w: Params) -> Local:
        """What a client sends of its weights; p_k = n_k / n_ref, or 1 for everybody who has data."""
        self.keep(me, w)
        p = self.weight(me)
        return Local(tree.scale({name: w[name] for name in self.travelling(self.model_of(me))}, p), p)

    def weight(self, me: Site) -> float:
        return client_weight(self.config, me)

    async def evaluate(self, state: Any, fed: Federation, test: tuple[Tensor, Tensor]) -> dict[str, float]:
        """The global model on all test images; the mean over clients where they complete it with parts of their own."""
        if len(self.travelling(self.model)) < len(self.model.shapes):
            found = await over_clients(fed, EvaluateThis(state["w"]))
        else:
            found = {"accuracy": await accuracy(self.model, state["w"], test)}
        if self.config.published:
            request = EvaluateThisOnOwnLabels(state["w"], len(fed.ids))
            found["accuracy_published"] = await pooled_over_clients(fed, request)
        return found

    async def test(self, me: Site, msg: EvaluateThis) -> Score:
        return await score(self.model_of(me), {**msg.w, **me.state["home"]}, me)

    async def test_on_own_labels(self, me: Site, msg: EvaluateThisOnOwnLabels) -> Hits:
        return await hits_on_own_labels(self.model_of(me), {**msg.w, **me.state["home"]}, me, msg.shares)

    def weights(self, state: Any) -> Params:
        w: Params = state["w"]
        return w


def average(total: Any, otherwise: Params) -> Params:
    """Σ p_k w_k / Σ p_k, or what there was before if nobody who answered holds any data."""
    averaged: Params = tree.scale(total.pw, 1 / total.p) if total.p > 0 else otherwise
    return averaged
