"""What a site runs: it holds an envelope against its policy, and lets the run that it is about answer.

One run is in memory; others are taken up from the disk.
"""

import logging
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from fedgist import storage
from fedgist.core.codec import Codec
from fedgist.core.message import WireError
from fedgist.core.method import Method
from fedgist.core.task import Model
from fedgist.data.client_data import ClientData
from fedgist.engines.layer import PlainSite, SiteLayer
from fedgist.engines.private import Promise
from fedgist.engines.scheduler import Executor
from fedgist.federation.protocol import network as networks
from fedgist.federation.protocol import private_sums
from fedgist.federation.protocol.deadline import within_seconds
from fedgist.federation.protocol.envelope import (
    NAME,
    PROTOCOL,
    Delivery,
    Header,
    Introduction,
    Question,
    Ready,
    Request,
    Start,
    Step,
    seal,
    unseal,
)
from fedgist.federation.protocol.host import Enrol, Host
from fedgist.federation.protocol.letters import Desk
from fedgist.federation.protocol.network import Network
from fedgist.federation.protocol.peer_site import PeerRun
from fedgist.federation.protocol.policy import Policy, Refused, leaves
from fedgist.federation.protocol.remote_engine import describe
from fedgist.federation.protocol.site_run import SiteRun
from fedgist.models.own_code import ELSEWHERE
from fedgist.options import options

log = logging.getLogger("fedgist")

Prepare = Callable[[Start], tuple[Method, ClientData]]
"""Builds the method of a run and loads the site's data for it."""

MakeLayer = Callable[[Start, Path], SiteLayer]
"""Makes a site's half of what lies between its replies and the server; the folder is the site's."""

MakeDesk = Callable[[Network], Desk]
"""Opens the desk at which a site seals its letters to other sites."""

Chosen = Callable[[tuple[int, ...], int], str]
"""The architecture that a site has chosen for inputs of a form and so many classes; empty: whatever the run says."""

TOKEN = re.compile(rb"[0-9a-f]{0,64}")
MOST_PEER_RUNS = 4
"""Runs without a server that may be under way at a time."""


def no_keys(start: Start, folder: Path) -> SiteLayer:
    """Replies travel as they are: a host without keys cannot do otherwise."""
    if start.layer:
        raise Refused("the run wants secure sums, for which this site has no keys")
    return PlainSite()


def no_desk(network: Network) -> Desk:
    """Without keys a site can write to nobody."""
    raise Refused("the run has no server, and this site no keys to seal letters with")


class SiteHost(Host):
    """Answers for a site."""

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
        super().__init__(id, folder, enrol)
        self.overdue: Callable[[], None] | None = None
        """What ends a computation that cannot be broken off; without it, it goes on and its answer is not sent."""
        self.prepare, self.executor, self.layer, self.desk = prepare, executor, layer, desk
        self.policy, self.model = policy or Policy(), model
        self._run: SiteRun | None = None
        self._peers: dict[str, PeerRun] = {}
        """Runs that have no server, the last one last: their rounds are under way, and in memory alone."""

    def close(self) -> None:
        """Says that a run is over, and where what it left lies."""
        if self._run is not None:
            run, kept = self._run.start.run, self._run.heard.is_file()
            how = f"; `fedgist site export` writes its model, from {self.folder_of(run)}" if kept else ""
            log.info(f"site {self.id}: {run} has ended{how}")
            self._run = None
            self._peers.pop(run, None)

    def recall(self, run: str) -> SiteRun:
        """A run that this site took part in, for the site itself: what is between it and others does not matter."""
        start = self._recall_start(run)
        return self._run_of(start, *self.prepare(start), PlainSite())

    def _forget(self) -> None:
        self._run = None
        self._peers.clear()

    def _answer(self, header: Header, payload: bytes) -> tuple[Header, bytes]:
        with within_seconds(self.policy.max_seconds, self.overdue):
            if isinstance(header, Question):
                self.policy.check_method(header.method)
                return Introduction(self.model(tuple(header.shape), header.classes)), self.enrol(payload)
            if isinstance(header, Start):
                if not TOKEN.fullmatch(payload):
                    raise WireError("Start: its token is not what it should be")
                run = self._run if self._run is not None and self._run.start == header else self._begin(header)
                run.begin(payload.decode())
                return Ready(), b""
            if isinstance(header, (Request, Step, Delivery)):
                return self._answer_in_run(header, payload)
            raise WireError(f"a site is not sent a {type(header).__name__}")

    def _answer_in_run(self, header: Request | Step | Delivery, payload: bytes) -> tuple[Header, bytes]:
        run = self._run
        if run is None or run.start.run != header.run:
            run = self._taken_up(header.run)
        peers = self._peers.get(header.run)
        if isinstance(header, Request):
            if peers is not None:
                peers.check_server(header)
            return run.answer(header, payload, self.policy)
        if peers is None:
            raise Refused("the run has a server: sites do not write to each other in it")
        run.check(header.token)
        if isinstance(header, Step):
            return peers.step(header, payload)
        return peers.answer(header, payload, self.policy)

    def _taken_up(self, run: str) -> SiteRun:
        """Another run than the present one: where it has no server from memory, if its round is under way."""
        if (peers := self._peers.pop(run, None)) is None:
            return self._begin(self._recall_start(run))
        self._peers[run], self._run = peers, peers.site
        return peers.site

    @property
    def spoken(self) -> int:
        return self._run.start.protocol if self._run else PROTOCOL

    def _begin(self, start: Start) -> SiteRun:
        self._run = None
        self._peers.pop(start.run, None)
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
        peers = PeerRun(run, network, self.desk(network), self.audit.write) if network else None
        leave = leaves(method, self.policy)
        seen = {"neighbours": network.possible(self.id, start.seed)} if network else {}
        note = {"run": start.run, "method": start.method, "model": start.model, "leave": leave, **seen}
        self.audit.note("leaves", kind="Leaves", **note)
        to = f" to {', '.join(seen['neighbours'])}, who see all of it" if seen else ""
        log.info(
            f"site {self.id} takes part in {start.run} with {start.model}; what may leave{to}: {' | '.join(leave)}"
        )
        self._run = run
        if peers is not None:
            self._peers[start.run] = peers
            for old in list(self._peers)[:-MOST_PEER_RUNS]:
                del self._peers[old]
        return run

    def _forget_old_runs(self, current: str) -> None:
        """Of all runs but the last few nothing is kept: a server could start as many as the disk holds."""

        def asked(path: Path) -> tuple[bool, float]:
            """The current one is the last, whatever a clock that was set back says."""
            return path.name == current, max(file.stat().st_mtime for file in [path, *path.iterdir()])

        for path in sorted((self.folder / "runs").glob("*/"), key=asked)[: -self.policy.max_runs]:
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
