"""Knowledge acquisition: models that learn from shared inputs with soft labels, and from data of their own.

`Taught` is what all methods share in which a server's student and the clients' own models learn from such inputs; a
method that inherits from it writes only how the inputs come to be.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fedgist.core.federation import Federation, Site
from fedgist.core.message import Done, float16, float32, message, wire
from fedgist.core.rng import Rng
from fedgist.core.tree import Tree
from fedgist.core.work import scan
from fedgist.data.client_data import ClientData
from fedgist.learning.distillation import divergence
from fedgist.learning.evaluation import accuracy
from fedgist.learning.optimisers import Weights
from fedgist.learning.own_model import OwnModel, OwnModelOptions
from fedgist.learning.training import Trainer, client_weight, cross_entropy, samples, train, trainer
from fedgist.models.model import Model
from fedgist.options import option


@dataclass(frozen=True)
class Distiller:
    """Learns from a pool of inputs `x` (which enter the model at `layer`) and the teachers' `logits` on them."""

    trainer: Trainer
    temperature: float = 1.0
    layer: str | None = None

    def init(self, w: Weights) -> Tree:
        return self.trainer.init(w)

    def loss(self, student: Tensor, teacher: Tensor, mask: Tensor) -> Tensor:
        """T² KL(softmax(teacher / T) ‖ softmax(student / T)) (Hinton et al. 2015)."""
        return self.temperature**2 * divergence(teacher / self.temperature, student / self.temperature, mask)

    def step(self, carry: Tree, batch: Tree, taught: Tree, lr: Tensor) -> Tree:
        """One step on soft labels alone."""
        x, teacher = taught["x"][batch["index"]], taught["logits"][batch["index"]]

        def objective(trained: Weights, buffers: Weights) -> tuple[Tensor, Weights, Tree]:
            output = self.trainer.model({**trained, **buffers}, x, train=True, start=self.layer)
            return self.loss(output.logits, teacher, batch["mask"]), output.buffers, ()

        return self.trainer.descend(carry, lr, objective)[0]

    def step_with_own(self, carry: Tree, batch: Tree, taught: Tree, lr: Tensor, own: Tree) -> Tree:
        """One step on soft labels and on a batch `own` of the student's data, whose BatchNorm statistics are kept."""
        mine, theirs = batch["own"], batch["taught"]
        x, teacher = taught["x"][theirs["index"]], taught["logits"][theirs["index"]]
        own_x, own_y = samples(mine, own)

        def objective(trained: Weights, buffers: Weights) -> tuple[Tensor, Weights, Tree]:
            w = {**trained, **buffers}
            output = self.trainer.model(w, own_x, train=True)
            loss = cross_entropy(output, own_y, mine["mask"], trained)
            logits = self.trainer.model(w, x, train=True, start=self.layer).logits
            return loss + self.loss(logits, teacher, theirs["mask"]), output.buffers, ()

        return self.trainer.descend(carry, lr, objective)[0]


@dataclass(frozen=True)
class TaughtOptions(OwnModelOptions):
    """Who learns, from how much, and how; method configurations inherit these."""

    active: float = option(0.0, "Clients asked in a round: a number, a fraction below 1, or 0 for all.", low=0)
    weighting: str = option("samples", "Weight of a client.", choices=("samples", "uniform", "inverse"))
    n_ref: int = option(1 << 20, "Sample count that weighs 1; no client may hold more.", low=1)
    warm_up: int = option(20, "Epochs on its own data when a client is first asked.", low=0)
    learners: str = option("all", "Who learns; server leaves clients as warmed up.", choices=("all", "server"))
    buffer: int = option(2560, "Inputs that are remembered; the oldest go first.", low=1)
    distil_every: int = option(1, "Rounds between lessons.", low=1)
    distil_steps: int = option(100, "Steps of a lesson.", low=0)
    distil_batch: int = option(256, "Inputs in a step of a lesson.", low=1)
    distil_lr: float = option(0.1, "Learning rate of lessons; the optimiser is that of local training.", above=0)
    temperature: float = option(20.0, "Temperature T of the distillation.", above=0)
    fresh_student: bool = option(False, "The server's student starts anew in every lesson.")


@message
class Train:
    """Train on your own data: the warm-up if it is the first time."""


@message
class Trained:
    """The weight p_k = n_k / n_ref."""

    p: float = wire(additive=True, paper=False)


@message
class Lesson:
    """New inputs and their soft labels."""

    x: Tensor = wire(float32, float16, shape=("count", "size"))
    logits: Tensor = wire(shape=("count", "classes"))


class Taught(OwnModel):
    """Abstract: a server with a student `w` and a `buffer`, clients with a model `w` and a buffer of their own."""

    inputs: tuple[int, ...]
    """The shape of one input."""
    layer: str | None
    """The layer that it enters; if not the first, the layers before it learn nothing, and there is no student."""

    def student_init(self, rng: Rng) -> dict[str, Any]:
        return {"w": self.model.init(rng), "buffer": self._nothing()}

    def _nothing(self) -> Weights:
        return {"x": torch.zeros(0, *self.inputs), "logits": torch.zeros(0, self.task.classes)}

    def remember(self, buffer: Weights, x: Tensor, logits: Tensor) -> Weights:
        """First in, first out."""
        new = {"x": x, "logits": logits}
        return {name: torch.cat([old.to(new[name]), new[name]])[-self.config.buffer :] for name, old in buffer.items()}

    async def teach_student(self, state: dict[str, Any], fed: Federation) -> Weights:
        """The student's weights after this round."""
        w: Weights = state["w"]
        if self.layer is not None or fed.round % self.config.distil_every:
            return w
        w = self.model.init(fed.rng("student")) if self.config.fresh_student else w
        return await self.lesson(self.model, w, state["buffer"], fed.rng("lesson"))

    async def lesson(
        self, model: Model, w: Weights, known: Weights, rng: Rng, own: ClientData | None = None
    ) -> Weights:
        """`w` after learning from what is known, each step beside a batch of `own` samples where there are any."""
        learner = Distiller(trainer(self.config, model), self.config.temperature, self.layer)
        inputs = ClientData(known["x"], known["logits"].argmax(1), self.task.classes)
        plan: Any = inputs.steps(rng("taught"), self.config.distil_steps, self.config.distil_batch)
        start, lr = (w, learner.init(w)), torch.tensor(self.config.distil_lr, dtype=torch.float64)
        if own is None or own.n == 0:
            w, _ = await scan(learner.step, start, plan, known, lr)
        else:
            batches = own.steps(rng("own"), self.config.distil_steps, self.config.batch)
            plan = {"taught": plan, "own": self.config.changed(own, batches, rng("own"))}
            w, _ = await scan(learner.step_with_own, start, plan, known, lr, own.pool)
        return w

    def p(self, me: Site) -> float:
        """A client's weight; that of a client without data is 0."""
        return client_weight(self.config, me)

    async def train(self, me: Site, msg: Train) -> Trained:
        first = "warm" not in me.state
        if first or self.config.learners == "all":
            config, rng = self.config, me.rng("batches")
            if first:
                plan = config.changed(me.data, me.data.epochs(rng, config.warm_up, config.batch), rng)
            else:
                plan = config.plan(me.data, rng)
            me.state["w"] = await train(config, trainer(config, self.model_of(me)), me, me.state["w"], plan=plan)
            me.state["warm"] = True
        return Trained(self.p(me))

    async def learn(self, me: Site, msg: Lesson) -> Done:
        known = me.state.get("buffer", self._nothing())
        known = self.remember(known, msg.x.unflatten(1, self.inputs), msg.logits)
        me.state["buffer"] = known
        if me.round % self.config.distil_every == 0:
            model, rng = self.model_of(me), me.rng("lesson")
            me.state["w"] = await self.lesson(model, me.state["w"], known, rng, own=me.data)
        return Done()

    async def evaluate(self, state: Any, fed: Federation, test: tuple[Tensor, Tensor]) -> dict[str, float]:
        """The student, and the mean over the clients' models."""
        found = await super().evaluate(state, fed, test)
        found["accuracy_clients"] = found["accuracy"]
        if self.layer is None:
            found["accuracy"] = await accuracy(self.model, state["w"], test)
        return found

    def weights(self, state: Any) -> Weights | None:
        w: Weights | None = state["w"] if self.layer is None else None
        return w
