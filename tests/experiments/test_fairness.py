"""Who gains by taking part: what is said of clients is what each of them would have found for itself."""

import json
from pathlib import Path

import pytest
import torch

from fedgist import methods
from fedgist.core.work import InRuns
from fedgist.experiments import config as configs
from fedgist.experiments import fairness, runner, trained
from fedgist.experiments.fairness import EVERYONE, GLOBAL, OWN, OWN_LABELS
from fedgist.experiments.folder import RunFolder
from fedgist.experiments.inputs import from_dataset

GROUND = {"clients": 4, "alpha": 0.1, "rounds": 2, "device": "cpu", "model": "mlp:hidden=8", "steps": 3, "lr": 0.1}


def test_the_worst_tenth_the_spread_and_who_loses() -> None:
    """Twenty clients with 0.00, 0.05, …: the worst two have 0.025. Alone all had 0.5, which ten do not reach."""
    accuracies = {str(i): i / 20 for i in range(20)}
    found = fairness.judge(accuracies, dict.fromkeys(accuracies, 0.5))
    assert (found.clients, found.gain, found.lose) == (20, 9, 10)
    assert found.mean == pytest.approx(0.475)
    assert found.worst_tenth == pytest.approx(0.025)
    assert found.deviation == pytest.approx(((20**2 - 1) / 12) ** 0.5 / 20)  # of a uniform distribution
    assert found.gain_worst_tenth == pytest.approx(-0.475)
    assert found.losers is not None and list(found.losers)[:2] == ["0", "1"]
    assert found.losers["0"] == pytest.approx(-0.5)
    assert fairness.judge(accuracies, None).gain is None
    assert fairness.judge(accuracies, {"0": 0.5}).gain is None  # of the others nothing is known


@pytest.mark.parametrize("ground", [{}, {"client_test": "own-labels"}, {"discrepancy": ("rotation", "labels")}])
def test_each_client_is_judged_on_its_labels_and_on_everybodys_test_set(tmp_path: Path, ground: dict) -> None:
    config = configs.resolve({**GROUND, "method": "independent", **ground})
    runner.run(config, tmp_path / "run")
    accuracies, _ = fairness.read(RunFolder(tmp_path / "run"))
    inputs = from_dataset(runner.prepare(config))
    assert accuracies.keys() == {OWN}
    for id, client in inputs.sites.items():
        net = trained.read(tmp_path / "run" / "clients" / id)[0]
        right = net(inputs.test[0]).argmax(1) == inputs.test[1]
        assert accuracies[OWN][EVERYONE][id] == pytest.approx(right.double().mean().item())
        assert client.test is not None
        x, y = client.test
        held = torch.isin(y, client.y.unique())
        right = net(x[held]).argmax(1) == y[held]
        assert accuracies[OWN][OWN_LABELS][id] == pytest.approx(right.double().mean().item())


def test_what_came_out_is_judged_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every client's model after the last round and, for its card and for how its client fares, when it is kept."""
    config = configs.resolve({**GROUND, "method": "independent", "eval_every": 0, "engine": "sequential"})
    judged, whole = [], InRuns.__call__
    monkeypatch.setattr(InRuns, "__call__", lambda self, w, x, y: judged.append(len(y)) or whole(self, w, x, y))
    runner.run(config, tmp_path / "run")
    assert sum(judged) == 2 * config.clients * len(from_dataset(runner.prepare(config)).test[1])


def test_a_global_model_is_judged_the_same_way_and_against_learning_alone(tmp_path: Path) -> None:
    config = configs.resolve({**GROUND, "method": "fedavg"})
    alone = fairness.alone(config)
    assert alone.method == "independent"
    assert (alone.rounds, alone.options.lr, alone.options.steps) == (2, 0.1, 3)
    runner.run(alone, tmp_path / "alone")
    runner.run(config, tmp_path / "run", alone=RunFolder(tmp_path / "alone"))
    said = json.loads((tmp_path / "run" / "result.json").read_text())["fairness"]
    accuracies, known = fairness.read(RunFolder(tmp_path / "run"))
    inputs = from_dataset(runner.prepare(config))
    net = trained.read(tmp_path / "run" / "model")[0]
    for id, client in inputs.sites.items():
        held = torch.isin(inputs.test[1], client.y.unique())
        right = net(inputs.test[0][held]).argmax(1) == inputs.test[1][held]
        assert accuracies[GLOBAL][OWN_LABELS][id] == pytest.approx(right.double().mean().item())
    assert known is not None
    gains = {id: accuracies[GLOBAL][OWN_LABELS][id] - known[OWN_LABELS][id] for id in inputs.sites}
    of = said[GLOBAL][OWN_LABELS]
    assert of["gain"] == sum(gain > 0 for gain in gains.values())
    assert of["losers"] == {id: gain for id, gain in sorted(gains.items(), key=lambda one: one[1]) if gain < 0}
    assert of["losers"]  # a client with few labels knows those better alone


def test_students_and_clients_are_both_judged_and_pooled_data_is_nobodys(tmp_path: Path) -> None:
    toy = {"clients": 3, "device": "cpu", "dataset": "digits"}
    for method, kinds in (("codream", {GLOBAL, OWN}), ("gist", {GLOBAL}), ("centralized", set())):
        runner.run(configs.resolve({**toy, "method": method}, profile="toy"), tmp_path / method)
        assert fairness.read(RunFolder(tmp_path / method))[0].keys() == kinds


def test_alone_means_the_same_training_only_where_the_method_has_any() -> None:
    """FedDM's steps and batch are those of its images."""
    usual = methods.find("independent").Config()
    config = configs.resolve({"method": "feddm", "steps": 77, "clients": 7, "dataset": "mnist5k"})
    alone = fairness.alone(config)
    assert (alone.clients, alone.dataset, alone.options.steps) == (7, "mnist5k", usual.steps)


def test_a_run_stops_before_it_would_send_more_than_it_may(tmp_path: Path) -> None:
    """A round of FedAvg always costs the same: with 3.5 times that it makes three, evaluated at the end."""
    config = configs.resolve({**GROUND, "method": "fedavg", "rounds": 6, "eval_every": 0})
    whole = runner.run(config)
    a_round = (whole.bytes_up + whole.bytes_down) // 6
    bounded = configs.resolve({**configs.flat(config), "max_bytes": int(3.5 * a_round)})
    result = runner.run(bounded, tmp_path / "run")
    assert [row["round"] for row in result.metrics] == [1, 2, 3]
    assert result.bytes_up + result.bytes_down == 3 * a_round
    assert "accuracy" in result.metrics[-1]
    assert json.loads((tmp_path / "run" / "result.json").read_text())["rounds"] == 3
    little = runner.run(configs.resolve({**configs.flat(config), "max_bytes": 1}))
    assert len(little.metrics) == 1  # only then it is known what a round costs
