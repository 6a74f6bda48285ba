"""The methods in docs/writing-a-method.md are run as the page says: from a folder of their own."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from fedgist import methods, storage
from fedgist.cli import app
from fedgist.core import tree

ROOT = Path(__file__).parents[2]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder of the page's methods, which are looked for anew; after the test they are forgotten."""

    def forget() -> None:
        methods.registry.cache_clear()
        for name in [name for name in sys.modules if name.split(".")[0] == methods.ELSEWHERE]:
            del sys.modules[name]

    page = (ROOT / "docs" / "writing-a-method.md").read_text()
    (tmp_path / "my_methods").mkdir()
    for name, code in zip(("signsgd", "fedavgm"), re.findall(r"```python\n(.*?)```", page, re.DOTALL), strict=True):
        (tmp_path / "my_methods" / f"{name}.py").write_text(code)
    monkeypatch.setenv("FEDGIST_METHODS", str(tmp_path / "my_methods"))
    forget()
    yield tmp_path / "my_methods"
    forget()


def fedgist(*args: object) -> str:
    done = CliRunner().invoke(app, [str(arg) for arg in args])
    assert done.exit_code == 0, done.output
    return done.stdout


def in_a_process(*args: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run([sys.executable, "-m", "fedgist", *args], capture_output=True, text=True)


def test_it_is_listed_and_runs_on_both_engines(folder: Path, tmp_path: Path) -> None:
    assert "signsgd" in fedgist("list", "methods")
    accuracies = []
    for engine in ("sequential", "threaded"):
        args = ["--profile", "demo", "--dataset", "digits", "--engine", engine, "--json"]
        result = json.loads(fedgist("run", "signsgd", *args, "--out", tmp_path / engine))
        accuracies.append(result["accuracy"])
    assert accuracies[0] == accuracies[1] > 0.5


def test_they_pass_the_conformance_suite(folder: Path) -> None:
    suite, chosen = "tests/conformance/test_methods.py", "signsgd or fedavgm"
    command = [sys.executable, "-m", "pytest", suite, "-k", chosen, "-p", "no:cacheprovider"]
    done = subprocess.run(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    assert "passed" in done.stdout


def test_the_extension_is_short_and_without_momentum_fedavg(folder: Path, tmp_path: Path) -> None:
    assert len((folder / "fedavgm.py").read_text().splitlines()) < 30
    weights = {}
    for name, momentum in (("fedavg", None), ("fedavgm", 0), ("fedavgm", 0.9)):
        settings = [] if momentum is None else ["--set", f"server_momentum={momentum}"]
        out = tmp_path / f"{name}-{momentum}"
        fedgist("run", name, "--rounds", 2, "--quiet", *settings, "--out", out)
        weights[momentum] = storage.load(out / "artifacts" / "state.safetensors")["weights"]

    def distance(momentum: float) -> float:
        return float(tree.norm(tree.sub(weights[momentum], weights[None])) / tree.norm(weights[None]))

    assert distance(0) < 1e-6  # w + (mean − w), rounded
    assert distance(0.9) > 1e-2


def test_a_method_without_profiles_is_compared(folder: Path, tmp_path: Path) -> None:
    ground = ["--dataset", "digits", "--model", "mlp:hidden=16", "--rounds", 2, "--out", tmp_path / "compared"]
    found = json.loads(fedgist("compare", "fedavg", "fedavgm", *ground, "--json"))
    assert [run["method"] for run in found["runs"]] == ["fedavg", "fedavgm"]
    refused = in_a_process("run", "fedavgm", "--profile", "toy")
    assert refused.stderr == "fedgist: fedavgm has no profiles: leave out --profile toy\n"


START = "import fedgist.api as fg\nclass A(fg.Method):\n"


BROKEN = {
    "broken": ("x = 1\ny = = 2\n", "line 2: SyntaxError: invalid syntax"),
    "hungry": ("import json\n\nimport no_such_thing\n", "line 3: ModuleNotFoundError: No module named"),
    "twin": (f"{START}    name = 'fedavg'\n", "a method fedavg already"),
    "forgetful": (
        f"{START}    async def f(self, me: fg.Site, msg: fg.Done) -> fg.Done: ...\n",
        "line 3: A.f answers a message; write @handler above it",
    ),
    "odd": (
        f"{START}    @fg.handler\n    async def f(self, me: fg.Site) -> fg.Done: ...\n",
        "line 3: A.f is no handler",
    ),
}


def test_files_that_cannot_be_read_are_named_and_left_out(folder: Path) -> None:
    """One line each, in a process of its own, because a test's own logging would keep them from standard error."""
    for name, (code, _) in BROKEN.items():
        (folder / f"{name}.py").write_text(code)
    done = in_a_process("list", "methods")
    assert done.returncode == 0 and {"fedavg", "signsgd", "fedavgm"} <= set(done.stdout.split())
    lines = done.stderr.splitlines()
    assert len(lines) == len(BROKEN)
    for name, (_, said) in BROKEN.items():
        (line,) = (line for line in lines if str(folder / f"{name}.py") in line)
        assert said in line


def test_a_folder_that_does_not_exist_is_named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gone = folder.parent / "gone"
    monkeypatch.setenv("FEDGIST_METHODS", f"{folder}{os.pathsep}{gone}")
    done = in_a_process("list", "methods")
    assert done.stderr == f"fedgist: FEDGIST_METHODS names {gone}, but there is no such folder\n"


def test_files_may_share_code_and_be_called_as_they_like(folder: Path) -> None:
    """A file `random.py` is nobody else's module `random`; files beside it are imported relative to it."""
    (folder / "signsgd.py").rename(folder / "random.py")
    (folder / "shared.py").write_text("WORD = 'together'\n")
    (folder / "random.py").write_text("from .shared import WORD\n" + (folder / "random.py").read_text())
    assert "signsgd" in fedgist("list", "methods")
    assert sys.modules["random"].__file__ != str(folder / "random.py")
