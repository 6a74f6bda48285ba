"""The server: NVFlare's long-lived process, and runs that are driven from here through a job on it."""

import contextlib
import io
import logging
import re
import socket
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from fedgist.core.errors import FedgistError
from fedgist.experiments import runner
from fedgist.experiments.progress import Progress, Several
from fedgist.federation import authority, kits, membership, processes, records, runs
from fedgist.federation.kits import FederationFolder
from fedgist.federation.protocol import roster
from fedgist.federation.protocol.flare_transport import FlareTransport, write_job
from fedgist.federation.protocol.remote_engine import Patience
from fedgist.federation.site import ProvisionedSite

log = logging.getLogger("fedgist")


def start(federation: FederationFolder, say: processes.Say) -> int:
    """Run NVFlare's server until it is interrupted."""
    _check_port(federation)
    presence = records.Presence(federation.path)
    command = processes.server(federation.server_kit, kits.ORGANISATION)
    with (
        processes.only_one(federation.server_kit) as lock,
        records.logged(federation.path / "logs" / "server.log", say) as write,
    ):

        def tell(line: str) -> None:
            write(line)
            if found := re.fullmatch(r"site (\S+) (is here|is here again|has left|is shut out)", line):
                presence.note(found[1], found[2].startswith("is here"))

        presence.clear()
        for one in membership.endings(federation):
            if one.warning:
                tell(f"warning: {one.warning}")
        tell(f"server {federation.server}:{federation.port}; sites {', '.join(federation.sites)} may join")
        return processes.watch(command, processes.AT_SERVER, tell, lock)


def shut_out(federation: FederationFolder, site: str) -> bool:
    """End the connection of a site that was revoked, if the server is running here; True if that was done."""
    if not processes.in_use(federation.server_kit):
        return False
    with _in_words(federation), contextlib.closing(_session(federation)) as session:
        session.disable_client(site)
    return True


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
    config: runs.Config,
    out: Path | None,
    resume: bool,
    patience: Patience,
    wait: float,
    progress: Progress,
) -> runner.Result:
    """One run across the sites of a federation, from its beginning or from its last checkpoint."""
    known = config if isinstance(config, runs.Settled) else runs.settle(federation.sites, config, out, resume)
    recorder = records.Recorder(federation.path, known.folder.path.name, known.folder.path)
    try:
        result = runs.run(
            federation.sites,
            lambda: connected(federation, wait),
            known,
            out,
            resume,
            patience,
            Several(progress, recorder),
            Members(federation),
        )
    except BaseException as error:
        recorder.end(records.STOPPED if isinstance(error, KeyboardInterrupt) else records.FAILED, str(error))
        raise
    recorder.end(records.FINISHED)
    return result


class Members:
    """The roster as the server has it: it passes on the newest, and what sites announce for the next."""

    def __init__(self, federation: FederationFolder):
        self.federation = federation

    def roster(self) -> bytes:
        path = self.federation.path / roster.FILE
        return path.read_bytes() if path.is_file() else b""

    def hear(self, announced: Mapping[str, bytes]) -> bool:
        """Keeps what is new for the authority; where that is here, it signs at once."""
        if not self.roster():  # made before federations had one
            return False
        new = [site for site, data in sorted(announced.items()) if self._is_new(site, data)]
        if new and self.federation.authority.is_dir():
            signed, _ = authority.update(self.federation)
            log.info(f"roster {signed.number} has the keys of {', '.join(new)}")
            return True
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


@contextlib.contextmanager
def connected(federation: FederationFolder, wait: float) -> Iterator[FlareTransport]:
    """A job on the federation's server that carries envelopes, with those sites that are there."""
    with contextlib.ExitStack() as stack:
        transport = FlareTransport()
        stack.callback(transport.close)
        with _in_words(federation):
            session = _session(federation)
            stack.callback(session.close)
            there = _await_sites(federation, session, wait)
            for site in sorted(set(federation.sites) - there):
                log.warning(f"site {site} is not there; it can join later with --resume")
            with tempfile.TemporaryDirectory() as folder:
                kits.allow_job(federation.server_kit)
                write_job(Path(folder), transport.address, ProvisionedSite, min_sites=len(there))
                job = session.submit_job(folder)
            stack.callback(_end_job, session, job, transport)
            _await_job(session, job, transport)
        yield transport


def _session(federation: FederationFolder) -> Any:
    """NVFlare's administration of a running server."""
    from nvflare.fuel.flare_api.flare_api import new_secure_session

    logging.getLogger("nvflare").setLevel(logging.CRITICAL)  # what matters of its errors is said in our words
    with contextlib.redirect_stdout(io.StringIO()):  # it greets
        return new_secure_session(kits.ADMIN, str(federation.admin_kit), timeout=30.0)


@contextlib.contextmanager
def _in_words(federation: FederationFolder) -> Iterator[None]:
    """Turns the many ways in which NVFlare says that it cannot into one sentence."""
    try:
        yield
    except FedgistError:
        raise
    except Exception as error:
        raise FedgistError(
            f"the server at {federation.server}:{federation.port} does not answer ({type(error).__name__}: {error}); "
            f"start it with `fedgist federation start {federation.path}`"
        ) from error


def _await_sites(federation: FederationFolder, session: Any, wait: float) -> set[str]:
    """The sites that are connected: all, or those that are after so many seconds."""
    until = time.monotonic() + wait
    while True:
        there = {client.name for client in session.get_connected_client_list()} & set(federation.sites)
        if len(there) == len(federation.sites) or (time.monotonic() > until and there):
            return there
        if time.monotonic() > until:
            raise FedgistError(f"no site has connected within {wait:g} s: start them with `fedgist site start`")
        time.sleep(0.5)


def _await_job(session: Any, job: str, transport: FlareTransport) -> None:
    """Wait until the job's server calls back, for as long as NVFlare has not given the job up."""
    while not transport.wait(2.0):
        if not _alive(status := str(session.get_job_status(job))):
            raise FedgistError(f"NVFlare could not start the job: {status}; the logs of server and sites say why")


def _end_job(session: Any, job: str, transport: FlareTransport) -> None:
    """The job ends when nobody drives it; NVFlare would wait for a site that died in it, so it is told not to."""
    transport.close()
    with contextlib.suppress(Exception):  # the server may be gone, and then so is the job
        for _ in range(10):
            if not _alive(str(session.get_job_status(job))):
                return
            time.sleep(0.5)
        session.abort_job(job)


def _alive(status: str) -> bool:
    return status in ("SUBMITTED", "APPROVED", "DISPATCHED", "RUNNING")
