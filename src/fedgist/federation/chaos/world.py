"""The world of a schedule: a clock, machines that die and come back, and a network that does what it likes.

It is the transport of the real engine. A message is on its way for a while; some are lost, late, doubled, damaged or
cut short, and what was sent in one exchange may arrive in another, or when the server that asked is no more.
"""

import hashlib
import heapq
import itertools
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

from fedgist.federation.chaos.disk import Disk
from fedgist.federation.chaos.faults import Crash, Faults
from fedgist.federation.protocol.envelope import Refusal, Reply, Start, seal, unseal
from fedgist.federation.protocol.remote_engine import Lost
from fedgist.federation.protocol.site_host import SiteHost

SERVER = "server"
LAST = 64
"""Bytes at the end of a message in which half of the cuts are: only there can what is left look like a whole one."""
DOWN = (1.0, 60.0)
"""Seconds for which a machine that died stays away."""


class World:
    """Time, sites, the network, and what an impartial observer has seen."""

    def __init__(self, faults: Faults, folder: Path, make: Callable[[str, Path], SiteHost], ids: list[str]):
        self.faults, self.folder, self._make, self.ids = faults, folder, make, ids
        self.now, self._wall, self._pids = 0.0, 1.8e9, itertools.count(1000)
        self.disk = Disk(folder, self._disk_step, lambda: self._wall + self.now, lambda: self._pid[self._actor])
        self._hosts: dict[str, SiteHost] = {}
        self._back: dict[str, float] = dict.fromkeys(ids, 0.0)
        self._room: dict[str, float] = {}
        self._pid = {name: next(self._pids) for name in (SERVER, *ids)}
        self._actor, self._dead = SERVER, False
        self._events: list[tuple[float, int, str, str, int, bytes]] = []
        self._order, self._calls, self._call = itertools.count(), itertools.count(1), 0
        self._inbox: dict[str, bytes] = {}
        self._start: Start | None = None
        # What the observer knows
        self.story: list[str] = []
        self.said: dict[tuple[str, str, str], set[str]] = {}
        """What a site has answered in an exchange (site, run, version), as digests: there may be one."""
        self.sizes: dict[tuple[str, str, str], int] = {}
        """Bytes of the message in it."""
        self.refusals: list[tuple[str, str]] = []
        self.forgotten: list[str] = []
        """That a site lacked a state while the server waited for its answer; a late copy may find it gone."""
        self.without_power: set[str] = set()

    # Time, and what happens in it

    def wait(self, seconds: float) -> None:
        """Let time pass; what is under way arrives."""
        self._until(self.now + seconds, lambda: False)

    def drain(self) -> None:
        """Until nothing is under way any more."""
        while self._events:
            self._next()

    def _until(self, end: float, done: Callable[[], bool]) -> None:
        while not done() and self._events and self._events[0][0] <= end:
            self._next()
        if not done():
            self.now = max(self.now, end)

    def _next(self) -> None:
        at, _, kind, site, call, data = heapq.heappop(self._events)
        self.now = max(self.now, at)
        if kind == "request":
            self._deliver(site, call, data)
        elif call == self._call or "strays" in self.faults.rates:
            self._inbox.setdefault(site, data)

    def tell(self, what: str) -> None:
        self.story.append(f"{self.now:9.3f} {what}")

    # The network

    def exchange(self, requests: Mapping[str, bytes], timeout: float, enough: int) -> dict[str, bytes | Lost]:
        """What the engine calls: send, and gather until enough have answered or time is over."""
        self._may_die()
        self._call, self._inbox = next(self._calls), {}
        for site, data in requests.items():
            header, _ = unseal(data)
            self._start = header if isinstance(header, Start) else self._start
            self._send("request", site, self._call, data)
        self._until(self.now + timeout, lambda: len(self._inbox.keys() & requests.keys()) >= enough)
        found, self._call = {id: self._inbox[id] for id in requests if id in self._inbox}, 0
        over = Lost(f"did not answer within {timeout:g} s")
        self._may_die()
        return {**({} if len(found) >= enough else dict.fromkeys(requests, over)), **found}

    def _send(self, kind: str, site: str, call: int, data: bytes) -> None:
        dice, strikes = self.faults.dice, self.faults.strikes
        for copy in range(2 if strikes("duplicate") else 1):
            late = dice.uniform(1, 60) if strikes("delay") else dice.uniform(0, 5) if copy else 0
            at, what = self.now + dice.uniform(0.01, 0.1) + late, f"{kind} {call} of {site}"
            if strikes("loss"):
                self.tell(f"{what} is lost")
                continue
            if strikes("truncation"):
                data = data[: dice.randrange(len(data) - LAST if dice.random() < 0.5 else 0, len(data))]
                self.tell(f"{what} is cut to {len(data)} bytes")
            if strikes("corruption"):
                data = self._corrupted(data)
                self.tell(f"{what} is damaged")
            if late:
                self.tell(f"{what} comes {'again' if copy else 'late'}, at {at:.3f}")
            heapq.heappush(self._events, (at, next(self._order), kind, site, call, data))

    def _corrupted(self, data: bytes) -> bytes:
        dice, spoiled = self.faults.dice, bytearray(data)
        for _ in range(dice.choice((1, 1, 2, 8))):
            if spoiled:
                spoiled[dice.randrange(len(spoiled))] ^= 1 << dice.randrange(8)
        return bytes(spoiled)

    # Machines

    def _deliver(self, site: str, call: int, data: bytes) -> None:
        """A request arrives: who is down hears nothing, who dies of it answers nothing."""
        if not self.is_up(site):
            self.tell(f"{site} is down")
            return
        before, self._actor = self._actor, site
        try:
            if site not in self._hosts:
                self._hosts[site] = self._make(site, self.folder / site)
            if self._start is not None and self.faults.strikes("visitor"):
                self._visit(site, self._start)
            answer = self._hosts[site].handle(data)
            self._observe(site, answer, waiting=call == self._call)
        except Crash:
            self._die(site)
        else:
            self._send("reply", site, call, answer)
        finally:
            self._actor = before

    def is_up(self, site: str) -> bool:
        return self.now >= self._back[site]

    def _visit(self, site: str, start: Start) -> None:
        """Another run begins at a site, and is never heard of again."""
        other = f"visitor-{next(self._order)}"
        self.tell(f"{other} begins at {site}")
        self._hosts[site].handle(seal(replace(start, run=other)))

    def _die(self, name: str) -> None:
        dice = self.faults.dice
        self._hosts.pop(name, None)
        self._dead, self._pid[name] = False, next(self._pids)
        self._back[name] = self.now + dice.uniform(*DOWN)
        self._room.pop(name, None)
        lost = self.faults.strikes("power")
        self.tell(f"{name} {'loses its power' if lost else 'dies'} until {self._back[name]:.3f}")
        if lost:
            self.without_power.add(name)
            self.disk.lose_power(self.folder / name, dice.randint)

    def server_died(self) -> None:
        """After the server's process is gone: its machine is up again when this returns."""
        self._actor = SERVER
        self._die(SERVER)
        self.wait(self._back[SERVER] - self.now)

    def make_room(self) -> None:
        """Somebody tidies the server's disk."""
        self.wait(10)
        self._room.pop(SERVER, None)

    def _may_die(self) -> None:
        self.faults.steps += 1
        if self.faults.strikes("clock"):
            self._wall += self.faults.dice.choice((-1e7, -3600, 3600, 1e7))
            self.tell("the clock is set")
        if self.faults.strikes("server crash"):
            self._dead = True
            raise Crash

    def _disk_step(self) -> str:
        """Before each write: whether the disk is full; the writer may also die of it."""
        if self._dead:
            raise Crash  # what a dying process would still tidy up stays as it is
        self.faults.steps += 1
        actor, dice = self._actor, self.faults.dice
        if self.faults.strikes("site crash" if actor != SERVER else "server crash"):
            self._dead = True
            raise Crash
        if self.faults.strikes("full disk"):
            self._room[actor] = self.now + dice.uniform(0.1, 30)
            self.tell(f"the disk of {actor} is full until {self._room[actor]:.3f}")
        return "full" if self.now < self._room.get(actor, 0.0) else ""

    # The observer

    def _observe(self, site: str, answer: bytes, waiting: bool) -> None:
        header, payload = unseal(answer)
        if isinstance(header, Reply):
            key = site, header.run, header.version
            self.said.setdefault(key, set()).add(hashlib.sha256(payload).hexdigest())
            self.sizes[key] = len(payload)
            self.tell(f"{site} answers {header.version}")
        elif isinstance(header, Refusal):
            self.refusals.append((site, header.why))
            if waiting and "does not hold its state" in header.why:
                self.forgotten.append(f"{site}: {header.why}")
            self.tell(f"{site} does not answer: {header.why}")
