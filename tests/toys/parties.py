"""Sites that meet for a secure sum, and a server that passes on what they say; tests spoil what they like of it."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from functools import cache

import numpy as np
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from fedgist.secure.graph import Group
from fedgist.secure.opening import Opening, Sent
from fedgist.secure.party import Identity, Party
from fedgist.secure.past import Forgetful

NAMES = tuple("abcdefg")
ROSTER = bytes(32)
Vectors = dict[str, np.ndarray]


def identities(names: Collection[str] = NAMES) -> dict[str, Identity]:
    """Keys for everybody, as a roster would tell them; the same for the same names."""
    return dict(_identities(tuple(names)))


@cache
def _identities(names: tuple[str, ...]) -> dict[str, Identity]:
    private = {name: (X25519PrivateKey.generate(), Ed25519PrivateKey.generate()) for name in names}
    public = {
        name: (agreement.public_key().public_bytes_raw(), signing.public_key().public_bytes_raw())
        for name, (agreement, signing) in private.items()
    }
    return {name: Identity(name, *keys, public, ROSTER) for name, keys in private.items()}


def parties(names: Collection[str] = NAMES, least: int = 3) -> dict[str, Party]:
    return {name: Party(identity, Forgetful(), least) for name, identity in identities(names).items()}


def group(version: str = "round-000001-000000", cohort: Collection[str] = NAMES, nonce: int = 0) -> Group:
    return Group("run", version, ROSTER, tuple(sorted(cohort)), nonce.to_bytes(16, "big"))


def vectors(name: str, seed: int = 0) -> Vectors:
    rng = np.random.default_rng([seed, *name.encode()])
    return {"a": rng.integers(0, 2**64, 5, np.uint64), "b": rng.integers(0, 2**16, 3, np.uint16)}


def total_of(names: Collection[str], seed: int = 0) -> Vectors:
    parts = [vectors(name, seed) for name in names]
    return {key: np.sum([part[key] for part in parts], axis=0, dtype=parts[0][key].dtype) for key in parts[0]}


@dataclass
class Meeting:
    """One exchange: who masked, and what they sent."""

    party: Mapping[str, Party]
    group: Group
    alive: Collection[str]
    seed: int = 0
    sent: dict[str, Sent] = field(default_factory=dict)
    masked: dict[str, Vectors] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in self.alive:
            hidden, shares, commitments = self.party[name].mask(self.group, vectors(name, self.seed))
            self.masked[name], self.sent[name] = hidden, Sent(shares, commitments)
        self.opening = Opening(self.group, self.sent)

    def revealed(self, by: Collection[str]) -> dict[str, np.ndarray]:
        return {
            name: self.party[name].open(self.group.version, self.opening.alive, self.opening.sealed_for(name))[0]
            for name in by
        }

    def sum(self, revealed: Mapping[str, np.ndarray]) -> Vectors:
        parts = list(self.masked.values())
        total = {key: np.sum([part[key] for part in parts], axis=0, dtype=parts[0][key].dtype) for key in parts[0]}
        self.opening.unmask(total, revealed)
        return total


def same(a: Vectors, b: Vectors) -> bool:
    return a.keys() == b.keys() and all(np.array_equal(a[key], b[key]) for key in a)
