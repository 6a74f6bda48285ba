"""A site's audit log: one line of JSON for every envelope that came in or went out, and for what a run may take."""

import hashlib
import json
import os
from contextlib import suppress
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
        text = (json.dumps(line, ensure_ascii=False) + "\n").encode()
        with self.path.open("ab+") as file:
            if file.tell():
                file.seek(-1, os.SEEK_END)
                text = text if file.read(1) == b"\n" else b"\n" + text  # a full disk left half a line
            file.write(text)


def read(path: Path) -> list[dict[str, Any]]:
    """The lines of an audit log, but for those of which a full disk or a loss of power left only a part."""
    found = []
    for line in path.read_text("utf-8", errors="replace").splitlines() if path.is_file() else []:
        with suppress(ValueError):
            found.append(json.loads(line))
    return found
