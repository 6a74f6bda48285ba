"""What a site has answered in a run: it answers a request again, but never the same exchange in two ways.

A second, different answer would tell the difference of two requests; under a mask that is used once it would tell the
answer itself. The file has a line for each exchange, which is on the disk before the answer leaves.
"""

import hashlib
import os
from pathlib import Path

from fedgist.federation.protocol.policy import Refused


class Answered:
    """The version, the fingerprint of the request and the digest of the reply of each exchange."""

    def __init__(self, path: Path):
        self.path = path
        whole = path.read_bytes().rpartition(b"\n")[0] if path.is_file() else b""  # a killed site may leave half a line
        self._known = {version: (asked, said) for version, asked, said in map(str.split, whole.decode().splitlines())}
        self._end = len(whole) + bool(whole)

    def check(self, version: str, request: str) -> None:
        """Refuses what asks something else in an exchange that was answered."""
        if self._known.get(version, (request,))[0] != request:
            raise Refused(f"it has answered {version} already, and was asked something else then")

    def digest(self, version: str) -> str:
        """Of the reply of an exchange that was answered."""
        return self._known[version][1]

    def note(self, version: str, request: str, reply: bytes) -> None:
        """Writes down an answer before it leaves; one that is not what it was before does not."""
        digest = hashlib.sha256(reply).hexdigest()
        if version in self._known:
            if self._known[version][1] != digest:
                raise Refused(f"it has answered {version} already, and now would answer something else")
            return
        line = f"{version} {request} {digest}\n".encode()
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("r+b" if self.path.is_file() else "w+b") as file:
            file.seek(self._end)  # over half a line that a full disk left
            file.write(line)
            file.truncate()
            file.flush()
            os.fsync(file.fileno())
        self._known[version] = request, digest
        self._end += len(line)
