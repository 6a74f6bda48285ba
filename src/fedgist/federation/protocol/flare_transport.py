"""NVFlare (2.9, Collab API): carries envelopes between the process that drives a run and the sites.

NVFlare runs one job: at each site a process that answers for as long as the job lasts (`FlareSite`), at the server one
that calls them (`FlareServer`) on behalf of whoever drives the run (`FlareTransport`), to whom it is linked by a socket
on the same machine. The job brings no code along: it names classes that a site has installed and allows.
"""

import json
import logging
import queue
import socket
import tempfile
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from contextlib import suppress
from io import BufferedRWPair
from pathlib import Path
from typing import Any

from fedgist.core.errors import FedgistError
from fedgist.federation.protocol.envelope import Refusal, seal
from fedgist.federation.protocol.remote_engine import Lost
from fedgist.federation.protocol.site_host import SiteHost

try:
    from nvflare.collab import collab
except ImportError:
    raise FedgistError("a federation across machines needs NVFlare: pip install 'fedgist[nvflare]'") from None

log = logging.getLogger("fedgist")

JOB = "fedgist"
CONTROLLER = "nvflare.collab.runtime.controller.CollabController"
EXECUTOR = "nvflare.collab.runtime.executor.CollabExecutor"


class FlareSite(ABC):
    """Abstract: the object that NVFlare calls at a site."""

    @abstractmethod
    def make_host(self, site: str, kit: Path) -> SiteHost:
        """What answers there."""

    @collab.publish
    def answer(self, envelope: bytes) -> bytes:
        """The host's answer. It is made when it is first needed: a site that cannot must not stop the whole job."""
        try:
            if not hasattr(self, "_host"):
                self._host = self.make_host(collab.site_name, Path(collab.workspace.get_root_dir()))
        except Exception as error:
            log.error(f"site {collab.site_name} cannot answer: {error}")
            return seal(Refusal(False, "it cannot begin; the log of the site says why"))
        return self._host.handle(envelope)

    @collab.final
    def end(self) -> None:
        """The job is over."""
        if hasattr(self, "_host"):
            self._host.close()


class FlareServer:
    """The object that NVFlare runs at the server: it calls sites as the driver of the run asks."""

    def __init__(self, address: str):
        self.address = address

    @collab.main
    def serve(self) -> None:
        sites = {proxy.name: proxy for proxy in collab.clients}
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as link:
            link.connect(self.address)
            with link.makefile("rwb") as stream:
                _write(stream, json.dumps(sorted(sites)).encode())
                while (order := _read(stream)) is not None:
                    asked = json.loads(order)
                    envelopes = {site: _read(stream) or b"" for site in asked["sites"]}
                    self._exchange(stream, envelopes, asked["timeout"], asked["enough"])

    def _exchange(self, stream: BufferedRWPair, envelopes: Mapping[str, bytes], timeout: float, enough: int) -> None:
        """Call all sites at once and pass on what they say until enough of them have answered."""
        outcomes: queue.Queue[tuple[str, bytes | None]] = queue.Queue()
        for site, envelope in envelopes.items():
            results = collab.get_clients([site])(blocking=False, timeout=timeout).answer(envelope)
            threading.Thread(target=_await, args=(site, results, outcomes), daemon=True).start()
        answered = 0
        for _ in envelopes:
            site, data = outcomes.get()
            _write(stream, json.dumps({"site": site, "lost": data is None}).encode(), data or b"")
            answered += data is not None
            if answered >= enough:
                break
        _write(stream, b"{}")


def _await(site: str, results: Iterable[tuple[str, Any]], outcomes: "queue.Queue[tuple[str, bytes | None]]") -> None:
    """Wait for one site; a host never raises, so that whatever goes wrong means that it was not reached."""
    found = [result for _, result in results]
    outcomes.put((site, found[0] if found and isinstance(found[0], bytes) else None))


class FlareTransport:
    """The driver's end: waits for the job's server, then hands it envelopes."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="fedgist-")  # only this user may look into it
        self.address = str(Path(self._folder.name) / "link")
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(self.address)
        self._listener.listen(1)
        self._link: socket.socket | None = None
        self.sites: tuple[str, ...] = ()

    def wait(self, seconds: float) -> bool:
        """Wait for the job to begin; False if it has not within so many seconds. Then `sites` are those in it."""
        self._listener.settimeout(seconds)
        try:
            self._link, _ = self._listener.accept()
        except TimeoutError:
            return False
        self._link.setblocking(True)
        self._stream = self._link.makefile("rwb")
        self.sites = tuple(json.loads(self._receive()))
        return True

    def exchange(self, requests: Mapping[str, bytes], timeout: float, enough: int) -> dict[str, bytes | Lost]:
        found: dict[str, bytes | Lost] = {site: Lost("is not connected") for site in requests if site not in self.sites}
        present = {site: data for site, data in requests.items() if site in self.sites}
        if not present:
            return found
        order = {"sites": list(present), "timeout": timeout, "enough": enough}
        try:
            _write(self._stream, json.dumps(order).encode(), *present.values())
        except OSError as error:
            raise self._broken() from error
        while outcome := json.loads(self._receive()):
            data = self._receive()
            found[outcome["site"]] = Lost(f"did not answer within {timeout:g} s") if outcome["lost"] else data
        return found

    def close(self) -> None:
        """End the job: its server leaves when nobody drives it any more."""
        if self._link is not None:
            with suppress(OSError):  # what is still to be sent has nobody to read it
                self._stream.close()
            self._link.close()
        self._listener.close()
        self._folder.cleanup()

    def _receive(self) -> bytes:
        try:
            data = _read(self._stream)
        except OSError as error:
            raise self._broken() from error
        if data is None:
            raise self._broken()
        return data

    @staticmethod
    def _broken() -> FedgistError:
        return FedgistError("the NVFlare server ended the job; see its log, start it again, and go on with --resume")


def write_job(folder: Path, address: str, site: type[FlareSite], min_sites: int) -> None:
    """The job as NVFlare reads it: names of installed classes, no code."""
    server, client = f"{FlareServer.__module__}.{FlareServer.__name__}", f"{site.__module__}.{site.__name__}"
    controller = {"path": CONTROLLER, "args": {"server_obj_id": "_server", "sync_task_timeout": 60}}
    executor = {"path": EXECUTOR, "args": {"client_obj_id": "_client"}}
    files = {
        "meta.json": {
            "name": JOB,
            "resource_spec": {},
            "min_clients": min_sites,
            "deploy_map": {"app": ["@ALL"]},
        },
        "app/config/config_fed_server.json": {
            "format_version": 2,
            "workflows": [{"id": "controller", **controller}],
            "components": [{"id": "_server", "path": server, "args": {"address": address}}],
        },
        "app/config/config_fed_client.json": {
            "format_version": 2,
            "executors": [{"tasks": ["*"], "executor": executor}],
            "components": [{"id": "_client", "path": client, "args": {}}],
        },
    }
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(json.dumps(content, indent=1), encoding="utf-8")


def _write(stream: BufferedRWPair, *parts: bytes) -> None:
    for part in parts:
        stream.write(len(part).to_bytes(8, "little"))
        stream.write(part)
    stream.flush()


def _read(stream: BufferedRWPair) -> bytes | None:
    """The next part; None when the other end has gone."""
    length = stream.read(8)
    if len(length) < 8:
        return None
    count = int.from_bytes(length, "little")
    data = stream.read(count)
    return data if len(data) == count else None
