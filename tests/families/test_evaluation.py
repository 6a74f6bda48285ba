"""Evaluation of models that clients keep: what the sums say about all of them is what each of them would have said."""

import numpy as np
import pytest

from fedgist import methods
from fedgist.experiments.config import resolve
from fedgist.experiments.inputs import from_dataset
from toys import federation, play


def test_mean_and_deviation_over_clients() -> None:
    """Four clients that learn alone from different labels, so that they differ."""
    config = resolve({"method": "independent", "clients": 4, "alpha": 0.1, "device": "cpu", "model": "mlp:hidden=16"})
    inputs = from_dataset(config)
    method = methods.find("independent")(config.options, inputs.task)
    engine = play(federation(method, inputs.sites, info=inputs.info), 3)
    found = engine.evaluate(inputs.test)

    x, y = inputs.test
    each = [
        float((method.model(state["w"], x).logits.argmax(1) == y).double().mean())
        for state in engine.site_states.values()
    ]
    assert np.std(each) > 0.01
    assert found["accuracy"] == pytest.approx(np.mean(each), abs=1e-6)
    assert found["deviation_between_clients"] == pytest.approx(np.std(each), abs=1e-4)
