"""The in-process federation: what sites keep, what askers see, what is counted, what is refused."""

import csv
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import toys
from fedgist.core.federation import Federation, Site
from fedgist.core.ledger import Ledger
from fedgist.core.message import Done, message, wire
from fedgist.core.method import Method, handler
from fedgist.core.task import Task
from fedgist.engines import EXECUTORS, local
from fedgist.engines.local import LocalEngine, SiteFailure, run_rounds
from fedgist.options import option


@dataclass(frozen=True)
class Config:
    act: str = option("", "What the clients do wrong.")


@message
class Ping:
    """A number for the clients to add to their own."""

    x: Tensor = wire(shape=(2,))


@message
class Pong:
    """A sum, and a name that the asker may see."""

    total: Tensor = wire(shape=(2,), additive=True)
    count: int = wire(torch.int64, additive=True)
    seen: int


class Counting(Method):
    """Each client counts how often it was asked, and adds what it was sent."""

    name = "counting"
    summary = "A method for tests."
    citation = ""
    Config = Config
    profiles: dict[str, dict[str, Any]] = {}

    def client_init(self, me: Site) -> Any:
        return {"asked": 0, "first": me.rng.integers(1000, 1)}

    def server_init(self, rng: Any) -> Any:
        return {"total": torch.zeros(2), "answered": 0}

    async def round(self, state: Any, fed: Federation) -> Any:
        answers = await fed.ask(fed.ids, Ping(state["total"] + 1), Pong, at_least=2)
        assert sorted(answers) == list(answers.ids)
        assert all(not hasattr(answers[id], "total") for id in answers)
        seen = sum(answers[id].seen for id in answers)
        return {"total": answers.sum.total / answers.sum.count, "answered": len(answers), "seen": seen}

    @handler
    async def pong(self, me: Site, msg: Ping) -> Pong:
        me.state["asked"] += 1
        if self.config.act == "mutate":
            msg.x.add_(1)
        if self.config.act == "fail" and me.id == "1":
            raise SiteFailure("out of power")
        if self.config.act == "break" and me.id == "1":
            raise ZeroDivisionError("one over nothing")
        if self.config.act == "lie":
            return Done()  # type: ignore[return-value]
        return Pong(msg.x + int(me.id), 1, me.state["asked"])

    async def evaluate(self, state: Any, fed: Federation, test: tuple[Tensor, Tensor]) -> dict[str, float]:
        answers = await fed.ask(fed.ids, Ping(torch.zeros(2)), Pong)
        return {"accuracy": float(len(answers))}


TASK = Task((1, 1, 1), 2, (0.0,), (1.0,), {"none": None}, "none")


def counting(act: str = "", engine: str = "sequential", clients: int = 3, **settings: Any) -> LocalEngine:
    method = Counting(Config(act), TASK)
    method.bounds = lambda model: {}  # type: ignore[method-assign]
    return toys.federation(method, {str(i): toys.NOTHING for i in range(clients)}, engine=engine, **settings)


@pytest.mark.parametrize("engine", EXECUTORS)
def test_a_round(engine: str) -> None:
    """x = 1 goes down; clients 0, 1, 2 answer x + id; their mean is 2; states count the asks."""
    federation = counting(engine=engine)
    assert federation.run_round().answered == 3
    assert federation.state["total"].tolist() == [2, 2]
    assert federation.state["seen"] == 3
    federation.run_round()
    assert federation.state["total"].tolist() == [4, 4]
    assert {id: state["asked"] for id, state in federation.site_states.items()} == {"0": 2, "1": 2, "2": 2}
    assert len({state["first"].item() for state in federation.site_states.values()}) == 3


def test_an_evaluation_changes_no_state_and_is_counted_apart() -> None:
    federation = counting()
    federation.run_round()
    before = federation.ledger.totals()
    assert federation.evaluate((torch.zeros(1), torch.zeros(1))) == {"accuracy": 3.0}
    assert {state["asked"] for state in federation.site_states.values()} == {1}
    after = federation.ledger.totals()
    assert (after.bytes_up, after.bytes_down) == (before.bytes_up, before.bytes_down)
    assert after.evaluation > 0


def test_a_failing_site_commits_nothing_and_the_others_go_on() -> None:
    federation = counting("fail")
    report = federation.run_round()
    assert (report.answered, report.skipped) == (2, None)
    assert federation.state["total"].tolist() == [2, 2]  # (1 + 0 + 1 + 2) / 2
    assert {id: state["asked"] for id, state in federation.site_states.items()} == {"0": 1, "1": 0, "2": 1}


def test_too_few_answers_skip_the_round() -> None:
    federation = counting("fail", clients=2)
    report = federation.run_round()
    assert report.skipped == "round 1: 1 of 2 answered Pong, at least 2 are needed"
    assert federation.state["answered"] == 0
    assert federation.site_states == {}
    assert federation.rounds_done == 1


@pytest.mark.parametrize("engine", EXECUTORS)
def test_an_error_names_client_handler_and_message(engine: str) -> None:
    with pytest.raises(ZeroDivisionError) as caught:
        counting("break", engine).run_round()
    assert caught.value.__notes__ == ["in client 1, round 1, counting.pong, answering test_local.Ping {'x': (2,)}"]


def test_a_handler_may_not_change_its_message() -> None:
    with pytest.raises(RuntimeError, match=r"counting\.pong changed the message"):
        counting("mutate").run_round()


@message
class Again:
    """Asks for one more."""


@message
class Held:
    """Whole numbers, which are neither cast nor widened on their way."""

    total: Tensor = wire(torch.int64, shape=(2,), additive=True)
    seen: Tensor = wire(torch.int64, shape=(2,))


class Hoarding(Method):
    """A client holds on to the tensor that it replied, and writes into it when it is asked again."""

    name = "hoarding"
    summary = "A method for tests."
    citation = ""
    profiles: dict[str, dict[str, Any]] = {}

    def bounds(self, model: str) -> dict[str, Any]:
        return {}

    def client_init(self, me: Site) -> Any:
        return {"held": torch.zeros(2, dtype=torch.int64)}

    async def round(self, state: Any, fed: Federation) -> Any:
        first = await fed.ask(fed.ids, Again(), Held)
        seen = {id: first[id].seen for id in first}
        await fed.ask(fed.ids, Again(), Held)
        return {"total": first.sum.total, "seen": seen}

    @handler
    async def again(self, me: Site, msg: Again) -> Held:
        me.state["held"].add_(1)
        return Held(me.state["held"], me.state["held"])

    async def evaluate(self, state: Any, fed: Federation, test: tuple[Tensor, Tensor]) -> dict[str, float]:
        return {"accuracy": float(len(await fed.ask(fed.ids, Again(), Held)))}


def hoarding(clients: int, **settings: Any) -> LocalEngine:
    return toys.federation(Hoarding(None, TASK), {str(i): toys.NOTHING for i in range(clients)}, **settings)


def test_what_was_replied_stays_what_it_was() -> None:
    federation = hoarding(clients=1)
    federation.run_round()
    assert federation.site_states["0"]["held"].tolist() == [2, 2]
    assert federation.state["total"].tolist() == [1, 1]
    assert federation.state["seen"]["0"].tolist() == [1, 1]


def test_a_reply_under_way_stays_what_it_was() -> None:
    """Client 1 replies [1, 1], writes [2, 2] over it in an evaluation, and then the reply arrives."""
    federation = hoarding(clients=2, delay=lambda id, round: int((id, round) == ("1", 1)))
    federation.run_round()
    federation.evaluate((torch.zeros(1), torch.zeros(1)))
    assert federation.site_states["1"]["held"].tolist() == [2, 2]
    federation.run_round()
    assert federation.state["seen"]["1"].tolist() == [1, 1]
    assert federation.state["total"].tolist() == (federation.state["seen"]["0"] + 1).tolist()


def test_a_handler_must_reply_what_it_declares() -> None:
    with pytest.raises(TypeError, match="must reply Pong"):
        counting("lie").run_round()


def test_an_evaluation_judges_those_too_who_were_away() -> None:
    federation = counting(offline=lambda id, round, exchange: id == "1")
    federation.run_round()
    assert federation.evaluate((torch.zeros(1), torch.zeros(1))) == {"accuracy": 3.0}


def test_offline_clients_are_drawn_by_name() -> None:
    federation = counting(clients=20, offline=0.5)
    answered = [federation.run_round().answered for _ in range(5)]
    again = counting(clients=20, offline=0.5)
    assert answered == [again.run_round().answered for _ in range(5)]
    assert len(set(answered)) > 1
    assert 25 < sum(answered) < 75  # 100 draws at one half: five deviations either way


def test_peers_without_a_server() -> None:
    """Each node asks itself and its neighbours; what it sends itself does not count."""
    ring = {"0": ["1"], "1": ["2"], "2": ["0"]}
    federation = counting("quiet", topology=ring)
    method = federation.method

    async def read_only(me: Site, msg: Ping) -> Pong:
        return Pong(msg.x + int(me.id), 1, 0)

    method.pong = read_only  # type: ignore[method-assign, attr-defined]
    federation.run_round()
    assert {node: state["total"].tolist() for node, state in federation.states.items()} == {
        "0": [1.5, 1.5],
        "1": [2.5, 2.5],
        "2": [2.0, 2.0],
    }
    assert federation.ledger.totals().messages == 6  # three requests, three replies


def test_two_peers_may_not_change_one_site() -> None:
    with pytest.raises(RuntimeError, match="two nodes changed site"):
        counting(topology={"0": ["1"], "1": ["0"]}, clients=2).run_round()


def test_a_node_reaches_only_its_neighbours() -> None:
    federation = counting(topology={"0": ["1"], "1": ["0"], "2": []}, clients=3)

    async def round(state: Any, fed: Federation) -> Any:
        return await fed.ask(["2"], Ping(torch.ones(2)), Pong)

    federation.method.round = round  # type: ignore[method-assign]
    with pytest.raises(ValueError, match=r"0 asked \['2'\], which it cannot reach"):
        federation.run_round()


def test_several_federations_together_are_the_same_as_alone() -> None:
    together = [counting(clients=n) for n in (2, 3)]
    for _ in range(2):
        run_rounds(together)
    for federation in together:
        alone = counting(clients=len(federation.ids))
        for _ in range(2):
            alone.run_round()
        assert torch.equal(alone.state["total"], federation.state["total"])


def test_the_ledger_counts_to_the_byte(tmp_path: Path) -> None:
    """Ping: 2 float32 = 8 bytes; Pong: 8 + 8 + 8, of which the paper's count takes 4 · (2 + 1 + 1)."""
    ledger = Ledger(tmp_path / "ledger.csv", run="r", record=["Ping"], transcript=tmp_path / "transcript")
    federation = counting(ledger=ledger)
    federation.run_round()
    federation.evaluate((torch.zeros(1), torch.zeros(1)))
    ledger.close()
    with open(tmp_path / "ledger.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 12
    assert {row["phase"] for row in rows} == {"round", "evaluation"}
    for row in rows:
        down = row["direction"] == "down"
        assert (row["sender"] if down else row["receiver"]) == "server"
        assert row["type"] == ("test_local.Ping" if down else "test_local.Pong")
        assert row["payload_bytes"] == ("8" if down else "24")
        assert row["paper_bytes"] == ("8" if down else "16")
    training = [row for row in rows if row["phase"] == "round"]
    total = sum(int(row["header_bytes"]) + int(row["payload_bytes"]) for row in training if row["direction"] == "up")
    assert total == ledger.totals().bytes_up
    assert len(list((tmp_path / "transcript").iterdir())) == 6


def test_a_resumed_ledger_forgets_what_came_after_its_checkpoint(tmp_path: Path) -> None:
    whole = Ledger(tmp_path / "whole.csv")
    federation = counting(ledger=whole)
    federation.run_round()
    position, snapshot = whole.position(), federation.snapshot()
    federation.run_round()
    whole.close()
    text, totals = (tmp_path / "whole.csv").read_text(), whole.totals()
    resumed = Ledger(tmp_path / "whole.csv", position=position)
    again = counting(ledger=resumed)
    again.restore(snapshot)
    again.run_round()
    resumed.close()
    assert (tmp_path / "whole.csv").read_text() == text
    assert resumed.totals() == totals


@pytest.mark.parametrize("method", ["fedavg", "scaffold", "feddm"])
def test_replies_that_are_added_up_as_they_come_give_the_same(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sums, states and visible fields do not depend on how many clients are asked at a time."""
    together = toys.play(toys.toy_federation(method), 2)
    monkeypatch.setattr(local, "REPLIES_TOGETHER", {"cpu": 1})
    monkeypatch.setattr(local, "SMALLEST_WAVE", 2)
    engine = toys.toy_federation(method)
    largest: list[int] = []
    drive = engine.executor.drive
    monkeypatch.setattr(engine.executor, "drive", lambda roles: (largest.append(len(roles)), drive(roles))[1])
    toys.play(engine, 2)
    assert max(largest) == 2
    assert engine.digest() == together.digest()
    assert engine.ledger.totals() == together.ledger.totals()
