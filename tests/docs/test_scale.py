"""The picture in docs/scale.md is what its script draws from the file of results."""

import runpy
from pathlib import Path

SCRIPT = runpy.run_path(str(Path(__file__).parents[2] / "docs" / "make_scale.py"))


def test_the_picture_is_what_the_script_draws() -> None:
    assert SCRIPT["PICTURE"].read_text("utf-8") == SCRIPT["draw"](), "run python docs/make_scale.py"
