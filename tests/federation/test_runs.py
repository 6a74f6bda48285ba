"""A run across sites whose envelopes are handed over in this process, and what a trial federation is given."""

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import fedgist
from fedgist import storage
from fedgist.cli import app
from fedgist.data import datasets
from fedgist.experiments.config import load, resolve
from fedgist.experiments.folder import RunFolder, read_json
from fedgist.experiments.progress import Silent
from fedgist.experiments.report import tables
from fedgist.experiments.report.runs import grouped, read
from fedgist.federation import runs, sim, site_setup
from fedgist.federation.protocol.policy import Policy
from fedgist.federation.protocol.remote_engine import Lost, Patience

RULES = Policy(min_samples_per_class=1, min_test_samples=1, options={"steps": (2,)})


class Wire:
    """Sites with their models, of which the others are away; after so many exchanges the server is gone."""

    def __init__(self, folder: Path, models: dict[str, str], exchanges: int):
        settings = {id: site_setup.Settings(str(folder / id / "digits"), model) for id, model in models.items()}
        self.hosts = {id: site_setup.make_host(id, folder / id, settings[id], RULES) for id in models}
        self.left = exchanges

    def exchange(self, requests: Mapping[str, bytes], timeout: float, enough: int) -> dict[str, bytes | Lost]:
        self.left -= 1
        if self.left < 0:
            raise ConnectionError("the server is gone")
        return {
            id: self.hosts[id].handle(data) if id in self.hosts else Lost("is not connected")
            for id, data in requests.items()
        }


def run(folder: Path, models: dict[str, str], exchanges: int = 100, resume: bool = False) -> None:
    """FedDistill across the sites a and b, in the folder that such a run has where none is named."""

    @contextlib.contextmanager
    def connected() -> Iterator[Wire]:
        yield Wire(folder, models, exchanges)

    def config(known: dict[str, Any]) -> Any:
        return resolve({"method": "feddistill", "rounds": 3, "steps": 2, "device": "cpu"}, known)

    runs.run(runs.settle(["a", "b"], config, None, resume), connected, resume, Patience(), Silent())


def test_a_site_that_was_away_joins_with_the_runs_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The server's state may have a part for each model, so that those of a run stay; whom that shuts out is told."""
    monkeypatch.chdir(tmp_path)
    for number, id in enumerate("ab", 1):
        datasets.export("digits", tmp_path / id, part=f"{number}/2")
    with pytest.raises(ConnectionError):
        run(tmp_path, {"a": "cnn"}, exchanges=4)  # question, start, round 1 and its evaluation
    assert "site b does not take part: is not connected; to join this run later, it has to run mlp" in caplog.text
    (path,) = (tmp_path / "runs").iterdir()
    folder = RunFolder(path)
    assert load(folder.config)["architectures"] == ["cnn", "mlp"]
    assert len(folder.rows()) == 1

    with pytest.raises(ConnectionError):
        run(tmp_path, {"a": "cnn", "b": "mlp:hidden=32"}, exchanges=2, resume=True)
    assert (
        "site b does not take part: refused: this site runs mlp:hidden=32, and the run wants mlp of it" in caplog.text
    )

    run(tmp_path, {"a": "cnn", "b": ""}, resume=True)
    assert list((tmp_path / "runs").iterdir()) == [path]
    assert load(folder.config)["architectures"] == ["cnn", "mlp"]
    assert [row["answered"] for row in folder.rows()] == [1, 2, 2]


def test_a_finish_across_sites(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At once, or later without training again: the head is that of both sites' data, whoever holds it."""
    monkeypatch.chdir(tmp_path)
    for number, id in enumerate("ab", 1):
        datasets.export("digits", tmp_path / id, part=f"{number}/2")

    def made(out: str, finish: str, resume: bool = False, share: str = "all") -> Any:
        @contextlib.contextmanager
        def connected() -> Iterator[Wire]:
            yield Wire(tmp_path, {"a": "", "b": ""}, 100)

        def config(known: dict[str, Any]) -> Any:
            layer = {"method": "fedavg", "rounds": 2, "steps": 2, "device": "cpu", "finish": finish, "share": share}
            return resolve({**layer, "engine": "sequential"}, known)

        settled = runs.settle(["a", "b"], config, tmp_path / out, resume)
        return runs.run(settled, connected, resume, Patience(), Silent())

    at_once, plain = made("at-once", "gist"), made("later", "none")
    assert at_once.accuracy > plain.accuracy + 0.1 and [row["answered"] for row in at_once.metrics] == [2, 2, 2]
    later = made("later", "gist", resume=True)
    assert later.accuracy == at_once.accuracy
    assert later.bytes_up == at_once.bytes_up > plain.bytes_up
    same = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("at-once", "later")]
    assert same[0] == same[1]

    trained, own = made("trained", "none", share="body"), made("own", "gist", share="body")
    assert own.accuracy > trained.accuracy + 0.1 and "deviation_between_clients" in own.metrics[-1]


@pytest.mark.parametrize(("members", "answered"), [("abc", [2, 2, 2, 2]), ("a", [2, 2, 1, 1])])
def test_a_run_goes_on_with_its_sites_when_others_have_come_or_left(
    members: str, answered: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for number, id in enumerate("abc", 1):
        datasets.export("digits", tmp_path / id, part=f"{number}/3")

    def made(sites: str, rounds: int, resume: bool) -> Any:
        @contextlib.contextmanager
        def connected() -> Iterator[Wire]:
            yield Wire(tmp_path, dict.fromkeys(sites, ""), 100)

        def config(known: dict[str, Any]) -> Any:
            return resolve({"method": "fedavg", "rounds": rounds, "steps": 2, "device": "cpu"}, known)

        return runs.run(
            runs.settle([*sites], config, tmp_path / "run", resume), connected, resume, Patience(), Silent()
        )

    made("ab", 2, resume=False)
    assert [row["answered"] for row in made(members, 4, resume=True).metrics] == answered


@pytest.mark.parametrize("balance", [False, True])
def test_a_site_joins_a_model_of_gist_and_leaves_it(
    balance: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two sites and a third that joins later are three; with its sums taken out again they are two."""
    monkeypatch.chdir(tmp_path)
    for number, id in enumerate("abc", 1):
        datasets.export("digits", tmp_path / id, part=f"{number}/3")

    def made(sites: str) -> Any:
        @contextlib.contextmanager
        def connected() -> Iterator[Wire]:
            yield Wire(tmp_path, dict.fromkeys(sites, ""), 100)

        def config(known: dict[str, Any]) -> Any:
            layer = {"method": "gist", "rounds": 1, "grid": 2, "scales": 1, "device": "cpu", "engine": "sequential"}
            return resolve({**layer, "balance": balance}, known)

        settled = runs.settle(list(sites), config, tmp_path / f"run-{sites}", False)
        return runs.run(settled, connected, False, Patience(), Silent())

    def says(*words: str, code: int = 0) -> str:
        done = CliRunner().invoke(app, ["gist", *words])
        assert done.exit_code == code, done.output
        return done.stdout + done.stderr

    def head(folder: str) -> torch.Tensor:
        found: torch.Tensor = fedgist.load(folder).state_dict()["head.weight"]
        return found

    two, three = made("ab"), made("abc")
    assert f"accuracy  {three.accuracy:.4f}" in says("add", "run-ab", "c/digits", "--out", "joined")
    assert (head("joined") - head("run-abc")).norm() < 2e-3 * head("run-abc").norm()
    assert (head("run-ab") - head("run-abc")).norm() > 5e-2 * head("run-abc").norm()

    says("sums", "joined", "c/digits", "--out", "c.sums")
    assert f"accuracy  {two.accuracy:.4f}" in says("remove", "joined", "c.sums", "--out", "left")
    assert (head("left") - head("run-ab")).norm() < 2e-3 * head("run-ab").norm()
    assert "about another mean" in says("add", "run-ab", "c.sums", "--out", "wrong", code=2)
    assert "is there already" in says("add", "run-ab", "c/digits", "--out", "left", code=2)
    says("remove", "left", "a/digits", "--out", "one")
    assert "more samples of a class" in says("remove", "one", "a/digits", "--out", "wrong", code=2)
    row, told = RunFolder(Path("joined")).rows()[-1], read_json(Path("joined/result.json"))
    assert row["accuracy"] == told["accuracy"] == told["accuracy_max"] == pytest.approx(three.accuracy)
    assert row["calibration_error"] == pytest.approx(three.metrics[-1]["calibration_error"], abs=1e-4)
    assert "fairness" not in told and "state_sha256" not in told
    kept = storage.load(Path("c.sums"))
    storage.save({**kept, "labels": kept["labels"] - kept["labels"].max()}, Path("less.sums"))
    storage.save({**kept, "products": 4 * kept["products"]}, Path("more.sums"))
    assert "no part of the model's" in says("remove", "joined", "more.sums", "--out", "wrong", code=2)
    assert "numbers that do not fit" in says("add", "joined", "less.sums", "--out", "wrong", code=2)
    Path("c.sums").write_bytes(b"nothing")
    assert "does not hold the sums of a site" in says("add", "run-ab", "c.sums", "--out", "wrong", code=2)
    assert not Path("wrong").exists()


def test_the_servers_data_is_loaded_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for number, id in enumerate("ab", 1):
        datasets.export("digits", tmp_path / id, part=f"{number}/2")
    original, loaded = datasets.load, []

    def load(*arguments: Any) -> Any:
        loaded.append(arguments)
        return original(*arguments)

    monkeypatch.setattr(datasets, "load", load)
    run(tmp_path, {"a": "cnn", "b": ""})
    assert len(loaded) == 1


def test_what_was_settled_before_is_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As `federation sim` does it: mistakes show before anything is started, and nothing is loaded again."""
    monkeypatch.chdir(tmp_path)
    for number, id in enumerate("ab", 1):
        datasets.export("digits", tmp_path / id, part=f"{number}/2")

    def config(known: dict[str, Any]) -> Any:
        return resolve({"method": "feddistill", "rounds": 1, "steps": 2, "device": "cpu"}, known)

    @contextlib.contextmanager
    def connected() -> Iterator[Wire]:
        yield Wire(tmp_path, {"a": "", "b": ""}, 100)

    settled = runs.settle(["a", "b"], config, None, False)
    monkeypatch.setattr(datasets, "load", None)
    result = runs.run(settled, connected, False, Patience(), Silent())
    assert result.folder == settled.folder.path


def test_a_trial_federation_takes_a_second_data_set(tmp_path: Path) -> None:
    """Sites begin on the data set that is named, whatever was tried before."""
    datasets.export("digits", tmp_path / "own")
    (tmp_path / "own" / "digits").rename(tmp_path / "own" / "letters")
    path = tmp_path / "fed"
    path.mkdir()
    (path / "federation.toml").write_text('server = "localhost"\nport = 8002\nsites = ["site-1", "site-2"]\n')
    for dataset in ("digits", "letters"):
        federation = sim.provide(path, sim.names(path, 2), None, dataset, str(tmp_path / "own"), 8002)
        for site in federation.sites:
            assert len(site_setup.read_images(path / "data" / site / dataset)[0].labels) > 0


@pytest.mark.parametrize(
    ("model", "why"),
    [
        ("mpl", "unknown model 'mpl'; did you mean 'mlp'?"),
        ("mlp:hidden=8000x8000", "has 64.6 million weights, more than a run bears"),
        ("\x1b[2Jmlp", "unknown model '[2Jmlp'"),
    ],
)
def test_a_site_with_an_impossible_model_is_left_out(
    model: str, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It is named, and everybody else goes on."""
    monkeypatch.chdir(tmp_path)
    for number, id in enumerate("ab", 1):
        datasets.export("digits", tmp_path / id, part=f"{number}/2")
    run(tmp_path, {"a": "cnn", "b": model})
    assert "site b does not take part" in caplog.text and why in caplog.text and "\x1b" not in caplog.text
    (path,) = (tmp_path / "runs").iterdir()
    assert [row["answered"] for row in RunFolder(path).rows()] == [1, 1, 1]
    (row,) = tables.missing(grouped([read(RunFolder(path))])).rows
    assert [cell.text for cell in row[1:3]] == ["b", "3"] and "wants mlp of it" in row[3].text
