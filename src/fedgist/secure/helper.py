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
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from fedgist.secure import masks
from fedgist.secure.graph import Group, Refused, threshold
from fedgist.secure.masks import KEY
from fedgist.secure.party import Identity, rows
from fedgist.secure.past import Memory, Past, Together
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
        known = form_digest(form)
        if others := [name for name, note in notes.items() if note.form != known]:
            raise Refused(f"of the numbers {_names(others)} sealed another form than the server says")
        for what, common in COMMON.items():
            found = {name: common(note) for name, note in notes.items()}
            [(usual, count)] = Counter(found.values()).most_common(1)
            if others := [name for name, value in found.items() if value != usual]:
                who = _names(others) if 2 * count > len(found) else "half of the sites or more"
                raise Refused(f"{who} sealed another {what} than others, or the server mixes what sites sealed")
        self._open(notes)
        total = {str(i): np.zeros(count, UNSIGNED[bits]) for i, (bits, count) in enumerate(form)}
        for note in notes.values():
            masks.mask(total, note.seed, 1)
        return list(total.values())

    def _open(self, notes: "Mapping[str, Note]") -> None:
        """Note that these may be summed; who wants, more than others do, that they may not, is named."""
        first, apart = next(iter(notes.values())), max(note.apart for note in notes.values())
        strict = [name for name, note in notes.items() if note.apart == apart]
        if apart > len(notes):
            why = f"the server wants the sum of {len(notes)} sites, and it must be over at least {apart}"
            raise Refused(f"{why}: so {_names(strict)} sealed")
        scopes = {name: note.scopes for name, note in notes.items()}
        told = sorted(set().union(*scopes.values()))
        try:
            self.past.open(first.exchange.hex(), list(notes), first.fewest, told, apart)
        except Together as error:
            why, linked = str(error), [name for name in notes if error.scope in scopes[name]]
            if len(strict) < len(notes) and apart > self.past.least:
                why += f"; that it must be so many is what {_names(strict)} sealed"
            if len(linked) < len(notes):
                why += f"; that these sums have something in common is what {_names(linked)} sealed"
            raise Refused(why) from error

    def _note(self, name: str, data: bytes) -> "Note":
        if name not in self.identity.public:
            raise Refused(f"{name} is not in the roster or has no keys")
        found = self.identity.unseal(name, data, PURPOSE)
        if found is None or len(found) != NOTE.size:
            raise Refused(f"what {name} sealed for the helper is not from it")
        return Note(*NOTE.unpack(found))


class Note(NamedTuple):
    """What a site has sealed for the helper."""

    seed: bytes
    group: bytes
    form: bytes
    exchange: bytes
    fewest: int
    apart: int
    common: bytes

    @property
    def scopes(self) -> set[str]:
        """What the sum has in common with others, which may be less than there is room for."""
        return {self.common[i : i + 32].hex() for i in range(0, len(self.common), 32)} - {bytes(32).hex()}


COMMON: Mapping[str, Callable[[Note], object]] = {
    "exchange": lambda note: (note.group, note.exchange),
    "number of sites": lambda note: note.fewest,
    "round": lambda note: note.common[:32],
}
"""What is the same in all that sites seal for one sum."""


def _names(sites: Sequence[str]) -> str:
    return " and ".join(sites)


def form_of(vectors: Mapping[str, Vector]) -> Form:
    return [(8 * vector.itemsize, vector.size) for vector in vectors.values()]


def form_digest(form: Form) -> bytes:
    return _digest("form", json.dumps([list(part) for part in form]))


def _digest(*words: str) -> bytes:
    return hashlib.sha256(json.dumps(words).encode()).digest()
