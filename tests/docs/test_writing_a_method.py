"""The method in docs/writing-a-method.md is run as the page says: from a folder of its own, touching no other file."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    page = (ROOT / "docs" / "writing-a-method.md").read_text()
    (code,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    (tmp_path / "my_methods").mkdir()
    (tmp_path / "my_methods" / "signsgd.py").write_text(code)
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


def test_it_passes_the_conformance_suite(environment: dict[str, str]) -> None:
    command = [sys.executable, "-m", "pytest", "tests/conformance", "-k", "signsgd", "-p", "no:cacheprovider"]
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    assert "passed" in done.stdout


@pytest.mark.parametrize(
    ("name", "code", "line"),
    [
        ("broken", "x = 1\ny = = 2\n", "broken.py, line 2: SyntaxError: invalid syntax"),
        ("hungry", "import json\n\nimport no_such_thing\n", "hungry.py, line 3: ModuleNotFoundError: No module named"),
        (
            "twin",
            "from fedgist.core.method import Method\nclass A(Method):\n    name = 'fedavg'\n",
            "a method fedavg already",
        ),
    ],
)
def test_a_file_that_cannot_be_read_is_named(environment: dict[str, str], name: str, code: str, line: str) -> None:
    folder = Path(environment["FEDGIST_METHODS"])
    (folder / f"{name}.py").write_text(code)
    command = [sys.executable, "-m", "fedgist", "list", "methods"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr.startswith(f"fedgist: {folder}")
    assert line in done.stderr
    assert done.stderr.count("\n") == 1


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
