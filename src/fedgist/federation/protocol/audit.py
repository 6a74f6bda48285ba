"""A site's audit log: one line of JSON for every envelope that came in or went out, and for what a run may take."""

import hashlib
import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any


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
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line, ensure_ascii=False) + "\n")
