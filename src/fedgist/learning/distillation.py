"""Losses and steps by which models teach models: users a generator, a generator a user, an ensemble a student."""

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor

from fedgist.core.tree import Tree
from fedgist.learning.optimisers import Weights
from fedgist.learning.training import Trainer, cross_entropy, samples


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


def divergence(teacher: Tensor, student: Tensor, mask: Tensor) -> Tensor:
    """KL(softmax(teacher) ‖ softmax(student)) from logits, the mean over the samples that count."""
    each = F.kl_div(F.log_softmax(student, 1), F.log_softmax(teacher, 1), reduction="none", log_target=True).sum(1)
    return (each * mask).sum() / mask.sum()


@dataclass(frozen=True)
class GuidedTrainer:
    """A user's training in FedGen: its own samples, and generated latents that enter its model at `latent`.

    A batch holds, besides the samples, latents `z` for labels `label` and perhaps latents `echo` for the labels of the
    samples themselves; `on` is 0 in steps that are not guided.
    """

    trainer: Trainer
    latent: str

    def init(self, w: Weights) -> Tree:
        return self.trainer.init(w)

    def step(self, carry: Tree, batch: Tree, pool: Tree, lr: Tensor, *extra: Tensor) -> Tree:
        """A step down CE(x, y) + α CE(z, label) + β KL(softmax(h(echo)) ‖ softmax(f(x))): Eq. 5, where α = 1, β = 0."""
        model = self.trainer.model
        alpha, beta = extra
        x, y = samples(batch, pool)

        def objective(trained: Weights, buffers: Weights) -> tuple[Tensor, Weights, Tree]:
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
