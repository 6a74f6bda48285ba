"""Models that learn from soft labels, seen at Co-Dream: what is remembered, when lessons come, who learns."""

from typing import Any

import pytest
import torch

from fedgist import storage
from fedgist.engines.local import LocalEngine
from toys import play, toy_federation


def build(**given: Any) -> LocalEngine:
    """Co-Dream on 200 real 8×8 digits, evenly split over three clients, all of them active."""
    usual = {"limit": 200, "clients": 3, "partition": "stratified", "active": 0, "seed": 3}
    return toy_federation("codream", **usual | given)


def test_the_buffer_is_first_in_first_out() -> None:
    engine = play(build(buffer=9))
    first = engine.state["dreams"]
    play(engine)
    for state in (engine.state, *engine.site_states.values()):
        assert torch.equal(state["buffer"]["x"], torch.cat([first[-3:], engine.state["dreams"]]))
        assert len(state["buffer"]["logits"]) == 9


def test_lessons_come_every_so_many_rounds() -> None:
    """The student's and the clients': until then both are as if lessons had no steps."""
    engine, untaught = build(distil_every=2), build(distil_steps=0)
    for taught in (False, True):
        play(engine)
        play(untaught)
        assert (storage.digest(engine.state["w"]) != storage.digest(untaught.state["w"])) == taught
        for id in engine.ids:
            mine, others = (storage.digest(one.site_states[id]["w"]) for one in (engine, untaught))
            assert (mine != others) == taught


def test_learners_server_leaves_the_clients_as_warmed_up() -> None:
    """Dreaming touches neither weights nor running statistics."""
    engine = play(build(learners="server"))
    after_warm_up = {id: storage.digest(state) for id, state in engine.site_states.items()}
    play(engine)
    assert {id: storage.digest(state) for id, state in engine.site_states.items()} == after_warm_up
    assert all("buffer" not in state for state in engine.site_states.values())


@pytest.mark.parametrize("noise", [0.0, 1.0])
def test_no_warm_up_is_none(noise: float) -> None:
    """Not the steps of a usual round either, where clients train by DP-SGD."""
    engine = build(model="mlp:hidden=16", learners="server", warm_up=0, weighting="uniform", noise_multiplier=noise)
    before = {me.id: storage.digest(me.state["w"]) for me in engine.clients()}
    play(engine)
    assert {me.id: storage.digest(me.state["w"]) for me in engine.clients()} == before


def test_a_fresh_student_forgets() -> None:
    engine = play(build(fresh_student=True, distil_steps=0), 1)
    first = storage.digest(engine.state["w"])
    assert storage.digest(play(engine).state["w"]) != first
