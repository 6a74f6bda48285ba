"""A server whose sites answer in bytes: who is lost, what is a failure of one, when a run stops, what is kept."""

from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import pytest

from asking import TASK, Asking, Config, host
from fedgist.core.errors import FedgistError
from fedgist.engines import executor
from fedgist.federation.protocol.envelope import (
    PROTOCOL,
    Question,
    Ready,
    Refusal,
    Reply,
    Unfitting,
    seal,
)
from fedgist.federation.protocol.policy import Policy
from fedgist.federation.protocol.remote_engine import (
    Attendance,
    Introduced,
    Lost,
    Patience,
    RemoteEngine,
    ask_introductions,
)


class Wire:
    """Hands envelopes to hosts that live here."""

    def __init__(self, folder: Path, act: str = "", sites: str = "abc"):
        self.hosts = {id: host(folder, id, act) for id in sites}
        self.asked: list[tuple[str, ...]] = []
        self.spoil: Callable[[str, bytes], bytes | Lost | None] = lambda id, data: data

    def exchange(self, requests: Mapping[str, bytes], timeout: float, enough: int) -> dict[str, bytes | Lost]:
        self.asked.append(tuple(requests))
        came = {id: self.spoil(id, self.hosts[id].handle(data)) for id, data in requests.items()}
        return {id: answer for id, answer in came.items() if answer is not None}


def engine(wire: Wire, **patience: Any) -> RemoteEngine:
    info = {id: {"model": "none"} for id in wire.hosts}
    method = Asking(Config(), TASK)
    return RemoteEngine(method, wire, info, seed=0, executor=executor("sequential"), patience=Patience(**patience))


def test_a_lost_site_is_named_and_not_asked_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    wire = Wire(tmp_path)
    federation = engine(wire)
    federation.run_round()
    wire.spoil = lambda id, data: Lost("did not answer within 5 s") if id == "b" else data
    report = federation.run_round()
    assert (report.answered, list(report.missing)) == (2, ["b"])
    assert "round 2: site b did not answer within 5 s" in caplog.text
    federation.run_round()
    assert wire.asked[-1] == ("a", "c")
    assert federation.state["asked"] == {"a": 3, "c": 3}
    assert federation.run_round().missing == {"b": "did not answer within 5 s"}


@pytest.mark.parametrize(
    ("spoil", "why"),
    [
        (lambda data: data[:-1], "sent what cannot be used"),
        (lambda data: b"", "not an envelope"),
        (lambda data: seal(Reply("run-1", "v", "t", True, "r")), "it answers another request"),
        (lambda data: seal(Ready()), "expected Reply, got Ready"),
        (lambda data: seal(Refusal(True, "its policy forbids it")), "refused: its policy forbids it"),
    ],
)
def test_a_bad_reply_is_that_sites_failure(spoil: Any, why: str, tmp_path: Path, caplog: Any) -> None:
    wire = Wire(tmp_path)
    federation = engine(wire)
    federation.run_round()
    wire.spoil = lambda id, data: spoil(data) if id == "b" else data
    report = federation.run_round()
    assert report.answered == 2 and why in report.missing["b"] and why in caplog.text
    wire.spoil = lambda id, data: data
    federation.run_round()
    assert federation.state["asked"] == {"a": 3, "b": 2, "c": 3}  # what b did in round 2 left no trace


def test_a_sum_of_different_shapes_goes_on_without_the_odd_one(tmp_path: Path) -> None:
    report = engine(Wire(tmp_path, "misfit")).run_round()
    assert report.answered == 2
    assert "another shape than the others" in report.missing["b"]


def test_everybody_fails_and_the_round_is_skipped(tmp_path: Path) -> None:
    wire = Wire(tmp_path)
    federation = engine(wire)
    federation.run_round()
    before = federation.digest(), dict(federation.versions)
    wire.spoil = lambda id, data: b""
    assert "0 of 3 answered Pong" in (federation.run_round().skipped or "")
    wire.spoil = lambda id, data: data
    assert federation.versions == before[1]
    assert federation.run_round().skipped is None
    assert set(federation.state["asked"].values()) == {2}


def test_the_first_answers_may_be_enough(tmp_path: Path) -> None:
    """Who comes too late is not lost: it is asked again, from the state that was last accepted."""
    assert [Patience(enough=0.5).count(asked, 1) for asked in (1, 3, 4)] == [1, 2, 2]
    assert Patience(enough=0.1).count(10, 3) == 3
    wire = Wire(tmp_path)
    federation = engine(wire, enough=0.5)
    wire.spoil = lambda id, data: None if id == "c" and len(wire.asked) == 2 else data
    assert "not among the first" in federation.run_round().missing["c"]
    federation.run_round()
    assert federation.state["asked"] == {"a": 2, "b": 2, "c": 1}


def test_too_few_sites_to_begin_with(tmp_path: Path) -> None:
    wire = Wire(tmp_path)
    wire.hosts["b"] = host(tmp_path, "b", rules=Policy(methods=("fedavg",)))
    with pytest.raises(
        FedgistError, match=r"too few sites are left \(--min-sites 3; b: refused: its policy does not allow"
    ):
        engine(wire, sites=3).run_round()
    assert engine(wire, sites=2).run_round().answered == 2


def test_a_run_that_has_lost_its_sites_stops(tmp_path: Path) -> None:
    """It does not skip the rounds that are left, so that --resume finds them still to be done."""
    wire = Wire(tmp_path)
    federation = engine(wire)
    federation.run_round()
    wire.spoil = lambda id, data: Lost("is switched off")
    with pytest.raises(
        FedgistError, match=r"too few sites are left \(--min-sites 1; a: is switched off; b: .*--resume"
    ):
        federation.run_round()
    assert federation.rounds_done == 1


def test_introductions(tmp_path: Path) -> None:
    wire = Wire(tmp_path)
    wire.hosts["a"] = host(tmp_path, "a", model="lenet5")
    wire.hosts["b"] = host(tmp_path, "b", rules=Policy(methods=("fedavg",)))
    found = ask_introductions(wire, ["a", "b", "c"], Question("asking", [1, 1, 1], 2), 5)
    assert (found["a"], found["c"]) == (Introduced("lenet5", PROTOCOL, b""), Introduced("", PROTOCOL, b""))
    assert isinstance(found["b"], Lost) and "policy" in found["b"].why


def test_what_does_not_fit_is_an_answer_to_a_request_alone(tmp_path: Path) -> None:
    """To a question and to a start it is that site's failure, and ends nobody's run."""
    wire, unfit = Wire(tmp_path), seal(Unfitting("field", 7, "needs more"))
    wire.spoil = lambda id, data: unfit if id == "b" else data
    found = ask_introductions(wire, ["a", "b"], Question("asking", [1, 1, 1], 2), 5)
    assert isinstance(found["a"], Introduced) and found["b"] == Lost("needs more")
    report = engine(wire).run_round()
    assert report.answered == 2 and report.missing == {"b": "does not take part: needs more"}


def test_sites_keep_what_the_last_two_snapshots_need(tmp_path: Path) -> None:
    wire = Wire(tmp_path)
    federation = engine(wire)
    for _ in range(4):
        federation.run_round()
        snapshot = federation.snapshot()
    for _ in range(3):
        federation.run_round()
    folder = tmp_path / "a" / "runs" / federation.run
    kept = {path.stem for path in folder.glob("*.safetensors")}
    assert kept == {f"round-{round:06d}-000000" for round in (3, 4, 6, 7)}  # 6: round 7 might have been skipped
    federation.restore(snapshot)
    federation.run_round()
    assert federation.state["asked"] == {"a": 5, "b": 5, "c": 5}


def test_a_site_that_was_lost_joins_at_the_next_round_once_it_is_back(tmp_path: Path, caplog: Any) -> None:
    """It goes on from the state that was committed last, as if it had only missed the rounds between."""
    wire, there = Wire(tmp_path), {"a", "b", "c"}
    wire.spoil = lambda id, data: data if id in there else Lost("is switched off")
    asked: list[list[str]] = []

    def attend(absent: Collection[str]) -> Attendance:
        asked.append(sorted(absent))
        return Attendance(dict.fromkeys(set(absent) & there, PROTOCOL))

    federation = engine(wire)
    federation.attend = attend
    federation.run_round()
    there.discard("b")
    assert federation.run_round().answered == 2
    report = federation.run_round()
    assert report.answered == 2 and report.missing == {"b": "is switched off"}
    there.add("b")
    report = federation.run_round()
    assert report.answered == 3 and not report.missing and "site b is there again" in caplog.text
    assert asked == [[], ["b"], ["b"]]
    assert federation.state["asked"] == {"a": 4, "b": 2, "c": 4}


def test_a_late_site_is_told_of_the_run_and_one_that_refuses_is_not_asked_for_ever(tmp_path: Path) -> None:
    wire, there = Wire(tmp_path), {"a", "c"}
    wire.hosts["b"] = host(tmp_path, "b", rules=Policy(methods=("fedavg",)))
    wire.spoil = lambda id, data: data if id in there else Lost("is not connected")
    federation, asked = engine(wire), []

    def attend(absent: Collection[str]) -> Attendance:
        asked.append(sorted(absent))
        return Attendance(dict.fromkeys(set(absent) & there, PROTOCOL))

    federation.attend = attend
    federation.run_round()
    there.add("b")
    report = federation.run_round()
    assert report.answered == 2 and "policy" in federation.gone["b"]
    federation.run_round()
    assert asked == [["b"], []]


def test_a_site_that_was_revoked_is_left_out_from_the_next_round_on(tmp_path: Path, caplog: Any) -> None:
    wire = Wire(tmp_path)
    federation = engine(wire)
    federation.run_round()
    federation.attend = lambda absent: Attendance(expelled={"b": "was revoked", "stranger": "was revoked"})
    for _ in range(2):
        report = federation.run_round()
        assert report.answered == 2 and report.missing == {"b": "was revoked"}
    assert caplog.text.count("site b was revoked") == 1
