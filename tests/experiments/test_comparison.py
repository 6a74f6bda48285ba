"""Methods side by side: the ground that they share, and how they stand on it."""

import csv
import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from fedgist import engines, methods
from fedgist.cli import app
from fedgist.core.errors import FedgistError
from fedgist.core.ledger import COLUMNS
from fedgist.engines.local import LocalEngine
from fedgist.experiments import comparison, runner
from fedgist.experiments.folder import RunFolder
from fedgist.experiments.inputs import from_dataset


def test_all_methods_have_one_partition_one_test_set_and_one_start() -> None:
    names = [name for name in methods.available() if name not in ("fedsgd", "dp-fedavg")]  # no BatchNorm
    layer = {"dataset": "digits", "proxy": "100", "device": "cpu", "seed": 3, "model": "mlp:hidden=8:norm=batch"}
    configs, _ = comparison.compare(names, layer, None)
    hashes, starts, tests = set(), {}, []
    for config in map(runner.prepare, configs):
        inputs = from_dataset(config)
        method = methods.find(config.method)(config.options, inputs.task)
        executor = engines.executor("sequential")
        engine = LocalEngine(method, inputs.sites, seed=config.seed, executor=executor, info=inputs.info)
        hashes.add(inputs.sha256)
        tests.append(inputs.test)
        if not method.learns and (weights := method.weights(engine.state)) is not None:
            starts[config.method] = weights
        assert config.eval_every == 1
    assert len(hashes) == 1
    assert all(torch.equal(a, b) for test in tests for a, b in zip(test, tests[0], strict=True))
    assert {"fedavg", "feddm", "codream", "fedgen", "tofu", "feddf"} <= starts.keys()
    first = starts["fedavg"]
    for name, weights in starts.items():
        assert weights.keys() == first.keys(), name
        assert all(torch.equal(weights[key], first[key]) for key in first), name


def test_where_profiles_disagree_all_get_the_usual_and_a_note() -> None:
    configs, notes = comparison.compare(["fedavg", "tofu", "fedgen"], {}, None)
    assert {config.partition for config in configs} == {"dirichlet"}
    assert {config.alpha for config in configs} == {0.5}
    assert {config.model for config in configs} == {"mlp:norm=batch"}
    assert {config.dataset for config in configs} == {"mnist5k"}  # on which all profiles agree
    assert notes[0] == "profile small, where no option says otherwise"
    assert "partition dirichlet for all, where the profile of tofu has iid; another with --set partition=…" in notes
    configs, notes = comparison.compare(["fedavg", "tofu"], {"partition": "iid", "model": "lenet5"}, "demo")
    assert {(config.partition, config.model) for config in configs} == {("iid", "lenet5")}
    assert notes[0] == "profile demo, where no option says otherwise"
    assert not any("for all" in note for note in notes)


def folder(
    path: Path, accuracies: list[float], replies: dict[str, list[tuple[str, bool]]], topology: str = "none"
) -> RunFolder:
    """A run that never was: accuracy by round, 100 bytes up and 50 down each, and the replies that travelled."""
    run = RunFolder(path)
    path.mkdir(parents=True)
    run.config.write_text(f'method = "fedavg"\ntopology = "{topology}"\n')
    for empty in (run.partition, run.environment):
        empty.write_text("{}")
    rows = [
        {"round": i, "accuracy": a, "bytes_up": 100 * i, "bytes_down": 50 * i}
        for i, a in enumerate(accuracies, start=1)
    ]
    run.metrics.write_text("".join(json.dumps(row) + "\n" for row in rows))
    sees = [{"reply": name, "field": f, "additive": sums} for name, fields in replies.items() for f, sums in fields]
    evaluated = {"reply": "Score", "field": "each", "additive": False}  # evaluation is no part of a method
    run.method.write_text(json.dumps({"sees": [*sees, evaluated, {**evaluated, "reply": "Never"}]}))
    with run.ledger.open("w", newline="") as file:
        out = csv.DictWriter(file, COLUMNS)
        out.writeheader()
        up = {"round": 1, "direction": "up", "header_bytes": 10, "payload_bytes": 90}
        out.writerow({**up, "phase": "evaluation", "type": "x.Score"})
        for name in replies:
            out.writerow({**up, "phase": "round", "type": f"x.{name}"})
    return run


def test_rounds_and_bytes_to_a_target(tmp_path: Path) -> None:
    good = [folder(tmp_path / "a", [0.5, 0.7, 0.9, 0.8], {"Local": [("pw", True)]})]
    mixed = [
        folder(tmp_path / "b", [0.75, 0.6], {"Shown": [("w", False), ("p", True)]}),
        folder(tmp_path / "c", [0.1, 0.2], {"Shown": [("w", False), ("p", True)]}),
    ]
    silent = [folder(tmp_path / "d", [0.1], {})]
    groups = comparison.groups([good, mixed, silent])
    target = comparison.target(groups)
    assert target == pytest.approx(0.95 * 0.8)  # the best last accuracy, not the best ever
    assert [[run.reached(target) for run in group.runs] for group in groups] == [[(3, 450)], [None, None], [None]]
    assert [[run.reached(0.7) for run in group.runs] for group in groups] == [[(2, 300)], [(1, 150), None], [None]]
    assert [group.first.server_sees() for group in groups] == ["sums only", "each client's model", "nothing"]


def test_peers_have_no_server_that_sees_anything(tmp_path: Path) -> None:
    peers = folder(tmp_path / "run", [0.5], {"Shown": [("w", False), ("p", True)]}, topology="ring")
    (group,) = comparison.groups([[peers]])
    assert group.first.server_sees() == "no server; neighbours see model"


def test_the_table_shows_targets_and_what_the_server_sees(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    tiny = ["--dataset", "digits", "--clients", "3", "--profile", "toy", "--model", "mlp:hidden=8", "--device", "cpu"]
    arguments = ["compare", "fedavg", "feddm", *tiny, "--set", "active=0", "--target", "0.05", "--out", "both"]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    assert "rounds to 0.0500" in result.stdout
    costs = result.stdout.partition("scores, %")[0].splitlines()
    lines = {line.split("│")[1].strip(): line for line in costs if line.startswith("│")}
    assert "sums only" in lines["fedavg"]
    assert "each client's images" in lines["feddm"]
    assert result.stderr.splitlines()[0] == "profile toy, where no option says otherwise"
    again = CliRunner().invoke(app, [*arguments, "--resume", "--json"])
    value = json.loads(again.stdout)
    assert value["target"] == 0.05
    assert value["runs"][0]["rounds_to_target"] == [1]
    assert value["runs"][1]["server_sees"].startswith("each client's images")
    refused = CliRunner().invoke(app, ["compare", "fedavg", "feddm", "--target", "90"])
    assert refused.exit_code == 2
    assert "--target must be an accuracy above 0 and at most 1" in refused.stderr


def test_a_method_named_twice_is_refused() -> None:
    with pytest.raises(FedgistError, match="named twice"):
        comparison.compare(["fedavg", "fedavg"], {}, None)


def test_what_the_server_sees_is_said_in_words_not_in_letters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    tiny = ["--dataset", "digits", "--clients", "3", "--profile", "toy", "--model", "mlp:hidden=8", "--device", "cpu"]
    result = CliRunner().invoke(app, ["compare", "fedensemble", "fedgen", *tiny, "--out", "both", "--json"])
    assert result.exit_code == 0, result.output
    said = [run["server_sees"] for run in json.loads(result.stdout)["runs"]]
    assert said[0] == "each client's model, weight in the mean"
    assert said[1] == "each client's head, own counts, weight in the mean"
    assert said[0] in (tmp_path / "both/report.html").read_text(encoding="utf-8").replace("&#39;", "'")
