"""The table and the picture of docs/leakage.md are what their script makes of the files of results."""

import runpy
from pathlib import Path

SCRIPT = runpy.run_path(str(Path(__file__).parents[2] / "docs" / "make_leakage.py"))


def test_the_table_is_what_the_results_say() -> None:
    text = SCRIPT["PAGE"].read_text("utf-8")
    assert "| fedavg |" in text and text == SCRIPT["page"](text), "run python docs/make_leakage.py"


def test_the_picture_is_what_the_script_draws() -> None:
    assert SCRIPT["PICTURE"].read_text("utf-8") == SCRIPT["draw"](), "run python docs/make_leakage.py"
