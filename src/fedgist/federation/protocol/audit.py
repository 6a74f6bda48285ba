"""A site's audit log: one line of JSON for every envelope that came in or went out, and for what a run may take."""

import hashlib
import json
from collections.abc import Iterator
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from fedgist import storage


class Audit:
    """Appends to a file; a line is on its way to the disk before the next envelope is looked at."""

    def __init__(self, path: Path):
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path = path

    def write(self, direction: str, data: bytes, **about: Any) -> None:
        """Note an envelope: when, its size and digest, and what is known about it."""
        self.note(direction, **about, bytes=len(data), sha256=hashlib.sha256(data).hexdigest())

    def note(self, direction: str, **about: Any) -> None:
        line = {"time": datetime.now(UTC).isoformat(timespec="milliseconds"), "direction": direction, **about}
        storage.append(self.path, json.dumps(line, ensure_ascii=False).encode(), synced=False)


def read(path: Path) -> Iterator[dict[str, Any]]:
    """The notes of an audit log, one by one: it is kept for years. What a loss of power spoiled is passed over."""
    for line in storage.lines(path):
        with suppress(ValueError):
            yield json.loads(line)
