"""FedTGP: trainable global prototypes with an adaptive margin, for clients of any architecture. Zhang et al. 2024.

Deviations from the paper and from its published code (docs/fedtgp.md tells more):
1. The pull is λ times the mean squared difference of features, and by default the margin is the largest of the classes'
   distances to their nearest neighbour, both as in the code; `margin=pairs` takes the two classes farthest apart.
2. A class that nobody ever had has no global prototype: nothing is pushed away from it.
3. A client answers with its own classifier; the code takes the nearest global prototype.
4. Prototypes larger than 1e6 are refused across machines, so that no distance is beyond float32.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

import fedgist.api as fg
from fedgist import models
from fedgist.data.client_data import ClientData
from fedgist.learning.contrastive import distance
from fedgist.learning.label_logits import Averager
from fedgist.learning.optimisers import SGD
from fedgist.learning.training import Carry, Trainer

LARGEST = 1e6


@dataclass(frozen=True)
class Config(fg.OwnModelOptions):
    pull: float = fg.option(10.0, "Weight λ of the distance to the global prototype of a sample's class.", low=0)
    threshold: float = fg.option(100.0, "Largest margin τ between classes.", low=0)
    margin: str = fg.option(
        "nearest",
        "Margin δ: the largest distance of a class to its nearest other class, or that of any two.",
        ("nearest", "pairs"),
    )
    server_epochs: int = fg.option(100, "Passes S of the server over the clients' prototypes in a round.", low=0)
    server_batch: int = fg.option(10, "Prototypes in a batch of the server.", low=1)
    server_lr: float = fg.option(0.01, "Learning rate of the global prototypes.", above=0)
    active: float = fg.active_option()


@fg.message
class Global:
    """The global prototypes P̂^c, and which classes have one."""

    prototypes: Tensor = fg.wire(shape=("classes", "features"), low=-LARGEST, high=LARGEST)
    known: Tensor = fg.wire(torch.uint8, shape=("classes",), paper=False, high=1)


@fg.message
class Local:
    """A client's prototypes P_i^c, the mean features of its classes (zeros for others), and which it holds."""

    prototypes: Tensor = fg.wire(shape=("classes", "features"), low=-LARGEST, high=LARGEST, holds="features")
    held: Tensor = fg.wire(torch.uint8, shape=("classes",), paper=False, high=1, holds="presence")


def pulled(
    output: fg.Output, y: Tensor, mask: Tensor, w: fg.Params, prototypes: Tensor, known: Tensor, pull: Tensor
) -> Tensor:
    """A client's loss: cross-entropy + λ ‖f(x) − P̂^y‖² / d, the latter where its class has a global prototype."""
    apart = distance(output.features, y, prototypes, known) / output.features.shape[1]
    return fg.cross_entropy(output, y, mask, w) + pull * (apart * mask).sum() / mask.sum()


def adaptive_margin(centres: Tensor, threshold: float, kind: str) -> float:
    """δ = min(max gap, τ) over the classes' centres Q^c; 0 where there is only one of them."""
    if len(centres) < 2:
        return 0.0
    gaps = torch.linalg.vector_norm(centres[:, None] - centres, dim=2)
    if kind == "nearest":
        gaps = gaps.fill_diagonal_(torch.inf).amin(1)
    return min(float(gaps.max()), threshold)


def contrastive(received: Tensor, y: Tensor, mask: Tensor, prototypes: Tensor, known: Tensor, margin: Tensor) -> Tensor:
    """−log( e^−(φ(P, P̂^y) + δ) / (e^−(φ(P, P̂^y) + δ) + Σ_{c≠y} e^−φ(P, P̂^c)) ), the mean over received prototypes P.

    φ is the Euclidean distance; the sum is over classes that are known.
    """
    distances = torch.linalg.vector_norm(received[:, None] - prototypes, dim=2)
    own = y[:, None] == torch.arange(len(known), device=y.device)
    logits = -(distances + margin * own).masked_fill(known == 0, torch.inf)
    return (F.cross_entropy(logits, y, reduction="none") * mask).sum() / mask.sum()


@dataclass(frozen=True)
class Prototypes:
    """P̂^c = F(P̆^c; θ): an embedding of each class and a net with one hidden layer, both trained by the server."""

    classes: int
    trainer: Trainer

    def init(self, rng: fg.Rng) -> fg.Params:
        net = self.trainer.model
        return {"embedding": rng("embedding").normal(self.classes, *net.input_shape), **net.init(rng("net"))}

    def of(self, w: fg.Params) -> Tensor:
        return self.trainer.model(w, w["embedding"]).logits

    def step(self, carry: Carry, batch: fg.Tree, pool: fg.Tree, known: Tensor, lr: Tensor, margin: Tensor) -> Carry:
        received, y = pool["x"][batch["index"]], pool["y"][batch["index"]]

        def objective(w: fg.Params, buffers: fg.Params) -> tuple[Tensor, fg.Params, tuple[()]]:
            return contrastive(received, y, batch["mask"], self.of(w), known, margin), {}, ()

        return self.trainer.descend(carry, lr, objective)[0]


class FedTGP(fg.OwnModel[Config]):
    name = "fedtgp"
    summary = "Clients keep their models and are drawn to prototypes that the server trains apart (Zhang et al. 2024)."
    citation = "zhang2024fedtgp"
    profiles = {
        "paper": {"dataset": "cifar10", "model": "resnet18", "clients": 20, "alpha": 0.1, "rounds": 1000, "batch": 10}
        | {"lr": 0.01, "eval_every": 10},
        "small": {"dataset": "mnist5k", "model": "lenet5", "rounds": 30, "steps": 20, "optimiser": "adam", "lr": 0.001}
        | {"server_epochs": 20, "server_batch": 32, "eval_every": 5}
        | {"note": "5,000 digits, 10 clients, 30 rounds of 20 steps, 20 passes of the server"},
        "demo": {"model": "mlp", "rounds": 15, "steps": 20, "optimiser": "adam", "lr": 0.001}
        | {"server_epochs": 20, "server_batch": 32, "note": "15 rounds of 20 steps, 20 passes of the server"},
        "toy": {"model": "mlp:hidden=16", "rounds": 2, "steps": 3, "batch": 8, "lr": 0.1, "active": 0.6}
        | {"server_epochs": 3},
    }

    def __init__(self, config: Config, task: fg.Task):
        super().__init__(config, task)
        self.size = task.classes, fg.one_feature_size(self.name, task)
        net = models.build("mlp", self.size[1:], self.size[1], hidden=self.size[1:])
        self.teacher = Prototypes(task.classes, Trainer(net, SGD()))

    def bounds(self, model: str) -> fg.Bounds:
        return {**super().bounds(model), "features": fg.Exactly(self.size[1])}

    def server_init(self, rng: fg.Rng) -> fg.State:
        nothing = {"prototypes": torch.zeros(self.size), "known": torch.zeros(self.size[0])}
        return {"teacher": self.teacher.init(rng), **nothing}

    async def round(self, state: fg.State, fed: fg.Federation) -> fg.State:
        lesson = Global(state["prototypes"], state["known"])
        answers = await fed.ask(fed.sample(self.config.active), lesson, Local)
        sent = [answers[id] for id in sorted(answers)]
        received = torch.cat([local.prototypes[local.held > 0] for local in sent])
        y = torch.cat([local.held.nonzero().flatten() for local in sent])
        if not len(y):
            return state
        present = y.unique()
        known = state["known"].index_fill(0, present, 1)
        centres = torch.stack([received[y == c].mean(0) for c in present])
        margin = adaptive_margin(centres, self.config.threshold, self.config.margin)
        pool = ClientData(received, y, self.task.classes)
        plan = pool.epochs(fed.rng("batches"), self.config.server_epochs, self.config.server_batch)
        rate_and_margin = torch.tensor([self.config.server_lr, margin], dtype=torch.float64)
        w, _ = await fg.scan(self.teacher.step, (state["teacher"], {}), plan, pool.pool, known, *rate_and_margin)
        prototypes = self.teacher.of(w) * known[:, None]
        fed.show("global prototypes", prototypes[known > 0], known.nonzero().flatten())
        return {"teacher": w, "prototypes": prototypes, "known": known}

    @fg.handler
    async def learn(self, me: fg.Site, msg: Global) -> Local:
        model, known = self.model_of(me), msg.known.to(msg.prototypes.dtype)
        learner = fg.trainer(self.config, model, pulled)
        pull = torch.tensor(self.config.pull, dtype=torch.float64)  # rounded where it is used
        w = await fg.train(self.config, learner, me, me.state["w"], msg.prototypes, known, pull)
        me.state["w"] = w
        plan = me.data.epochs(me.rng("told"), 1, 4 * self.config.batch)  # forward only: room for larger batches
        none = torch.zeros(self.size), torch.zeros(self.size[0])
        sums, counts = await fg.scan(Averager(model, "features").step, none, plan, me.data.pool, w)
        return Local(sums / counts.clamp_min(1)[:, None], counts > 0)
