"""What the report draws and ranks: six curves at first, axes, winners, and efficiency only where it means something."""

import dataclasses

import pytest

from fedgist.core.codec import Size
from fedgist.core.ledger import Entry, Ledger
from fedgist.experiments.folder import RunFolder
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
