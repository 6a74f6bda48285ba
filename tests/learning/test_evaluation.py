"""Evaluation of models that clients keep: what the sums say about all of them is what each of them would have said."""

import numpy as np
import pytest

from fedgist import engines, methods
from fedgist.engines.local import LocalEngine
from fedgist.experiments import config as configs
from fedgist.experiments import inputs as sources


def test_mean_and_deviation_over_clients():
    """Four clients that learn alone from different labels, so that they differ."""
    config = configs.resolve(
        {"method": "independent", "clients": 4, "alpha": 0.1, "device": "cpu", "model": "mlp:hidden=16"}
    )
    inputs = sources.from_dataset(config)
    method = methods.find("independent")(config.options, inputs.task)
    engine = LocalEngine(method, inputs.sites, seed=0, executor=engines.executor("sequential", "cpu"), info=inputs.info)
    for _ in range(3):
        engine.run_round()
    found = engine.evaluate(inputs.test)

    x, y = inputs.test
    each = [
        float((method.model(state["w"], x).logits.argmax(1) == y).double().mean())
        for state in engine.site_states.values()
    ]
    assert np.std(each) > 0.01
    assert found["accuracy"] == pytest.approx(np.mean(each), abs=1e-6)
    assert found["deviation_between_clients"] == pytest.approx(np.std(each), abs=1e-4)
