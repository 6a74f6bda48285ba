"""What a site, or a helper, has answered: a line for each answer, which is on the disk before the answer leaves.

A site answers a request again, but never the same exchange in two ways. A second, different answer would tell the
difference of two requests; under a mask that is used once it would tell the answer itself.
"""

import hashlib
import json
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from fedgist import storage
from fedgist.federation.protocol.policy import Refused
from fedgist.secure.past import Record


class Answered:
    """Of each exchange of a run the version, the fingerprint of the request and the digest of the reply."""

    def __init__(self, path: Path):
        self.path = path
        self._known = {version: (asked, said) for version, asked, said in map(str.split, _texts(path))}

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
        storage.append(self.path, f"{version} {request} {digest}".encode())
        self._known[version] = request, digest


class Seen:
    """The nonces of the letters that a site has opened in a run."""

    def __init__(self, path: Path):
        self.path = path
        self._known = set(_texts(path))

    def note(self, nonce: str) -> None:
        """Refuses a letter that was opened before: who has something to ask once more seals it anew."""
        if nonce in self._known:
            raise Refused("a letter that it has opened before")
        storage.append(self.path, nonce.encode())
        self._known.add(nonce)


@dataclass(frozen=True)
class OnDisk:
    """The secure sums that were asked for and opened, in JSON (a `secure.past.Memory`)."""

    path: Path

    def records(self) -> list[Record]:
        found = []
        for line in storage.lines(self.path):
            with suppress(ValueError):
                found.append(json.loads(line))
        return found

    def write(self, record: Record) -> None:
        storage.append(self.path, json.dumps(record, separators=(",", ":")).encode())


def _texts(path: Path) -> list[str]:
    return [line.decode() for line in storage.lines(path)]
