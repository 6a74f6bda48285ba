"""The server's part in a secure sum: it passes on what sites sealed for each other, and takes off what is left over.

Every key that is revealed or put together from shares is held against what its site committed to when it sent its
vector, so that a site that lies is named and cannot make the sum a wrong one by that.
"""

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from fedgist.secure import masks, shamir
from fedgist.secure.graph import CannotOpen, Group, Sent, threshold
from fedgist.secure.masks import KEY, TAG
from fedgist.secure.ring import Vector
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
        for name, sent in self.sent.items():
            count = len(self.group.near(name))
            if sent.shares.shape != (count - 1, KEY * count + TAG) or sent.commitments.shape != (count, KEY):
                raise CannotOpen(f"{name} sent shares of another form than the group has")
            for row, other in enumerate(self.group.others(name), 1):
                if other in self.sent and name < other:
                    back = self.group.others(other).index(name) + 1
                    if not np.array_equal(sent.commitments[row], self.sent[other].commitments[back]):
                        raise CannotOpen(f"{name} and {other} do not have the same mask: one of the two lies")

    def sealed_for(self, name: str) -> Bytes:
        """What the neighbours of a site, those that are alive, have sealed for it."""
        rows = [
            self.sent[other].shares[self.group.others(other).index(name)]
            for other in self.group.others(name)
            if other in self.sent
        ]
        return np.stack(rows) if rows else np.zeros((0, 0), np.uint8)

    def keys(self, revealed: Mapping[str, Bytes]) -> dict[str, list[bytes]]:
        """For every site in the sum its own key and those that it shares with who is missing."""
        shares: dict[str, dict[str, Bytes]] = {name: {} for name in self.alive}
        found: dict[str, list[bytes]] = {}
        for name, rows in revealed.items():
            about = [name, *(other for other in self.group.others(name) if other in self.sent)]
            counts = [1 + len(self.group.missing(other, self.alive)) for other in about]
            if rows.shape != (sum(counts), KEY):
                self.wrong[name] = "gave keys in another number than was asked for"
                continue
            first, *parts = np.split(rows, np.cumsum(counts)[:-1])
            if self._fits(name, first):
                found[name] = [row.tobytes() for row in first]
            else:
                self.wrong[name] = "gave keys that are not those it had committed to"
            for other, part in zip(about[1:], parts, strict=True):
                shares[other][name] = part
        for name in self.alive:
            if name not in found:
                found[name] = self._joined(name, shares[name])
        return found

    def _fits(self, name: str, keys: Bytes) -> bool:
        others = self.group.others(name)
        rows = [0, *(others.index(other) + 1 for other in self.group.missing(name, self.alive))]
        committed = self.sent[name].commitments
        return all(masks.commit(key.tobytes()) == committed[row].tobytes() for key, row in zip(keys, rows, strict=True))

    def _joined(self, name: str, shares: Mapping[str, Bytes]) -> list[bytes]:
        """The keys of a site that has vanished, from the shares of others; wrong ones are found, and named."""
        near, needed = self.group.near(name), self.group.needed
        points = {holder: near.index(holder) + 1 for holder in sorted(shares)}
        if len(points) < needed:
            raise CannotOpen(f"{name} vanished, and {len(points)} sites gave shares of its keys: {needed} are needed")
        for chosen in itertools.islice(itertools.combinations(points, needed), MOST_TRIES):
            some, at = np.stack([shares[holder] for holder in chosen]), [points[holder] for holder in chosen]
            keys = shamir.join(some, at)
            if self._fits(name, keys):
                for holder, point in points.items():
                    if not np.array_equal(shamir.join(some, at, point), shares[holder]):
                        self.wrong[holder] = f"gave a wrong share of the keys of {name}"
                return [key.tobytes() for key in keys]
        raise CannotOpen(f"the shares of {name}'s keys do not fit each other: {', '.join(points)} gave them")

    def unmask(self, total: Mapping[str, Vector], revealed: Mapping[str, Bytes]) -> None:
        """Take what is left over off the sum of the vectors that arrived, in place."""
        for name, (own, *pairs) in self.keys(revealed).items():
            masks.mask(total, own, -1)
            for other, key in zip(self.group.missing(name, self.alive), pairs, strict=True):
                masks.mask(total, key, -1 if name < other else 1)
