"""Server and sites that exchange bytes: what is believed, what is refused, what is kept, what is said."""

import hashlib
import json
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fedgist.core.codec import Codec
from fedgist.core.errors import FedgistError
from fedgist.core.federation import Federation, Site
from fedgist.core.message import message, tag_of, wire
from fedgist.core.method import Method, handler
from fedgist.core.rng import Rng
from fedgist.core.task import Task
from fedgist.data.client_data import ClientData
from fedgist.engines import executor
from fedgist.federation.protocol import policy
from fedgist.federation.protocol.envelope import (
    Introduction,
    Question,
    Ready,
    Refusal,
    Reply,
    Request,
    Start,
    seal,
    unseal,
)
from fedgist.federation.protocol.policy import Policy
from fedgist.federation.protocol.remote_engine import Lost, Patience, RemoteEngine, ask_introductions
from fedgist.federation.protocol.site_host import SiteHost
from fedgist.options import option


@dataclass(frozen=True)
class Config:
    act: str = option("", "What site b does wrong.")


@message
class Ping:
    """A number."""

    x: Tensor = wire(shape=("size",))


@message
class Pong:
    """A sum, and how often the site was asked."""

    total: Tensor = wire(shape=("size",), additive=True)
    asked: int


@message
class Look:
    """Show how often you were asked."""


@message
class Shown:
    """It."""

    asked: int


class Asking(Method):
    """Two exchanges a round; each site counts how often it was asked in the first."""

    name = "asking"
    summary = "A method for tests."
    citation = ""
    Config = Config
    profiles: dict[str, dict[str, Any]] = {}

    def bounds(self, model: str) -> Any:
        return {"size": 4}

    def server_init(self, rng: Rng) -> Any:
        return {"total": torch.zeros(2), "asked": {}}

    def client_init(self, me: Site) -> Any:
        return {"asked": 0}

    async def round(self, state: Any, fed: Federation) -> Any:
        answers = await fed.ask(fed.ids, Ping(state["total"] + 1), Pong)
        shown = await fed.ask(answers.ids, Look(), Shown)
        return {"total": answers.sum.total, "asked": {id: shown[id].asked for id in shown}}

    @handler
    async def pong(self, me: Site, msg: Ping) -> Pong:
        me.state["asked"] += 1
        if me.id == "b" and self.config.act == "break":
            raise ZeroDivisionError("label 7 of patient 12")
        wide = me.id == "b" and self.config.act == "misfit"
        return Pong(torch.ones(3) if wide else msg.x, me.state["asked"])

    @handler
    async def look(self, me: Site, msg: Look) -> Shown:
        return Shown(me.state["asked"])

    async def evaluate(self, state: Any, fed: Federation, test: tuple[Tensor, Tensor]) -> dict[str, float]:
        return {"accuracy": 0.5}


TASK = Task((1, 1, 1), 2, (0.0,), (1.0,), {"none": None}, "none")
DATA = ClientData(torch.zeros(4, 1, 1, 1), torch.tensor([0, 0, 0, 1]), 2)
START = Start("run-1", "asking", 0, "none", {}, {})
CODEC = Codec({"size": 4})


def host(folder: Path, id: str = "a", act: str = "", rules: Policy | None = None, **more: Any) -> SiteHost:
    rules = rules or Policy(methods=("asking",), min_samples_per_class=1)
    return SiteHost(
        id, folder / id, lambda start: (Asking(Config(act), TASK), DATA), executor("sequential"), rules, **more
    )


def request(exchange: int = 0, state: str = "", keep: tuple[str, ...] = (), run: str = "run-1") -> bytes:
    header = Request(run, 1, "round", exchange, tag_of(Ping), state, list(keep))
    return seal(header, CODEC.encode(Ping(torch.ones(2))))


def opened(data: bytes) -> Any:
    return unseal(data)[0]


def asked(data: bytes) -> int:
    """How often the site says that it was asked."""
    header, payload = unseal(data)
    assert isinstance(header, Reply), header
    return CODEC.decode(Pong, payload).asked


# A site


def test_ten_thousand_corrupted_envelopes_do_not_stop_a_site(tmp_path: Path) -> None:
    """Flipped bits, cuts, insertions and foreign pieces: each gets an answer, and good requests go on as before."""
    site = host(tmp_path)
    good = [seal(Question("asking", [1, 1, 1], 2)), seal(START), request()]
    assert isinstance(opened(site.handle(good[1])), Ready)
    logging.getLogger("fedgist").setLevel(logging.CRITICAL)  # 10,000 refusals are not worth a log
    try:
        draw = Rng(0)("corruption").numpy()
        refused = 0
        for number in range(10_000):
            data = bytearray(good[number % 3])
            at = int(draw.integers(len(data)))
            match number % 5:
                case 0:
                    data[at] ^= 1 << int(draw.integers(8))
                case 1:
                    del data[at:]
                case 2:
                    data[at:at] = draw.bytes(int(draw.integers(1, 20)))
                case 3:
                    data[at : at + 8] = draw.bytes(8)
                case 4:
                    data = bytearray(draw.bytes(int(draw.integers(200))))
            refused += isinstance(opened(site.handle(bytes(data))), Refusal)
    finally:
        logging.getLogger("fedgist").setLevel(logging.NOTSET)
    assert refused > 9_000  # the others changed only a number, which is no mistake of form
    assert isinstance(opened(site.handle(good[1])), Ready)
    assert asked(site.handle(request())) == 1


def test_the_server_says_from_which_state_a_site_starts(tmp_path: Path) -> None:
    """A lost reply and a skipped round are asked anew from the old version; only what must be kept is kept."""
    site = host(tmp_path)
    site.handle(seal(START))
    assert asked(site.handle(request())) == 1
    assert asked(site.handle(request())) == 1  # the reply was lost
    first = opened(site.handle(request())).version
    assert asked(site.handle(request(1, first, (first,)))) == 2
    assert asked(site.handle(request(2, first, (first,)))) == 2  # the round was skipped
    folder = tmp_path / "a" / "runs" / "run-1"
    assert sorted(path.stem for path in folder.glob("*.safetensors")) == [first, "round-000001-000002"]
    gone = opened(site.handle(request(3, "round-000001-000001")))
    assert gone == Refusal(False, "it does not hold its state round-000001-000001 any more")


def test_a_new_process_of_a_site_goes_on(tmp_path: Path) -> None:
    """It needs no second start: the run and its states are on disk."""
    first = host(tmp_path)
    first.handle(seal(START))
    version = opened(first.handle(request())).version
    assert asked(host(tmp_path).handle(request(1, version))) == 2
    assert opened(host(tmp_path).handle(request(run="run-2"))) == Refusal(False, "the run run-2 was never started here")


def test_the_words_of_an_error_stay_at_the_site(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    site = host(tmp_path, "b", "break")
    site.handle(seal(START))
    answer = site.handle(request())
    assert opened(answer) == Refusal(False, "it failed (ZeroDivisionError); the log of the site says more")
    assert b"patient" not in answer
    assert "label 7 of patient 12" in caplog.text


@pytest.mark.parametrize(
    ("rules", "sent", "why"),
    [
        (Policy(methods=("fedavg",)), seal(Question("asking", [1], 2)), "does not allow the method asking"),
        (Policy(methods=("fedavg",)), seal(START), "does not allow the method asking"),
        (Policy(), seal(START), "does not allow the method asking, which shows Pong, Shown of each site"),
        (Policy(methods=("all",)), seal(START), "does not allow the method asking, which shows Pong, Shown"),
        (Policy(("asking",), messages=("Local",)), seal(START), "allows none of the messages of asking"),
        (Policy(("asking",), min_samples_per_class=9), seal(START), "none of its classes has the 9 samples"),
        (
            Policy(("asking",), ("Shown",), min_samples_per_class=1),
            request(),
            "does not allow test_remote.Pong to leave",
        ),
    ],
)
def test_outside_the_policy(rules: Policy, sent: bytes, why: str, tmp_path: Path, caplog: Any) -> None:
    """Refused, whatever the server asks; the site's log and its audit log say so."""
    site = host(tmp_path, rules=rules)
    site.handle(seal(START))
    answer = opened(site.handle(sent))
    assert isinstance(answer, Refusal) and answer.refused and why in answer.why
    assert why in caplog.text
    last = json.loads((tmp_path / "a" / "audit.jsonl").read_text().splitlines()[-1])
    assert (last["direction"], last["refused"], last["why"]) == ("out", True, answer.why)


def test_rare_classes_are_not_used() -> None:
    """Class 1 has one sample: with two required it is not there."""
    kept = Policy(min_samples_per_class=2).admit(DATA)
    assert kept.y.tolist() == [0, 0, 0]
    assert Policy(min_samples_per_class=1).admit(DATA).y is DATA.y


def test_a_small_test_set_and_its_rare_classes_are_not_scored() -> None:
    """An always-9 net's score would tell how many 9s there are among a few images."""
    labels = torch.tensor([0] * 30 + [1] * 25 + [2] * 3)
    data = replace(DATA, y=torch.zeros(4, dtype=torch.int64), classes=3, test=(torch.zeros(58, 1, 1, 1), labels))
    tested = Policy(min_samples_per_class=4).admit(data).test
    assert tested is not None and tested[1].unique().tolist() == [0, 1]
    assert Policy(min_samples_per_class=4, min_test_samples=56).admit(data).test is None


def test_a_site_with_its_own_model_refuses_another(tmp_path: Path) -> None:
    site = host(tmp_path, model="lenet5")
    assert opened(site.handle(seal(Question("asking", [1], 2)))) == Introduction("lenet5")
    assert "this site runs lenet5, and the run wants none" in opened(site.handle(seal(START))).why


def test_the_audit_log_has_every_envelope(tmp_path: Path) -> None:
    site = host(tmp_path)
    sent = [seal(START), request(), b"nonsense"]
    answers = [site.handle(data) for data in sent]
    lines = [json.loads(line) for line in (tmp_path / "a" / "audit.jsonl").read_text().splitlines()]
    travelled = [data for pair in zip(sent, answers, strict=True) for data in pair]
    said = [line for line in lines if line["direction"] == "leaves"]
    assert [line["leave"] for line in said] == [
        ["Shown: asked as they are", "Pong: asked as they are; total to be summed"]
    ]
    assert lines.index(said[0]) == 1  # before the first answer of the run
    lines = [line for line in lines if line["direction"] != "leaves"]
    assert [line["direction"] for line in lines] == ["in", "out"] * 3
    assert [line["sha256"] for line in lines] == [hashlib.sha256(data).hexdigest() for data in travelled]
    assert [line["bytes"] for line in lines] == list(map(len, travelled))
    assert [line["kind"] for line in lines] == ["Start", "Ready", "Request", "Reply", "unreadable", "Refusal"]
    assert (lines[2]["type"], lines[3]["type"]) == ("test_remote.Ping", "test_remote.Pong")


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("methods = 3", "methods must be"),
        ("method = ['all']", "did you mean 'methods'"),
        ("methods = [", "is not TOML"),
        ("options = 3", "options must be a table"),
        ("[options]\nsteps = 3", "steps in .options. must be a list of what is allowed"),
        ('[options]\nsteps = ["1..x"]', "a range is written with two numbers"),
    ],
)
def test_a_policy_with_a_mistake(text: str, why: str, tmp_path: Path) -> None:
    (tmp_path / "policy.toml").write_text(text)
    with pytest.raises(FedgistError, match=why):
        policy.load(tmp_path / "policy.toml")


def test_names_that_would_leave_the_folder_are_refused(tmp_path: Path) -> None:
    site = host(tmp_path)
    for name in ("../../x", ".hidden", "a/b", "", "x" * 101):
        answer = opened(site.handle(seal(replace(START, run=name))))
        assert isinstance(answer, Refusal) and "run is not what it should be" in answer.why
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a"]


# The server


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
        (lambda data: seal(Reply("run-1", "v", "t", True)), "it answers another request"),
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
    with pytest.raises(FedgistError, match=r"fewer than 3 sites are left \(b: refused: its policy does not allow"):
        engine(wire, sites=3).run_round()
    assert engine(wire, sites=2).run_round().answered == 2


def test_a_run_that_has_lost_its_sites_stops(tmp_path: Path) -> None:
    """It does not skip the rounds that are left, so that --resume finds them still to be done."""
    wire = Wire(tmp_path)
    federation = engine(wire)
    federation.run_round()
    wire.spoil = lambda id, data: Lost("is switched off")
    with pytest.raises(FedgistError, match=r"fewer than 1 sites are left .a: is switched off; b: .*--resume"):
        federation.run_round()
    assert federation.rounds_done == 1


def test_introductions(tmp_path: Path) -> None:
    wire = Wire(tmp_path)
    wire.hosts["a"] = host(tmp_path, "a", model="lenet5")
    wire.hosts["b"] = host(tmp_path, "b", rules=Policy(methods=("fedavg",)))
    found = ask_introductions(wire, ["a", "b", "c"], Question("asking", [1, 1, 1], 2), 5)
    assert (found["a"], found["c"]) == ("lenet5", "")
    assert isinstance(found["b"], Lost) and "policy" in found["b"].why


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
