"""The tables of docs/robustness.md are what their script makes of the results."""

import runpy
from pathlib import Path

SCRIPT = runpy.run_path(str(Path(__file__).parents[2] / "docs" / "make_robustness.py"))


def test_the_tables_are_what_the_results_say() -> None:
    text = SCRIPT["PAGE"].read_text("utf-8")
    assert "| honest |" in text and text == SCRIPT["page"](text), "run python docs/make_robustness.py"
