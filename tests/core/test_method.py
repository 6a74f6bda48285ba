"""How a method is declared: its options, its handlers, what may be left out, and what is refused with its place."""

import inspect
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from fedgist.core.errors import FedgistError
from fedgist.core.federation import Federation, Site
from fedgist.core.message import message, wire
from fedgist.core.method import Handler, Method, NoOptions, handler, handler_for, who_sees_what
from fedgist.options import option
from toys import NOTHING, federation, task_of


@message
class Ask:
    """A question."""


@message
class Told:
    """Its answer."""

    number: int = wire(torch.int64, additive=True)
    seen: int


@dataclass(frozen=True)
class Config:
    step: int = option(2, "How far a round goes.")


class Family(Method[Config]):
    """Abstract: a base of methods, with a handler of its own."""

    async def round(self, state: Any, fed: Federation) -> Any:
        told = await fed.ask(fed.ids, Ask(), Told)
        return {"number": state.get("number", 0) + self.config.step * told.sum.number}

    @handler
    async def tell(self, me: Site, msg: Ask) -> Told:
        return Told(1, 0)

    async def evaluate(self, state: Any, fed: Federation, test: Any) -> dict[str, float]:
        return {"accuracy": 0.0}


class Bare(Family):
    name = "bare"


def test_without_profiles_citation_or_summary_a_method_works() -> None:
    assert (Bare.profiles, Bare.citation, Bare.summary) == ({}, "", "")
    engine = federation(Bare(Config(step=3), task_of("mlp")), dict.fromkeys("ab", NOTHING))
    engine.run_round()
    engine.run_round()
    assert engine.state == {"number": 12}


def test_the_options_stand_in_the_brackets() -> None:
    class None_(Method):
        pass

    assert Method.Config is None_.Config is NoOptions
    assert Family.Config is Bare.Config is Config

    @dataclass(frozen=True)
    class More(Config):
        pass

    class Other(Method[More]):
        pass

    assert Other.Config is More
    assert Family.Config is Config, "another method's options are its own"


def test_handlers_are_found_by_what_they_answer_and_inherited() -> None:
    assert Bare.handlers == {Ask: Handler("tell", Ask, Told)}
    assert who_sees_what(Bare) == [("Ask", "Told", "number", True), ("Ask", "Told", "seen", False)]
    method = Bare(Config(), task_of("mlp"))
    assert handler_for(method, Ask).name == "tell"
    with pytest.raises(FedgistError, match=r"^bare: no client handler answers Told$"):
        handler_for(method, Told)


def test_what_has_a_name_is_final() -> None:
    with pytest.raises(TypeError, match=r"^Bare is final: Heir may wrap it, not inherit from it$"):

        class Heir(Bare):
            pass

    with pytest.raises(TypeError, match=r"^Bare is final: Twin may wrap it"):

        class Twin(Bare, Family):
            name = "twin"


def line_of(text: str) -> int:
    """The line of this file that begins so."""
    lines = inspect.getsource(inspect.getmodule(line_of)).splitlines()
    (found,) = (number for number, line in enumerate(lines, 1) if line.strip().startswith(text))
    return found


def refused() -> pytest.RaisesExc:
    return pytest.raises(TypeError, match=r"test_method\.py, line \d+: ")


def said(caught: Any, at: str) -> str:
    """The sentence of an error, after its place, which is the line that begins with `at`."""
    place, _, sentence = str(caught.value).partition(": ")
    assert place == f"{__file__}, line {line_of(at)}"
    return sentence


FORM = "`async def {}(self, me: Site, msg: Request) -> Reply`, with messages for Request and Reply"


def test_a_handler_is_a_coroutine() -> None:
    with refused() as caught:

        class Plain(Method):
            @handler  # of a plain function
            def plain(self, me: Site, msg: Ask) -> Told:
                raise AssertionError

    sentence = f"Plain.plain is no handler; one is written {FORM.format('plain')}"
    assert said(caught, "@handler  # of a plain function") == sentence


def test_a_handler_answers_a_message_with_a_message() -> None:
    with refused() as caught:

        class Number(Method):
            @handler  # of a number
            async def number(self, me: Site, msg: int) -> Told:
                raise AssertionError

    assert said(caught, "@handler  # of a number").startswith("Number.number is no handler")
    with refused() as caught:

        class Silent(Method):
            @handler  # without a reply
            async def silent(self, me: Site, msg: Ask) -> None:
                raise AssertionError

    assert said(caught, "@handler  # without a reply").startswith("Silent.silent is no handler")
    with refused() as caught:

        class Untyped(Method):
            @handler  # without types
            async def untyped(self, me, msg):  # type: ignore[no-untyped-def]
                raise AssertionError

    assert said(caught, "@handler  # without types").startswith("Untyped.untyped is no handler")


def test_who_answers_a_message_says_so() -> None:
    with refused() as caught:

        class Forgetful(Method):
            async def forgotten(self, me: Site, msg: Ask) -> Told:
                raise AssertionError

    found = said(caught, "async def forgotten(")
    assert found == "Forgetful.forgotten answers a message; write @handler above it"


def test_one_request_has_one_handler() -> None:
    with refused() as caught:

        class Twice(Family):
            @handler  # of what the family answers
            async def two(self, me: Site, msg: Ask) -> Ask:
                raise AssertionError

    assert said(caught, "@handler  # of what the family answers") == "tell and two both answer Ask"


def test_what_is_no_handler_is_left_alone() -> None:
    """Plain methods, other coroutines, and those that take a site and no message."""

    class Busy(Method):
        def plain(self, me: Site, msg: Ask) -> Told:
            raise AssertionError

        async def helper(self, x: int) -> int:
            raise AssertionError

        async def train(self, me: Site, rate: float) -> float:
            raise AssertionError

    assert Busy.handlers == {}
