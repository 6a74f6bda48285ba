"""Losses and steps by which models teach models: users a generator, a generator a user, many a student."""

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor

from fedgist.core.message import Params
from fedgist.core.tree import Tree
from fedgist.learning.training import Carry, Trainer, cross_entropy, samples


def averaged_logits_loss(logits: Tensor, y: Tensor) -> Tensor:
    """l(σ(1/K Σ_k g_k(z)), y), the mean over the batch (FedGen, Eq. 4); logits are [users, batch, classes]."""
    return F.cross_entropy(logits.mean(0), y)


def weighted_users_loss(logits: Tensor, y: Tensor, weights: Tensor) -> Tensor:
    """Σ_k mean_i ω_{k,y_i} l(σ(g_k(z_i)), y_i) (FedGen's released code); weights ω are [users, classes]."""
    users, batch, classes = logits.shape
    losses = F.cross_entropy(logits.reshape(-1, classes), y.repeat(users), reduction="none")
    return (weights[:, y] * losses.view(users, batch)).sum(0).mean()


def label_weights(counts: Tensor) -> Tensor:
    """ω_{k,y} = (1 + c_{k,y}) / Σ_j (1 + c_{j,y}): a user's say on a label is its share of that label's samples."""
    return (1 + counts) / (1 + counts).sum(0)


def divergences(teacher: Tensor, student: Tensor) -> Tensor:
    """KL(softmax(teacher) ‖ softmax(student)) from logits, for each sample."""
    return F.kl_div(F.log_softmax(student, 1), F.log_softmax(teacher, 1), reduction="none", log_target=True).sum(1)


def divergence(teacher: Tensor, student: Tensor, mask: Tensor) -> Tensor:
    """The mean of these over the samples that count."""
    return (divergences(teacher, student) * mask).sum() / mask.sum()


@dataclass(frozen=True)
class GuidedTrainer:
    """A user's training in FedGen: its own samples, and generated latents that enter its model at `latent`.

    A batch holds, besides the samples, latents `z` for labels `label` and perhaps latents `echo` for the labels of the
    samples themselves; `on` is 0 in steps that are not guided.
    """

    trainer: Trainer
    latent: str

    def init(self, w: Params) -> Tree:
        return self.trainer.init(w)

    def step(self, carry: Carry, batch: Tree, pool: Tree, lr: Tensor, *extra: Tensor) -> Carry:
        """A step down CE(x, y) + α CE(z, label) + β KL(softmax(h(echo)) ‖ softmax(f(x))): Eq. 5, where α = 1, β = 0."""
        model = self.trainer.model
        alpha, beta = extra
        x, y = samples(batch, pool)

        def objective(trained: Params, buffers: Params) -> tuple[Tensor, Params, tuple[()]]:
            w = {**trained, **buffers}
            output = model(w, x, train=True)
            loss = cross_entropy(output, y, batch["mask"], trained)
            guess = model(w, batch["z"], start=self.latent).logits
            loss = loss + batch["on"] * alpha * F.cross_entropy(guess, batch["label"])
            if "echo" in batch:
                teacher = model(w, batch["echo"], start=self.latent).logits.detach()
                loss = loss + batch["on"] * beta * divergence(teacher, output.logits, batch["mask"])
            return loss, output.buffers, ()

        return self.trainer.descend(carry, lr, objective)[0]


@dataclass(frozen=True)
class Distiller:
    """Learns from a pool of inputs `x` (which enter the model at `layer`) and the teachers' `logits` on them."""

    trainer: Trainer
    temperature: float = 1.0
    layer: str | None = None

    def init(self, w: Params) -> Tree:
        return self.trainer.init(w)

    def loss(self, student: Tensor, teacher: Tensor, mask: Tensor) -> Tensor:
        """T² KL(softmax(teacher / T) ‖ softmax(student / T)) (Hinton et al. 2015)."""
        return self.temperature**2 * divergence(teacher / self.temperature, student / self.temperature, mask)

    def step(self, carry: Carry, batch: Tree, taught: Tree, lr: Tensor | None = None) -> Carry:
        """One step on soft labels alone, at one rate for all steps or at that of the batch."""
        x, teacher = taught["x"][batch["index"]], taught["logits"][batch["index"]]

        def objective(trained: Params, buffers: Params) -> tuple[Tensor, Params, tuple[()]]:
            output = self.trainer.model({**trained, **buffers}, x, train=True, start=self.layer)
            return self.loss(output.logits, teacher, batch["mask"]), output.buffers, ()

        return self.trainer.descend(carry, batch["lr"] if lr is None else lr, objective)[0]

    def step_with_own(self, carry: Carry, batch: Tree, taught: Tree, lr: Tensor, own: Tree) -> Carry:
        """One step on soft labels and on a batch `own` of the student's data, whose BatchNorm statistics are kept."""
        mine, theirs = batch["own"], batch["taught"]
        x, teacher = taught["x"][theirs["index"]], taught["logits"][theirs["index"]]
        own_x, own_y = samples(mine, own)

        def objective(trained: Params, buffers: Params) -> tuple[Tensor, Params, tuple[()]]:
            w = {**trained, **buffers}
            output = self.trainer.model(w, own_x, train=True)
            loss = cross_entropy(output, own_y, mine["mask"], trained)
            logits = self.trainer.model(w, x, train=True, start=self.layer).logits
            return loss + self.loss(logits, teacher, theirs["mask"]), output.buffers, ()

        return self.trainer.descend(carry, lr, objective)[0]
