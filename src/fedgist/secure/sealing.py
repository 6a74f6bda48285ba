"""Seals: what one tells another through somebody who must neither read it nor make it.

Two X25519 secrets are in a seal's key: that of the long-term keys of both, so that nobody else can have made it, and
that of a key made for this once with the receiver's, so that who steals the sender's key later cannot open it. No key
seals twice, so that the nonce of ChaCha20-Poly1305 (RFC 8439) is zero.
"""

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305

from fedgist.secure.masks import KEY, agree, derive

LONGER = KEY + 16
"""Bytes by which what is sealed is longer: the key made for this once, and a tag."""


def seal(secret: bytes, receiver: bytes, data: bytes, about: bytes) -> bytes:
    """Data for the receiver, by its public key; `secret` is what both agree on, `about` what both know of it."""
    once = X25519PrivateKey.generate()
    public = once.public_key().public_bytes_raw()
    return public + _cipher(secret, agree(once, receiver), public, about).encrypt(bytes(12), data, None)


def unseal(secret: bytes, own: X25519PrivateKey, data: bytes, about: bytes) -> bytes | None:
    """What `seal` closed; None if it is from another, for another, about something else, or changed."""
    public, closed = data[:KEY], data[KEY:]
    try:
        return _cipher(secret, agree(own, public), public, about).decrypt(bytes(12), closed, None)
    except (InvalidTag, ValueError):  # the latter of a key that is none
        return None


def _cipher(secret: bytes, once: bytes, public: bytes, about: bytes) -> ChaCha20Poly1305:
    return ChaCha20Poly1305(derive(secret + once, b"seal\n" + public + about))
