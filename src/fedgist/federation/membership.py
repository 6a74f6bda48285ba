"""How a federation changes: sites are added and revoked, certificates renewed; each change is a new roster.

All of it is done where the authority is. A running server need not be stopped for a new or a revoked site.
"""

import contextlib
import fcntl
import shutil
from collections.abc import Iterable, Iterator, Sequence
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

LOCK = "lock"
"""In the authority's folder: who holds it changes the federation, and nobody else."""
EARLY = timedelta(days=30)
"""How long before a certificate ends one is warned."""


@contextlib.contextmanager
def held(federation: FederationFolder) -> Iterator[FederationFolder]:
    """The federation as it is now, held by nobody else: a run that began before signs the keys of sites, too."""
    if not federation.authority.is_dir():
        raise FedgistError(
            f"{federation.authority} is not here: members and their keys change only where the authority is"
        )
    with (federation.authority / LOCK).open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield kits.load(federation.path)


def sign(federation: FederationFolder, files: Iterable[Path] = ()) -> tuple[Roster, list[str]]:
    """A new roster if sites have announced keys since; also says which announcements were not believed."""
    with held(federation) as now:
        return authority.update(now, files)


def add_sites(federation: FederationFolder, names: Sequence[str]) -> tuple[FederationFolder, Roster]:
    """A kit for each new site; the certificates of the others stay."""
    with held(federation) as now:
        kits.check_sites(now.server, names)
        if known := sorted(set(names) & {*now.sites, *revoked(now.server_kit).values()}):
            raise FedgistError(
                f"there is, or was, a site {known[0]} in this federation: a new one needs a name of its own"
            )
        grown = replace(now, sites=tuple(sorted((*now.sites, *names))))
        with kits.provisioned(grown) as produced:
            for name in names:
                kits.make_kit(grown, name, produced)
        kits.save(grown)
        return grown, authority.update(grown)[0]


def renew(federation: FederationFolder, names: Sequence[str]) -> tuple[list[Path], Roster]:
    """New certificates for these members, or for all with the server and its admin; says which files are new.

    Those of before stay valid until their end, so that nobody is shut out before the new ones are in place.
    """
    with held(federation) as now:
        folders = {name: now.kit(name) for name in now.sites}
        folders |= {now.server: now.server_kit, kits.ADMIN: now.admin_kit}
        for name in names:
            if name not in folders:
                raise unknown("member of the federation", name, folders)
        renewed = list(names) or list(folders)
        authority.forget(now, renewed)
        written = []
        with kits.provisioned(now) as produced:
            for name in renewed:
                for file in certificate_files(now, name):
                    there = folders[name] / "startup" / file
                    there.parent.mkdir(parents=True, exist_ok=True)  # the kit may have been carried away
                    shutil.copy2(produced / name / "startup" / file, there)
                    written.append(there)
        return written, authority.update(now)[0]


def revoke(federation: FederationFolder, name: str) -> tuple[FederationFolder, Roster]:
    """Leave a site out for good: no run asks it, the roster does not have it, and its certificates are refused."""
    with held(federation) as now:
        if name not in now.sites:
            if name not in revoked(now.server_kit).values():
                raise unknown("site", name, now.sites)
            authority.update(now)  # if it broke off before that
            # no hint at another one, for which it would be for good
            raise FedgistError(f"site {name} is revoked already")
        if len(now.sites) == 1:
            raise FedgistError(f"{name} is the only site: a federation without sites is none")
        today = datetime.now(UTC).date().isoformat()
        path = now.server_kit / REVOKED
        known = path.read_text("ascii") if path.is_file() else ""
        lines = [f"{digest} {name} {today}\n" for digest in authority.issued(now, name)]
        storage.write(path, "".join([known, *lines]).encode("ascii"))  # half a line would shut out everybody
        fewer = replace(now, sites=tuple(site for site in now.sites if site != name))
        kits.save(fewer)
        if now.kit(name).is_dir():
            (now.path / "revoked").mkdir(exist_ok=True)
            now.kit(name).rename(now.path / "revoked" / name)
        return fewer, authority.update(fewer)[0]


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
