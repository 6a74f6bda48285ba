"""What a method declares about its replies, and the noise that they get for it.

A method that can be private has an attribute `releases`: for each reply that may leave a site, how far one record, or
one client with all of its records, can move its sums. Whatever is not declared does not leave.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch

from fedgist.core.codec import Leaves
from fedgist.core.errors import FedgistError
from fedgist.core.message import schema_of, tag_of
from fedgist.dp.accountant import RECORD, Release
from fedgist.dp.discrete_gaussian import LARGEST
from fedgist.dp.randomness import Noise


@dataclass(frozen=True)
class Sum:
    """An additive field that a unit moves by at most `sensitivity` in L2 norm; `share` of the budget is its own."""

    sensitivity: float
    share: float


@dataclass(frozen=True)
class Sums:
    """A reply of sums over records; all its fields are released at once."""

    fields: Mapping[str, Sum]
    times: int = 1
    """How often it is released in a run, for which its share is divided."""
    release: Release | None = None
    """What it costs which unit, where that is no share of the budget: a sum over a secret sample, or noise that is
    set. Then there is one field, whose noise it is."""

    @property
    def share(self) -> float:
        return sum(one.share for one in self.fields.values())


@dataclass(frozen=True)
class NoisySteps:
    """A reply made by training whose every step had noise: none is added to it, and all its steps are charged."""

    release: Release
    """Of so many steps; of none for what is made of earlier replies and of what everybody knows."""


Declared = Mapping[type, Sums | NoisySteps]


def trains(releases: Declared) -> bool:
    """Whether clients train, with noise in each step that is enough for itself."""
    return any(isinstance(one, NoisySteps) for one in releases.values())


def unit(releases: Declared) -> str:
    """Who is hidden by what is declared: a record or a client, in all of it alike."""
    found = {RECORD if one.release is None else one.release.unit for one in releases.values()}
    if len(found) > 1:
        raise TypeError("all releases of a run are about the same unit: records, or clients")
    return found.pop() if found else RECORD


def samples(releases: Declared) -> bool:
    """Whether some of it is about secret samples of the records."""
    return any(one.release is not None and one.release.rate < 1 for one in releases.values())


@runtime_checkable
class Releasing(Protocol):
    """A method that says what it releases."""

    @property
    def releases(self) -> Declared: ...


@runtime_checkable
class Noisy(Protocol):
    """Options that say how much noise every release has: with 0 the budget of a private run decides."""

    @property
    def noise_multiplier(self) -> float: ...

    @property
    def sampling(self) -> float:
        """The chance of a record to be in a release."""

    @property
    def private_steps(self) -> int:
        """Releases a round."""


def declares(method: type) -> bool:
    """Whether such a method can be private."""
    return hasattr(method, "releases") and getattr(method, "by_training", (None,)) != ()


def declared(method: object, name: str) -> Declared:
    """What a method releases, its shares being all of the budget; or why it cannot be private."""
    if not declares(type(method)) or not isinstance(method, Releasing):
        raise FedgistError(
            f"{name} has no differentially private form: leave out epsilon, or take a method that has one, as gist or "
            "fedavg; docs/privacy.md lists them all"
        )
    found = method.releases
    added = {reply: sums for reply, sums in found.items() if isinstance(sums, Sums)}
    for reply, sums in added.items():
        additive = {field for field, (_, wire) in schema_of(reply).items() if wire.additive}
        if additive != schema_of(reply).keys() or additive != sums.fields.keys():
            raise TypeError(f"{tag_of(reply)}: every field of a release is additive and has a sensitivity")
        if sums.release is not None and len(additive) > 1:  # each would have the noise of one, and one be charged
            raise TypeError(f"{tag_of(reply)}: a release with a cost of its own has one field")
    unit(found)
    shared = [sums.share for sums in added.values() if sums.release is None]
    if shared and not math.isclose(total := sum(shared), 1.0):
        raise FedgistError(f"the shares of the privacy budget of {name} must add up to 1, not to {total:g}")
    return found


def grid(deviation: float, sensitivity: float, numbers: int) -> tuple[float, int]:
    """The step, a power of two, and the deviation of the noise in steps, with what rounding adds to it."""
    rounding = 2 * math.sqrt(numbers) * deviation / sensitivity  # in steps, however fine they are
    if rounding > LARGEST / 2:
        raise FedgistError(
            f"noise for so small a budget over {numbers:,} numbers finds no room on a grid: take a larger epsilon"
        )
    step = 2.0 ** (math.ceil(math.log2(deviation)) - 23)
    return step, math.ceil(deviation / step + rounding)


@dataclass(frozen=True)
class Mechanism:
    """Gaussian noise for the sums of a run that is μ-GDP as a whole.

    A field of sensitivity Δ with the share s of the budget has noise σ = Δ/(μ√s), so that it costs Δ²/σ² = s μ². Values
    are rounded to a grid on which σ is a whole number of steps near 2^24, and the noise is a discrete Gaussian on it.
    Rounding moves each of D numbers by half a step, and floating point by less: so Δ counts as Δ + 2√D steps, and the
    noise grows by as much.
    """

    mu: float
    addends: int = 1
    """How many such noises are known to be in the sum that somebody sees: each site adds its part of σ²."""

    def release(self, sums: Sums | NoisySteps) -> Release:
        """What it costs."""
        if sums.release is not None:
            return sums.release
        return Release(1 / (self.mu * math.sqrt(sums.share / sums.times)))

    def sigma(self, one: Sum, sums: Sums) -> float:
        """The deviation of the noise in what is seen, before what rounding adds to it."""
        if sums.release is not None:
            return one.sensitivity * sums.release.noise
        return one.sensitivity / (self.mu * math.sqrt(one.share / sums.times))

    def own(self, sums: Sums | NoisySteps) -> dict[str, float]:
        """The deviation of a site's own noise in each field that gets some."""
        if isinstance(sums, NoisySteps):
            return {}
        return {name: self.sigma(one, sums) / math.sqrt(self.addends) for name, one in sums.fields.items()}

    def grid(self, one: Sum, sums: Sums, numbers: int) -> tuple[float, int]:
        """The step, and the deviation of a site's own noise in steps."""
        return grid(self.sigma(one, sums) / math.sqrt(self.addends), one.sensitivity, numbers)

    def noised(self, sums: Sums | NoisySteps, leaves: Leaves, draw: Noise) -> Leaves:
        """The reply as it may leave: on the grid, with noise, where it has none of its own."""
        if isinstance(sums, NoisySteps):
            return leaves
        found: Leaves = {}
        for name, leaf in leaves.items():
            one = sums.fields[name.split("/")[0]]
            if leaf.dtype != torch.float64:
                raise TypeError(f"{name} must reach its noise in float64: rounding would move it by more than declared")
            if not bool(leaf.isfinite().all()):
                raise ValueError(f"{name} is not finite: a record counted for more than declared")
            step, steps = self.grid(one, sums, leaf.numel())
            found[name] = ((leaf / step).round() + draw(leaf.numel(), steps).view(leaf.shape)) * step
        return found
