"""The likelihood ratio attack: on confidences whose distribution is known, and on models fitted to their samples."""

import json
import math

import pytest
import torch
from typer.testing import CliRunner

from fedgist.cli import app
from fedgist.core.rng import Rng
from fedgist.privacy import lira


def drawn(shift: float, runs: int = 40, samples: int = 2000) -> tuple[torch.Tensor, torch.Tensor]:
    """Confidences of samples that are as hard as they are, `shift` deviations surer where a sample is held."""
    rng = Rng(0)
    held = rng("held").uniform(runs, samples) < 0.5
    hard = 5 * rng("hard").normal(1, samples)
    return hard + shift * held + rng("noise").normal(runs, samples), held


def test_it_finds_what_normal_confidences_allow():
    """Two normals one deviation apart: AUC Φ(1/√2), and Φ(1 − 2.326) found at 1 % wrong; a loss alone finds neither."""
    sure, held = drawn(1.0)
    found = lira.rates(lira.ratios(sure, held, 0), held[0])
    assert found.auc == pytest.approx(0.5 * (1 + math.erf(0.5)), abs=0.03)
    assert found.at_one_percent == pytest.approx(0.5 * math.erfc(1.326 / math.sqrt(2)), abs=0.04)
    assert lira.rates(sure[0], held[0]).auc < 0.6


def test_what_says_nothing_is_a_guess():
    sure, held = drawn(1.0)
    assert lira.rates(lira.ratios(sure, held, 0, seen=1), held[0]).auc == pytest.approx(0.5, abs=0.04)
    sure, held = drawn(0.0)
    assert lira.rates(lira.ratios(sure, held, 0), held[0]).auc == pytest.approx(0.5, abs=0.04)


def test_confidence_is_the_logit_of_the_probability():
    logits, y = torch.tensor([[1.0, 2.0, 0.5], [900.0, 0.0, 0.0]]), torch.tensor([1, 0])
    p = logits[:1].softmax(1)[0, 1]
    found = lira.confidence(logits, y)
    assert found[0] == pytest.approx(float((p / (1 - p)).log()), rel=1e-5) and found[1] > 800


def test_a_fitted_model_gives_its_samples_away(tmp_path):
    """The planted leak: an MLP fitted to some thirty digits. Another run's model in its place gives nothing away."""
    overfit = {"epochs": 100, "steps": 0, "lr": 0.3, "limit": 60}
    settings = [word for name, value in overfit.items() for word in ("--set", f"{name}={value}")]
    arguments = ["attack", "lira", "fedavg", "--dataset", "digits", "--clients", "1", "--model", "mlp:hidden=32"]
    arguments += ["--runs", "8", "--rounds", "1", *settings]
    result = CliRunner().invoke(app, [*arguments, "--device", "cpu", "--out", str(tmp_path), "--json"])
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert found["likelihood ratio"]["auc"] > 0.8 and abs(found["blind"]["auc"] - 0.5) < 0.1
