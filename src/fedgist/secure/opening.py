"""The server's part in a secure sum: it passes on what sites sealed for each other, and takes off what is left over.

Every key that is put together from shares is held against what its site committed to when it sent its vector, so that a
site that lies is named and cannot make the sum a wrong one by that.
"""

import itertools
import math
import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from fedgist.secure import masks, shamir
from fedgist.secure.graph import CannotOpen, Group, Sent, threshold
from fedgist.secure.masks import KEY
from fedgist.secure.ring import Vector
from fedgist.secure.sealing import LONGER
from fedgist.secure.shamir import Bytes

MOST_TRIES = 2000
"""Choices of shares that are tried where some are wrong."""


@dataclass
class Opening:
    """One exchange, from the vectors that arrived to their sum."""

    group: Group
    sent: Mapping[str, Sent]
    """Of those that are in the sum."""
    wrong: dict[str, str] = field(default_factory=dict)
    """Who gave what cannot be, found on the way."""

    def __post_init__(self) -> None:
        self.alive = tuple(sorted(self.sent))
        if len(self.alive) < (least := threshold(len(self.group.cohort))):
            raise CannotOpen(f"{len(self.alive)} of {len(self.group.cohort)} sites answered, and {least} are needed")
        if thin := self.group.thin(self.alive, self.alive):
            raise CannotOpen(f"fewer than {self.group.needed} of {thin[0]} and its neighbours answered")
        for name in self.alive:
            self._check_form(name)
        for name, other in itertools.combinations(self.alive, 2):
            if not self._same_mask(name, other):
                raise CannotOpen(f"{name} and {other} do not have the same mask: one of the two lies")

    def _check_form(self, name: str) -> None:
        sent, count = self.sent[name], len(self.group.near(name))
        if sent.shares.shape != (count - 1, KEY * count + LONGER) or sent.commitments.shape != (count, KEY):
            raise CannotOpen(f"{name} sent shares of another form than the group has")

    def _same_mask(self, name: str, other: str) -> bool:
        """Whether two have committed to the same key, if they share one at all."""
        ours, theirs = self.group.others(name), self.group.others(other)
        return other not in ours or np.array_equal(
            self.sent[name].commitments[ours.index(other) + 1], self.sent[other].commitments[theirs.index(name) + 1]
        )

    def sealed_for(self, name: str) -> Bytes:
        """What the neighbours of a site, those that are alive, have sealed for it."""
        rows = [
            self.sent[other].shares[self.group.others(other).index(name)]
            for other in self.group.others(name)
            if other in self.sent
        ]
        return np.stack(rows) if rows else np.zeros((0, 0), np.uint8)

    def keys(self, revealed: Mapping[str, Bytes]) -> dict[str, list[bytes]]:
        """For every site in the sum its own key and those that it shares with who is missing, from shares of them."""
        shares: dict[str, dict[str, Bytes]] = {name: {} for name in self.alive}
        for holder, rows in revealed.items():
            about = [holder, *(other for other in self.group.others(holder) if other in self.sent)]
            counts = [1 + len(self.group.missing(other, self.alive)) for other in about]
            if rows.shape != (sum(counts), KEY):
                self.wrong[holder] = "gave shares in another number than was asked for"
                continue
            for name, part in zip(about, np.split(rows, np.cumsum(counts)[:-1]), strict=True):
                shares[name][holder] = part
        return {name: self._joined(name, shares[name]) for name in self.alive}

    def _fits(self, name: str, keys: Bytes) -> bool:
        others = self.group.others(name)
        rows = [0, *(others.index(other) + 1 for other in self.group.missing(name, self.alive))]
        committed = self.sent[name].commitments
        return all(masks.commit(key.tobytes()) == committed[row].tobytes() for key, row in zip(keys, rows, strict=True))

    def _joined(self, name: str, shares: Mapping[str, Bytes]) -> list[bytes]:
        """The keys of a site, from any shares that give what it has committed to; who gave others is named."""
        near, needed = self.group.near(name), self.group.needed
        points = {holder: near.index(holder) + 1 for holder in sorted(shares, key=lambda id: (id in self.wrong, id))}
        if len(points) < needed:
            raise CannotOpen(f"{len(points)} sites gave shares of the keys of {name}: {needed} are needed")
        for chosen in _choices(list(points), needed):
            some, at = np.stack([shares[holder] for holder in chosen]), [points[holder] for holder in chosen]
            keys = shamir.join(some, at)
            if self._fits(name, keys):
                for holder in points.keys() - {*chosen}:
                    if not np.array_equal(shamir.join(some, at, points[holder]), shares[holder]):
                        self.wrong[holder] = f"gave, or was given, a wrong share of the keys of {name}"
                return [key.tobytes() for key in keys]
        raise CannotOpen(f"the shares of {name}'s keys do not fit each other: {', '.join(points)} gave them")

    def unmask(self, total: Mapping[str, Vector], revealed: Mapping[str, Bytes]) -> None:
        """Take what is left over off the sum of the vectors that arrived, in place."""
        for name, (own, *pairs) in self.keys(revealed).items():
            masks.mask(total, own, -1)
            for other, key in zip(self.group.missing(name, self.alive), pairs, strict=True):
                masks.mask(total, key, -1 if name < other else 1)


def _choices(holders: list[str], needed: int) -> Iterable[Sequence[str]]:
    """Shares to try: all choices where they are few, otherwise some at random, which soon leave out a few that lie."""
    if math.comb(len(holders), needed) <= MOST_TRIES:
        return itertools.combinations(holders, needed)
    draw = random.SystemRandom()
    return itertools.chain([holders[:needed]], (draw.sample(holders, needed) for _ in range(MOST_TRIES)))
