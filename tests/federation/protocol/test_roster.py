"""The roster: what the authority signed, and nothing that is older, other, or not in its one form."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("cryptography", reason="needs cryptography, which NVFlare brings along")

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from fedgist.core.errors import FedgistError
from fedgist.federation.protocol import roster
from fedgist.federation.protocol.roster import BadRoster, Member

AUTHORITY = Ed25519PrivateKey.from_private_bytes(bytes(range(32)))
EAST = Member("east", b"e" * 32, b"s" * 32, b"a" * 32)
NORTH = Member("north", b"n" * 32)


def signed(number: int = 3, members: tuple[Member, ...] = (NORTH, EAST)) -> bytes:
    return roster.sign(roster.make(number, "hospitals", members), AUTHORITY)


def forged(told: bytes) -> bytes:
    """Text that the authority has signed, whatever it is."""
    return told + b"\n" + AUTHORITY.sign(roster.PURPOSE + told).hex().encode() + b"\n"


def test_what_was_signed_is_read() -> None:
    found = roster.read(signed(), AUTHORITY.public_key(), at_least=3)
    assert (found.number, found.federation, found.members) == (3, "hospitals", (EAST, NORTH))
    assert found["east"].enrolled and not found["north"].enrolled and "south" not in found
    with pytest.raises(BadRoster, match="south is not in roster 3"):
        found["south"]


def test_the_canonical_form_does_not_depend_on_the_order_and_changes_with_every_field() -> None:
    first = roster.make(3, "hospitals", (NORTH, EAST))
    assert first.canonical == roster.make(3, "hospitals", (EAST, NORTH)).canonical
    others = [
        replace(first, number=4),
        replace(first, federation="clinics"),
        replace(first, members=(EAST,)),
        *(
            replace(first, members=(replace(EAST, **{field: b"x" * 32}), NORTH))
            for field in ("certificate", "signing", "agreement")
        ),
    ]
    assert len({one.digest for one in (first, *others)}) == 1 + len(others)


@given(position=st.integers(0, 10_000), bit=st.integers(0, 7))
def test_no_bit_of_it_can_be_changed(position: int, bit: int) -> None:
    data = bytearray(signed())
    data[position % (len(data) - 1)] ^= 1 << bit  # the last line break may be any
    try:
        found = roster.read(bytes(data), AUTHORITY.public_key())
    except BadRoster:
        return
    assert found == roster.read(signed(), AUTHORITY.public_key())  # a digit of the signature as a capital letter


def test_another_authority_is_none() -> None:
    with pytest.raises(BadRoster, match="not signed by this federation's authority"):
        roster.read(signed(), Ed25519PrivateKey.generate().public_key())


def test_an_older_number_is_refused() -> None:
    with pytest.raises(BadRoster, match="roster 3 is older than roster 4, which was seen before"):
        roster.read(signed(3), AUTHORITY.public_key(), at_least=4)


def _altered(**changes: object) -> bytes:
    told = {**json.loads(signed().splitlines()[0]), **changes}
    return json.dumps(told, separators=(",", ":"), sort_keys=True).encode()


FIRST = json.loads(signed().splitlines()[0])["members"][0]


@pytest.mark.parametrize(
    ("told", "why"),
    [
        (_altered(members=[FIRST, FIRST]), "names east twice"),
        (_altered(members=[{**FIRST, "name": "../east"}]), "a name that cannot be one"),
        (_altered(members=[FIRST, {**FIRST, "name": "west"}]), "gives east and west the same key"),
        (_altered(members=[{**FIRST, "name": "west"}, FIRST]), "not in the order"),
        (_altered(members=[{**FIRST, "signing": ""}]), "the roster's keys of east are not keys"),
        (_altered(members=[{**FIRST, "agreement": "00"}]), "the roster's keys of east are not keys"),
        (_altered(members=[{"name": "east"}]), "cannot be read"),
        (_altered(members=7), "cannot be read"),
        (_altered(number=0), "number must be at least 1"),
        (_altered(number="3"), "no number"),
        (_altered(number=True), "no number"),
        (_altered(more=1), "not in its one canonical form"),
        (b" " + _altered(), "not in its one canonical form"),
        (b"[" * 100_000, "cannot be read"),
        (b"7", "cannot be read"),
    ],
)
def test_even_signed_nonsense_is_refused_with_one_sentence(told: bytes, why: str) -> None:
    with pytest.raises(BadRoster, match=why) as refused:
        roster.read(forged(told), AUTHORITY.public_key())
    assert "\n" not in str(refused.value)


@pytest.fixture
def kit(tmp_path: Path) -> Path:
    (tmp_path / roster.AUTHORITY).write_text(AUTHORITY.public_key().public_bytes_raw().hex() + "\n")
    return tmp_path


def test_a_kit_remembers_the_newest_that_it_has_seen(kit: Path) -> None:
    with pytest.raises(FedgistError, match=r"has no roster\.json yet"):
        roster.load(kit)
    assert roster.accept(kit, signed(3)).number == 3
    assert roster.accept(kit, signed(3)).number == 3
    assert roster.accept(kit, signed(5, (EAST,))).number == 5
    with pytest.raises(BadRoster, match="roster 4 is older than roster 5"):
        roster.accept(kit, signed(4))
    with pytest.raises(BadRoster, match="two rosters with the number 5"):
        roster.accept(kit, signed(5))
    assert roster.load(kit).members == (EAST,)


def test_what_is_wrong_with_a_kit(kit: Path) -> None:
    (kit / roster.FILE).write_bytes(b"{}")
    with pytest.raises(BadRoster, match=r"roster\.json: the roster is not signed"):
        roster.load(kit)
    (kit / roster.AUTHORITY).write_text("no key")
    with pytest.raises(FedgistError, match="must hold the authority's public key"):
        roster.load(kit)
    (kit / roster.AUTHORITY).unlink()
    with pytest.raises(FedgistError, match="before federations had rosters"):
        roster.load(kit)
