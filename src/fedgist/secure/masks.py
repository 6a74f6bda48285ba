"""Masks: streams of a cipher that are added to ring vectors, and the keys that they come from.

X25519 (RFC 7748) gives two sites a secret, HKDF-SHA256 (RFC 5869) a key of it for one exchange, ChaCha20 (RFC 8439) the
stream.
"""

import hashlib
from collections.abc import Mapping

import numpy as np
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import ChaCha20
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from fedgist.secure.ring import Vector

KEY = 32
PIECE = 1 << 16
ZEROS = memoryview(bytes(PIECE))


def agree(own: X25519PrivateKey, other: bytes) -> bytes:
    """The secret that two sites share; a public key that makes it zero for everybody is refused."""
    return own.exchange(X25519PublicKey.from_public_bytes(other))


def derive(secret: bytes, purpose: bytes) -> bytes:
    """A key for one purpose."""
    return HKDF(SHA256(), KEY, b"fedgist secure sum 1", purpose).derive(secret)


def commit(key: bytes) -> bytes:
    """What shows later that a key was this one, and shows nothing before."""
    return hashlib.sha256(b"fedgist commitment 1" + key).digest()


class Stream:
    """The bytes of a cipher, one after the other; a key makes one stream only, so that its nonce is zero."""

    def __init__(self, key: bytes):
        self._next = Cipher(ChaCha20(key, bytes(16)), mode=None).encryptor()

    def fill(self, buffer: memoryview) -> None:
        self._next.update_into(ZEROS[: len(buffer)], buffer)


def mask(vectors: Mapping[str, Vector], key: bytes, sign: int) -> None:
    """Add (1) or take away (−1) the stream of a key, in place; piece by piece, so that it stays in the cache."""
    stream, buffer = Stream(key), memoryview(bytearray(PIECE))
    combine = np.add if sign > 0 else np.subtract
    for vector in vectors.values():
        step = PIECE // vector.itemsize
        for start in range(0, vector.size, step):
            part = vector[start : start + step]
            stream.fill(buffer[: part.nbytes])
            combine(part, np.frombuffer(buffer, vector.dtype, part.size), out=part)
