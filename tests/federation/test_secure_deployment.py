"""`federation sim` with secure sums: real processes, mutual TLS, and the weights of a run without."""

import json
import socket
from pathlib import Path
from typing import Any

import pytest

from deployed import fedgist

pytest.importorskip("nvflare", reason="needs NVFlare: pip install 'fedgist[nvflare]'")

pytestmark = pytest.mark.federation


def test_masked_plain_and_helped_end_at_the_same_weights(tmp_path: Path) -> None:
    """The helper is a process of its own, in a federation of its own with the same three sites."""

    def made(out: str, *more: str, federation: str = "fed") -> dict[str, Any]:
        with socket.socket() as probe:
            probe.bind(("localhost", 0))
            port = probe.getsockname()[1]
        method = ["fedavg", "--rounds", "2", "--set", "steps=5", "--model", "mlp:hidden=16", *more]
        done = fedgist("federation", "sim", tmp_path / federation, *method, "--port", port, "--out", tmp_path / out)
        assert done.returncode == 0, done.stderr
        return dict(json.loads((tmp_path / out / "result.json").read_text()))

    plain, masked = made("plain"), made("masked", "--secure", "masks:trips=3")
    helped = made("helped", "--secure", "helper:by=trustee", federation="helped-fed")
    assert masked["state_sha256"] == helped["state_sha256"] == plain["state_sha256"]
    assert min(masked["bytes_up"], helped["bytes_up"]) > 1.9 * plain["bytes_up"]
    assert "masked.Local" in (tmp_path / "masked" / "ledger.csv").read_text()
    assert "protected by masks" in (tmp_path / "masked" / "report.html").read_text()
    assert "trustee,server,secure_sum.MaskSum" in (tmp_path / "helped" / "ledger.csv").read_text()
    assert "protected by masks that trustee knows" in (tmp_path / "helped" / "report.html").read_text()
