"""What a site runs: it takes an envelope, checks it and its policy, lets the method answer, keeps the client's state.

The site's randomness derives from the run's seed and its own name exactly as in one process, so that both give the
same. States are files under (run, phase, round, exchange); the server says from which to start, so a reply that was
lost, a round that was skipped or a server that was restarted leaves no trace, and a restarted site finds its way back.
"""

import dataclasses
import fcntl
import hashlib
import logging
import re
import secrets
import shutil
import threading
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from fedgist import storage
from fedgist.core import tree
from fedgist.core.codec import Codec, Leaves, to_bytes
from fedgist.core.federation import Site
from fedgist.core.message import Params, WireError, tag_of
from fedgist.core.method import Handler, Method
from fedgist.core.tree import Tree
from fedgist.data.client_data import ClientData
from fedgist.dp import randomness
from fedgist.engines.engine import SiteFailure, answer, client_rng
from fedgist.engines.layer import Exchange, PlainSite, SiteLayer, Unfit
from fedgist.engines.scheduler import Executor
from fedgist.federation.protocol import network as networks
from fedgist.federation.protocol import private_sums
from fedgist.federation.protocol.answered import Answered
from fedgist.federation.protocol.audit import Audit
from fedgist.federation.protocol.deadline import within_seconds
from fedgist.federation.protocol.envelope import (
    AGAIN,
    PROTOCOL,
    Delivery,
    Header,
    Introduction,
    Question,
    Ready,
    Refusal,
    Reply,
    Request,
    Start,
    Step,
    Unfitting,
    digest,
    seal,
    unseal,
)
from fedgist.federation.protocol.letters import Desk
from fedgist.federation.protocol.network import Network
from fedgist.federation.protocol.peer_site import PeerRun
from fedgist.federation.protocol.policy import Policy, Refused, leaves
from fedgist.secure.graph import Refused as NoSum
from fedgist.words import plain

log = logging.getLogger("fedgist")

Prepare = Callable[[Start], tuple[Method, ClientData]]
"""Builds the method of a run and loads the site's data for it."""

MakeLayer = Callable[[Start, Path], SiteLayer]
"""Makes a site's half of what lies between its replies and the server; the folder is the site's."""

MakeDesk = Callable[[Network], Desk]
"""Opens the desk at which a site seals its letters to other sites."""

Enrol = Callable[[bytes], bytes]
"""Takes note of a roster, if there is one, and gives what the site announces as its keys, if it has any."""

Chosen = Callable[[tuple[int, ...], int], str]
"""The architecture that a site has chosen for inputs of a form and so many classes; empty: whatever the run says."""

TOKEN = re.compile(rb"[0-9a-f]{0,64}")
PHASES = ("round", "evaluation")
STARTS = 1000
"""Of so many starts of a run a late copy is known."""
RESTING = 3
"""Runs without a server that may be under way beside another."""
NEWER = 8
"""States kept that are newer than what is asked for: the request may be an old one that was long on its way."""


def no_keys(start: Start, folder: Path) -> SiteLayer:
    """Replies travel as they are: a host without keys cannot do otherwise."""
    if start.layer:
        raise Refused("the run wants secure sums, for which this site has no keys")
    return PlainSite()


def no_desk(network: Network) -> Desk:
    """Without keys a site can write to nobody."""
    raise Refused("the run has no server, and this site no keys to seal letters with")


class States:
    """The versions of a client's state in one run, on disk and in memory."""

    def __init__(self, folder: Path, first: Tree, put: Callable[[Tree], Tree]):
        self.folder, self._put = folder, put
        self._known = {"": put(first)}

    def beside(self, name: str, first: Tree) -> "States":
        """Versions of another state of the same run."""
        return States(self.folder / name, first, self._put)

    def get(self, version: str) -> Tree:
        if version not in self._known:
            path = self._path(version)
            if not path.is_file():
                raise SiteFailure(f"it does not hold its state {version} any more")
            self._known[version] = self._put(storage.load(path))
        return self._known[version]

    def put(self, version: str, state: Tree) -> None:
        here = self._put(state)
        storage.save(here, self._path(version))
        self._known[version] = here

    def forget(self, now: str, keep: Collection[str]) -> None:
        """Of the states that were before `now` only those to keep stay; of those after it, the last few do."""
        others = {path.stem for path in self.folder.glob("*.safetensors")} | self._known.keys()
        others -= {"", now, *keep}
        newer = sorted((version for version in others if _when(version) > _when(now)), key=_when)
        for version in others - set(newer[-NEWER:]):
            self._known.pop(version, None)
            self._path(version).unlink(missing_ok=True)

    def _path(self, version: str) -> Path:
        return self.folder / f"{version}.safetensors"


def _when(version: str) -> tuple[int, bool, int]:
    """The place of a version in its run; a round is evaluated after it."""
    phase, round, exchange = version.rsplit("-", 2)
    return int(round), phase == "evaluation", int(exchange)


class SiteRun:
    """One run, as a site takes part in it."""

    def __init__(
        self,
        id: str,
        start: Start,
        method: Method,
        data: ClientData,
        executor: Executor,
        folder: Path,
        layer: SiteLayer,
    ):
        self.id, self.start, self.method, self.data, self.executor = id, start, method, data, executor
        self.layer = layer
        self.codec = Codec({**method.bounds(start.model), **layer.form.bounds}, executor.place)
        self.handlers = {tag_of(handler.request): handler for handler in method.handlers.values()}
        first = method.client_init(self._site(0, None, "init"))
        self.states = States(folder, first, executor.place.put)
        self.answered = Answered(folder / "answered.txt")
        self._tokens_file = folder / "starts.txt"
        self._tokens = self._tokens_file.read_text().split("\n") if self._tokens_file.is_file() else [""]
        """Of the starts of this run, as they came; servers of before have none, which is the empty one."""
        self._judged: Request | None = None
        with suppress(OSError, WireError):  # none yet, or a damaged one
            self._judged = self._last_judged()[0]

    def begin(self, token: str) -> None:
        """A server begins with this run, or goes on with it; a copy of a start that was followed by another is late."""
        if token != self._tokens[-1] and (not token or token not in self._tokens):
            tokens = [*self._tokens, token][-STARTS:]
            with storage.replacing(self._tokens_file) as draft:
                draft.write_text("\n".join(tokens))
            self._tokens = tokens

    def check(self, token: str) -> None:
        """Refuses what a server asks that began before the last one: it does not know what that one needs."""
        if token != self._tokens[-1]:
            raise SiteFailure(AGAIN)

    def answer(self, header: Request, payload: bytes, policy: Policy) -> tuple[Reply, bytes]:
        self.check(header.token)
        here = Exchange(header.run, header.phase, header.round, header.exchange)
        fingerprint = header.fingerprint(hashlib.sha256(payload).hexdigest())
        for request, own in self.layer.form.own.items():
            if header.type == tag_of(request):
                answered = self.layer.answer(here, request, self.codec.read(request, payload))
                return Reply(header.run, header.version, tag_of(own), False, fingerprint), to_bytes(own, answered)
        invitation, payload = self._invitation(payload[: header.invited]), payload[header.invited :]
        if header.type not in self.handlers or header.phase not in PHASES:
            raise WireError(f"{self.method.name} has no request {header.type} in a {header.phase}")
        handler = self.handlers[header.type]
        policy.check_reply(handler)
        leaves, state = self.reply(handler, header, payload, header.version)
        question = f"{header.type} {header.state} {hashlib.sha256(payload).hexdigest()}"
        here = dataclasses.replace(here, scopes=(question, self.answered.digest(header.version)))
        wrapped = self.layer.wrap(here, invitation, handler.reply, leaves)
        travels = self.layer.form.travels(handler.reply)
        packed = to_bytes(travels, wrapped)
        if changed := state is not None:
            self.states.put(header.version, state)
        if header.phase == "evaluation" and (self._judged is None or header.round >= self._judged.round):
            with storage.replacing(self.heard) as draft:
                draft.write_bytes(seal(dataclasses.replace(header, invited=0), payload))
            self._judged = header
        self.forget(header.version, header.state, header.keep)
        return Reply(header.run, header.version, tag_of(travels), changed, fingerprint), packed

    def reply(self, handler: Handler, header: Request, payload: bytes, once: str = "") -> tuple[Leaves, Tree | None]:
        """A packed reply, and the state that it leaves behind, if that is a new one.

        Under the name `once` only this request is ever answered, and only so; one without a name leaves the site not.
        """
        asked = header.fingerprint(hashlib.sha256(payload).hexdigest())
        if once:
            self.answered.check(once, asked)
        msg: Any = self.codec.decode(handler.request, payload)
        before = self.states.get(header.state)
        site = self._site(header.round, tree.copy(before), header.phase, header.round, header.exchange)
        if self.method.task.private:
            site.secret = partial(self._secret_bits, header.version, asked)
        (reply,) = self.executor.drive([answer(self.method, handler, site, msg)])
        if isinstance(reply, SiteFailure):
            raise reply
        leaves = self.codec.pack(reply)
        if once:
            self.answered.note(once, asked, to_bytes(handler.reply, leaves))
        return leaves, None if tree.same(site.state, before) else site.state

    def forget(self, version: str, state: str, keep: Collection[str]) -> None:
        """Of the states before a version, keep these, and the one that was judged last."""
        self.states.forget(version, {state, *keep, self._judged.state if self._judged else ""})

    def _secret_bits(self, version: str, asked: str, name: str) -> Callable[[int], Tensor]:
        """Random bits for one answer: the same if the same is asked again, and known to nobody else."""
        key, device = private_sums.own_secret(self.states.folder), self.executor.place.device
        return randomness.keyed(key, version, asked, name, device=device)

    def _invitation(self, data: bytes) -> Leaves:
        """What the layer goes by; a server that leaves it out wants the reply itself."""
        kind = self.layer.form.invitation
        return self.codec.read(kind, data) if kind else {}

    @property
    def heard(self) -> Path:
        """The last request of an evaluation, which says what state was judged, in which round, and with what."""
        return self.states.folder / "evaluation.envelope"

    def weights(self) -> tuple[Params | None, int]:
        """The site's whole model as it was judged last, where it keeps one, and the round of that."""
        if not self.heard.is_file():
            raise SiteFailure(
                "no model of this site was judged yet; where the server has one, it is in its run's folder"
            )
        header, payload = self._last_judged()
        msg: Any = self.codec.decode(self.handlers[header.type].request, payload)
        sent = {name: w for field in vars(msg).values() if isinstance(field, dict) for name, w in field.items()}
        site = self._site(header.round, tree.copy(self.states.get(header.state)), header.phase, header.round)
        return tree.to(self.method.client_weights(site, sent), "cpu"), header.round

    def _last_judged(self) -> tuple[Request, bytes]:
        header, payload = unseal(self.heard.read_bytes())
        if not isinstance(header, Request):
            raise WireError(f"{self.heard} holds a {type(header).__name__}")
        return header, payload

    def _site(self, round: int, state: Tree, *stream: str | int) -> Site:
        rng = client_rng(self.start.seed, self.id)(*stream)
        return Site(self.id, round, self.data, state, rng, {"model": self.start.model})


class SiteHost:
    """Answers envelopes, one at a time, whatever is in them."""

    def __init__(
        self,
        id: str,
        folder: Path,
        prepare: Prepare,
        executor: Executor,
        policy: Policy | None = None,
        model: Chosen = lambda shape, classes: "",
        enrol: Enrol = lambda roster: b"",
        layer: MakeLayer = no_keys,
        desk: MakeDesk = no_desk,
    ):
        self.overdue: Callable[[], None] | None = None
        """What ends a computation that cannot be broken off; without it, it goes on and its answer is not sent."""
        self.desk = desk
        self.id, self.folder, self.prepare, self.executor, self.layer = id, folder, prepare, executor, layer
        self.policy, self.model, self.enrol = policy or Policy(), model, enrol
        self.audit = Audit(folder / "audit.jsonl")
        self._lock, self._me = threading.Lock(), secrets.token_hex(8).encode()
        self._run: SiteRun | None = None
        self._peers: PeerRun | None = None
        """The same run, where it has no server."""
        self._resting: dict[str, tuple[SiteRun, PeerRun]] = {}
        """Others that have none, in the middle of a round."""

    def close(self) -> None:
        """Says that a run is over, and where what it left lies."""
        if self._run is not None:
            run, kept = self._run.start.run, self._run.heard.is_file()
            how = f"; `fedgist site export` writes its model, from {self._folder(run)}" if kept else ""
            log.info(f"site {self.id}: {run} has ended{how}")
            self._run = self._peers = None

    def recall(self, run: str) -> SiteRun:
        """A run that this site took part in, for the site itself: its policy is about others."""
        start = self._recall_start(run)
        return self._prepared(start, *self.prepare(start))

    def handle(self, data: bytes) -> bytes:
        """The answer to an envelope; bad ones, requests outside the policy and failures get a refusal."""
        with self._lock:
            try:
                with self._alone():
                    return self._noted(data)
            except OSError as error:  # what cannot be noted does not leave; that it could not, may
                return seal(self._refusal(error, data))

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Wait while another process answers for this site, as one whose job has lost it; then what it did is read."""
        with (self.folder / "answering").open("a+b") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            file.seek(0)
            if file.read() != self._me:
                self._run = self._peers = None
                self._resting.clear()
                file.truncate(0)
                file.write(self._me)
                file.flush()
            yield

    def _noted(self, data: bytes) -> bytes:
        about: dict[str, Any] = {"kind": "unreadable"}
        payload, spoken = b"", PROTOCOL
        try:
            header, body = unseal(data)
        except WireError as error:
            self.audit.write("in", data, **about)
            answered: Header = self._refusal(error, data)
        else:
            about = _about(header)
            self.audit.write("in", data, **about)
            try:
                with within_seconds(self.policy.max_seconds, self.overdue):
                    answered, payload = self._answer(header, body)
            except Exception as error:
                answered = self._refusal(error, data)
            spoken = header.protocol if isinstance(header, (Question, Start)) else self._spoken
        sealed = seal(answered, payload, spoken)
        self.audit.write("out", sealed, **{**about, **_about(answered)})
        return sealed

    def _answer(self, header: Header, payload: bytes) -> tuple[Header, bytes]:
        if isinstance(header, Question):
            self.policy.check_method(header.method)
            return Introduction(self.model(tuple(header.shape), header.classes)), self.enrol(payload)
        if isinstance(header, Start):
            if not TOKEN.fullmatch(payload):
                raise WireError("Start: its token is not what it should be")
            if self._run is None or self._run.start != header:
                self._rest()
                self._resting.pop(header.run, None)
                self._run = self._begin(header)
            self._run.begin(payload.decode())
            return Ready(), b""
        if isinstance(header, (Request, Step, Delivery)):
            if self._run is None or self._run.start.run != header.run:
                self._rest()
                if header.run in self._resting:
                    self._run, self._peers = self._resting.pop(header.run)
                else:
                    self._run = self._begin(self._recall_start(header.run))
            if isinstance(header, Request):
                if self._peers is not None:
                    self._peers.check_server(header)
                return self._run.answer(header, payload, self.policy)
            if self._peers is None:
                raise Refused("the run has a server: sites do not write to each other in it")
            self._run.check(header.token)
            if isinstance(header, Step):
                return self._peers.step(header, payload)
            return self._peers.answer(header, payload, self.policy)
        raise WireError(f"a site is not sent a {type(header).__name__}")

    def _rest(self) -> None:
        """Lay the present run aside for another, if it cannot be taken up from the disk: its round is under way."""
        if self._run is not None and self._peers is not None:
            self._resting[self._run.start.run] = self._run, self._peers
            for run in list(self._resting)[:-RESTING]:
                del self._resting[run]
        self._run = self._peers = None

    @property
    def _spoken(self) -> int:
        """The version of the protocol that the server of the present run speaks."""
        return self._run.start.protocol if self._run else PROTOCOL

    def _begin(self, start: Start) -> SiteRun:
        self.policy.check_method(start.method)
        method, data = self.prepare(start)
        own = self.model(method.task.shape, method.task.classes)
        if own and start.model != own:
            raise Refused(
                f"this site runs {own}, and the run wants {start.model} of it: start the site without a model"
            )
        self.policy.check_run(method)
        if network := networks.asked(start):
            networks.check(network, self.id, start, method, self.policy)
        for draft in self._folder(start.run).glob(".*"):  # of a process that was killed
            draft.unlink()
        run = self._prepared(start, method, self.policy.admit(data, method.task.private))
        with storage.replacing(self._folder(start.run) / "start.envelope") as draft:
            draft.write_bytes(seal(start))
        self._forget_old_runs(start.run)
        self._peers = PeerRun(run, network, self.desk(network), self.audit.write) if network else None
        leave = leaves(method, self.policy)
        seen = {"neighbours": network.possible(self.id, start.seed)} if network else {}
        note = {"run": start.run, "method": start.method, "model": start.model, "leave": leave, **seen}
        self.audit.note("leaves", kind="Leaves", **note)
        to = f" to {', '.join(seen['neighbours'])}, who see all of it" if seen else ""
        log.info(
            f"site {self.id} takes part in {start.run} with {start.model}; what may leave{to}: {' | '.join(leave)}"
        )
        return run

    def _forget_old_runs(self, current: str) -> None:
        """Of all runs but the last few nothing is kept: a server could start as many as the disk holds."""

        def asked(path: Path) -> tuple[bool, float]:
            """The current one is the last, whatever a clock that was set back says."""
            return path.name == current, max(file.stat().st_mtime for file in [path, *path.iterdir()])

        for path in sorted((self.folder / "runs").iterdir(), key=asked)[: -self.policy.max_runs]:
            shutil.rmtree(path, ignore_errors=True)

    def _prepared(self, start: Start, method: Method, data: ClientData) -> SiteRun:
        place = self.executor.place
        here = data.to(place.device, place.dtype)
        folder = self._folder(start.run)
        promise = private_sums.asked(start)
        inner = self.layer(private_sums.without(start), self.folder)
        codec = Codec({**method.bounds(start.model), **inner.form.bounds}, place)
        layer = private_sums.site_layer(inner, promise, method, codec, self.folder, folder, self.policy)
        return SiteRun(self.id, start, method, here, self.executor, folder, layer)

    def _recall_start(self, run: str) -> Start:
        """The start of a run that another process of this site answered."""
        path = self._folder(run) / "start.envelope"
        start = unseal(path.read_bytes())[0] if path.is_file() else None
        if not isinstance(start, Start):
            raise WireError(f"the run {run} was never started here")
        return start

    def _folder(self, run: str) -> Path:
        return self.folder / "runs" / run

    def _refusal(self, error: Exception, data: bytes) -> Refusal | Unfitting:
        """What the server is told. Of an unexpected error only its kind: its words may be about the site's data."""
        why = plain(" ".join([str(error) or type(error).__name__, *getattr(error, "__notes__", ())]), 1000)
        refused = isinstance(error, (Refused, NoSum))
        log.error(f"site {self.id}: {'refused' if refused else 'failed'}: {why}")
        if isinstance(error, Unfit):
            # What the field holds is the site's own affair; the power of two that it needs is not.
            told = f"{error.field} needs a range of ±2^{error.needed}"
            return Unfitting(error.field, error.needed, told, digest(data))
        if not refused and not isinstance(error, (WireError, SiteFailure)):
            return Refusal(False, f"it failed ({type(error).__name__}); the log of the site says more", digest(data))
        return Refusal(refused, plain(str(error)), digest(data))


def _about(header: Header) -> dict[str, Any]:
    """What the audit log says about an envelope."""
    fields = vars(header)
    names = ("run", "method", "round", "phase", "exchange", "type", "version", "changed", "refused", "why")
    return {"kind": type(header).__name__, **{name: fields[name] for name in names if name in fields}}
