"""Sealing: a relay can forward what one site writes to another, and can neither read nor change nor misplace it.

X25519 (RFC 7748) with the keys of the signed roster gives two sites a secret that nobody else can make; HKDF-SHA256
(RFC 5869) of it a key for one letter's place: roster, run, exchange, sender, receiver, and for a reply the letter that
it answers; ChaCha20-Poly1305 (RFC 8439) seals with it, under a nonce drawn anew, because an exchange may be repeated
after a resume with another content. A letter that is opened as anything else than what it was sealed as does not open.
"""

import json
import secrets
from dataclasses import dataclass

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from fedgist.core.message import WireError
from fedgist.federation.protocol.keys import SiteKeys
from fedgist.federation.protocol.letters import NONCE, About
from fedgist.federation.protocol.network import Network
from fedgist.federation.protocol.policy import Refused
from fedgist.federation.protocol.roster import Roster
from fedgist.federation.protocol.secure_sums import check_roster, identity_of
from fedgist.secure.party import Identity

PURPOSE = b"fedgist letter 1"


def open_desk(name: str, network: Network, roster: Roster, keys: SiteKeys) -> "SealingDesk":
    """A site's desk for a run, if the run goes by the site's own roster, which has its keys and those of all others."""
    check_roster(network.roster, roster)
    return SealingDesk(identity_of(name, roster, keys))


@dataclass(frozen=True)
class SealingDesk:
    """A site's."""

    identity: Identity

    def seal(self, about: About, data: bytes) -> bytes:
        nonce = secrets.token_bytes(NONCE)
        return nonce + self._cipher(about, about.receiver).encrypt(nonce, data, None)

    def open(self, about: About, letter: bytes) -> bytes:
        """What `seal` closed at the sender, for this place, and nobody has touched; or a `WireError`."""
        try:
            return self._cipher(about, about.sender).decrypt(letter[:NONCE], letter[NONCE:], None)
        except (InvalidTag, ValueError):
            raise WireError(f"a letter that {about.sender} has not sealed for this place") from None

    def _cipher(self, about: About, other: str) -> ChaCha20Poly1305:
        if other not in self.identity.public:
            raise Refused(f"the roster has no keys of {other}")
        roster = self.identity.roster.hex()
        place = [roster, about.run, about.version, about.sender, about.receiver, about.answers]
        key = HKDF(SHA256(), 32, PURPOSE, json.dumps(place).encode()).derive(self.identity.secret(other))
        return ChaCha20Poly1305(key)
