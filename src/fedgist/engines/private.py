"""Differentially private sums as a layer: a reply is noised and charged before it leaves, and then hidden or not.

It lies around another layer: nothing (each site's noise suffices on its own, against the server), or a secure sum (the
noises of all suffice together, against a server that sees the sum alone).
"""

import functools
import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from fedgist.core.codec import Codec, Leaves, to_bytes
from fedgist.core.federation import TooFewAnswers
from fedgist.core.message import schema_of, tag_of
from fedgist.core.tree import Tree
from fedgist.dp import gaussian
from fedgist.dp.accountant import UNITS, together
from fedgist.dp.budget import SPENT, Book, Limit, Outbox, Spent
from fedgist.dp.randomness import Noise
from fedgist.dp.releases import Declared, Mechanism, samples, unit
from fedgist.engines.engine import SiteFailure
from fedgist.engines.layer import Exchange, Form, Layer, SiteAround, SiteLayer, Trip, Unfit
from fedgist.secure.graph import threshold
from fedgist.secure.ring import ROOM, WIDEST_RANGE

WIDEST = 2.0 ** (WIDEST_RANGE - 1)
NOISES = ("local", "sum")
Draw = Callable[[Exchange, str], Noise]
"""The noise for a reply (by its tag) in an exchange."""


@dataclass(frozen=True)
class Promise:
    """What is promised about a run, to whom, and on what it rests."""

    epsilon: float
    delta: float
    noise: str
    """local: every site's own is enough; sum: only that of all in the sum is."""
    threshold: int = 1
    """The fewest sites in a sum."""
    colluders: int = 0
    """How many of them may tell the server their noise."""
    simulated: bool = False

    @property
    def mechanism(self) -> Mechanism:
        addends = 1 if self.noise == "local" else self.threshold - self.colluders
        return Mechanism(gaussian.mu(self.epsilon, self.delta), addends)

    @property
    def against(self) -> str:
        """The adversary."""
        if self.noise == "local":
            return "the server and everybody else, who see all that a site sends"
        helped = (
            f"with the help of at most {self.colluders} of the sites" if self.colluders else "without a site's help"
        )
        return f"the server, {helped}, as long as it sees sums over {self.threshold} or more sites only"


@functools.cache
def noised(reply: type) -> type:
    """The message that travels in place of a reply: what noise has moved keeps to no range."""
    schema = {
        name: (kind, replace(wire, low=None, high=None, below=None, per=None) if wire.additive else wire)
        for name, (kind, wire) in schema_of(reply).items()
    }
    made = type(f"Noised{reply.__name__}", (), {"__doc__": f"{reply.__name__}, with noise."})
    made.__schema__, made.__tag__ = schema, f"noised.{reply.__name__}"  # type: ignore[attr-defined]
    return made


def _form(inner: Form) -> Form:
    return replace(inner, travels=lambda reply: inner.travels(noised(reply)))


class PrivateSite(SiteAround):
    """A site's half: noise, the book, the outbox, and then the layer inside."""

    def __init__(
        self,
        inner: SiteLayer,
        promise: Promise,
        releases: Declared,
        book: Book,
        limit: Limit,
        draw: Draw,
        kept: "Kept | None" = None,
        memory: str = "",
    ):
        """`memory` names what the site knows of the run: where that is forgotten, all is charged anew."""
        super().__init__(inner)
        self.promise, self.releases, self.form = promise, releases, _form(inner.form)
        self.book, self.limit, self.draw, self.kept, self.memory = book, limit, draw, kept, memory

    def wrap(self, exchange: Exchange, invitation: Leaves, reply: type, leaves: Leaves) -> Leaves:
        if reply not in self.releases:
            raise SiteFailure(f"{reply.__name__} is not covered by the differential privacy of this run: it stays here")
        summed = self.promise.noise == "sum" and "cohort" in invitation
        if summed and threshold(int(invitation["cohort"].sum())) < self.promise.threshold:
            raise SiteFailure(
                f"noise that suffices in a sum over {self.promise.threshold} sites does not in one over fewer, which a "
                "cohort as small as this may be opened to"
            )
        sums, mechanism = self.releases[reply], self.promise.mechanism
        for field, own in mechanism.own(sums).items() if summed else ():
            step, limit = self.inner.room(invitation, noised(reply), field)
            if 2 * step > own or limit < min(own * 2.0**ROOM, WIDEST):
                raise SiteFailure(
                    f"{field} would be added in steps of {step:.3g}, up to {limit:.3g}: of noise with the deviation "
                    f"{own:.3g}, which suffices in the sum alone, each site's own would show by that"
                )
        key = " ".join(filter(None, (exchange.run, self.memory, exchange.version, tag_of(reply))))
        found = self.kept.get(key, reply) if self.kept else None
        if found is None:
            found = mechanism.noised(sums, leaves, self.draw(exchange, tag_of(reply)))
            if self.kept:
                self.kept.put(key, reply, found)
        try:
            self.book.charge(key, mechanism.release(sums), self.limit, reply=tag_of(reply), enough=self.promise.noise)
        except Spent as spent:
            raise SiteFailure(str(spent)) from spent
        if exchange.scopes:  # whether answers are equal must not tell of what is under the noise
            answer = hashlib.sha256(to_bytes(noised(reply), found)).hexdigest()
            exchange = replace(exchange, scopes=(*exchange.scopes[:-1], answer))
        try:
            return super().wrap(exchange, invitation, noised(reply), found)
        except Unfit as error:
            if not summed:  # then its own noise is enough for whatever is told of it
                raise
            raise SiteFailure(f"{error.field} does not fit into the sums of this run") from None


@dataclass(frozen=True)
class Kept:
    """The outbox of a run: what was noised, as the very bytes."""

    outbox: Outbox
    codec: Codec

    def get(self, key: str, reply: type) -> Leaves | None:
        data = self.outbox.get(key)
        return None if data is None else self.codec.read(noised(reply), data, trusted=True)

    def put(self, key: str, reply: type, leaves: Leaves) -> None:
        self.outbox.put(key, to_bytes(noised(reply), leaves))


class Private(Layer):
    """The asker's half."""

    def __init__(
        self,
        inner: Layer,
        promise: Promise,
        releases: Declared,
        sites: Mapping[str, PrivateSite],
        limit: Limit,
    ):
        """`sites` are those in this process; `limit` is the budget of the run, for the unit that is declared."""
        self.inner, self.promise, self.releases, self.sites, self.limit = inner, promise, releases, sites, limit
        self.form, self.title = _form(inner.form), inner.title
        self.released: dict[str, str] = {}
        """The exchanges in which sites may have released something, and what."""

    def invite(self, exchange: Exchange, reply: type, ids: Sequence[str]) -> Leaves:
        """Nobody is asked for what would exceed the budget of the run."""
        before, self.released = self.released, {**self.released, exchange.version: tag_of(reply)}
        if self.spent() > self.promise.epsilon * (1 + 1e-9):
            self.released = before
            raise Spent(
                f"the privacy budget of this run is spent: ε = {self.spent():.4g} of {self.promise.epsilon:g} at δ = "
                f"{self.promise.delta:g} before round {exchange.round}, which would exceed it: nobody is asked"
            )
        if self.promise.noise == "sum" and reply in self.releases:
            self.inner.expect(noised(reply), self.promise.mechanism.own(self.releases[reply]))
        return self.inner.invite(exchange, noised(reply), ids)

    def mend(self, reply: type, errors: Iterable[Unfit]) -> bool:
        return self.inner.mend(noised(reply), errors)

    def accept(self, exchange: Exchange, reply: type, replies: Mapping[str, Leaves]) -> Mapping[str, Leaves]:
        return self.inner.accept(exchange, noised(reply), replies)

    def total(self, exchange: Exchange, reply: type, replies: Mapping[str, Leaves], trip: Trip) -> Leaves:
        if len(replies) < self.promise.threshold:
            raise TooFewAnswers(
                f"round {exchange.round}: {len(replies)} answered {reply.__name__}, and their noise hides a "
                f"{self.unit} only in a sum over {self.promise.threshold}"
            )
        return self.inner.total(exchange, noised(reply), replies, trip)

    def over(self, why: str) -> bool:
        return SPENT in why or self.inner.over(why)

    def describe(self) -> Mapping[str, Any]:
        return {**self.inner.describe(), "privacy": {**vars(self.promise), "simulated": False}}

    def site(self, id: str) -> SiteLayer:
        return self.sites[id] if id in self.sites else self.inner.site(id)

    def snapshot(self) -> Tree:
        return {"inner": self.inner.snapshot(), "released": dict(self.released)}

    def restore(self, snapshot: Tree) -> None:
        self.inner.restore(snapshot["inner"])
        self.released = dict(snapshot["released"])

    def spent(self) -> float:
        """The ε of a site that has answered all that was asked in this run so far."""
        costs = {tag_of(reply): self.promise.mechanism.release(sums) for reply, sums in self.releases.items()}
        releases = together(costs[tag] for tag in self.released.values() if tag in costs)
        return self.limit.cost(releases)

    @property
    def unit(self) -> str:
        return unit(self.releases)

    @property
    def against(self) -> str:
        """The adversary, and what it must not know."""
        return f"{self.promise.against}, but not the batches" if samples(self.releases) else self.promise.against

    def sentence(self) -> str:
        """ε never goes without what it is about."""
        seeded = "noise and batches come" if samples(self.releases) else "the noise comes"
        simulated = f"; simulated: {seeded} from the run's seed" if self.promise.simulated else ""
        made = self.promise
        return (
            f"ε = {made.epsilon:g} at δ = {made.delta:g}; unit: {UNITS[self.unit]}; against {self.against}{simulated}"
        )
