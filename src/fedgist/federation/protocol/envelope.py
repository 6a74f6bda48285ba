"""Envelopes: what travels between a server and a site on a real network: who and when in JSON, then a message's bytes.

A site is sent a `Question` (what would you run?), a `Start` (this run begins or goes on) or a `Request` (answer this
message); it sends back an `Introduction`, `Ready`, a `Reply`, or a `Refusal` that says why not. Like messages,
envelopes are checked field by field before anything is made of them, and nothing in them is executed. A digest at the
end tells one that was cut short or damaged; it is no signature: who sent it, TLS says.
"""

import dataclasses
import hashlib
import json
import re
import typing
from dataclasses import dataclass
from functools import cache
from typing import Any

from fedgist.core.message import WireError

LONGEST_HEADER = 1 << 16
LONGEST_TEXT = 1000
DIGEST = hashlib.sha256().digest_size
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+-]{0,99}")
"""What names of runs and of versions look like: they become names of files at a site."""


@dataclass(frozen=True)
class Question:
    """Which architecture would you run for this method and data of this form?"""

    method: str
    shape: list[int]
    classes: int


@dataclass(frozen=True)
class Introduction:
    """The architecture that a site has chosen (empty: whatever the run says); nothing about its data."""

    model: str


@dataclass(frozen=True)
class Start:
    """All that a site must know of a run. What everybody knows of the task is in `task`, the method's in `options`."""

    run: str
    method: str
    seed: int
    model: str
    options: dict[str, Any]
    task: dict[str, Any]


@dataclass(frozen=True)
class Ready:
    """The site takes part."""


@dataclass(frozen=True)
class Request:
    """Answer the message that follows, starting from that version of your state, and keep those others."""

    run: str
    round: int
    phase: str
    exchange: int
    type: str
    state: str
    """The version to start from; empty is the first state."""
    keep: list[str]

    @property
    def version(self) -> str:
        """The name of the state that answering leaves behind."""
        return f"{self.phase}-{self.round:06d}-{self.exchange:06d}"

    def fingerprint(self, payload_digest: str) -> str:
        """Equal exactly where the same is asked, from the same state, in the same exchange of the same run."""
        asked = [self.run, self.version, self.type, self.state, payload_digest]
        return hashlib.sha256(json.dumps(asked).encode()).hexdigest()


@dataclass(frozen=True)
class Reply:
    """The answer follows; `changed` says whether there is a new version of the site's state."""

    run: str
    version: str
    type: str
    changed: bool
    request: str
    """The fingerprint of what it answers."""


@dataclass(frozen=True)
class Refusal:
    """No answer, because the site's policy forbids it (`refused`) or because something failed."""

    refused: bool
    why: str


Header = Question | Introduction | Start | Ready | Request | Reply | Refusal
KINDS: dict[str, type] = {kind.__name__: kind for kind in typing.get_args(Header)}


def seal(header: Header, payload: bytes = b"") -> bytes:
    """The envelope as it travels: the length of the header in eight bytes, the header, the message, their SHA-256."""
    fields = {"kind": type(header).__name__, **dataclasses.asdict(header)}
    text = json.dumps(fields, separators=(",", ":"), allow_nan=False).encode()
    parts, digest = [len(text).to_bytes(8, "little"), text, payload], hashlib.sha256()
    for part in parts:
        digest.update(part)
    return b"".join([*parts, digest.digest()])


def unseal(data: bytes) -> tuple[Header, bytes]:
    """What `seal` closed, or a `WireError`."""
    length, end = int.from_bytes(data[:8], "little"), len(data) - DIGEST
    if end < 8 or length > min(end - 8, LONGEST_HEADER):
        raise WireError("not an envelope: cut short")
    if hashlib.sha256(memoryview(data)[:end]).digest() != data[end:]:
        raise WireError("not an envelope: cut short or damaged on its way")
    try:
        fields = json.loads(data[8 : 8 + length], parse_constant=_no_number)
    except (ValueError, RecursionError) as error:
        raise WireError("not an envelope: unreadable header") from error
    kind = KINDS.get(str(fields.pop("kind", ""))) if isinstance(fields, dict) else None
    if kind is None:
        raise WireError("not an envelope: it does not say what it is")
    hints = _hints(kind)
    if fields.keys() != hints.keys():
        raise WireError(f"{kind.__name__}: its fields are not those of one")
    for name, hint in hints.items():
        _check(kind.__name__, name, fields[name], hint)
    return kind(**fields), data[8 + length : end]


_hints = cache(typing.get_type_hints)


def _no_number(name: str) -> None:
    """JSON knows no NaN and no infinity; Python's reader does."""
    raise ValueError(name)


def _check(kind: str, name: str, value: Any, hint: Any) -> None:
    base, inner = typing.get_origin(hint) or hint, typing.get_args(hint)
    good = type(value) is base and (base is not int or 0 <= value < 1 << 63)
    if good and base is list:
        good = len(value) < 100 and all(type(item) is inner[0] for item in value)
    texts = value if base is list else [value]
    good = good and all(len(text) <= LONGEST_TEXT for text in texts if isinstance(text, str))
    if good and name in ("run", "version", "state", "keep", "phase"):
        good = all(NAME.fullmatch(text) or (name == "state" and text == "") for text in texts)
    if not good:
        raise WireError(f"{kind}: {name} is not what it should be")
