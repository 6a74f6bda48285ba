"""Metrics for TensorBoard: what is written, and what is said where it is not installed."""

import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from fedgist.cli import app
from fedgist.experiments.tensorboard import TensorBoard

RUN = ["run", "fedavg", "--rounds", "2", "--clients", "2", "--model", "mlp:hidden=8", "--quiet", "--tensorboard"]


def test_without_it_a_line_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    result = CliRunner().invoke(app, [*RUN, "--out", "run"])
    assert result.exit_code == 2
    assert result.stderr == "fedgist: --tensorboard needs tensorboard: pip install 'fedgist[tensorboard]'\n"
    assert not Path("run").exists()


def test_every_number_of_a_row_is_a_scalar(monkeypatch, tmp_path):
    """A writer in memory stands in for TensorBoard's."""
    written = []

    class Writer:
        def __init__(self, folder, purge_step):
            written.append((folder, purge_step))

        def add_scalar(self, name, value, step):
            written.append((name, value, step))

        def flush(self):
            written.append("flush")

        def close(self):
            written.append("close")

    class Module:
        SummaryWriter = Writer

    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", Module)
    listener = TensorBoard(tmp_path)
    listener.start("a run", 3, 9)
    listener.round({"round": 4, "accuracy": 0.5, "skipped": None, "bytes_up": 7, "unevaluated": "why"})
    listener.stop()
    assert written == [(str(tmp_path), 4), ("accuracy", 0.5, 4), ("bytes_up", 7, 4), "flush", "close"]


def test_a_run_writes_event_files(tmp_path, monkeypatch):
    pytest.importorskip("tensorboard", reason="needs tensorboard: pip install 'fedgist[tensorboard]'")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    monkeypatch.chdir(tmp_path)
    assert CliRunner().invoke(app, [*RUN, "--out", "run"], catch_exceptions=False).exit_code == 0
    events = EventAccumulator("run/tensorboard")
    events.Reload()
    assert {"accuracy", "bytes_up", "bytes_down", "seconds"} <= set(events.Tags()["scalars"])
    assert [event.step for event in events.Scalars("accuracy")] == [1, 2]
