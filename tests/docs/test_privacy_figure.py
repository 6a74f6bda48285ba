"""The figure of accuracy against epsilon is what its script draws from the results that there are."""

import runpy
from pathlib import Path

SCRIPT = runpy.run_path(str(Path(__file__).parents[2] / "docs" / "make_privacy.py"))


def test_the_picture_is_up_to_date() -> None:
    assert SCRIPT["PICTURE"].read_text("utf-8") == SCRIPT["draw"](), "run python docs/make_privacy.py"
