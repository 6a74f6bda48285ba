"""Differentially private local training: its options, what it refuses, and a client's round of it."""

import math
from collections.abc import Iterable
from dataclasses import dataclass

from fedgist.core.errors import FedgistError
from fedgist.core.federation import Site
from fedgist.core.message import Params
from fedgist.core.task import Batches, Model
from fedgist.core.work import Pool
from fedgist.dp.accountant import Release
from fedgist.dp.releases import NoisySteps
from fedgist.families.global_model import GlobalModelOptions
from fedgist.families.local_training import train
from fedgist.learning.optimisers import optimiser
from fedgist.learning.private_training import PrivateTrainer, poisson
from fedgist.options import ALL, Role, option


@dataclass(frozen=True)
class PrivateOptions(GlobalModelOptions):
    """Options of methods that average weights, and whose clients can train with differential privacy."""

    record_clip: float = option(
        1.0, "In a private run: largest norm of the gradient of a record.", above=0, role=Role.LATER
    )
    sampling: float = option(
        0.1,
        "In a private run: the chance of a record to be in a batch. Sums are divided by `batch`, whatever is in them.",
        above=0,
        high=1,
        role=Role.LATER,
    )
    noise_multiplier: float = option(
        0.0,
        "In a private run: deviation of a step's noise over record_clip; 0: the least that ε allows in all rounds.",
        low=0,
        role=Role.LATER,
    )

    @property
    def private_steps(self) -> int:
        """Steps a round: as many as are given, or in which each record is met `epochs` times on average."""
        return self.steps or math.ceil(self.epochs / self.sampling)


def noisy_steps(options: PrivateOptions, models: Iterable[Model]) -> NoisySteps:
    """What a client's round of training costs; or why it would tell more than that."""
    if options.weighting != "uniform":
        raise FedgistError("weights n_k tell how many records a client has: set weighting to uniform in a private run")
    if options.share != "all" or options.published:
        raise FedgistError(
            "clients score models on data of their own with share=head or published: leave both out of a private run"
        )
    if options.clip:
        raise FedgistError("clip bounds the gradient of a batch: in a private run set record_clip instead")
    if options.batch == ALL:
        raise FedgistError(
            "batch=all tells how many records a client has: set batch to about sampling times what you expect it to be"
        )
    for model in models:
        if model.buffers:
            raise FedgistError(
                f"BatchNorm mixes the records of a batch: take a model without it in a private run, not {model.name}"
            )
    if options.noise_multiplier == 0:
        raise FedgistError("set noise_multiplier: training without noise is not private")
    return NoisySteps(Release(options.noise_multiplier, options.sampling, options.private_steps))


async def train_privately(options: PrivateOptions, model: Model, me: Site, w: Params) -> Params:
    """One round of a client's own training from `w` by DP-SGD; one without data sends its noise."""
    chosen = optimiser(options.optimiser, options.momentum, options.weight_decay)
    learner = PrivateTrainer(model, chosen, options.record_clip, options.noise_multiplier, options.batch)
    data = me.data
    plan: Batches = poisson(data.n, options.private_steps, options.sampling, me.rng("batches"))
    plan = {name: value.to(data.y.device) for name, value in plan.items()}
    plan = options.with_moves(data, plan, me.rng("batches"))
    plan["seed"] = me.rng("noise").seeds(options.private_steps).to(data.y.device)
    pool = data.pool if data.n else Pool(x=data.x.new_zeros(1, *data.x.shape[1:]), y=data.y.new_zeros(1))
    return await train(options, learner, me, w, plan=plan, pool=pool)
