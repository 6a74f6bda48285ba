"""The methods in docs/writing-a-method.md are run as the page says: from a folder of their own."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from fedgist import storage
from fedgist.core import tree

ROOT = Path(__file__).parents[2]


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    page = (ROOT / "docs" / "writing-a-method.md").read_text()
    (tmp_path / "my_methods").mkdir()
    for name, code in zip(("signsgd", "fedavgm"), re.findall(r"```python\n(.*?)```", page, re.DOTALL), strict=True):
        (tmp_path / "my_methods" / f"{name}.py").write_text(code)
    return {**os.environ, "FEDGIST_METHODS": str(tmp_path / "my_methods"), "OMP_NUM_THREADS": "1"}


def fedgist(environment: dict[str, str], *args: str) -> str:
    command = [sys.executable, "-m", "fedgist", *args]
    return subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout


def test_it_is_listed_and_runs_on_both_engines(environment: dict[str, str], tmp_path: Path) -> None:
    assert "signsgd" in fedgist(environment, "list", "methods")
    accuracies = []
    for engine in ("sequential", "threaded"):
        args = ["--profile", "demo", "--dataset", "digits", "--engine", engine, "--json"]
        result = json.loads(fedgist(environment, "run", "signsgd", *args, "--out", str(tmp_path / engine)))
        accuracies.append(result["accuracy"])
    assert accuracies[0] == accuracies[1] > 0.5


def test_they_pass_the_conformance_suite(environment: dict[str, str]) -> None:
    suite, chosen = "tests/conformance/test_methods.py", "signsgd or fedavgm"
    command = [sys.executable, "-m", "pytest", suite, "-k", chosen, "-p", "no:cacheprovider"]
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    assert "passed" in done.stdout


def test_the_extension_is_short_and_without_momentum_fedavg(environment: dict[str, str], tmp_path: Path) -> None:
    code = (Path(environment["FEDGIST_METHODS"]) / "fedavgm.py").read_text()
    assert len(code.splitlines()) < 30
    weights = {}
    for name, momentum in (("fedavg", None), ("fedavgm", 0), ("fedavgm", 0.9)):
        settings = [] if momentum is None else ["--set", f"server_momentum={momentum}"]
        out = tmp_path / f"{name}-{momentum}"
        fedgist(environment, "run", name, "--rounds", "2", "--quiet", *settings, "--out", str(out))
        weights[momentum] = storage.load(out / "artifacts" / "state.safetensors")["weights"]

    def distance(momentum: float) -> float:
        return float(tree.norm(tree.sub(weights[momentum], weights[None])) / tree.norm(weights[None]))

    assert distance(0) < 1e-6  # w + (mean − w), rounded
    assert distance(0.9) > 1e-2


START = "import fedgist.api as fg\nclass A(fg.Method):\n"


def test_a_method_without_profiles_is_compared(environment: dict[str, str], tmp_path: Path) -> None:
    ground = ["--dataset", "digits", "--model", "mlp:hidden=16", "--rounds", "2", "--out", str(tmp_path / "compared")]
    found = json.loads(fedgist(environment, "compare", "fedavg", "fedavgm", *ground, "--json"))
    assert [run["method"] for run in found["runs"]] == ["fedavg", "fedavgm"]
    command = [sys.executable, "-m", "fedgist", "run", "fedavgm", "--profile", "toy"]
    refused = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert refused.stderr == "fedgist: fedavgm has no profiles: leave out --profile toy\n"


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


@pytest.mark.parametrize("name", BROKEN)
def test_a_file_that_cannot_be_read_is_named_and_left_out(environment: dict[str, str], name: str) -> None:
    folder, (code, line) = Path(environment["FEDGIST_METHODS"]), BROKEN[name]
    (folder / f"{name}.py").write_text(code)
    command = [sys.executable, "-m", "fedgist", "list", "methods"]
    done = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
    assert str(folder / f"{name}.py") in done.stderr and line in done.stderr
    assert done.stderr.count("\n") == 1
    assert {"fedavg", "signsgd"} <= set(done.stdout.split())


def test_a_folder_that_does_not_exist_is_named(environment: dict[str, str], tmp_path: Path) -> None:
    environment["FEDGIST_METHODS"] += os.pathsep + str(tmp_path / "gone")
    command = [sys.executable, "-m", "fedgist", "list", "methods"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.stderr == f"fedgist: FEDGIST_METHODS names {tmp_path / 'gone'}, but there is no such folder\n"


def test_files_may_share_code_and_be_called_as_they_like(environment: dict[str, str]) -> None:
    """A file `random.py` is nobody else's module `random`; files beside it are imported relative to it."""
    folder = Path(environment["FEDGIST_METHODS"])
    (folder / "signsgd.py").rename(folder / "random.py")
    (folder / "shared.py").write_text("WORD = 'together'\n")
    (folder / "random.py").write_text("from .shared import WORD\n" + (folder / "random.py").read_text())
    assert "signsgd" in fedgist(environment, "list", "methods")
