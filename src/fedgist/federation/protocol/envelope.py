"""Envelopes: what travels between a server and a site on a real network: who and when in JSON, then a message's bytes.

A site is sent a `Question` (what would you run?), a `Start` (this run begins or goes on) or a `Request` (answer this
message); it sends back an `Introduction`, `Ready`, a `Reply`, or an `Unfitting` or a `Refusal` that say why not. Like
messages, envelopes are checked field by field before anything is made of them, and nothing in them is executed.
"""

import dataclasses
import json
import re
import typing
from dataclasses import dataclass, field
from typing import Any

from fedgist.core.message import WireError

LONGEST_HEADER = 1 << 16
LONGEST_TEXT = 1000
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
    layer: dict[str, Any] = field(default_factory=dict)
    """What lies between a site's reply and what the server gets of it; empty where nothing does."""


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
    invited: int = 0
    """How many bytes of the message are the layer's invitation, which comes first."""

    @property
    def version(self) -> str:
        """The name of the state that answering leaves behind."""
        return f"{self.phase}-{self.round:06d}-{self.exchange:06d}"


@dataclass(frozen=True)
class Reply:
    """The answer follows; `changed` says whether there is a new version of the site's state."""

    run: str
    version: str
    type: str
    changed: bool


@dataclass(frozen=True)
class Unfitting:
    """No answer yet, because a field does not fit what the layer's invitation says; what it needs."""

    field: str
    needed: int
    why: str


@dataclass(frozen=True)
class Refusal:
    """No answer, because the site's policy forbids it (`refused`) or because something failed."""

    refused: bool
    why: str


Header = Question | Introduction | Start | Ready | Request | Reply | Unfitting | Refusal
KINDS: dict[str, type] = {kind.__name__: kind for kind in typing.get_args(Header)}


def seal(header: Header, payload: bytes = b"") -> bytes:
    """The envelope as it travels: the length of the header in eight bytes, the header, the message."""
    fields = {"kind": type(header).__name__, **dataclasses.asdict(header)}
    text = json.dumps(fields, separators=(",", ":"), allow_nan=False).encode()
    return b"".join([len(text).to_bytes(8, "little"), text, payload])


def unseal(data: bytes) -> tuple[Header, bytes]:
    """What `seal` closed, or a `WireError`."""
    length = int.from_bytes(data[:8], "little")
    if len(data) < 8 or length > min(len(data) - 8, LONGEST_HEADER):
        raise WireError("not an envelope: cut short")
    try:
        fields = json.loads(data[8 : 8 + length], parse_constant=_no_number)
    except (ValueError, RecursionError) as error:
        raise WireError("not an envelope: unreadable header") from error
    kind = KINDS.get(str(fields.pop("kind", ""))) if isinstance(fields, dict) else None
    if kind is None:
        raise WireError("not an envelope: it does not say what it is")
    hints = typing.get_type_hints(kind)
    if fields.keys() != hints.keys():
        raise WireError(f"{kind.__name__}: its fields are not those of one")
    for name, hint in hints.items():
        _check(kind.__name__, name, fields[name], hint)
    return kind(**fields), data[8 + length :]


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
