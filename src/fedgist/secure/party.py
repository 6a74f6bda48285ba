"""A site's part in a secure sum: it masks what it adds, and then helps to open the sum, for one set of sites only.

Bonawitz et al. 2017, with two deviations: (1) the shares of an exchange's keys ride with the masked vector, so that a
trip is saved and opening an exchange tells nothing of another; (2) a site reveals its own keys, and shares of others'
are needed only of those that vanish in between.

A site remembers what it answered, on disk, before it answers: runs are deterministic, so that the same exchange asked
twice for two sets of sites would tell by subtraction what one of them sent.
"""

import contextlib
import json
import os
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from fedgist.secure import masks, shamir
from fedgist.secure.graph import Group, Refused, threshold
from fedgist.secure.masks import KEY
from fedgist.secure.ring import Vector
from fedgist.secure.shamir import Bytes

SIGNATURE = 64
MOST_UNPROVEN = 8
"""Sums of a run whose set the server has not yet shown to be everybody's; a server that was killed forgets some."""


@dataclass(frozen=True)
class Identity:
    """A site's private keys, and everybody's public ones: (X25519, Ed25519)."""

    name: str
    agreement: X25519PrivateKey
    signing: Ed25519PrivateKey
    public: Mapping[str, tuple[bytes, bytes]]
    roster: bytes


Record = dict[str, Any]


class Memory(Protocol):
    """What a site has answered in a run."""

    def records(self) -> list[Record]:
        """All that was written, in order."""

    def write(self, record: Record) -> None:
        """Keep this; it must be on the disk when the call returns."""


class Forgetful:
    """In one process, where site and server end together."""

    def records(self) -> list[Record]:
        return []

    def write(self, record: Record) -> None:
        pass


@dataclass(frozen=True)
class OnDisk:
    """A file, one line of JSON a record."""

    path: Path

    def records(self) -> list[Record]:
        found = []
        for line in self.path.read_text(encoding="utf-8").splitlines() if self.path.is_file() else ():
            with contextlib.suppress(ValueError):  # killed while it wrote: what was not whole was not answered
                found.append(json.loads(line))
        return found

    def write(self, record: Record) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a", encoding="utf-8") as file:
            file.write("\n" * self._torn() + json.dumps(record, separators=(",", ":")) + "\n")
            file.flush()
            os.fsync(file.fileno())

    def _torn(self) -> bool:
        """Whether the last line has no end."""
        with self.path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(size - 1, 0))
            return size > 0 and file.read(1) != b"\n"


@dataclass(frozen=True)
class Kept:
    """The keys of one exchange, which a site reveals when the sum is opened."""

    group: Group
    own: bytes
    pairs: Mapping[str, bytes]


class Party:
    """Masks and opens for one site in one run."""

    def __init__(self, identity: Identity, memory: Memory, least: int = 3):
        self.identity, self.memory, self.least = identity, memory, least
        self._agreed: dict[str, bytes] = {}
        self._kept: Kept | None = None
        self._asked: dict[str, list[str]] = {}
        self._nonces: set[str] = set()
        self._opened: dict[str, Record] = {}
        self._sets: dict[str, dict[str, str]] = {}
        self.unproven: dict[str, str] = {}
        """Sums that were opened, by run, of which the server has not shown that all were told of the same set."""
        for record in memory.records():
            self._learn(record)

    def _learn(self, record: Record) -> None:
        version = record["version"]
        if "nonce" in record:
            self._asked[version] = record["cohort"]
            self._nonces.add(record["nonce"])
        if "alive" in record:
            self._opened[version] = record
            self._sets.setdefault(_round(version), {}).setdefault("\n".join(record["alive"]), version)
            self.unproven[version] = record["run"]
        if "proven" in record:
            self.unproven.pop(version, None)

    def _note(self, **record: Any) -> None:
        self.memory.write(record)
        self._learn(record)

    # The first trip

    def mask(self, group: Group, vectors: Mapping[str, Vector]) -> tuple[dict[str, Vector], Bytes, Bytes]:
        """The masked vectors, sealed shares of their keys for each neighbour, and commitments to those keys."""
        self._check(group)
        others = group.others(self.identity.name)
        kept = Kept(group, secrets.token_bytes(KEY), {name: self._key(b"pair", group, name) for name in others})
        hidden = {name: vector.copy() for name, vector in vectors.items()}
        masks.mask(hidden, kept.own, 1)
        for name, key in kept.pairs.items():
            masks.mask(hidden, key, 1 if self.identity.name < name else -1)
        self._kept = kept
        return hidden, self._bundles(kept), self._commitments(kept)

    def _check(self, group: Group) -> None:
        """Whether this is an exchange to take part in; if so it is written down."""
        if self.identity.name not in group.cohort:
            raise Refused("it was asked to mask for a sum that it is not in")
        if strangers := [name for name in group.cohort if name not in self.identity.public]:
            raise Refused(f"the server asks for a sum with {strangers[0]}, which is not in the roster or has no keys")
        if len(group.cohort) < self.least:
            raise Refused(f"a sum over {len(group.cohort)} sites is one over fewer than {self.least}")
        if self._asked.get(group.version, list(group.cohort)) != list(group.cohort):
            raise Refused(f"the server asked {group.version} before, for another set of sites")
        if group.nonce.hex() in self._nonces:
            raise Refused("the server used a nonce twice")
        if list(self.unproven.values()).count(group.run) > MOST_UNPROVEN:
            raise Refused("the server does not show that all sites were told of the same sets in earlier sums")
        self._note(version=group.version, cohort=list(group.cohort), nonce=group.nonce.hex())

    def _secret(self, other: str) -> bytes:
        """The secret with another site, agreed on once a run."""
        if other not in self._agreed:
            self._agreed[other] = masks.agree(self.identity.agreement, self.identity.public[other][0])
        return self._agreed[other]

    def _key(self, purpose: bytes, group: Group, other: str) -> bytes:
        pair = "\n".join(sorted((self.identity.name, other))).encode()
        return masks.derive(self._secret(other), b"\n".join([purpose, group.context, pair]))

    def _seal_key(self, group: Group, sender: str, receiver: str) -> bytes:
        other = receiver if sender == self.identity.name else sender
        about = f"{sender}\n{receiver}".encode()
        return masks.derive(self._secret(other), b"\n".join([b"seal", group.context, about]))

    def _bundles(self, kept: Kept) -> Bytes:
        """For each neighbour its share of the own key and of the key with every neighbour."""
        group, me = kept.group, self.identity.name
        keys = np.frombuffer(b"".join([kept.own, *kept.pairs.values()]), np.uint8)
        near = group.near(me)
        shares = dict(zip(near, shamir.split(keys, group.needed, len(near)), strict=True))
        sealed = [
            masks.seal(self._seal_key(group, me, name), shares[name].tobytes(), group.context)
            for name in group.others(me)
        ]
        return _rows(sealed)

    @staticmethod
    def _commitments(kept: Kept) -> Bytes:
        return _rows([masks.commit(key) for key in (kept.own, *kept.pairs.values())])

    # The second trip

    def open(self, version: str, alive: Sequence[str], sealed: Bytes) -> tuple[Bytes, bytes]:
        """Own keys that are left over in the sum, shares of neighbours' keys that are, and a signature of the set.

        sealed: what the neighbours that are alive have sealed for this site, in the order of their names.
        """
        kept, me = self._kept, self.identity.name
        if kept is None or kept.group.version != version:
            raise Refused(f"it holds no keys of {version}, or has given them already")
        group = kept.group
        self._check_alive(group, alive)
        near = [name for name in group.others(me) if name in alive]
        if len(sealed) != len(near):
            raise Refused("the server did not pass on what the other sites sealed for this one")
        missing = group.missing(me, alive)
        rows = [kept.own, *(kept.pairs[name] for name in missing)]
        for name, bundle in zip(near, sealed, strict=True):
            rows += self._shares(group, name, alive, bundle.tobytes())
        signature = self.identity.signing.sign(statement(group, alive))
        self._note(version=version, run=group.run, alive=sorted(alive), context=group.context.hex())
        return _rows(rows), signature

    def _check_alive(self, group: Group, alive: Sequence[str]) -> None:
        me = self.identity.name
        if not set(alive) <= set(group.cohort) or me not in alive or len(set(alive)) < len(alive):
            raise Refused("the server names a set of sites that cannot be that of this sum")
        least = max(self.least, threshold(len(group.cohort)))
        if len(alive) < least:
            raise Refused(f"the server wants the sum of {len(alive)} sites, and it must be over at least {least}")
        earlier = self._opened.get(group.version)
        if earlier is not None and earlier["alive"] != sorted(alive):
            raise Refused(f"the server has opened {group.version} before, for another set of sites")
        for before, version in self._sets.get(_round(group.version), {}).items():
            if not _apart(before.split("\n"), alive, self.least):
                raise Refused(
                    f"the set of sites differs from that of {version} by fewer than {self.least}: the difference of "
                    "the two sums would be that of so few"
                )

    def _shares(self, group: Group, sender: str, alive: Sequence[str], bundle: bytes) -> list[bytes]:
        """This site's shares of what is left over of a neighbour's masks."""
        me = self.identity.name
        data = masks.unseal(self._seal_key(group, sender, me), bundle, group.context)
        others, size = group.others(sender), KEY * (1 + len(group.others(sender)))
        if data is None or len(data) != size:
            raise Refused(f"what {sender} sealed for this site is not from it, or not of this exchange")
        parts = dict(zip(("", *others), (data[i : i + KEY] for i in range(0, size, KEY)), strict=True))
        return [parts[""], *(parts[name] for name in group.missing(sender, alive))]

    # What the server shows of the sum before

    def believe(self, version: str, signatures: Mapping[str, bytes]) -> None:
        """Take note that as many sites as it takes have signed the set that this one was told of."""
        if version not in self.unproven:
            return
        context, alive = bytes.fromhex(self._opened[version]["context"]), self._opened[version]["alive"]
        signed, cohort = _statement(context, alive), self._asked[version]
        good = [name for name in alive if self._signed(name, signatures.get(name, b""), signed)]
        if len(good) < threshold(len(cohort)):
            raise Refused(
                f"the server told other sites of another set in {version}: {len(good)} of {len(alive)} have signed the "
                "one that this site was told of"
            )
        self._note(version=version, proven=True)

    def _signed(self, name: str, signature: bytes, statement: bytes) -> bool:
        try:
            Ed25519PublicKey.from_public_bytes(self.identity.public[name][1]).verify(signature, statement)
        except InvalidSignature:
            return False
        return True


def statement(group: Group, alive: Sequence[str]) -> bytes:
    """What a site signs when it helps to open a sum."""
    return _statement(group.context, alive)


def _statement(context: bytes, alive: Sequence[str]) -> bytes:
    return b"fedgist alive 1\n" + context + "\n".join(sorted(alive)).encode()


def _apart(before: Sequence[str], now: Sequence[str], least: int) -> bool:
    """Whether two sets are the same, or differ by enough sites to tell nothing of fewer."""
    differing = len({*before} ^ {*now})
    return differing == 0 or differing >= least


def _round(version: str) -> str:
    """The round, or the evaluation, that an exchange is of."""
    return version.rsplit("-", 1)[0]


def _rows(parts: Sequence[bytes]) -> Bytes:
    return np.frombuffer(b"".join(parts), np.uint8).reshape(len(parts), -1).copy()
