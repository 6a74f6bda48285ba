"""A job that holds sites: what it tells them, and when it gives one up. NVFlare's own proxies, and a wire to cut."""

import json
import logging
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("nvflare", reason="needs NVFlare: pip install 'fedgist[nvflare]'")

from nvflare.apis.client import Client
from nvflare.apis.fl_context import FLContextManager
from nvflare.apis.signal import Signal
from nvflare.apis.workspace import Workspace
from nvflare.collab import collab
from nvflare.collab.api.app import ClientApp, ServerApp
from nvflare.collab.runtime.controller import CollabController
from nvflare.collab.runtime.defs import CallReplyKey, ObjectCallKey
from nvflare.collab.runtime.lifecycle import run_server
from nvflare.fuel.f3.cellnet.defs import MessageHeaderKey, ReturnCode
from nvflare.fuel.f3.message import Message

from fedgist.core.errors import FedgistError
from fedgist.federation.protocol import flare_link, flare_transport
from fedgist.federation.protocol.flare_link import FlareServer
from fedgist.federation.protocol.flare_transport import FlareTransport, Link
from fedgist.federation.protocol.framing import read, write


class Site:
    def __init__(self) -> None:
        self.rested = 0

    @collab.publish
    def answer(self, envelope: bytes) -> bytes:
        return envelope.upper()

    @collab.publish
    def here(self) -> bytes:
        return b"here"

    @collab.publish
    def rest(self) -> bytes:
        self.rested += 1
        return b""


class SiteOfBefore:
    @collab.publish
    def answer(self, envelope: bytes) -> bytes:
        return envelope


class Wire:
    """Where NVFlare hands its calls over; what is sent to a site that is cut off gets no answer."""

    def __init__(self, sites: dict[str, Any]):
        self.sites, self.cut = sites, set[str]()

    def get_fqcn(self) -> str:
        return "server.job"

    def send_request(self, target: str, request: Message, timeout: float, **_: Any) -> Message:
        site = target.split(".")[0]
        if site in self.cut:
            time.sleep(timeout)
            return Message({MessageHeaderKey.RETURN_CODE: ReturnCode.TIMEOUT}, None)
        told = request.payload
        result = getattr(self.sites[site], told[ObjectCallKey.METHOD_NAME])(**told[ObjectCallKey.KWARGS])
        return Message({}, {CallReplyKey.RESULT: result})


@contextmanager
def serving(address: Path, wire: Wire) -> Iterator[None]:
    """The job as NVFlare's controller begins it once all sites have said what can be called there."""
    controller = CollabController()
    controller.cell = wire
    controller.server_app = app = ServerApp(FlareServer(str(address)))
    context, signal = FLContextManager(SimpleNamespace()).new_context(), Signal()
    proxies = []
    for name, site in wire.sites.items():
        client = Client(name, "token")
        client.set_fqcn(name)
        client.set_fqsn(name)
        told = ClientApp(site).get_collab_interface()
        proxies.append(controller._prepare_client_proxy("job", client, told, signal, context))
    server = controller._prepare_server_proxy("job", signal, app.get_collab_interface(), context)
    with tempfile.TemporaryDirectory() as folder:
        for needed in ("startup", "local"):
            (Path(folder) / needed).mkdir()
        app.setup(Workspace(folder), server, proxies, signal)
    job = threading.Thread(target=run_server, args=(app, logging.getLogger("test")), daemon=True)
    job.start()
    try:
        yield
    finally:
        address.unlink(missing_ok=True)
        job.join(10)
        controller.stop_controller(context)


def held(address: Path) -> set[str]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as link:
        link.connect(str(address))
        with link.makefile("rwb") as stream:
            return set(json.loads(read(stream) or b"[]"))


@pytest.fixture
def address() -> Iterator[Path]:
    """The name of a socket has at most about 100 letters."""
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder) / "1.link"


def within(seconds: float, condition: Callable[[], bool]) -> bool:
    until = time.monotonic() + seconds
    while not condition() and time.monotonic() < until:
        time.sleep(0.02)
    return condition()


def test_a_site_that_is_gone_is_given_up_before_anybody_asks_it(
    address: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """One that was started again would not get a job otherwise; one that cannot say whether it is here is believed."""
    monkeypatch.setattr(flare_link, "PING", 0.05)
    monkeypatch.setattr(flare_link, "PATIENCE", 0.1)
    wire = Wire({"a": Site(), "b": Site(), "old": SiteOfBefore()})
    with serving(address, wire):
        assert within(10, address.exists)
        time.sleep(0.5)
        assert held(address) == {"a", "b", "old"}
        wire.cut = {"b", "old"}
        assert within(10, lambda: held(address) == {"a", "old"})
        time.sleep(0.5)
        assert held(address) == {"a", "old"}
    assert "site b does not answer any more" in caplog.text


def test_a_job_that_hangs_holds_no_run_up(address: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its process is stopped or swapped out: who connects waits, and is told nothing; later, in the midst of a run."""
    monkeypatch.setattr(flare_transport, "SPEAKS", 0.2)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as door:
        door.bind(str(address))
        door.listen(8)
        transport = FlareTransport(address.parent)
        assert transport.refresh() == set()
        door.accept()[0].close()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(flare_transport, "SPEAKS", 5.0)
            threading.Thread(target=transport.refresh).start()
            with door.accept()[0] as link, link.makefile("rwb") as stream:
                write(stream, b'["a"]')
                assert within(10, lambda: transport.sites == {"a"})
                patch.undo()
                with pytest.raises(FedgistError, match="the NVFlare server ended the job"):
                    transport.exchange({"a": b"x"}, 0.2, 1)
        transport.close()


def test_a_run_that_ends_leaves_another_alone(address: Path) -> None:
    """A site that is told to rest lays down what it has under way, whosever it is."""
    sites = {"a": Site(), "b": Site()}
    with serving(address, Wire(sites)):
        assert within(10, address.exists)
        first, second = Link(address), Link(address)
        assert first.exchange({"a": b"x", "b": b"x"}, 5, 2) == {"a": b"X", "b": b"X"}
        assert second.exchange({"a": b"y"}, 5, 1) == {"a": b"Y"}
        first.close()
        assert within(10, lambda: sites["b"].rested == 1)
        time.sleep(0.3)
        assert sites["a"].rested == 0
        second.close()
        assert within(10, lambda: sites["a"].rested == 1)
