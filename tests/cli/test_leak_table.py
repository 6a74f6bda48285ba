"""`fedgist attack table`: all rows are tuned by as many trials on held-out samples; one that breaks takes no other."""

import json
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from fedgist.cli import app
from fedgist.dp.accountant import MissingLibrary
from fedgist.dp.budget import known_plans
from fedgist.experiments import config as configs
from fedgist.experiments import leak_table

TINY = ("attack", "table", "--dataset", "digits", "--limit", "150", "--effort", "2", "--device", "cpu")
SETTINGS = ("grid=2", "grid=3", "grid=4", "grid=5")


def call(*arguments, code=0):
    result = CliRunner().invoke(app, [str(a) for a in arguments])
    assert result.exit_code == code, result.output
    return result


def read(path="leaks.json"):
    return json.loads(Path(path).read_text("utf-8"))


@pytest.mark.parametrize("dataset", ["digits", "mnist5k", "mnist", "fashion-mnist", "cifar10"])
def test_all_rows_that_can_run_try_as_many_settings(dataset):
    refused = {"feddm, ε = 8", "fedgen, ε = 8", "repshare, ε = 8", "fedtgp, ε = 8"}
    counts = {name: len(leak_table.settings(row)) for name, row in leak_table.rows_of(dataset).items()}
    assert {name for name, count in counts.items() if count == 1} == refused
    assert {count for name, count in counts.items() if name not in refused} == {4}


def test_a_row_has_the_setting_that_was_best_on_held_out_samples():
    printed = call(*TINY, "--only", "gist;repshare, ε = 8").stdout
    table = read()
    tried = table["trials"]["gist"]
    assert (*tried,) == SETTINGS and tried["grid=5"] is None  # 8 × 8 pixels have no five cells along a side
    assert "repshare, ε = 8" not in table["trials"] and "refused" in table["rows"]["repshare, ε = 8"]["0"]
    best = max(SETTINGS, key=lambda one: tried[one] or 0.0)
    run = table["rows"]["gist"]["0"]
    assert leak_table.told(run["chosen"]) == best and not run["of clients"]
    assert f"| gist | {100 * run['accuracy']:.1f} | replies |" in printed
    assert "s\n" not in call(*TINY, "--only", "gist").stdout  # nothing is run again


def test_settings_of_another_file_are_not_tried_again():
    """And it is the trials that decide: a planted best one is what runs."""
    planted = {"trials": {"gist": {**dict.fromkeys(SETTINGS, 0.2), "grid=3": 0.9}}, "rows": {}}
    Path("tuned.json").write_text(json.dumps(planted), encoding="utf-8")
    printed = call(*TINY, "--only", "gist", "--tuned", "tuned.json").stdout
    assert "held out" not in printed and read()["rows"]["gist"]["0"]["chosen"] == {"grid": 3}
    assert "--tuned tuned.json" in read()["about"]["command"]
    assert "there is no file none.json" in call(*TINY, "--tuned", "none.json", code=2).stderr


def test_what_breaks_takes_no_other_row_with_it(monkeypatch):
    made = leak_table.one

    def broken(cell: leak_table.Cell) -> dict:
        if cell.name == "gist" and cell.setting == {"grid": 3}:
            raise RuntimeError("out of memory")
        return made(cell)

    monkeypatch.setattr(leak_table, "one", broken)
    line = call(*TINY, "--only", "gist;fedavg, MLP, one step of 8", code=2).stderr
    assert "1 runs broke, and are not in the table: gist, grid=3, held out: RuntimeError: out of memory" in line
    assert read()["rows"].keys() == {"fedavg, MLP, one step of 8"}  # gist waits until all its settings were tried
    monkeypatch.setattr(leak_table, "one", made)
    assert call(*TINY, "--only", "gist").stdout.startswith("gist, grid=3, held out: ")
    assert read()["rows"].keys() == {"fedavg, MLP, one step of 8", "gist"}


def test_a_library_that_lacks_is_no_refusal(monkeypatch):
    def lacking(cell: leak_table.Cell) -> dict:
        raise MissingLibrary

    monkeypatch.setattr(leak_table, "one", lacking)
    assert "pip install 'fedgist[privacy]'" in call(*TINY, "--only", "fedavg, ε = 8", code=2).stderr
    assert not read()["rows"] and not any(read()["trials"].values())


def test_private_rows_need_no_library():
    """Plans for all of them come with fedgist."""
    for dataset in ("digits", "mnist5k", "mnist", "fashion-mnist", "cifar10"):
        for row in leak_table.rows_of(dataset).values():
            if {"epsilon", "sampling"} <= row.keys():
                layer = {name: value[0] if isinstance(value, list) else value for name, value in row.items()}
                config = configs.resolve(layer, profile="small")
                steps = config.rounds * config.options.private_steps
                asked = (config.epsilon, config.delta, config.options.sampling, steps)
                assert any(plan.fits(*asked) for plan in known_plans()), asked


def test_a_process_that_dies_is_told(tmp_path, monkeypatch):
    dying = tmp_path / "python"
    dying.write_text("#!/bin/sh\nexit\n")
    dying.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(dying))
    told = call(*TINY, "--only", "gist", "--jobs", "2", code=2).stderr
    assert "4 runs broke" in told and "held out: a process that makes runs has died" in told
