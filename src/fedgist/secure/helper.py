"""A secure sum with a helper: a second party that holds sealed seeds, and knows no vector.

A site adds the stream of a fresh seed to its vector, which goes to the server, and seals the seed for the helper. The
helper gives the sum of the streams of a set of sites, once: one trip for the sites, whoever vanishes. The server alone
learns the sum, the helper alone nothing; both together see everything.

What a site wants to hold (how many sites there must be in the sum, which other sums it must not be subtracted from) is
sealed with the seed, so that the server can change none of it.
"""

import hashlib
import json
import secrets
import struct
from collections.abc import Mapping, Sequence

import numpy as np

from fedgist.secure import masks
from fedgist.secure.graph import Group, Refused, threshold
from fedgist.secure.masks import KEY
from fedgist.secure.party import Identity, rows
from fedgist.secure.past import Memory, Past
from fedgist.secure.ring import UNSIGNED, Vector
from fedgist.secure.sealing import LONGER
from fedgist.secure.shamir import Bytes

SCOPES = 3
NOTE = struct.Struct(f">{KEY}s32s32s32sII{32 * SCOPES}s")
"""Seed; digests of group, form and exchange; sites in a sum, and told apart by several, at least; scopes."""
SEALED = NOTE.size + LONGER
PURPOSE = b"fedgist seed 1\n"

Form = Sequence[tuple[int, int]]
"""How the numbers of a masked message lie: bits and count of each vector, in order."""


class Seeded:
    """Masks for one site in one run, whose seeds a helper gets."""

    def __init__(self, identity: Identity, helper: str, memory: Memory, least: int = 3):
        self.identity, self.helper, self.past = identity, helper, Past(memory, least)

    def mask(
        self, group: Group, vectors: Mapping[str, Vector], scopes: Sequence[str] = ()
    ) -> tuple[dict[str, Vector], Bytes, Bytes]:
        """The masked vectors, and the seed with what is wanted, sealed for the helper."""
        self.identity.check(group)
        if self.helper in group.cohort:
            raise Refused(f"{self.helper} cannot both help with a sum and be in it")
        self.past.ask(group)
        seed, hidden = secrets.token_bytes(KEY), {name: vector.copy() for name, vector in vectors.items()}
        masks.mask(hidden, seed, 1)
        round = group.version.rsplit("-", 1)[0]
        digests = [_digest(group.alike, round), *(self.identity.blinded(group.alike + scope) for scope in scopes)]
        note = NOTE.pack(
            seed,
            group.context,
            form_digest(form_of(hidden)),
            _digest(group.alike, group.version),
            threshold(len(group.cohort)),
            self.past.least,
            b"".join(digests)[: 32 * SCOPES],
        )
        return hidden, rows([self.identity.seal(self.helper, note, PURPOSE)]), np.zeros((0, KEY), np.uint8)


class Helper:
    """The second party, in all runs that it helps with."""

    def __init__(self, identity: Identity, memory: Memory, least: int = 3):
        self.identity, self.past = identity, Past(memory, least)

    def total(self, sealed: Mapping[str, bytes], form: Form) -> list[Vector]:
        """The sum of the masks of the sites that have sealed these notes, or `Refused`."""
        notes = {name: self._note(name, data) for name, data in sorted(sealed.items())}
        if not notes:
            raise Refused("a sum over no site")
        seeds, groups, forms, exchanges, fewest, apart, scopes = zip(*notes.values(), strict=True)
        if len({*groups}) > 1 or len({*exchanges}) > 1:
            raise Refused("the server mixes what sites sealed in several exchanges")
        if {*forms} != {form_digest(form)}:
            raise Refused("the server says of the numbers another form than the sites")
        split = {one[i : i + 32].hex() for one in scopes for i in range(0, len(one), 32)} - {bytes(32).hex()}
        self.past.open(exchanges[0].hex(), list(notes), max(fewest), sorted(split), max(apart))
        total = {str(i): np.zeros(count, UNSIGNED[bits]) for i, (bits, count) in enumerate(form)}
        for seed in seeds:
            masks.mask(total, seed, 1)
        return list(total.values())

    def _note(self, name: str, data: bytes) -> tuple[bytes, bytes, bytes, bytes, int, int, bytes]:
        if name not in self.identity.public:
            raise Refused(f"{name} is not in the roster or has no keys")
        found = self.identity.unseal(name, data, PURPOSE)
        if found is None or len(found) != NOTE.size:
            raise Refused(f"what {name} sealed for the helper is not from it")
        return NOTE.unpack(found)


def form_of(vectors: Mapping[str, Vector]) -> Form:
    return [(8 * vector.itemsize, vector.size) for vector in vectors.values()]


def form_digest(form: Form) -> bytes:
    return _digest("form", json.dumps([list(part) for part in form]))


def _digest(*words: str) -> bytes:
    return hashlib.sha256(json.dumps(words).encode()).digest()
