"""Runs that go on with more rounds, are made anew, or meet a method that is no longer what it was, or a full disk."""

import errno
import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from fedgist import methods
from fedgist.cli import app
from fedgist.experiments.folder import RunFolder

TINY = ["--clients", "3", "--model", "mlp:hidden=8", "--set", "steps=1", "--device", "cpu", "-q"]


def call(*arguments, code=0):
    result = CliRunner().invoke(app, [str(a) for a in arguments])
    assert result.exit_code == code, result.output
    return result


def lasting(path):
    """All that came out, but for the seconds and the name, which rounds are part of."""
    folder = RunFolder(path)
    rows = [{key: row[key] for key in row if key != "seconds"} for row in folder.rows()]
    ledger = [line.partition(",")[2] for line in folder.ledger.read_text().splitlines()]
    return json.loads(folder.result.read_text())["state_sha256"], rows, ledger


@pytest.mark.parametrize("eval_every", [1, 0, 3], ids=["each", "last", "third"])
@pytest.mark.parametrize("method", ["fedavg", "codream"])
def test_a_run_that_gets_more_rounds_is_the_run_that_had_them_from_the_start(method, eval_every):
    """Evaluated only after the last round, the shorter run did more in its last than the longer one does there."""
    toy = ["run", method, "--profile", "toy", *TINY, "--set", f"eval_every={eval_every}"]
    call(*toy, "--rounds", "4", "--out", "whole")
    call(*toy, "--rounds", "2", "--out", "grown")
    call("run", "--resume", "--out", "grown", "--rounds", "4", "-q")
    assert lasting("grown") == lasting("whole")
    assert "rounds = 4" in Path("grown/config.toml").read_text()
    result = call("run", "--resume", "--out", "grown", "--rounds", "3", code=2)
    assert result.stderr.startswith("fedgist: grown was begun with another configuration: rounds was 4 and is now 3; ")
    assert RunFolder("grown").finished


def test_a_run_is_made_anew_only_where_it_is_asked_for_and_nothing_else_lies_there():
    run = ["run", "fedavg", *TINY, "--rounds", "1", "--out", "run"]
    call(*run)
    hint = "holds a finished run; show it with --resume, make it anew with --overwrite, or choose another"
    assert hint in call(*run, code=2).stderr
    assert "unknown dataset" in call(*run, "--overwrite", "--dataset", "digts", code=2).stderr
    assert RunFolder("run").finished  # a mistake costs nothing
    call(*run, "--overwrite", "--seed", "1")
    assert "seed = 1" in Path("run/config.toml").read_text()
    assert "either goes on (resume) or" in call(*run, "--overwrite", "--resume", code=2).stderr
    Path("run/notes.txt").write_text("mine")
    assert call(*run, "--overwrite", code=2).stderr.startswith("fedgist: run holds more than a run (notes.txt)")
    assert RunFolder("run").finished


def test_a_method_that_changed_meanwhile_is_told_of_and_does_not_go_on(tmp_path, monkeypatch):
    folder = tmp_path / "mine"
    folder.mkdir()
    own = folder / "mine.py"
    own.write_text(Path(methods.__file__).with_name("fedavg.py").read_text().replace('"fedavg"', '"mine"'))
    monkeypatch.setenv("FEDGIST_METHODS", str(folder))
    methods.registry.cache_clear()
    try:
        call("run", "mine", *TINY, "--rounds", "1", "--out", "run")
        own.write_text(own.read_text() + "# another thought\n")
        more = ["run", "--resume", "--out", "run", "--rounds", "2", "-q"]
        line = call(*more, code=2).stderr
        assert line.startswith(
            f"fedgist: run was begun with another version of {own}: put that back, make the run anew"
        )
        assert RunFolder("run").finished
        call("run", "--resume", "--out", "run", "-q")  # what is finished is only shown
        Path("run/method.json").unlink()  # the user's word, as the line says
        call(*more)
    finally:
        methods.registry.cache_clear()


@pytest.mark.parametrize(
    ("where", "again"),
    [("folder.RunFolder.append", "fedgist run --resume --out run"), ("artifacts.due", "the same command")],
)
def test_a_full_disk_is_named_with_the_way_on(where, again, monkeypatch):
    """The file system says so in the middle of a write, without a name; before any round, nothing is left."""

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    run = ["run", "fedavg", *TINY, "--rounds", "2", "--out", "run"]
    with monkeypatch.context() as patch:
        patch.setattr(f"fedgist.experiments.{where}", full)
        line = call(*run, code=2).stderr
    assert line == f"fedgist: the disk of run is full: make room and go on with {again}\n"
    call(*(again.split()[1:] if "resume" in again else run))
    assert RunFolder("run").finished


def test_a_file_from_before_an_option_was_renamed_is_read():
    call("run", "repshare", *TINY, "--rounds", "1", "--set", "released=0,1", "--out", "run")
    file = Path("run/config.toml")
    assert "released = [0, 1]" in file.read_text()
    file.write_text(file.read_text().replace("released =", "classes ="))
    call("run", "--config", file, "--out", "again", "-q")
    assert lasting("again") == lasting("run")
    assert "released = [0, 1]" in Path("again/config.toml").read_text()
    call("run", "--config", file, "--set", "released=2", "--out", "other", "-q")  # what was typed wins
    assert "released = [2]" in Path("other/config.toml").read_text()
    call("run", "--resume", "--out", "run", "-q")
