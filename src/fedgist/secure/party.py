"""A site's part in a secure sum: it masks what it adds, and then helps to open the sum, for one set of sites only.

Bonawitz et al. 2017, with one deviation: the shares of an exchange's keys ride with the masked vector, so that a trip
is saved and opening an exchange tells nothing of another. A key is put together from shares alone, also the own key of
a site that is there: who said that it was, to t sites, cannot say to t others that it was not, and so have its masks.
"""

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from fedgist.secure import masks, sealing, shamir
from fedgist.secure.graph import Group, Refused, threshold
from fedgist.secure.masks import KEY
from fedgist.secure.past import Memory, Past
from fedgist.secure.ring import Vector
from fedgist.secure.shamir import Bytes

COVERT, BEFORE = 2, 3
"""Trips of an exchange: signatures of the set go with the next request, or have been seen before keys are given."""


class Identity:
    """A site's private keys, and everybody's public ones: (X25519, Ed25519)."""

    def __init__(
        self,
        name: str,
        agreement: X25519PrivateKey,
        signing: Ed25519PrivateKey,
        public: Mapping[str, tuple[bytes, bytes]],
        roster: bytes,
    ):
        self.name, self.agreement, self.signing, self.public, self.roster = name, agreement, signing, public, roster
        self._agreed: dict[str, bytes] = {}

    def secret(self, other: str) -> bytes:
        """What both agree on, worked out once."""
        if other not in self._agreed:
            self._agreed[other] = masks.agree(self.agreement, self.public[other][0])
        return self._agreed[other]

    def seal(self, receiver: str, data: bytes, about: bytes) -> bytes:
        """Data that only this other can read, and that can be from nobody else."""
        return sealing.seal(self.secret(receiver), self.public[receiver][0], data, _from(self.name, receiver) + about)

    def unseal(self, sender: str, data: bytes, about: bytes) -> bytes | None:
        """What another has sealed for this one, if it has."""
        return sealing.unseal(self.secret(sender), self.agreement, data, _from(sender, self.name) + about)

    def blinded(self, text: str) -> bytes:
        """A name for a text, such as an answer that is one of few, by which nobody else can find out what it is."""
        return masks.derive(self.agreement.private_bytes_raw(), b"name\n" + text.encode())

    def check(self, group: Group) -> None:
        """Whether a group is one of members, this one among them."""
        if self.name not in group.cohort:
            raise Refused("it was asked to mask for a sum that it is not in")
        if strangers := [name for name in group.cohort if name not in self.public]:
            raise Refused(f"the server asks for a sum with {strangers[0]}, which is not in the roster or has no keys")

    def signed(self, name: str, signature: bytes, statement: bytes) -> bool:
        """Whether a member has signed this."""
        try:
            Ed25519PublicKey.from_public_bytes(self.public[name][1]).verify(signature, statement)
        except InvalidSignature:
            return False
        return True


@dataclass(frozen=True)
class Kept:
    """Of an exchange that was masked: the own share of the keys of its masks, and what it has in common with others."""

    group: Group
    shares: Bytes
    scopes: Sequence[str]


class Party:
    """Masks and opens for one site in one run."""

    def __init__(self, identity: Identity, memory: Memory, least: int = 3, trips: int = COVERT):
        self.identity, self.past, self.trips = identity, Past(memory, least), trips
        self._kept: Kept | None = None

    # The first trip

    def mask(
        self, group: Group, vectors: Mapping[str, Vector], scopes: Sequence[str] = ()
    ) -> tuple[dict[str, Vector], Bytes, Bytes]:
        """The masked vectors, sealed shares of their keys for each neighbour, and commitments to those keys."""
        self.identity.check(group)
        self.past.ask(group)
        me, near, others = self.identity.name, group.near(self.identity.name), group.others(self.identity.name)
        keys = [secrets.token_bytes(KEY), *(self._pair_key(group, name) for name in others)]
        signs = [1, *(1 if me < name else -1 for name in others)]
        hidden = {name: vector.copy() for name, vector in vectors.items()}
        for key, sign in zip(keys, signs, strict=True):
            masks.mask(hidden, key, sign)
        shares = dict(zip(near, shamir.split(rows(keys), group.needed, len(near)), strict=True))
        sealed = [self.identity.seal(name, shares[name].tobytes(), group.context) for name in others]
        self._kept = Kept(group, shares[me], scopes)
        return hidden, rows(sealed), rows([masks.commit(key) for key in keys])

    def _pair_key(self, group: Group, other: str) -> bytes:
        pair = "\n".join(sorted((self.identity.name, other))).encode()
        return masks.derive(self.identity.secret(other), b"\n".join([b"pair", group.context, pair]))

    # The second trip, and with three the one before it

    def sign(self, version: str, alive: Sequence[str]) -> bytes:
        """A signature of the set that this site was told of; from now on it knows this exchange of no other."""
        kept, me = self._kept_of(version), self.identity.name
        group = kept.group
        if not set(alive) <= set(group.cohort) or me not in alive or len(set(alive)) < len(alive):
            raise Refused("the server names a set of sites that cannot be that of this sum")
        if thin := group.thin([name for name in group.near(me) if name in alive], alive):
            raise Refused(
                f"of {thin[0]} and its neighbours fewer than {group.needed} are in the set: it would stand alone"
            )
        scopes = [_round(version), *kept.scopes]
        least, context = threshold(len(group.cohort)), group.context.hex()
        self.past.open(version, alive, least, scopes, context=context, run=group.run)
        return self.identity.signing.sign(statement(group.context, alive))

    def open(
        self, version: str, alive: Sequence[str], sealed: Bytes, signatures: Mapping[str, bytes] | None = None
    ) -> tuple[Bytes, bytes]:
        """This site's shares of the keys that are left over in the sum, its own first; and a signature of the set.

        sealed: what the neighbours that are alive have sealed for this site, in the order of their names.
        """
        kept = self._kept_of(version)
        signature, group = self.sign(version, alive), kept.group
        if self.trips == BEFORE:
            self.believe(version, signatures or {})
        near = [name for name in group.others(self.identity.name) if name in alive]
        if len(sealed) != len(near):
            raise Refused("the server did not pass on what the other sites sealed for this one")
        found = _left_over(group, self.identity.name, alive, kept.shares)
        for name, bundle in zip(near, sealed, strict=True):
            data = self.identity.unseal(name, bundle.tobytes(), group.context)
            if data is None or len(data) != KEY * len(group.near(name)):
                raise Refused(f"what {name} sealed for this site is not from it, or not of this exchange")
            found += _left_over(group, name, alive, np.frombuffer(data, np.uint8).reshape(-1, KEY))
        return rows(found), signature

    def _kept_of(self, version: str) -> Kept:
        if self._kept is None or self._kept.group.version != version:
            raise Refused(f"it holds no keys of {version}: it was never asked, or has been asked another since")
        return self._kept

    # What the server shows of a sum

    def believe(self, version: str, signatures: Mapping[str, bytes]) -> None:
        """Take note that as many sites as it takes have signed the set that this one was told of."""
        if version not in self.past.unproven:
            return
        cohort, alive, context = self.past.set_of(version)
        said, good = statement(context, alive), 0
        for name in alive:
            good += self.identity.signed(name, signatures.get(name, b""), said)
            if good == threshold(len(cohort)):
                return self.past.prove(version)
        raise Refused(
            f"the server told other sites of another set in {version}: {good} of {len(alive)} have signed the one that "
            "this site was told of"
        )


def statement(context: bytes, alive: Sequence[str]) -> bytes:
    """What a site signs when it helps to open a sum."""
    return b"fedgist alive 1\n" + context + "\n".join(sorted(alive)).encode()


def rows(parts: Sequence[bytes]) -> Bytes:
    """Byte strings of one length, one below the other."""
    return np.frombuffer(b"".join(parts), np.uint8).reshape(len(parts), -1).copy()


def _left_over(group: Group, site: str, alive: Sequence[str], shares: Bytes) -> list[bytes]:
    """Of the shares of a site's keys, those of its own and of the keys with who is missing."""
    others = group.others(site)
    return [shares[0].tobytes(), *(shares[others.index(name) + 1].tobytes() for name in group.missing(site, alive))]


def _from(sender: str, receiver: str) -> bytes:
    return f"{sender}\n{receiver}\n".encode()


def _round(version: str) -> str:
    """The round, or the evaluation, that an exchange is of."""
    return version.rsplit("-", 1)[0]
