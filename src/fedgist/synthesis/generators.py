"""A conditional generator of latent features, and its training on the heads of many users. Zhu et al. 2021 (FedGen).

G(z | y, ε) is a small MLP: the noise ε beside the one-hot label, one hidden layer with BatchNorm and ReLU, and out
comes an activation as it would enter the latent layer of the users' models. Nothing here has seen an image.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from fedgist import models
from fedgist.core.message import Params
from fedgist.core.rng import Rng
from fedgist.core.task import Model
from fedgist.core.tree import Tree
from fedgist.core.work import gradient
from fedgist.learning.distillation import averaged_logits_loss, weighted_users_loss
from fedgist.learning.optimisers import Optimiser
from fedgist.learning.training import Carry
from fedgist.models.model import LayeredModel


@dataclass(frozen=True)
class Generator:
    """Labels and noise to latent features. A value that holds no tensors, like every model."""

    classes: int
    latent: tuple[int, ...]
    noise: int = 32
    hidden: int = 256

    @cached_property
    def _net(self) -> LayeredModel:
        inputs = (self.noise + self.classes,)
        return models.build("mlp", inputs, math.prod(self.latent), hidden=(self.hidden,), norm="batch")

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        return self._net.shapes

    @property
    def buffers(self) -> frozenset[str]:
        return self._net.buffers

    def init(self, rng: Rng) -> Params:
        return self._net.init(rng)

    def __call__(self, w: Params, y: Tensor, noise: Tensor, train: bool = False) -> tuple[Tensor, Params]:
        """Latents [batch, *latent] for labels [batch] and noise [batch, d]; train mode also gives new statistics."""
        label = (y[:, None] == torch.arange(self.classes, device=y.device)).to(noise.dtype)
        output = self._net(w, torch.cat([noise, label], 1), train=train)
        return output.logits.reshape(len(y), *self.latent), output.buffers

    def draw(self, kind: str, shape: Sequence[int], rng: Rng) -> Tensor:
        """Noise for labels of this shape: `uniform` in [0, 1) or `normal`."""
        size = (*shape, self.noise)
        return rng.uniform(*size) if kind == "uniform" else rng.normal(*size)

    def sample(self, w: Params, y: Tensor, noise: Tensor) -> Tensor:
        """Latents for labels of any shape, in evaluation mode."""
        z, _ = self(w, y.flatten(), noise.flatten(0, -2))
        return z.reshape(*y.shape, *self.latent)


def draw_labels(prior: Tensor, shape: tuple[int, int], rng: Rng) -> Tensor:
    """Labels y ~ p̂(y), on the host."""
    if not (count := shape[0] * shape[1]):
        return torch.zeros(shape, dtype=torch.int64)
    return torch.multinomial(prior.double().cpu(), count, replacement=True, generator=rng.generator()).view(shape)


def diversity_loss(noise: Tensor, z: Tensor) -> Tensor:
    """exp( mean_ij [ −d₂(ε_i, ε_j) · d₁(z_i, z_j) ] ): small when different noise gives different latents.

    d₂ is the mean squared and d₁ the mean absolute difference; all pairs count, those of different labels too.
    """
    z = z.flatten(1)
    apart = (noise[:, None] - noise[None]).square().mean(2)
    spread = (z[:, None] - z[None]).abs().mean(2)
    return torch.exp(-(apart * spread).mean())


@dataclass(frozen=True)
class GeneratorTrainer:
    """Trains a generator until the users' heads agree on the labels it was given."""

    generator: Generator
    model: Model
    latent: str
    optimiser: Optimiser
    loss: str = "code"
    diversity: float = 1.0

    def init(self, w: Params) -> Tree:
        """The optimiser's state at the start."""
        return self.optimiser.init({name: w[name] for name in w if name not in self.generator.buffers})

    def step(self, carry: Carry, batch: Tree, heads: Params, weights: Tensor, lr: Tensor) -> Carry:
        """One step: (generator, optimiser state) -> the same after it.

        `batch` holds labels y [B] and noise [B, d]; `heads` the users' heads, stacked; `weights` [users, classes] is
        how much each user's word counts for each label (only in loss="code").
        """
        w, state = carry
        buffers = {name: w[name] for name in self.generator.buffers}
        trained = {name: w[name] for name in w if name not in buffers}

        def objective(trained: Params) -> tuple[Tensor, Params]:
            z, new = self.generator({**trained, **buffers}, batch["y"], batch["noise"], train=True)
            logits = torch.func.vmap(lambda head: self.model(head, z, start=self.latent).logits)(heads)
            if self.loss == "paper":
                teaching = averaged_logits_loss(logits, batch["y"])
            else:
                teaching = weighted_users_loss(logits, batch["y"], weights)
            return teaching + self.diversity * diversity_loss(batch["noise"], z), new

        grads, (_, new) = gradient(objective, trained)
        trained, state = self.optimiser.step(trained, grads, state, lr)
        return {**trained, **buffers, **new}, state
