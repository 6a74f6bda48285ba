"""Executors by name, and what is said about names that are none."""

import sys

import pytest

from fedgist.core.errors import FedgistError
from fedgist.engines import NAMES, check_name, executor


@pytest.mark.parametrize("name", NAMES)
def test_an_executor_says_its_name(name: str) -> None:
    assert executor(name).name == name


def test_a_name_that_is_none() -> None:
    with pytest.raises(FedgistError, match="unknown engine 'stackd'; did you mean 'stacked'"):
        executor("stackd")
    with pytest.raises(FedgistError, match="known: auto, compiled, sequential, stacked, threaded"):
        check_name("gpu", ("auto", *NAMES))


def test_the_engine_that_was_removed_is_explained() -> None:
    with pytest.raises(FedgistError, match="no engine measured any more: use auto"):
        executor("measured")


@pytest.mark.parametrize(
    ("workers", "words"), [("2", "pip install 'fedgist\\[ray\\]'"), ("many", "not 'many'"), ("0", "not '0'")]
)
def test_workers_say_what_they_need(workers: str, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(FedgistError, match=words):
        executor("stacked", workers=workers)
