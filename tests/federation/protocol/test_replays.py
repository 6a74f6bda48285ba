"""What comes twice, late or in pieces: a site never answers one exchange in two ways, and loses nothing by it."""

import errno
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from asking import CODEC, START, TASK, Asking, Config, Look, Ping, asked, host, opened, request
from fedgist.core.message import WireError, tag_of
from fedgist.core.rng import Rng
from fedgist.engines import executor
from fedgist.federation.protocol import audit, site_run, states
from fedgist.federation.protocol.envelope import (
    AGAIN,
    PROTOCOL,
    Ready,
    Refusal,
    Reply,
    Request,
    Start,
    digest,
    seal,
    unseal,
)
from fedgist.federation.protocol.policy import Policy
from fedgist.federation.protocol.remote_engine import Attendance, Lost, Patience, RemoteEngine
from fedgist.federation.protocol.site_host import SiteHost


def another(exchange: int = 0, round: int = 1, state: str = "", keep: tuple[str, ...] = (), x: float = 2.0) -> bytes:
    header = Request("run-1", round, "round", exchange, tag_of(Ping), state, list(keep))
    return seal(header, CODEC.encode(Ping(torch.full((2,), x))))


def started(folder: Path) -> SiteHost:
    site = host(folder)
    assert isinstance(opened(site.handle(seal(START))), Ready)
    return site


def test_an_exchange_is_answered_in_one_way(tmp_path: Path) -> None:
    """The same request again gets the same bytes, another in its place none; a new process knows that, too."""
    site = started(tmp_path)
    answer = site.handle(request())
    assert site.handle(request()) == answer
    for process in (site, host(tmp_path)):
        refusal = opened(process.handle(another()))
        assert refusal == Refusal(
            True, "it has answered round-000001-000000 already, and was asked something else then", digest(another())
        )
    assert host(tmp_path).handle(request()) == answer
    assert asked(site.handle(another(1))) == 1  # a new exchange is a new question


def test_two_processes_of_a_site_know_what_the_other_answered(tmp_path: Path) -> None:
    """As when a job has lost a site whose process still answers, and another job has begun one."""
    first, second = started(tmp_path), host(tmp_path)
    versions = [opened(first.handle(request())).version]
    for number, process in enumerate((second, first, second), 1):
        versions.append(opened(process.handle(request(number, versions[-1]))).version)
    assert [line.split()[0] for line in first._run.answered.path.read_text().splitlines()] == versions
    assert isinstance(opened(first.handle(another(3, 1, versions[-2]))), Refusal)


def test_half_a_line_is_no_answer(tmp_path: Path) -> None:
    """Killed while it wrote: nothing had left, so that another request may be answered, and is written down whole."""
    site = started(tmp_path)
    site.handle(request())
    path = tmp_path / "a" / "runs" / "run-1" / "answered.txt"
    path.write_bytes(path.read_bytes()[:-10])
    assert asked(host(tmp_path).handle(another())) == 1
    assert isinstance(opened(host(tmp_path).handle(request())), Refusal)
    assert path.read_text().count("\n") == 1


def test_what_cannot_be_computed_again_is_not_sent_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a device whose sums differ from time to time."""
    site = started(tmp_path)
    first = site.handle(request())
    monkeypatch.setattr(Asking, "client_init", lambda self, me: {"asked": 7})
    assert opened(host(tmp_path).handle(request())) == Refusal(
        True, "it has answered round-000001-000000 already, and now would answer something else", digest(request())
    )
    monkeypatch.undo()
    assert site.handle(request()) == first


def test_an_old_request_takes_no_newer_state_away(tmp_path: Path) -> None:
    """It was long on its way and knows nothing of what must be kept by now."""
    site, versions = started(tmp_path), [""]
    for round in range(1, 5):
        data = another(0, round, versions[-1], tuple(filter(None, versions[-2:])))
        versions.append(opened(site.handle(data)).version)
    for late in (another(1, 1), another(0, 1)):
        site.handle(late)
    assert asked(site.handle(another(0, 5, versions[-1], (versions[-1],)))) == 5


def test_what_a_dead_server_asked_takes_no_state_away(tmp_path: Path) -> None:
    """Its request arrives when another goes on with the run: it does not know what that one needs, nor is it heard.

    Found by `fedgist chaos --seed 1 --schedule 966`, when such a request still was answered.
    """
    first, then = b"aa", b"bb"

    def of(token: bytes, data: bytes) -> bytes:
        header, payload = unseal(data)
        return seal(replace(header, token=token.decode()), payload)  # type: ignore[type-var]

    late = seal(Request("run-1", 1, "evaluation", 0, tag_of(Look), "", [], 0, "aa"), CODEC.encode(Look()))
    site = host(tmp_path)
    for token in (first, then):
        assert isinstance(opened(site.handle(seal(START, token))), Ready)
        assert asked(site.handle(of(token, request()))) == 1
    site.handle(seal(START, first))  # a copy, which was overtaken
    for process in (site, host(tmp_path)):
        assert opened(process.handle(late)) == Refusal(False, AGAIN, digest(late))
        assert asked(process.handle(of(then, another(1, 1, "round-000001-000000")))) == 2


@pytest.mark.parametrize("token", [b"A", b"0" * 65, b"\n", b"\xff"])
def test_a_token_that_is_none(tmp_path: Path, token: bytes) -> None:
    assert "its token is not what it should be" in opened(host(tmp_path).handle(seal(START, token))).why


def test_starts_without_end_do_not_fill_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(site_run, "STARTS", 3)
    site = host(tmp_path)
    for number in range(9):
        site.handle(seal(START, b"%02x" % number))
    assert (tmp_path / "a" / "runs" / "run-1" / "starts.txt").read_text().split() == ["06", "07", "08"]


class Overtaken:
    """A host at which another server's start comes after ours, once; one answer is a refusal of something else."""

    def __init__(self, folder: Path):
        self.host, self.starts, self.stray = host(folder), 0, b""

    def exchange(self, requests: Mapping[str, bytes], timeout: float, enough: int) -> dict[str, bytes | Lost]:
        ((id, data),) = requests.items()
        said, (header, _) = self.host.handle(data), unseal(data)
        if isinstance(header, Start):
            self.starts += 1
            if self.starts == 1:
                self.host.handle(seal(header, b"dead"))
        stray, self.stray = self.stray, b""
        return {id: stray or said}


def test_a_server_that_was_overtaken_starts_again(tmp_path: Path) -> None:
    """By the start of one that died before it; and a refusal of another request is not taken for one of this."""
    wire = Overtaken(tmp_path)
    engine = RemoteEngine(
        Asking(Config(), TASK),
        wire,
        {"a": {"model": "none"}},
        seed=0,
        executor=executor("sequential"),
        patience=Patience(sites=0),
        attend=lambda absent: Attendance(dict.fromkeys(absent, PROTOCOL)),
    )
    assert engine.run_round().missing == {"a": AGAIN}
    assert not engine.run_round().missing and wire.starts == 2
    wire.stray = seal(Refusal(True, "its budget is spent", digest(b"another envelope")))
    (why,) = engine.run_round().missing.values()
    assert why == "sent what cannot be used: it answers another request, or one that was damaged: its budget is spent"
    assert not engine.run_round().missing


def test_rounds_that_count_down_do_not_fill_the_disk(tmp_path: Path) -> None:
    site = started(tmp_path)
    for round in range(60, 0, -1):
        assert asked(site.handle(another(0, round))) == 1
    kept = list((tmp_path / "a" / "runs" / "run-1").glob("*.safetensors"))
    assert len(kept) == states.NEWER + 1


class Wire:
    """Two hosts; a reply of site a may be one that it gave to another request of the same name."""

    def __init__(self, folder: Path):
        self.hosts, self.other = {id: host(folder, id) for id in "ab"}, host(folder / "other")
        self.replay = False

    def exchange(self, requests: Mapping[str, bytes], timeout: float, enough: int) -> dict[str, bytes | Lost]:
        return {id: self._spoken(id, data) for id, data in requests.items()}

    def _spoken(self, id: str, data: bytes) -> bytes:
        said, (header, _) = self.hosts[id].handle(data), unseal(data)
        if id == "b":
            return said
        if getattr(header, "type", "") != tag_of(Ping):
            self.other.handle(data)
            return said
        old = self.other.handle(seal(header, CODEC.encode(Ping(torch.full((2,), 9.0)))))
        return old if self.replay else said


def test_a_reply_to_another_request_of_the_same_exchange_is_refused(tmp_path: Path) -> None:
    """As one from before the server was resumed, when others had answered and the question was another."""
    wire = Wire(tmp_path)
    info = {id: {"model": "none"} for id in wire.hosts}
    engine = RemoteEngine(Asking(Config(), TASK), wire, info, seed=0, executor=executor("sequential"))
    wire.replay = True
    report = engine.run_round()
    assert report.missing == {"a": "sent what cannot be used: it answers another request"}
    wire.replay = False
    assert not engine.run_round().missing


def test_an_old_evaluation_does_not_take_the_place_of_a_new_one(tmp_path: Path) -> None:
    site = started(tmp_path)
    for round in (3, 2):
        site.handle(seal(Request("run-1", round, "evaluation", 0, tag_of(Look), "", []), CODEC.encode(Look())))
    assert opened((tmp_path / "a" / "runs" / "run-1" / "evaluation.envelope").read_bytes()).round == 3


def test_every_damage_is_seen(tmp_path: Path) -> None:
    """Any bit that is not as it was sent, and any cut: no message has to be plausible to be refused."""
    data, draw = request(), Rng(0)("damage").numpy()
    for _ in range(300):
        spoiled = bytearray(data)
        spoiled[int(draw.integers(len(data)))] ^= 1 << int(draw.integers(8))
        cut = data[: int(draw.integers(len(data)))]
        for bad in (bytes(spoiled), cut):
            with pytest.raises(WireError):
                unseal(bad)


def test_a_full_disk_is_a_refusal_and_leaves_a_log_that_can_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What cannot be noted does not leave; half a line does not spoil those after it."""
    site = started(tmp_path)
    note = audit.Audit.note

    def full(self: audit.Audit, direction: str, **about: Any) -> None:
        if direction == "out":
            with self.path.open("a") as file:
                file.write('{"time": "2026')
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        note(self, direction, **about)

    monkeypatch.setattr(audit.Audit, "note", full)
    failed = "it failed (OSError); the log of the site says more"
    assert opened(site.handle(request())) == Refusal(False, failed, digest(request()))
    monkeypatch.undo()
    assert isinstance(opened(site.handle(request())), Reply)
    assert [line["direction"] for line in audit.read(site.audit.path)] == ["in", "leaves", "out", "in", "in", "out"]


def test_nothing_in_a_note_takes_it_out_of_the_log(tmp_path: Path) -> None:
    """A server must not hide what it asked by letters at which lines may be broken."""
    log = audit.Audit(tmp_path / "audit.jsonl")
    for why in ("none", "of\x85its\u2028own\x1c", "\r\n"):
        log.note("in", why=why)
    assert [line["why"] for line in audit.read(log.path)] == ["none", "of\x85its\u2028own\x1c", "\r\n"]


def test_a_clock_that_was_set_back_takes_no_current_run_away(tmp_path: Path) -> None:
    site = host(tmp_path, rules=Policy(methods=("asking",), min_samples_per_class=1, max_runs=2))
    for number in range(3):
        assert isinstance(opened(site.handle(seal(replace(START, run=f"run-{number}")))), Ready)
        for path in (tmp_path / "a" / "runs").iterdir():
            for file in [*path.iterdir(), path]:
                os.utime(file, (2e9 - number, 2e9 - number))
    assert asked(host(tmp_path).handle(request(run="run-2"))) == 1


def test_a_file_beside_the_runs_is_nobodys_business(tmp_path: Path) -> None:
    (tmp_path / "a" / "runs").mkdir(parents=True)
    (tmp_path / "a" / "runs" / "note.txt").write_text("to be looked at")
    assert asked(started(tmp_path).handle(request())) == 1


def test_drafts_of_a_killed_site_are_cleared(tmp_path: Path) -> None:
    started(tmp_path).handle(request())
    draft = tmp_path / "a" / "runs" / "run-1" / ".round-000002-000000.safetensors.1234"
    draft.write_bytes(b"half")
    host(tmp_path).handle(another(1))
    assert not draft.exists()
