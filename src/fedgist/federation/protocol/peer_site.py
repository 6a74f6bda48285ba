"""A site in a run without a server: it drives its own rounds, asks its neighbours by letters, and answers theirs.

The coordinator says when to go on (`Step`) and brings letters (`Delivery`); between two steps all letters of an
exchange have been carried, so that everybody answers from the state before it, exactly as in one process. A site that
was killed has its states on disk, and begins again with a round; in the middle of one it waits for the next.
"""

import csv
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

from fedgist.core import tree
from fedgist.core.codec import Leaves, size, to_bytes
from fedgist.core.federation import Answers, Ask, TooFewAnswers
from fedgist.core.ledger import Ledger, Totals
from fedgist.core.message import WireError, tag_of
from fedgist.core.tree import Tree
from fedgist.engines.engine import Asker, SiteFailure, misfits, outliers
from fedgist.engines.layer import version_of
from fedgist.engines.scheduler import Finished, Role, until_ask
from fedgist.families.evaluation import Hits, Score
from fedgist.federation.protocol.answered import Seen
from fedgist.federation.protocol.envelope import (
    Delivered,
    Delivery,
    Reply,
    Request,
    Step,
    Stepped,
    seal,
    unseal,
)
from fedgist.federation.protocol.letters import About, Desk, bundle, nonce_of, unbundle
from fedgist.federation.protocol.network import Network
from fedgist.federation.protocol.policy import Policy, Refused
from fedgist.federation.protocol.site_run import SiteRun
from fedgist.words import plain

ASKED, FINISHED, SKIPPED = "asked", "finished", "skipped"
SCORES = {tag_of(Score), tag_of(Hits)}
"""The replies that go to the coordinator, which adds them up."""
MOST = 100.0
"""How many times as large as the median of the neighbourhood what a neighbour adds may be, for its weight."""

Note = Callable[..., None]
"""Writes a letter into the audit log: its direction, its bytes, and what is known about it."""


class PeerRun(Asker):
    """One run, as a site takes part in it."""

    def __init__(self, site: SiteRun, network: Network, desk: Desk, note: Note):
        start, info = site.start, {id: {"model": model} for id, model in network.models.items()}
        super().__init__(site.method, info, seed=start.seed, executor=site.executor, info=info)
        self.site, self.desk, self.note, self.run, self.me = site, desk, note, start.run, site.id
        self.topology = network.over_time(start.seed)
        first = self.method.server_init(self.rng(self.me, "init"))
        self.nodes = site.states.beside("node", first)
        """What LocalEngine calls the state of a node: the one of whoever drives a round."""
        self.seen = Seen(site.states.folder / "letters.txt")
        self.path = site.states.folder / "ledger.csv"
        self._role: Role | None = None
        self._ask: Ask | None = None
        self._own: dict[str, Leaves] = {}
        self._sent: dict[str, tuple[str, str]] = {}
        """To whom letters are under way: their nonces, and the fingerprints of the requests in them."""
        self._changed_by: dict[str, str] = {}
        self._rows: list[list[Any]] = []
        self.missing: dict[str, str] = {}

    def check_server(self, header: Request) -> None:
        """Whether the coordinator may ask this: scores of an evaluation, which it adds up, and what opens their sum."""
        own = {tag_of(request) for request in self.site.layer.form.own}
        handler = self.site.handlers.get(header.type)
        if header.type not in own and (handler is None or tag_of(handler.reply) not in SCORES):
            raise Refused(f"in a run without a server nobody but neighbours gets an answer to {header.type}")
        if header.phase != "evaluation":
            raise Refused("in a run without a server nobody but neighbours asks in a round")

    # Its own round

    def step(self, header: Step, payload: bytes) -> tuple[Stepped, bytes]:
        """Go on until the next exchange: with what the neighbours answered, or from the beginning of the round."""
        rows = _before(self.path, header.round) if header.exchange == 0 else _all(self.path)
        with closing(Ledger(self.path, self.run, position=rows)) as self.ledger:
            return self._step(header, *unbundle(payload))

    def _step(self, header: Step, told: Mapping[str, Any], letters: Mapping[str, bytes]) -> tuple[Stepped, bytes]:
        version = version_of("round", header.round, header.exchange)
        self._rows, self.missing = [], {}
        value: Answers | TooFewAnswers | None = None
        if header.exchange == 0:
            self._begin_round(header)
        else:
            value = self._collect(header, told, letters)
        assert self._role is not None
        how, sealed, changed = SKIPPED, dict[str, bytes](), False
        if not isinstance(value, TooFewAnswers):
            (stop,) = self.executor.drive([until_ask(self._role, value)])
            if isinstance(stop, Finished):
                how = FINISHED
                self.nodes.put(version, stop.result)
                self.nodes.forget(version, {header.node, *header.keep})
            else:
                how, self._ask = ASKED, stop
                sealed, changed = self._write(stop, header, version)
        if how != ASKED:
            self._role.close()
            self._role, self._own = None, {}
        self.site.forget(version, header.state, header.keep)
        report = {"rows": self._rows, "missing": self.missing, "why": plain(str(value)) if how == SKIPPED else ""}
        return Stepped(self.run, version, how, bool(self._own), changed), bundle(report, sealed)

    def _begin_round(self, header: Step) -> None:
        self._begin("round", header.round)
        if self._role is not None:  # one that came to no end
            self._role.close()
        self._changed_by, self._sent = {}, {}
        ids = (self.me, *self.topology(header.round)[self.me])
        self._role = self.method.round(tree.copy(self.nodes.get(header.node)), self._federation(self.me, ids))

    def _write(self, ask: Ask, header: Step, version: str) -> tuple[dict[str, bytes], bool]:
        """Letters to those neighbours that are there, and whether asking itself changed this site's state."""
        near = {self.me, *self.topology(header.round)[self.me]}
        if strangers := sorted(set(ask.to) - near):
            raise ValueError(f"{self.method.name}: {self.me} asked {strangers}, which it cannot reach")
        sealed: dict[str, bytes] = {}
        self._own, self._sent, changed = {}, {}, False
        for name in sorted(ask.to):
            handler, msg = self.handler(ask, name), ask.to[name]
            leaves = self.codec_of(name).pack(msg)
            data = to_bytes(type(msg), leaves)
            request = Request(self.run, header.round, "round", header.exchange, tag_of(type(msg)), "", [])
            if name == self.me:
                try:
                    self._own[name], state = self.site.reply(handler, replace(request, state=header.state), data)
                    changed = self._keep(version, state, name)
                except SiteFailure as failure:
                    self.missing[name] = plain(str(failure))
            elif name in header.here:
                self.count(self.me, name, "down", type(msg), leaves)
                sealed[name] = self.desk.seal(About(self.run, version, self.me, name), seal(request, data))
                fingerprint = request.fingerprint(data)
                self._sent[name] = nonce_of(sealed[name]), fingerprint
                self._note("out", sealed[name], version, name, request.type)
        return sealed, changed

    def _collect(self, header: Step, told: Mapping[str, Any], letters: Mapping[str, bytes]) -> Answers | TooFewAnswers:
        """What the neighbours answered; the exchange goes on without those whose letters cannot be used."""
        ask = self._ask
        if self._role is None or ask is None or (self.round, self.exchange + 1) != (header.round, header.exchange):
            raise SiteFailure(f"it is not in the middle of round {header.round}, and waits for the next")
        version = version_of("round", self.round, self.exchange)
        replies = dict(self._own)
        for name, letter in sorted(letters.items()):
            try:
                if name not in self._sent:
                    raise WireError("a letter from who was not asked")
                nonce, fingerprint = self._sent[name]
                data = self.desk.open(About(self.run, version, name, self.me, nonce), letter)
                self._note("in", letter, version, name, tag_of(ask.reply))
                replies[name] = self._read(name, ask, data, version, fingerprint)
            except (WireError, Refused) as error:
                self.missing[name] = plain(f"sent {self.me} what cannot be used: {error}")
        for name in sorted(self._sent.keys() - letters.keys()):
            why = told.get("absent", {}).get(name)
            self.missing[name] = plain(why) if isinstance(why, str) else "did not answer"
        for name in misfits(ask.reply, replies):
            self.missing[name] = f"sent {self.me} {tag_of(ask.reply)} in another shape than the others"
            del replies[name]
        for name, what in outliers(ask.reply, replies, MOST).items():
            self.missing[name] = f"sent {self.me} {tag_of(ask.reply)} with {what}"
            del replies[name]
        for name, leaves in sorted(replies.items()):
            self.count(name, self.me, "up", ask.reply, leaves)
        self.exchange += 1
        self._ask, self._sent = None, {}
        return self.answers(ask, replies, {}, lambda messages, request, reply: {})

    def _read(self, name: str, ask: Ask, data: bytes, version: str, fingerprint: str) -> Leaves:
        header, payload = unseal(data)
        asked = self.run, version, fingerprint
        if not isinstance(header, Reply) or (header.run, header.version, header.request) != asked:
            raise WireError("it answers another request")
        return self.codec_of(name).read(ask.reply, payload)

    # What its neighbours ask

    def answer(self, header: Delivery, payload: bytes, policy: Policy) -> tuple[Delivered, bytes]:
        """The letters back. Who is refused one is told so by the coordinator, in words that are not secret."""
        _, letters = unbundle(payload)
        version = version_of("round", header.round, header.exchange)
        sealed, refused, changed = dict[str, bytes](), dict[str, str](), False
        for name, letter in sorted(letters.items()):
            try:
                sealed[name], new = self._answer(header, version, name, letter, policy)
                changed = changed or new
            except (Refused, SiteFailure, WireError) as error:
                refused[name] = plain(str(error))
        self.site.forget(version, header.state, header.keep)
        return Delivered(self.run, version, changed), bundle({"refused": refused}, sealed)

    def _answer(self, header: Delivery, version: str, name: str, letter: bytes, policy: Policy) -> tuple[bytes, bool]:
        if name not in self.topology(header.round)[self.me]:
            raise Refused(f"{name} is no neighbour of this site in round {header.round}")
        data = self.desk.open(About(self.run, version, name, self.me), letter)
        self.seen.note(nonce_of(letter))
        request, body = unseal(data)
        if not isinstance(request, Request) or (request.run, request.version) != (self.run, version):
            raise WireError("a letter about something else")
        self._note("in", letter, version, name, request.type)
        if request.type not in self.site.handlers:
            raise WireError(f"{self.method.name} has no request {request.type}")
        handler = self.site.handlers[request.type]
        policy.check_reply(handler)
        asked = replace(request, state=header.state)
        leaves, state = self.site.reply(handler, asked, body, f"{version}@{name}")
        changed = self._keep(version, state, name)
        fingerprint = request.fingerprint(body)
        reply = seal(
            Reply(self.run, version, tag_of(handler.reply), changed, fingerprint), to_bytes(handler.reply, leaves)
        )
        sealed = self.desk.seal(About(self.run, version, self.me, name, nonce_of(letter)), reply)
        self._note("out", sealed, version, name, tag_of(handler.reply))
        return sealed, changed

    def _keep(self, version: str, state: Tree | None, by: str) -> bool:
        """Keep a new state of this site's client; only one handler may change it in an exchange."""
        if state is None:
            return False
        if self._changed_by.setdefault(version, by) != by:
            raise SiteFailure(f"{self.method.name}: two nodes changed site {self.me} in one exchange")
        self.site.states.put(version, state)
        return True

    def count(self, sender: str, receiver: str, direction: str, cls: type, leaves: Leaves) -> None:
        super().count(sender, receiver, direction, cls, leaves)
        if sender != receiver:
            found = size(cls, leaves)
            other = receiver if sender == self.me else sender
            self._rows.append(
                [self.exchange, direction, other, tag_of(cls), found.header, found.payload, found.numbers]
            )

    def _note(self, direction: str, letter: bytes, version: str, name: str, type: str) -> None:
        self.note(direction, letter, kind="Letter", run=self.run, version=version, neighbour=name, type=type)


def _before(path: Path, round: int) -> dict[str, Any] | None:
    """Where the rows of the rounds before end: a round that is made again is counted once."""
    if not path.is_file():
        return None
    end = 0
    with path.open("rb") as file:
        for number, line in enumerate(file):
            row = next(csv.reader([line.decode("utf-8", "replace")]), [])
            if not line.endswith(b"\n") or (
                number and not (len(row) > 1 and row[1].isdecimal() and int(row[1]) < round)
            ):
                break
            end += len(line)
    return {"bytes": end, "totals": vars(Totals())} if end else None


def _all(path: Path) -> dict[str, Any] | None:
    return {"bytes": path.stat().st_size, "totals": vars(Totals())} if path.is_file() else None
