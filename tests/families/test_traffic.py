"""Bytes before anything is sent: what the ledger will count, and when FedAvg would be cheaper."""

import csv
from contextlib import closing
from pathlib import Path

import pytest

from fedgist.core.ledger import Ledger
from fedgist.core.rng import Rng
from fedgist.families.global_model import Global, Local
from fedgist.families.traffic import payload, warn_if_dearer
from toys import clients, federation


@pytest.mark.parametrize("settings", [{}, {"share": "head"}, {"share": "body"}, {"batch_norm": "local"}], ids=str)
def test_the_payload_of_a_round_is_what_the_ledger_counts(settings: dict[str, str], tmp_path: Path) -> None:
    with closing(Ledger(tmp_path / "ledger.csv")) as ledger:
        engine = federation("fedavg", clients(4), "cnn", ledger=ledger, steps=1, batch=4, **settings)
        engine.run_round()
    w = {name: engine.method.model.init(Rng(0))[name] for name in engine.state["w"]}
    with open(tmp_path / "ledger.csv", newline="") as file:
        counted = {row["direction"]: int(row["payload_bytes"]) for row in csv.DictReader(file)}
    assert counted == {"down": payload(engine.method, Global(w)), "up": payload(engine.method, Local(w, 1.0))}
    assert payload(engine.method, Global(w), Local(w, 1.0)) == sum(counted.values())
    assert payload(engine.method) == 0


def test_it_is_said_when_fedavg_would_be_cheaper(caplog: pytest.LogCaptureFixture) -> None:
    """Its weights, at four bytes, go down and up again."""
    method = federation("fedprox", clients(4), "mlp:hidden=6").method
    usual = 2 * 4 * method.model.size
    warn_if_dearer(method, usual, "send less")
    assert not caplog.records
    warn_if_dearer(method, 3 * usual, "send less")
    (record,) = caplog.records
    said = record.getMessage()
    assert said.startswith("fedprox will move ") and said.endswith("; send less")
    assert f" a round for each client, 3.0 times what fedavg would with {method.model.name}" in said
