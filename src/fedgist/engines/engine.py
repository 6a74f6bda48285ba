"""What all engines share: who is asked, what is counted, what an asker is shown, and how a client answers.

An exchange comes back to `Engine.answers` as packed replies by site, and a site's reply leaves `answer` as a message
that is packed next: between those two points lies a layer (layer.py), which may wrap what a site sends, and makes the
sum.
"""

import math
import statistics
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from fedgist.core import tree
from fedgist.core.codec import Codec, Size, size, to_bytes
from fedgist.core.federation import SERVER, Answers, Ask, Exhibit, Federation, Site, TooFewAnswers
from fedgist.core.ledger import Entry, Ledger
from fedgist.core.message import partly, schema_of, tag_of, tensors_in
from fedgist.core.method import Handler, Method, handler_for
from fedgist.core.rng import Rng
from fedgist.core.rows import Leaves, Replies
from fedgist.core.tree import Tree
from fedgist.engines.layer import Exchange, Layer, Plain, Trip
from fedgist.engines.scheduler import Executor
from fedgist.engines.site_states import SiteStates

Sent = tuple[str, str, type, Size, Callable[[], Leaves]]
"""A message under way: sender, receiver, type and size, and the message itself for who wants to see it."""


class SiteFailure(Exception):
    """A site could not answer; its state stays what it was, and the exchange goes on without it."""


@dataclass(frozen=True)
class RoundReport:
    """What happened in a round: how many clients answered each exchange at least, or why it was skipped."""

    round: int
    answered: int
    skipped: str | None = None
    shown: Sequence[Exhibit] = ()
    """What the nodes put up for a person to look at."""
    missing: Mapping[str, str] = field(default_factory=dict)
    """Sites that were asked and did not answer, and why, where an engine knows."""
    steps: int | None = None
    """Steps of loops that all clients together computed, where they are in this process."""


class Asker:
    """Who asks clients and gets their answers: a server, or a client that asks its neighbours."""

    def __init__(
        self,
        method: Method,
        ids: Iterable[str],
        *,
        seed: int,
        executor: Executor,
        ledger: Ledger | None = None,
        info: Mapping[str, Mapping[str, Any]] | None = None,
        layer: Layer | None = None,
    ):
        self.method, self.executor, self.ledger, self.layer = method, executor, ledger or Ledger(), layer or Plain()
        self.run = method.name
        self.ids = tuple(sorted(ids))
        self.info = {id: {"model": method.task.model, **(info or {}).get(id, {})} for id in self.ids}
        self.rng = Rng(seed)
        self.codecs = {
            model: Codec({**method.bounds(model), **self.layer.form.bounds}, executor.place)
            for model in {method.task.model, *(about["model"] for about in self.info.values())}
        }

    def _begin(self, phase: str, round: int) -> None:
        self.phase, self.round, self.exchange, self.answered = phase, round, 0, len(self.ids)
        self.shown: list[Exhibit] = []

    def _federation(self, node: str, ids: Sequence[str]) -> Federation:
        return Federation(node, tuple(ids), self.round, self.rng(node, self.phase, self.round), self.info, self.shown)

    def codec_of(self, id: str) -> Codec:
        """What the server and this site agreed on; who is no site of the run has no model of its own."""
        return self.codecs[self.info[id]["model"] if id in self.info else self.method.task.model]

    def handler(self, ask: Ask, id: str) -> Handler:
        """The handler that answers what a site is asked."""
        handler = handler_for(self.method, type(ask.to[id]))
        if handler.reply is not ask.reply:
            raise TypeError(
                f"{self.method.name}.{handler.name} replies {handler.reply.__name__}, not {ask.reply.__name__}"
            )
        return handler

    def count(self, sender: str, receiver: str, direction: str, cls: type, leaves: Leaves) -> None:
        """Write a message into the ledger, and into the transcript where it is recorded."""
        self.count_all(direction, [(sender, receiver, cls, size(cls, leaves), lambda: leaves)])

    def count_all(self, direction: str, sent: Iterable[Sent]) -> None:
        """The same for many messages."""
        where = self.round, self.phase, self.exchange, direction
        counted: list[tuple[Entry, Size]] = []
        for sender, receiver, cls, cost, leaves in sent:
            if sender == receiver:  # a node that asks itself sends nothing
                continue
            entry = Entry(*where, sender, receiver, tag_of(cls))
            counted.append((entry, cost))
            if self.ledger.records(entry.type):
                self.ledger.keep(entry, to_bytes(cls, leaves()))
        self.ledger.write_all(counted)

    @property
    def here(self) -> Exchange:
        """The exchange under way."""
        return Exchange(self.run, self.phase, self.round, self.exchange)

    def invitations(self, sender: str, receiver: str, leaves: Leaves) -> list[Sent]:
        """What goes along with a request, where something does."""
        form = self.layer.form.invitation
        return [] if form is None else [(sender, receiver, form, size(form, leaves), lambda: leaves)]

    def answers(
        self, ask: Ask, replies: Mapping[str, Leaves], late: Mapping[str, int], trip: Trip
    ) -> Answers[Any] | TooFewAnswers:
        """What the asker may see of the replies: the sum of the additive fields, the others one by one."""
        replies = replies if isinstance(replies, Replies) else Replies.apart(replies)
        if len(replies) < ask.at_least:
            return TooFewAnswers(
                f"round {self.round}: {len(replies)} of {len(ask.to)} answered {ask.reply.__name__}, "
                f"at least {ask.at_least} are needed"
            )
        accepted = self.layer.accept(self.here, ask.reply, replies)
        replies = accepted if isinstance(accepted, Replies) else Replies.apart(accepted)
        try:
            total = self.layer.total(self.here, ask.reply, replies, trip)
        except TooFewAnswers as missing:
            return missing
        visible: dict[str, Any] = dict.fromkeys(replies, partly(ask.reply, {}))
        if not all(declared.additive for _, declared in schema_of(ask.reply).values()):
            for id, leaves in replies.items():
                visible[id] = partly(ask.reply, self.codec_of(id).values(ask.reply, leaves, additive=False))
        codec = self.codecs[self.method.task.model]
        summed: Any = partly(ask.reply, codec.values(ask.reply, total, additive=True) if replies else {})
        return Answers(tuple(replies), summed, visible, late)

    def _put(self, what: Tree) -> Tree:
        return self.executor.place.put(what)


class Engine(Asker, ABC):
    """Abstract: a federation that a runner drives round by round."""

    def __init__(self, method: Method, ids: Iterable[str], **about: Any):
        super().__init__(method, ids, **about)
        self.rounds_done = 0
        self.states: dict[str, Tree] = {}
        self.site_states = SiteStates(self.executor.place)
        """Of the sites that are in this process."""
        self.missing: dict[str, str] = {}
        """Who was asked since the round or the evaluation began and did not answer, and why, where that is known."""

    @property
    def state(self) -> Tree:
        """The server's state; without a server, the states of all nodes."""
        return self.states.get(SERVER, self.states)

    @abstractmethod
    def run_round(self) -> RoundReport:
        """One more round."""

    @abstractmethod
    def evaluate(self, test: tuple[Tensor, Tensor]) -> dict[str, float]:
        """The method's metrics now. Exchanges are counted as evaluation, and no state changes."""

    @abstractmethod
    def clients(self) -> Iterator[Site]:
        """The clients that are in this process, each with its data and its state as it stands, one by one."""

    @abstractmethod
    def snapshot(self) -> Tree:
        """All that is needed to go on from here."""

    @abstractmethod
    def restore(self, snapshot: Tree) -> None:
        """Go on from there."""

    @abstractmethod
    def digest(self) -> str:
        """A hash of where the learning stands: equal runs have equal ones."""

    def diverged(self) -> list[str]:
        """The nodes whose state, where it is here, holds a number that is not finite."""
        held = [*self.states.items(), *self.site_states.in_memory().items()]
        found = [node for node, state in held if not tree.finite(state)]
        return list(dict.fromkeys([*found, *sorted(self.site_states.diverged)]))


def misfits(reply: type, replies: Mapping[str, Leaves]) -> list[str]:
    """The sites whose additive fields have another shape or dtype than those of most, so that they cannot be summed."""
    additive = {name for name, (_, declared) in schema_of(reply).items() if declared.additive}
    shapes = {
        id: tuple((tuple(leaf.shape), leaf.dtype) for name, leaf in leaves.items() if name.split("/")[0] in additive)
        for id, leaves in sorted(replies.items())
    }
    usual = Counter(shapes.values()).most_common(1)
    return [id for id, shape in shapes.items() if shape != usual[0][0]]


def outliers(reply: type, replies: Mapping[str, Leaves], times: float) -> dict[str, str]:
    """The sites with a field that is out of proportion, and what is wrong with it.

    Where a field is declared as a multiple of another (`per`), its norm for each of those may be so many times the
    median of all sites, of which more than half must be honest: with two, nobody can say which.
    """
    found: dict[str, str] = {}
    for name, (_, declared) in schema_of(reply).items():
        if declared.per is None:
            continue
        norms = {id: (_norm(leaves, name), _norm(leaves, declared.per)) for id, leaves in replies.items()}
        found |= {id: f"{name} of no {declared.per}" for id, (size, unit) in norms.items() if size > 0 and unit == 0}
        sizes = {id: size / unit for id, (size, unit) in norms.items() if size > 0 and unit > 0}
        usual = statistics.median_low(sizes.values()) if len(sizes) > 2 else math.inf
        large = {id: size / usual for id, size in sizes.items() if size > times * usual}
        found |= {id: f"{name} {ratio:.3g} times as large as is usual" for id, ratio in large.items()}
    return found


def _norm(leaves: Leaves, part: str) -> float:
    """Of whole numbers in few bits, whose zero is elsewhere, none: they cannot be large."""
    parts = [leaf for name, leaf in leaves.items() if name.split("/")[0] == part and leaf.is_floating_point()]
    return math.hypot(*(float(leaf.double().norm()) for leaf in parts))


def client_rng(seed: int, id: str) -> Rng:
    """The root of a client's randomness: the same wherever the client runs."""
    return Rng(seed, "client", id)


async def answer(method: Method, handler: Handler, site: Site, msg: Any) -> Any:
    """A client's reply, or the failure it reports; any other exception says where it happened."""
    tensors = tensors_in(msg)
    versions = [tensor._version for tensor in tensors]
    try:
        reply = await getattr(method, handler.name)(site, msg)
    except SiteFailure as failure:
        return failure
    except Exception as error:
        fields = tree.map(lambda leaf: tuple(leaf.shape) if isinstance(leaf, Tensor) else leaf, vars(msg))
        where = f"client {site.id}, round {site.round}, {method.name}.{handler.name}"
        error.add_note(f"in {where}, answering {tag_of(type(msg))} {fields}")
        raise
    if versions != [tensor._version for tensor in tensors]:
        raise RuntimeError(f"{method.name}.{handler.name} changed the message it received; copy it first")
    if type(reply) is not handler.reply:
        raise TypeError(f"{method.name}.{handler.name} must reply {handler.reply.__name__}")
    return reply
