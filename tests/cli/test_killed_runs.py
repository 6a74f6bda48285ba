"""Real processes, really killed."""

import json
import os
import signal
import subprocess
import sys
import time
from functools import partial

import pytest
from typer.testing import CliRunner

from fedgist.cli import app
from fedgist.core.rng import Rng
from fedgist.experiments.folder import RunFolder

ROUNDS = 100  # so many that none of the runs ends before it is stopped
RUN = ["run", "fedavg", "--rounds", str(ROUNDS), "--clients", "4", "--set", "offline=0.1", "--device", "cpu", "--quiet"]


def start(out, *more):
    """A run in a process of its own."""
    command = [sys.executable, "-m", "fedgist", *RUN, "--out", str(out), *more]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    # A shell starts its background jobs with Ctrl-C ignored, and whatever they start inherits that.
    heed = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    return subprocess.Popen(command, env=environment, preexec_fn=heed, **pipes)


def wait_for_rounds(folder, count):
    """Until the run has written `count` rows more than now."""
    goal = len(folder.rows()) + count
    deadline = time.monotonic() + 60
    while len(folder.rows()) < goal:
        assert time.monotonic() < deadline, "the run does not get on"
        time.sleep(0.002)


def lasting(folder):
    """All that must not depend on whether the run was stopped."""
    result = json.loads(folder.result.read_text())
    rows = [{key: row[key] for key in row if key != "seconds"} for row in folder.rows()]
    return result["state_sha256"], rows, folder.ledger.read_bytes(), folder.partition.read_text()


@pytest.mark.slow
def test_a_killed_run_resumes_to_the_very_same(tmp_path):
    folder = RunFolder(tmp_path / "torn")
    process = start(folder.path)
    wait_for_rounds(folder, 2)
    time.sleep(0.1 * Rng(time.time_ns()).uniform(1).item())  # anywhere in a round, elsewhere each time
    process.kill()
    process.communicate()
    assert process.returncode == -signal.SIGKILL
    assert not folder.finished

    for stop in (signal.SIGINT, signal.SIGTERM):
        process = start(folder.path, "--resume")
        wait_for_rounds(folder, 2)
        process.send_signal(stop)
        _, said = process.communicate()
        assert process.returncode == 130
        assert said == (
            f"fedgist: stopped; {folder.rounds_kept()} of {ROUNDS} rounds are kept; "
            f"go on with fedgist run --resume --out {folder.path}\n"
        )

    assert CliRunner().invoke(app, [*RUN, "--out", str(folder.path), "--resume"]).exit_code == 0
    whole = RunFolder(tmp_path / "whole")
    assert CliRunner().invoke(app, [*RUN, "--out", str(whole.path)]).exit_code == 0
    assert lasting(folder) == lasting(whole)
