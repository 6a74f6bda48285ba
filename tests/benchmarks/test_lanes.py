"""Lanes: the list of what is left names runs that there are, and jobs keep to the time."""

import importlib.util
import shutil
import sys
import tarfile
import tomllib
from pathlib import Path
from types import ModuleType

import pytest

from fedgist.experiments import presets, reproduction

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
EVIDENCE = tomllib.loads((BENCHMARKS / "evidence.toml").read_text("utf-8"))["cells"]


@pytest.fixture
def lanes(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    spec = importlib.util.spec_from_file_location("lanes", BENCHMARKS / "lanes.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "lanes", module)
    spec.loader.exec_module(module)
    return module


def test_every_entry_names_a_run_and_what_is_published_is_passed_over(
    lanes: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    known = presets.available()
    left = [job for entry in EVIDENCE for job in lanes.jobs(entry, known)]
    monkeypatch.setattr(lanes, "DOCS", tmp_path)
    all_jobs = [job for entry in EVIDENCE for job in lanes.jobs(entry, known)]
    assert len(all_jobs) == sum(len(entry["cells"]) for entry in EVIDENCE)
    assert {job.cells for job in left} <= {job.cells for job in all_jobs}
    (done,) = lanes.jobs(
        {"preset": "repshare/table1", "cells": ["IL, MNIST N=2"], "seeds": [4, 9], "seconds": 1}, known
    )
    assert done.seeds == (4, 9)
    monkeypatch.undo()
    (half,) = lanes.jobs(
        {"preset": "repshare/table1", "cells": ["IL, MNIST N=2"], "seeds": [4, 9], "seconds": 1}, known
    )
    assert half.seeds == (9,)  # five seeds are published


def test_a_run_that_other_presets_show_is_added_to_them(lanes: ModuleType) -> None:
    entry = {"preset": "feddm/table1", "cells": ["FedDM, CIFAR-10 a=0.01"], "seeds": [77], "seconds": 1}
    (job,) = lanes.jobs(entry, presets.available())
    assert ("gist/table1", "feddm, CIFAR-10, Dirichlet 0.01") in job.cells


def test_a_name_of_several_runs_is_refused(lanes: ModuleType) -> None:
    with pytest.raises(SystemExit, match="names no run, or several"):
        list(lanes.jobs({"preset": "repshare/table1", "cells": ["MNIST N=2"], "seeds": [0]}, presets.available()))


def test_jobs_keep_to_the_time_and_do_not_outlive_it(
    lanes: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of three jobs for two lanes one is too long to be begun, one ends, and one is stopped with all that it began."""
    told = tmp_path / "list.toml"
    cells = {"IL, MNIST N=2": 0.1, "FL, MNIST N=2": 0.1, "FD, MNIST N=2": 60}
    told.write_text(
        "".join(
            f"[[cells]]\npreset = 'repshare/table1'\ncells = ['{cell}']\nseeds = [99]\nseconds = {seconds}\n"
            for cell, seconds in cells.items()
        )
    )
    does = {"IL, MNIST N=2": f"mkdir -p {tmp_path}/out/results/IL", "FL, MNIST N=2": "sleep 300 && true"}
    monkeypatch.setattr(lanes.Job, "command", lambda job, device, scale, out: does[job.cells[0][1]])
    monkeypatch.setattr(lanes.inventory, "readable", lambda: {"mnist": ""})
    words = ["lanes.py", "run", str(told), "--minutes", "0.05", "--lanes", "2"]
    words += ["--device", "cpu", "--out", f"{tmp_path}/out"]
    monkeypatch.setattr(sys, "argv", words)
    lanes.main()
    said = capsys.readouterr().out
    assert "begun   repshare/table1: IL, MNIST N=2, seeds 99" in said
    assert "ended   repshare/table1: IL, MNIST N=2, seeds 99" in said
    assert "FAILED  repshare/table1: FL, MNIST N=2, seeds 99" in said
    assert "FD, MNIST" not in said
    assert (tmp_path / "out" / "results.tgz").is_file()


def test_what_came_back_is_added_to_what_is_published(
    lanes: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """With the commit that the other machine could not know; taking it again changes nothing."""
    docs = tmp_path / "docs"
    shutil.copytree(lanes.DOCS / "results", docs / "results")
    monkeypatch.setattr(lanes, "DOCS", docs)
    preset = presets.available()["repshare/table1"]
    cell = next(cell for cell in preset.cells if cell.name == "IL, MNIST N=2")
    origin = {"command": "c", "version": "0", "commit": None, "machine": {"device": "a GPU"}, "seeds": ["9"]}
    found = reproduction.Found(cell.run, {"9": [90.0]}, 1.0, 2.0, 3.0, (origin,), sizes={"9": [1.0, 2.0, 3.0]})
    reproduction.save(preset, {cell.name: found}, tmp_path / "results" / "a-job")
    with tarfile.open(tmp_path / "results.tgz", "w:gz") as packed:
        packed.add(tmp_path / "results", "results")
    monkeypatch.setattr(sys, "argv", ["lanes.py", "take", str(tmp_path / "results.tgz"), "--commit", "1234abc"])
    lanes.main()
    kept = reproduction.load(preset, [docs / "results"])[cell.name]
    assert kept.numbers["9"] == [90.0] and len(kept.numbers) == 6
    assert kept.made[-1] == {**origin, "commit": "1234abc"}
    page = (docs / "reproduction.md").read_text("utf-8")
    assert "(a GPU, commit 1234abc)" in page
    before = {path: path.read_bytes() for path in docs.rglob("*") if path.is_file()}
    lanes.main()
    assert {path: path.read_bytes() for path in docs.rglob("*") if path.is_file()} == before
