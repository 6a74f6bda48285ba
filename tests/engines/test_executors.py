"""Executors by name, and what is said about names that are none."""

import sys
import threading

import pytest
import torch
from torch import Tensor

from fedgist import models
from fedgist.core.errors import FedgistError
from fedgist.core.message import Params
from fedgist.core.rng import Rng
from fedgist.core.task import Output
from fedgist.core.work import Place, compute
from fedgist.engines import NAMES, at, check_name, executor, one_thread
from fedgist.learning.evaluation import BATCH, Tally

MODEL = models.build("mlp", (1, 4, 4), 3, hidden=(5,))
W, X = MODEL.init(Rng(0)), Rng(1).normal(7 * BATCH["cpu"] + 57, 1, 4, 4)
Y = Rng(2).integers(3, len(X))


@pytest.mark.parametrize("name", NAMES)
def test_an_executor_says_its_name(name: str) -> None:
    assert executor(name).name == name


def test_a_name_that_is_none() -> None:
    with pytest.raises(FedgistError, match="unknown engine 'stackd'; did you mean 'stacked'"):
        executor("stackd")
    with pytest.raises(FedgistError, match="known: auto, compiled, sequential, stacked, threaded"):
        check_name("gpu", ("auto", *NAMES))


@pytest.mark.parametrize(
    ("workers", "words"), [("2", "pip install 'fedgist\\[ray\\]'"), ("many", "not 'many'"), ("0", "not '0'")]
)
def test_workers_say_what_they_need(workers: str, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(FedgistError, match=words):
        executor("stacked", workers=workers)


@pytest.mark.parametrize("engine", ["threaded", "stacked"])
@pytest.mark.parametrize("workers", [1, 3])
def test_a_lone_evaluation_has_the_bits_of_the_sequential_one_however_many_threads_take_it(
    engine: str, workers: int
) -> None:
    (alone,) = at(engine, Place(), workers).drive([compute(Tally(MODEL), W, X, Y)])
    with one_thread(engine, "cpu"):  # as the workers have
        (truth,) = executor("sequential").drive([compute(Tally(MODEL), W, X, Y)])
    assert all(torch.equal(alone[name], truth[name]) for name in truth)
    assert truth["images"].sum() == len(X)


@pytest.mark.parametrize("engine", ["threaded", "stacked"])
def test_a_lone_evaluation_is_done_by_several_threads_at_once(engine: str) -> None:
    """Nobody gets past its first batch before another thread has begun one."""
    threads, two = set(), threading.Event()

    def model(w: Params, x: Tensor) -> Output:
        threads.add(threading.get_ident())
        if len(threads) > 1:
            two.set()
        assert two.wait(20), "one thread alone"
        return MODEL(w, x)

    at(engine, Place(), 2).drive([compute(Tally(model), W, X, Y)])


@pytest.mark.parametrize("engine", ["threaded", "stacked"])
def test_an_error_in_a_lone_evaluation_ends_it(engine: str) -> None:
    def model(w: Params, x: Tensor) -> Output:
        if len(x) < BATCH["cpu"]:
            raise FedgistError("these are fewer")
        return MODEL(w, x)

    with pytest.raises(FedgistError, match="these are fewer"):
        at(engine, Place(), 2).drive([compute(Tally(model), W, X, Y)])
