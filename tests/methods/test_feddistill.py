"""FedDistill and FedDistill+: without a pull they are what they extend; means are over those who hold a label."""

from typing import Any

import pytest
import torch

from fedgist.data.client_data import ClientData
from fedgist.engines.local import LocalEngine
from toys import CLASSES, apart, clients, federation, play, received

LOCAL: dict[str, Any] = {"steps": 3, "batch": 8, "lr": 0.1}


def users(*sizes: int) -> dict[str, ClientData]:
    return clients(*sizes, test=30, seed=5)


@pytest.mark.parametrize("form", ["kl", "mse"])
def test_feddistill_without_pull_is_independent_learning(form: str) -> None:
    """In float64, where a learning rate that was rounded to float32 on the way would show."""
    sites, settings = users(20, 20), LOCAL | {"dtype": torch.float64}
    alone = play(federation("independent", sites, "cnn", **settings), 2)
    same, other = (
        play(federation("feddistill", sites, "cnn", **settings, form=form, pull=pull), 2) for pull in (0.0, 1.0)
    )
    for id in sites:
        assert apart(alone.site_states[id]["w"], same.site_states[id]["w"]) < 1e-14
        assert apart(alone.site_states[id]["w"], other.site_states[id]["w"]) > 1e-4


def test_feddistill_plus_without_pull_is_fedavg() -> None:
    sites = users(20, 7)
    plain = play(federation("fedavg", sites, "cnn", **LOCAL), 2).state["w"]
    same, other = (
        play(federation("feddistill+", sites, "cnn", **LOCAL, pull=pull), 2).state["w"] for pull in (0.0, 5.0)
    )
    assert apart(plain, same) < 1e-6
    assert apart(plain, other) > 1e-4


@pytest.mark.parametrize("method", ["feddistill", "feddistill+"])
def test_absent_labels_are_absent_from_the_mean(method: str) -> None:
    """Label 0 has two holders, label 1 one, the others none: the table's rows are means over holders only."""
    sites = users(20, 20)
    sites = {id: ClientData(d.x, d.y % (1 + int(id)), CLASSES, d.test) for id, d in sites.items()}
    engine = play(federation(method, sites, "mlp", **LOCAL), 1)
    assert engine.state["known"].tolist() == [1, 1, 0, 0]
    assert torch.equal(engine.state["table"][2:], torch.zeros(2, CLASSES))
    # in the first round each client does alone what it does in company
    single = [play(federation(method, {id: sites[id]}, "mlp", **LOCAL), 1).state["table"] for id in ("0", "1")]
    assert torch.allclose(engine.state["table"][0], (single[0][0] + single[1][0]) / 2, atol=1e-5)
    assert torch.allclose(engine.state["table"][1], single[1][1], atol=1e-5)


def mean_by_label(engine: LocalEngine, id: str) -> torch.Tensor:
    """A client's evaluated logits, averaged label by label, one label after the other."""
    data, model = engine.data[id], engine.method.task.models[engine.info[id]["model"]]
    logits = model(engine.site_states[id]["w"], data.x).logits
    return torch.stack([logits[data.y == c].mean(0) for c in range(CLASSES)])


def test_logits_after_the_round_are_those_of_the_model_as_it_is_then() -> None:
    """memory="after", as the thesis's code has it: BatchNorm evaluated, every sample once."""
    engine = play(federation("feddistill", users(40, 40), "cnn", **LOCAL, memory="after"), 2)
    table = (mean_by_label(engine, "0") + mean_by_label(engine, "1")) / 2
    assert torch.allclose(engine.state["table"], table, atol=1e-5)
    during = play(federation("feddistill", users(40, 40), "cnn", **LOCAL), 2)
    assert not torch.allclose(during.state["table"], table, atol=1e-2)


def test_an_untrained_start_draws_to_the_untrained() -> None:
    still = federation("feddistill", users(40, 40), "mlp", **LOCAL | {"lr": 1e-12}, untrained_start=True)
    kept = received(still)
    play(still, 1)
    assert torch.allclose(kept[0].sum.means, mean_by_label(still, "0") + mean_by_label(still, "1"), atol=1e-5)
    drawn, plain = (
        play(federation("feddistill", users(40, 40), "mlp", **LOCAL, untrained_start=start), 1)
        for start in (True, False)
    )
    assert apart(plain.site_states["0"]["w"], drawn.site_states["0"]["w"]) > 1e-4


def test_logits_of_the_round_and_of_the_run() -> None:
    """memory="run" averages over all that a client ever saw: after two equal rounds, the mean of both rounds' means."""
    site = {"0": ClientData(*(t[:8] for t in (users(8)["0"].x, torch.zeros(8, dtype=torch.int64))), CLASSES)}
    tables = {}
    for memory in ("round", "run"):
        engine = federation("feddistill", site, "mlp", **LOCAL, memory=memory, pull=0.0)
        tables[memory] = [play(engine, 1).state["table"][0] for _ in range(2)]
    assert torch.equal(tables["run"][0], tables["round"][0])
    assert torch.allclose(tables["run"][1], (tables["round"][0] + tables["round"][1]) / 2, atol=1e-5)
