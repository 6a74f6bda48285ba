"""A private run across machines: real processes, mutual TLS, DP-SGD at the sites, whose budgets end it."""

import json
import re
import socket
from pathlib import Path

import pytest

from deployed import fedgist
from fedgist.dp import accountant
from fedgist.dp.accountant import Release
from fedgist.dp.budget import Book

pytest.importorskip("nvflare", reason="needs NVFlare: pip install 'fedgist[nvflare]'")

pytestmark = pytest.mark.federation

BUDGET = 2.0
STEP = Release(1.5, 0.1, 10)
"""What a round costs: ten steps."""


def test_budgets_of_sites_end_a_run_at_the_right_round(tmp_path: Path) -> None:
    """Three sites with ε = 2 each; the run would spend more. Books, outboxes and secrets lie in the kits."""
    from fedgist.federation import sim

    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port = probe.getsockname()[1]
    federation = sim.provide(tmp_path / "fed", sim.names(tmp_path / "fed", 3), None, "digits", None, port)
    for site in federation.sites:
        path = federation.kit(site) / "policy.toml"
        fresh = path.read_text()
        path.write_text(re.sub(r"(?m)^epsilon = .*$", f"epsilon = {BUDGET}", fresh))
        assert path.read_text() != fresh
    spent = [accountant.epsilon([Release(STEP.noise, STEP.rate, 10 * rounds)], 1e-5) for rounds in range(1, 30)]
    bearable = sum(epsilon <= BUDGET for epsilon in spent)
    assert 2 <= bearable < 29
    private = [
        "--epsilon",
        "20",
        "--set",
        "weighting=uniform",
        "--set",
        "noise_multiplier=1.5",
        "--set",
        "sampling=0.1",
    ]
    training = ["--rounds", bearable + 5, "--set", "steps=10", "--set", "batch=50", "--model", "mlp:hidden=16"]
    done = fedgist(
        "federation", "sim", tmp_path / "fed", "fedavg", *training, *private, "--port", port, "--out", tmp_path / "r"
    )
    assert done.returncode != 0
    assert "the privacy budget of this data set is spent" in done.stderr.splitlines()[-1], done.stderr
    rows = [json.loads(line) for line in (tmp_path / "r" / "metrics.jsonl").read_text().splitlines()]
    assert len(rows) == bearable and all(row["answered"] == 3 for row in rows)
    for site in federation.sites:
        book = Book(federation.kit(site) / "fedgist" / "privacy.jsonl").releases
        assert book == (Release(STEP.noise, STEP.rate, 10 * bearable),)
        assert f"[{site}]" in done.stderr + done.stdout
