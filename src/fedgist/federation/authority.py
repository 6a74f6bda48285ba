"""The authority of a federation: it vouches for its members, and signs the roster that says who they are.

Its folder holds the private key of the certificates and the key of the roster, and is needed only when members change.
"""

import json
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from fedgist import storage
from fedgist.core.errors import FedgistError
from fedgist.federation.protocol import keys, roster
from fedgist.federation.protocol.roster import Member, Roster

if TYPE_CHECKING:
    from fedgist.federation.kits import FederationFolder

KEY = "roster.key"
ISSUED = "replaced.json"
ANNOUNCED = "announced"
"""In the federation's folder: what sites have announced as their keys, one file a site."""


def found(federation: "FederationFolder") -> Roster:
    """Make the key that signs rosters, give everybody its public half, and sign the first."""
    _signing_key(federation, make=True)
    return _publish(federation, roster.make(1, _name(federation.path), _members(federation, {})))


def update(federation: "FederationFolder", files: Iterable[Path] = ()) -> tuple[Roster, list[str]]:
    """Sign a new roster if members or their keys have changed; also says which announcements were not believed.

    Of a federation that its caller holds (`membership.held`): two who sign at a time make two rosters of one number.
    """
    known = load(federation) if (federation.authority / KEY).is_file() else found(federation)
    refused, announced = [], {}
    for path in [*sorted((federation.path / ANNOUNCED).glob("*.keys")), *files]:
        try:
            member = keys.check(path.read_bytes(), _root(federation))
            announced[member.name] = member
        except (OSError, FedgistError) as error:
            refused.append(f"{path}: {error}")
    for site in federation.sites:  # kits that are used where they were made
        if (federation.kit(site) / keys.FILE).is_file():
            announced[site] = keys.check(keys.announce(federation.kit(site)), _root(federation))
    before = {member.name: member for member in known.members}
    owners = {key: member.name for member in known.members for key in member.keys if key}
    members = []
    for member in _members(federation, before):
        new = announced.get(member.name, member)
        others = {owners.setdefault(key, member.name) for key in new.keys if key} - {member.name}
        if new.keys != member.keys and new.certificate != member.certificate:
            refused.append(f"keys of {member.name}: signed with a certificate that has been replaced")
        elif others:  # whoever knows a roster can announce what is in it
            refused.append(f"keys of {member.name}: those of {min(others)}, which it cannot have made")
        members.append(member if others or new.certificate != member.certificate else new)
    if tuple(members) == known.members:
        return known, refused
    return _publish(federation, roster.make(known.number + 1, known.federation, members)), refused


def load(federation: "FederationFolder") -> Roster:
    """The newest roster in a federation's folder."""
    return roster.load(federation.path)


def keep_announcement(federation: "FederationFolder", site: str, data: bytes) -> bool:
    """Keep what a site announces as its keys until the authority looks at it; True if the roster does not have them."""
    member = keys.check(data, _root(federation))
    if member.name != site:
        raise FedgistError(f"site {site} announces the keys of {member.name}")
    known = load(federation)
    if site in known and known[site].keys == member.keys:
        return False
    storage.write(federation.path / ANNOUNCED / f"{site}.keys", data)
    return True


def _publish(federation: "FederationFolder", signed: Roster) -> Roster:
    """Sign a roster, and lay it where the server and the kits beside it find it."""
    data = roster.sign(signed, _signing_key(federation))
    for folder in [federation.path, *map(federation.kit, federation.sites)]:
        if folder.is_dir():  # a kit may have been carried away
            storage.write(folder / roster.AUTHORITY, (federation.authority / roster.AUTHORITY).read_bytes())
            roster.accept(folder, data)
    return signed


def _members(federation: "FederationFolder", before: Mapping[str, Member]) -> list[Member]:
    """The sites with the certificates that they have now, and the keys that the last roster gave them."""
    found = []
    for site in federation.sites:
        certificate = keys.fingerprint(certificate_of(federation, site))
        found.append(replace(before.get(site, Member(site, certificate)), certificate=certificate))
    return found


def certificate_of(federation: "FederationFolder", subject: str) -> x509.Certificate:
    """The certificate that the authority gave a member last."""
    known = json.loads(_state(federation).read_text(encoding="utf-8"))
    if subject not in known:
        again = f"fedgist federation renew {federation.path} {subject}"
        raise FedgistError(f"{subject} has no certificate, as its renewal broke off: do it again with `{again}`")
    return x509.load_pem_x509_certificate(known[subject]["cert"].encode("ascii"))


def forget(federation: "FederationFolder", subjects: Iterable[str]) -> None:
    """Have the next provisioning give these members new certificates; which they had is kept, for a revocation."""
    known = json.loads(_state(federation).read_text(encoding="utf-8"))
    there = [subject for subject in subjects if subject in known]  # others were forgotten by what broke off then
    replaced = _replaced(federation) | {subject: issued(federation, subject) for subject in there}
    for subject in there:
        del known[subject]
    storage.write(federation.authority / ISSUED, json.dumps(replaced, indent=1).encode())
    storage.write(_state(federation), json.dumps(known).encode())
    _state(federation).chmod(0o600)


def issued(federation: "FederationFolder", subject: str) -> list[str]:
    """All certificates that a member has had, by their SHA-256."""
    known = json.loads(_state(federation).read_text(encoding="utf-8"))
    now = [keys.fingerprint(certificate_of(federation, subject)).hex()] if subject in known else []
    return list(dict.fromkeys([*_replaced(federation).get(subject, []), *now]))


def _replaced(federation: "FederationFolder") -> dict[str, list[str]]:
    path = federation.authority / ISSUED
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}


def root_days(federation: "FederationFolder") -> int:
    """For how many days the authority's certificate was made; 0 where there is none yet."""
    if not _state(federation).is_file():
        return 0
    known = json.loads(_state(federation).read_text(encoding="utf-8"))
    root = x509.load_pem_x509_certificate(known["root_cert"].encode("ascii"))
    return (root.not_valid_after_utc - root.not_valid_before_utc).days


def _state(federation: "FederationFolder") -> Path:
    """Where NVFlare's provisioning keeps the certificates that it has made, and their keys."""
    return federation.authority / "fedgist" / "state" / "cert.json"


def _signing_key(federation: "FederationFolder", make: bool = False) -> Ed25519PrivateKey:
    path = federation.authority / KEY
    if make and not path.exists():
        key = Ed25519PrivateKey.generate()
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(key.private_bytes_raw())
        public = key.public_key().public_bytes_raw().hex()
        (federation.authority / roster.AUTHORITY).write_text(public + "\n", encoding="ascii")
    return Ed25519PrivateKey.from_private_bytes(path.read_bytes())


def _root(federation: "FederationFolder") -> x509.Certificate:
    return x509.load_pem_x509_certificate((federation.server_kit / "startup" / "rootCA.pem").read_bytes())


def _name(path: Path) -> str:
    """A federation is called after its folder, with what a name may hold."""
    return re.sub(r"[^a-z0-9]+", "-", path.name.lower())[:60].strip("-") or "federation"
