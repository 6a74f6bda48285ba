"""How the addends of a secure sum are hidden, as an asker holds it; `cryptography` is needed for all but one."""

import hashlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from fedgist.engines.secure_sum import Ask, Hiding
from fedgist.secure.graph import Group, Refused, Sent
from fedgist.secure.ring import Vector
from fedgist.secure.shamir import Bytes

INSTALL = "pip install 'fedgist[secure]'"


@dataclass(frozen=True)
class _Open:
    """Nothing is hidden; what would be sent to open it is as long as it would be."""

    name: str

    def mask(self, group: Group, vectors: Mapping[str, Vector]) -> tuple[dict[str, Vector], Bytes, Bytes]:
        near = len(group.near(self.name))
        return dict(vectors), np.zeros((near - 1, 32 * near + 16), np.uint8), np.zeros((near, 32), np.uint8)

    def open(self, version: str, alive: Sequence[str], sealed: Bytes) -> tuple[Bytes, bytes]:
        raise Refused("nothing is hidden here, so that there are no keys to give")

    def believe(self, version: str, signatures: Mapping[str, bytes]) -> None:
        pass


@dataclass(frozen=True)
class Simulated:
    """The sum over the ring, the same bits as with masks, by a server that could see every addend."""

    title: str = f"simulated: nothing hides them here without {INSTALL}"
    roster: bytes = bytes(32)

    def party(self, id: str) -> Hiding:
        return _Open(id)

    def open(self, group: Group, sent: Mapping[str, Sent], total: Mapping[str, Vector], ask: Ask) -> dict[str, str]:
        return {}


class Masks:
    """Pairwise masks, which cancel in the sum, and shares of their keys to take off those of who vanished."""

    title = "protected by masks"

    def __init__(self, roster: bytes, parties: Mapping[str, Hiding] | None = None):
        self.roster, self._parties = roster, parties or {}

    def party(self, id: str) -> Hiding:
        return self._parties[id]

    def open(self, group: Group, sent: Mapping[str, Sent], total: Mapping[str, Vector], ask: Ask) -> dict[str, str]:
        from fedgist.secure.opening import Opening

        opening = Opening(group, sent)
        answers = ask({name: opening.sealed_for(name) for name in opening.alive})
        opening.unmask(total, {name: keys for name, (keys, _) in answers.items()})
        return opening.wrong


def masks_here(ids: Collection[str], least: int) -> Masks | Simulated:
    """Masks between sites that are all in this process, with keys made for this once."""
    try:
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
        from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

        from fedgist.secure.party import Forgetful, Identity, Party
    except ImportError:
        return Simulated()
    private = {id: (X25519PrivateKey.generate(), Ed25519PrivateKey.generate()) for id in ids}
    public = {
        id: (agreement.public_key().public_bytes_raw(), signing.public_key().public_bytes_raw())
        for id, (agreement, signing) in private.items()
    }
    roster = hashlib.sha256(b"".join(sorted(key for keys in public.values() for key in keys))).digest()
    return Masks(
        roster, {id: Party(Identity(id, *keys, public, roster), Forgetful(), least) for id, keys in private.items()}
    )
