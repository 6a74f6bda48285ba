"""The 2-D toy of FedGen says what the paper's Figures 2 and 3 show."""

import re
import runpy
from pathlib import Path

import pytest

TOY = Path(__file__).parents[2] / "examples" / "fedgen_toy.py"


def test_every_user_learns_from_the_generator(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each user alone is far from the oracle, and taught by a generator that saw no data it is nearer."""
    runpy.run_path(str(TOY))["main"](tmp_path / "toy.png")
    found = {name: float(value) for name, value in re.findall(r"(.+): ([0-9.]+)%", capsys.readouterr().out)}
    assert found["oracle"] > 97
    for k in range(3):
        assert found[f"user {k} alone"] < 90
        assert found[f"user {k} taught"] > found[f"user {k} alone"] + 5
    assert (tmp_path / "toy.png").stat().st_size > 10_000
