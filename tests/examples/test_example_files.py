"""Every example runs, is short, and says what it promises."""

import re
import runpy
from pathlib import Path

import pytest
import torch

EXAMPLES = sorted((Path(__file__).parents[2] / "examples").glob("*.py"))


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_examples_are_short_and_documented(path):
    text = path.read_text()
    assert len(text.splitlines()) < 80
    assert text.startswith('"""')


def test_own_data(capsys):
    with torch.random.fork_rng():
        runpy.run_path(str(EXAMPLES[[path.name for path in EXAMPLES].index("own_data.py")]), run_name="__main__")
    printed = capsys.readouterr().out
    match = re.fullmatch(r"accuracy (0\.\d\d), ([\d,]+) bytes up, ([\d,]+) bytes down\n", printed)
    assert match is not None
    assert float(match[1]) > 0.7  # each hospital alone knows four classes of ten
