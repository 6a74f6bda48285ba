"""`fedgist reproduce`, as a user meets it: a toy preset listed, run, killed, gone on with, shown."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from fedgist.cli import app
from fedgist.experiments import estimates, presets, provenance, reproduction, workers

PRESET = """
paper = "Nobody 2026"
[options]
dataset = "digits"
clients = 2
rounds = {rounds}
model = "mlp:hidden=8"
steps = 2
lr = 0.1
eval_every = 20
[small]
rounds = 1
[table]
title = "a toy"
seeds = 2
tolerance = 90.0
claims = ["avg > alone"]
why = "It is a toy."
rows.avg = {{ method = "fedavg" }}
rows.alone = {{ method = "independent" }}
columns."a=0.1" = {{ alpha = 0.1 }}
columns."a=1" = {{ alpha = 1.0 }}
values.avg = ["50.0±1.0", 1000]
"""


@pytest.fixture(autouse=True)
def toy(elsewhere, tmp_path, monkeypatch):
    monkeypatch.setenv("FEDGIST_PRESETS", str(tmp_path))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    Path("toy.toml").write_text(PRESET.format(rounds=2))


def call(*arguments, code=0):
    result = CliRunner().invoke(app, ["reproduce", *arguments])
    assert result.exit_code == code, result.output
    return result


def test_a_preset_runs_and_the_paper_stands_beside_ours():
    result = call("toy/table", "--jobs", "1", "--device", "cpu")
    assert "toy/table: 4 cells, 8 runs to make, 0 finished; no estimate for some of them" in result.stderr
    assert "8/8 " in result.stderr
    lines = {line.split("│")[1].strip(): line for line in result.stdout.splitlines() if line.startswith("│")}
    assert "50.00 ± 1.00" in lines["avg, a=0.1"]
    assert "yes" in lines["avg, a=0.1"]
    assert "no" in lines["avg, a=1"].split("│")[5]
    assert "holds partly; 4 of 4 cells run, 1 of 2 within" in result.stdout
    assert "It is a toy." in result.stdout
    kept = json.loads(Path("runs/reproduce/results/toy-table.json").read_text())["cells"]["avg, a=1"]
    assert kept["numbers"].keys() == {"0", "1"}
    (made,) = kept["made"]
    assert {"command", "version", "commit", "machine", "seeds"} == made.keys()
    assert made["seeds"] == ["0", "1"]
    again = call("toy/table", "--jobs", "1", "--device", "cpu", "--only", "a=1")
    assert "0 runs to make, 4 finished" in again.stderr
    assert json.loads(Path("runs/reproduce/results/toy-table.json").read_text())["cells"].keys() >= {"avg, a=0.1"}
    shown = json.loads(call("toy/table", "--show", "--json").stdout)
    assert shown["state"] == "holds partly"
    assert shown["cells"]["avg, a=0.1"]["within"] is True


def test_what_two_machines_made_is_put_together():
    """The second made one seed more and one cell not at all; adding again, or the other way round, changes nothing."""
    here, there = (
        ("--jobs", "1", "--device", "cpu", "--seeds", "1"),
        ("--jobs", "1", "--device", "cpu", "--out", "there"),
    )
    call("toy/table", *here)
    call("toy/table", *there, "--only", "avg, a=1")
    said = call("toy/table", "--add", "there/results", "--json")
    cells = {name: cell["seeds"] for name, cell in json.loads(said.stdout)["cells"].items()}
    assert cells == {"avg, a=0.1": ["0"], "avg, a=1": ["0", "1"], "alone, a=0.1": ["0"], "alone, a=1": ["0"]}
    both = Path("runs/reproduce/results/toy-table.json").read_text()
    call("toy/table", "--add", "there/results")
    assert Path("runs/reproduce/results/toy-table.json").read_text() == both
    assert "--add wants a folder with results of toy/table" in call("toy/table", "--add", "nowhere", code=2).stderr


def test_one_machine_makes_the_seeds_that_another_left():
    there = ("--only", "avg, a=1", "--jobs", "1", "--device", "cpu")
    call("toy/table", *there, "--seeds", "1")
    call("toy/table", *there, "--seeds", "1,", "--out", "there")
    made = json.loads(Path("there/results/toy-table.json").read_text())["cells"]["avg, a=1"]
    assert made["numbers"].keys() == {"1"}
    said = json.loads(call("toy/table", "--add", "there/results", "--json").stdout)
    assert said["cells"]["avg, a=1"]["seeds"] == ["0", "1"]


def test_what_a_changed_checkout_made_gives_way_to_an_unchanged_one(monkeypatch):
    """Also where it gives the same number; what an unchanged one made stays, whatever the other has."""

    def made_at(commit: str | None, *arguments: str) -> dict[str, dict[str, object]]:
        monkeypatch.setattr(provenance, "commit", lambda *how: commit)
        call("toy/table", "--only", "avg, a=1", "--jobs", "1", "--device", "cpu", *arguments)
        return cells(Path(arguments[-1]) / "results" / "toy-table.json")

    def cells(path: Path) -> dict[str, dict[str, object]]:
        return json.loads(path.read_text())["cells"]["avg, a=1"]

    made_at("abc1234+", "--seeds", "1", "--out", "here")
    before = made_at("def5678", "--seeds", "1,", "--out", "here")
    made_at(None, "--seeds", "1", "--out", "unnamed")  # nobody could look at that one: it is no better
    call("toy/table", "--add", "unnamed/results", "--results", "here/results")
    assert cells(Path("here/results/toy-table.json"))["made"] == before["made"]
    there = made_at("0123abc", "--seeds", "2", "--out", "there")
    there["numbers"]["1"] = [77.0]  # another machine's seed 1 is its own
    kept = json.loads(Path("there/results/toy-table.json").read_text())
    kept["cells"]["avg, a=1"] = there
    Path("there/results/toy-table.json").write_text(json.dumps(kept))
    call("toy/table", "--add", "there/results", "--results", "here/results")
    after = cells(Path("here/results/toy-table.json"))
    assert [(made["commit"], made["seeds"]) for made in before["made"]] == [("abc1234+", ["0"]), ("def5678", ["1"])]
    assert [(made["commit"], made["seeds"]) for made in after["made"]] == [("def5678", ["1"]), ("0123abc", ["0"])]
    assert after["numbers"] == before["numbers"]
    call("toy/table", "--add", "here/results", "--results", "there/results")
    assert cells(Path("there/results/toy-table.json"))["numbers"]["1"] == [77.0]


def test_a_run_that_was_timed_elsewhere_is_estimated(tmp_path, monkeypatch):
    runs = {cell.run: 50.0 for cell in presets.available()["toy/table"].cells}
    (tmp_path / "table.json").write_text(json.dumps({"machine": "M", "calibration": 2.0, "seconds": runs}))
    monkeypatch.setattr(estimates, "REFERENCE", tmp_path / "table.json")
    monkeypatch.setattr(estimates, "calibration", lambda: 3.0)
    result = call("toy/table", "--jobs", "1", "--device", "cpu")
    # 4 cells, 2 seeds, 50 s each on M, which is 1.5 times as fast: 600 s.
    said = "about 10:00 with 1 at a time (counted on another machine (M), times 1.5 here)"
    assert f"8 runs to make, 0 finished; {said}" in result.stderr


def test_the_command_that_is_published_names_no_folder_of_this_machine(monkeypatch):
    words = ["--data-dir=/home/me/data", "--out", "/home/me/runs", "--results=a=b", "--only", "a=1"]
    monkeypatch.setattr(sys, "argv", ["/usr/bin/fedgist", "reproduce", "toy/table", *words])
    call("toy/table", "--jobs", "1", "--device", "cpu", "--seeds", "1", "--quiet")
    kept = json.loads(Path("runs/reproduce/results/toy-table.json").read_text())["cells"]["avg, a=1"]
    wanted = "fedgist reproduce toy/table --data-dir=DIR --out DIR --results=DIR --only a=1"
    assert kept["made"][0]["command"] == wanted


def test_the_small_says_what_was_reduced_and_seeds_can_be_fewer():
    result = call("toy/table", "--scale", "small", "--seeds", "1", "--jobs", "1", "--device", "cpu", "--together", "1")
    assert result.stderr.splitlines()[0] == "reduced: rounds 2 → 1"
    assert "4 runs to make" in result.stderr
    assert "in the small; 4 of 4 cells run" in result.stdout
    assert "toy-table.small.json" in result.stdout


def test_published_results_are_known_in_any_folder():
    shown = json.loads(call("repshare/figure3", "--show", "--json").stdout)
    assert shown["state"] != "not run"
    assert all(cell["ours"] is not None for cell in shown["cells"].values())


def test_the_list_shows_all_presets_with_estimates(tmp_path, monkeypatch):
    monkeypatch.setattr("fedgist.cli.reproduction.PUBLISHED", tmp_path)  # of what has been run, nothing is left to time
    start = time.monotonic()
    rows = {row["preset"]: row for row in json.loads(call("--list", "--json").stdout)}
    assert time.monotonic() - start < 60  # about 3 seconds where nothing else runs
    assert rows["toy/table"]["state"] == "not run"
    assert rows["toy/table"]["seconds_left"] is None  # nobody has timed it yet
    assert rows["repshare/table1"]["cells"] == 48
    assert rows["repshare/figure3"]["seconds_left"] > 60
    assert "feddm/table1" in call("--list").stdout


def test_what_data_is_missing_for_which_preset(tmp_path, monkeypatch):
    monkeypatch.delenv("FEDGIST_DATA", raising=False)
    rows = json.loads(call("--data", "--json").stdout)
    assert rows["digits"]["readable"]
    assert rows["digits"]["cells"]["toy/table"] == 4
    assert "none is named with --data-dir" in rows["emnist-letters"]["lacks"]
    assert rows["emnist-letters"]["cells"] == {"fedgen/table1": 35, "fedgen/table2": 5}
    (tmp_path / "data").mkdir()
    text = " ".join(call("--data", "--data-dir", str(tmp_path / "data")).stdout.split())
    assert "there is no folder" in text
    assert "fedgist data download NAME DIR" in text


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["toy/tabel"], "unknown preset 'toy/tabel'; did you mean 'toy/table'?"),
        (["toy/table", "--only", "b"], "no cell of toy/table has 'b' in its name"),
        (["toy/table", "--scale", "tiny"], "unknown scale 'tiny'"),
        (["toy/table", "--seeds", "0"], "--seeds must be a whole number from 1, not '0'"),
        (["toy/table", "--seeds", "1,x"], "--seeds must be a number of seeds, or a list of them as in 1,2"),
    ],
)
def test_mistakes(arguments, line):
    assert call(*arguments, code=2).stderr.startswith(f"fedgist: {line}")


def test_two_commands_do_not_write_into_the_same_runs():
    with reproduction.alone(Path("runs/reproduce")):
        refused = call("toy/table", "--jobs", "1", "--device", "cpu", code=2)
    assert "another command makes runs in runs/reproduce; wait for it, or use --out" in refused.stderr
    assert finished() == {}


def test_missing_data_is_said_once_and_the_rest_is_run():
    text = Path("toy.toml").read_text().replace("{ alpha = 1.0 }", '{ alpha = 1.0, dataset = "mnist" }')
    Path("toy.toml").write_text(text)
    result = call("toy/table", "--jobs", "1", "--device", "cpu", "--seeds", "1", "--quiet", code=2)
    assert result.stderr.count("data set 'mnist' needs") == 1
    assert "2 of 4 cells run" in result.stdout


@pytest.mark.parametrize("body", ["exit", "read line"], ids=["before it has a job", "with a job in hand"])
def test_no_run_is_lost_without_a_word_when_the_processes_die(body, tmp_path, monkeypatch):
    dying = tmp_path / "python"
    dying.write_text(f"#!/bin/sh\n{body}\n")
    dying.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(dying))
    assert sorted(workers.each(abs, [-1] * 5, 2)) == [(place, None) for place in range(5)]
    result = call("toy/table", "--jobs", "2", "--device", "cpu", "--quiet", code=2)
    assert "fedgist: a process that makes runs has died; go on with the same command" in result.stderr


def test_a_process_that_dies_takes_no_other_work_with_it():
    given = ["__import__('os')._exit(1)", *map(str, range(1, 6))]
    assert sorted(workers.each(eval, given, 2)) == [(0, None), *((place, place) for place in range(1, 6))]


def finished():
    return {path: path.stat().st_mtime_ns for path in Path("runs").glob("reproduce/*/seed-*/result.json")}


def wait(condition, process):
    deadline = time.monotonic() + 120
    while not condition():
        assert process.poll() is None, "it ended before its time"
        assert time.monotonic() < deadline, "it does not get on"
        time.sleep(0.02)


@pytest.mark.slow
def test_killed_it_goes_on_without_repeating_what_is_finished():
    Path("toy.toml").write_text(PRESET.format(rounds=40).replace("seeds = 2", "seeds = 1"))
    arguments = ["toy/table", "--device", "cpu", "--json"]
    command = [sys.executable, "-m", "fedgist", "reproduce", *arguments, "--jobs", "2"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    wait(finished, process)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    before = finished()
    assert 1 <= len(before) < 4
    time.sleep(1)
    assert finished() == before, "the workers outlived the command"
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    after = finished()
    assert len(after) == 4
    assert {path: after[path] for path in before} == before
    whole = call(*arguments, "--jobs", "1", "--out", "whole")
    cells, others = (json.loads(run.stdout)["cells"] for run in (done, whole))
    assert {name: cell["ours"] for name, cell in cells.items()} == {name: cell["ours"] for name, cell in others.items()}


def test_a_finish_asked_for_later_trains_nothing_again():
    """The rows of the rounds are those of the run without it, to the second that they took."""
    finish = 'rows."avg, finish" = { method = "fedavg", finish = "gist" }\n'
    Path("toy.toml").write_text(PRESET.format(rounds=2).replace("values.avg", finish + "values.avg"))
    call("toy/table", "--only", "avg, a=1", "--seeds", "1", "--jobs", "1", "--device", "cpu")
    call("toy/table", "--only", "avg, finish, a=1", "--seeds", "1", "--jobs", "1", "--device", "cpu")
    rows = sorted(path.read_text().splitlines() for path in Path("runs").rglob("metrics.jsonl"))
    assert [len(lines) for lines in rows] == [2, 3] and rows[1][:2] == rows[0]
