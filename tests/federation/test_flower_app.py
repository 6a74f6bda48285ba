"""`fedgist federation flower`: the app that it writes and what it says; Flower itself is not needed for that."""

import re
import shlex
import tomllib
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from fedgist.cli import app
from fedgist.experiments.config import flat, resolve
from fedgist.federation.flower_app import App, expectation
from fedgist.options import options


def flower(*arguments: Any) -> Any:
    return CliRunner().invoke(app, ["federation", "flower", *map(str, arguments)])


def written(folder: Path) -> dict[str, Any]:
    return dict(tomllib.loads((folder / "pyproject.toml").read_text())["tool"]["flwr"]["app"])


def test_the_app_says_all_that_was_asked_for(tmp_path: Path) -> None:
    """What is read back is the run as it would be in one process, but for what sites decide."""
    done = flower(
        tmp_path / "app", "codream", "--sites", "b,a", "--profile", "demo", "--seed", 7, "--set", "dream_lr=0.25",
        "--record", "DreamUpdate,Dreams", "--out", tmp_path / "run",
    )  # fmt: skip
    assert done.exit_code == 0, done.output
    assert [path.name for path in (tmp_path / "app").iterdir()] == ["pyproject.toml"]  # no code
    config = written(tmp_path / "app")["config"]
    run = config.pop("run")
    read = App.read({**config, **{f"run.{key}": value for key, value in run.items()}})
    assert read.sites == ("b", "a") and Path(read.out) == tmp_path / "run" and not read.resume
    assert set(config) == set(options(App))
    layer = {"method": "codream", "seed": 7, "dream_lr": 0.25, "record": ("DreamUpdate", "Dreams")}
    expected = flat(resolve(layer, {"clients": 2}, profile="demo"))
    assert {key: flat(resolve(read.run, {"clients": 2}))[key] for key in run} == {key: expected[key] for key in run}
    assert set(expected) - set(run) == {
        "clients", "partition", "alpha", "min_size", "ratio", "shards_per_client", "partition_seed", "discrepancy",
        "architectures", "seeds", "offline", "delay", "validation", "client_test",
        "adversary", "defence", "workers",
    }  # fmt: skip


def test_methods_with_many_exchanges_are_warned_about(tmp_path: Path) -> None:
    many = flower(tmp_path / "many", "codream", "--sites", "a,b", "--rounds", 10, "--set", "exchanges=400")
    assert many.exit_code == 0
    assert "warning: codream makes about 400 exchanges a round" in many.output
    assert "16:40:00 in all; NVFlare" in many.output  # 10 rounds × 400 exchanges × 15 s
    few = flower(tmp_path / "few", "fedavg", "--sites", "a,b", "--rounds", 10)
    assert "warning" not in few.output
    assert "about 1 exchange a round" in few.output and "2:30 in all" in few.output


def test_the_estimate_counts_rounds() -> None:
    assert "0:15 in all" in expectation(resolve({"method": "feddm", "rounds": 1}))


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["fedavg"], "name each site once"),
        (["fedavg", "--sites", "a,a"], "name each site once"),
        (["fedavg", "--sites", "../a"], "a site's name has small letters"),
        (["--sites", "a,b"], "which method?"),
        (["fedavgg", "--sites", "a,b"], "fedavg"),
        (["fedavg", "--sites", "a,b", "--set", "lr=fast"], "lr must be a number"),
        (["fedavg", "--sites", "a,b", "--set", "offline=0.5"], "offline is for clients that are simulated"),
        (["fedavg", "--sites", "a,b", "--alpha", "0.5"], "alpha is for a run on one machine"),
        (["centralized", "--sites", "a,b"], "wants all data at one site"),
    ],
)
def test_mistakes_are_told_and_leave_nothing(arguments: list[str], said: str, tmp_path: Path) -> None:
    done = flower(tmp_path / "app", *arguments)
    assert done.exit_code == 2
    assert said in done.output
    assert not (tmp_path / "app").exists()


def test_an_app_is_not_overwritten(tmp_path: Path) -> None:
    assert flower(tmp_path, "fedavg", "--sites", "a,b").exit_code == 2
    assert not list(tmp_path.iterdir())


def test_the_command_on_the_page_writes_an_app(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = (Path(__file__).parents[2] / "docs" / "federation-flower.md").read_text()
    (command,) = re.findall(r"^    fedgist (.+)$", page, re.MULTILINE)
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(app, [*shlex.split(command), "--data-dir", "files"])
    assert done.exit_code == 0, done.output
    config = written(tmp_path / "myrun")["config"]
    assert config["out"] == str(tmp_path / "runs" / "myrun")  # the ServerApp runs in a folder of Flower's
    assert config["run"]["data_dir"] == str(tmp_path / "files")
