"""Model inversion: inputs that trained networks are sure of, found by descending on the input. Co-Dream, Eqs. 1, 5, 6.

The regularisers are those of DeepInversion (Yin et al. 2020); their weights are options, and total variation has the
two forms that public code gives it, which differ by a factor of about a thousand.

Deviations from the paper:
1. Eq. 6 speaks of "mean and variance" and prints σ: the variance is compared, as in the released code.
2. The paper names adversarially robust dreams without a formula: here the output is judged at x + δ, where δ is the
   step of size ε per value that hurts most to first order, so min_x max_{‖δ‖∞ ≤ ε} is descended.
"""

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from fedgist.core import tree
from fedgist.core.message import Params
from fedgist.core.rng import Rng
from fedgist.core.task import Model, Tap
from fedgist.core.work import compute, gradient, scan
from fedgist.learning.optimisers import Adam
from fedgist.learning.training import Carry
from fedgist.options import only_images, option

log = logging.getLogger("fedgist")

TV_FORMS = ("mean", "norms")


def entropy(logits: Tensor) -> Tensor:
    """H(softmax(logits)) in nats, the mean over the batch: how unsure a model is (Eq. 1)."""
    log_p = logits.log_softmax(1)
    return -(log_p.exp() * log_p).sum(1).mean()


def statistics_gap(tap: Tap) -> Tensor:
    """Σ_l ‖μ_l(x) − E μ_l‖₂ + ‖σ²_l(x) − E σ²_l‖₂ over the BatchNorm layers that `tap` has heard (Eq. 6)."""
    gaps = [
        torch.linalg.vector_norm(one) for s in tap for one in (s.mean - s.running_mean, s.variance - s.running_variance)
    ]
    return torch.stack(gaps).sum()


def total_variation(x: Tensor, form: str) -> Tensor:
    """How much neighbouring pixels of a batch of images differ.

    mean: Σ of squared differences down and across, over the number of values (Co-Dream's released code).
    norms: Σ of the Frobenius norms of the differences down, across and along both diagonals (DeepInversion).
    """
    down, across = x[..., 1:, :] - x[..., :-1, :], x[..., 1:] - x[..., :-1]
    if form == "mean":
        return (down.square().sum() + across.square().sum()) / x.numel()
    falling, rising = x[..., 1:, 1:] - x[..., :-1, :-1], x[..., 1:, :-1] - x[..., :-1, 1:]
    return torch.stack([torch.linalg.vector_norm(part) for part in (down, across, falling, rising)]).sum()


@dataclass(frozen=True)
class Objective:
    """ℓ̃(x, θ) = H(f_θ(x)) + R(x) (Eq. 1), or with labels CE(f_θ(x), y) + R(x) (Eq. 5). A value, like every model.

    With `layer`, x is the activation that enters it. The labels y are 0, 1, … in turn, so nobody has to send them.
    """

    model: Model
    layer: str | None = None
    conditional: bool = False
    entropy: float = 1.0
    statistics: float = 10.0
    tv: float = 2.5e-5
    tv_form: str = "mean"
    l2: float = 3e-8
    robust: float = 0.0

    def __call__(self, w: Params, x: Tensor) -> Tensor:
        tap = Tap()
        logits = self.model(w, x, start=self.layer, tap=tap).logits
        if self.robust:
            logits = self.model(w, x + self.attack(w, x), start=self.layer).logits
        loss = self.entropy * self.doubt(logits)
        if self.statistics and tap:
            loss = loss + self.statistics * statistics_gap(tap)
        if self.tv and x.dim() == 4:
            loss = loss + self.tv * total_variation(x, self.tv_form)
        return loss + self.l2 * torch.linalg.vector_norm(x)

    def doubt(self, logits: Tensor) -> Tensor:
        """What the dreams are to make small: the entropy of the output, or its distance from the labels."""
        if not self.conditional:
            return entropy(logits)
        return F.cross_entropy(logits, torch.arange(len(logits), device=logits.device) % self.model.classes)

    def attack(self, w: Params, x: Tensor) -> Tensor:
        """δ = ε sign ∇_x doubt (Goodfellow et al. 2015), a constant for the descent."""
        slope, _ = gradient(lambda at: (self.doubt(self.model(w, at, start=self.layer).logits), ()), x.detach())
        return (self.robust * slope.sign()).detach()


def has_statistics(model: Model, layer: str | None = None) -> bool:
    """Whether what enters the model (at `layer`) passes a BatchNorm, without which Eq. 6 says nothing."""
    tap = Tap()
    shape = model.input_shape if layer is None else model.layer_shapes[layer]
    model(model.init(Rng(0)), torch.zeros(1, *shape), start=layer, tap=tap)
    return len(tap) > 0


class Space(Protocol):
    """What is optimised, and how dreams come of it."""

    def render(self, v: Params) -> Tensor: ...


@dataclass(frozen=True)
class Dreamer:
    """Descends on the variables v of a batch of dreams. A value, so that equal models of many clients are one work."""

    objective: Objective
    space: Space
    adam: ClassVar[Adam] = Adam()

    def gradient(self, v: Params, w: Params) -> Params:
        """∇_v ℓ̃ at the dreams that v stands for."""
        found, _ = gradient(lambda at: (self.objective(w, self.space.render(at)), ()), v)
        return found

    def step(self, carry: Carry, index: Tensor, w: Params, lr: Tensor) -> Carry:
        """One step of Adam, for `scan`: (v, optimiser state) -> the same after it."""
        v, state = carry
        return self.adam.step(v, self.gradient(v, w), state, lr)

    async def descend(self, v: Params, w: Params, steps: int, lr: Tensor) -> Params:
        """The variables after so many steps."""
        index = torch.arange(steps, device=next(iter(v.values())).device)
        v, _ = await scan(self.step, (v, self.adam.init(v)), index, w, lr)
        return v

    async def update(self, v: Params, w: Params, local_steps: int, lr: Tensor) -> Params:
        """The gradient, or (after M local steps) the pseudo-gradient: how far v went."""
        if not local_steps:
            return await compute(self.gradient, v, w)
        return tree.sub(await self.descend(v, w, local_steps, lr), v)

    def logits(self, v: Params, w: Params) -> Tensor:
        """What the model says about the dreams."""
        return self.objective.model(w, self.space.render(v), start=self.objective.layer).logits


@dataclass(frozen=True)
class Unsure:
    """The adaptive term: −H(student(x)), which drives dreams to where the student is still unsure."""

    model: Model
    space: Space

    def gradient(self, v: Params, w: Params) -> Params:
        found, _ = gradient(lambda at: (-entropy(self.model(w, self.space.render(at)).logits), ()), v)
        return found


@dataclass(frozen=True)
class DreamOptions:
    """What dreams are to be like; method configurations inherit these."""

    conditional: bool = option(False, "Dreams of given classes: cross-entropy (Eq. 5) in the place of the entropy.")
    entropy: float = option(1.0, "Weight of the entropy of the output (Eq. 1).", low=0)
    statistics: float = option(10.0, "Weight of the BatchNorm statistics (Eq. 6).", low=0)
    tv: float = option(2.5e-5, "Weight of total variation.", low=0)
    tv_form: str = option("mean", "Total variation as in the released code, or DeepInversion's norms.", TV_FORMS)
    l2: float = option(3e-8, "Weight of the norm of the dreams.", low=0)
    robust: float = option(0.0, "Largest change of a value against which dreams are robust; 0 is none.", low=0)

    def objective(self, model: Model, layer: str | None = None) -> Objective:
        terms = (self.conditional, self.entropy, self.statistics, self.tv, self.tv_form, self.l2, self.robust)
        return Objective(model, layer, *terms)

    def dreamers(self, models: Mapping[str, Model], space: Space, layer: str | None) -> dict[Model, Dreamer]:
        """Of each model; says so where the BatchNorm term is meant to be and cannot."""
        for name, model in models.items():
            if layer is None and self.tv not in (0, DreamOptions.tv):
                only_images("tv", model.input_shape)
            if self.statistics and not has_statistics(model, layer):
                log.warning(f"codream: dreams pass no BatchNorm in {name}, so its BatchNorm term (Eq. 6) is absent")
        return {model: Dreamer(self.objective(model, layer), space) for model in models.values()}
