"""NVFlare's end at the server: a job that stays, holds sites, and calls them on behalf of whoever drives a run.

It listens on a socket of the same machine, in a folder that only its user may enter; a run begins when its driver
connects, which takes no longer than that. The job brings no code along: it names classes that a site has installed and
allows. Nothing here needs torch, which would cost each such job seconds and memory.
"""

import json
import logging
import queue
import socket
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from io import BufferedRWPair
from pathlib import Path
from typing import Any

from fedgist.core.errors import FedgistError
from fedgist.federation.protocol.framing import read, write

try:
    from nvflare.collab import collab
    from nvflare.collab.api.context import get_call_context, set_call_context
except ImportError:
    raise FedgistError("a federation across machines needs NVFlare: pip install 'fedgist[nvflare]'") from None

log = logging.getLogger("fedgist")

JOB = "fedgist"
CONTROLLER = "nvflare.collab.runtime.controller.CollabController"
EXECUTOR = "nvflare.collab.runtime.executor.CollabExecutor"
PING, PATIENCE = 5.0, 15.0
"""Seconds between two calls to see whether a site is there, and for its answer; it is given up after two in vain."""


class FlareServer:
    """The object that NVFlare runs at the server: it calls sites as the drivers of runs ask."""

    def __init__(self, address: str):
        self.address = address
        self.sites: set[str] = set()
        """Those that can be called; one that was lost here is held by another job when it comes back."""
        self.asked: dict[socket.socket, set[str]] = {}
        """The sites that each driver has asked, for as long as it stays."""

    @collab.main
    def serve(self) -> None:
        logging.getLogger("nvflare.collab").setLevel(logging.WARNING)  # it notes each call: over years, gigabytes
        self.sites = {proxy.name for proxy in collab.clients}
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as door:
            door.bind(self.address)
            door.listen(8)
            door.settimeout(0.5)
            threading.Thread(target=self._in_context(self._watch), daemon=True).start()
            while self.sites and not collab.is_aborted and Path(self.address).exists():  # removing it ends the job
                try:
                    link, _ = door.accept()
                except TimeoutError:
                    continue
                link.setblocking(True)
                threading.Thread(target=self._in_context(self._attend, link), daemon=True).start()

    @staticmethod
    def _in_context(act: Callable[..., None], *arguments: Any) -> Callable[[], None]:
        """NVFlare keeps what a call needs in the thread that it started; ours need it, too."""
        context = get_call_context()

        def run() -> None:
            set_call_context(context)
            act(*arguments)

        return run

    def _attend(self, link: socket.socket) -> None:
        """One driver, for as long as it stays."""
        asked = self.asked[link] = set()
        with link, link.makefile("rwb") as stream:
            try:
                write(stream, json.dumps(sorted(self.sites)).encode())
                while (order := read(stream)) is not None:
                    told = json.loads(order)
                    envelopes = {site: read(stream) or b"" for site in told["sites"]}
                    asked.update(envelopes)
                    self._exchange(stream, envelopes, told["timeout"], told["enough"])
            except OSError:
                log.warning("who drove a run has gone")
        del self.asked[link]
        for site in (asked & self.sites).difference(*self.asked.values()):  # another run may be under way there
            self._call(site, "rest", 5.0)

    def _exchange(self, stream: BufferedRWPair, envelopes: Mapping[str, bytes], timeout: float, enough: int) -> None:
        """Call all sites at once and pass on what they say until enough of them have answered."""
        outcomes: queue.Queue[tuple[str, bytes | None]] = queue.Queue()
        for site, envelope in envelopes.items():
            results = self._call(site, "answer", timeout, envelope)
            threading.Thread(target=_await, args=(site, results, outcomes), daemon=True).start()
        answered, waiting = 0, set(envelopes)
        while waiting and answered < enough:
            try:
                site, data = outcomes.get(timeout=0.5)
            except queue.Empty:
                given_up = waiting - self.sites
                for site in given_up:
                    outcomes.put((site, None))
                continue
            if site not in waiting:
                continue
            waiting.discard(site)
            if data is None:
                if collab.is_aborted:  # nobody's fault: the driver finds all of them in another job
                    raise ConnectionAbortedError("the job is being ended")
                self.sites.discard(site)
            write(stream, json.dumps({"site": site, "lost": data is None}).encode(), data or b"")
            answered += data is not None
        write(stream, b"{}")

    def _call(self, site: str, function: str, timeout: float, *arguments: Any) -> Iterable[tuple[str, Any]]:
        if site not in self.sites:
            return []
        try:
            called = collab.get_clients([site])(blocking=False, timeout=timeout)
            results: Iterable[tuple[str, Any]] = getattr(called, function)(*arguments)
            return results
        except Exception as error:  # a site of before has no such function; whatever else, it was not reached
            log.debug(f"{function} of {site}: {error}")
            return []

    def _watch(self) -> None:
        """Call each site now and then, so that one that is gone is known before anybody waits for it."""
        failed: dict[str, int] = {}
        able = {proxy.name for proxy in collab.clients if "here" in _functions(proxy)}
        while self.sites:
            time.sleep(PING)
            calls = {site: self._call(site, "here", PATIENCE) for site in sorted(self.sites & able)}
            for site, results in calls.items():
                there = any(isinstance(answer, bytes) for _, answer in results)
                failed[site] = 0 if there else failed.get(site, 0) + 1
                if failed[site] >= 2:
                    self.sites.discard(site)
                    log.warning(f"site {site} does not answer any more")


def _functions(proxy: Any) -> set[str]:
    """What can be called at a site: NVFlare lists the functions of its object, which is a part of it."""
    return {name for part in (proxy, *proxy.children.values()) for name in part.target_interface}


def _await(site: str, results: Iterable[tuple[str, Any]], outcomes: "queue.Queue[tuple[str, bytes | None]]") -> None:
    """Wait for one site; a host never raises, so that whatever goes wrong means that it was not reached."""
    found = [result for _, result in results]
    outcomes.put((site, found[0] if found and isinstance(found[0], bytes) else None))


def write_job(folder: Path, address: str, site_class: str, sites: Iterable[str]) -> None:
    """The job as NVFlare reads it: names of installed classes, no code."""
    named = sorted(sites)
    server = f"{FlareServer.__module__}.{FlareServer.__name__}"
    controller = {"path": CONTROLLER, "args": {"server_obj_id": "_server", "sync_task_timeout": 60}}
    executor = {"path": EXECUTOR, "args": {"client_obj_id": "_client"}}
    files = {
        "meta.json": {
            "name": JOB,
            "resource_spec": {},
            "min_clients": 1,
            "deploy_map": {"app": ["server", *named]},
        },
        "app/config/config_fed_server.json": {
            "format_version": 2,
            "server": {"task_request_interval": 0.1},
            "workflows": [{"id": "controller", **controller}],
            "components": [{"id": "_server", "path": server, "args": {"address": address}}],
        },
        "app/config/config_fed_client.json": {
            "format_version": 2,
            "default_task_fetch_interval": 0.1,
            "executors": [{"tasks": ["*"], "executor": executor}],
            "components": [{"id": "_client", "path": site_class, "args": {}}],
        },
    }
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(json.dumps(content, indent=1), encoding="utf-8")
