"""The picture in the README is what its script draws from the files of results."""

import runpy
from pathlib import Path

SCRIPT = runpy.run_path(str(Path(__file__).parents[2] / "docs" / "make_frontier.py"))


def test_the_picture_is_what_the_script_draws() -> None:
    assert SCRIPT["PICTURE"].read_text("utf-8") == SCRIPT["draw"](), "run python docs/make_frontier.py"


def test_points_are_what_the_results_say() -> None:
    """Gist sends its sums, and is told a seed and a mean; what FedDM's server sees are images of each client."""
    found = {point.name: point for point in SCRIPT["points"]("CIFAR-10, Dirichlet 0.1")}
    assert found["gist"].sees == "sums only" and found["feddm"].sees == "something of each client"
    assert 68.5 < found["gist"].accuracy < 69.5 and 6.8e6 < found["gist"].bytes < 6.9e6
