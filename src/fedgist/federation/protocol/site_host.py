"""What a site runs: it takes an envelope, checks it and its policy, and lets the run that it is about answer.

Every envelope that comes and goes is in the audit log. One run is in memory; others are taken up from the disk.
"""

import fcntl
import logging
import re
import secrets
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from fedgist import storage
from fedgist.core.codec import Codec
from fedgist.core.message import WireError
from fedgist.core.method import Method
from fedgist.core.task import Model
from fedgist.data.client_data import ClientData
from fedgist.engines.engine import SiteFailure
from fedgist.engines.layer import PlainSite, SiteLayer, Unfit
from fedgist.engines.private import Promise
from fedgist.engines.scheduler import Executor
from fedgist.federation.protocol import network as networks
from fedgist.federation.protocol import private_sums
from fedgist.federation.protocol.audit import Audit
from fedgist.federation.protocol.deadline import within_seconds
from fedgist.federation.protocol.envelope import (
    NAME,
    PROTOCOL,
    Delivery,
    Header,
    Introduction,
    Question,
    Ready,
    Refusal,
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
from fedgist.federation.protocol.remote_engine import describe
from fedgist.federation.protocol.site_run import SiteRun
from fedgist.models.own_code import ELSEWHERE
from fedgist.options import options
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
RESTING = 3
"""Runs without a server that may be under way beside another."""


def no_keys(start: Start, folder: Path) -> SiteLayer:
    """Replies travel as they are: a host without keys cannot do otherwise."""
    if start.layer:
        raise Refused("the run wants secure sums, for which this site has no keys")
    return PlainSite()


def no_desk(network: Network) -> Desk:
    """Without keys a site can write to nobody."""
    raise Refused("the run has no server, and this site no keys to seal letters with")


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
            how = f"; `fedgist site export` writes its model, from {self.folder_of(run)}" if kept else ""
            log.info(f"site {self.id}: {run} has ended{how}")
            self._run = self._peers = None

    def recall(self, run: str) -> SiteRun:
        """A run that this site took part in, for the site itself: what is between it and others does not matter."""
        start = self._recall_start(run)
        return self._run_of(start, *self.prepare(start), PlainSite())

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
        promise = private_sums.check(start, self.policy)
        method, data = self.prepare(start)
        own = self.model(method.task.shape, method.task.classes)
        if own and start.model != own:
            raise Refused(
                f"this site runs {own}, and the run wants {start.model} of it: start the site without a model"
            )
        self.policy.check_run(method)
        if network := networks.asked(start):
            networks.check(network, self.id, start, method, self.policy)
        for draft in self.folder_of(start.run).glob(".*"):  # of a process that was killed
            draft.unlink()
        admitted = self.policy.admit(data, method.task.private)
        run = self._run_of(start, method, admitted, self._layer_of(start, method, promise))
        storage.write(self.folder_of(start.run) / "start.envelope", seal(start))
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

    def _layer_of(self, start: Start, method: Method, promise: Promise | None) -> SiteLayer:
        said = plain_start(start, method) if start.layer else start
        inner = self.layer(private_sums.without(said), self.folder)
        codec = Codec({**method.bounds(start.model), **inner.form.bounds}, self.executor.place)
        return private_sums.site_layer(inner, promise, method, codec, self.folder, start, self.policy)

    def _run_of(self, start: Start, method: Method, data: ClientData, layer: SiteLayer) -> SiteRun:
        place = self.executor.place
        here = data.to(place.device, place.dtype)
        return SiteRun(self.id, start, method, here, self.executor, self.folder_of(start.run), layer)

    def _recall_start(self, run: str) -> Start:
        """The start of a run that another process of this site answered."""
        path = self.folder_of(run) / "start.envelope"
        start = unseal(path.read_bytes())[0] if path.is_file() else None
        if not isinstance(start, Start):
            raise WireError(f"the run {run} was never started here")
        return start

    def folder_of(self, run: str) -> Path:
        """Where a run's files lie; its name may come from elsewhere, also in an option."""
        if not NAME.fullmatch(run):
            raise WireError(f"no run can be called {run[:100]!r}")
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


def plain_start(start: Start, method: Method) -> Start:
    """The start of a run in one way of saying it, of the many in which a server could: as it was understood here.

    Options that are as they are without saying so are left out, so that one which came later changes nothing.
    """
    known, network = options(method.config), networks.asked(start)
    said = {name: getattr(method.config, name) for name in known}
    chosen = {name: _unsigned(value) for name, value in said.items() if value != known[name].default}
    task = {name: _unsigned(value) for name, value in describe(method.task).items()}
    task |= {"models": sorted({_form(*one) for one in method.task.models.items()}), "model": ""}
    task |= network.describe() if network else {}
    return replace(start, options=chosen, task=task, protocol=PROTOCOL)


def _form(spec: str, model: Model) -> str:
    """What a model is, however its options are written; of one that is code, what all have been told."""
    return spec if spec.partition(":")[0] == ELSEWHERE else f"{model.name} {sorted(model.shapes.items())}"


def _unsigned(value: Any) -> Any:
    """Zero has no sign that means anything."""
    if isinstance(value, (tuple, list)):
        return [_unsigned(part) for part in value]
    return value + 0.0 if isinstance(value, float) else value


def _about(header: Header) -> dict[str, Any]:
    """What the audit log says about an envelope."""
    fields = vars(header)
    names = ("run", "method", "round", "phase", "exchange", "type", "version", "changed", "refused", "why")
    return {"kind": type(header).__name__, **{name: fields[name] for name in names if name in fields}}
