"""Runs: what lies in the folder, and that a run which was stopped anywhere ends as if it had not been."""

import dataclasses
import json
import statistics

import numpy as np
import pytest
import torch

from fedgist import storage
from fedgist.core.errors import FedgistError
from fedgist.core.federation import TooFewAnswers
from fedgist.core.ledger import Ledger
from fedgist.data import datasets
from fedgist.engines import site_states
from fedgist.engines.local import LocalEngine
from fedgist.engines.site_states import SiteStates
from fedgist.experiments import config as configs
from fedgist.experiments import folder as folders
from fedgist.experiments import results, runner
from fedgist.experiments.folder import RunFolder, default_folder, each_seed, free_folder, run_folders

SMALL = {"rounds": 4, "clients": 3, "steps": 2, "model": "mlp:hidden=8", "device": "cpu"}


def config_of(method="fedavg", **values):
    return configs.resolve({"method": method, **SMALL, **values})


def contents(path):
    """All that must not depend on whether a run was stopped: everything but times."""
    folder = RunFolder(path)
    rows = [{key: value for key, value in row.items() if key != "seconds"} for row in folder.rows()]
    result = json.loads(folder.result.read_text())
    del result["seconds"]
    kept = {p.name: p.read_bytes() for p in sorted([*folder.transcript.glob("*"), *folder.shown.glob("*")])}
    return rows, folder.ledger.read_text(), result, storage.digest(storage.load(folder.state)), kept


def test_the_folder_holds_the_run(tmp_path):
    config = config_of(record="Local")
    result = runner.run(config, tmp_path / "run")
    folder = RunFolder(tmp_path / "run")
    whole = {"config.toml", "env.json", "method.json", "partition.json", "partition.npz", "metrics.jsonl", "ledger.csv"}
    assert {p.name for p in folder.path.iterdir()} == whole | {"checkpoint", "artifacts", "result.json"} | {
        "fairness.json",
        "model.safetensors",
        "model.json",
        "MODEL_CARD.md",
    }
    assert configs.resolve(configs.load(folder.config)) == runner.prepare(config)
    assert [row["round"] for row in folder.rows()] == [1, 2, 3, 4]
    assert [p.stem for p in folder.checkpoint_files()] == ["round-000004", "round-000003"]
    assert len(list(folder.transcript.iterdir())) == 4 * 3  # a reply a client and round
    environment = json.loads(folder.environment.read_text())
    assert environment["libraries"]["torch"] == torch.__version__
    assert environment["device"] == "cpu"

    train, _ = datasets.load("digits")
    saved = np.load(folder.indices)
    parts = np.split(saved["indices"], np.cumsum(saved["sizes"])[:-1])
    held = zip(saved["clients"].tolist(), parts, strict=True)
    counts = {name: torch.bincount(train.y[part], minlength=10).tolist() for name, part in held}
    assert json.loads(folder.partition.read_text())["clients"] == counts

    assert result.folder == folder.path
    assert storage.digest(result.weights) == storage.digest(result.state["w"])
    assert result.seconds == pytest.approx(sum(row["seconds"] for row in folder.rows()), abs=1e-3)


def test_the_summary_is_that_of_the_rows(tmp_path):
    result = runner.run(config_of(rounds=7), tmp_path / "run")
    accuracies = [row["accuracy"] for row in result.metrics]
    assert result.accuracy == accuracies[-1]
    assert result.accuracy_max == max(accuracies)
    assert result.accuracy_best5 == statistics.fmean(sorted(accuracies)[2:])
    assert result.bytes_up == result.metrics[-1]["bytes_up"]
    lines = RunFolder(tmp_path / "run").ledger.read_text().splitlines()[1:]
    up = [line.split(",") for line in lines if ",up," in line]
    assert result.bytes_up == sum(int(line[-3]) + int(line[-2]) for line in up)


def test_without_a_folder_the_result_is_the_same(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    in_memory = runner.run(config_of())
    assert list(tmp_path.iterdir()) == []
    on_disk = runner.run(config_of(), tmp_path / "run")
    assert storage.digest(in_memory.state) == storage.digest(on_disk.state)
    assert in_memory.folder is None


def test_what_a_run_returns_is_what_its_folder_says(tmp_path):
    made = runner.run(config_of(), tmp_path / "run")
    read = results.load(RunFolder(tmp_path / "run"))
    for name in (field.name for field in dataclasses.fields(made)):
        ours, theirs = getattr(made, name), getattr(read, name)
        assert storage.digest(ours) == storage.digest(theirs) if name in ("state", "weights") else ours == theirs


@pytest.mark.parametrize(("every", "expected"), [(0, [4]), (1, [1, 2, 3, 4]), (3, [3, 4])])
def test_evaluation_every_so_many_rounds(every, expected):
    result = runner.run(config_of(eval_every=every))
    assert [row["round"] for row in result.metrics if "accuracy" in row] == expected


class Killed(BaseException):
    """Nothing catches it, as nothing catches SIGKILL."""


def killed_at(monkeypatch, owner, name, call, after):
    """Ends the run at the `call`-th call of a function, before or after it did its work."""
    original, calls = getattr(owner, name), iter(range(1, 10_000))

    def dying(*args, **kwargs):
        last = next(calls) == call
        if last and not after:
            raise Killed
        value = original(*args, **kwargs)
        if last:
            raise Killed
        return value

    monkeypatch.setattr(owner, name, dying)


KILLS = [
    (owner, name, call, after)
    for owner, name, calls in [
        (folders, "write_text", (1, 2, 4)),  # config.toml, partition.json, method.json
        (np, "savez_compressed", (1,)),  # who holds which samples
        (LocalEngine, "run_round", (1, 3)),
        (LocalEngine, "evaluate", (2,)),
        (LocalEngine, "collect", (2, 4)),  # in the middle of an exchange
        (Ledger, "position", (2,)),
        (storage, "save", (1, 2, 4, 5)),  # checkpoints, and the state at the end
        (RunFolder, "checkpoint_files", (4,)),  # of which old ones go
        (results, "write_json", (1,)),  # result.json
    ]
    for call in calls
    for after in (False, True)
]


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    path = tmp_path_factory.mktemp("whole") / "run"
    runner.run(config_of(offline=0.2, record="all"), path)
    return contents(path)


@pytest.mark.parametrize(("owner", "name", "call", "after"), KILLS)
def test_a_run_killed_anywhere_resumes_to_the_same(owner, name, call, after, uninterrupted, tmp_path):
    config = config_of(offline=0.2, record="all")
    with pytest.MonkeyPatch.context() as patch:
        killed_at(patch, owner, name, call, after)
        with pytest.raises(Killed):
            runner.run(config, tmp_path / "run")
    runner.run(config, tmp_path / "run", resume=True)
    assert contents(tmp_path / "run") == uninterrupted


@pytest.mark.parametrize(
    ("owner", "name", "call"),
    [(storage.TreeLog, "write", 9), (storage.TreeLog, "sync", 4), (SiteStates, "_begin", 2), (storage, "save", 4)],
)
@pytest.mark.parametrize("after", [False, True])
def test_a_run_whose_states_are_on_the_disk_resumes_to_the_same(owner, name, call, after, tmp_path, monkeypatch):
    """Nothing fits into memory, and a log is replaced as soon as half of it is of no use."""
    config = config_of("scaffold", rounds=6, active=2)
    runner.run(config, tmp_path / "whole")
    monkeypatch.setattr(site_states, "MOST_IN_MEMORY", 1)
    monkeypatch.setattr(site_states, "SLACK", 0)
    with pytest.MonkeyPatch.context() as patch:
        killed_at(patch, owner, name, call, after)
        with pytest.raises(Killed):
            runner.run(config, tmp_path / "run")
    runner.run(config, tmp_path / "run", resume=True)
    assert contents(tmp_path / "run") == contents(tmp_path / "whole")
    assert len(list(RunFolder(tmp_path / "run").checkpoints.glob("states-*.log"))) <= 2


def test_a_method_that_rounds_by_where_tensors_lie_resumes_to_the_same(tmp_path, monkeypatch):
    """Products of one image (TOFU here) do; a checkpoint's tensors lie anywhere in its file."""
    config = config_of("tofu", images=1, iterations=3)
    runner.run(config, tmp_path / "whole")
    killed_at(monkeypatch, LocalEngine, "run_round", 2, after=True)
    with pytest.raises(Killed):
        runner.run(config, tmp_path / "run")
    monkeypatch.undo()
    runner.run(config, tmp_path / "run", resume=True)
    assert contents(tmp_path / "run") == contents(tmp_path / "whole")


def test_checkpoints_every_so_many_rounds_resume_to_the_same(uninterrupted, tmp_path, monkeypatch):
    config = config_of(offline=0.2, record="all", checkpoint_every=2)
    with pytest.MonkeyPatch.context() as patch:
        killed_at(patch, LocalEngine, "run_round", 4, after=True)
        with pytest.raises(Killed):
            runner.run(config, tmp_path / "run")
    assert [p.stem for p in RunFolder(tmp_path / "run").checkpoint_files()] == ["round-000002"]
    runner.run(config, tmp_path / "run", resume=True)
    rows, _, _, state, _ = contents(tmp_path / "run")
    assert (rows, state) == (uninterrupted[0], uninterrupted[3])


@pytest.mark.parametrize("damage", [lambda whole: whole[:100], lambda whole: b"\xff" * 100], ids=["cut", "garbage"])
def test_a_damaged_checkpoint_falls_back_to_the_one_before(damage, uninterrupted, tmp_path):
    config = config_of(offline=0.2, record="all")
    with pytest.MonkeyPatch.context() as patch:
        killed_at(patch, LocalEngine, "run_round", 4, after=False)
        with pytest.raises(Killed):
            runner.run(config, tmp_path / "run")
    newest = RunFolder(tmp_path / "run").checkpoint_files()[0]
    newest.write_bytes(damage(newest.read_bytes()))
    runner.run(config, tmp_path / "run", resume=True)
    assert contents(tmp_path / "run") == uninterrupted


def test_a_finished_run_is_not_overwritten_and_resuming_it_is_reading_it(tmp_path):
    first = runner.run(config_of(), tmp_path / "run")
    before = {p: p.stat().st_mtime_ns for p in (tmp_path / "run").rglob("*")}
    with pytest.raises(FedgistError, match=r"holds a finished run; show it with --resume, .* choose another .* --out"):
        runner.run(config_of(), tmp_path / "run")
    again = runner.run(config_of(), tmp_path / "run", resume=True)
    assert {p: p.stat().st_mtime_ns for p in (tmp_path / "run").rglob("*")} == before
    assert (again.accuracy, again.metrics) == (first.accuracy, first.metrics)
    assert storage.digest(again.weights) == storage.digest(first.weights)


def test_another_configuration_does_not_resume(tmp_path):
    runner.run(config_of(), tmp_path / "run")
    with pytest.raises(FedgistError, match=r"another configuration: seed was 0 and is now 1; lr was 0\.05 and is now"):
        runner.run(config_of(seed=1, lr=0.5), tmp_path / "run", resume=True)


def test_a_mistake_that_the_first_round_finds_leaves_no_run(tmp_path):
    with pytest.raises(FedgistError, match="set n_ref to at least"):
        runner.run(config_of(n_ref=1), tmp_path / "run")
    assert not (tmp_path / "run").exists()
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / ".notes").write_text("mine")
    with pytest.raises(FedgistError, match="set n_ref to at least"):
        runner.run(config_of(n_ref=1), tmp_path / "mine")
    assert (tmp_path / "mine" / ".notes").read_text() == "mine"
    assert runner.run(config_of(), tmp_path / "run").metrics


def test_a_mistake_that_a_later_round_finds_leaves_what_is_done(tmp_path, monkeypatch):
    run_round = LocalEngine.run_round

    def fails(self):
        if self.rounds_done == 1:
            raise FedgistError("no")
        return run_round(self)

    with monkeypatch.context() as patch:
        patch.setattr(LocalEngine, "run_round", fails)
        with pytest.raises(FedgistError, match="no"):
            runner.run(config_of(), tmp_path / "run")
        with pytest.raises(FedgistError, match="no"):
            runner.run(config_of(), tmp_path / "run", resume=True)
    assert len(RunFolder(tmp_path / "run").rows()) == 1
    assert len(runner.run(config_of(), tmp_path / "run", resume=True).metrics) == 4


def test_folders_that_are_no_runs_are_left_alone(tmp_path):
    (tmp_path / "thesis.tex").write_text("precious")
    with pytest.raises(FedgistError, match="is neither empty nor a run; choose another folder"):
        runner.run(config_of(), tmp_path)
    with pytest.raises(FedgistError, match=r"cannot make the folder .*thesis\.tex"):
        runner.run(config_of(), tmp_path / "thesis.tex")
    assert [p.name for p in tmp_path.iterdir()] == ["thesis.tex"]


def test_pooled_methods_get_one_site_with_all_data_and_the_same_partition(tmp_path):
    runner.run(config_of("centralized"), tmp_path / "one")
    runner.run(config_of("fedavg"), tmp_path / "many")
    one, many = (json.loads((tmp_path / name / "partition.json").read_text()) for name in ("one", "many"))
    assert one == many
    row = RunFolder(tmp_path / "one").rows()[0]
    assert row["answered"] == 1


def test_rounds_that_nobody_answers_are_skipped_and_said(tmp_path):
    result = runner.run(config_of(offline=1.0), tmp_path / "run")
    assert all("0 of 3 answered" in row["skipped"] for row in result.metrics)
    assert result.bytes_up == 0


def test_an_evaluation_that_nobody_answers_ends_no_run(monkeypatch):
    original = LocalEngine.evaluate

    def silent(self, test):
        if self.rounds_done != 2:
            raise TooFewAnswers("0 of 3 answered Score")
        return original(self, test)

    monkeypatch.setattr(LocalEngine, "evaluate", silent)
    result = runner.run(config_of())
    assert result.metrics[0]["unevaluated"] == "0 of 3 answered Score"
    assert result.accuracy == result.metrics[1]["accuracy"]


def test_when_no_evaluation_succeeds_the_run_says_so(monkeypatch, tmp_path):
    def silent(self, test):
        raise TooFewAnswers("0 of 3 answered Score")

    monkeypatch.setattr(LocalEngine, "evaluate", silent)
    with pytest.raises(FedgistError, match=r"no evaluation gave a number.*--resume makes the last round"):
        runner.run(config_of(), tmp_path / "run")
    monkeypatch.undo()
    again = runner.run(config_of(), tmp_path / "run", resume=True)
    whole = runner.run(config_of())
    assert again.accuracy == whole.accuracy
    assert again.metrics[-1]["accuracy"] == whole.metrics[-1]["accuracy"]


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({"device": "gpu"}, "device must be auto, cpu, cuda or cuda:N, not 'gpu'"),
        ({"device": "mps"}, "device must be auto, cpu, cuda or cuda:N, not 'mps'"),
        ({"device": "meta"}, "device must be auto, cpu, cuda or cuda:N, not 'meta'"),
        ({"engine": "thraeded"}, "unknown engine 'thraeded'; did you mean 'threaded'"),
    ],
)
def test_places_that_are_not_there(values, sentence):
    with pytest.raises(FedgistError, match=sentence):
        runner.run(config_of(**values))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_a_gpu_that_is_not_there():
    with pytest.raises(FedgistError, match="torch finds no GPU here; use --device cpu"):
        runner.run(config_of(device="cuda"))
    assert runner.prepare(config_of(device="auto")).device == "cpu"


@pytest.mark.parametrize("device", ["cuda:2", "cuda:256"])
def test_a_gpu_with_too_high_a_number(device, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(FedgistError, match=f"device {device} was asked for, .* here is cuda:1"):
        runner.prepare(config_of(device=device))
    assert runner.prepare(config_of(device="cuda:1")).device == "cuda:1"


def test_a_checkpoint_of_before_resumes(uninterrupted, tmp_path):
    """It has one key more: what an engine that is no more had picked."""
    config = config_of(offline=0.2, record="all")
    with pytest.MonkeyPatch.context() as patch:
        killed_at(patch, LocalEngine, "run_round", 4, after=False)
        with pytest.raises(Killed):
            runner.run(config, tmp_path / "run")
    newest = RunFolder(tmp_path / "run").checkpoint_files()[0]
    storage.save({**storage.load(newest), "picked": "{}"}, newest)
    runner.run(config, tmp_path / "run", resume=True)
    assert contents(tmp_path / "run") == uninterrupted


def test_what_a_killed_process_left_of_a_checkpoint_goes(tmp_path):
    config = config_of()
    with pytest.MonkeyPatch.context() as patch:
        killed_at(patch, LocalEngine, "run_round", 2, after=False)
        with pytest.raises(Killed):
            runner.run(config, tmp_path / "run")
    draft = RunFolder(tmp_path / "run").checkpoints / ".round-000002.safetensors.1"
    draft.write_bytes(b"half")
    runner.run(config, tmp_path / "run", resume=True)
    assert not draft.exists()


@pytest.mark.parametrize(
    ("values", "engine"),
    [
        ({}, "stacked"),
        ({"model": "lenet5"}, "threaded"),
        ({"architectures": "mlp,cnn"}, "stacked"),
        ({"architectures": "mlp,lenet5"}, "threaded"),
        ({"model": "tabular:hidden=8", "dataset": "breast-cancer"}, "stacked"),
        ({"engine": "sequential"}, "sequential"),
    ],
)
def test_the_automatic_engine_fits_the_model(values, engine):
    assert runner.prepare(config_of(**values)).engine == engine


def test_default_folders_name_method_data_seed_and_configuration():
    one, two = config_of(seed=3), config_of(seed=3, lr=0.5)
    assert str(default_folder(one)).startswith("runs/fedavg-digits-3-")
    assert default_folder(one) != default_folder(two)
    three = config_of(seed=3, seeds=3)
    assert default_folder(three).name.startswith("fedavg-digits-3to5-")
    assert [path.name for _, path in each_seed(three, default_folder(three))] == [
        "seed-3",
        "seed-4",
        "seed-5",
    ]


def test_runs_are_found_below_a_folder(tmp_path):
    for name in ("b", "a/seed-1", "a/seed-0"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "config.toml").write_text("")
    assert [run.path.relative_to(tmp_path).as_posix() for run in run_folders(tmp_path)] == ["a/seed-0", "a/seed-1", "b"]
    with pytest.raises(FedgistError, match="there is no run in"):
        run_folders(tmp_path / "c")
    (tmp_path / "demo-1").mkdir()
    assert free_folder(tmp_path, "demo").name == "demo-2"


def test_seeds_run_together_are_the_seeds_run_alone(tmp_path):
    """And one that was further than the others when it was stopped waits for them."""
    three = [config_of("fedprox", rounds=3, seed=seed, engine="sequential") for seed in (0, 1, 2)]
    alone = [runner.run(config, tmp_path / f"alone-{config.seed}") for config in three]
    runs = [(config, tmp_path / f"together-{config.seed}") for config in three]
    original, kept = RunFolder.save_checkpoint, []

    def stops(self, round, *state):
        original(self, round, *state)
        kept.append((int(self.path.name.removeprefix("together-")), round))
        if len(kept) == 4:  # seed 0 has two rounds, the others one
            raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RunFolder, "save_checkpoint", stops)
        with pytest.raises(runner.Interrupted):
            runner.run_together(runs)
    assert kept == [(0, 1), (1, 1), (2, 1), (0, 2)]
    together = runner.run_together(runs)
    for one, other in zip(alone, together, strict=True):
        digests = [json.loads((result.folder / "result.json").read_text())["state_sha256"] for result in (one, other)]
        assert digests[0] == digests[1]
        assert one.accuracy == other.accuracy
        assert (one.folder / "ledger.csv").read_text() == (other.folder / "ledger.csv").read_text()
    assert [result.accuracy for result in runner.run_together(runs)] == [result.accuracy for result in alone]
