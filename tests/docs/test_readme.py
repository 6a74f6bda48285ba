"""What the README promises: its Python runs, its commands exist."""

import re
import shlex
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from fedgist.cli import app

README = (Path(__file__).parents[2] / "README.md").read_text()


def test_the_python_example_runs(capsys: pytest.CaptureFixture[str]) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    assert len(code.strip().splitlines()) <= 12
    with torch.random.fork_rng():  # the example makes up its data as a user would, from the global generator
        exec(compile(code, "README.md", "exec"), {})
    accuracy, up, down = capsys.readouterr().out.split()
    assert 0 <= float(accuracy) <= 1
    assert int(up) > 0
    assert int(down) > 0


def commands() -> list[str]:
    return [line.split("#")[0].strip() for line in README.splitlines() if line.startswith("    fedgist ")]


@pytest.mark.parametrize("command", commands())
def test_the_commands_are_understood(command: str) -> None:
    """Each is parsed to its end; `--help` keeps it from running."""
    _, *args = shlex.split(command)
    done = CliRunner().invoke(app, [*args, "--help"])
    assert done.exit_code == 0, done.output
