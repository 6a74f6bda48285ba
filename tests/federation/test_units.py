"""The files for systemd, as systemd reads them, and that the commands in them are commands."""

import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "examples" / "systemd"
UNITS = sorted(FOLDER.glob("*.service"))


def command(unit: Path) -> list[str]:
    (line,) = [line for line in unit.read_text().splitlines() if line.startswith("ExecStart=")]
    return shlex.split(line.removeprefix("ExecStart="))


def verify(unit: Path, text: str, folder: Path) -> "subprocess.CompletedProcess[str]":
    """What systemd says of an instance of it; for the command that it names, any that there is stands in."""
    copy = folder / unit.name.replace("@", "@trial")
    copy.write_text(text.replace(command(unit)[0], sys.executable).replace("User=fedgist", "User=root"))
    return subprocess.run(["systemd-analyze", "verify", str(copy)], capture_output=True, text=True, timeout=60)


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="needs systemd-analyze")
@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.stem)
def test_systemd_reads_them(unit: Path, tmp_path: Path) -> None:
    done = verify(unit, unit.read_text(), tmp_path)
    assert done.returncode == 0 and unit.stem not in done.stderr, done.stderr
    wrong = verify(unit, unit.read_text().replace("Restart=always", "Restart=sometimes"), tmp_path)
    assert "sometimes" in wrong.stderr  # it would have said so


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.stem)
def test_what_they_start_is_there(unit: Path) -> None:
    _, group, name, *_ = command(unit)
    done = subprocess.run([sys.executable, "-m", "fedgist", group, name, "--help"], capture_output=True, text=True)
    assert done.returncode == 0
    for word in command(unit):
        assert not word.startswith("--") or word in done.stdout
