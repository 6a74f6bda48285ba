"""What a node may ask and see: samples of clients, and replies of which each field is seen in one place only."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from fedgist.core.federation import Answers, Federation, Site
from fedgist.core.message import message, wire
from fedgist.core.method import Method, handler
from fedgist.core.rng import Rng
from toys import NOTHING, federation, task_of


def test_a_sample_is_within_its_bounds() -> None:
    federation = Federation("server", tuple(str(i) for i in range(10)), 1, Rng(0), {}, [])
    assert len(federation.sample(3)) == 3
    assert len(federation.sample(0.25)) == 2
    assert federation.sample(None) == list(federation.ids)
    for wrong in (11, 2.5, -1):
        with pytest.raises(ValueError, match=f"active = {wrong}: choose a whole number from 1 to 10"):
            federation.sample(wrong)


@message
class Which:
    """Who are you?"""


@message
class Name:
    """A part of a sum, and a number that the asker sees."""

    share: Tensor = wire(shape=(1,), additive=True)
    number: int


class Curious(Method):
    """Reads the answers of its clients in any way that a test wants."""

    name = "curious"

    def __init__(self, read: Callable[[Answers[Name]], Any]):
        super().__init__(None, task_of("mlp"))
        self.read = read

    async def round(self, state: Any, fed: Federation) -> Any:
        return {"read": self.read(await fed.ask(fed.ids, Which(), Name))}

    @handler
    async def answer(self, me: Site, msg: Which) -> Name:
        return Name(torch.full((1,), 2.0), 10 + int(me.id))

    async def evaluate(self, state: Any, fed: Federation, test: Any) -> dict[str, float]:
        return {}


def after_a_round(read: Callable[[Answers[Name]], Any]) -> Any:
    """What a method gets to know in a real round with three clients."""
    engine = federation(Curious(read), dict.fromkeys("012", NOTHING))
    engine.run_round()
    return engine.state["read"]


def test_answers_are_a_sum_and_what_each_client_shows() -> None:
    assert after_a_round(lambda answers: answers.sum.share.item()) == 6
    assert after_a_round(lambda answers: {id: answers[id].number for id in answers}) == {"0": 10, "1": 11, "2": 12}
    assert after_a_round(lambda answers: (list(answers.ids), len(answers), dict(answers.late))) == (
        ["0", "1", "2"],
        3,
        {},
    )


@pytest.mark.parametrize(
    ("read", "said"),
    [
        (
            lambda answers: answers["1"].share,
            r"Name\.share is additive: only the sum is visible; read it as answers\.sum\.share",
        ),
        (
            lambda answers: answers.sum.number,
            r"Name\.number is seen of each client and not summed; read it as answers\[id\]\.number",
        ),
        (lambda answers: answers["1"].nmae, "Name has no field 'nmae'; it has share, number"),
        (lambda answers: answers.sum.nmae, "Name has no field 'nmae'; it has share, number"),
    ],
    ids=["additive field of one client", "visible field of the sum", "no field of a client", "no field of the sum"],
)
def test_what_cannot_be_seen_says_where_it_is(read: Callable[[Answers[Name]], Any], said: str) -> None:
    with pytest.raises(AttributeError, match=f"^{said}$"):
        after_a_round(read)


def test_a_client_that_did_not_answer_is_not_among_the_answers() -> None:
    engine = federation(
        Curious(lambda answers: [id for id in "012" if id in answers.visible]),
        dict.fromkeys("012", NOTHING),
        offline=lambda id, round, exchange: id == "1",
    )
    engine.run_round()
    assert engine.state["read"] == ["0", "2"]
