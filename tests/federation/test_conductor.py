"""Jobs that stay and hold sites: who gets one, what a driver's end of them does, and what is left of a dead one."""

import contextlib
import json
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("nvflare", reason="needs NVFlare: pip install 'fedgist[nvflare]'")

from fedgist.core.errors import FedgistError
from fedgist.federation import conductor as conductors
from fedgist.federation.conductor import FRESH, SILENT, Conductor
from fedgist.federation.leftovers import KEPT, STORE
from fedgist.federation.listener import REVOKED
from fedgist.federation.protocol.flare_transport import CUT, FlareTransport
from fedgist.federation.protocol.framing import HEARD, LINKS, read, write
from fedgist.federation.protocol.remote_engine import Lost


class Job:
    """What listens where a job of NVFlare would: its sites say their own name, in upper case, or nothing."""

    def __init__(self, address: Path, sites: list[str]):
        self.sites, self.silent, self.gone, self.ending = sites, set[str](), set[str](), False
        """Those that say nothing, those given up, and whether it still tells whom it holds, but carries nothing."""
        self.door = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.door.bind(str(address))
        self.door.listen()
        self.links: list[socket.socket] = []
        self.serving = threading.Thread(target=self._serve, daemon=True)
        self.serving.start()

    def _serve(self) -> None:
        while True:
            try:
                link, _ = self.door.accept()
            except OSError:
                return
            self.links.append(link)
            threading.Thread(target=self._attend, args=(link,), daemon=True).start()

    def _attend(self, link: socket.socket) -> None:
        try:
            with link.makefile("rwb") as stream:
                write(stream, json.dumps(self.sites).encode())
                while (order := read(stream)) is not None and not self.ending:
                    told = json.loads(order)
                    for site in told["sites"]:
                        sent = read(stream) or b""
                        time.sleep(told["timeout"] if site in self.silent else 0)
                        lost = site in self.silent | self.gone
                        write(stream, json.dumps({"site": site, "lost": lost}).encode(), b"" if lost else sent.upper())
                    write(stream, b"{}")
            if self.ending:
                self._close(link)
        except OSError:
            return

    def end(self) -> None:
        self._close(self.door)  # who waits in accept is woken, and takes no more links
        self.serving.join()
        for link in self.links:
            self._close(link)

    @staticmethod
    def _close(one: socket.socket) -> None:
        with contextlib.suppress(OSError):  # its other end has gone, or it was ended before
            one.shutdown(socket.SHUT_RDWR)
        one.close()


@pytest.fixture
def begin(short_folder: Path) -> Iterator[Callable[..., Job]]:
    jobs: list[Job] = []

    def make(name: str, *sites: str) -> Job:
        jobs.append(Job(short_folder / f"{name}.link", list(sites)))
        return jobs[-1]

    yield make
    for job in jobs:
        job.end()


@pytest.fixture
def short_folder() -> Iterator[Path]:
    """The name of a socket has at most about 100 letters."""
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder)


def test_a_driver_asks_the_sites_of_all_jobs(short_folder: Path, begin: Callable[..., Job]) -> None:
    begin("1", "a", "b")
    transport = FlareTransport(short_folder)
    assert transport.wait({"a", "b", "c"}, 0.2) == {"a", "b"}
    sent = {site: site.encode() for site in "abcd"}
    found = transport.exchange(sent, 5, 4)
    assert found == {"a": b"A", "b": b"B", "c": Lost("is not connected"), "d": Lost("is not connected")}
    late = begin("2", "c")
    assert transport.refresh() == {"a", "b", "c"}
    late.silent.add("c")
    assert transport.exchange(sent, 0.2, 4)["c"] == Lost("did not answer within 0.2 s")
    assert transport.sites == {"a", "b"}  # whom a job has lost, another one holds when it is back
    begin("3", "c")
    transport.refresh()
    assert transport.exchange(sent, 5, 4)["c"] == b"C"
    transport.close()


def test_a_job_that_dies_takes_only_its_own_sites_along(short_folder: Path, begin: Callable[..., Job]) -> None:
    first, second = begin("1", "a"), begin("2", "b")
    transport = FlareTransport(short_folder)
    assert transport.refresh() == {"a", "b"}
    second.end()
    assert transport.exchange({"a": b"a", "b": b"b"}, 5, 2) == {"a": b"A", "b": Lost("lost its connection")}
    first.end()
    with pytest.raises(FedgistError, match="the NVFlare server ended the job"):
        transport.exchange({"a": b"a"}, 5, 1)
    transport.close()


def test_the_sites_of_a_job_that_ended_are_asked_again_in_another(
    short_folder: Path, begin: Callable[..., Job]
) -> None:
    """Where nobody looks after them any more, or one does not come back, they are lost as before."""
    first, _ = begin("1", "a", "b"), begin("2", "c")
    begun: list[Job] = []

    def looked_after() -> bool:
        if not begun:
            begin("3", "a", "b").ending = True
            begun.append(begin("4", "a", "b"))
        return True

    transport = FlareTransport(short_folder, looked_after)
    transport.refresh()
    first.end()
    sent = {site: site.encode() for site in "abc"}
    assert transport.exchange(sent, 5, 3) == {"a": b"A", "b": b"B", "c": b"C"}
    begun[0].end()
    assert transport.exchange(sent, 0.1, 3) == {"a": CUT, "b": CUT, "c": b"C"}
    transport.close()


def test_a_site_that_its_job_cannot_reach_is_asked_again_in_another(
    short_folder: Path, begin: Callable[..., Job]
) -> None:
    """As one that was started again a moment ago; where it is not needed, nobody waits for it."""
    first = begin("1", "a", "b")
    first.gone.add("b")
    begun: list[Job] = []

    def looked_after() -> bool:
        begun.extend([] if begun else [begin("2", "b")])
        return True

    sent = {site: site.encode() for site in "ab"}
    alone = FlareTransport(short_folder)
    alone.refresh()
    assert alone.exchange(sent, 5, 2) == {"a": b"A", "b": CUT}
    alone.close()
    transport = FlareTransport(short_folder, looked_after)
    transport.refresh()
    assert transport.exchange(sent, 5, 2) == {"a": b"A", "b": b"B"}
    begun[0].gone.add("b")
    before = time.monotonic()
    assert transport.exchange(sent, 60, 1) == {"a": b"A", "b": CUT}
    assert time.monotonic() - before < 30
    transport.close()


@pytest.mark.parametrize(("noted", "waits"), [("a\nb", True), ("a", False), ("", False)])
def test_a_lost_site_is_waited_for_while_it_is_heard(
    short_folder: Path, begin: Callable[..., Job], noted: str, waits: bool
) -> None:
    """The process that answers for it may have died alone, and then another does so soon."""
    begin("1", "a", "b").gone.add("b")
    (short_folder / HEARD).write_text(noted)
    transport, before = FlareTransport(short_folder, lambda: True), time.monotonic()
    transport.refresh()
    assert transport.exchange({site: site.encode() for site in "ab"}, 3.0, 2) == {"a": b"A", "b": CUT}
    assert (time.monotonic() - before > 2.5) == waits
    transport.close()


class Session:
    """What NVFlare knows: who was heard when, and jobs that are running."""

    def __init__(self) -> None:
        self.heard: dict[str, float] = {}
        self.jobs: list[set[str]] = []
        self.disabled: list[str] = []
        self.ended: set[str] = set()

    def disable_client(self, site: str) -> None:
        self.disabled.append(site)

    def get_connected_client_list(self) -> list[Any]:
        return [SimpleNamespace(name=name, last_connect_time=when) for name, when in self.heard.items()]

    def submit_job(self, folder: str) -> str:
        named = json.loads((Path(folder) / "meta.json").read_text())["deploy_map"]["app"]
        self.jobs.append(set(named) - {"server"})
        return str(len(self.jobs))

    def get_job_status(self, job: str) -> str:
        return "FINISHED:ABNORMAL" if job in self.ended else "RUNNING"


@pytest.fixture
def conductor(tmp_path: Path, short_folder: Path) -> Conductor:
    (tmp_path / "federation.toml").write_text('sites = ["a", "b", "c"]\n')
    return Conductor(tmp_path, short_folder, Session())


def test_sites_that_come_together_share_a_job(conductor: Conductor) -> None:
    session = conductor.session
    session.heard = {"a": time.time(), "stranger": time.time()}
    conductor.step(0.0)
    session.heard["b"] = time.time()
    conductor.step(1.0)
    conductor.step(2.0)
    assert session.jobs == []  # somebody else may come
    conductor.step(3.0)
    assert session.jobs == [{"a", "b"}]
    session.heard["c"] = time.time()
    conductor.step(4.0)
    assert session.jobs == [{"a", "b"}, {"c"}]  # all are here: nobody else is waited for
    conductor.step(10.0)
    assert len(session.jobs) == 2


def test_a_job_that_comes_while_others_are_looked_at_is_not_begun_twice(
    conductor: Conductor, begin: Callable[..., Job], monkeypatch: pytest.MonkeyPatch
) -> None:
    conductor.session.heard = dict.fromkeys("abc", time.time())
    conductor.step(0.0)
    with monkeypatch.context() as patch:
        patch.setattr(conductor, "_look", lambda: begin("1", "a", "b", "c") and {})
        conductor.step(1.0)
    conductor.step(2.0)
    assert conductor.session.jobs == [{"a", "b", "c"}] and conductor.begun == {}


def test_a_site_whose_job_does_not_begin_keeps_nobody_else_from_one(
    conductor: Conductor, begin: Callable[..., Job], capsys: pytest.CaptureFixture[str]
) -> None:
    """And is tried less and less often: each job leaves something on the disks of server and site."""
    session = conductor.session
    session.heard = dict.fromkeys("abc", time.time() + 60)
    conductor.step(0.0)
    session.ended = {"1"}
    for moment in (1.0, 5.0, 7.0, 9.0):
        conductor.step(moment)
    assert session.jobs == [{"a", "b", "c"}, {"a"}, {"b"}, {"c"}]
    assert capsys.readouterr().out == ""
    begin("2", "a")
    begin("4", "c")
    session.ended = {str(number) for number in range(1, 20)} - {"2", "4"}
    for moment in range(10, 1000, 5):
        conductor.step(float(moment))
    assert session.jobs[4:] == [{"b"}] * 10
    told = capsys.readouterr().out
    assert "warning: site b cannot begin" in told and "again in 120 s" in told
    begin("99", "b")
    conductor.step(1000.0)
    assert not conductor.failed


def test_each_job_that_begins_removes_what_old_ones_left(conductor: Conductor) -> None:
    store = conductor.federation / "server" / STORE
    names = [f"00000000-0000-0000-0000-{number:012d}" for number in range(3 * KEPT)]
    for name in names:
        (store / name).mkdir(parents=True)
        (store / name / "meta").write_text(
            json.dumps({"status": "FINISHED:ABORTED" if name != names[1] else "RUNNING"})
        )
    conductor.step(0.0)
    assert len([*store.iterdir()]) == len(names)
    conductor.session.heard = dict.fromkeys("abc", time.time())
    conductor.step(1.0)
    assert conductor.session.jobs and len([*store.iterdir()]) == KEPT + 1 and (store / names[1]).is_dir()


def test_a_lost_site_gets_a_job_once_it_is_heard_again(conductor: Conductor, begin: Callable[..., Job]) -> None:
    session = conductor.session
    session.heard = dict.fromkeys("abc", time.time())
    conductor.step(0.0)
    job = begin("1", "a", "b", "c")
    conductor.step(1.0)
    assert session.jobs == [{"a", "b", "c"}]
    job.sites.remove("b")
    for moment in (2.0, 4.0, 6.0):
        conductor.step(moment)
    assert len(session.jobs) == 1  # the last that was heard of it is from before it was lost
    session.heard["b"] = time.time() + 1
    conductor.step(8.0)
    assert session.jobs[1:] == [{"b"}]


def test_nobody_waits_for_a_site_that_was_not_heard_for_long(conductor: Conductor) -> None:
    conductor.session.heard = {"a": time.time() - 60}
    for moment in (0.0, 3.0, 6.0):
        conductor.step(moment)
    assert conductor.session.jobs == []


def test_who_was_heard_of_late_is_noted(conductor: Conductor, short_folder: Path) -> None:
    """Also one that gets no job at the moment, as it was not heard for a while."""
    heard = {"a": 0.0, "b": (FRESH + SILENT) / 2, "c": SILENT + 1}
    conductor.session.heard = {site: time.time() - ago for site, ago in heard.items()}
    conductor.step(0.0)
    assert (short_folder / HEARD).read_text().split() == ["a", "b"]
    conductor.session.heard = {}
    conductor.step(1.0)
    assert (short_folder / HEARD).read_text() == "" and {one.name for one in short_folder.iterdir()} == {HEARD}


def test_the_socket_of_a_dead_job_goes_and_its_sites_get_another(
    conductor: Conductor, begin: Callable[..., Job], short_folder: Path
) -> None:
    begin("7", "a").end()
    conductor.session.heard = {"a": time.time() + 1}
    conductor.step(0.0)
    conductor.step(2.0)
    assert not (short_folder / "7.link").exists() and conductor.session.jobs == [{"a"}]


def test_a_job_that_is_busy_is_left_alone(
    conductor: Conductor, short_folder: Path, begin: Callable[..., Job], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its socket stays, for without it the job would end, and its sites are not given another."""
    begin("1", "a")
    conductor.session.heard = {"a": time.time() + 9}
    conductor.step(0.0)

    def busy(stream: Any) -> bytes:
        raise TimeoutError

    monkeypatch.setattr("fedgist.federation.conductor.read", busy)
    for moment in (2.0, 4.0):
        conductor.step(moment)
    assert (short_folder / "1.link").exists() and conductor.session.jobs == []


def test_a_job_with_a_queue_at_its_door_is_left_alone(conductor: Conductor, short_folder: Path) -> None:
    conductor.holding = {short_folder / "1.link": {"a"}}
    with contextlib.ExitStack() as stack:
        door = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
        door.bind(str(short_folder / "1.link"))
        door.listen(0)
        stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)).connect(str(short_folder / "1.link"))
        conductor.step(0.0)
    assert (short_folder / "1.link").exists() and conductor.holding == {short_folder / "1.link": {"a"}}


def test_a_revoked_site_gets_no_job_and_loses_its_connection(conductor: Conductor, tmp_path: Path) -> None:
    conductor.session.heard = {"b": time.time(), "stranger": time.time()}
    (tmp_path / "server").mkdir()
    (tmp_path / "server" / REVOKED).write_text("00 b 2026-01-01\n11 c 2026-01-01\n")
    (tmp_path / "federation.toml").write_text('sites = ["a"]\n')
    for moment in (0.0, 3.0):
        conductor.step(moment)
    assert conductor.session.jobs == [] and conductor.session.disabled == ["b"]


def test_the_folder_of_links_goes_with_who_keeps_it(tmp_path: Path) -> None:
    """The server's command ends it by a signal, each time. What a killed one left is removed by the next."""
    where, left = tmp_path / "server" / LINKS, tmp_path / "left"
    for folder in (where.parent, left):
        folder.mkdir()
    (left / "1.link").touch()
    (left / HEARD).touch()
    where.write_text(str(left))
    with subprocess.Popen([sys.executable, "-m", "fedgist.federation.conductor", str(tmp_path), "nobody"]) as process:
        while where.read_text() in ("", str(left)):
            assert process.poll() is None
            time.sleep(0.05)
        folder = Path(where.read_text())
        assert folder.is_dir() and not left.exists()
        process.terminate()
        process.wait(60)
    assert not folder.exists()


@pytest.fixture
def said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What a conductor says that runs for 30 looks, between two of which a quarter of a minute passes."""
    (tmp_path / "server").mkdir()
    passed, said = list[float](), list[str]()

    def sleep(seconds: float) -> None:
        passed.append(seconds)
        if len(passed) == 30:
            raise KeyboardInterrupt

    clock = SimpleNamespace(sleep=sleep, monotonic=lambda: 15.0 * len(passed), time=time.time)
    monkeypatch.setattr(conductors, "time", clock)
    monkeypatch.setattr(conductors, "end_in_order", lambda: None)
    monkeypatch.setattr("builtins.print", lambda line, flush: said.append(f"{15 * len(passed)} s: {line}"))
    return said


def test_who_cannot_look_after_the_sites_says_so(
    said: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with an admin's certificate that has ended: once, and not while the server may still be coming up."""

    def session(admin_kit: Path, admin: str) -> None:
        raise ConnectionError("cannot log in")

    monkeypatch.setattr(conductors, "session_of", session)
    conductors.main(tmp_path, "admin")
    assert said == ["75 s: warning: cannot look after the sites: ConnectionError: cannot log in"]


def test_a_session_that_has_failed_is_closed(said: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each has a connection and threads of its own: of years of failures, those of one are there."""
    opened: list[Any] = []

    class Session:
        def __init__(self, admin_kit: Path, admin: str) -> None:
            opened.append(self)

        def close(self) -> None:
            opened.remove(self)
            raise ConnectionError("it is closed all the same")

        def get_connected_client_list(self) -> list[Any]:
            raise TimeoutError("no reply")

    (tmp_path / "federation.toml").write_text('sites = ["a"]')
    monkeypatch.setattr(conductors, "session_of", Session)
    conductors.main(tmp_path, "admin")
    assert len(opened) == 1 and said == ["0 s: warning: cannot look after the sites: TimeoutError: no reply"]
