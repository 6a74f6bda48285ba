"""The report: its numbers are those of the folders, and nothing in a folder can become part of the page."""

import csv
import dataclasses
import json
import math
import re
import statistics
import sys
from html.parser import HTMLParser

import pytest
import torch

from fedgist.core.errors import FedgistError
from fedgist.experiments import artifacts, report, runner
from fedgist.experiments import config as configs
from fedgist.experiments.folder import RunFolder, run_folders
from fedgist.experiments.report import figures, runs
from fedgist.experiments.report.page import one_line
from fedgist.words import size

SMALL = {"rounds": 3, "clients": 4, "steps": 1, "model": "mlp:hidden=8", "device": "cpu"}
EVIL = "</script><script>alert(1)</script><img src=x onerror=alert(2)>"


@pytest.fixture(scope="module")
def single(tmp_path_factory):
    path = tmp_path_factory.mktemp("runs") / "fedavg"
    runner.run(configs.resolve({"method": "fedavg", **SMALL}), path)
    return RunFolder(path)


class Page(HTMLParser):
    """The tables, texts, tags and charts of a page, without plotly.js, which lies beside it."""

    def __init__(self, text):
        super().__init__()
        assert text.count("<script src=") == text.count('src="plotly.min.js"') == 1
        self.body = text.partition("</head>")[2]
        self.tables, self.tags, self.cell, self.script = [], [], None, None
        self.charts, self.ids = [], []
        self.feed(self.body)
        self.close()

    def handle_starttag(self, tag, attributes):
        found = dict(attributes)
        self.tags.append((tag, found))
        if "id" in found:
            self.ids.append(found["id"])
        if tag == "table":
            self.tables.append([])
        elif tag == "tr":
            self.tables[-1].append([])
        elif tag in ("td", "th"):
            self.cell = ""
        elif tag == "script":
            self.script = found.get("type", "code")

    def handle_endtag(self, tag):
        if tag in ("td", "th"):
            self.tables[-1][-1].append(self.cell)
            self.cell = None
        elif tag == "script":
            self.script = None

    def handle_data(self, data):
        if self.cell is not None:
            self.cell += data.replace("\xa0", " ")
        if self.script == "application/json":
            self.charts.append(json.loads(data))

    def table(self, name):
        """The table that has this column, as rows by column."""
        found = next(table for table in self.tables if name in table[0])
        return [dict(zip(found[0], row, strict=True)) for row in found[1:]]


def made(folders, tmp_path, **options):
    return Page(report.write(folders, tmp_path / "page.html", **options).read_text(encoding="utf-8"))


def groups_of(path):
    return runs.grouped([runs.read(folder) for folder in run_folders(path)])


def test_the_numbers_are_those_of_the_folder(single, tmp_path):
    found = made([single], tmp_path)
    result = json.loads(single.result.read_text())
    (row,) = found.table("the server sees")
    assert row["run"] == "fedavg"
    for column, key in (("accuracy, %", "accuracy"), ("best, %", "accuracy_max"), ("best five, %", "accuracy_best5")):
        assert row[column] == f"{100 * result[key]:.2f}"
    assert row["bytes up"] == size(result["bytes_up"])
    assert row["rounds"] == "3"
    assert row["the server sees"] == "sums only"
    with single.ledger.open(newline="") as file:
        sent = [line for line in csv.DictReader(file) if line["type"] == "global_model.Local"]
    (local,) = [row for row in found.table("message") if row["message"] == "global_model.Local"]
    assert local["messages"] == "12"  # 4 clients, 3 rounds
    for column, key in (("header", "header_bytes"), ("payload", "payload_bytes"), ("as papers count", "paper_bytes")):
        assert local[column] == size(sum(int(line[key]) for line in sent))
    assert "# Learning rate of the first round." in found.body  # the configuration
    assert "scikit-learn" in found.body  # the environment
    assert "mcmahan2017communication" in found.body
    assert "Nothing in this run is differentially private" in found.body


def test_a_page_needs_nothing_from_elsewhere_and_says_what_pictures_show(comparison, tmp_path):
    found = made(run_folders(comparison), tmp_path)
    for tag, attributes in found.tags:
        for name in ("src", "href"):
            assert attributes.get(name, "#").startswith(("#", "data:")), (tag, attributes)
        if tag == "img":
            assert attributes["alt"]
        if "plot" in attributes.get("class", "").split():
            assert attributes["role"] == "img" and attributes["aria-label"]
    assert len(set(found.ids)) == len(found.ids)
    for target in re.findall(r'href="#([^"]+)"', found.body):
        assert target in found.ids


def test_every_chart_is_one_that_plotly_knows(comparison, tmp_path):
    import plotly.graph_objects as plotly

    found = made(run_folders(comparison), tmp_path)
    assert len(found.charts) > 5
    for chart in found.charts:
        plain = re.sub(r'"var\(--[\w-]+\)(/[\d.]+)?"', '"red"', json.dumps(chart))
        plotly.Figure(json.loads(plain))  # refuses what it does not know


def test_rows_with_a_nan_as_runs_once_wrote_them_leave_a_gap(single):
    run = runs.read(single)
    rows = [{**row, "cosine_up": value} for row, value in zip(run.rows, (0.5, math.nan, math.inf), strict=True)]
    assert dataclasses.replace(run, rows=rows).further() == {"cosine_up": {1: 0.5}}


def test_rounds_and_bytes_to_a_target(comparison, tmp_path):
    """Means over the seeds that get there, with how many these are where it is not all."""
    groups = groups_of(comparison)
    for target in (0.1, 0.16, 1.0):
        found = made(run_folders(comparison), tmp_path, target=target).table("the server sees")
        for row, group in zip(found, groups, strict=True):
            there = [wanted for run in group.runs if (wanted := run.reached(target)) is not None]
            some = f" ({len(there)} of {len(group.runs)})" if 0 < len(there) < len(group.runs) else ""
            rounds, sent = row[f"rounds to {100 * target:.1f} %"], row[f"bytes to {100 * target:.1f} %"]
            if there:
                assert rounds == f"{statistics.fmean(round for round, _ in there):.3g}{some}"
                assert sent == size(statistics.fmean(count for _, count in there)) + some
            else:
                assert (rounds, sent) == ("–", "–")


def test_what_replies_reveal(comparison, tmp_path):
    found = made(run_folders(comparison), tmp_path)
    rows = {(row["run"], row["reply"]): row for row in found.table("what the reply is")}
    each, summed = "the server sees of each client", "sees only as a sum"
    assert (rows["fedavg", "Local"][each], rows["fedavg", "Local"][summed]) == ("", "pw, p")
    assert rows["feddm", "Images"][each] == "images, labels, counts"
    assert rows["repshare", "Representations"][each] == "observations, observed"
    assert rows["repshare", "Representations"][summed] == "sums, counts"
    assert ("repshare", "Score") not in rows  # evaluation is no part of a method
    assert ("codream", "OwnDreams") not in rows  # an answer that this configuration does not give
    assert rows["fedavg", "Local"]["what the reply is"]


def test_the_partition_is_drawn_once_for_each_split(comparison, tmp_path):
    found = made(run_folders(comparison), tmp_path)
    assert [id for id in found.ids if id.startswith("partition-")] == ["partition-0", "partition-1"]  # two seeds
    run = runs.read(RunFolder(comparison / "feddm"))
    (dots,) = figures.partition(run, "dots", "").data
    counts = run.partition["clients"]
    assert sum(dots["marker"]["size"]) == sum(map(sum, counts.values()))
    assert len(dots["x"]) == sum(n > 0 for row in counts.values() for n in row)


def test_a_title_of_many_runs_takes_one_line():
    assert one_line(list("abcd")) == "a, b, c and d"
    assert one_line(list("abcdefg")) == "a, b, c and 4 more"


def test_discrepancies_are_named(tmp_path):
    config = configs.resolve({"method": "fedavg", **SMALL, "rounds": 1, "discrepancy": "rotation:degrees=30,labels"})
    runner.run(config, tmp_path / "run")
    found = made([RunFolder(tmp_path / "run")], tmp_path)
    assert "rotation:degrees=30. Feature shift" in found.body
    assert "labels. Concept shift" in found.body


def test_galleries_and_planes_are_there(comparison, tmp_path):
    found = made(run_folders(comparison), tmp_path)
    for title in ("codream: dreams", "feddm: images that the clients sent", "tofu: proxy images down"):
        assert f"<h3>{title}</h3>" in found.body
    assert "<h3>repshare: class representations</h3>" in found.body
    assert [id.rpartition("-")[2] for id in found.ids if id.startswith("plane-")] == ["1", "2"]  # the rounds
    assert "further-cosine" in found.ids


def test_labels_say_what_differs(tmp_path):
    for lr in (0.1, 0.2):
        for seed in (0, 1):
            config = configs.resolve({"method": "fedavg", **SMALL, "rounds": 1, "lr": lr, "seed": seed})
            runner.run(config, tmp_path / f"{lr}-{seed}")
    assert [(group.label, len(group.runs)) for group in groups_of(tmp_path)] == [
        ("lr 0.1", 2),
        ("lr 0.2", 2),
    ]


def test_where_too_much_differs_the_folder_tells_runs_apart(tmp_path):
    for name, values in (("one", {"lr": 0.1}), ("two", {"lr": 0.2, "momentum": 0.5, "rounds": 1, "alpha": 1.0})):
        runner.run(configs.resolve({"method": "fedavg", **SMALL, **values}), tmp_path / name / "seed-0")
    assert [group.label for group in groups_of(tmp_path)] == ["fedavg (one/seed-0)", "fedavg (two/seed-0)"]


def test_peers_have_no_server(tmp_path):
    config = configs.resolve({"method": "repshare", "clients": 3, "device": "cpu", "topology": "full"}, profile="toy")
    runner.run(config, tmp_path / "run")
    (row,) = made([RunFolder(tmp_path / "run")], tmp_path).table("the server sees")
    assert row["the server sees"] == "no server; neighbours see observations, observed"


def unfinished(whole, path):
    half = RunFolder(path)
    half.path.mkdir()
    for name in ("config.toml", "env.json", "partition.json", "method.json"):
        (half.path / name).write_text((whole.path / name).read_text())
    half.metrics.write_text("".join(whole.metrics.read_text().splitlines(keepends=True)[:2]) + '{"round": 3, "sec')
    half.ledger.write_text(whole.ledger.read_text()[:-9])
    return half


def test_an_unfinished_run_has_a_report(single, tmp_path):
    found = made([unfinished(single, tmp_path / "half")], tmp_path)
    assert found.table("the server sees")[0]["rounds"] == "2 of 3, unfinished"
    assert "mcmahan2017communication" in found.body


def test_a_run_that_has_not_begun_has_a_report(single, tmp_path):
    half = unfinished(single, tmp_path / "half")
    half.metrics.write_text("")
    half.ledger.write_text("")
    found = made([half], tmp_path)
    assert found.table("the server sees")[0]["accuracy, %"] == "–"


def test_nothing_in_a_folder_becomes_markup(tmp_path):
    config = configs.resolve({"method": "tofu", "clients": 3, "device": "cpu"}, profile="toy")
    runner.run(config, tmp_path / "run")
    folder = RunFolder(tmp_path / "run")
    text = folder.config.read_text().replace('dataset = "digits"', f'dataset = "{EVIL}"')
    folder.config.write_text(text.replace('method = "tofu"', f'method = "{EVIL}"'))
    partition = json.loads(folder.partition.read_text())
    partition["clients"] = {EVIL: partition["clients"]["0"]}
    folder.partition.write_text(json.dumps(partition))
    folder.ledger.write_text(folder.ledger.read_text().replace("tofu.Upload", EVIL))
    folder.result.write_text(json.dumps({**json.loads(folder.result.read_text()), "privacy": {EVIL: EVIL}}))
    about = {"name": EVIL, "summary": EVIL, "citation": EVIL, "replies": {EVIL: EVIL}}
    sees = [{"request": EVIL, "reply": EVIL, "field": EVIL, "additive": False}]
    folder.method.write_text(json.dumps({**about, "sees": sees}))
    folder.environment.write_text(json.dumps({"python": EVIL}))
    lines = folder.metrics.read_text().replace("cosine_up", EVIL.replace("_", ""))
    folder.metrics.write_text(lines)
    exhibit = artifacts.Exhibit(EVIL, torch.zeros(1, 1, 8, 8), None, EVIL, False)
    points = artifacts.Exhibit(f"{EVIL} points", torch.eye(9), torch.arange(9), EVIL, False)
    task = runner.sources.from_dataset(configs.resolve({"dataset": "digits", "device": "cpu"})).task
    artifacts.save([exhibit, points], task, folder.exhibits(1))
    found = made([folder], tmp_path)
    assert "<script>alert" not in found.body
    assert "<img src=x" not in found.body
    assert "alert(1)" in found.body
    assert not any("onerror" in attributes for _, attributes in found.tags)


def test_an_epsilon_is_reported_with_all_that_belongs_to_it(single, tmp_path):
    folder = unfinished(single, tmp_path / "private")
    promise = {"epsilon": 2.5, "delta": 1e-5, "unit": "record", "neighbours": "add or remove one"}
    folder.result.write_text(json.dumps({**json.loads(single.result.read_text()), "privacy": promise}))
    found = made([folder], tmp_path)
    assert "fedavg: epsilon 2.5, delta 1e-05, unit record, neighbours add or remove one." in found.body
    assert "differentially private" not in found.body


@pytest.mark.parametrize("missing", ["plotly", "jinja2"])
def test_without_what_it_needs_it_says_what_to_install(single, tmp_path, monkeypatch, missing):
    monkeypatch.setitem(sys.modules, {"plotly": "plotly.offline"}.get(missing, missing), None)
    with pytest.raises(FedgistError, match=rf"the report needs {missing}: pip install 'fedgist\[report\]'"):
        report.write([single], tmp_path / "page.html")
    assert not (tmp_path / "page.html").exists()


def test_what_draws_the_charts_lies_beside_the_page_or_in_the_folder_of_all_runs_or_inside(single, tmp_path):
    written = report.write([single], tmp_path / "page.html")
    assert written.stat().st_size < 500_000
    assert "plotly.js v" in (tmp_path / "plotly.min.js").read_text(encoding="utf-8")[:200]
    below = report.write([single], tmp_path / "runs" / "one" / "report.html")
    assert 'src="../plotly.min.js"' in below.read_text(encoding="utf-8")
    assert not (below.parent / "plotly.min.js").exists() and (tmp_path / "runs" / "plotly.min.js").is_file()
    whole = report.write([single], tmp_path / "alone" / "page.html", single_file=True).read_text(encoding="utf-8")
    assert whole.count("plotly.js v") == 1 and "<script src=" not in whole
    assert [path.name for path in (tmp_path / "alone").iterdir()] == ["page.html"]


def test_how_clients_fare_is_in_the_page(comparison, tmp_path):
    found = made(run_folders(comparison), tmp_path)
    rows = found.table("who loses most")
    kinds = {(row["run"], row["model"]) for row in rows if row["run"]}
    assert {("codream", "global"), ("codream", "own"), ("independent", "own"), ("fedavg", "global")} <= kinds
    assert all(row["gain"].endswith(" of 3") for row in rows if row["run"] in ("codream", "feddm"))
    assert {"balanced accuracy, %", "calibration error, %"} <= found.table("lowest recall, %")[0].keys()
    (recalls,) = [table for table in found.tables if table[0][:3] == ["run", "0", "1"]]
    assert len(recalls[0]) == 11
