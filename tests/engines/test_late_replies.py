"""Replies that arrive rounds later: they join with their origin, their sender is busy, nothing is lost."""

from typing import Any

import pytest
import torch
from torch import Tensor

from fedgist import storage
from fedgist.core.federation import Federation, Site
from fedgist.core.message import Bounds, message, wire
from fedgist.core.method import Method, handler
from fedgist.core.task import Task
from fedgist.engines.local import LocalEngine
from toys import NOTHING, federation


@message
class Ask:
    """How often were you asked?"""


@message
class Times:
    """So often: visible, and as a sum with the number of those who answer."""

    seen: int
    total: int = wire(torch.int64, additive=True)
    count: int = wire(torch.int64, additive=True)


class Remembering(Method):
    """The server keeps a diary of who answered what, made when."""

    name = "remembering"
    summary = "A method for tests."
    citation = ""
    profiles: dict[str, dict[str, Any]] = {}

    def bounds(self, model: str) -> Bounds:
        return {}

    def server_init(self, rng: Any) -> Any:
        return {"diary": []}

    def client_init(self, me: Site) -> Any:
        return {"asked": 0}

    async def round(self, state: Any, fed: Federation) -> Any:
        answers = await fed.ask(fed.ids, Ask(), Times, at_least=2)
        assert sorted(answers) == list(answers)
        assert answers.sum.count == len(answers)
        assert answers.sum.total == sum(answers[id].seen for id in answers)
        page = [(id, answers[id].seen, answers.late.get(id, fed.round)) for id in answers]
        return {"diary": [*state["diary"], page]}

    @handler
    async def answer(self, me: Site, msg: Ask) -> Times:
        me.state["asked"] += 1
        return Times(me.state["asked"], me.state["asked"], 1)

    async def evaluate(self, state: Any, fed: Federation, test: tuple[Tensor, Tensor]) -> dict[str, float]:
        return {"accuracy": float(len(await fed.ask(fed.ids, Ask(), Times)))}


def remembering(delay: Any, **settings: Any) -> LocalEngine:
    method = Remembering(None, Task((1, 1, 1), 2, (0.0,), (1.0,), {"none": None}, "none"))
    return federation(method, dict.fromkeys(("0", "1", "2"), NOTHING), delay=delay, **settings)


def late_once(id: str, round: int) -> int:
    """The second reply of client 1 needs two more rounds."""
    return 2 if (id, round) == ("1", 2) else 0


def test_a_late_reply_joins_with_its_origin_and_its_sender_is_busy_until_then() -> None:
    engine = remembering(late_once)
    for _ in range(5):
        assert engine.run_round().skipped is None
    assert [[answer for answer in page if answer[0] == "1"] for page in engine.state["diary"]] == [
        [("1", 1, 1)], [], [], [("1", 2, 2)], [("1", 3, 5)],
    ]  # fmt: skip
    assert engine.site_states["1"] == {"asked": 3}
    assert engine.under_way == {}


def test_a_resumed_run_still_gets_what_was_under_way(tmp_path: Any) -> None:
    whole = remembering(late_once)
    for _ in range(5):
        whole.run_round()
    for killed_after in range(5):
        first, second = remembering(late_once), remembering(late_once)
        for _ in range(killed_after):
            first.run_round()
        storage.save(first.snapshot(), tmp_path / "checkpoint")
        second.restore(storage.load(tmp_path / "checkpoint"))
        for _ in range(5 - killed_after):
            second.run_round()
        assert storage.digest(second.snapshot()) == storage.digest(whole.snapshot())


def test_an_evaluation_reaches_the_busy_and_delays_nothing() -> None:
    engine = remembering(late_once)
    for _ in range(2):
        engine.run_round()
    before = storage.digest(engine.snapshot())
    assert engine.evaluate((torch.zeros(1), torch.zeros(1))) == {"accuracy": 3.0}
    assert storage.digest(engine.snapshot()) == before


def test_a_skipped_round_keeps_what_is_under_way() -> None:
    """Round 2 has one of three replies in time and is skipped: the other two keep their work, and it joins round 3."""
    engine = remembering(lambda id, round: 1 if round == 2 and id != "0" else 0)
    engine.run_round()
    assert engine.run_round().skipped is not None
    assert [engine.site_states[id]["asked"] for id in engine.ids] == [1, 2, 2]
    assert engine.run_round().skipped is None
    assert engine.state["diary"][-1] == [("0", 2, 3), ("1", 2, 2), ("2", 2, 2)]
    assert engine.under_way == {}


def test_a_skipped_round_gives_back_what_arrived_in_it() -> None:
    """Client 1's reply of round 1 arrives in round 2, which is skipped for want of others; so it joins round 3."""
    engine = remembering(lambda id, round: 1 if (id, round) == ("1", 1) else 0, offline=lambda id, round, _: round == 2)
    for skipped in (False, True, False):
        assert (engine.run_round().skipped is not None) == skipped
    assert engine.state["diary"][-1] == [("0", 2, 3), ("1", 1, 1), ("2", 2, 3)]


def test_delays_are_drawn_by_name_within_their_bound() -> None:
    engine = remembering(3)
    drawn = [engine.delay(id, round) for id in engine.ids for round in range(100)]
    assert set(drawn) == {0, 1, 2, 3}
    assert sum(drawn) / len(drawn) == pytest.approx(1.5, abs=0.25)
    assert drawn == [remembering(3).delay(id, round) for id in engine.ids for round in range(100)]
    for _ in range(20):
        engine.run_round()
    made = [(id, round) for page in engine.state["diary"] for id, _, round in page]
    assert len(set(made)) == len(made) > 10  # none is counted twice, and none is lost
    assert len(made) + len(engine.under_way) == sum(state["asked"] for state in engine.site_states.values())
