"""How a federation changes: sites are added and revoked, certificates renewed; each change is a new roster.

All of it is done where the authority is. A running server need not be stopped for a new or a revoked site.
"""

import shutil
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509

from fedgist import storage
from fedgist.core.errors import FedgistError, unknown
from fedgist.federation import authority, kits
from fedgist.federation.kits import FederationFolder
from fedgist.federation.listener import REVOKED, revoked
from fedgist.federation.protocol.roster import Roster

EARLY = timedelta(days=30)
"""How long before a certificate ends one is warned."""


def add_sites(federation: FederationFolder, names: Sequence[str]) -> tuple[FederationFolder, Roster]:
    """A kit for each new site; the certificates of the others stay."""
    _need_authority(federation)
    kits.check_sites(federation.server, names)
    if known := sorted(set(names) & {*federation.sites, *revoked(federation.server_kit).values()}):
        raise FedgistError(f"there is, or was, a site {known[0]} in this federation: a new one needs a name of its own")
    grown = replace(federation, sites=tuple(sorted((*federation.sites, *names))))
    with kits.provisioned(grown) as produced:
        for name in names:
            kits.make_kit(grown, name, produced)
    kits.save(grown)
    return grown, authority.update(grown)[0]


def renew(federation: FederationFolder, names: Sequence[str]) -> tuple[list[Path], Roster]:
    """New certificates for these members, or for all with the server and its admin; says which files are new.

    Those of before stay valid until their end, so that nobody is shut out before the new ones are in place.
    """
    _need_authority(federation)
    folders = {name: federation.kit(name) for name in federation.sites}
    folders |= {federation.server: federation.server_kit, kits.ADMIN: federation.admin_kit}
    for name in names:
        if name not in folders:
            raise unknown("member of the federation", name, folders)
    renewed = list(names) or list(folders)
    authority.forget(federation, renewed)
    written = []
    with kits.provisioned(federation) as produced:
        for name in renewed:
            for file in certificate_files(federation, name):
                there = folders[name] / "startup" / file
                there.parent.mkdir(parents=True, exist_ok=True)  # the kit may have been carried away
                shutil.copy2(produced / name / "startup" / file, there)
                written.append(there)
    return written, authority.update(federation)[0]


def revoke(federation: FederationFolder, name: str) -> tuple[FederationFolder, Roster]:
    """Leave a site out for good: no run asks it, the roster does not have it, and its certificates are refused."""
    _need_authority(federation)
    if name not in federation.sites:
        raise unknown("site", name, federation.sites)
    if len(federation.sites) == 1:
        raise FedgistError(f"{name} is the only site: a federation without sites is none")
    authority.forget(federation, [name])
    today = datetime.now(UTC).date().isoformat()
    path = federation.server_kit / REVOKED
    known = path.read_text("ascii") if path.is_file() else ""
    lines = [f"{digest} {name} {today}\n" for digest in authority.issued(federation)[name]]
    storage.write(path, "".join([known, *lines]).encode("ascii"))  # half a line would shut out everybody
    fewer = replace(federation, sites=tuple(site for site in federation.sites if site != name))
    kits.save(fewer)
    if federation.kit(name).is_dir():
        (federation.path / "revoked").mkdir(exist_ok=True)
        federation.kit(name).rename(federation.path / "revoked" / name)
    return fewer, authority.update(fewer)[0]


def _need_authority(federation: FederationFolder) -> None:
    if not federation.authority.is_dir():
        raise FedgistError(f"{federation.authority} is not here: members change only where the authority is")


def certificate_files(federation: FederationFolder, name: str) -> tuple[str, str]:
    kind = "server" if name == federation.server else "client"
    return f"{kind}.crt", f"{kind}.key"


@dataclass(frozen=True)
class Ending:
    """Until when a certificate is valid."""

    who: str
    end: datetime

    @property
    def warning(self) -> str:
        """What to say about it from 30 days before its end on; nothing before."""
        left = self.end - datetime.now(UTC)
        if left > EARLY:
            return ""
        when = "has ended" if left < timedelta(0) else f"ends in {left.days} days"
        what = "make a new federation" if self.who == "authority" else f"`fedgist federation renew DIR {self.who}`"
        return f"the certificate of {self.who} {when}, on {self.end:%Y-%m-%d}: {what}"


def endings(federation: FederationFolder) -> list[Ending]:
    """Until when the certificates of everybody are valid, as far as they are here, and the authority's."""
    paths = {"authority": federation.server_kit / "startup" / "rootCA.pem"}
    folders = {federation.server: federation.server_kit, kits.ADMIN: federation.admin_kit}
    folders |= {site: federation.kit(site) for site in federation.sites}
    for name, folder in folders.items():
        paths[name] = folder / "startup" / certificate_files(federation, name)[0]
    return [ending(name, path) for name, path in paths.items() if path.is_file()]


def ending(who: str, path: Path) -> Ending:
    """Until when the certificate in a file is valid."""
    return Ending(who, x509.load_pem_x509_certificate(path.read_bytes()).not_valid_after_utc)
