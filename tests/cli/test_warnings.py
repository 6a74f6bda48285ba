"""What a run warns of: that it will be costly, or that its result means little."""

import json
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from fedgist.cli import app

TINY = ["--rounds", "2", "--clients", "3", "--model", "mlp:hidden=8", "--set", "steps=1", "--device", "cpu"]


def call(*arguments, code=0):
    result = CliRunner().invoke(app, [str(a) for a in arguments])
    assert result.exit_code == code, result.output
    return result


def test_little_traffic_is_not_shown_as_none(caplog):
    call("run", "codream", "--profile", "toy", "--clients", "3", "--device", "cpu", "--out", "run", "-q")
    assert caplog.text.count("codream will move 12.8 kB a round for each client, 1.3 times what fedavg would") == 1


def test_clients_without_data_are_told_of_once(caplog):
    extreme = ["--clients", "20", "--alpha", "0.001", "--out", "run", "-q"]
    call("run", "fedavg", *TINY, *extreme)
    held = json.loads(Path("run/partition.json").read_text())["clients"].values()
    empty = sum(not sum(counts) for counts in held)
    assert empty > 1
    line = f"digits, seed 0: {empty} of 20 clients hold no data, so that nothing is learned from them"
    assert caplog.text.count(line) == 1
    caplog.clear()
    call("compare", "fedavg", "fedprox", *TINY, *extreme[:4], "--dataset", "digits", "--out", "both", "-q")
    assert caplog.text.count("hold no data") == caplog.text.count(line) == 1
    caplog.clear()
    # where all data is in one place, nobody is empty
    call("run", "centralized", *TINY, *extreme[:4], "--out", "run2", "-q")
    call("run", "fedavg", *TINY, "--out", "run3", "-q")
    assert caplog.text == ""


@pytest.mark.parametrize(
    ("method", "who"), [("fedavg", "the server"), ("independent", "3 of the clients")], ids=["server", "clients"]
)
def test_numbers_that_are_not_finite_are_told_of_once_and_change_nothing(method, who, caplog):
    result = call("run", method, *TINY, "--set", "steps=3", "--set", "lr=1e30", "--out", "run", "--json")
    line = f"{method}, digits, seed 0: what {who} learned up to round 1 is not finite (NaN or infinity)"
    assert caplog.text.count(line) == caplog.text.count("finite") == 1
    assert json.loads(result.stdout)["accuracy"] < 0.2
    assert len(Path("run/metrics.jsonl").read_text().splitlines()) == 2


@pytest.mark.parametrize(("features", "lambda_kd", "told"), [("relu", 10, 1), ("tanh", 10, 0), ("relu", 0.1, 0)])
def test_representations_that_would_outweigh_the_labels_are_told_of(features, lambda_kd, told, caplog):
    """Fashion-MNIST, 7 clients, Dirichlet 0.3: 0.434 with λ_KD = 10, 0.487 with 0.1, 0.485 alone."""
    setting = ["--model", f"mlp:hidden=8:features={features}", "--set", f"lambda_kd={lambda_kd}"]
    call("run", "repshare", *TINY, *setting, "--out", "run", "-q")
    assert caplog.text.count("the features of mlp are not between -1 and 1") == told


FEDDM = ["--profile", "toy", "--clients", "3", "--device", "cpu", "-q"]


@pytest.mark.parametrize("norm", ["batch", "none"])
def test_images_that_left_every_sensible_range_are_told_of_once(norm, caplog):
    """A rate of 1e6 sends them there; with BatchNorm a rate is only the largest, and they stay."""
    call("run", "feddm", *FEDDM, "--model", f"mlp:hidden=8:norm={norm}", "--set", "lr=1e6", "--out", "run")
    line = "feddm, digits, seed 0: images that the clients sent reach from"
    assert caplog.text.count(line) == caplog.text.count("learned from them") == (norm == "none")
    caplog.clear()
    call("run", "tofu", *FEDDM, "--out", "tofu")  # its images are an update: they have a scale of their own
    assert "learned from them" not in caplog.text


def test_metrics_that_are_not_numbers_leave_files_that_can_be_read(caplog):
    """Neither JSON nor a browser knows NaN: one would leave the report without the charts after it."""
    call("run", "tofu", "--profile", "toy", *TINY, "--set", "lr=1e30", "--out", "run", "-q")
    assert "is not finite" in caplog.text
    assert json.loads(Path("run/metrics.jsonl").read_text().splitlines()[-1])["cosine_up"] is None
    page = Path("run/report.html").read_text(encoding="utf-8")
    charts = re.findall(r'<script type="application/json">(.*?)</script>', page, re.DOTALL)
    assert charts
    for chart in charts:
        json.loads(chart, parse_constant=pytest.fail)
