"""Estimates: what the table of reference times says, by how fast this machine is."""

import json
from pathlib import Path

import pytest
import torch

from fedgist.experiments import estimates, presets
from fedgist.experiments.config import resolve


def test_a_machine_guesses_from_the_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    timed = {"method": "fedavg", "dataset": "digits", "rounds": 3, "lr": 0.5}
    table = {"machine": "M", "calibration": 2.0, "seconds": {presets.run_of(resolve(timed)): 100.0}}
    (tmp_path / "table.json").write_text(json.dumps(table))
    monkeypatch.setattr(estimates, "REFERENCE", tmp_path / "table.json")
    monkeypatch.setattr(estimates, "calibration", lambda: 6.0)
    clock = estimates.Estimates()
    assert clock.get(resolve(timed)) == 300.0  # this machine takes three times as long
    assert clock.get(resolve(timed, {"seed": 3, "engine": "threaded", "data_dir": "elsewhere"})) == 300.0
    assert clock.get(resolve(timed, {"rounds": 4})) is None
    assert clock.how() == "counted on another machine (M), times 3 here"


def test_every_run_of_the_presets_has_its_reference_time() -> None:
    known = json.loads(estimates.REFERENCE.read_text("utf-8"))["seconds"]
    cells = [cell for scale in ("full", "small") for one in presets.available(scale).values() for cell in one.cells]
    missing = {cell.run for cell in cells} - known.keys()
    assert not missing, "python benchmarks/reference_times.py times them"


def test_a_machine_is_judged_by_one_core_of_it() -> None:
    """The process's clock would count all cores, and a machine with many would be taken for a slow one."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        with estimates.one_core():
            assert torch.get_num_threads() == 1
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
    assert 0 < estimates.calibration() < 10_000
