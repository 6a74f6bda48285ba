"""Workers on Ray give what one process gives, keep what is a client's own, and may die."""

import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from fedgist.core.work import Place
from fedgist.engines.local import LocalEngine
from fedgist.engines.spread import WORTH_KEEPING, Spread
from toys import apart, play, toy_federation

ray = pytest.importorskip("ray")
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]  # Ray's own warnings


@pytest.fixture(scope="module")
def spread() -> Iterator[Any]:
    ray.init(address="local", num_cpus=4, include_dashboard=False, log_to_driver=False)
    yield Spread("sequential", Place(), "2")
    ray.shutdown()


def on(executor: Any, method: str, **given: Any) -> LocalEngine:
    engine = toy_federation(method, **given)
    if executor is not None:
        engine.executor = executor
    return engine


@pytest.mark.parametrize("method", ["fedavg", "scaffold", "feddm", "codream", "gist", "repshare"])
def test_the_same_bits_as_one_process(spread: Any, method: str) -> None:
    """Each worker's engine is the sequential one: work that is done elsewhere is the same work."""
    here, there = play(on(None, method), 2), play(on(spread, method), 2)
    assert there.digest() == here.digest()
    assert there.ledger.totals() == here.ledger.totals()


def test_what_is_a_clients_own_is_sent_twice_at_most(spread: Any) -> None:
    """First as it is; when it comes again, to be kept; from then on its name alone."""
    engine = on(spread, "fedavg", active=0)
    play(engine, 3)
    data = [data.x for data in engine.data.values() if data.x.numel() >= WORTH_KEEPING]
    homes = [spread._homes[x] for x in data]
    assert {home.worker for home in homes} == {0, 1}
    assert all(home.life == spread._desks[home.worker].life for home in homes)
    before = [(home.worker, home.key) for home in homes]
    play(engine, 1)
    assert [(spread._homes[x].worker, spread._homes[x].key) for x in data] == before


def test_a_worker_that_dies_is_replaced_and_the_round_ends_the_same(spread: Any) -> None:
    here = play(on(None, "fedavg"), 4)
    there = play(on(spread, "fedavg"), 2)
    os.kill(ray.get(spread._desks[0].actor.pid.remote()), signal.SIGKILL)
    play(there, 2)
    assert spread._desks[0].life == 1
    assert there.digest() == here.digest()


def test_stacked_workers_equal_to_rounding(spread: Any) -> None:
    here, there = play(on(None, "fedavg"), 2), play(on(Spread("stacked", Place(), "2"), "fedavg"), 2)
    size = torch.cat([w.flatten() for w in here.state["w"].values()]).norm()
    assert apart(here.state["w"], there.state["w"]) < 1e-5 * size
