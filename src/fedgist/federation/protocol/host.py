"""What answers at a member of a federation: one envelope at a time, each in the audit log as it comes and goes."""

import fcntl
import logging
import secrets
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fedgist.core.message import WireError
from fedgist.engines.engine import SiteFailure
from fedgist.engines.layer import Unfit
from fedgist.federation.protocol.audit import Audit
from fedgist.federation.protocol.envelope import (
    PROTOCOL,
    Header,
    Question,
    Refusal,
    Start,
    Unfitting,
    digest,
    seal,
    unseal,
)
from fedgist.federation.protocol.policy import Refused
from fedgist.secure.graph import Refused as NoSum
from fedgist.words import plain

log = logging.getLogger("fedgist")

Enrol = Callable[[bytes], bytes]
"""Takes note of a roster, if there is one, and gives what the site announces as its keys, if it has any."""


class Host(ABC):
    """Abstract: answers whatever is in an envelope."""

    what = "site"
    """What it calls itself."""

    def __init__(self, id: str, folder: Path, enrol: Enrol):
        self.id, self.folder, self.enrol = id, folder, enrol
        self.audit = Audit(folder / "audit.jsonl")
        self._lock, self._me = threading.Lock(), secrets.token_hex(8).encode()

    @property
    @abstractmethod
    def spoken(self) -> int:
        """The version of the protocol that the server of the present run speaks."""

    @abstractmethod
    def close(self) -> None:
        """A run is over."""

    @abstractmethod
    def _answer(self, header: Header, payload: bytes) -> tuple[Header, bytes]:
        """The answer, or an exception that says why there is none."""

    @abstractmethod
    def _forget(self) -> None:
        """Another process has answered meanwhile: what is in memory is old."""

    def handle(self, data: bytes) -> bytes:
        """The answer to an envelope; bad ones, requests outside the policy and failures get a refusal."""
        with self._lock:
            try:
                with self._alone():
                    return self._noted(data)
            except OSError as error:  # what cannot be noted does not leave; that it could not, may
                return seal(self._refusal(error, data))

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Wait while another process answers here, as one whose job has lost it; then what it did is read."""
        with (self.folder / "answering").open("a+b") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            file.seek(0)
            if file.read() != self._me:
                self._forget()
                file.truncate(0)
                file.write(self._me)
                file.flush()
            yield

    def _noted(self, data: bytes) -> bytes:
        about: dict[str, Any] = {"kind": "unreadable"}
        payload, spoken = b"", PROTOCOL
        try:
            header, body = unseal(data)
        except WireError as error:
            self.audit.write("in", data, **about)
            answered: Header = self._refusal(error, data)
        else:
            about = _about(header)
            self.audit.write("in", data, **about)
            try:
                answered, payload = self._answer(header, body)
            except Exception as error:
                answered = self._refusal(error, data)
            spoken = header.protocol if isinstance(header, (Question, Start)) else self.spoken
        sealed = seal(answered, payload, spoken)
        self.audit.write("out", sealed, **{**about, **_about(answered)})
        return sealed

    def _refusal(self, error: Exception, data: bytes) -> Refusal | Unfitting:
        """What the server is told. Of an unexpected error only its kind: its words may be about the site's data."""
        why = plain(" ".join([str(error) or type(error).__name__, *getattr(error, "__notes__", ())]), 1000)
        refused = isinstance(error, (Refused, NoSum))
        log.error(f"{self.what} {self.id}: {'refused' if refused else 'failed'}: {why}")
        if isinstance(error, Unfit):
            # What the field holds is the site's own affair; the power of two that it needs is not.
            told = f"{error.field} needs a range of ±2^{error.needed}"
            return Unfitting(error.field, error.needed, told, digest(data))
        if not refused and not isinstance(error, (WireError, SiteFailure)):
            why = f"it failed ({type(error).__name__}); the log of the {self.what} says more"
            return Refusal(False, why, digest(data))
        return Refusal(refused, plain(str(error)), digest(data))


def _about(header: Header) -> dict[str, Any]:
    """What the audit log says about an envelope."""
    fields = vars(header)
    names = ("run", "method", "round", "phase", "exchange", "type", "version", "changed", "refused", "why")
    return {"kind": type(header).__name__, **{name: fields[name] for name in names if name in fields}}
