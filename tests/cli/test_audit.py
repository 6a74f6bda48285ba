"""fedgist audit dp: a run with canaries keeps its promise; with half the noise, or a broken clip, it does not."""

import json
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor
from typer.testing import CliRunner, Result

from fedgist.cli import app
from fedgist.dp.releases import Mechanism, Sum, Sums
from fedgist.features.moments import Moments

GIST = ["gist", "--epsilon", "4", "--set", "clip=0.1", "--set", "grid=2", "--set", "scales=1"]
FEDSGD = ["fedsgd", "--epsilon", "8", "--model", "mlp:hidden=8", "--set", "steps=3", "--set", "noise_multiplier=1"]


def run(out: Path, *words: str) -> Path:
    common = ["--dataset", "digits", "--clients", "3", "--rounds", "1", "--device", "cpu", "--engine", "sequential"]
    done = CliRunner().invoke(app, ["run", *words, *common, "--out", str(out)])
    assert done.exit_code == 0, done.output
    return out


def audit(folder: Path, canaries: int = 200) -> Result:
    return CliRunner().invoke(app, ["audit", "dp", str(folder), "--canaries", str(canaries), "--json"])


@pytest.mark.parametrize("noise", ["local", "sum"])
def test_a_run_that_keeps_its_promise(tmp_path: Path, noise: str) -> None:
    done = audit(run(tmp_path / "r", *GIST, "--set", f"dp_noise={noise}"))
    found = json.loads(done.stdout)
    assert done.exit_code == 0 and not found["broken"] and found["promised"] == pytest.approx(4)
    assert 0.8 < found["least"] < 4


@pytest.mark.parametrize("fault", ["half the noise", "a broken clip"])
def test_a_fault_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    folder, sigma = run(tmp_path / "r", *GIST), Mechanism.sigma

    def half(self: Mechanism, one: Sum, sums: Sums) -> float:
        return sigma(self, one, sums) / 2

    def long(self: Moments, rows: Tensor) -> Any:
        return 3 * rows.double()

    if fault == "half the noise":
        monkeypatch.setattr(Mechanism, "sigma", half)
    else:
        monkeypatch.setattr(Moments, "_row", long)
    done = audit(folder)
    assert done.exit_code == 1 and json.loads(done.stdout)["broken"], done.output


def test_sums_over_secret_batches(tmp_path: Path) -> None:
    found = json.loads(audit(run(tmp_path / "r", *FEDSGD), 60).stdout)
    assert not found["broken"] and found["included"] < found["canaries"] == 60


def test_what_cannot_be_audited_is_refused(tmp_path: Path) -> None:
    plain = audit(run(tmp_path / "p", "fedavg", "--model", "mlp:hidden=8", "--set", "steps=1"))
    assert plain.exit_code == 2 and "promises no differential privacy" in plain.stderr
    trained = ["fedavg", "--epsilon", "8", "--model", "mlp:hidden=8", "--set", "steps=1", "--set", "weighting=uniform"]
    inside = audit(run(tmp_path / "t", *trained, "--set", "noise_multiplier=1"))
    assert inside.exit_code == 2 and "has its noise inside training" in inside.stderr
    few = audit(run(tmp_path / "f", *GIST), 10)
    assert few.exit_code == 2 and "ask for more of them" in few.stderr
    assert "there is nothing" not in few.stderr and audit(tmp_path / "none").exit_code == 2
