"""What a helper runs: it gives the sums of masks that sites have sealed for it. It has no data and is in no sum."""

from collections.abc import Callable
from pathlib import Path

from fedgist.core.codec import Codec, to_bytes
from fedgist.core.message import tag_of
from fedgist.engines.layer import Exchange
from fedgist.engines.schemes import HelperSide
from fedgist.engines.secure_sum import MaskSum, Seeds
from fedgist.federation.protocol.envelope import PROTOCOL, Header, Introduction, Question, Reply, Request
from fedgist.federation.protocol.host import Enrol, Host
from fedgist.federation.protocol.policy import Refused
from fedgist.federation.protocol.roster import Roster


class HelperHost(Host):
    """Answers for a helper, the same for all runs."""

    what = "helper"

    def __init__(
        self,
        id: str,
        folder: Path,
        enrol: Enrol,
        roster: Callable[[], Roster],
        side: Callable[[Roster], HelperSide],
    ):
        super().__init__(id, folder, enrol)
        self.roster, self.side = roster, side
        self._made: tuple[Roster, HelperSide] | None = None

    @property
    def spoken(self) -> int:
        return PROTOCOL

    def close(self) -> None:
        """A run is over; what was opened in it stays remembered."""

    def _forget(self) -> None:
        self._made = None

    def _answer(self, header: Header, payload: bytes) -> tuple[Header, bytes]:
        if isinstance(header, Question):
            return Introduction(""), self.enrol(payload)
        if not isinstance(header, Request) or header.type != tag_of(Seeds):
            raise Refused("it is a helper: it has no data, and answers nothing but sums of masks")
        if (roster := self.roster()) != (self._made and self._made[0]):
            self._made = roster, self.side(roster)
        assert self._made is not None
        side = self._made[1]
        here = Exchange(header.run, header.phase, header.round, header.exchange)
        found = to_bytes(MaskSum, side.answer(here, Seeds, Codec(side.form.bounds).read(Seeds, payload)))
        return Reply(header.run, header.version, tag_of(MaskSum), False, header.fingerprint(payload)), found
