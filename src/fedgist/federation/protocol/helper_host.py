"""What a helper runs: it gives the sums of masks that sites have sealed for it. It has no data and is in no sum."""

import hashlib
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
from fedgist.federation.protocol.envelope import Header, Introduction, Question, Refusal, Reply, Request, seal, unseal
from fedgist.federation.protocol.policy import Refused
from fedgist.federation.protocol.roster import Roster
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
        self._made: tuple[Roster, HelperSide] | None = None

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
                answered = self._refusal(error)
            sealed = seal(answered, payload)
            try:
                self.audit.write("out", sealed, **about, why=getattr(answered, "why", ""))
            except OSError as error:  # what cannot be noted does not leave; that it could not, may
                return seal(self._refusal(error))
            return sealed

    def _answer(self, header: Header, payload: bytes) -> tuple[Header, bytes]:
        if isinstance(header, Question):
            return Introduction(""), self.enrol(payload)
        if not isinstance(header, Request) or header.type != tag_of(Seeds):
            raise Refused("it is a helper: it has no data, and answers nothing but sums of masks")
        roster = self.roster()
        if self._made is None or self._made[0] != roster:
            self._made = roster, self.side(roster)
        side, codec = self._made[1], Codec(self._made[1].form.bounds)
        here = Exchange(header.run, header.phase, header.round, header.exchange)
        found = to_bytes(MaskSum, side.answer(here, Seeds, codec.read(Seeds, payload)))
        fingerprint = header.fingerprint(hashlib.sha256(payload).hexdigest())
        return Reply(header.run, header.version, tag_of(MaskSum), False, fingerprint), found

    def _refusal(self, error: Exception) -> Refusal:
        refused = isinstance(error, (Refused, NoSum))
        log.error(
            f"helper {self.id}: {'refused' if refused else 'failed'}: {plain(str(error) or type(error).__name__)}"
        )
        if refused or isinstance(error, WireError):
            return Refusal(refused, plain(str(error)))
        return Refusal(False, f"it failed ({type(error).__name__}); the log of the helper says more")
