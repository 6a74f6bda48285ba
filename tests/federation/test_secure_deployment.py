"""`federation sim` with secure sums: real processes, mutual TLS, and the weights of a run without."""

import json
import socket
from pathlib import Path
from typing import Any

import pytest

from deployed import Background, fedgist, wait_for

pytest.importorskip("nvflare", reason="needs NVFlare: pip install 'fedgist[nvflare]'")

pytestmark = pytest.mark.federation


def words(folder: Path, out: str, rounds: int, *more: str, federation: str = "fed") -> list[Any]:
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port = probe.getsockname()[1]
    method = ["fedavg", "--rounds", rounds, "--set", "steps=5", "--model", "mlp:hidden=16", *more]
    return ["federation", "sim", folder / federation, *method, "--port", port, "--out", folder / out]


def result(out: Path) -> dict[str, Any]:
    return dict(json.loads((out / "result.json").read_text()))


def test_masked_plain_and_helped_end_at_the_same_weights(tmp_path: Path) -> None:
    """The helper is a process of its own, in a federation of its own with the same three sites."""

    def made(out: str, *more: str, **where: str) -> dict[str, Any]:
        done = fedgist(*words(tmp_path, out, 2, *more, **where))
        assert done.returncode == 0, done.stderr
        return result(tmp_path / out)

    plain, masked = made("plain"), made("masked", "--secure", "masks:trips=3")
    helped = made("helped", "--secure", "helper:by=trustee", federation="helped-fed")
    assert masked["state_sha256"] == helped["state_sha256"] == plain["state_sha256"]
    assert min(masked["bytes_up"], helped["bytes_up"]) > 1.9 * plain["bytes_up"]
    assert "masked.Local" in (tmp_path / "masked" / "ledger.csv").read_text()
    assert "protected by masks" in (tmp_path / "masked" / "report.html").read_text()
    assert "trustee,server,secure_sum.MaskSum" in (tmp_path / "helped" / "ledger.csv").read_text()
    assert "protected by masks that trustee knows" in (tmp_path / "helped" / "report.html").read_text()


def test_everybody_killed_goes_on_to_the_same_weights(tmp_path: Path) -> None:
    """kill -9 of coordinator, server and sites in the middle of a run with masks; then the same with --resume."""
    done = fedgist(*words(tmp_path, "whole", 12))
    assert done.returncode == 0, done.stderr
    masked = words(tmp_path, "cut", 12, "--secure", "masks")
    run, rows = Background(tmp_path / "log", *masked), tmp_path / "cut" / "metrics.jsonl"
    wait_for(lambda: (rows.exists() and rows.read_text().count("\n") >= 3) or run.process.poll() is not None)
    run.kill_all()
    assert not (tmp_path / "cut" / "result.json").exists()
    done = fedgist(*masked, "--resume")
    assert done.returncode == 0, done.stderr
    assert result(tmp_path / "cut")["state_sha256"] == result(tmp_path / "whole")["state_sha256"]
    rows_up = (tmp_path / "cut" / "ledger.csv").read_text().count("masked.Local")
    assert rows_up == 3 * 12
