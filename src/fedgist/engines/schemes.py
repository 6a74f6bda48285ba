"""How the addends of a secure sum are hidden, as an asker holds it; `cryptography` is needed for all but one."""

import hashlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar

import numpy as np
import torch

from fedgist.core.codec import Leaves
from fedgist.core.message import WireError, int64
from fedgist.engines.layer import Exchange, SiteAround, SiteLayer, Trip
from fedgist.engines.secure_sum import (
    LARGEST,
    PHASES,
    Agree,
    Agreed,
    MaskSum,
    Noise,
    Opened,
    SecureSite,
    Seeds,
    Unmask,
    Unmasked,
    as_bytes,
    form,
    marked,
    named,
    signature_rows,
    signers,
)
from fedgist.secure.graph import CannotOpen, Group, Refused, Sent, threshold
from fedgist.secure.ring import UNSIGNED, Grid, Vector
from fedgist.secure.shamir import Bytes

if TYPE_CHECKING:
    from fedgist.secure.helper import Helper, Seeded
    from fedgist.secure.party import Identity, Party

INSTALL = "pip install 'fedgist[secure]'"
LEAVE_OUT = "to go on without one that keeps doing so, revoke it or have it ended"
HELPER = "helper"
"""Its name where all are in one process."""


@dataclass(frozen=True)
class Simulated:
    """The sum over the ring, the same bits as with masks, by a server that could see every addend."""

    title: str = f"simulated: nothing hides them here without {INSTALL}"
    roster: bytes = bytes(32)
    own: Mapping[type, type] = field(default_factory=dict)

    def site(self, id: str, ids: Sequence[str], grid: Grid, noise: Noise | None) -> SiteLayer:
        def show(
            group: Group, vectors: Mapping[str, Vector], scopes: Sequence[str]
        ) -> tuple[dict[str, Vector], Bytes, Bytes]:
            """What would be sent to open it is as long as it would be."""
            near = len(group.near(id))
            return dict(vectors), np.zeros((near - 1, 32 * near + 48), np.uint8), np.zeros((near, 32), np.uint8)

        return SecureSite(ids, self.roster, grid, show, noise)

    def open(
        self, group: Group, sent: Mapping[str, Sent], total: Mapping[str, Vector], ids: Sequence[str], trip: Trip
    ) -> Opened:
        return Opened()


@dataclass(frozen=True)
class Masks:
    """Pairwise masks, which cancel in the sum, and shares of their keys to take off what does not."""

    roster: bytes
    trips: int = 2
    """With three, sites have seen who signed a sum's set before they help to open it; with two they see it after."""
    parties: Mapping[str, "Party"] = field(default_factory=dict)

    title: ClassVar[str] = "protected by masks"
    own: ClassVar[Mapping[type, type]] = {Agree: Agreed, Unmask: Unmasked}

    def site(self, id: str, ids: Sequence[str], grid: Grid, noise: Noise | None) -> SiteLayer:
        party = self.parties[id]
        return MaskSide(SecureSite(ids, self.roster, grid, party.mask, noise), party)

    def open(
        self, group: Group, sent: Mapping[str, Sent], total: Mapping[str, Vector], ids: Sequence[str], trip: Trip
    ) -> Opened:
        from fedgist.secure.opening import Opening

        opening, alive, needed = Opening(group, sent), marked(ids, sent), threshold(len(group.cohort))
        agreed: dict[str, bytes] = {}
        if self.trips == 3:
            agreed = _signatures(trip({name: {"alive": alive} for name in opening.alive}, Agree, Agreed))
            if len(agreed) < needed:
                raise CannotOpen(f"{len(agreed)} sites have signed whose sum it is: {needed} are needed")
        shown = signature_rows(ids, {name: signature.hex() for name, signature in agreed.items()})
        found = trip(
            {
                name: {"alive": alive, "sealed": torch.from_numpy(opening.sealed_for(name)), "signatures": shown}
                for name in opening.alive
            },
            Unmask,
            Unmasked,
        )
        opening.unmask(total, {name: answer["keys"].numpy() for name, answer in found.items()})
        return Opened(opening.wrong, {} if self.trips == 3 else _signatures(found))


def _signatures(answers: Mapping[str, Leaves]) -> dict[str, bytes]:
    return {name: answer["signature"].numpy().tobytes() for name, answer in answers.items()}


class MaskSide(SiteAround):
    """A site's half where masks are to be taken off: it looks at who signed what, and gives shares of keys."""

    def __init__(self, inner: SecureSite, party: "Party"):
        super().__init__(inner)
        self.ids, self.party, self.form = inner.ids, party, form(len(inner.ids), Masks.own)

    def wrap(self, exchange: Exchange, invitation: Leaves, reply: type, leaves: Leaves) -> Leaves:
        if signatures := signers(self.ids, invitation["signatures"]):
            phase, round, number = invitation["before"].tolist()
            self.party.believe(Exchange("", PHASES[phase % len(PHASES)], round, number).version, signatures)
        return super().wrap(exchange, invitation, reply, leaves)

    def answer(self, exchange: Exchange, request: type, leaves: Leaves) -> Leaves:
        alive = named(self.ids, leaves["alive"])
        if request is Agree:
            return {"signature": as_bytes(self.party.sign(exchange.version, alive))}
        signatures = signers(self.ids, leaves["signatures"])
        keys, signature = self.party.open(exchange.version, alive, leaves["sealed"].numpy(), signatures)
        return {"keys": torch.from_numpy(keys), "signature": as_bytes(signature)}


@dataclass(frozen=True)
class Helped:
    """The stream of one seed a site, which a helper holds and the server does not."""

    roster: bytes
    helper: str = HELPER
    parties: Mapping[str, "Seeded"] = field(default_factory=dict)
    here: "Helper | None" = None
    """The helper, where it is in this process."""

    own: ClassVar[Mapping[type, type]] = {Seeds: MaskSum}

    @property
    def title(self) -> str:
        return f"protected by masks that {self.helper} knows and the server does not"

    def site(self, id: str, ids: Sequence[str], grid: Grid, noise: Noise | None) -> SiteLayer:
        if id == self.helper:
            assert self.here is not None
            return HelperSide(ids, self.here)
        return SecureSite(ids, self.roster, grid, self.parties[id].mask, noise)

    def open(
        self, group: Group, sent: Mapping[str, Sent], total: Mapping[str, Vector], ids: Sequence[str], trip: Trip
    ) -> Opened:
        from fedgist.secure.helper import SEALED

        if len(sent) < (needed := threshold(len(group.cohort))):
            raise CannotOpen(f"{len(sent)} of {len(group.cohort)} sites answered, and {needed} are needed")
        if wrong := [id for id in sent if sent[id].shares.shape != (1, SEALED)]:
            raise CannotOpen(f"{', '.join(wrong)} sent no seed that {self.helper} could open: {LEAVE_OUT}")
        sealed = [sent[id].shares for id in ids if id in sent]
        shape = [(8 * vector.itemsize, vector.size) for vector in total.values()]
        asked = {"alive": marked(ids, sent), "sealed": torch.from_numpy(np.concatenate(sealed))}
        found = trip({self.helper: {**asked, "form": torch.tensor(shape, dtype=int64)}}, Seeds, MaskSum)
        if self.helper not in found:
            raise CannotOpen(f"{self.helper} does not give the sum of the masks; if it names who is why, {LEAVE_OUT}")
        data, start = found[self.helper]["masks"].numpy(), 0
        if len(data) != sum(vector.nbytes for vector in total.values()):
            raise CannotOpen(f"{self.helper} gave masks of another length than the numbers have")
        for vector in total.values():
            vector -= data[start : start + vector.nbytes].view(vector.dtype)
            start += vector.nbytes
        return Opened()


class HelperSide(SiteLayer):
    """The helper's half: it adds up the masks that sites have sealed for it."""

    def __init__(self, ids: Collection[str], helper: "Helper", largest: int = LARGEST):
        """`largest` is how many bytes of masks it bears to make."""
        self.ids, self.helper, self.largest = tuple(sorted(ids)), helper, largest
        self.form = form(len(self.ids), Helped.own)

    def wrap(self, exchange: Exchange, invitation: Leaves, reply: type, leaves: Leaves) -> Leaves:
        raise WireError("a helper adds nothing up but masks")

    def answer(self, exchange: Exchange, request: type, leaves: Leaves) -> Leaves:
        alive, sealed = named(self.ids, leaves["alive"]), leaves["sealed"].numpy()
        shape = [(int(bits), int(count)) for bits, count in leaves["form"].tolist()]
        if len(sealed) != len(alive) or any(bits not in UNSIGNED for bits, _ in shape):
            raise WireError("it does not fit together")
        if (size := sum(bits // 8 * count for bits, count in shape)) > self.largest:
            raise Refused(f"{size:,} bytes of masks are more than the {self.largest:,} that this helper makes")
        notes = {name: row.tobytes() for name, row in zip(alive, sealed, strict=True)}
        made = np.concatenate([vector.view(np.uint8) for vector in self.helper.total(notes, shape)])
        return {"masks": torch.from_numpy(made)}


def masks_here(ids: Collection[str], least: int, trips: int = 2) -> Masks | Simulated:
    """Masks between sites that are all in this process, with keys made for this once."""
    try:
        from fedgist.secure.party import Party
        from fedgist.secure.past import Forgetful

        known, roster = _keys(ids)
    except ImportError:
        return Simulated()
    return Masks(roster, trips, {id: Party(known[id], Forgetful(), least, trips) for id in ids})


def helped_here(ids: Collection[str], least: int) -> Helped | Simulated:
    """Sites and a helper that are all in this process."""
    try:
        from fedgist.secure.helper import Helper, Seeded
        from fedgist.secure.past import Forgetful

        known, roster = _keys([*ids, HELPER])
    except ImportError:
        return Simulated()
    parties = {id: Seeded(known[id], HELPER, Forgetful(), least) for id in ids}
    return Helped(roster, HELPER, parties, Helper(known[HELPER], Forgetful(), least))


def _keys(ids: Collection[str]) -> tuple[dict[str, "Identity"], bytes]:
    """Keys for everybody, and the digest of the public ones."""
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

    from fedgist.secure.party import Identity

    private = {id: (X25519PrivateKey.generate(), Ed25519PrivateKey.generate()) for id in ids}
    public = {
        id: (agreement.public_key().public_bytes_raw(), signing.public_key().public_bytes_raw())
        for id, (agreement, signing) in private.items()
    }
    roster = hashlib.sha256(b"".join(sorted(key for keys in public.values() for key in keys))).digest()
    return {id: Identity(id, *keys, public, roster) for id, keys in private.items()}, roster
