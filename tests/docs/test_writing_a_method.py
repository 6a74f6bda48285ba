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
