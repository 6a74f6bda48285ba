"""What single clients choose for themselves, from the texts that say so."""

from dataclasses import dataclass

import pytest

from fedgist.core.errors import FedgistError
from fedgist.families.own_choices import OwnChoices
from fedgist.options import option


@dataclass(frozen=True)
class Choice:
    share: float = option(1.0, "Which part is shared.", low=0, high=1)
    peers: tuple[str, ...] = option((), "Whom a client listens to.")


@dataclass(frozen=True)
class Config(Choice):
    rounds: int = option(5, "What no client decides.")


RUN = Config(share=0.5)


def test_who_says_nothing_does_as_the_run_says() -> None:
    choices = OwnChoices(Choice, RUN, [])
    assert choices.of("3") == choices.everybody == Choice(share=0.5)
    assert choices.all() == [Choice(share=0.5)]


def test_a_client_changes_what_it_names_and_no_more() -> None:
    """`+` stands for the comma, which separates clients."""
    choices = OwnChoices(Choice, RUN, ["3:peers=1+2", "site-a:share=0:peers=0"])
    assert choices.of("3") == Choice(share=0.5, peers=("1", "2"))
    assert choices.of("site-a") == Choice(share=0.0, peers=("0",))
    assert choices.of("1") == Choice(share=0.5)
    assert choices.all() == [choices.of(id) for id in ("1", "3", "site-a")]


@pytest.mark.parametrize(
    ("texts", "said"),
    [
        (["3"], "choices are written client:key=value:key=value, not '3'"),
        (["3:share"], "choices are written client:key=value:key=value, not '3:share'"),
        (["3:share=0", "3:peers=1"], "choices has client 3 twice: join its choices, as in 3:key=value:key=value"),
        (["3:shaer=0"], "unknown option 'shaer'; did you mean 'share'"),
        (["3:rounds=2"], "unknown option 'rounds'"),
        (["3:share=2"], "share must be at most 1, not 2"),
    ],
)
def test_mistakes_are_explained(texts: list[str], said: str) -> None:
    with pytest.raises(FedgistError) as caught:
        OwnChoices(Choice, RUN, texts)
    assert str(caught.value).startswith(said)
