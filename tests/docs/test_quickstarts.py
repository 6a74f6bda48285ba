"""The quickstarts: every command and every line of Python in them runs, in their order."""

import re
import shlex
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from fedgist.cli import app

DOCS = Path(__file__).parents[2] / "docs"


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("FEDGIST_DATA", raising=False)


def test_three_hospitals_with_a_table() -> None:
    page = (DOCS / "quickstart-tabular.md").read_text("utf-8")
    commands = re.findall(r"^    fedgist (.+)$", page, re.MULTILINE)
    assert len(commands) <= 10
    accuracy = {}
    for command in commands:
        done = CliRunner().invoke(app, shlex.split(command))
        assert done.exit_code == 0, f"{command}: {done.output}"
        if found := re.search(r"^accuracy +([\d.]+)", done.output, re.MULTILINE):
            accuracy[" ".join(command.split()[:2])] = found[1]
    assert float(accuracy["run fedavg"]) > 0.9
    assert accuracy["predict runs/together"] == accuracy["run fedavg"]  # to the digit
    assert len(Path("hospital-1.csv").read_text("utf-8").splitlines()) == 114 and Path("hospital-1.pt").is_file()


def test_signals_from_python(capsys: pytest.CaptureFixture[str]) -> None:
    page = (DOCS / "quickstart-python.md").read_text("utf-8")
    code = "\n".join(re.findall(r"```python\n(.*?)```", page, re.DOTALL))
    names: dict[str, object] = {}
    with torch.random.fork_rng():
        exec(compile(code, "quickstart-python.md", "exec"), names)
    said = capsys.readouterr().out
    assert "'north': 'Sequential', 'south': 'Net', 'west': 'Sequential'" in said
    assert all(names[name].accuracy > 0.8 for name in ("result", "mixed", "synthetic", "sums")), said  # type: ignore[attr-defined]
