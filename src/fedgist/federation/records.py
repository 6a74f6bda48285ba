"""What a federation's folder remembers: its log, who is there, and how its runs stand, for people and for monitors.

`logs/` has readable logs, which rotate; `records/` a small file for each run; `metrics.prom` the same in the text form
of OpenMetrics, for a collector that reads files.
"""

import json
import logging
import logging.handlers
import os
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from fedgist.core.errors import FedgistError
from fedgist.experiments.folder import write_text
from fedgist.words import plain

LARGEST_LOG, OLD_LOGS = 2_000_000, 5
KEPT = 50
"""Runs that are remembered."""
RUNNING, FINISHED, FAILED, STOPPED = "running", "finished", "failed", "stopped"


@contextmanager
def logged(path: Path, say: Callable[[str], None]) -> Iterator[Callable[[str], None]]:
    """What says a line as before, and writes it with its time to a log that rotates."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handler = logging.handlers.RotatingFileHandler(path, maxBytes=LARGEST_LOG, backupCount=OLD_LOGS, encoding="utf-8")

    def both(line: str) -> None:
        say(line)
        handler.emit(logging.LogRecord("fedgist", logging.INFO, "", 0, f"{now()} {line}", (), None))

    with closing(handler):
        yield both


def now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


@dataclass
class Record:
    """How a run stands."""

    name: str
    folder: str
    process: int
    begun: str
    state: str = RUNNING
    heard: str = ""
    """When something was last said here."""
    round: int = 0
    rounds: int = 0
    answered: int = 0
    seconds: float = 0.0
    """Of the last round."""
    bytes_up: int = 0
    bytes_down: int = 0
    refused: int = 0
    """Sites that were left out of the last round."""
    missing: dict[str, str] = field(default_factory=dict)
    """Why sites were left out, in the last round where they were."""
    error: str = ""
    born: str = ""
    """When its process began, as the kernel counts it: the number of a process is another's one day."""

    def log(self, federation: Path) -> Path:
        """What it says, if it was detached."""
        return federation / "logs" / f"run-{self.name}.log"

    @property
    def alive(self) -> bool:
        """Whether its process is still there; one that was killed could not say that it ends."""
        try:
            os.kill(self.process, 0)  # sends nothing
        except ProcessLookupError:
            return False
        except PermissionError:
            pass
        return self.state == RUNNING and self.born in ("", _born(self.process))


def _born(process: int) -> str:
    """When a process began; empty where the kernel does not say."""
    try:
        return Path(f"/proc/{process}/stat").read_text("ascii", "replace").rpartition(")")[2].split()[19]
    except OSError:
        return ""


class Recorder:
    """Notes how a run goes; a listener to its progress."""

    def __init__(self, federation: Path, folder: Path, process: int | None = None):
        self.federation = federation
        process = process or os.getpid()
        self.record = Record(plain(folder.name, 100), str(folder.resolve()), process, now(), born=_born(process))
        self._write()

    def start(self, title: str, done: int, rounds: int) -> None:
        self.record.round, self.record.rounds = done, rounds
        self._write()

    def round(self, row: Mapping[str, Any]) -> None:
        record = self.record
        record.round, record.answered, record.seconds = row["round"], row["answered"], row["seconds"]
        record.bytes_up, record.bytes_down = row["bytes_up"], row["bytes_down"]
        record.refused = len(row.get("missing", {}))
        record.missing |= row.get("missing", {})
        self._write()

    def stop(self) -> None:
        return None

    def end(self, state: str, error: str = "") -> None:
        self.record.state, self.record.error = state, plain(error)
        self._write()

    def _write(self) -> None:
        self.record.heard = now()
        path = self.federation / "records" / f"{self.record.name}.json"
        write_text(path, json.dumps(asdict(self.record), indent=1) + "\n")
        known = load(self.federation)
        for old in known[KEPT:]:
            (self.federation / "records" / f"{old.name}.json").unlink(missing_ok=True)
        write_text(self.federation / "metrics.prom", metrics(known[:KEPT]))


def load(federation: Path) -> list[Record]:
    """The runs that are remembered, the newest first."""
    found = []
    for path in (federation / "records").glob("*.json"):
        try:
            found.append(Record(**json.loads(path.read_text(encoding="utf-8"))))
        except (OSError, ValueError, TypeError):  # half a disk, or another version: no reason not to show the others
            continue
    return sorted(found, key=lambda record: record.begun, reverse=True)


def find(federation: Path, name: str | None) -> Record:
    """The run of that name, or the newest."""
    known = load(federation)
    for record in known:
        if name in (None, record.name):
            return record
    raise FedgistError(
        f"no run {name} is known in {federation}" if name else f"no run has been started in {federation}"
    )


def metrics(records: list[Record]) -> str:
    """The standing of runs in the text form of OpenMetrics."""
    families: tuple[tuple[str, str, str, Callable[[Record], Mapping[str, float]]], ...] = (
        ("run_active", "gauge", "Whether the run is under way.", lambda r: {"": int(r.alive)}),
        ("run_failed", "gauge", "Whether the run ended with an error.", lambda r: {"": int(r.state == FAILED)}),
        ("rounds", "counter", "Rounds that are done.", lambda r: {"": r.round}),
        ("rounds_planned", "gauge", "Rounds that the run is to have.", lambda r: {"": r.rounds}),
        (
            "bytes",
            "counter",
            "Bytes of messages.",
            lambda r: {',direction="up"': r.bytes_up, ',direction="down"': r.bytes_down},
        ),
        ("answered_sites", "gauge", "Sites that answered in the last round.", lambda r: {"": r.answered}),
        ("left_out_sites", "gauge", "Sites that were left out of the last round.", lambda r: {"": r.refused}),
        ("round_seconds", "gauge", "Seconds that the last round took.", lambda r: {"": r.seconds}),
    )
    lines = []
    for name, kind, help, values in families:
        lines += [f"# TYPE fedgist_{name} {kind}", f"# HELP fedgist_{name} {help}"]
        suffix = "_total" if kind == "counter" else ""
        for record in records:
            label = record.name.replace("\\", "\\\\").replace('"', '\\"')
            lines += [
                f'fedgist_{name}{suffix}{{run="{label}"{more}}} {value}' for more, value in values(record).items()
            ]
    return "\n".join([*lines, "# EOF"]) + "\n"


def detached(federation: Path, folder: Path, command: list[str]) -> Record:
    """Start the command of a run apart from this terminal; what it says goes to its log."""
    log = Record(plain(folder.name, 100), "", 0, "").log(federation)
    log.parent.mkdir(exist_ok=True)
    with log.open("ab") as file:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT, start_new_session=True
        )
    return Recorder(federation, folder, process.pid).record


def follow(path: Path, ended: Callable[[], bool], say: Callable[[str], None]) -> None:
    """Say the lines of a file as they come, until what writes it has ended."""
    if not path.is_file():
        raise FedgistError(f"there is no {path}: that run was not started with --detach, its own terminal shows it")
    with path.open(encoding="utf-8", errors="replace") as file:
        while True:
            over = ended()  # asked before the file is read to its end, so that no line is lost
            for line in iter(file.readline, ""):
                say(line.rstrip("\n"))
            if over:
                return
            time.sleep(0.2)


class Presence:
    """Who is there, since when, as the server's log tells it."""

    def __init__(self, federation: Path):
        self.path = federation / "records" / "sites.txt"

    def clear(self) -> None:
        self.path.unlink(missing_ok=True)

    def note(self, site: str, here: bool) -> None:
        known = self.load() | {site: (here, now())}
        with suppress(OSError):  # a disk that is full must not end the server, which says so here
            write_text(self.path, "".join(f"{name} {int(is_here)} {when}\n" for name, (is_here, when) in known.items()))

    def load(self) -> dict[str, tuple[bool, str]]:
        lines = self.path.read_text("utf-8").splitlines() if self.path.is_file() else []
        return {name: (here == "1", when) for name, here, when in map(str.split, lines)}
