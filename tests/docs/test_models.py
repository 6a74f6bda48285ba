"""docs/models.md: its Python runs, its commands exist."""

import re
import shlex
from pathlib import Path

import pytest
from torch import nn
from typer.testing import CliRunner

from fedgist.cli import app

PAGE = (Path(__file__).parents[2] / "docs" / "models.md").read_text("utf-8")


def test_the_python_example_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (code,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    names: dict[str, object] = {}
    exec(compile(code, "docs/models.md", "exec"), names)
    assert isinstance(names["model"], nn.Module) and "No differential privacy" in Path("run/MODEL_CARD.md").read_text()


@pytest.mark.parametrize("command", re.findall(r"^    fedgist (.+?)(?:  +#.*)?$", PAGE, re.MULTILINE))
def test_the_commands_are_understood(command: str) -> None:
    assert CliRunner().invoke(app, [*shlex.split(command), "--help"]).exit_code == 0
