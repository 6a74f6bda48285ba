"""What the report draws and ranks: six curves at first, axes, winners, and efficiency only where it means something."""

import dataclasses
import itertools
import statistics

import pytest

from fedgist.core.codec import Size
from fedgist.core.ledger import Entry, Ledger
from fedgist.experiments import config as configs
from fedgist.experiments import runner
from fedgist.experiments.folder import RunFolder, run_folders
from fedgist.experiments.report import efficiency, figures, runs, tables


def fake(method, accuracies, numbers, clients=2):
    """A group whose clients send so many numbers each in every round."""
    wire = runs.Wire()
    rows = []
    for r, accuracy in enumerate(accuracies, 1):
        wire.paper_up[r] = 4 * numbers * clients
        rows.append({"round": r, "accuracy": accuracy, "seconds": 1.0, "bytes_up": 1, "bytes_down": 1})
    config = {"method": method, "clients": clients}
    return runs.Group(method, [runs.Run(RunFolder("."), config, "", rows, None, {}, {}, {}, wire)])


def test_efficiency_as_defined_and_at_equal_accuracy():
    """FedAvg: best 0.9 in round 4, 1,000 numbers a round. TOFU: best 0.8 in round 5, 100 a round; 0.8 is round 3 there.

    η = 4 · 1000 / (5 · 100) = 8; at 0.8 it is 3 · 1000 / (5 · 100) = 6. Encrypted with n = 2: a client of FedAvg
    4 · 1002, of TOFU 5 · 102; the server 4 · 2004 and 5 · 204.
    """
    fedavg, tofu = fake("fedavg", [0.5, 0.7, 0.8, 0.9, 0.9], 1000), fake("tofu", [0.1, 0.2, 0.3, 0.4, 0.8], 100)
    base, ours = efficiency.costs([fedavg, tofu])
    assert (base.by_definition, base.client, base.server) == (None, 4008, 8016)
    assert (ours.round, ours.numbers, ours.client, ours.server) == (5, 500, 510, 1020)
    assert (ours.by_definition, ours.at_equal_accuracy, ours.common_accuracy) == (8, 6, 0.8)
    (alone,) = efficiency.costs([tofu])
    assert alone.by_definition is None


def several(methods, best=0.5):
    """Groups that differ in how good they are, the first the best."""
    return [fake(name, [0.1, best - 0.01 * i], 100) for i, name in enumerate(methods)]


def test_six_curves_are_drawn_at_first_and_look_different():
    groups = several(
        ["fedavg", "fedprox", "scaffold", "fednova", "feddm", "tofu", "fedgen", "independent", "centralized"]
    )
    data = figures.accuracy_by_rounds(groups).data
    drawn = [trace["name"] for trace in data if trace.get("visible") != "legendonly"]
    assert set(drawn) == {"independent", "centralized", "fedavg", "fedprox", "scaffold", "fednova"}
    assert {trace["name"] for trace in data} == {group.label for group in groups}
    looks = [(trace["line"]["color"], trace["line"]["dash"]) for trace in data]
    assert len(set(looks)) == len(looks)
    assert len({dash for _, dash in looks[:6]}) == 6
    assert not any("visible" in trace for trace in figures.accuracy_by_rounds(groups[:6]).data)


def test_before_the_first_round_the_axis_has_all_accuracies():
    waiting = runs.Group("fedavg", [dataclasses.replace(fake("fedavg", [0.5], 1).first, rows=[])])
    assert figures.accuracy_by_rounds([waiting]).layout["yaxis"]["range"] == [0, 1]
    assert "range" not in figures.accuracy_by_rounds([fake("fedavg", [0.5], 1)]).layout["yaxis"]


def test_who_is_worse_than_alone_saves_nothing():
    groups = [fake("fedavg", [0.6], 9), fake("feddistill", [0.3], 1), fake("independent", [0.4], 1)]
    assert {card.note for card in tables.cards(groups, None)} == {"fedavg"}


def test_references_win_nothing():
    groups = [
        fake("centralized", [0.9], 1),
        fake("fedavg", [0.6], 1),
        fake("feddm", [0.5], 1),
        fake("independent", [0.7], 1),
    ]
    assert {card.note for card in tables.cards(groups, None)} <= {"fedavg", "feddm"}
    assert runs.usual_target(groups) == pytest.approx(0.95 * 0.6)


def test_no_efficiency_across_models_or_below_learning_alone():
    fedavg, tofu = fake("fedavg", [0.9], 1000), fake("tofu", [0.8], 100)
    other = runs.Group("tofu", [dataclasses.replace(tofu.first, config={**tofu.first.config, "model": "another"})])
    assert efficiency.costs([fedavg, tofu])[1].by_definition == 10
    assert efficiency.costs([fedavg, other])[1].by_definition is None
    assert efficiency.costs([fedavg, tofu, fake("independent", [0.85], 1)])[1].by_definition is None
    assert efficiency.costs([fedavg, tofu, fake("independent", [0.75], 1)])[1].by_definition == 10


def groups_of(path):
    return runs.grouped([runs.read(folder) for folder in run_folders(path)])


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
        small = {"clients": 2, "rounds": 8, "steps": 1, "model": "mlp:hidden=8", "device": "cpu", "seed": 1}
        runner.run(configs.resolve({**small, "method": method, "offline": offline}), tmp_path / method)
    groups = groups_of(tmp_path)
    assert groups[0].curve[0][1] == 0
    across, away = sorted(figures.accuracy_by_bytes(groups).data, key=lambda trace: len(trace["x"]))
    assert 0 < len(away["x"]) == len(away["y"]) == len(away["text"]) < 8
    assert min(across["x"]) == min(away["x"]) > 0


def test_the_efficiency_of_tofu_is_that_of_its_definition(comparison):
    """The ledger's numbers are those of D_size: N images of 8 × 8 pixels with 10 labels and a weight each."""
    groups = groups_of(comparison)
    (tofu,) = [group for group in groups if group.label == "tofu"]
    options = tofu.first.config["options"]
    uploads = tofu.first.wire.kinds["round", "up", "tofu.Upload"]
    assert uploads.paper == 4 * uploads.messages * options["images"] * (64 + 10 + 1)
    cost = next(cost for cost in efficiency.costs(groups) if cost.label == "tofu")
    assert tables.encryption([cost], None).rows[0][3].text == "–"


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


def test_of_many_clients_a_partition_shows_few_and_says_so():
    (run,) = fake("fedavg", [0.5], 1).runs
    held = {"sha256": "", "classes": 2, "clients": {f"{i:04d}": [i, 1] for i in range(1001)}}
    found = figures.partition(dataclasses.replace(run, partition=held), "partition", "Samples")
    assert found.title == "Samples: 167 of 1,001 clients, every 6th"
    assert len(set(found.data[0]["x"])) == 167 and found.data[0]["x"][-1] == "0996"


def test_names_with_commas_are_counted_as_others(tmp_path):
    """A row with such a name is quoted; half a row, of a run that is being written, counts for nothing."""
    ledger = Ledger(tmp_path / "ledger.csv", 'a,"run"')
    for sender in ("0", 'north, "east"', "2"):
        ledger.write(Entry(1, "round", 0, "up", sender, "server", "fedavg.Local"), Size(8, 40, 10))
    ledger.close()
    text = (tmp_path / "ledger.csv").read_text()
    (tmp_path / "ledger.csv").write_text(text + text.splitlines()[-1][:-2])
    found = runs.read_ledger(tmp_path / "ledger.csv")
    assert found.crossed() == [("up", "fedavg.Local", runs.Counts(3, 24, 120, 120))]
    assert found.paper_up == {1: 120}
