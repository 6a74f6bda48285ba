"""Shamir's secret sharing over GF(256), byte by byte: any t shares give the secrets, fewer tell nothing.

Shamir 1979; the field is that of AES (x^8 + x^4 + x^3 + x + 1), as in most implementations.
"""

import secrets
from collections.abc import Sequence
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]


def _tables() -> tuple[Bytes, NDArray[np.intp]]:
    """Powers of the generator 3, twice over, and logarithms to it."""
    power, log, value = np.zeros(510, np.uint8), np.zeros(256, np.intp), 1
    for i in range(255):
        power[i] = power[i + 255] = value
        log[value] = i
        value ^= (value << 1) ^ (0x11B if value & 0x80 else 0)
        value &= 0xFF
    return power, log


POWER, LOG = _tables()


def times(a: Bytes, b: Bytes) -> Bytes:
    """The product in the field."""
    found: Bytes = POWER[LOG[a] + LOG[b]]
    return np.where((a == 0) | (b == 0), np.uint8(0), found)


def evaluate(coefficients: Bytes, points: Sequence[int]) -> Bytes:
    """Polynomials [degree + 1, …], the constant first, at points: [points, …]."""
    at = np.array(points, np.uint8).reshape(-1, *[1] * (coefficients.ndim - 1))
    total = np.zeros((len(points), *coefficients.shape[1:]), np.uint8)
    for coefficient in coefficients[::-1]:
        total = times(total, at) ^ coefficient
    return total


def split(secret: Bytes, threshold: int, holders: int) -> Bytes:
    """Shares of secret bytes for holders 1, 2, …: [holders, …]."""
    if not 1 <= threshold <= holders <= 255:
        raise ValueError(f"{threshold} of {holders} holders: shares are for 1 to 255, and as many as that suffice")
    drawn = np.frombuffer(secrets.token_bytes((threshold - 1) * secret.size), np.uint8)
    return evaluate(np.concatenate([secret[None], drawn.reshape(threshold - 1, *secret.shape)]), range(1, holders + 1))


def join(shares: Bytes, points: Sequence[int], at: int = 0) -> Bytes:
    """The secret of these shares, whose holders are the points; or with `at` the share of another holder."""
    if len(set(points)) < len(points) or len(points) != len(shares):
        raise ValueError("each holder has one share")
    weights = _weights(tuple(points), at).reshape(-1, *[1] * (shares.ndim - 1))
    return np.bitwise_xor.reduce(times(shares, weights), axis=0)


@lru_cache(maxsize=1024)
def _weights(points: tuple[int, ...], at: int) -> Bytes:
    """Lagrange's: for each i the product of (at − j) / (i − j) over the others, where − is ⊕."""
    found = np.ones(len(points), np.uint8)
    for row, i in enumerate(points):
        for j in points:
            if j != i:
                up, down, weight = at ^ j, i ^ j, found[row]
                found[row] = 0 if up == 0 or weight == 0 else POWER[LOG[weight] + (LOG[up] - LOG[down]) % 255]
    return found
