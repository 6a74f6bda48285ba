"""Letters between sites: only the receiver opens one, only as what it was sealed, and only once."""

import hashlib
import hmac
import json
import secrets
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305

from fedgist.core.message import WireError
from fedgist.federation.protocol import desk as desks
from fedgist.federation.protocol.answered import Seen
from fedgist.federation.protocol.desk import SealingDesk, open_desk
from fedgist.federation.protocol.letters import About, bundle, nonce_of, unbundle
from fedgist.federation.protocol.network import Network
from fedgist.federation.protocol.policy import Refused
from fedgist.federation.protocol.roster import make
from peers import IDS, PRIVATE, ROSTER, member

NETWORK = Network("ring", dict.fromkeys(IDS, "mlp"), ROSTER.digest)
ABOUT = About("run-1", "round-000001-000000", "0", "1", "ab")


def desk(id: str) -> SealingDesk:
    return open_desk(id, NETWORK, ROSTER, PRIVATE[id])


def test_a_letter_is_opened_by_its_receiver_and_28_bytes_longer() -> None:
    letter = desk("0").seal(ABOUT, b"hello")
    assert desk("1").open(ABOUT, letter) == b"hello"
    assert len(letter) == 5 + 28 and b"hello" not in letter
    assert desk("0").seal(ABOUT, b"hello") != letter  # a nonce of its own each time: no key and nonce twice
    with pytest.raises(WireError):
        desk("2").open(replace(ABOUT, receiver="2"), letter)


def opened_elsewhere(seal: Callable[[str], SealingDesk]) -> list[str]:
    """The parts of a letter's place that may be changed without anybody noticing."""
    letter = seal("0").seal(ABOUT, b"hello")
    found = []
    for part in [one.name for one in fields(About)]:
        other = replace(ABOUT, **{part: {"sender": "2", "receiver": "1"}.get(part, "other")})
        try:
            seal("1").open(other if part != "receiver" else replace(ABOUT, receiver="2"), letter)
            found.append(part)
        except WireError:
            continue
    return found


def test_its_place_is_bound_into_a_letter() -> None:
    assert opened_elsewhere(desk) == []


@pytest.mark.parametrize("forgotten", ["run", "version", "receiver", "answers"])
def test_a_desk_that_forgets_a_part_of_the_place_is_found(forgotten: str) -> None:
    class Forgetful(SealingDesk):
        def _cipher(self, about: About, other: str) -> ChaCha20Poly1305:
            return super()._cipher(replace(about, **{forgotten: ""}), other)

    def careless(id: str) -> SealingDesk:
        return Forgetful(desk(id).identity)

    assert opened_elsewhere(careless) == [forgotten]


def test_a_letter_that_was_touched_does_not_open() -> None:
    letter = desk("0").seal(ABOUT, b"hello")
    for i in range(len(letter)):
        with pytest.raises(WireError):
            desk("1").open(ABOUT, letter[:i] + bytes([letter[i] ^ 1]) + letter[i + 1 :])
    for cut in (b"", letter[:11], letter[:-1], letter + b"x"):
        with pytest.raises(WireError):
            desk("1").open(ABOUT, cut)
    with pytest.raises(WireError):
        desk("1").open(ABOUT, b"hello")  # what nobody sealed


def test_another_roster_is_refused_and_gives_other_keys() -> None:
    newer = make(2, "trial", map(member, IDS))
    with pytest.raises(Refused, match="another roster"):
        open_desk("0", NETWORK, newer, PRIVATE["0"])
    other = open_desk("1", replace(NETWORK, roster=newer.digest), newer, PRIVATE["1"])
    with pytest.raises(WireError):
        other.open(ABOUT, desk("0").seal(ABOUT, b"hello"))
    with pytest.raises(Refused, match="roster 1 has other keys of this site"):
        open_desk("0", NETWORK, ROSTER, PRIVATE["1"])
    with pytest.raises(Refused, match="no keys of 9"):
        desk("0").seal(replace(ABOUT, receiver="9"), b"")


def test_a_letter_is_opened_once_also_by_a_site_that_was_killed(tmp_path: Path) -> None:
    nonces = [secrets.token_hex(12) for _ in range(3)]
    seen = Seen(tmp_path / "run" / "letters.txt")
    seen.note(nonces[0])
    seen.note(nonces[1])
    for again in (seen, Seen(tmp_path / "run" / "letters.txt")):
        with pytest.raises(Refused, match="opened before"):
            again.note(nonces[0])
    with (tmp_path / "run" / "letters.txt").open("a") as file:
        file.write(f"\n{nonces[2][:5]}")  # killed while it wrote: it did not answer that one
    torn = Seen(tmp_path / "run" / "letters.txt")
    torn.note(nonces[2])
    with pytest.raises(Refused):
        Seen(tmp_path / "run" / "letters.txt").note(nonces[2])


def test_bundles() -> None:
    letters = {id: desk("0").seal(replace(ABOUT, receiver=id), id.encode()) for id in ("1", "4")}
    whole = bundle({"absent": {"2": "is away"}}, letters)
    assert unbundle(whole) == ({"absent": {"2": "is away"}}, letters)
    assert nonce_of(letters["1"]) == letters["1"][:12].hex()
    for i in range(len(whole)):
        with pytest.raises(WireError):
            unbundle(whole[:i])
    for damaged in (whole + b"x", whole.replace(b'"1": 29', b'"1": -9'), whole.replace(b'"1": 29', b'"1": 2 ')):
        with pytest.raises(WireError):
            unbundle(damaged)


def test_the_scheme_is_that_of_the_standards(monkeypatch: pytest.MonkeyPatch) -> None:
    """Independently: X25519, HKDF-SHA256 over the place, ChaCha20-Poly1305 under the letter's own nonce."""
    monkeypatch.setattr(desks.secrets, "token_bytes", lambda n: bytes(range(n)))
    letter = desk("0").seal(ABOUT, b"hello")
    secret = PRIVATE["1"].agreement.exchange(PRIVATE["0"].agreement.public_key())
    place = json.dumps([ROSTER.digest, "run-1", "round-000001-000000", "0", "1", "ab"]).encode()
    extracted = hmac.new(b"fedgist letter 1", secret, hashlib.sha256).digest()
    key = hmac.new(extracted, place + b"\x01", hashlib.sha256).digest()
    assert ChaCha20Poly1305(key).decrypt(bytes(range(12)), letter[12:], None) == b"hello"
