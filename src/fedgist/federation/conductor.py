"""Keeps every site of a running server in a job that stays, so that a run finds the sites waiting.

A site that comes, comes back, or was lost by its job gets a new one; the others are not disturbed by it. One that was
revoked loses its connection.
Used as a program: python -m fedgist.federation.listener conductor FEDERATION ADMIN. Nothing here needs torch.
"""

import contextlib
import io
import itertools
import json
import logging
import socket
import sys
import tempfile
import time
import tomllib
from functools import partial
from pathlib import Path
from typing import Any

from fedgist.federation.leftovers import STORE, remove, unended
from fedgist.federation.listener import revoked
from fedgist.federation.processes import end_in_order
from fedgist.federation.protocol.flare_link import write_job
from fedgist.federation.protocol.framing import HEARD, LINKS, read

SITE = "fedgist.federation.site.ProvisionedSite"
FRESH = 25.0
"""Seconds since a site was last heard, which is every ten, after which it is not counted on."""
SILENT = 45.0
"""The same, after which no run waits any more for a site that it has lost. What says it is there computes nothing, so
that a site which is only slow is never silent; and one that is started again has that long."""
SETTLED = 1.5
"""Seconds for which nobody else has come: sites that are started together are to share a job."""
PATIENCE = 150.0
"""Seconds that a job may take to begin."""
COMES_UP = 60.0
"""Seconds in which the server comes up; who cannot reach it afterwards says so."""
PAUSES = 5.0, 120.0
"""Seconds until a site whose job did not begin gets another: at first, and at most; each time twice as many."""


class Conductor:
    """Which jobs there are, and whom they hold."""

    def __init__(self, federation: Path, folder: Path, session: Any):
        self.federation, self.folder, self.session = federation, folder, session
        self.begun: dict[Path, tuple[str, set[str], float]] = {}
        """Jobs that have not called yet: where they will be found, their names, whom they are for, since when."""
        self.numbers = itertools.count(1)
        self.waiting, self.since = set[str](), 0.0
        self.holding: dict[Path, set[str]] = {}
        """Whom each job holds, by where it is found."""
        self.failed: dict[str, tuple[float, float]] = {}
        """Sites whose last job ended before it called: for how long they get no other, and until when."""
        self.shut_out: set[str] = set()
        self.heard: set[str] | None = None
        """The sites that were heard of late, as they are noted."""
        self.lost: dict[str, float] = {}
        """When a site was lost by its job: it must have been heard since then."""

    def step(self, now: float) -> None:
        """Look who is there, and begin a job for those whom none holds."""
        before = set[str]().union(*self.holding.values())
        self.holding = self._look()
        held = set[str]().union(*self.holding.values())
        self.lost |= dict.fromkeys(before - held, time.time())
        for address, (job, sites, since) in list(self.begun.items()):
            if address in self.holding:
                del self.begun[address]
            elif not self._alive(job) or now - since > PATIENCE:
                del self.begun[address]
                self._note_failure(sites, now)
        for site in held:
            self.failed.pop(site, None)
        coming = {site for _, sites, _ in self.begun.values() for site in sites}
        members = set(tomllib.loads((self.federation / "federation.toml").read_text(encoding="utf-8"))["sites"])
        connected = self.session.get_connected_client_list()
        for site in {one.name for one in connected} & set(revoked(self.federation / "server").values()) - self.shut_out:
            self.session.disable_client(site)
            self.shut_out.add(site)
        self._note_heard({one.name for one in connected if one.last_connect_time > time.time() - SILENT})
        old = time.time() - FRESH
        fresh = {one.name for one in connected if one.last_connect_time > max(old, self.lost.get(one.name, 0.0))}
        pausing = {site for site, (_, until) in self.failed.items() if now < until}
        missing = (fresh & members) - held - coming - pausing
        if missing != self.waiting:
            self.waiting, self.since = missing, now
        if missing and (now - self.since > SETTLED or missing | held | coming >= members):
            for sites in (missing - self.failed.keys(), *({site} for site in sorted(missing & self.failed.keys()))):
                if sites:
                    self._begin(sites, now)

    def _note_heard(self, sites: set[str]) -> None:
        """For the drivers of runs; if this stops, they wait for who is in it as if it were heard."""
        if sites != self.heard:
            draft = self.folder / f".{HEARD}"
            draft.write_text("\n".join(sorted(sites)), encoding="utf-8")
            draft.replace(self.folder / HEARD)
            self.heard = sites

    def _note_failure(self, sites: set[str], now: float) -> None:
        """The process of one site may be why; from now on each has a job of its own, so that the others get one."""
        first, most = PAUSES
        for site in sites:
            pause = min(2 * self.failed[site][0], most) if site in self.failed else first
            self.failed[site] = pause, now + pause
            if sites == {site}:
                print(
                    f"warning: site {site} cannot begin: log.txt in its kit says why; again in {pause:g} s", flush=True
                )

    def _begin(self, sites: set[str], now: float) -> None:
        store = self.federation / "server" / STORE
        remove(store, partial(unended, store))
        address = self.folder / f"{next(self.numbers)}.link"
        with tempfile.TemporaryDirectory() as folder:
            write_job(Path(folder), str(address), SITE, sites)
            self.begun[address] = self.session.submit_job(folder), sites, now

    def _look(self) -> dict[Path, set[str]]:
        """The sites that jobs hold; the socket of one that has ended goes, but a busy one is left alone."""
        held: dict[Path, set[str]] = {}
        for address in self.folder.glob("*.link"):
            try:
                with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as link:
                    link.settimeout(10.0)
                    link.connect(str(address))
                    with link.makefile("rwb") as stream:
                        held[address] = set(json.loads(read(stream) or b"[]"))
            except (TimeoutError, BlockingIOError):  # the latter where others wait at its door
                held[address] = self.holding.get(address, set())
            except OSError:
                address.unlink(missing_ok=True)
        return held

    def _alive(self, job: str) -> bool:
        return str(self.session.get_job_status(job)) in ("SUBMITTED", "APPROVED", "DISPATCHED", "RUNNING")


def session_of(admin_kit: Path, admin: str) -> Any:
    """NVFlare's administration of a running server."""
    from nvflare.fuel.flare_api.flare_api import new_secure_session

    logging.getLogger("nvflare").setLevel(logging.CRITICAL)  # what matters of its errors is said in our words
    with contextlib.redirect_stdout(io.StringIO()):  # it greets
        return new_secure_session(admin, str(admin_kit), timeout=30.0)


def main(federation: Path, admin: str) -> None:
    end_in_order()  # the folder goes, too
    where = federation / "server" / LINKS
    if where.is_file() and (left := where.read_text(encoding="utf-8")):  # empty where one was killed as it wrote
        _remove(Path(left))
    with contextlib.suppress(KeyboardInterrupt), tempfile.TemporaryDirectory(prefix="fedgist-") as folder:
        where.write_text(folder, encoding="utf-8")
        conductor, said, failed, begun = None, "", False, time.monotonic()
        while True:
            try:
                if conductor is None:
                    conductor = Conductor(federation, Path(folder), session_of(federation / "admin", admin))
                elif failed:
                    with contextlib.suppress(Exception):  # it may be what has failed; its threads would stay otherwise
                        conductor.session.close()
                    conductor.session = session_of(federation / "admin", admin)
                conductor.step(time.monotonic())
                said, failed = "", False
            except Exception as error:  # the server may be busy: what counts is that this goes on
                failed, why = True, f"{type(error).__name__}: {error}"
                if why != said and (conductor is not None or time.monotonic() - begun > COMES_UP):
                    print(f"warning: cannot look after the sites: {why}", flush=True)
                    said = why
            time.sleep(0.5)


def _remove(links: Path) -> None:
    """Remove what a killed server left: NVFlare begins jobs of it now, which would hold their sites there for ever."""
    for file in [*links.glob("*.link"), links / HEARD]:
        file.unlink(missing_ok=True)
    with contextlib.suppress(OSError):  # a server that ended in order has taken it along
        links.rmdir()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
