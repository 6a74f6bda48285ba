"""The sites of one exchange: who shares masks with whom, how many shares open them, what they are all bound to."""

import hashlib
import json
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

from fedgist.secure.shamir import Bytes

COMPLETE = 50
"""Up to so many sites all share masks with all; above, each with `DEGREE` others."""
DEGREE = 32


def threshold(sites: int) -> int:
    """⌊2n/3⌋ + 1: so many must be in a sum, and so many shares open a mask."""
    return 2 * sites // 3 + 1


@dataclass(frozen=True)
class Group:
    """The sites that are asked together in one exchange."""

    run: str
    version: str
    roster: bytes
    """The digest of who belongs to the federation, by which keys."""
    cohort: tuple[str, ...]
    """In the order of their names."""
    nonce: bytes
    alike: str = ""
    """The digest of what the run is, whatever it is called: a nonce that is new to it makes keys that are new."""

    @cached_property
    def context(self) -> bytes:
        """What keys, seals and signatures of this exchange are bound to."""
        words = [self.run, self.alike, self.version, self.roster.hex(), self.nonce.hex(), *self.cohort]
        return hashlib.sha256(json.dumps(words).encode()).digest()

    def near(self, site: str) -> tuple[str, ...]:
        """A site and those that it shares masks with, in the order of their names."""
        return _neighbours(self.roster, self.cohort)[site][0]

    def others(self, site: str) -> tuple[str, ...]:
        """Those alone."""
        return _neighbours(self.roster, self.cohort)[site][1]

    def missing(self, site: str, alive: Sequence[str]) -> list[str]:
        """Whose masks are left over in what this site sent."""
        return [name for name in self.others(site) if name not in alive]

    def thin(self, sites: Collection[str], alive: Collection[str]) -> list[str]:
        """Those of these sites of whose neighbourhood too few are left to open their keys.

        Of many sites so many may be missing that they are all the neighbours of one; of few, all are neighbours of all.
        """
        if len(self.cohort) <= COMPLETE:
            return []
        left = set(alive)
        return [site for site in sites if len(left.intersection(self.near(site))) < self.needed]

    @property
    def needed(self) -> int:
        """Shares that open a site's keys."""
        return threshold(min(len(self.cohort), DEGREE + 1) if len(self.cohort) > COMPLETE else len(self.cohort))


@lru_cache(maxsize=4)
def _neighbours(roster: bytes, cohort: tuple[str, ...]) -> dict[str, tuple[tuple[str, ...], tuple[str, ...]]]:
    """Of each site those near it, with it and without; made once for a cohort, whose exchanges are many.

    In a large cohort the sites stand in a circle, in an order that the roster decides and not the server.
    """
    near = dict.fromkeys(cohort, cohort)
    if len(cohort) > COMPLETE:
        circle = sorted(cohort, key=lambda name: hashlib.sha256(roster + name.encode()).digest())
        half, count = DEGREE // 2, len(circle)
        near = {
            name: tuple(sorted(circle[(at + k) % count] for k in range(-half, half + 1)))
            for at, name in enumerate(circle)
        }
    return {site: (names, tuple(name for name in names if name != site)) for site, names in near.items()}


def peers(sites: int) -> int:
    """The most that a site's neighbourhood counts, itself included."""
    return sites if sites <= COMPLETE else max(COMPLETE, DEGREE + 1)


class CannotOpen(Exception):
    """The sum stays closed; why."""


@dataclass(frozen=True)
class Sent:
    """What a site sent beside its vector."""

    shares: Bytes
    commitments: Bytes


class Refused(Exception):
    """A site will not do this; what it says names who asked for what."""
