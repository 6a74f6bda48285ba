"""The ledger: one row for every message, streamed to a file; and the transcript: the messages themselves.

Exact bytes (what the codec puts on the wire) and the paper's count (numbers times four) are separate columns and are
never mixed. A request goes *down* from the node that asks, a reply comes *up* to it; with a server that is the usual
meaning, and between peers it still is one.
"""

import csv
import os
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple, TextIO

from fedgist.core.codec import Size

COLUMNS = (
    "run",
    "round",
    "phase",
    "exchange",
    "direction",
    "sender",
    "receiver",
    "type",
    "header_bytes",
    "payload_bytes",
    "paper_bytes",
)


class Entry(NamedTuple):
    """Where and when a message travelled."""

    round: int
    phase: str
    exchange: int
    direction: str
    sender: str
    receiver: str
    type: str


@dataclass
class Totals:
    """Bytes so far; those of evaluations apart, because they are no part of a method."""

    bytes_up: int = 0
    bytes_down: int = 0
    paper_up: int = 0
    paper_down: int = 0
    evaluation: int = 0
    messages: int = 0


class Ledger:
    """Counts messages; with a path, writes a row for each; with `record`, keeps those types of message in full."""

    def __init__(
        self,
        path: str | os.PathLike[str] | None = None,
        run: str = "",
        record: Collection[str] = (),
        transcript: str | os.PathLike[str] | None = None,
        position: dict[str, Any] | None = None,
    ):
        self.run, self.record = run, frozenset(record)
        self.path = Path(path) if path is not None else None
        self.transcript = Path(transcript) if transcript is not None else None
        self._totals = Totals(**position["totals"]) if position else Totals()
        self._file: TextIO | None = None
        if self.path is not None:
            self._file = open(self.path, "r+" if position else "w", newline="", encoding="utf-8")  # noqa: SIM115
            if position:  # a resumed run forgets the rows after its checkpoint: they are about to be written again
                self._file.seek(position["bytes"])
                self._file.truncate()
            self._rows = csv.writer(self._file)
            if not position:
                self._rows.writerow(COLUMNS)

    def records(self, tag: str) -> bool:
        """Whether messages of this type are to be kept; `fedavg.Local` may be given as `Local` or in full."""
        return self.transcript is not None and not self.record.isdisjoint((tag, tag.split(".")[-1], "all"))

    def write(self, entry: Entry, size: Size) -> None:
        """Count one message."""
        self.write_all([(entry, size)])

    def write_all(self, sent: Sequence[tuple[Entry, Size]]) -> None:
        """Count messages of one phase that went the same way."""
        if not sent:
            return
        total, (phase, direction) = self._totals, (sent[0][0].phase, sent[0][0].direction)
        exact, paper = sum(size.exact for _, size in sent), sum(size.paper for _, size in sent)
        total.messages += len(sent)
        if phase == "evaluation":
            total.evaluation += exact
        elif direction == "up":
            total.bytes_up, total.paper_up = total.bytes_up + exact, total.paper_up + paper
        else:
            total.bytes_down, total.paper_down = total.bytes_down + exact, total.paper_down + paper
        if self._file is not None:
            run = self.run
            self._rows.writerows([(run, *entry, size.header, size.payload, size.paper) for entry, size in sent])

    def keep(self, entry: Entry, data: bytes) -> None:
        """Add one encoded message to the transcript."""
        assert self.transcript is not None
        self.transcript.mkdir(parents=True, exist_ok=True)
        name = f"{entry.round:05d}-{entry.phase}-{entry.exchange:05d}-{entry.sender}-{entry.receiver}-{entry.type}"
        (self.transcript / f"{name}.safetensors").write_bytes(data)

    def totals(self) -> Totals:
        return Totals(**asdict(self._totals))

    def position(self) -> dict[str, Any]:
        """Where the ledger stands, for a checkpoint."""
        offset = 0
        if self._file is not None:
            self._file.flush()
            offset = self._file.tell()
        return {"bytes": offset, "totals": asdict(self._totals)}

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
