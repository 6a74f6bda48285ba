"""The roster: who belongs to a federation and by which keys, numbered, signed by its authority, read by everybody.

A site believes a roster only if the authority whose public key lies in its kit has signed it, and never one that is
older than the last it has seen: neither the server nor another site can add, keep or exchange a member.
"""

import hashlib
import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from fedgist import storage
from fedgist.core.errors import FedgistError

FILE, AUTHORITY = "roster.json", "authority.pub"
"""In a kit: the newest roster that it has seen, and the key of who may sign one."""
PURPOSE = b"fedgist roster 1\n"
"""Comes before what is signed, so that a signature for anything else is none."""
LARGEST = 1 << 22
NAME = re.compile(r"[a-z0-9]([a-z0-9-]{0,60}[a-z0-9])?")
"""What a site may be called: names become names of files, and of subjects in certificates."""


class BadRoster(FedgistError):
    """A roster that must not be believed."""


@dataclass(frozen=True)
class Member:
    """A site: its name, its certificate's SHA-256, and its public keys; those are empty until it has announced them."""

    name: str
    certificate: bytes
    signing: bytes = b""
    """Ed25519, with which others check what it says."""
    agreement: bytes = b""
    """X25519, with which others make a secret that only it can make, too."""

    @property
    def keys(self) -> tuple[bytes, bytes]:
        return self.signing, self.agreement

    @property
    def enrolled(self) -> bool:
        return bool(self.signing)


@dataclass(frozen=True)
class Roster:
    """The members of a federation, in the order of their names; of two rosters the one with the larger number holds."""

    number: int
    federation: str
    members: tuple[Member, ...]

    def __post_init__(self) -> None:
        names = [member.name for member in self.members]
        if doubled := {name for name in names if names.count(name) > 1}:
            raise BadRoster(f"the roster names {min(doubled)} twice")
        if names != sorted(names):
            raise BadRoster("the roster is not in the order of the names")
        if wrong := [name for name in [self.federation, *names] if not NAME.fullmatch(name)]:
            raise BadRoster(f"the roster has a name that cannot be one: {wrong[0][:80]!r}")
        if not 1 <= self.number < 1 << 53:
            raise BadRoster(f"the roster's number must be at least 1, not {self.number}")
        taken: dict[bytes, str] = {}
        for one in self.members:
            if len(one.certificate) != 32 or {len(one.signing), len(one.agreement)} not in ({0}, {32}):
                raise BadRoster(f"the roster's keys of {one.name} are not keys")
            for key in (one.certificate, one.signing, one.agreement):
                if key and taken.setdefault(key, one.name) != one.name:
                    raise BadRoster(f"the roster gives {taken[key]} and {one.name} the same key")

    def __getitem__(self, name: str) -> Member:
        for member in self.members:
            if member.name == name:
                return member
        raise BadRoster(f"{name} is not in roster {self.number} of {self.federation}")

    def __contains__(self, name: str) -> bool:
        return any(member.name == name for member in self.members)

    @property
    def canonical(self) -> bytes:
        """The one byte form of this roster: what is signed, and what the digest is of."""
        keys = ("certificate", "signing", "agreement")
        members = [{"name": one.name, **{key: getattr(one, key).hex() for key in keys}} for one in self.members]
        told = {"federation": self.federation, "members": members, "number": self.number}
        return json.dumps(told, separators=(",", ":"), sort_keys=True).encode("ascii")

    @property
    def digest(self) -> str:
        return hashlib.sha256(self.canonical).hexdigest()


def make(number: int, federation: str, members: Iterable[Member]) -> Roster:
    """A roster of members in any order."""
    return Roster(number, federation, tuple(sorted(members, key=lambda member: member.name)))


def sign(roster: Roster, authority: Ed25519PrivateKey) -> bytes:
    """The roster as it travels: its canonical form, a line break, the signature in hexadecimal digits."""
    return roster.canonical + b"\n" + authority.sign(PURPOSE + roster.canonical).hex().encode("ascii") + b"\n"


def read(data: bytes, authority: Ed25519PublicKey, at_least: int = 1) -> Roster:
    """The roster in these bytes, if the authority has signed it and its number is not below `at_least`."""
    told, _, rest = data.partition(b"\n")
    try:
        if len(data) > LARGEST:
            raise ValueError("too long")
        authority.verify(bytes.fromhex(rest.decode("ascii")), PURPOSE + told)
    except (InvalidSignature, ValueError):
        raise BadRoster("the roster is not signed by this federation's authority") from None
    try:
        roster = _parse(json.loads(told))
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise error if isinstance(error, BadRoster) else BadRoster("the roster cannot be read") from error
    if roster.canonical != told:
        raise BadRoster("the roster is not in its one canonical form")
    if roster.number < at_least:
        raise BadRoster(f"roster {roster.number} is older than roster {at_least}, which was seen before")
    return roster


def _parse(told: Any) -> Roster:
    if type(told["number"]) is not int:
        raise BadRoster("the roster has no number")
    members = [
        Member(str(one["name"]), *(bytes.fromhex(one[key]) for key in ("certificate", "signing", "agreement")))
        for one in told["members"]
    ]
    return Roster(told["number"], str(told["federation"]), tuple(members))


def authority_of(kit: Path) -> Ed25519PublicKey:
    """The key that this kit trusts to say who belongs to the federation."""
    try:
        return Ed25519PublicKey.from_public_bytes(bytes.fromhex((kit / AUTHORITY).read_text("ascii").strip()))
    except OSError:
        raise FedgistError(
            f"{kit} has no {AUTHORITY}: it was made before federations had rosters; ask the authority for that file"
        ) from None
    except ValueError:
        raise FedgistError(f"{kit / AUTHORITY} is damaged: it must hold the authority's public key") from None


def load(kit: Path) -> Roster:
    """The newest roster that a kit has seen."""
    authority = authority_of(kit)
    try:
        return read((kit / FILE).read_bytes(), authority)
    except OSError:
        raise FedgistError(f"{kit} has no {FILE} yet: a run brings it, or carry the authority's there") from None
    except BadRoster as error:
        raise BadRoster(f"{kit / FILE}: {error}") from error


def accept(kit: Path, data: bytes) -> Roster:
    """Keep a roster that is newer than the one in the kit; an older one, or another with its number, is refused.

    The number last seen is that of the roster on disk, which is replaced whole or not at all.
    """
    known = load(kit) if (kit / FILE).is_file() else None
    found = read(data, authority_of(kit), known.number if known else 1)
    if known is None or found.number > known.number:
        storage.write(kit / FILE, data)
    elif found != known:
        raise BadRoster(f"there are two rosters with the number {found.number}: the authority must sign a newer one")
    return found
