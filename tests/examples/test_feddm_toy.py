"""The one-parameter toy of FedDM says what the paper's Figure 1 shows."""

import runpy
from pathlib import Path

import pytest

TOY = runpy.run_path(str(Path(__file__).parents[2] / "examples" / "feddm_toy.py"))


@pytest.mark.parametrize("seed", range(3))
def test_the_surrogate_of_appendix_c_follows_the_loss(seed: int) -> None:
    """Figure 1. From real points the surrogate is at least six times nearer than the tangent.

    From noise it is nearer too, but not by that much: matching means with a linear feature moves all points of a class
    alike, so that their spread, and with it the curvature, stays what the noise had.
    """
    found = TOY["curves"](seed)
    surrogate, tangent = (TOY["distance"](found, name) for name in ("surrogate", "tangent"))
    assert surrogate < tangent / 6
    assert TOY["distance"](TOY["curves"](seed, init="noise"), "surrogate") < 0.8 * tangent
    # minimising the surrogate is minimising the loss, nearly; the tangent has no minimum
    reached = found["loss"][found["surrogate"].argmin()]
    assert reached - found["loss"].min() < 0.02


def test_the_toy_example_draws_its_plot(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib", reason="the plot needs matplotlib")
    TOY["main"](str(tmp_path / "toy.svg"))
    assert "surrogate: 0.0" in capsys.readouterr().out
    assert (tmp_path / "toy.svg").stat().st_size > 5000
