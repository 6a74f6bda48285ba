"""Local training: the options that the papers vary, and a client's round of it."""

import functools
import math
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from fedgist.core.errors import FedgistError
from fedgist.core.federation import Site
from fedgist.core.message import Params
from fedgist.core.rng import Rng
from fedgist.core.task import Batches, Data, Model
from fedgist.core.tree import Tree
from fedgist.core.work import Pool, scan
from fedgist.dp.discrete_gaussian import Bits
from fedgist.dp.randomness import simulated
from fedgist.learning.moves import draw_moves
from fedgist.learning.optimisers import optimiser
from fedgist.learning.private_training import PrivateTrainer, poisson
from fedgist.learning.training import Loss, Penalised, Penalty, Trainer, cross_entropy
from fedgist.options import ALL, Role, only_images, option


@dataclass(frozen=True)
class TrainingOptions:
    """How a client trains on its own data."""

    steps: int = option(
        0,
        "Local steps a round; 0 counts epochs instead.",
        low=0,
        safe=(0, "10..100000"),
        reveals="The fewer steps, the more of what is sent is the gradient of single samples, which can be seen in it.",
    )
    epochs: int = option(1, "Local epochs a round, when steps is 0.", low=1, safe=("1..100",))
    batch: int = option(
        32,
        "Samples in a batch, or all that a client has.",
        low=1,
        or_all=True,
        safe=("16..4096",),
        reveals="The smaller a batch, the more its gradient is that of single samples.",
    )
    lr: float = option(0.05, "Learning rate of the first round.", above=0)
    schedule: str = option(
        "constant",
        "How the learning rate falls over the rounds.",
        choices=("constant", "exponential", "cosine", "steps"),
    )
    decay: float = option(0.99, "Factor a round of the exponential schedule, or a step of steps.", above=0, high=1)
    horizon: int = option(100, "Rounds until the cosine schedule reaches zero.", low=1)
    optimiser: str = option("sgd", "Local optimiser.", choices=("sgd", "adam"))
    momentum: float = option(0.0, "Momentum of sgd.", low=0, high=0.9999)
    weight_decay: float = option(0.0, "L2 penalty in the optimiser.", low=0)
    keep_momentum: bool = option(False, "Keep the optimiser's state from round to round instead of starting anew.")
    clip: float = option(0.0, "Largest norm of a gradient; 0 does not clip.", low=0)
    crop: int = option(0, "Pixels by which images are shifted at random in each step, at most.", low=0)
    flip: bool = option(False, "Mirror half of the images at random in each step.")
    falls: tuple[int, ...] = option(
        (), "Rounds after which the schedule steps multiplies the rate by decay, as in 250,400.", low=1, role=Role.LATER
    )

    def lr_at(self, round: int) -> float:
        """The learning rate of a round (the first is 1)."""
        if self.schedule == "exponential":
            return self.lr * self.decay ** (round - 1)
        if self.schedule == "steps":
            return self.lr * self.decay ** sum(round > fall for fall in self.falls)
        if self.schedule == "cosine":
            return self.lr * 0.5 * (1 + math.cos(math.pi * min(1.0, (round - 1) / self.horizon)))
        return self.lr

    def plan(self, data: Data, rng: Rng) -> Batches:
        """The batches of one round, as indices."""
        steps, epochs, batch = self.steps, self.epochs, self.batch
        plan = data.steps(rng, steps, batch) if steps else data.epochs(rng, epochs, batch)
        return self.with_moves(data, plan, rng)

    def with_moves(self, data: Data, plan: Batches, rng: Rng) -> Batches:
        """Batches of `data` with how each of their images is shifted and mirrored, if any is."""
        if not (self.crop or self.flip):
            return plan
        only_images("crop or flip", data.x.shape[1:])
        height, width = data.x.shape[2:]
        if self.crop >= min(height, width):
            raise FedgistError(
                f"crop={self.crop} shifts images of {height} × {width} pixels out of sight: make it smaller"
            )
        index = plan["index"]
        return plan | {"moves": draw_moves(tuple(index.shape), self.crop, self.flip, rng("moves")).to(index.device)}


@dataclass(frozen=True)
class LocalOptions(TrainingOptions):
    """The same, and by DP-SGD where a run is private; most configurations of methods inherit these."""

    record_clip: float = option(
        1.0, "With noise_multiplier: largest norm of the gradient of a record.", low=1e-12, role=Role.LATER
    )
    sampling: float = option(
        0.1,
        "With noise_multiplier: the chance of a record to be in a batch. Sums are divided by `batch`, whatever is in "
        "them.",
        above=0,
        high=1,
        role=Role.LATER,
    )
    noise_multiplier: float = option(
        0.0,
        "Train by DP-SGD: deviation of a step's noise over record_clip; 0: in a private run the least that ε allows in "
        "all rounds, otherwise no noise.",
        low=0,
        role=Role.LATER,
    )

    @property
    def private_steps(self) -> int:
        """Steps a round of DP-SGD: as many as are given, or in which a record is met `epochs` times on average."""
        return self.steps or math.ceil(self.epochs / self.sampling)


def trainer(options: LocalOptions, model: Model, loss: Loss = cross_entropy) -> Trainer:
    """The trainer that a method's options describe."""
    if options.noise_multiplier:
        raise FedgistError(
            "DP-SGD is for the cross-entropy of a client's own records, and penalties that none is in: this objective "
            "is another, so set noise_multiplier to 0"
        )
    chosen = optimiser(options.optimiser, options.momentum, options.weight_decay)
    return Trainer(model, chosen, loss, options.clip)


def learner(options: LocalOptions, model: Model, penalty: Penalty | None = None) -> "Learner":
    """Training with cross-entropy, and a penalty that no record is in: as it is, or by DP-SGD."""
    if not options.noise_multiplier:
        return trainer(options, model, Penalised(penalty) if penalty else cross_entropy)
    check_by_record(options)
    chosen = optimiser(options.optimiser, options.momentum, options.weight_decay)
    return PrivateTrainer(model, chosen, options.record_clip, options.noise_multiplier, options.batch, penalty)


def check_by_record(options: LocalOptions) -> None:
    """Refuses what means nothing where gradients of single records are clipped, and their sums divided by `batch`."""
    if options.clip:
        raise FedgistError("clip bounds the gradient of a batch: in DP-SGD set record_clip instead")
    if options.batch == ALL:
        raise FedgistError(
            "batch=all tells how many records a client has, and DP-SGD divides by a number that everybody knows: set "
            "batch to about sampling times what you expect it to be"
        )


@functools.lru_cache(maxsize=1024)
def constant(value: float) -> Tensor:
    """A number as a computation takes it, rounded once, where it is used; one tensor for all clients need not be
    stacked."""
    return torch.tensor(value, dtype=torch.float64)


class Learner(Hashable, Protocol):
    """What `train` needs of a trainer."""

    def init(self, w: Params) -> Tree:
        """The optimiser's state at the start, which depends on the form of `w` alone."""

    def step(
        self, carry: tuple[Params, Tree], batch: Tree, pool: Tree, lr: Tensor, /, *extra: Any
    ) -> tuple[Params, Tree]: ...


def plan_of(options: TrainingOptions, learner: Learner, me: Site, steps: int | None = None) -> Batches:
    """The batches of one round; those of DP-SGD, so many steps or `options.private_steps`, come from what only the site
    knows, and so does the noise. In a simulation both come from the run's seed.
    """
    if not isinstance(learner, PrivateTrainer):
        return options.plan(me.data, me.rng("batches"))
    assert isinstance(options, LocalOptions)  # never quietly by other batches than the noise is worked out for
    steps, device = options.private_steps if steps is None else steps, me.data.y.device
    plan = poisson(me.data.n, steps, options.sampling, bits_of(me, "batches"))
    plan = {name: value.to(device) for name, value in plan.items()}
    plan = options.with_moves(me.data, plan, moves_of(me, me.rng("batches")))
    if me.secret is None:
        return plan | {"seed": me.rng("noise").seeds(steps).to(device)}
    return plan | {"noise": learner.draw(steps, me.secret("noise")).to(device)}


def bits_of(me: Site, name: str) -> Bits:
    """Random bits that only the site knows; in a simulation those of the run's seed."""
    return me.secret(name) if me.secret else simulated(me.rng(name))


def moves_of(me: Site, rng: Rng) -> Rng:
    """What decides how images of a secret batch are moved: it is secret, too. A record more in a batch has those after
    it take the next one's move, and who knew the moves would see all of their gradients change."""
    return Rng(int(me.secret("moves")(1))) if me.secret else rng


def pool_of(data: Data) -> Pool:
    """A client's samples, or, for one that has none, a blank one that no batch counts: its steps are noise alone."""
    return data.pool if data.n else Pool(x=data.x.new_zeros(1, *data.x.shape[1:]), y=data.y.new_zeros(1))


@functools.lru_cache(maxsize=4)
def _fresh(learner: Learner, form: tuple[tuple[str, torch.Size, torch.dtype, torch.device], ...]) -> Tree:
    """An optimiser's state at the start, the same object for all clients."""
    return learner.init({name: torch.zeros(shape, dtype=dtype, device=on) for name, shape, dtype, on in form})


async def train(
    options: TrainingOptions,
    learner: Learner,
    me: Site,
    w: Params,
    *extra: object,
    plan: Batches | None = None,
    pool: Pool | None = None,
) -> Params:
    """One round of a client's own training from `w`; the optimiser's state stays in the site's state if it is kept.

    A `plan` may hold more for each step than the batches of `options.plan`. A client without data returns `w` as it is,
    unless it trains by DP-SGD, where nobody may know. The batches point into `pool`; without it, into the client's
    data.
    """
    plan = plan or plan_of(options, learner, me)
    if isinstance(learner, PrivateTrainer):
        pool = pool_of(me.data)
    state = me.state.get("optimiser") if options.keep_momentum else None
    lr = constant(options.lr_at(me.round))
    state = state or _fresh(learner, tuple((name, t.shape, t.dtype, t.device) for name, t in w.items()))
    w, state = await scan(learner.step, (w, state), plan, pool or me.data.pool, lr, *extra)
    if options.keep_momentum:
        me.state["optimiser"] = state
    return w
