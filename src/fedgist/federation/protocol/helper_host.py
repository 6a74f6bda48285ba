"""What a helper runs: it gives the sums of masks that sites have sealed for it. It has no data and is in no sum."""

import fcntl
import logging
import threading
from collections.abc import Callable
from pathlib import Path

from fedgist.core.codec import Codec, to_bytes
from fedgist.core.message import WireError, tag_of
from fedgist.engines.layer import Exchange
from fedgist.engines.schemes import HelperSide
from fedgist.engines.secure_sum import MaskSum, Seeds
from fedgist.federation.protocol.audit import Audit
from fedgist.federation.protocol.envelope import (
    Header,
    Introduction,
    Question,
    Refusal,
    Reply,
    Request,
    digest,
    seal,
    unseal,
)
from fedgist.federation.protocol.policy import Refused
from fedgist.federation.protocol.roster import Roster
from fedgist.federation.protocol.secure_sums import HELPED
from fedgist.secure.graph import Refused as NoSum
from fedgist.words import plain

log = logging.getLogger("fedgist")


class HelperHost:
    """Answers envelopes, one at a time, whatever is in them."""

    def __init__(
        self,
        id: str,
        folder: Path,
        enrol: Callable[[bytes], bytes],
        roster: Callable[[], Roster],
        side: Callable[[Roster], HelperSide],
    ):
        self.id, self.enrol, self.roster, self.side = id, enrol, roster, side
        self.audit = Audit(folder / "audit.jsonl")
        self._lock = threading.Lock()
        self.folder = folder
        self._made: tuple[Roster, int, HelperSide] | None = None

    def close(self) -> None:
        """A run is over; what was opened in it stays remembered."""

    def handle(self, data: bytes) -> bytes:
        """The answer to an envelope; bad ones, and sums that must not be opened, get a refusal."""
        with self._lock:
            payload, about = b"", {"kind": "unreadable"}
            try:
                header, body = unseal(data)
                about = {"kind": type(header).__name__, "run": getattr(header, "run", "")}
                self.audit.write("in", data, **about)
                answered, payload = self._answer(header, body)
            except Exception as error:
                answered = self._refusal(error, data)
            sealed = seal(answered, payload)
            try:
                self.audit.write("out", sealed, **about, why=getattr(answered, "why", ""))
            except OSError as error:  # what cannot be noted does not leave; that it could not, may
                return seal(self._refusal(error, data))
            return sealed

    def _answer(self, header: Header, payload: bytes) -> tuple[Header, bytes]:
        if isinstance(header, Question):
            return Introduction(""), self.enrol(payload)
        if not isinstance(header, Request) or header.type != tag_of(Seeds):
            raise Refused("it is a helper: it has no data, and answers nothing but sums of masks")
        with (self.folder / "answering").open("a") as lock:  # another process may answer for this helper, too
            fcntl.flock(lock, fcntl.LOCK_EX)
            side = self._present_side()
            here = Exchange(header.run, header.phase, header.round, header.exchange)
            found = to_bytes(MaskSum, side.answer(here, Seeds, Codec(side.form.bounds).read(Seeds, payload)))
            self._made = self._made and (self._made[0], self._remembered(), side)
        fingerprint = header.fingerprint(payload)
        return Reply(header.run, header.version, tag_of(MaskSum), False, fingerprint), found

    def _present_side(self) -> HelperSide:
        """Made anew where the roster is another, or another process has opened a sum."""
        roster, size = self.roster(), self._remembered()
        if self._made is None or self._made[:2] != (roster, size):
            self._made = roster, size, self.side(roster)
        return self._made[2]

    def _remembered(self) -> int:
        memory = self.folder / HELPED
        return memory.stat().st_size if memory.is_file() else 0

    def _refusal(self, error: Exception, data: bytes) -> Refusal:
        refused = isinstance(error, (Refused, NoSum))
        log.error(
            f"helper {self.id}: {'refused' if refused else 'failed'}: {plain(str(error) or type(error).__name__)}"
        )
        if refused or isinstance(error, WireError):
            return Refusal(refused, plain(str(error)), digest(data))
        return Refusal(False, f"it failed ({type(error).__name__}); the log of the helper says more", digest(data))
