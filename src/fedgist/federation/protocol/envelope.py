"""Envelopes: what travels between a server and a site on a real network: who and when in JSON, then a message's bytes.

A site is sent a `Question` (what would you run?), a `Start` (this run begins or goes on) or a `Request` (answer this
message); it sends back an `Introduction`, `Ready`, a `Reply`, or an `Unfitting` or a `Refusal` that say why not. Where
there is no server, it is sent a `Step` (go on with your own round) and a `Delivery` (letters of your neighbours). Like
messages, envelopes are checked field by field before anything is made of them, and nothing in them is executed. A
digest tells one that was cut short or damaged; it is no signature: who sent it, TLS says.

The protocol has a version. A field that came later says with `since` when, and what its absence means; whoever speaks
the version before is not sent it, so that server and sites need not be updated on one day.
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
from fedgist.engines.layer import version_of

PROTOCOL = 2
"""The version that is spoken here; 1 had none of the fields with a `since`."""
LONGEST_HEADER = 1 << 16
LONGEST_TEXT = 1000
DIGEST = "sha256"
"""The field that version 2 of the protocol adds to every header; without it, one comes from version 1."""
AGAIN = "the run was started again since this was asked"
"""Why a site does not answer a server that died, or one whose start was overtaken by an older one."""
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+-]{0,99}")
"""What names of runs and of versions look like: they become names of files at a site."""


def since(version: int, default: Any, before: Any) -> Any:
    """A field that came with a version of the protocol; `before` is what it means where it is missing."""
    return dataclasses.field(default=default, metadata={"since": version, "before": before})


@dataclass(frozen=True)
class Question:
    """Which architecture would you run for this method and data of this form? The newest roster may follow."""

    method: str
    shape: list[int]
    classes: int
    protocol: int = since(2, PROTOCOL, 1)


@dataclass(frozen=True)
class Introduction:
    """The architecture that a site has chosen (empty: whatever the run says); nothing about its data.

    The site's public keys may follow, as it announces them for the roster.
    """

    model: str
    protocol: int = since(2, PROTOCOL, 1)


@dataclass(frozen=True)
class Start:
    """All that a site must know of a run. What everybody knows of the task is in `task`, the method's in `options`.

    A token may follow, which all requests after this start carry: so that a site can tell those of a server that died.
    """

    run: str
    method: str
    seed: int
    model: str
    options: dict[str, Any]
    task: dict[str, Any]
    protocol: int = since(2, PROTOCOL, 1)
    layer: str = since(2, "", "")
    """What lies between a site's reply and what the server gets of it, in JSON; empty where nothing does."""


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
    invited: int = since(2, 0, 0)
    """How many bytes of the message are the layer's invitation, which comes first."""
    token: str = since(2, "", "")
    """That of the start which it follows."""

    @property
    def version(self) -> str:
        """The name of the state that answering leaves behind."""
        return version_of(self.phase, self.round, self.exchange)

    def fingerprint(self, payload: bytes) -> str:
        """Equal exactly where the same is asked, from the same state, in the same exchange of the same run."""
        asked = [self.run, self.version, self.type, self.state, digest(payload)]
        return hashlib.sha256(json.dumps(asked).encode()).hexdigest()


@dataclass(frozen=True)
class Reply:
    """The answer follows; `changed` says whether there is a new version of the site's state."""

    run: str
    version: str
    type: str
    changed: bool
    request: str = since(2, "", "")
    """The fingerprint of what it answers."""


@dataclass(frozen=True)
class Step:
    """Go on with your own round until you ask your neighbours; their letters to you, and who sent none, follow."""

    run: str
    round: int
    exchange: int
    state: str
    """The version of your client's state to answer from in this exchange; empty is the first."""
    node: str
    """The version of your node's state that the round begins with."""
    keep: list[str]
    here: list[str]
    """The sites that can be written to now."""
    token: str
    """That of the start which it follows."""


@dataclass(frozen=True)
class Stepped:
    """How far the site's round has come; its letters to its neighbours, and what it counted, follow."""

    run: str
    version: str
    how: str
    """asked, finished or skipped."""
    answered: bool
    """Whether the site has asked itself, too, and answered."""
    changed: bool
    """Whether that left a new version of its client's state."""


@dataclass(frozen=True)
class Delivery:
    """Letters of your neighbours follow: answer them, starting from that version of your state, and keep those."""

    run: str
    round: int
    exchange: int
    state: str
    keep: list[str]
    token: str


@dataclass(frozen=True)
class Delivered:
    """The site's letters back follow, and whom it refused one; `changed`: one left a new version of its state."""

    run: str
    version: str
    changed: bool


@dataclass(frozen=True)
class Unfitting:
    """No answer yet, because a field does not fit what the layer's invitation says; what it needs."""

    field: str
    needed: int
    why: str
    request: str = since(2, "", "")
    """The SHA-256 of the envelope that it answers."""


@dataclass(frozen=True)
class Refusal:
    """No answer, because the site's policy forbids it (`refused`) or because something failed."""

    refused: bool
    why: str
    request: str = since(2, "", "")
    """The SHA-256 of the envelope that it answers."""


Header = (
    Question
    | Introduction
    | Start
    | Ready
    | Request
    | Reply
    | Step
    | Stepped
    | Delivery
    | Delivered
    | Unfitting
    | Refusal
)
KINDS: dict[str, type] = {kind.__name__: kind for kind in typing.get_args(Header)}


def seal(header: Header, payload: bytes = b"", protocol: int = PROTOCOL) -> bytes:
    """The envelope as it travels: the length of the header in eight bytes, the header, the message.

    Fields that the other's version of the protocol does not know are left out.
    """
    later = {one.name for one in dataclasses.fields(header) if one.metadata.get("since", 1) > protocol}
    known = {name: value for name, value in vars(header).items() if name not in later}
    fields = {"kind": type(header).__name__, **known}
    if protocol > 1:
        fields[DIGEST] = _digest(fields, payload)
    text = _written(fields)
    return b"".join([len(text).to_bytes(8, "little"), text, payload])


def digest(data: bytes) -> str:
    """By which bytes are named: a refusal names the envelope that it answers, a fingerprint the message."""
    return hashlib.sha256(data).hexdigest()


def _written(fields: dict[str, Any]) -> bytes:
    return json.dumps(fields, separators=(",", ":"), allow_nan=False).encode()


def _digest(fields: dict[str, Any], payload: bytes | memoryview) -> str:
    """Of the header's other fields, and of the message."""
    made = hashlib.sha256(_written(fields))
    made.update(payload)
    return made.hexdigest()


def unseal(data: bytes) -> tuple[Header, bytes]:
    """What `seal` closed, or a `WireError`."""
    length = int.from_bytes(data[:8], "little")
    if len(data) < 8 or length > min(len(data) - 8, LONGEST_HEADER):
        raise WireError("not an envelope: cut short")
    try:
        fields = json.loads(data[8 : 8 + length], parse_constant=_no_number)
    except (ValueError, RecursionError) as error:
        raise WireError("not an envelope: unreadable header") from error
    if not isinstance(fields, dict):
        raise WireError("not an envelope: it does not say what it is")
    claimed = fields.pop(DIGEST, None)
    if claimed is not None and claimed != _digest(fields, memoryview(data)[8 + length :]):
        raise WireError("not an envelope: cut short or damaged on its way")
    _check_version(fields.get("protocol", PROTOCOL))
    kind = KINDS.get(str(fields.pop("kind", "")))
    if kind is None:
        raise WireError("not an envelope: it does not say what it is")
    hints = _hints(kind)
    missing = {one.name: one.metadata["before"] for one in dataclasses.fields(kind) if "since" in one.metadata}
    fields = {**missing, **fields}
    if fields.keys() != hints.keys():
        raise WireError(f"{kind.__name__}: its fields are not those of one")
    for name, hint in hints.items():
        _check(kind.__name__, name, fields[name], hint)
    return kind(**fields), data[8 + length :]


_hints = cache(typing.get_type_hints)


def _check_version(spoken: Any) -> None:
    """A version of difference is bridged by the newer end, which says less to the older one."""
    if type(spoken) is int and abs(spoken - PROTOCOL) > 1:
        here, there = ("the other end", "here") if spoken > PROTOCOL else ("this end", "there")
        raise WireError(
            f"{here} speaks version {max(spoken, PROTOCOL)} of the protocol, and {there} it is version "
            f"{min(spoken, PROTOCOL)}: update fedgist {there}"
        )


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
    if good and name in ("run", "version", "state", "node", "keep", "here", "phase"):
        good = all(NAME.fullmatch(text) or (name in ("state", "node") and text == "") for text in texts)
    if not good:
        raise WireError(f"{kind}: {name} is not what it should be")
