"""Knowledge acquisition: models that learn from shared inputs with soft labels, and from data of their own.

`Taught` is what all methods share in which a server's student and the clients' own models learn from such inputs; a
method that inherits from it writes only how the inputs come to be.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import torch
from torch import Tensor

from fedgist.core.errors import FedgistError
from fedgist.core.federation import Federation, Site, State
from fedgist.core.message import Done, Params, float16, float32, message, wire
from fedgist.core.method import handler
from fedgist.core.rng import Rng
from fedgist.core.task import Data, Model, Samples, Task
from fedgist.core.tree import Tree
from fedgist.core.work import scan
from fedgist.data.client_data import ClientData
from fedgist.families.evaluation import Hits, Score
from fedgist.families.local_training import learner, plan_of, train, trainer
from fedgist.families.own_model import OwnModel, OwnModelOptions
from fedgist.families.participation import active_option, client_weight, n_ref_option, weighting_option
from fedgist.families.private_training import PrivatelyTrained
from fedgist.learning.distillation import Distiller
from fedgist.learning.evaluation import scores
from fedgist.options import option


@dataclass(frozen=True)
class TaughtOptions(OwnModelOptions):
    """Who learns, from how much, and how; method configurations inherit these."""

    active: float = active_option()
    weighting: str = weighting_option("inverse")
    n_ref: int = n_ref_option()
    warm_up: int = option(20, "Epochs on its own data when a client is first asked.", low=0, safe=("0..1000",))
    learners: str = option("all", "Who learns; server leaves clients as warmed up.", choices=("all", "server"))
    buffer: int = option(2560, "Inputs that are remembered; the oldest go first.", low=1, safe=("1..100000",))
    distil_every: int = option(1, "Rounds between lessons.", low=1)
    distil_steps: int = option(100, "Steps of a lesson.", low=0, safe=("0..10000",))
    distil_batch: int = option(256, "Inputs in a step of a lesson.", low=1, safe=("1..4096",))
    distil_lr: float = option(0.1, "Learning rate of lessons; the optimiser is that of local training.", above=0)
    temperature: float = option(20.0, "Temperature T of the distillation.", above=0)
    fresh_student: bool = option(False, "The server's student starts anew in every lesson.")


@message
class Train:
    """Train on your own data: the warm-up if it is the first time."""


@message
class Trained:
    """The weight p_k = n_k / n_ref."""

    p: float = wire(additive=True, paper=False, low=0, high=1, holds="size")


@message
class Lesson:
    """New inputs and their soft labels."""

    x: Tensor = wire(float32, float16, shape=("count", "size"), holds="images")
    logits: Tensor = wire(shape=("count", "classes"), holds="logits")


Options = TypeVar("Options", bound=TaughtOptions)


class Taught(PrivatelyTrained[Options], OwnModel[Options]):
    """Abstract: a server with a student `w` and a `buffer`, clients with a model `w` and a buffer of their own."""

    def __init__(self, config: Options, task: Task, inputs: tuple[int, ...], layer: str | None):
        """`inputs` is the shape of one input; where it enters another `layer` than the first, there is no student."""
        super().__init__(config, task)
        self.inputs, self.layer = inputs, layer
        if layer and config.learners == "server":
            raise FedgistError("learners=server has nobody learn with layer, where there is no student: set it to all")

    @property
    def warm_up_steps(self) -> int:
        """Of DP-SGD, when a client is first asked."""
        return math.ceil(self.config.warm_up / self.config.sampling)

    by_training = (Trained,)

    @property
    def derived(self) -> tuple[type, ...]:
        """All that is asked of a client's model, but what it scores on data of its own."""
        return tuple(one.reply for one in self.handlers.values() if one.reply not in (Trained, Score, Hits))

    @property
    def most_steps(self) -> int:
        return max(self.warm_up_steps, super().most_steps)

    def student_init(self, rng: Rng) -> State:
        return {"w": self.model.init(rng), "buffer": self._nothing()}

    def _nothing(self) -> Params:
        return {"x": torch.zeros(0, *self.inputs), "logits": torch.zeros(0, self.task.classes)}

    def remember(self, buffer: Params, x: Tensor, logits: Tensor) -> Params:
        """First in, first out."""
        new = {"x": x, "logits": logits}
        return {name: torch.cat([old.to(new[name]), new[name]])[-self.config.buffer :] for name, old in buffer.items()}

    async def teach(
        self, state: State, fed: Federation, cohort: Sequence[str], x: Tensor, logits: Tensor, sent: Tensor
    ) -> State:
        """New inputs `x` with their soft labels: remembered, taught to the student and, as `sent`, to the cohort."""
        state = {**state, "buffer": self.remember(state["buffer"], x, logits)}
        if self.config.learners == "all":
            await fed.ask(cohort, Lesson(sent.flatten(1), logits), Done)
        return {**state, "w": await self.teach_student(state, fed)}

    async def teach_student(self, state: State, fed: Federation) -> Params:
        """The student's weights after this round."""
        w: Params = state["w"]
        if self.layer is not None or fed.round % self.config.distil_every:
            return w
        w = self.model.init(fed.rng("student")) if self.config.fresh_student else w
        return await self.lesson(self.model, w, state["buffer"], fed.rng("lesson"))

    async def lesson(self, model: Model, w: Params, known: Params, rng: Rng, own: Data | None = None) -> Params:
        """`w` after learning from what is known, each step beside a batch of `own` samples where there are any."""
        plain = trainer(replace(self.config, noise_multiplier=0.0), model)
        learner = Distiller(plain, self.config.temperature, self.layer)
        inputs = ClientData(known["x"], known["logits"].argmax(1), self.task.classes)
        plan: Tree = inputs.steps(rng("taught"), self.config.distil_steps, self.config.distil_batch)
        start, lr = (w, learner.init(w)), torch.tensor(self.config.distil_lr, dtype=torch.float64)
        if own is None or own.n == 0:
            w, _ = await scan(learner.step, start, plan, known, lr)
        else:
            batches = own.steps(rng("own"), self.config.distil_steps, self.config.batch)
            plan = {"taught": plan, "own": self.config.with_moves(own, batches, rng("own"))}
            w, _ = await scan(learner.step_with_own, start, plan, known, lr, own.pool)
        return w

    @handler
    async def train(self, me: Site, msg: Train) -> Trained:
        first = "warm" not in me.state
        if first or self.config.learners == "all":
            config, rng, learned = self.config, me.rng("batches"), learner(self.config, self.model_of(me))
            if first and not config.noise_multiplier:
                plan = config.with_moves(me.data, me.data.epochs(rng, config.warm_up, config.batch), rng)
            else:
                plan = plan_of(config, learned, me, self.warm_up_steps if first else None)
            me.state["w"] = await train(config, learned, me, me.state["w"], plan=plan)
            me.state["warm"] = True
        return Trained(client_weight(self.config, me))

    @handler
    async def learn(self, me: Site, msg: Lesson) -> Done:
        known = me.state.get("buffer", self._nothing())
        known = self.remember(known, msg.x.unflatten(1, self.inputs), msg.logits)
        me.state["buffer"] = known
        if me.round % self.config.distil_every == 0:
            model, rng = self.model_of(me), me.rng("lesson")
            own = None if self.config.noise_multiplier else me.data  # a lesson has no noise of its own
            me.state["w"] = await self.lesson(model, me.state["w"], known, rng, own=own)
        return Done()

    async def evaluate(self, state: State, fed: Federation, test: Samples) -> dict[str, float]:
        """The student, and, unless they keep their scores to themselves, the mean over the clients' models."""
        if self.task.private:
            return await scores(self.model, state["w"], test)
        found = await super().evaluate(state, fed, test)
        found["accuracy_clients"] = found["accuracy"]
        if self.layer is None:
            found |= await scores(self.model, state["w"], test)
        return found

    def weights(self, state: State, model: str | None = None) -> Params | None:
        w: Params | None = state["w"] if self.layer is None else None
        return w
