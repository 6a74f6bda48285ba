"""Masks and shares: the RFCs' own numbers, every subset of shares, and what is sealed."""

import itertools

import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from fedgist.secure import masks, sealing, shamir


def test_rfc_7748_x25519() -> None:
    """Section 6.1."""
    alice = bytes.fromhex("77076d0a7318a57d3c16c17251b26645df4c2f87ebc0992ab177fba51db92c2a")
    bob = bytes.fromhex("de9edb7d7b7dc1b4d35b61c2ece435373f8343c85b78674dadfc7e146f882b4f")
    secret = "4a5d9d5ba4ce2de1728e3bf480350f25e07e21c947d19e3376f09b3c1e161742"
    assert masks.agree(X25519PrivateKey.from_private_bytes(alice), bob).hex() == secret


def test_rfc_8439_chacha20() -> None:
    """Appendix A.1, test vector 1: the first block of the stream, key and nonce zero."""
    block = (
        "76b8e0ada0f13d90405d6ae55386bd28bdd219b8a08ded1aa836efcc8b770dc7"
        "da41597c5157488d7724e03fb8d84a376a43b8f41518a11cc387b669b2ee6586"
    )
    found = bytearray(64)
    stream = masks.Stream(bytes(32))
    for start in (0, 10):  # in pieces of any length
        stream.fill(memoryview(found)[start : 10 if start == 0 else 64])
    assert found.hex() == block


def test_rfc_5869_hkdf() -> None:
    """Test case 1; `derive` is the same function with our own salt."""
    key = HKDF(SHA256(), 42, bytes(range(13)), bytes(range(0xF0, 0xFA))).derive(b"\x0b" * 22)
    assert key.hex() == ("3cb25f25faacd57a90434f64d0362f2a2d2d0a90cf1a5a4c5db02d56ecc4c5bf34007208d5b887185865")
    assert masks.derive(b"s", b"p") == HKDF(SHA256(), 32, b"fedgist secure sum 1", b"p").derive(b"s")


def test_rfc_8032_ed25519() -> None:
    """Section 7.1, test 1: the empty message."""
    key = bytes.fromhex("9d61b19deffd5a60ba844af492ec2cc44449c5697b326919703bac031cae7f60")
    assert Ed25519PrivateKey.from_private_bytes(key).sign(b"").hex() == (
        "e5564300c360ac729086e2cc806e828a84877f1eb8e5d974d873e06522490155"
        "5fb8821590a33bacc61e39701cf9b46bd25bf5f0595bbe24655141438e7a100b"
    )


def test_the_field_is_that_of_aes() -> None:
    """FIPS 197, section 4.2: {57}·{83} = {c1}, {57}·{13} = {fe}; every number but 0 has an inverse."""
    a, b = np.array([0x57, 0x57, 0], np.uint8), np.array([0x83, 0x13, 7], np.uint8)
    assert shamir.times(a, b).tolist() == [0xC1, 0xFE, 0]
    every = np.arange(256, dtype=np.uint8)
    products = shamir.times(every[:, None], every[None])
    assert all((products[i] == 1).sum() == 1 for i in range(1, 256)) and np.array_equal(products, products.T)


@pytest.mark.parametrize(("needed", "holders"), [(1, 1), (2, 3), (5, 7), (7, 7)])
def test_every_subset_of_enough_shares_gives_the_secret(needed: int, holders: int) -> None:
    secret = np.random.default_rng(0).integers(0, 256, (3, 32), np.uint8)
    shares = shamir.split(secret, needed, holders)
    for chosen in itertools.combinations(range(holders), needed):
        points = [i + 1 for i in chosen]
        assert np.array_equal(shamir.join(shares[list(chosen)], points), secret)
        assert np.array_equal(shamir.join(shares[list(chosen)], points, at=holders), shares[holders - 1])
    if needed > 1:
        few = shamir.join(shares[: needed - 1], range(1, needed))
        assert not np.array_equal(few, secret)


@pytest.fixture
def sixteen() -> list[int]:
    """The 16 bytes of GF(256) with x^16 = x: a field of its own, in which to try everything there is to try."""
    every = np.arange(256, dtype=np.uint8)
    power = every
    for _ in range(4):
        power = shamir.times(power, power)
    return [int(x) for x in every[power == every]]


@pytest.mark.parametrize("threshold", [2, 3, 4])
def test_fewer_shares_are_consistent_with_every_secret(threshold: int, sixteen: list[int]) -> None:
    """In GF(16), with every polynomial: whatever t − 1 of t + 1 holders see, each secret gives it exactly once."""
    assert len(sixteen) == 16
    drawn = np.array(list(itertools.product(sixteen, repeat=threshold - 1)), np.uint8).T
    for points in itertools.combinations(sixteen[1 : threshold + 2], threshold - 1):
        for secret in sixteen:
            constant = np.full((1, drawn.shape[1]), secret, np.uint8)
            seen = shamir.evaluate(np.concatenate([constant, drawn]), points)
            assert set(seen.ravel().tolist()) <= {*sixteen}
            assert len({*map(bytes, seen.T)}) == 16 ** (threshold - 1)


def test_the_drawn_coefficients_are_what_hides_the_secret() -> None:
    """The planted fault: a polynomial of one degree less is open to t − 1 holders."""
    secret = np.arange(32, dtype=np.uint8)
    assert np.array_equal(shamir.join(shamir.split(secret, 2, 4)[:2], [1, 2]), secret)
    assert not np.array_equal(shamir.join(shamir.split(secret, 3, 4)[:2], [1, 2]), secret)


def test_one_share_of_two_in_the_whole_field() -> None:
    """t = 2 in GF(256): a share is consistent with all 256 secrets, each by one polynomial."""
    every = np.arange(256, dtype=np.uint8)
    secret, slope = (grid.ravel() for grid in np.meshgrid(every, every))
    shares = shamir.evaluate(np.stack([secret, slope]), (1, 2, 128, 255)).reshape(4, 256, 256)
    assert np.array_equal(np.sort(shares, axis=1), np.broadcast_to(every[:, None], shares.shape))


def test_what_is_sealed_is_for_one_and_as_it_was() -> None:
    """Also not for who has the secret of both but not the receiver's key: a thief of the sender's, later."""
    sender, receiver, thief = (X25519PrivateKey.generate() for _ in range(3))
    public = receiver.public_key().public_bytes_raw()
    secret = masks.agree(sender, public)
    sealed = sealing.seal(secret, public, b"shares", b"about")
    assert len(sealed) == len(b"shares") + sealing.LONGER
    assert sealing.unseal(secret, receiver, sealed, b"about") == b"shares"
    for spoilt in (
        sealed[:-1],
        sealed[:20],
        bytes(32) + sealed[32:],
        sealed[:40] + bytes([sealed[40] ^ 1]) + sealed[41:],
    ):
        assert sealing.unseal(secret, receiver, spoilt, b"about") is None
    for known, key, about in [(bytes(32), receiver, b"about"), (secret, thief, b"about"), (secret, receiver, b"?")]:
        assert sealing.unseal(known, key, sealed, about) is None
    assert sealing.unseal(secret, sender, sealed, b"about") is None
    assert sealing.seal(secret, public, b"shares", b"about")[:32] != sealed[:32]


def test_masks_of_every_width_cancel() -> None:
    whole = {"a": np.arange(20_000, dtype=np.uint64), "b": np.arange(7, dtype=np.uint16), "c": np.zeros(0, np.uint32)}
    hidden = {name: vector.copy() for name, vector in whole.items()}
    masks.mask(hidden, b"k" * 32, 1)
    assert not any(np.array_equal(hidden[name], whole[name]) for name in "ab")
    masks.mask(hidden, b"k" * 32, -1)
    assert all(np.array_equal(hidden[name], whole[name]) for name in "abc")
