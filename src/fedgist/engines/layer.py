"""What lies between a site's packed reply and what the asker gets of all replies; `Plain` is nothing.

A layer has two halves. The site's wraps a packed reply into the message that travels in its place; the asker's says
what goes along with the requests, and makes the sum of what came back, for which it may send the sites messages of its
own. An engine knows a layer by these two alone; in one process it holds both.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fedgist.core.codec import add_up
from fedgist.core.message import Bounds, WireError, tag_of
from fedgist.core.rows import Leaves, Replies
from fedgist.core.tree import Tree


def version_of(phase: str, round: int, exchange: int) -> str:
    """The name of an exchange within its run, and of the state that answering in it leaves behind."""
    return f"{phase}-{round:06d}-{exchange:06d}"


@dataclass(frozen=True)
class Exchange:
    """Which exchange this is; both ends know it."""

    run: str
    phase: str
    round: int
    number: int
    scopes: tuple[str, ...] = ()
    """Digests of what a site was asked and, last, of what it answers, which other exchanges may have in common with
    this."""

    @property
    def version(self) -> str:
        return version_of(self.phase, self.round, self.number)


Trip = Callable[[Mapping[str, Leaves], type, type], dict[str, Leaves]]
"""Carries a message of the layer's own (of the first type) to each site; brings their answers, of the second."""


class Unfit(WireError):
    """A site's reply cannot be wrapped as the asker wants it; `Layer.mend` may know how it could."""

    def __init__(self, why: str, field: str = "", needed: int = 0):
        super().__init__(why)
        self.field, self.needed = field, needed


@dataclass(frozen=True)
class Form:
    """What both halves agree on: which messages travel."""

    travels: Callable[[type], type] = lambda reply: reply
    """The message that travels in place of a reply."""
    invitation: type | None = None
    """The message that goes along with every request, if any."""
    own: Mapping[type, type] = field(default_factory=dict)
    """The messages that the asker's half sends the sites' halves, and what answers each."""
    bounds: Bounds = field(default_factory=dict)
    """Sizes in all of these."""


class SiteLayer(ABC):
    """Abstract: the half at a site."""

    form = Form()

    @abstractmethod
    def wrap(self, exchange: Exchange, invitation: Leaves, reply: type, leaves: Leaves) -> Leaves:
        """What travels in place of a packed reply, or `Unfit`."""

    def room(self, invitation: Leaves, reply: type, field: str) -> tuple[float, float]:
        """To multiples of what a field is rounded before it is summed, and what it must stay below."""
        return 0.0, math.inf

    def hear(self, exchange: Exchange, request: type, leaves: Leaves) -> None:  # noqa: B027 - most do not listen
        """A request comes in; its leaves belong to all who got it."""

    def answer(self, exchange: Exchange, request: type, leaves: Leaves) -> Leaves:
        """The answer to a message of the layer's own; most have none."""
        raise WireError(f"no layer here knows a message {tag_of(request)}")


class Layer(ABC):
    """Abstract: the half at the asker."""

    form = Form()
    title = ""
    """What a report calls it; empty where nothing is hidden."""
    wraps = True
    """Whether sites wrap their replies, each its own; where not, those of a stack stay together."""

    def choose(self, exchange: Exchange, ids: Sequence[str]) -> Sequence[str]:
        """Which of these sites are asked."""
        return ids

    def invite(self, exchange: Exchange, reply: type, ids: Sequence[str]) -> Leaves:
        """The invitation that goes along with the requests to these sites."""
        return {}

    def expect(self, reply: type, noise: Mapping[str, float]) -> None:  # noqa: B027 - most round nothing
        """Fields of a reply will have noise of these deviations, and must not be rounded to more than that."""

    def mend(self, reply: type, errors: Iterable[Unfit]) -> bool:
        """Whether asking all again, with another invitation, may help; the layer remembers with which."""
        return False

    def accept(self, exchange: Exchange, reply: type, replies: Mapping[str, Leaves]) -> Mapping[str, Leaves]:
        """What counts of the replies that came, of all their fields."""
        return replies

    @abstractmethod
    def total(self, exchange: Exchange, reply: type, replies: Mapping[str, Leaves], trip: Trip) -> Leaves:
        """The sum of the additive fields over what travelled, or `TooFewAnswers`."""

    def over(self, why: str) -> bool:
        """Whether a site that failed with these words is done with this run."""
        return False

    def describe(self) -> Mapping[str, Any]:
        """What a site elsewhere is told, to make the other half; empty where there is none."""
        return {}

    @abstractmethod
    def site(self, id: str) -> SiteLayer:
        """The other half, where the site is in this process."""

    def snapshot(self) -> Tree:
        """What a run that goes on has to know."""
        return {}

    def restore(self, snapshot: Tree) -> None:  # noqa: B027 - most have nothing to remember
        """Go on from there."""


class PlainSite(SiteLayer):
    """No layer: the packed reply travels."""

    def wrap(self, exchange: Exchange, invitation: Leaves, reply: type, leaves: Leaves) -> Leaves:
        return leaves


class Plain(Layer):
    """No layer: the asker adds up what travelled."""

    wraps = False

    def total(self, exchange: Exchange, reply: type, replies: Mapping[str, Leaves], trip: Trip) -> Leaves:
        return add_up(reply, replies.parts if isinstance(replies, Replies) else replies.values())

    def site(self, id: str) -> SiteLayer:
        return PlainSite()


class SiteAround(SiteLayer):
    """Abstract: a site's half that lies around another and changes some of what that does."""

    def __init__(self, inner: SiteLayer):
        self.inner, self.form = inner, inner.form

    def wrap(self, exchange: Exchange, invitation: Leaves, reply: type, leaves: Leaves) -> Leaves:
        return self.inner.wrap(exchange, invitation, reply, leaves)

    def room(self, invitation: Leaves, reply: type, field: str) -> tuple[float, float]:
        return self.inner.room(invitation, reply, field)

    def hear(self, exchange: Exchange, request: type, leaves: Leaves) -> None:
        self.inner.hear(exchange, request, leaves)

    def answer(self, exchange: Exchange, request: type, leaves: Leaves) -> Leaves:
        return self.inner.answer(exchange, request, leaves)


class Around(Layer):
    """Abstract: an asker's half that lies around another and changes some of what that does."""

    def __init__(self, inner: Layer):
        self.inner, self.form, self.title = inner, inner.form, inner.title

    def choose(self, exchange: Exchange, ids: Sequence[str]) -> Sequence[str]:
        return self.inner.choose(exchange, ids)

    def invite(self, exchange: Exchange, reply: type, ids: Sequence[str]) -> Leaves:
        return self.inner.invite(exchange, reply, ids)

    def expect(self, reply: type, noise: Mapping[str, float]) -> None:
        self.inner.expect(reply, noise)

    def mend(self, reply: type, errors: Iterable[Unfit]) -> bool:
        return self.inner.mend(reply, errors)

    def accept(self, exchange: Exchange, reply: type, replies: Mapping[str, Leaves]) -> Mapping[str, Leaves]:
        return self.inner.accept(exchange, reply, replies)

    def total(self, exchange: Exchange, reply: type, replies: Mapping[str, Leaves], trip: Trip) -> Leaves:
        return self.inner.total(exchange, reply, replies, trip)

    def over(self, why: str) -> bool:
        return self.inner.over(why)

    def describe(self) -> Mapping[str, Any]:
        return self.inner.describe()

    def site(self, id: str) -> SiteLayer:
        return self.inner.site(id)

    def snapshot(self) -> Tree:
        return self.inner.snapshot()

    def restore(self, snapshot: Tree) -> None:
        self.inner.restore(snapshot)
