"""DP-SGD: training in which each record of a batch counts for no more than the noise hides. Abadi et al. 2016.

Every record's gradient is found alone and clipped to the norm C; noise of deviation σC is added to their sum, once in
each step, and only that is used: weights, momentum and all that follows are made from it.

Deviations from the paper, Algorithm 1:
1. Sums are divided by a public number instead of the mean size of a batch, which would tell how many records there are.
2. No batch is cut to a size: where one record pushes another out, the two move the sum by 2C.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from fedgist.core.message import Params
from fedgist.core.rng import Rng, normal
from fedgist.core.task import Batches, Model
from fedgist.core.tree import Tree
from fedgist.core.work import stacking
from fedgist.learning.optimisers import Optimiser
from fedgist.learning.training import Carry, samples

SLACK = 1e-5
"""Gradients are clipped by so much more than asked for: norms and sums are rounded in float32."""


def poisson(records: int, steps: int, rate: float, rng: Rng) -> Batches:
    """Batches in which each record is with the chance `rate`, whatever else is; filled up, under mask 0, to one width.

    The width, a power of two so that batches of several clients can be stacked, is that of the largest, and stays where
    the records are.
    """
    chosen = torch.rand(steps, records, dtype=torch.float64, generator=rng.generator()) < rate
    most = int(chosen.sum(1).max()) if records else 0
    shape = steps, 1 << max(0, most - 1).bit_length()
    index, mask = torch.zeros(shape, dtype=torch.int64), torch.zeros(shape)
    step, record = chosen.nonzero(as_tuple=True)
    slot = chosen.cumsum(1)[step, record] - 1
    index[step, slot], mask[step, slot] = record, 1.0
    return {"index": index, "mask": mask}


def clipped_sum(grads: Params, mask: Tensor, limit: float) -> Params:
    """Σ over records of g · min(1, C/‖g‖), of gradients with a first dimension of records.

    A record whose gradient is not finite counts as 0, so that none can spoil the sum.
    """
    squares = torch.stack([grad.flatten(1).square().sum(1) for grad in grads.values()]).sum(0)
    counts = mask.bool() & squares.isfinite()
    factor = torch.where(counts, (limit * (1 - SLACK) / squares.sqrt().clamp_min(1e-30)).clamp_max(1.0), 0.0)
    whole = {name: torch.where(counts.view(-1, *[1] * (grad.dim() - 1)), grad, 0.0) for name, grad in grads.items()}
    return {name: torch.einsum("b,b...->...", factor, grad) for name, grad in whole.items()}


@dataclass(frozen=True)
class PrivateTrainer:
    """Training with cross-entropy by noisy sums of clipped gradients; a value, as `Trainer` is."""

    model: Model
    optimiser: Optimiser
    clip: float
    """C, which is how far a record moves a sum at most."""
    noise: float
    """σ: the deviation of the noise over C."""
    batch: int
    """The public number by which sums are divided."""

    def init(self, w: Params) -> Tree:
        """The optimiser's state at the start."""
        return self.optimiser.init(w)

    def step(self, carry: Carry, batch: Tree, pool: Tree, lr: Tensor) -> Carry:
        """One step on a random batch, `index` and `mask`, with noise that its `seed` decides."""
        w, state = carry
        x, y = samples(batch, pool)
        noised = self.noised(clipped_sum(self.gradients(w, x, y), batch["mask"], self.clip), batch["seed"])
        return self.optimiser.step(w, {name: value / self.batch for name, value in noised.items()}, state, lr)

    def gradients(self, w: Params, x: Tensor, y: Tensor) -> Params:
        """The gradient of each record alone."""

        def loss(w: Params, x: Tensor, y: Tensor) -> Tensor:
            return F.cross_entropy(self.model(w, x[None], train=True).logits, y[None])

        with stacking():
            found: Params = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0, 0))(w, x, y)
        return found

    def noised(self, total: Params, seed: Tensor) -> Params:
        """The sum with the noise of a step."""
        sizes = [value.numel() for value in total.values()]
        noise = normal(seed, (sum(sizes),), next(iter(total.values())).dtype).split(sizes)
        return {
            name: value + self.noise * self.clip * part.view(value.shape)
            for (name, value), part in zip(total.items(), noise, strict=True)
        }
