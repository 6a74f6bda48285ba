"""The federation across machines: rounds are driven here, sites answer elsewhere, and a transport carries the bytes.

Whatever comes back is checked before it is believed: a reply that does not decode, holds numbers outside the range of
their field or is out of all proportion is that site's failure, is said so by name, and the exchange goes on without it.
This engine is the server; where sites ask each other, `peer_engine` conducts them.
"""

import json
import logging
import math
import secrets
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from torch import Tensor

from fedgist import storage
from fedgist.core import tree
from fedgist.core.codec import Leaves, to_bytes
from fedgist.core.errors import FedgistError
from fedgist.core.federation import SERVER, Answers, Ask, Site, TooFewAnswers
from fedgist.core.ledger import Ledger
from fedgist.core.message import WireError, tag_of
from fedgist.core.method import Method
from fedgist.core.task import Task
from fedgist.core.tree import Tree
from fedgist.engines.engine import Engine, RoundReport, SiteFailure, misfits, outliers
from fedgist.engines.layer import Layer, Unfit
from fedgist.engines.scheduler import Executor, Finished, Role, until_ask
from fedgist.federation.protocol.envelope import (
    AGAIN,
    PROTOCOL,
    Introduction,
    Question,
    Ready,
    Refusal,
    Reply,
    Request,
    Start,
    Unfitting,
    digest,
    seal,
    unseal,
)
from fedgist.options import options
from fedgist.words import plain

log = logging.getLogger("fedgist")

REFUSED = "refused: "

T = TypeVar("T")
H = TypeVar("H")


@dataclass(frozen=True)
class Asked:
    """A request that was sent, and what a reply to it has to name: the run, the version, the fingerprint."""

    envelope: bytes
    named: tuple[str, str, str]


@dataclass(frozen=True)
class Lost:
    """A site that cannot be reached, or did not answer in time."""

    why: str


class Transport(Protocol):
    """Carries envelopes to sites."""

    def exchange(self, requests: Mapping[str, bytes], timeout: float, enough: int) -> Mapping[str, "bytes | Lost"]:
        """Send each site its envelope and gather the answers, for at most `timeout` seconds.

        May return once `enough` sites have answered; sites that are neither here nor lost then are simply not in it.
        """


@dataclass(frozen=True)
class Patience:
    """How long to wait, for whom, and how much of one site to bear."""

    timeout: float = 600.0
    """Seconds until a site that does not answer is given up for the rest of the job."""
    enough: float = 1.0
    """The share of the asked sites whose answers suffice; below 1, ask more than needed and take the first."""
    sites: int = 1
    """The fewest sites to go on with."""
    max_norm: float = 100.0
    """How many times as large as the median of the round what a site adds may be, for its weight."""

    def count(self, asked: int, at_least: int) -> int:
        """How many answers end an exchange."""
        return min(asked, max(at_least, math.ceil(self.enough * asked)))


class RemoteEngine(Engine):
    """A federation whose sites are elsewhere. Their states stay with them; here is only which version is current."""

    def __init__(
        self,
        method: Method,
        transport: Transport,
        info: Mapping[str, Mapping[str, Any]],
        *,
        seed: int,
        executor: Executor,
        ledger: Ledger | None = None,
        patience: Patience | None = None,
        protocols: Mapping[str, int] | None = None,
        attend: "Callable[[Collection[str]], Attendance] | None" = None,
        layer: Layer | None = None,
    ):
        super().__init__(method, info, seed=seed, executor=executor, ledger=ledger, info=info, layer=layer)
        self.transport, self.patience = transport, patience or Patience()
        self.attend = attend or (lambda absent: Attendance())
        """Asked before each round who of the absent sites is there again, and who must go."""
        self.protocols = dict(protocols or {})
        """The version of the protocol that a site speaks, where that is not the one here."""
        self.run = f"{method.name}-{secrets.token_hex(8)}"
        self.states = {SERVER: self._put(method.server_init(self.rng(SERVER, "init")))}
        self.versions: dict[str, str] = {}
        """The committed version of each site's state; a site that is not in it has its first."""
        self.working: dict[str, str] = {}
        self.gone: dict[str, str] = {}
        """Sites that are not asked any more, and why."""
        self.lost: set[str] = set()
        """Those of them that could not be reached or understood, and are asked again once they can be."""
        self._started = False
        self._tokens: dict[str, str] = {}
        """That of the last start of each site."""
        self._kept: list[dict[str, str]] = []
        self.network: dict[str, Any] = {}
        """What sites are told of each other, where they ask each other."""

    def run_round(self) -> RoundReport:
        self._take_attendance()
        self._begin("round", self.rounds_done + 1)
        role = self.method.round(tree.copy(self.states[SERVER]), self._federation(SERVER, self.ids))
        outcome = self._drive(role)
        self.rounds_done += 1
        skipped = str(outcome) if isinstance(outcome, TooFewAnswers) else None
        if skipped is None:
            self.states[SERVER] = self._put(outcome)  # as after a resume
            self.versions.update(self.working)
        return RoundReport(self.rounds_done, self.answered, skipped, self.shown, dict(self.missing))

    def evaluate(self, test: tuple[Tensor, Tensor]) -> dict[str, float]:
        self._begin("evaluation", self.rounds_done)
        role = self.method.evaluate(self.state, self._federation(SERVER, self.ids), self._put(test))
        outcome = self._drive(role)
        if isinstance(outcome, TooFewAnswers):
            raise outcome
        return dict(outcome)

    def clients(self) -> Iterator[Site]:
        return iter(())

    def snapshot(self) -> Tree:
        """The sites' states are not in it, but which versions they must keep until the snapshot after the next."""
        self._kept = [*self._kept[-1:], dict(self.versions)]
        where = {"round": self.rounds_done, "run": self.run, "layer": self.layer.snapshot()}
        return {**where, "states": dict(self.states), "versions": dict(self.versions)}

    def restore(self, snapshot: Tree) -> None:
        self.rounds_done, self.run = snapshot["round"], snapshot["run"]
        self.states, self.versions = self._put(snapshot["states"]), dict(snapshot["versions"])
        self._kept, self._started = [dict(self.versions)], False
        self.layer.restore(snapshot.get("layer", {}))  # checkpoints from before have none

    def digest(self) -> str:
        return storage.digest([self.rounds_done, self.states])

    # A round

    def _take_attendance(self) -> None:
        """Sites that came late or came back join now; those that do not belong to the federation any more leave."""
        if not self._started:
            return
        found = self.attend(sorted(self.lost))
        for id, why in found.expelled.items():
            if id in self.ids and self.gone.get(id) != why:  # also of one that is lost already
                log.warning(f"site {id} {why}; the run goes on without it")
                self.gone[id] = why
        back = sorted(self.lost & found.back.keys() - found.expelled.keys())
        self.lost -= {*back, *found.expelled}
        for id in back:
            del self.gone[id]
            self.protocols[id] = found.back[id]
        if back:
            self._begin("round", self.rounds_done + 1)
            self._start(back)
            for id in back:
                if id not in self.gone:
                    log.warning(f"round {self.round}: site {id} is there again")
        self._check_enough()

    def _begin(self, phase: str, round: int) -> None:
        super()._begin(phase, round)
        self.working, self.missing = {}, dict(self.gone)

    def _drive(self, role: Role) -> Any:
        """Drive a round coroutine exchange by exchange, until it has returned or got too few answers."""
        value: Any = None
        try:
            while True:
                (stop,) = self.executor.drive([until_ask(role, value)])
                if isinstance(stop, Finished):
                    return stop.result
                value = self._ask(stop)
                if isinstance(value, TooFewAnswers):
                    return value
        finally:
            role.close()

    def _ask(self, ask: Ask) -> Answers | TooFewAnswers:
        """One exchange: pack and count the requests, have them carried, check and count the replies."""
        if strangers := sorted(set(ask.to) - set(self.ids)):
            raise ValueError(f"{self.method.name}: {ask.node} asked {strangers}, which it cannot reach")
        if not self._started:
            self._start(self.ids)
        packed: dict[tuple[int, str], tuple[Leaves, bytes]] = {}
        sent: dict[str, Asked] = {}
        to = self.layer.choose(self.here, sorted(set(ask.to) - self.gone.keys()))
        invited = self.layer.invite(self.here, ask.reply, to)
        invitation = self._invitation(invited)
        for name in to:
            self.handler(ask, name)
            msg, model = ask.to[name], self.info[name]["model"]
            if (key := (id(msg), model)) not in packed:
                leaves = self.codecs[model].pack(msg)
                packed[key] = leaves, to_bytes(type(msg), leaves)
            self.count(SERVER, name, "down", type(msg), packed[key][0])
            self.count_all("down", self.invitations(SERVER, name, invited))
            sent[name] = self._sealed(name, tag_of(type(msg)), invitation + packed[key][1], len(invitation))
        envelopes = {id: asked.envelope for id, asked in sent.items()}
        answers = self._exchange(envelopes, self.patience.count(len(sent), ask.at_least))
        unfit: dict[str, Unfit] = {}
        replies = self._replies(ask, sent, answers, unfit)
        for name, leaves in replies.items():
            self.count(name, SERVER, "up", self.layer.form.travels(ask.reply), leaves)
        if self.layer.mend(ask.reply, unfit.values()):
            return self._ask(ask)
        for name, error in unfit.items():
            self._miss(name, f"cannot answer: {error}")
        answered = self.answers(ask, replies, {}, self._trip)
        self.exchange += 1
        self.answered = min(self.answered, len(replies))
        return answered

    def _invitation(self, leaves: Leaves) -> bytes:
        return to_bytes(self.layer.form.invitation, leaves) if self.layer.form.invitation else b""

    def _trip(self, messages: Mapping[str, Leaves], request: type, reply: type) -> dict[str, Leaves]:
        """Carry the layer's own messages to sites; who does not answer one is not in what comes back."""
        asked: dict[str, Asked] = {}
        for id, leaves in sorted(messages.items()):
            self.count(SERVER, id, "down", request, leaves)
            asked[id] = self._sealed(id, tag_of(request), to_bytes(request, leaves))

        def read(id: str, data: bytes) -> Leaves:
            return self.codec_of(id).read(reply, _reply(data, asked[id])[1])

        envelopes = {id: one.envelope for id, one in asked.items()}
        found = self._call(envelopes, read, "did not help to open the sum")
        for id, leaves in found.items():
            self.count(id, SERVER, "up", reply, leaves)
        return found

    def _replies(
        self, ask: Ask, asked: Mapping[str, Asked], answers: Mapping[str, bytes], unfit: dict[str, Unfit]
    ) -> dict[str, Leaves]:
        """The replies that can be used; where one made a new version of a site's state, that is now its working one.

        A reply to anything else than what was asked, as one from before a resume, is none. Into `unfit` goes who could
        not wrap its reply.
        """
        travelling = self.layer.form.travels(ask.reply)
        changed: dict[str, str] = {}
        replies: dict[str, Leaves] = {}
        for id, data in sorted(answers.items()):
            try:
                header, payload = _reply(data, asked[id])
                replies[id] = self.codec_of(id).read(travelling, payload)
            except Unfit as error:
                unfit[id] = error
            except SiteFailure as failure:
                self._miss(id, why := str(failure))
                if self.layer.over(why):
                    self._leave_out(id, why)
                elif why == AGAIN:
                    self._leave_out(id, why, until_back=True)
            except WireError as error:
                self._miss(id, f"sent what cannot be used: {error}")
            else:
                changed |= {id: header.version} if header.changed else {}
        for id in misfits(travelling, replies):
            self._miss(id, f"sent {tag_of(ask.reply)} in another shape than the others")
            del replies[id]
        for id, what in outliers(travelling, replies, self.patience.max_norm).items():
            self._miss(id, f"sent {tag_of(ask.reply)} with {what}; more than {self.patience.max_norm:g} is --max-norm")
            del replies[id]
        self.working |= {id: version for id, version in changed.items() if id in replies}
        self._check_enough()
        return replies

    def _sealed(self, id: str, tag: str, payload: bytes, invited: int = 0) -> Asked:
        """A request to a site in this exchange; one with version 1 of the protocol knows no fingerprints."""
        keep = {version for kept in [*self._kept, self.versions] if (version := kept.get(id))}
        state, spoken = self.working.get(id, self.versions.get(id, "")), self.protocols.get(id, PROTOCOL)
        where = self.run, self.round, self.phase, self.exchange
        header = Request(*where, tag, state, sorted(keep), invited, self._tokens.get(id, ""))
        fingerprint = header.fingerprint(payload) if spoken > 1 else ""
        return Asked(seal(header, payload, spoken), (header.run, header.version, fingerprint))

    def _exchange(self, envelopes: Mapping[str, bytes], enough: int) -> dict[str, bytes]:
        """The envelopes of those who sent one back. Who is lost is not asked again; who is late only misses out."""
        if not envelopes:
            return {}
        answers = self.transport.exchange(envelopes, self.patience.timeout, enough)
        for id in sorted(envelopes):
            found = answers.get(id)
            if found is None:
                self._miss(id, "was not among the first to answer")
            elif isinstance(found, Lost) and id not in self.ids:
                self._miss(id, found.why)
            elif isinstance(found, Lost):
                self._leave_out(id, found.why, until_back=True)
                self._miss(id, f"{found.why}; the run goes on without it until it is back")
        self._check_enough()
        return {id: found for id, found in answers.items() if id in envelopes and isinstance(found, bytes)}

    def _call(self, envelopes: Mapping[str, bytes], read: Callable[[str, bytes], T], failed: str) -> dict[str, T]:
        """Send each its envelope; what is read in what comes back, by site. Who `failed` is missing."""
        found: dict[str, T] = {}
        for id, data in sorted(self._exchange(envelopes, len(envelopes)).items()):
            try:
                found[id] = read(id, data)
            except (SiteFailure, WireError) as error:
                self._miss(id, f"{failed}: {error}")
                if str(error) == AGAIN and id in self.ids:
                    self._leave_out(id, AGAIN, until_back=True)
        return found

    def _leave_out(self, id: str, why: str, until_back: bool = False) -> None:
        """Ask a site no more, or not until it can be asked again."""
        self.gone[id] = plain(why)
        if until_back:
            self.lost.add(id)

    def _miss(self, id: str, why: str) -> None:
        why = plain(why)
        if self.missing.get(id) != why:  # once a round, however many exchanges it has
            log.warning(f"{self.phase} {self.round}: site {id} {why}")
        self.missing[id] = why

    # The beginning of a run

    def _start(self, ids: Iterable[str]) -> None:
        """Tell sites what this run is; those that will not or cannot take part are left out, and named."""
        self._started = True
        starts: dict[str, bytes] = {}
        for id in ids:
            if id in self.gone:
                continue
            start = Start(
                run=self.run,
                method=self.method.name,
                seed=self.rng.root,
                model=self.info[id]["model"],
                options={name: getattr(self.method.config, name) for name in options(self.method.config)},
                task=describe(self.method.task) | self.network,
                layer=json.dumps(told) if (told := self.layer.describe()) else "",
            )
            spoken = self.protocols.get(id, PROTOCOL)
            self._tokens[id] = secrets.token_hex(8) if spoken > 1 else ""
            starts[id] = seal(start, self._tokens[id].encode(), spoken)
        for id, answer in self._exchange(starts, len(starts)).items():
            try:
                open_as(Ready, answer, starts[id])
            except (WireError, SiteFailure) as error:
                self._leave_out(id, str(error), until_back=isinstance(error, WireError))  # what was damaged
                self._miss(id, f"does not take part: {error}")
        self._check_enough()

    def _check_enough(self) -> None:
        """A run with too few sites stops where it is, rather than skip what is left of it."""
        if len(self.ids) - len(self.gone) < self.patience.sites:
            reasons = "; ".join(f"{id}: {why}" for id, why in sorted(self.gone.items()))
            raise FedgistError(
                f"too few sites are left (--min-sites {self.patience.sites}; {reasons}); go on with --resume"
            )


def ask_introductions(
    transport: Transport, ids: Iterable[str], question: Question, timeout: float, roster: bytes = b""
) -> dict[str, "Introduced | Lost"]:
    """What each site would run, or why it does not take part. Who cannot read this is asked in the version before."""
    found: dict[str, Introduced | Lost] = {}
    unclear = list(ids)
    for protocol in (PROTOCOL, PROTOCOL - 1):
        asked = dict.fromkeys(unclear, seal(question, roster if protocol > 1 else b"", protocol))
        unclear = []
        for id, answer in (transport.exchange(asked, timeout, len(asked)) if asked else {}).items():
            try:
                found[id] = answer if isinstance(answer, Lost) else _introduced(answer, asked[id])
            except (WireError, SiteFailure) as error:
                found[id] = Lost(plain(str(error)))
                unclear += [id] if protocol == PROTOCOL and not str(error).startswith(REFUSED) else []
    return found


@dataclass(frozen=True)
class Attendance:
    """Who has come and who must go."""

    back: Mapping[str, int] = field(default_factory=dict)
    """Sites that can be asked again, and the version of the protocol that they speak."""
    expelled: Mapping[str, str] = field(default_factory=dict)
    """Sites that must not be asked any more, and why."""


@dataclass(frozen=True)
class Introduced:
    """What a site says of itself."""

    model: str
    protocol: int
    announced: bytes
    """Its public keys for the roster, if it announces any."""


def _introduced(answer: bytes, asked: bytes) -> Introduced:
    header, payload = open_as(Introduction, answer, asked)
    return Introduced(plain(header.model, 100), header.protocol, payload)


def describe(task: Task) -> dict[str, Any]:
    """What a site is told of the task; of the server's unlabelled images only whether there are any."""
    return {
        "shape": list(task.shape),
        "classes": task.classes,
        "low": list(task.low),
        "high": list(task.high),
        "mean": list(task.mean),
        "std": list(task.std),
        "models": list(task.models),
        "model": task.model,
        "proxy": task.proxy is not None,
    }


def _reply(data: bytes, asked: Asked) -> tuple[Reply, bytes]:
    """The reply, if it is one to that request."""
    header, payload = open_as(Reply, data, asked.envelope)
    if (header.run, header.version, header.request) != asked.named:
        raise WireError("it answers another request")
    return header, payload


def open_as(kind: type[H], data: bytes, asked: bytes) -> tuple[H, bytes]:
    """The envelope, if it is of that kind; a refusal of what was asked becomes the error that it tells."""
    header, payload = unseal(data)
    if isinstance(header, (Unfitting, Refusal)) and header.request not in ("", digest(asked)):
        raise WireError(f"it answers another request, or one that was damaged: {header.why}")
    if isinstance(header, Unfitting):
        raise Unfit(plain(header.why), header.field, header.needed)
    if isinstance(header, Refusal):
        raise SiteFailure(f"{REFUSED}{header.why}" if header.refused else header.why)
    if not isinstance(header, kind):
        raise WireError(f"expected {kind.__name__}, got {type(header).__name__}")
    return header, payload
