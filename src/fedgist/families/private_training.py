"""Differentially private local training: what a method whose clients train declares, and what it refuses."""

from collections.abc import Iterable
from typing import ClassVar, TypeVar

from fedgist.core.errors import FedgistError
from fedgist.core.method import Method
from fedgist.core.task import Model, Task
from fedgist.dp.accountant import Release
from fedgist.dp.releases import Declared, NoisySteps
from fedgist.families.local_training import LocalOptions, check_by_record

MADE_OF_RELEASES = NoisySteps(Release(1.0, times=0))
"""A reply that is made of what earlier ones told, and of what everybody knows: it costs nothing more."""


Options = TypeVar("Options", bound=LocalOptions)


class PrivatelyTrained(Method[Options]):
    """Abstract: clients train. A method that can be private names the replies that a round of training makes; they, and
    those that are `derived`, must be made of the trained weights and of what everybody knows alone.
    """

    by_training: ClassVar[tuple[type, ...]] = ()

    @property
    def derived(self) -> tuple[type, ...]:
        """Replies for which nobody trains: they cost nothing more."""
        return ()

    @property
    def most_steps(self) -> int:
        """Of DP-SGD, in one round."""
        return self.config.private_steps

    @property
    def releases(self) -> Declared:
        """Where the run is private: what a client's round of DP-SGD costs."""
        if not self.by_training:
            raise AttributeError("clients of this method tell more than what training makes")
        cost = noisy_steps(self.config, self.task.models.values(), self.most_steps)
        return {**dict.fromkeys(self.derived, MADE_OF_RELEASES), **dict.fromkeys(self.by_training, cost)}


def noisy_steps(options: LocalOptions, models: Iterable[Model], steps: int) -> NoisySteps:
    """What a client's round of so many steps costs; or why it would tell more than that."""
    if getattr(options, "weighting", "uniform") != "uniform":
        raise FedgistError("weights n_k tell how many records a client has: set weighting to uniform in a private run")
    if getattr(options, "share", "all") != "all" or getattr(options, "published", False):
        raise FedgistError(
            "clients score models on data of their own with share=head, share=body or published: leave these out of a "
            "private run"
        )
    check_by_record(options)
    for model in models:
        check_statistics(model)
    if options.noise_multiplier == 0:
        raise FedgistError("set noise_multiplier: training without noise is not private")
    return NoisySteps(Release(options.noise_multiplier, options.sampling, steps))


def check_statistics(model: Model) -> None:
    """Refuses what a model keeps beside the weights that it trains: it is made of whole batches, or gets no noise."""
    if model.buffers:
        raise FedgistError(
            "BatchNorm mixes the records of a batch, and Dropout's counter and frozen weights have no gradient that "
            f"noise could be added to: take a model without {min(model.buffers)}, not {model.name}"
        )


def check_noise(noise_multiplier: float, task: Task) -> None:
    """Refuses noise that nobody would add: that of sums comes from the layer of a private run."""
    if noise_multiplier and not task.private:
        raise FedgistError(
            "noise_multiplier is for a private run, and without epsilon sums get no noise: set epsilon, or leave out "
            "noise_multiplier"
        )
