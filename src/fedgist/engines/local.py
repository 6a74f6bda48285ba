"""The in-process federation: sites, their committed states, exchanges, and rounds driven by an executor.

Messages do not become bytes here, but they are checked, cast, copied and counted exactly as the codec would.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import zip_longest
from typing import Any

from torch import Tensor

from fedgist import storage
from fedgist.core import tree
from fedgist.core.codec import Size, added_up, size
from fedgist.core.errors import FedgistError
from fedgist.core.federation import SERVER, Answers, Ask, Site, TooFewAnswers
from fedgist.core.ledger import Ledger
from fedgist.core.message import tag_of
from fedgist.core.method import Method
from fedgist.core.rows import Leaves, Part, Replies, by_stack, join
from fedgist.core.tree import Tree
from fedgist.engines.engine import Engine, RoundReport, Sent, SiteFailure, answer, client_rng
from fedgist.engines.layer import Layer, Unfit
from fedgist.engines.scheduler import Executor, Finished, Role, counting, seldom_collected, until_ask

REPLIES_TOGETHER = {"cpu": 1 << 27, "cuda": 1 << 32}
"""Bytes of replies that are held before they are added up."""
SMALLEST_WAVE = 16
"""Clients that are asked together all the same: with fewer, an executor has nothing to stack."""

Outage = Callable[[str, int, int], bool]
"""Whether a client (id, round, exchange) fails to answer."""

Graph = Mapping[str, Sequence[str]]
"""The neighbours of each client."""

Delay = Callable[[str, int], int]
"""How many rounds late the reply of a client (id, round) arrives."""


@dataclass(eq=False)
class Delivery:
    """A request on its way to one site, and what starts the coroutine that answers it."""

    site: Site
    answer: Callable[[], Role]
    before: Tree
    invitation: Leaves
    reply: Any = None


class LocalEngine(Engine):
    """A federation in one process. With a `topology` (node -> neighbours, or that for each round) every client drives
    rounds of its own.

    A reply that is late by `delay` rounds joins the first exchange for such replies after that, and says from which
    round it is; until then its sender is busy and does not answer who asked. It is lost if it is due in a round without
    such an exchange. A number draws delays from 0 to that.
    """

    def __init__(
        self,
        method: Method,
        sites: Mapping[str, Any],
        *,
        seed: int,
        executor: Executor,
        ledger: Ledger | None = None,
        info: Mapping[str, Mapping[str, Any]] | None = None,
        topology: Graph | Callable[[int], Graph] | None = None,
        offline: float | Outage = 0.0,
        delay: int | Delay = 0,
        layer: Layer | None = None,
    ):
        super().__init__(method, sites, seed=seed, executor=executor, ledger=ledger, info=info, layer=layer)
        self.data = {id: sites[id].to(executor.place.device, executor.place.dtype) for id in self.ids}
        self.topology = topology if callable(topology) or topology is None else lambda round: topology
        self.outage = offline if callable(offline) else self._random_outage(offline)
        self.delay = delay if callable(delay) else self._random_delay(delay)
        nodes = (SERVER,) if topology is None else self.ids
        self.states = {node: self._put(method.server_init(self.rng(node, "init"))) for node in nodes}
        self.under_way: dict[str, Tree] = {}
        self.working: dict[str, Tree] = {}
        self._begin("round", 1)

    # What a runner uses

    def run_round(self) -> RoundReport:
        return run_rounds([self])[0]

    def evaluate(self, test: tuple[Tensor, Tensor]) -> dict[str, float]:
        self._begin("evaluation", self.rounds_done)
        federation = self._federation(SERVER, self.ids)
        role = self.method.evaluate(self.state, federation, self._put(test))
        (outcome,) = _run_together([(self, SERVER, role)])
        if isinstance(outcome, TooFewAnswers):
            raise outcome
        self.working = {}
        return dict(outcome)

    def clients(self) -> Iterator[Site]:
        self._begin("round", self.rounds_done)
        for id in self.ids:
            yield self._site(id)[0]
            self.working = {}  # who was never asked has its first state for this once

    def snapshot(self) -> Tree:
        return {
            "round": self.rounds_done,
            "states": self.states,
            **self.site_states.snapshot(self.rounds_done),
            "under way": self.under_way,
            "layer": self.layer.snapshot(),
        }

    def restore(self, snapshot: Tree) -> None:
        self.rounds_done = snapshot["round"]
        self.states = self._put(snapshot["states"])
        self.site_states.restore(snapshot)
        self.under_way = tree.to(snapshot["under way"], self.executor.place.device)  # replies keep the wire's dtype
        self.layer.restore(snapshot["layer"])

    def digest(self) -> str:
        learned = {"states": self.states, "sites": self.site_states, "under way": self.under_way}
        return storage.digest({"round": self.rounds_done, **learned})

    # A round

    def begin_round(self) -> dict[str, Role]:
        """The round coroutines, one for each node that drives one."""
        self._begin("round", self.rounds_done + 1)
        return {
            node: self.method.round(tree.copy(self.states[node]), self._federation(node, ids))
            for node, ids in self.reach.items()
        }

    def end_round(self, outcomes: Mapping[str, Any]) -> RoundReport:
        """Commit what the nodes returned, unless all of them had to skip the round."""
        self.rounds_done += 1
        skipped = [str(outcome) for outcome in outcomes.values() if isinstance(outcome, TooFewAnswers)]
        all_skipped = len(skipped) == len(outcomes)
        if all_skipped:  # but replies that are under way are not lost: who sent one keeps what it did for it
            late = {reply["sender"] for key, reply in self.working_under_way.items() if key not in self.under_way}
            self.working = {id: state for id, state in self.working.items() if id in late}
            self.under_way = self.working_under_way | self.under_way
        else:  # what was due and nobody asked for is nobody's any more; it must not keep its sender busy for good
            self.under_way = {key: reply for key, reply in self.working_under_way.items() if reply["due"] > self.round}
        self.site_states.update(self.working)
        for node, outcome in outcomes.items():
            if not isinstance(outcome, TooFewAnswers):
                self.states[node] = self._put(outcome)  # as after a resume
        self.working = {}
        reason = skipped[0] if all_skipped else None
        return RoundReport(self.rounds_done, self.answered, reason, self.shown, steps=sum(self.steps))

    def _begin(self, phase: str, round: int) -> None:
        super()._begin(phase, round)
        near = None if self.topology is None else self.topology(round)
        self.reach = {SERVER: self.ids} if near is None else {id: (id, *others) for id, others in near.items()}
        self.working, self.working_under_way = {}, dict(self.under_way)
        self.gathered: dict[str, list[Part]] = {}  # replies of the exchange under way, by who asked
        self.answering: set[str] = set()
        self.steps: list[int] = []  # of the loops of clients; they may be appended to from several threads

    def _random_outage(self, probability: float) -> Outage:
        def out(id: str, round: int, exchange: int) -> bool:
            return probability > 0 and self.rng("offline", id, round).uniform(1).item() < probability

        return out

    def _random_delay(self, longest: int) -> Delay:
        def late(id: str, round: int) -> int:
            return int(self.rng("delay", id, round).integers(longest + 1, 1)) if longest else 0

        return late

    # An exchange

    def waves(self, ask: Ask) -> list[Sequence[str]]:
        """Who is asked, one group after the other, so that the replies of a group fit into memory together.

        Where a layer wants to see all of them, or clients ask each other at the same time, there is one group.
        """
        near = self.reach.get(ask.node, self.ids)
        if strangers := sorted(set(ask.to).difference(self.info if near is self.ids else near)):
            raise ValueError(f"{self.method.name}: {ask.node} asked {strangers}, which it cannot reach")
        asked = self.layer.choose(self.here, sorted(ask.to))
        self.gathered[ask.node] = []
        if self.layer.wraps or self.topology is not None:
            return [asked]
        largest = max(codec.limit(ask.reply) for codec in self.codecs.values())
        count = max(SMALLEST_WAVE, REPLIES_TOGETHER[self.executor.place.device.type] // largest)
        return [asked[i : i + count] for i in range(0, max(1, len(asked)), count)]

    def deliver(self, ask: Ask, asked: Sequence[str]) -> list[Delivery]:
        """Pack each request once, count it for each site that is there, and start the sites' handlers."""
        packed: dict[tuple[int, str], tuple[Any, Size, Callable[[], Leaves]]] = {}
        deliveries: list[Delivery] = []
        sent: list[Sent] = []
        invitation = self.layer.invite(self.here, ask.reply, asked)
        for name in asked:
            if self._unreachable(ask.node, name):
                continue
            msg, model = ask.to[name], self.info[name]["model"]
            handler = self.handler(ask, name)
            if (key := (id(msg), model)) not in packed:
                leaves = self.codecs[model].pack(msg)
                received = self.codecs[model].unpack(type(msg), leaves)
                packed[key] = received, size(type(msg), leaves), partial(dict, leaves)
            received, cost, shown = packed[key]
            sent += [(ask.node, name, type(msg), cost, shown), *self.invitations(ask.node, name, invitation)]
            if self.layer.wraps:
                self.layer.site(name).hear(self.here, type(msg), shown())
            site, before = self._site(name)
            start = partial(counting, partial(answer, self.method, handler, site, received), self.steps.append)
            deliveries.append(Delivery(site, start, before, invitation))
        self.count_all("down", sent)
        return deliveries

    def take_in(self, ask: Ask, deliveries: Sequence[Delivery]) -> None:
        """Count the replies of a group; what is summed is kept of the groups before as a sum."""
        answered = [delivery for delivery in deliveries if not isinstance(delivery.reply, SiteFailure)]
        late = {d.site.id: rounds for d in answered if (rounds := self._lateness(ask.node, d.site.id))}
        replies = self._wrapped(ask, answered, late)
        for id, rounds in late.items():
            reply = {"due": self.round + rounds, "round": self.round, "type": tag_of(ask.reply)}
            self.working_under_way[f"{id} to {ask.node}"] = {**reply, "sender": id, "leaves": replies[id]}
        before = self.gathered[ask.node]
        now = [part for part in replies.parts if part.ids[0] not in late]  # who is late has a part of its own
        self.gathered[ask.node] = added_up(ask.reply, [*before, *now]) if before else now

    def collect(self, ask: Ask) -> Answers | TooFewAnswers:
        """Show the asker what it may see of all replies."""
        arrived = self._arrived(ask)
        parts = [*self.gathered.pop(ask.node), *(Part((id,), reply["leaves"]) for id, reply in arrived.items())]
        late_from = {id: reply["round"] for id, reply in arrived.items()}
        return self.answers(ask, Replies(parts), late_from, partial(self._trip, ask))

    def _wrapped(self, ask: Ask, answered: Sequence[Delivery], late: Collection[str]) -> Replies:
        """What travels from each site, counted; once more for all where a field did not fit."""
        parts = self._packed(answered, late)
        unfit: dict[str, Unfit] = {}
        if self.layer.wraps:
            invitations = {delivery.site.id: delivery.invitation for delivery in answered}
            wrapped: list[Part] = []
            for id, leaves in Replies(parts).items():
                try:
                    made = self.layer.site(id).wrap(self.here, invitations[id], ask.reply, leaves)
                    wrapped.append(Part((id,), made))
                except Unfit as error:
                    unfit[id] = error
            parts = wrapped
        replies, travels = Replies(parts), self.layer.form.travels(ask.reply)
        sizes = {id: made for part in parts for made in [size(travels, part.leaves, part.rows)] for id in part.ids}
        one = {id: partial(replies.__getitem__, id) for id in replies}
        self.count_all("up", [(id, ask.node, travels, sizes[id], one[id]) for id in replies])
        if self.layer.mend(ask.reply, unfit.values()):
            invitation = self.layer.invite(self.here, ask.reply, self.layer.choose(self.here, sorted(ask.to)))
            again = [replace(delivery, invitation=invitation) for delivery in answered]
            self.count_all("down", [sent for d in again for sent in self.invitations(ask.node, d.site.id, invitation)])
            return self._wrapped(ask, again, late)
        for id, why in unfit.items():
            raise FedgistError(f"round {self.round}, client {id}: {why}")
        return replies

    def _packed(self, answered: Sequence[Delivery], late: Collection[str]) -> list[Part]:
        """The packed replies; those that lie in a stack stay there, unless some are kept for a later round."""
        by_model: dict[str, dict[str, Any]] = {}
        for delivery in answered:
            by_model.setdefault(delivery.site.info["model"], {})[delivery.site.id] = delivery.reply
        parts = []
        for model, replies in by_model.items():
            codec = self.codecs[model]
            for group in by_stack(replies):
                if len(group) > 1 and not late and not self.layer.wraps and (joined := join(group)):
                    ids, rows = joined
                    parts.append(Part(ids, codec.pack(rows, summed=True, rows=True)))
                else:
                    parts += [Part((id,), codec.pack(msg, summed=id not in late)) for id, msg in group.items()]
        return parts

    def _trip(self, ask: Ask, messages: Mapping[str, Leaves], request: type, reply: type) -> dict[str, Leaves]:
        """Carry the layer's own messages to the sites that are there."""
        answers: dict[str, Leaves] = {}
        for id, leaves in sorted(messages.items()):
            self.count(ask.node, id, "down", request, leaves)
            answers[id] = self.layer.site(id).answer(self.here, request, leaves)
            self.count(id, ask.node, "up", reply, answers[id])
        return answers

    def _unreachable(self, node: str, id: str) -> bool:
        """Whether a site cannot be asked: it is away, the peer that asks is, or it still owes that one a reply.

        In an evaluation all are there: who happens to be away is no part of how good the models are.
        """
        if self.phase != "round":
            return False
        away = any(self.outage(end, self.round, self.exchange) for end in {node, id} - {SERVER})
        return away or f"{id} to {node}" in self.working_under_way

    def _lateness(self, node: str, id: str) -> int:
        return self.delay(id, self.round) if self.phase == "round" and id != node else 0

    def _arrived(self, ask: Ask) -> dict[str, Tree]:
        """The late replies that join this exchange, by sender."""
        if self.phase != "round":
            return {}
        due = [
            (reply["sender"], key)
            for key, reply in self.working_under_way.items()
            if key == f"{reply['sender']} to {ask.node}"
            if reply["due"] <= self.round and reply["type"] == tag_of(ask.reply)
        ]
        return {id: self.working_under_way.pop(key) for id, key in sorted(due)}

    def keep_states(self, deliveries: Sequence[Delivery]) -> None:
        """Take over the states that handlers left behind; only one handler of a site may change it in an exchange."""
        self.answering |= {d.site.id for d in deliveries if not isinstance(d.reply, SiteFailure)}
        changed: set[str] = set()
        for delivery in deliveries:
            if isinstance(delivery.reply, SiteFailure) or tree.same(delivery.site.state, delivery.before):
                continue
            if delivery.site.id in changed:
                raise RuntimeError(f"{self.method.name}: two nodes changed site {delivery.site.id} in one exchange")
            changed.add(delivery.site.id)
            self.site_states.release(delivery.site.id)
            self.working[delivery.site.id] = tree.map(_own, self._put(delivery.site.state))

    def end_exchange(self) -> None:
        self.exchange += 1
        self.answered = min(self.answered, len(self.answering))
        self.answering = set()

    def _site(self, id: str) -> tuple[Site, Tree]:
        """A site for a handler, and its state as it stands, which nobody changes: the handler gets new containers."""
        rng = client_rng(self.rng.root, id)
        state = self.working[id] if id in self.working else self.site_states.get(id)
        site = Site(id, self.round, self.data[id], {}, rng, self.info[id])
        if state is None:
            site.rng = rng("init")
            state = self.working[id] = self._put(self.method.client_init(site))
        site.state, site.rng = tree.copy(state), rng(self.phase, self.round, self.exchange)
        return site, state


def _own(leaf: Any) -> Any:
    """A leaf that is kept: a row would keep the stack that it is in."""
    return leaf.clone() if isinstance(leaf, Tensor) and leaf._base is not None else leaf


def run_rounds(engines: Sequence[LocalEngine]) -> list[RoundReport]:
    """One round of several federations (several seeds of a run) together, so that an executor may stack them."""
    with seldom_collected():
        begun = [(engine, engine.begin_round()) for engine in engines]
        runs = [(engine, node, role) for engine, roles in begun for node, role in roles.items()]
        outcomes = iter(_run_together(runs))
        return [engine.end_round({node: next(outcomes) for node in roles}) for engine, roles in begun]


def _run_together(runs: Sequence[tuple[LocalEngine, str, Role]]) -> list[Any]:
    """Drive round coroutines exchange by exchange, until each has returned or got too few answers."""
    executor = runs[0][0].executor
    outcomes: dict[int, Any] = {}
    inbox: dict[int, Any] = dict.fromkeys(range(len(runs)))
    try:
        while inbox:
            stops = executor.drive([until_ask(runs[i][2], value) for i, value in inbox.items()])
            asks = dict(zip(inbox, stops, strict=True))
            outcomes.update({i: stop.result for i, stop in asks.items() if isinstance(stop, Finished)})
            asks = {i: stop for i, stop in asks.items() if isinstance(stop, Ask)}
            for groups in zip_longest(*[runs[i][0].waves(ask) for i, ask in asks.items()]):
                _exchange(
                    [(runs[i][0], asks[i], group) for i, group in zip(asks, groups, strict=True) if group is not None]
                )
            inbox = {}
            for i, ask in asks.items():
                answers = runs[i][0].collect(ask)
                (outcomes if isinstance(answers, TooFewAnswers) else inbox)[i] = answers
            for engine in {runs[i][0] for i in asks}:
                engine.end_exchange()
    finally:
        for _, _, role in runs:
            role.close()
    return [outcomes[i] for i in range(len(runs))]


def _exchange(asked: Sequence[tuple[LocalEngine, Ask, Sequence[str]]]) -> None:
    """Have these sites answer what they are asked, all together."""
    deliveries = [engine.deliver(ask, group) for engine, ask, group in asked]
    everything = [delivery for each in deliveries for delivery in each]
    for delivery, reply in zip(everything, asked[0][0].executor.drive([d.answer() for d in everything]), strict=True):
        delivery.reply = reply
    for (engine, ask, _), each in zip(asked, deliveries, strict=True):
        engine.take_in(ask, each)
    for engine in {engine for engine, _, _ in asked}:
        engine.keep_states(
            [d for (one, _, _), each in zip(asked, deliveries, strict=True) if one is engine for d in each]
        )
