"""Tuning: settings are tried on what is held out from the clients, the test set is never looked at."""

import dataclasses
import json
import tomllib
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from fedgist.cli import app
from fedgist.data import datasets
from fedgist.experiments import tuning

TINY = ["--dataset", "digits", "--clients", "3", "--rounds", "1", "--model", "mlp:hidden=8", "--device", "cpu"]
STEPS = ["--set", "steps=5"]


def call(*arguments: object, code: int = 0):
    result = CliRunner().invoke(app, [str(a) for a in arguments])
    assert result.exit_code == code, result.output
    return result


def test_the_best_setting_is_found_reused_and_taken_by_compare_and_run(tmp_path: Path) -> None:
    tune = ["tune", "fedavg", "fedprox", *TINY, *STEPS, "--set", "lr=0.0001,0.5", "--set", "mu=0,0.1"]
    tune += ["--out", tmp_path / "tune"]
    value = json.loads(call(*tune, "--json").stdout)
    assert [(t["method"], len(t["setting"])) for t in value["trials"]] == [("fedavg", 1)] * 2 + [("fedprox", 2)] * 4
    best = {t["method"]: t for t in value["trials"] if t["chosen"]}
    assert all(t["validation_accuracy"] <= best[t["method"]]["validation_accuracy"] for t in value["trials"])
    assert {t["setting"]["lr"] for t in best.values()} == {"0.5"}
    chosen = tomllib.loads(Path(value["chosen"]).read_text())
    assert chosen["fedavg"] == {"lr": 0.5} and chosen["fedprox"]["lr"] == 0.5
    made = {path: path.stat().st_mtime_ns for path in (tmp_path / "tune").glob("*/result.json")}
    assert len(made) == 6
    shown = call(*tune)
    assert "settings to try: fedavg 2, fedprox 4; --budget 2 makes them equally many" in shown.stderr
    assert {path: path.stat().st_mtime_ns for path in made} == made  # nothing was run again
    call("compare", "fedavg", "fedprox", *TINY, *STEPS, "--config", value["chosen"], "--out", tmp_path / "both", "-q")
    call("run", "fedprox", *TINY, *STEPS, "--config", value["chosen"], "--out", tmp_path / "one", "-q")
    for folder in ("both/fedavg", "both/fedprox", "one"):
        assert "lr = 0.5" in (tmp_path / folder / "config.toml").read_text()
        assert "validation = 0.0" in (tmp_path / folder / "config.toml").read_text()


def test_the_test_set_is_never_looked_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a test set of NaN under wrong labels the trials come out as they do without; a run on it does not."""
    load = datasets.load
    tune = ["tune", "fedavg", *TINY, *STEPS, "--set", "lr=0.1,0.5", "--json", "--out"]
    honest = json.loads(call(*tune, tmp_path / "honest").stdout)

    def poisoned(*arguments, **named):
        train, test = load(*arguments, **named)
        return train, dataclasses.replace(test, x=torch.full_like(test.x, torch.nan), y=torch.zeros_like(test.y))

    monkeypatch.setattr(datasets, "load", poisoned)
    blind = json.loads(call(*tune, tmp_path / "blind").stdout)
    assert [t["validation_accuracy"] for t in blind["trials"]] == [t["validation_accuracy"] for t in honest["trials"]]
    value = json.loads(call("run", "fedavg", *TINY, *STEPS, "--out", tmp_path / "run", "--json").stdout)
    assert value["accuracy"] in (0.0, 1.0)  # all images look alike, and all have one label: it can be noticed


def test_a_value_that_is_a_list_is_one_value(tmp_path: Path) -> None:
    """`architectures=a,b` is one setting of a run, for clients in turn, and no trial of each."""
    assert tuning.choices(["repshare"], ["architectures=mlp,cnn"]) == ({}, {"architectures": "mlp,cnn"})
    tried, _ = tuning.choices(["repshare"], ["architectures=mlp,cnn; cnn,cnn", "lr=1,2"])
    assert tried == {"architectures": ["mlp,cnn", "cnn,cnn"], "lr": ["1", "2"]}
    small = ["--dataset", "wine", "--clients", "2", "--rounds", "1", "--set", "steps=1", "--json"]
    both = "architectures=mlp:hidden=4,tabular:hidden=4;mlp:hidden=4"
    words = ["tune", "independent", "--model", "mlp:hidden=4", "--set", both, "--out", str(tmp_path), *small]
    trials = json.loads(call(*words).stdout)["trials"]
    assert [trial["setting"]["architectures"] for trial in trials] == both.removeprefix("architectures=").split(";")
    used = [tomllib.loads(path.read_text())["architectures"] for path in tmp_path.glob("*/config.toml")]
    assert sorted(map(len, used)) == [1, 2]
    assert tomllib.loads((tmp_path / "chosen.toml").read_text())["independent"]["architectures"] in used
    models = ["tune", "independent", "--set", "model=mlp:hidden=4,mlp:hidden=5", "--out", str(tmp_path / "m"), *small]
    call(*models)
    used = [tomllib.loads(path.read_text())["model"] for path in (tmp_path / "m").glob("*/config.toml")]
    assert sorted(used) == ["mlp:hidden=4", "mlp:hidden=5"]  # and not twice what `compare` would take


def test_a_budget_draws_equally_many_settings_of_each_grid_and_the_same_again() -> None:
    tried = {"lr": ["0.1", "0.2", "0.3"], "mu": ["0", "1"]}
    drawn = tuning.settings("fedprox", tried, 4, seed=1)
    assert len(drawn) == 4 and len({tuple(setting.items()) for setting in drawn}) == 4
    assert all(setting["lr"] in tried["lr"] and setting["mu"] in tried["mu"] for setting in drawn)
    assert drawn == tuning.settings("fedprox", tried, 4, seed=1)
    assert drawn != tuning.settings("fedprox", tried, 4, seed=2)
    assert tuning.settings("fedavg", tried, 4, seed=1) == [{"lr": value} for value in tried["lr"]]
    whole = tuning.settings("fedprox", tried, None, seed=1)
    assert len(whole) == 6 == len({tuple(setting.items()) for setting in whole})


def test_what_cannot_be_tried_is_said() -> None:
    for wrong, said in (
        ([], "nothing to try"),
        (["--set", "lr=0.1"], "nothing to try"),
        (["--set", "lr=0.1,"], "without empty values"),
        (["--set", "lrr=0.1,0.2"], "unknown option 'lrr'"),
        (["--set", "seed=1,2"], "seed is no setting of a method"),
    ):
        assert said in call("tune", "fedavg", *wrong, code=2).stderr


def test_tuning_for_private_runs_is_said_to_be_uncharged(tmp_path: Path) -> None:
    tune = ["tune", "gist", *TINY, "--set", "clip=0.25,1", "--out", tmp_path]
    assert tuning.UNCHARGED in call(*tune, "--epsilon", "8").stderr.replace("\n", " ")
    assert tuning.UNCHARGED in (tmp_path / "chosen.toml").read_text()
    assert tuning.UNCHARGED not in call(*tune).stderr.replace("\n", " ")
    assert tuning.UNCHARGED not in (tmp_path / "chosen.toml").read_text()
