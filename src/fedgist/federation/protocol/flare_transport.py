"""NVFlare (2.9, Collab API): carries envelopes between the process that drives a run and the sites.

At each site a process answers for as long as it is connected (`flare_site`); at the server, jobs hold the sites and
call them (`flare_link`) on behalf of whoever drives a run. That is this end, which needs nothing of NVFlare itself.
"""

import json
import socket
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

from fedgist.core.errors import FedgistError
from fedgist.federation.protocol.framing import HEARD, read, write
from fedgist.federation.protocol.remote_engine import Lost

CUT = Lost("lost its connection")
BACK = 90.0
"""Seconds for the sites of a job that has ended, or cannot reach them any more, to be in another, if they are heard."""

SPEAKS = 10.0
"""Seconds that a job may take to say what it could say by then: one that hangs must not hold up a run for ever."""


class Link:
    """A connection to a job that holds sites."""

    def __init__(self, address: Path):
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.settimeout(SPEAKS)
        try:
            self._socket.connect(str(address))
            self._stream = self._socket.makefile("rwb")
            self.sites = set(json.loads(self._receive()))
        except BaseException:
            self._socket.close()
            raise

    def exchange(self, requests: Mapping[str, bytes], timeout: float, enough: int) -> dict[str, bytes | Lost]:
        """As a transport does; whom it lost is not asked here again."""
        found: dict[str, bytes | Lost] = {}
        order = {"sites": list(requests), "timeout": timeout, "enough": enough}
        until = time.monotonic() + timeout
        self._socket.settimeout(timeout + SPEAKS)
        write(self._stream, json.dumps(order).encode(), *requests.values())
        while outcome := json.loads(self._receive()):
            data = self._receive()
            lost = CUT if time.monotonic() < until else Lost(f"did not answer within {timeout:g} s")
            found[outcome["site"]] = lost if outcome["lost"] else data
        self.sites -= {site for site, answer in found.items() if isinstance(answer, Lost)}
        return found

    def close(self) -> None:
        if hasattr(self, "_stream"):
            with suppress(OSError):  # what is still to be sent has nobody to read it
                self._stream.close()
        self._socket.close()

    def _receive(self) -> bytes:
        data = read(self._stream)
        if data is None:
            raise ConnectionError("the job has ended")
        return data


class FlareTransport:
    """The driver's end: hands envelopes to the jobs that hold the sites, whose sockets lie in a folder.

    NVFlare ends a job for all of its sites when the process of one dies; and a site that was started again is not in
    its job any more. Where somebody is there who begins another, sites are asked the same again: they answer a request
    once more, and no otherwise than before.
    """

    def __init__(self, folder: Path, looked_after: Callable[[], bool] = lambda: False):
        self.folder, self._looked_after = folder, looked_after
        self._links: dict[Path, Link] = {}

    @property
    def sites(self) -> set[str]:
        return {site for link in self._links.values() for site in link.sites}

    def refresh(self) -> set[str]:
        """Connect to jobs that are new; returns all sites that can be asked."""
        for address in sorted(self.folder.glob("*.link")):
            if address not in self._links:
                with suppress(OSError):  # one that has ended, or is not ready
                    self._links[address] = Link(address)
        return self.sites

    def wait(self, wanted: set[str], seconds: float) -> set[str]:
        """Those of the wanted sites that are there: all, or after so many seconds some."""
        until = time.monotonic() + seconds
        while not wanted <= self.refresh() and time.monotonic() < until:
            time.sleep(0.1)
        return wanted & self.sites

    def exchange(self, requests: Mapping[str, bytes], timeout: float, enough: int) -> dict[str, bytes | Lost]:
        until = time.monotonic() + timeout
        found = self._ask(requests, timeout, enough)
        end = min(until, time.monotonic() + BACK)
        while (cut := {site for site in found if found[site] == CUT}) and self._looked_after():
            time.sleep(0.5)  # a job that is ending may still answer the door
            answered = sum(isinstance(answer, bytes) for answer in found.values())
            if (now := time.monotonic()) > end or answered >= enough or not self._heard(cut):
                break
            back = {site: requests[site] for site in sorted(cut & self.refresh())}
            found |= self._ask(back, until - now, len(back))
        if cut and not self._links:
            raise FedgistError("the NVFlare server ended the job; see its log, start it again, and go on with --resume")
        return found

    def _heard(self, sites: set[str]) -> bool:
        """Whether one of these sites was heard of late, if anybody notes who was; it may be in another job soon."""
        noted = self.folder / HEARD
        return not noted.is_file() or not sites.isdisjoint(noted.read_text(encoding="utf-8").split())

    def _ask(self, requests: Mapping[str, bytes], timeout: float, enough: int) -> dict[str, bytes | Lost]:
        """By those jobs that there are."""
        found: dict[str, bytes | Lost] = {}
        left = dict(requests)
        threads, broken = [], list[Path]()

        def ask(address: Path, link: Link, part: dict[str, bytes]) -> None:
            try:
                found.update(link.exchange(part, timeout, min(len(part), enough)))
            except (OSError, ValueError):  # the latter from a file that is closed meanwhile, or a line that is none
                broken.append(address)
                found.update(dict.fromkeys(part, CUT))

        for address, link in self._links.items():
            if part := {site: left.pop(site) for site in sorted(left.keys() & link.sites)}:
                threads.append(threading.Thread(target=ask, args=(address, link, part)))
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for address in broken:
            self._links.pop(address).close()
        return found | {site: Lost("is not connected") for site in left}

    def close(self) -> None:
        for link in self._links.values():
            link.close()
        self._links = {}
