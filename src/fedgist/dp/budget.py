"""The budget of a data set, and the book of all that was ever released of it: across runs, methods and servers.

A line is written through to the disk before its release leaves, so that after a crash the book may say too much, never
too little. What was noised for a key lies in the outbox: asked again, a site sends the very same bytes, never fresh
noise.
"""

import fcntl
import functools
import hashlib
import json
import math
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from fedgist import storage
from fedgist.core.errors import FedgistError
from fedgist.dp import accountant
from fedgist.dp.accountant import RECORD, UNITS, Release, together

SPENT = "the privacy budget of this data set is spent"
WARNED_BELOW = 10
"""δ is the chance that a record, or a client, is given away whole: times their number it should be far below 1."""


class Spent(FedgistError):
    """A release would exceed the budget of its data set: nothing of it has left."""


@dataclass(frozen=True)
class Limit:
    """ε and δ that all releases of a data set together may cost a unit, and the plan that vouches for sampled ones."""

    epsilon: float
    delta: float
    plan: "Plan | None" = None
    unit: str = RECORD

    def cost(self, releases: tuple[Release, ...]) -> float:
        """The ε of releases; where the library is missing, that of a plan of which they are a part: the one that was
        given, or one that comes with fedgist."""
        if self.epsilon == math.inf:
            return 0.0  # nobody asks
        return _cost(self, together(release.counted_by(self.unit) for release in releases))


@functools.lru_cache(maxsize=4096)  # clients of one run have spent the same
def _cost(limit: Limit, releases: tuple[Release, ...]) -> float:
    try:
        return accountant.epsilon(releases, limit.delta, limit.unit)
    except accountant.MissingLibrary:
        for plan in (*filter(None, [limit.plan]), *known_plans()):
            if plan.covers(releases, limit.delta):
                return plan.epsilon
        raise


@dataclass(frozen=True)
class Plan:
    """Releases whose cost was worked out elsewhere; `fedgist privacy spent` works it out again."""

    releases: tuple[Release, ...]
    epsilon: float
    delta: float

    def covers(self, releases: tuple[Release, ...], delta: float) -> bool:
        """Whether these are among the planned ones, so that they cost no more."""
        planned = {(one.noise, one.rate): one.times for one in self.releases}
        return delta >= self.delta and all(
            one.times <= planned.get((one.noise, one.rate), 0) for one in together(releases)
        )

    def noise(self, rate: float, times: int) -> float:
        """The planned noise of so many releases at this rate."""
        for one in self.releases:
            if one.rate == rate and one.times >= times:
                return one.noise
        raise FedgistError(f"the plan has no {times:,} releases at a rate of {rate:g}: make one for this run")

    def fits(self, epsilon: float, delta: float, rate: float, times: int) -> bool:
        """Whether it is for just so many releases at such a rate within such a budget."""
        kinds = [(one.rate, one.times) for one in self.releases]
        return delta == self.delta and 0 <= epsilon - self.epsilon < 2e-3 * epsilon and kinds == [(rate, times)]

    def write(self, path: Path) -> None:
        rows = [release.row() for release in self.releases]
        content = {"epsilon": self.epsilon, "delta": self.delta, "neighbours": UNITS[RECORD], "releases": rows}
        storage.write(path, (json.dumps(content, indent=1) + "\n").encode())

    @staticmethod
    def load(path: Path) -> "Plan":
        try:
            return _plan(json.loads(path.read_text(encoding="utf-8")))
        except OSError as error:
            raise FedgistError(f"cannot read the plan {path}: {error.strerror}") from error
        except (ValueError, KeyError, TypeError) as error:
            raise FedgistError(f"{path} is not a plan that `fedgist privacy plan --out` wrote") from error


@functools.cache
def known_plans() -> tuple[Plan, ...]:
    """Those that come with fedgist, for the presets; a test works them out again."""
    return tuple(map(_plan, json.loads((Path(__file__).parent / "plans.json").read_text(encoding="utf-8"))))


def _plan(known: Any) -> Plan:
    releases = tuple(map(accountant.read, known["releases"]))
    return Plan(together(releases), float(known["epsilon"]), float(known["delta"]))


class Book:
    """All releases of one data set, a line each; without a path (a simulation that keeps nothing) in memory."""

    def __init__(self, path: Path | None = None, synced: bool = True):
        """`synced`: lines outlast the machine, as where something leaves it; a simulation's only the program."""
        self.path, self.synced = path, synced
        self._known: dict[str, Release] = {}
        self._read = 0

    @property
    def releases(self) -> tuple[Release, ...]:
        if self.path is not None and self.path.is_file():
            with self._locked() as file:
                self._catch_up(file)
        return together(self._known.values())

    def charge(self, key: str, release: Release, limit: Limit, **about: Any) -> None:
        """Write a release down, once for each key, or refuse it; when this returns, the line is on the disk."""
        with self._locked() as file:
            self._catch_up(file)
            if key in self._known:
                return
            before = together(self._known.values())
            if (cost := limit.cost(together((*before, release)))) > limit.epsilon * (1 + 1e-9):
                spent = limit.cost(before)
                raise Spent(
                    f"{SPENT}: ε = {spent:.4g} of {limit.epsilon:g} at δ = "
                    f"{limit.delta:g} are used, and this release would make it {cost:.4g}"
                )
            if file is not None:
                line = {**about, "key": key, **release.row(), "time": time.strftime("%Y-%m-%dT%H:%M:%S")}
                file.write(json.dumps(line).encode() + b"\n")
                file.flush()
                if self.synced:
                    os.fsync(file.fileno())
                self._read = file.tell()
            self._known[key] = release

    @contextmanager
    def _locked(self) -> Iterator[IO[bytes] | None]:
        """The file, held by nobody else: two processes of a site must not both spend the rest of its budget."""
        if self.path is None:
            yield None
            return
        new = not self.path.exists()
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with open(self.path, "r+b" if not new else "x+b") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            if self._read == 0 and self.synced:  # also where who made the file was killed before that
                storage.sync(self.path.parent)
            yield file

    def _catch_up(self, file: IO[bytes] | None) -> None:
        """Take in what others wrote. A last line that a crash cut short never let anything leave: it is cut off. Whole
        ones, which nobody is charged for again, may be of who was killed before they were on the disk: now they are.
        """
        if file is None:
            return
        file.seek(self._read)
        whole, _, torn = file.read().rpartition(b"\n")
        try:
            for line in whole.splitlines():
                row = json.loads(line)
                self._known[str(row["key"])] = accountant.read(row)
        except (ValueError, KeyError, TypeError) as error:
            raise FedgistError(
                f"{self.path} is damaged: what was released of this data set is not known, so nothing more is; "
                "restore the file from a copy"
            ) from error
        file.seek(-len(torn), os.SEEK_END)
        file.truncate()
        if whole and self.synced:
            os.fsync(file.fileno())
        self._read = file.tell()


class Outbox:
    """What was noised for a key, until the run is forgotten."""

    def __init__(self, folder: Path):
        self.folder = folder

    def get(self, key: str) -> bytes | None:
        path = self._path(key)
        return path.read_bytes() if path.is_file() else None

    def put(self, key: str, data: bytes) -> None:
        storage.write(self._path(key), data)

    def _path(self, key: str) -> Path:
        return self.folder / hashlib.sha256(key.encode()).hexdigest()


def risky(delta: float, number: int, unit: str = RECORD) -> str | None:
    """A warning where δ is too large for so many units, if it is."""
    if number and delta > 1 / (WARNED_BELOW * number):
        return (
            f"δ = {delta:g} is more than 1/(10 n) for {number:,} {unit}s: a mechanism that gives a whole {unit} away "
            f"now and then would pass; take delta={1 / (WARNED_BELOW * number):.1g} or less"
        )
    return None


def books(where: Path) -> dict[str, Book]:
    """The books that lie in a run's folder or a site's kit, by the data set that they are about."""
    if where.is_file():
        return {where.stem: Book(where)}
    paths = [where / "fedgist" / "privacy.jsonl", *sorted((where / "privacy").glob("*.jsonl"))]
    found = {path.stem if path.parent.name == "privacy" else where.name: Book(path) for path in paths if path.is_file()}
    if not found:
        raise FedgistError(f"nothing was released under differential privacy in {where}: there is no book of it")
    return found
