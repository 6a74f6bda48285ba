"""Tables that do not mislead: what is compared, with what it was made, and for whom it is good."""

import csv
import io
import json
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from fedgist.cli import app
from fedgist.words import bytes_in

TOY = ["--dataset", "digits", "--clients", "3", "--alpha", "0.1", "--profile", "toy", "--device", "cpu"]
MODEL = ["--model", "mlp:hidden=8:norm=batch"]


def call(*arguments: object, code: int = 0):
    result = CliRunner().invoke(app, [str(a) for a in arguments])
    assert result.exit_code == code, result.output
    return result


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A comparison with two seeds, in which `independent` was not named, and what it printed."""
    out = tmp_path_factory.mktemp("tables") / "both"
    shown = call("compare", "fedavg", "gist", *TOY, *MODEL, "--seeds", "2", "--fairness", "--out", out, "-q").stdout
    return out, shown


def test_compare_says_which_model_how_many_steps_and_for_whom(both: tuple[Path, str]) -> None:
    _, shown = both
    assert [word for word in ("model", "rounds", "steps") if word not in shown.splitlines()[1]] == []
    assert "independent†" in shown and "† mean of the clients' own models" in shown
    assert "gist learns linear on model+fourier, whatever the model" in shown
    for column in ("balanced accuracy", "lowest recall", "calibration error", "AUROC"):
        assert (column in shown) is (column != "AUROC")  # of ten classes there is none
    assert "own labels:" in shown and "worst tenth" in shown and "of 3" in shown


@pytest.mark.parametrize("form", ["md", "csv", "tex"])
def test_a_table_has_means_and_deviations_over_seeds(both: tuple[Path, str], form: str) -> None:
    out, _ = both
    text = call("table", out, "--format", form).stdout
    single = [json.loads((out / "fedavg" / f"seed-{seed}" / "result.json").read_text()) for seed in (0, 1)]
    mean = sum(result["accuracy"] for result in single) / 2
    deviation = abs(single[0]["accuracy"] - single[1]["accuracy"]) / 2**0.5
    if form == "csv":
        rows = {row["run"]: row for row in csv.DictReader(io.StringIO(text))}
        assert float(rows["fedavg"]["accuracy"]) == pytest.approx(mean, rel=1e-5)
        assert float(rows["fedavg"]["accuracy std"]) == pytest.approx(deviation, rel=1e-4)
        assert rows["independent"]["mean of client models"] == "yes"
        assert rows["fedavg"]["model"] == "mlp:hidden=8:norm=batch"
        return
    pm = "±" if form == "md" else r"$\pm$"
    assert f"{100 * mean:.2f} {pm} {100 * deviation:.2f}" in text
    bold = "**" if form == "md" else r"\textbf{"
    (winner,) = [line for line in text.splitlines() if bold in line]
    assert "gist" in winner  # independent, a reference line, may have been better


def test_a_table_is_the_first_thing_that_a_process_does(both: tuple[Path, str]) -> None:
    """In a process of its own, in which nothing has imported what the command needs."""
    words = [sys.executable, "-m", "fedgist", "table", str(both[0]), "--format", "md"]
    done = subprocess.run(words, capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.startswith("| "), done.stderr


def test_a_report_is_no_table_and_says_what_makes_one(both: tuple[Path, str], tmp_path: Path) -> None:
    out, _ = both
    said = call("report", out, "--out", tmp_path / "x.csv", code=2).stderr
    assert f"fedgist table {out} --format csv" in said
    assert not (tmp_path / "x.csv").exists()
    assert "unknown format 'xlsx'" in call("table", out, "--format", "xlsx", code=2).stderr


def test_equal_budgets(tmp_path: Path) -> None:
    value = json.loads(
        call(
            "compare", "fedavg", "independent", *TOY, *MODEL, "--budget", "rounds=3", "--out", tmp_path / "r", "--json"
        ).stdout
    )
    assert [run["rounds"] for run in value["runs"]] == [3, 3]
    a_round = (value["runs"][0]["bytes_up"] + value["runs"][0]["bytes_down"]) / 3
    budget = f"bytes={2.5 * a_round / 1000:.3f}kB"
    tight = ["compare", "fedavg", "feddm", *TOY, *MODEL, "--rounds", "6", "--budget", budget, "--out", tmp_path / "b"]
    shown = call(*tight)
    assert "a method stops before a round that, as dear as its dearest so far, would exceed the budget" in shown.stderr
    value = json.loads(call(*tight, "--resume", "--json").stdout)
    assert value["runs"][0]["rounds"] == 2
    for wrong in ("bytes=many", "minutes=3", "rounds=0", "10"):
        assert (
            "--budget must be as rounds=20 or bytes=10MB" in call("compare", "fedavg", "--budget", wrong, code=2).stderr
        )


def test_sizes_are_read() -> None:
    read = [bytes_in(text) for text in ("10MB", "1.5 GB", "300", "300B", "2kB", "2K", "MB", "-1", "1e3")]
    assert read == [10_000_000, 1_500_000_000, 300, 300, 2000, 2000, None, None, None]


def test_a_run_is_held_against_learning_alone_which_is_found_again(tmp_path: Path) -> None:
    shown = call("run", "fedavg", *TOY, *MODEL, "--fairness", "--out", tmp_path / "run", "-q").stdout
    assert "of 3 gain over learning alone" in shown
    (alone,) = tmp_path.glob("independent-digits-0-*")
    made = (alone / "result.json").stat().st_mtime_ns
    call("run", "fedprox", *TOY, *MODEL, "--set", "lr=0.1", "--fairness", "--out", tmp_path / "other", "-q")
    assert (alone / "result.json").stat().st_mtime_ns == made
    said = json.loads((tmp_path / "run" / "result.json").read_text())["fairness"]["global"]["own labels"]
    assert said["gain"] + said["lose"] <= said["clients"] == 3
