"""The report: its numbers are those of the folders, and nothing in a folder can become part of the page."""

import csv
import dataclasses
import itertools
import json
import math
import re
import statistics
import sys
from html.parser import HTMLParser

import numpy as np
import pytest
import torch

from fedgist.core.errors import FedgistError
from fedgist.experiments import artifacts, report, runner
from fedgist.experiments import comparison as standing
from fedgist.experiments import config as configs
from fedgist.experiments.folder import RunFolder, run_folders
from fedgist.experiments.report import efficiency, embedding, figures, pictures, runs, tables
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


def test_curves_are_means_over_seeds_with_bands(comparison):
    groups = groups_of(comparison)
    (fedavg,) = [group for group in groups if group.label == "fedavg"]
    assert len(fedavg.runs) == 2
    pairs = list(zip(*(run.accuracies.values() for run in fedavg.runs), strict=True))
    band, line = figures.accuracy_by_rounds([fedavg]).data
    assert line["x"] == [1, 2, 3]
    assert line["y"] == pytest.approx([statistics.fmean(pair) for pair in pairs])
    upper, lower = band["y"][:3], band["y"][:2:-1]
    assert upper == pytest.approx([statistics.fmean(pair) + statistics.stdev(pair) for pair in pairs])
    assert lower == pytest.approx([statistics.fmean(pair) - statistics.stdev(pair) for pair in pairs])
    assert band["legendgroup"] == line["legendgroup"]
    by_bytes = figures.accuracy_by_bytes([fedavg]).data[1]
    assert by_bytes["x"] == [row["bytes_up"] + row["bytes_down"] for row in fedavg.first.rows]


def test_bands_of_a_single_seed_are_between_clients_that_have_their_own_models(comparison):
    groups = {group.label: group for group in groups_of(comparison)}
    band, line = figures.accuracy_by_rounds([groups["repshare"]]).data
    rows = groups["repshare"].first.rows
    assert band["y"][:2] == pytest.approx([row["accuracy"] + row["deviation_between_clients"] for row in rows])
    assert line["y"] == [row["accuracy"] for row in rows]
    assert (
        len(figures.accuracy_by_rounds([groups["codream"]]).data) == 1
    )  # its accuracy is that of the server's student
    assert len(figures.accuracy_by_rounds([groups["feddm"]]).data) == 1


def test_who_sends_nothing_is_a_line_across_the_logarithmic_scale(comparison):
    groups = [group for group in groups_of(comparison) if group.label in ("independent", "fedavg")]
    chart = figures.accuracy_by_bytes(groups)
    (across,) = [trace for trace in chart.data if "sends nothing" in trace["name"]]
    sent = [x for trace in chart.data if trace["name"] == "fedavg" for x in trace["x"]]
    assert chart.layout["xaxis"]["type"] == "log"
    assert across["x"] == [min(sent), max(sent)]
    assert across["y"] == [groups[1].curve[-1][2]] * 2


def test_rounds_in_which_nobody_was_there_have_no_place_on_the_logarithmic_scale(tmp_path):
    """A line across would begin at 0, which has no logarithm, and not be drawn."""
    for method, offline in (("fedavg", 0.8), ("independent", 0)):
        away_often = {**SMALL, "method": method, "offline": offline, "clients": 2, "rounds": 8, "seed": 1}
        runner.run(configs.resolve(away_often), tmp_path / method)
    groups = groups_of(tmp_path)
    assert groups[0].curve[0][1] == 0
    across, away = sorted(figures.accuracy_by_bytes(groups).data, key=lambda trace: len(trace["x"]))
    assert 0 < len(away["x"]) == len(away["y"]) == len(away["text"]) < 8
    assert min(across["x"]) == min(away["x"]) > 0


def test_rows_with_a_nan_as_runs_once_wrote_them_leave_a_gap(single):
    run = runs.read(single)
    rows = [{**row, "cosine_up": value} for row, value in zip(run.rows, (0.5, math.nan, math.inf), strict=True)]
    assert dataclasses.replace(run, rows=rows).further() == {"cosine_up": {1: 0.5}}


def test_rounds_and_bytes_to_a_target_are_those_of_the_command_line(comparison, tmp_path):
    """Means over the seeds that get there, with how many these are where it is not all."""
    groups = groups_of(comparison)
    for target in (0.1, 0.16, 1.0):
        found = made(run_folders(comparison), tmp_path, target=target).table("the server sees")
        _, standings = standing.standings(groups, target)
        for row, group, wanted in zip(found, groups, standings, strict=True):
            there = [value for value in wanted.rounds_to if value is not None]
            some = f" ({len(there)} of {len(group.runs)})" if 0 < len(there) < len(group.runs) else ""
            rounds, sent = row[f"rounds to {100 * target:.1f} %"], row[f"bytes to {100 * target:.1f} %"]
            if there:
                assert rounds == f"{statistics.fmean(there):.3g}{some}"
                assert sent == size(statistics.fmean(value for value in wanted.bytes_to if value is not None)) + some
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


def test_a_grid_has_a_row_for_each_class(tmp_path):
    """Three images of class 4 and one of class 7: a row of three, and a row of one with two empty places."""
    pixels = torch.arange(4, dtype=torch.uint8)[:, None, None, None].expand(4, 1, 2, 2) * 50
    shown = artifacts.Shown(1, "images", pixels, torch.tensor([4, 4, 7, 4]), [""] * 4)
    (gallery,) = pictures.galleries("run", [shown])
    (grid,) = gallery.grids
    assert grid.rows == ["4", "7"]
    assert (grid.width, grid.height) == (9, 6)  # 3 × 2 images of 2 × 2 pixels, and a pixel after each


def test_soft_labels_say_how_sure_they_are():
    soft = torch.tensor([[0.2, 0.8], [0.4, 0.6]])
    shown = artifacts.Shown(1, "dreams", torch.zeros(2, 3, 4, 4, dtype=torch.uint8), soft, [""] * 2)
    (gallery,) = pictures.galleries("run", [shown])
    assert gallery.soft
    assert gallery.grids[0].rows == ["1 · 70 %"]


@pytest.mark.parametrize("channels", [1, 3])
def test_a_png_is_one(channels):
    image = pytest.importorskip("PIL.Image")
    import io

    pixels = np.arange(5 * 7 * (channels + 1), dtype=np.uint8).reshape(5, 7, channels + 1)
    with image.open(io.BytesIO(pictures.png(pixels))) as read:
        assert read.mode == {1: "LA", 3: "RGBA"}[channels]
        assert (np.asarray(read) == pixels).all()


def test_spread_has_both_ends():
    assert pictures.spread(range(10), 4) == [0, 3, 6, 9]
    assert pictures.spread("ab", 4) == ["a", "b"]


def test_planes_keep_clusters_together_and_repeat():
    """Three clusters far apart in 20 dimensions are three clusters in the plane; the same features give the same."""
    generator = torch.Generator().manual_seed(0)
    centres = 20 * torch.randn(3, 20, generator=generator)
    labels = torch.arange(3).repeat(10)
    rounds = [
        artifacts.Shown(
            r, "means", (centres[labels] + torch.randn(30, 20, generator=generator)).half(), labels, ["a"] * 30
        )
        for r in (1, 2)
    ]
    planes = embedding.planes(rounds)["means"]
    assert [plane.round for plane in planes] == [1, 2]
    for plane in planes:
        middle = np.stack([plane.points[labels == c].mean(0) for c in range(3)])
        nearest = ((plane.points[:, None] - middle[None]) ** 2).sum(2).argmin(1)
        assert nearest.tolist() == labels.tolist()
    assert (embedding.planes(rounds)["means"][1].points == planes[1].points).all()


def test_features_of_a_run_that_diverged_are_in_one_place():
    shown = artifacts.Shown(1, "means", torch.full((9, 4), float("nan")).half(), torch.zeros(9).long(), ["a"] * 9)
    assert (embedding.planes([shown])["means"][0].points == 0).all()


def test_the_efficiency_of_tofu_is_that_of_its_definition(comparison):
    """The ledger's numbers are those of D_size: N images of 8 × 8 pixels with 10 labels and a weight each."""
    groups = groups_of(comparison)
    (tofu,) = [group for group in groups if group.label == "tofu"]
    options = tofu.first.config["options"]
    uploads = tofu.first.wire.kinds["round", "up", "tofu.Upload"]
    assert uploads.paper == 4 * uploads.messages * options["images"] * (64 + 10 + 1)
    cost = next(cost for cost in efficiency.costs(groups) if cost.label == "tofu")
    assert tables.encryption([cost], None).rows[0][3].text == "–"


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


def swept(**options):
    """A group for each combination of options, with accuracy 0.1 · lr + 0.01 · mu."""
    found = []
    for values in itertools.product(*options.values()):
        given = dict(zip(options, values, strict=True))
        accuracy = 0.1 * given["lr"] + 0.01 * given.get("mu", 0)
        row = {"round": 1, "accuracy": accuracy, "bytes_up": 1, "bytes_down": 1}
        config = {"method": "fedprox", "seed": 0, "options": given}
        run = runs.Run(RunFolder("."), config, "", [row], None, {}, {}, {}, runs.Wire())
        found.append(runs.Group(str(values), [run]))
    return found


def test_runs_that_differ_in_two_options_are_a_grid():
    (chart,) = figures.sweep(swept(lr=[2, 1, 3], mu=[10, 0]))
    (trace,) = chart.data
    assert (trace["x"], trace["y"]) == (["1", "2", "3"], ["0", "10"])
    assert trace["z"] == [pytest.approx([0.1, 0.2, 0.3]), pytest.approx([0.2, 0.3, 0.4])]


def test_runs_that_differ_in_one_number_are_a_line_over_it():
    (chart,) = figures.sweep(swept(lr=[2, 0.05, 3]))
    (trace,) = chart.data
    assert trace["x"] == [0.05, 2, 3]
    assert trace["y"] == pytest.approx([0.005, 0.2, 0.3])
    assert chart.layout["xaxis"]["type"] == "log"
    assert figures.sweep(swept(lr=[1, 2])) == []


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
