"""The server: NVFlare's long-lived process, and runs that are driven from here through a job on it."""

import contextlib
import logging
import re
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path

from fedgist.core.errors import FedgistError
from fedgist.experiments import runner
from fedgist.experiments.folder import RunFolder
from fedgist.experiments.progress import Progress, Several
from fedgist.federation import authority, kits, leftovers, membership, processes, records, runs
from fedgist.federation.kits import FederationFolder
from fedgist.federation.monitor import monitored
from fedgist.federation.protocol import roster
from fedgist.federation.protocol.flare_transport import FlareTransport
from fedgist.federation.protocol.framing import LINKS
from fedgist.federation.protocol.remote_engine import Patience
from fedgist.federation.protocol.roster import Roster

log = logging.getLogger("fedgist")


def start(federation: FederationFolder, say: processes.Say, metrics_port: int | None = None) -> int:
    """Run NVFlare's server until it is interrupted, and metrics on a port of this machine, if one is given."""
    _check_port(federation)
    kits.settle_server(federation.server_kit)
    presence = records.Presence(federation.path)
    command = processes.server(federation.server_kit, kits.ORGANISATION)
    with (
        processes.only_one(federation.server_kit) as lock,
        records.logged(federation.path / "logs" / "server.log", say) as write,
        leftovers.bounded(federation.server_kit),
    ):
        leftovers.remove(federation.server_kit / leftovers.STORE)  # no job lives before the server does

        def tell(line: str) -> None:
            write(line)
            if found := re.fullmatch(r"site (\S+) (is here|is here again|has left|is shut out)", line):
                presence.note(found[1], found[2].startswith("is here"))

        presence.clear()
        for one in membership.endings(federation):
            if one.warning:
                tell(f"warning: {one.warning}")
        tell(f"server {federation.server}:{federation.port}; sites {', '.join(federation.sites)} may join")
        with monitored(federation.path, metrics_port, tell):
            return processes.watch(command, processes.AT_SERVER, tell, lock, _conductor(federation, tell))


def _conductor(federation: FederationFolder, say: processes.Say) -> "subprocess.Popen[str]":
    """Beside the server, what keeps its sites ready for runs."""
    program = [sys.executable, "-u", "-m", "fedgist.federation.listener", "conductor"]
    process = processes.begin([*program, str(federation.path), kits.ADMIN])

    def forward() -> None:
        assert process.stdout is not None
        with contextlib.suppress(ValueError):  # closed while we were reading
            for line in process.stdout:
                if line.startswith("warning: "):
                    say(line.rstrip())

    threading.Thread(target=forward, daemon=True).start()
    return process


def _check_port(federation: FederationFolder) -> None:
    """NVFlare would call itself ready and wait for the port without a word."""
    with socket.socket() as trial:
        trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            trial.bind(("", federation.port))
        except OSError as error:
            raise FedgistError(
                f"port {federation.port} of this machine cannot be had ({error.strerror}): end what uses it, or make a "
                "federation with another --port"
            ) from error


def run(
    federation: FederationFolder,
    known: runs.Settled,
    resume: bool,
    patience: Patience,
    wait: float,
    progress: Progress,
    alone: RunFolder | None = None,
) -> runner.Result:
    """One run across the sites of a federation, from its beginning or from its last checkpoint."""
    recorder = records.Recorder(federation.path, known.folder.path)
    members = Members(federation, wait)
    try:
        listeners = Several(progress, recorder)
        result = runs.run(known, members.connected, resume, patience, listeners, members, alone)
    except BaseException as error:
        recorder.end(records.STOPPED if isinstance(error, KeyboardInterrupt) else records.FAILED, str(error))
        raise
    recorder.end(records.FINISHED)
    return result


class Members:
    """Who belongs to the federation, and who is there; the server passes on rosters, and what sites announce."""

    def __init__(self, federation: FederationFolder, wait: float):
        self.federation, self.wait = federation, wait
        self.transport: FlareTransport | None = None

    @contextlib.contextmanager
    def connected(self) -> Iterator[FlareTransport]:
        """What carries envelopes to those sites that are there, after some waiting for all."""
        federation = self.federation
        where = federation.server_kit / LINKS
        if not processes.in_use(federation.server_kit) or not where.is_file():
            raise FedgistError(
                f"the server at {federation.server}:{federation.port} does not answer; start it with "
                f"`fedgist federation start {federation.path}`"
            )
        links = where.read_text(encoding="utf-8")

        def looked_after() -> bool:
            """Whether the server that this began with still gives its sites jobs."""
            return processes.in_use(federation.server_kit) and where.read_text(encoding="utf-8") == links

        with contextlib.closing(FlareTransport(Path(links), looked_after)) as transport:
            there = transport.wait(set(federation.sites), self.wait)
            if not there:
                raise FedgistError(
                    f"no site has connected within {self.wait:g} s: start them with `fedgist site start`"
                )
            for site in sorted(set(federation.sites) - there):
                log.warning(f"site {site} is not there; the run begins without it")
            self.transport = transport
            yield transport

    def present(self) -> set[str]:
        return self.transport.refresh() if self.transport else set()

    def expelled(self) -> dict[str, str]:
        now = kits.load(self.federation.path).sites
        return {site: "was revoked" for site in self.federation.sites if site not in now}

    def roster(self) -> bytes:
        path = self.federation.path / roster.FILE
        return path.read_bytes() if path.is_file() else b""

    def known(self) -> Roster:
        return authority.load(self.federation)

    def hear(self, announced: Mapping[str, bytes]) -> bool:
        """Keeps what is new for the authority; where that is here, it signs at once."""
        if not self.roster():  # made before federations had one
            return False
        new = [site for site, data in sorted(announced.items()) if self._is_new(site, data)]
        if new and self.federation.authority.is_dir():
            signed, refused = membership.sign(self.federation)
            for why in refused:
                log.warning(why)
            if has := [site for site in new if not any(why.startswith(f"keys of {site}:") for why in refused)]:
                log.info(f"roster {signed.number} has the keys of {', '.join(has)}")
            return bool(has)
        if new:
            where = self.federation.path / authority.ANNOUNCED
            log.warning(f"the roster lacks keys of {', '.join(new)}: carry {where} to `fedgist federation roster`")
        return False

    def _is_new(self, site: str, data: bytes) -> bool:
        try:
            return authority.keep_announcement(self.federation, site, data)
        except FedgistError as error:
            log.warning(f"site {site}: {error}")
            return False
