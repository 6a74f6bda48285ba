"""What releases cost together: exactly where all are Gaussian, by privacy loss distributions where some sample records.

Everything here is about a unit that a data set has or has not: neighbours differ by adding or removing one record, or
one client with all of its records.
"""

import functools
import logging
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from fedgist.core.errors import FedgistError
from fedgist.dp import gaussian

INTERVAL = 2e-3
"""Privacy losses are rounded up to multiples of this, so that ε errs upwards only."""
RECORD, CLIENT = "record", "client"
UNITS = {RECORD: "one record, added or removed", CLIENT: "one client with all of its records, added or removed"}


class MissingLibrary(FedgistError):
    """Sampled releases cannot be accounted for here."""

    def __init__(self) -> None:
        super().__init__(
            "what training on random batches costs is worked out with dp-accounting: pip install 'fedgist[privacy]', "
            "or give a file that `fedgist privacy plan --out FILE` wrote where it is installed, as plan=FILE"
        )


@dataclass(frozen=True, order=True)
class Release:
    """Gaussian noise of `noise` times the sensitivity, `times` over, each on a sample that holds a record with `rate`.

    With a rate of 1 everything is released: μ = 1/noise. Below it, which records are in a sample must be secret.
    """

    noise: float
    rate: float = 1.0
    times: int = 1
    unit: str = RECORD
    """Whose sensitivity that is: what it takes to add or remove it."""

    def __post_init__(self) -> None:
        whole = self.noise > 0 and math.isfinite(self.noise) and 0 < self.rate <= 1 and self.times >= 0
        if not whole or self.unit not in UNITS or (self.unit == CLIENT and self.rate < 1):
            raise ValueError(f"no release can be like this: {self}")

    def row(self) -> dict[str, Any]:
        return {name: value for name, value in asdict(self).items() if (name, value) != ("unit", RECORD)}

    def counted_by(self, unit: str) -> "Release":
        """The same release for another unit. A record more or less turns a client's contribution, of norm C at most,
        into another such: they are 2C apart. What hides a record says nothing of a client.
        """
        if self.unit == unit:
            return self
        if unit == CLIENT:
            raise FedgistError("what hides one record hides no client with all of its records: count by the record")
        return replace(self, noise=self.noise / 2, unit=RECORD)


def read(row: Mapping[str, Any]) -> Release:
    """A release as a file has it."""
    return Release(float(row["noise"]), float(row["rate"]), int(row["times"]), str(row.get("unit", RECORD)))


def units(releases: Iterable[Release]) -> tuple[str, ...]:
    """By which units these can be counted."""
    return (CLIENT, RECORD) if {release.unit for release in releases} == {CLIENT} else (RECORD,)


def together(releases: Iterable[Release]) -> tuple[Release, ...]:
    """The same releases, equal ones counted as one that happens several times."""
    count: Counter[tuple[float, float, str]] = Counter()
    for release in releases:
        count[release.noise, release.rate, release.unit] += release.times
    return tuple(sorted(Release(noise, rate, times, unit) for (noise, rate, unit), times in count.items() if times))


def epsilon(releases: Iterable[Release], delta: float, unit: str = RECORD) -> float:
    """The ε of all of them at this δ: add/remove of one unit, whoever sees all releases."""
    return _epsilon(together(release.counted_by(unit) for release in releases), delta)


LEAST_NOISE = 0.05
"""Of what the library is asked: below it one sampled release costs an ε of hundreds, and its table outgrows memory."""


@functools.lru_cache(maxsize=4096)  # clients of one run have spent the same
def _epsilon(releases: tuple[Release, ...], delta: float) -> float:
    if all(release.rate == 1 for release in releases):
        return gaussian.epsilon(math.sqrt(sum(release.times / release.noise**2 for release in releases)), delta)
    if min(release.noise for release in releases) < LEAST_NOISE:
        return math.inf
    try:
        logging.getLogger("absl").setLevel(logging.ERROR)  # it speaks of orders that it drops
        from dp_accounting import NeighboringRelation, dp_event, pld
    except ImportError as error:
        raise MissingLibrary from error
    accountant = pld.PLDAccountant(NeighboringRelation.ADD_OR_REMOVE_ONE, value_discretization_interval=INTERVAL)
    for release in releases:
        event = dp_event.GaussianDpEvent(release.noise)
        sampled = event if release.rate == 1 else dp_event.PoissonSampledDpEvent(release.rate, event)
        accountant.compose(sampled, release.times)
    return float(accountant.get_epsilon(delta))


def noise(epsilon_: float, delta: float, rate: float = 1.0, times: int = 1) -> float:
    """The least noise, in multiples of the sensitivity, with which `times` releases cost at most ε at δ."""
    if rate == 1:
        return math.sqrt(times) / gaussian.mu(epsilon_, delta)
    return _least(lambda guess: epsilon([Release(guess, rate, times)], delta) <= epsilon_)


def _least(enough: Callable[[float], bool]) -> float:
    """The least number that is enough, to three digits upwards."""
    high = 0.5
    while not enough(high):
        high *= 2
    low = high / 2
    while high - low > 5e-4 * high:
        middle = (low + high) / 2
        low, high = (low, middle) if enough(middle) else (middle, high)
    return high
