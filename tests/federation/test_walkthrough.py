"""The walk-through of docs/federation.md, its commands taken from the page and run as they stand there."""

import os
import re
import shlex
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path

import pytest

pytest.importorskip("nvflare", reason="needs NVFlare: pip install 'fedgist[nvflare]'")
pytest.importorskip("PIL", reason="needs Pillow: pip install 'fedgist[images]'")

pytestmark = pytest.mark.federation

PAGE = Path(__file__).parents[2] / "docs" / "federation.md"
STAYING = ("federation start", "site start")


def commands() -> list[str]:
    """The indented lines of the section, without those that make the environment in which this test runs."""
    section = PAGE.read_text().split("## Walk-through")[1].split("\n## ")[0]
    lines = re.findall(r"^    (.+)$", section, re.MULTILINE)
    assert lines[:2] == ["make dev", ". .venv/bin/activate"]
    return lines[2:]


def test_word_for_word(tmp_path: Path) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = []
    with ExitStack() as stack:
        for number, line in enumerate(commands()):
            program, *arguments = shlex.split(line)
            assert program == "fedgist"
            command = [sys.executable, "-m", "fedgist", *arguments]
            log = tmp_path / f"{number}.log"
            file = stack.enter_context(log.open("w"))
            process = subprocess.Popen(command, cwd=tmp_path, env=environment, stdout=file, stderr=subprocess.STDOUT)
            if line.startswith(tuple(f"fedgist {kind}" for kind in STAYING)):
                stack.callback(process.wait, 300)
                stack.callback(process.terminate)
                time.sleep(1)
            else:
                assert process.wait(300) == 0, f"{line}\n{log.read_text()}"
                done.append(log.read_text())
    assert len(done) == 5
    said = done[-1]
    assert "round 2/2" in said
    assert float(re.search(r"accuracy  (0\.\d+)", said)[1]) > 0.5  # type: ignore[index]
    (run,) = (tmp_path / "runs").glob("codream-*")  # beside it lies what reports share
    config = (run / "config.toml").read_text()
    assert 'architectures = ["mlp:hidden=100:norm=batch", "mlp:hidden=200x100:norm=batch", "cnn"]' in config
    assert (run / "ledger.csv").is_file() and (run / "report.html").is_file()
