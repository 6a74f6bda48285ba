"""DP-SGD: training in which each record of a batch counts for no more than the noise hides. Abadi et al. 2016.

Every record's gradient is found alone and clipped to the norm C; noise of deviation σC is added to their sum, once in
each step, and only that is used: weights, momentum and all that follows are made from it.

Deviations from the paper, Algorithm 1:
1. Sums are divided by a public number instead of the mean size of a batch, which would tell how many records there are.
2. No batch is cut to a size: where one record pushes another out, the two move the sum by 2C.
3. The gradient b aᵀ of a linear layer's weights is never made for a single record: its norm is ‖b‖ ‖a‖ ("ghost norms",
   Li et al. 2022), and the clipped sum of all is one product of matrices.
"""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from fedgist.core.message import Params
from fedgist.core.rng import words
from fedgist.core.task import Batches, Model, Tap
from fedgist.core.tree import Tree
from fedgist.core.work import gradient, stacking
from fedgist.dp.discrete_gaussian import MASK, Bits, discrete_gaussian
from fedgist.dp.releases import grid
from fedgist.learning.optimisers import Optimiser
from fedgist.learning.training import Carry, Penalty, samples

SLACK = 1e-5
"""Gradients are clipped by so much more than asked for: norms and sums are rounded in float32."""
LOST = 2.0**-126
"""Squares below this vanish in float32, though a server may choose weights at which they make up the norm: they count
as this much."""


def poisson(records: int, steps: int, rate: float, bits: Bits) -> Batches:
    """Batches in which each record is with the chance `rate`, whatever else is; filled up, under mask 0, to one width.

    The width, a power of two so that batches of several clients can be stacked, is that of the largest, and stays where
    the records are.
    """
    chosen = (bits(steps * records) & MASK).view(steps, records) <= (MASK if rate == 1 else int(rate * MASK) - 1)
    most = int(chosen.sum(1).max()) if chosen.numel() else 0
    shape = steps, 1 << max(0, most - 1).bit_length()
    index = torch.zeros(shape, dtype=torch.int64, device=chosen.device)
    mask = torch.zeros(shape, device=chosen.device)
    step, record = chosen.nonzero(as_tuple=True)
    slot = chosen.cumsum(1)[step, record] - 1
    index[step, slot], mask[step, slot] = record, 1.0
    return {"index": index, "mask": mask}


@dataclass(frozen=True)
class Gradients:
    """Gradients of single records: all tensors have a first dimension of records."""

    whole: Params
    """As they are."""
    entering: Params
    """Of the weights of linear layers, by the layer: the factor a of b aᵀ; b is the gradient of the layer's bias."""

    def squares(self) -> Tensor:
        """The squared norm of each record's gradient, or, where that is too small for float32, more."""
        own = {name: _square(grad.flatten(1)) for name, grad in self.whole.items()}
        weights = [own[f"{layer}.bias"] * _square(a) + LOST for layer, a in self.entering.items()]
        return torch.stack([*own.values(), *weights]).sum(0)

    def clipped_sum(self, mask: Tensor, limit: float) -> Params:
        """Σ over records of g · min(1, C/‖g‖). A record whose gradient is not finite counts as 0: none can spoil it."""
        squares = self.squares()
        counts = mask.bool() & squares.isfinite()
        factor = torch.where(counts, (limit * (1 - SLACK) / squares.sqrt().clamp_min(1e-30)).clamp_max(1.0), 0.0)

        def each(of: Tensor, grad: Tensor) -> Tensor:
            return of.view(-1, *[1] * (grad.dim() - 1))

        def kept(grad: Tensor) -> Tensor:
            return torch.where(each(counts, grad), grad, 0.0)

        whole = {name: each(factor, grad) * kept(grad) for name, grad in self.whole.items()}
        total = {name: grad.sum(0) for name, grad in whole.items()}
        for layer, a in self.entering.items():
            total[f"{layer}.weight"] = whole[f"{layer}.bias"].T @ kept(a)
        return total


def _square(rows: Tensor) -> Tensor:
    return rows.square().sum(1) + rows.shape[1] * LOST


def gradients(model: Model, w: Params, x: Tensor, y: Tensor) -> Gradients:
    """The gradient of the cross-entropy of each record alone."""
    apart = model.buffers | {f"{layer}.weight" for layer in model.linear}
    held = {name: value for name, value in w.items() if name in apart}

    def loss(moved: Params, x: Tensor, y: Tensor) -> tuple[Tensor, Params]:
        tap = Tap()
        output = model({**held, **moved}, x[None], train=True, tap=tap)
        return F.cross_entropy(output.logits, y[None]), {layer: tap.entering[layer][0] for layer in model.linear}

    moved = {name: value for name, value in w.items() if name not in apart}
    with stacking():
        found = torch.func.vmap(torch.func.grad(loss, has_aux=True), in_dims=(None, 0, 0))(moved, x, y)
    return Gradients(*found)


def _normal(seed: Tensor, count: int) -> Tensor:
    """Standard normal numbers by Box and Muller, two from the 64 bits of a word: noise is half of what a step costs."""
    bits = words(seed, (count + 1) // 2)
    u, v = ((((bits >> shift) & 0x7FFFFF).float() + 0.5) * 2.0**-23 for shift in (41, 18))
    radius, angle = torch.sqrt(-2.0 * torch.log(u)), 2.0 * math.pi * v
    return torch.cat([radius * torch.cos(angle), radius * torch.sin(angle)])[:count]


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
    penalty: Penalty | None = None
    """What is added to the mean loss: of weights and what everybody knows, never of records."""

    def init(self, w: Params) -> Tree:
        """The optimiser's state at the start."""
        return self.optimiser.init(self.trained(w))

    def step(self, carry: Carry, batch: Tree, pool: Tree, lr: Tensor, *extra: object) -> Carry:
        """One step on a random batch, `index` and `mask`, with noise as integers, or which its `seed` decides."""
        w, state = carry
        trained = self.trained(w)
        x, y = samples(batch, pool)
        total = gradients(self.model, w, x, y).clipped_sum(batch["mask"], self.clip)
        noised = self.noised({name: total[name] for name in trained}, batch)
        mean = {name: value / self.batch for name, value in noised.items()}
        if (penalty := self.penalty) is not None:
            slope, _ = gradient(lambda trained: (penalty(trained, *extra), ()), trained)
            mean = {name: mean[name] + slope[name] for name in mean}
        trained, state = self.optimiser.step(trained, mean, state, lr)
        return {**w, **trained}, state

    def trained(self, w: Params) -> Params:
        return {name: w[name] for name in w if name not in self.model.buffers}

    def noised(self, total: Params, batch: Tree) -> Params:
        """The sum with the noise of a step: on a grid where it is drawn as integers, else of floating-point numbers."""
        sizes = [value.numel() for value in total.values()]
        if "noise" in batch:
            step, _ = self.grid
            return {
                name: (((value.double() / step).round() + part.view(value.shape)) * step).to(value.dtype)
                for (name, value), part in zip(total.items(), batch["noise"].split(sizes), strict=True)
            }
        noise = _normal(batch["seed"], sum(sizes)).to(next(iter(total.values()))).split(sizes)
        return {
            name: value + self.noise * self.clip * part.view(value.shape)
            for (name, value), part in zip(total.items(), noise, strict=True)
        }

    @property
    def grid(self) -> tuple[float, int]:
        """The step of the grid, and the deviation of the noise in steps."""
        return grid(self.noise * self.clip, self.clip, self.model.size)

    def draw(self, steps: int, bits: Bits) -> Tensor:
        """The noise of so many steps, as integers."""
        drawn = discrete_gaussian(steps * self.model.size, self.grid[1], bits)
        return drawn.to(torch.int32).view(steps, self.model.size)
