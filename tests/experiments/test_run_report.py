"""The report: its numbers are those of the folders, and nothing in a folder can become part of the page."""

import csv
import json
import sys

import pytest

from fedgist.core.errors import FedgistError
from fedgist.experiments import config as configs
from fedgist.experiments import report, runner
from fedgist.experiments.folder import RunFolder
from fedgist.experiments.progress import size

SMALL = {"rounds": 3, "clients": 4, "steps": 1, "model": "mlp:hidden=8", "device": "cpu"}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    base = tmp_path_factory.mktemp("runs")
    for method in ("fedavg", "independent"):
        runner.run(configs.resolve({"method": method, **SMALL}), base / method)
    return base


def page(folders, path):
    """The page without plotly.js, which comes once."""
    text = report.write(folders, path).read_text(encoding="utf-8")
    assert text.count("plotly.js v") == 1
    return text.partition("</head>")[2]


def test_the_numbers_are_those_of_the_folder(runs, tmp_path):
    folder = RunFolder(runs / "fedavg")
    body = page([folder], tmp_path / "page.html")
    result = json.loads(folder.result.read_text())
    for key in ("accuracy", "accuracy_max", "accuracy_best5"):
        assert f"{result[key]:.4f}" in body
    assert size(result["bytes_up"]) in body
    with folder.ledger.open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["direction"] == "up"]  # one type of message: the weights
    for column in ("header_bytes", "payload_bytes", "paper_bytes"):
        assert f">{sum(int(row[column]) for row in rows):,}<" in body
    assert ">12<" in body  # messages: 4 clients, 3 rounds
    assert "# Learning rate of the first round." in body  # the configuration
    assert "scikit-learn" in body  # the environment
    assert "mcmahan2017communication" in body


def test_the_figures_hold_the_curves_and_the_partition(runs):
    run = report._read(RunFolder(runs / "fedavg"), "fedavg")
    by_round, by_bytes = (report._accuracy([run], against, "") for against in ("round", "bytes"))
    assert list(by_round.data[0].x) == [1, 2, 3]
    assert list(by_round.data[0].y) == [row["accuracy"] for row in run.rows]
    assert list(by_bytes.data[0].x) == [row["bytes_up"] + row["bytes_down"] for row in run.rows]
    dots = report._dots(run).data[0]
    counts = run.partition["clients"]
    assert sum(dots.marker.size) == sum(map(sum, counts.values()))
    assert len(dots.x) == sum(n > 0 for row in counts.values() for n in row)


def test_several_runs_share_a_page_and_a_partition_is_drawn_once(runs, tmp_path):
    body = page([RunFolder(runs / "fedavg"), RunFolder(runs / "independent")], tmp_path / "page.html")
    assert "<td>fedavg</td>" in body
    assert "<td>independent</td>" in body
    assert body.count("plotly-graph-div") == 3  # two of accuracy, one partition


def test_an_unfinished_run_has_a_report(runs, tmp_path):
    whole = RunFolder(runs / "fedavg")
    half = RunFolder(tmp_path / "half")
    half.path.mkdir()
    for name in ("config.toml", "env.json", "partition.json"):
        (half.path / name).write_text((whole.path / name).read_text())
    half.metrics.write_text("".join(whole.metrics.read_text().splitlines(keepends=True)[:2]) + '{"round": 3, "sec')
    half.ledger.write_text(whole.ledger.read_text()[:-9])
    body = page([half], tmp_path / "page.html")
    assert "2 of 3, unfinished" in body


def test_nothing_in_a_folder_becomes_markup(runs, tmp_path):
    evil = "</script><script>alert(1)</script>"
    config = configs.resolve({"method": "fedavg", **SMALL, "rounds": 1})
    runner.run(config, tmp_path / "run")
    folder = RunFolder(tmp_path / "run")
    text = folder.config.read_text().replace('dataset = "digits"', f'dataset = "{evil}"')
    folder.config.write_text(text.replace('method = "fedavg"', f'method = "{evil}"'))
    partition = json.loads(folder.partition.read_text())
    partition["clients"] = {evil: partition["clients"]["0"]}
    folder.partition.write_text(json.dumps(partition))
    folder.ledger.write_text(folder.ledger.read_text().replace(",up,", f",{evil},"))
    folder.result.write_text(json.dumps({**json.loads(folder.result.read_text()), "citation": evil}))
    folder.environment.write_text(json.dumps({"python": evil}))
    text = report.write([folder], tmp_path / "page.html").read_text()
    assert "<script>alert" not in text
    assert "alert(1)" in text


def test_without_plotly_it_says_what_to_install(runs, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "plotly.graph_objects", None)
    with pytest.raises(FedgistError, match=r"the report needs plotly: pip install 'fedgist\[report\]'"):
        report.write([RunFolder(runs / "fedavg")], tmp_path / "page.html")
    assert not (tmp_path / "page.html").exists()
