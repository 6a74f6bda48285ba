"""The tool that writes the table of reference times: it does a few steps, counts the rest, and adds what is missing."""

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

from fedgist.core.work import scan
from fedgist.experiments import estimates, presets
from fedgist.experiments.config import flat, resolve


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    path = Path(__file__).parents[2] / "benchmarks" / "reference_times.py"
    spec = importlib.util.spec_from_file_location("reference_times", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["reference_times"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def test_it_does_a_few_steps_and_counts_the_rest(tool: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    clock, done = [0.0], []
    monkeypatch.setattr(tool.time, "process_time", lambda: clock[0])

    def step(carry: object, x: object) -> object:
        done.append(x)
        clock[0] += 5.0 if len(done) == 1 else 0.01  # the first warms up
        return carry

    async def role() -> object:
        carry = await scan(step, torch.zeros(3), torch.arange(1000))
        return await scan(step, carry, torch.arange(500))

    count = tool.Counting()
    count.drive([role()])
    assert len(done) == 1 + tool.TIMED
    assert count.seconds == pytest.approx(1500 * 0.01)


def test_times_grow_with_exchanges(tool: ModuleType) -> None:
    small = presets.available("small")
    config = next(c for c in small["codream/figure3"].cells if c.name == "together, MNIST K=2").config
    base = {**flat(config), "model": "mlp:hidden=8:norm=batch", "dreams": 8, "distil_steps": 5, "warm_up": 1}
    one, many = (tool.estimate(resolve(base, {"exchanges": n})) for n in (20, 2000))
    assert many > 20 * one
    assert tool.estimate(resolve({"method": "fedavg", "dataset": "femnist"})) is None  # everybody's is of another size


def test_what_the_table_lacks_is_added_as_its_machine_would_take(
    tool: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = "\n".join(f'rows.{row} = {{ method = "fedavg", rounds = {n} }}' for n, row in enumerate("ab", start=1))
    (tmp_path / "toy.toml").write_text(f'[t]\ntitle = "a toy"\n{rows}\n')
    monkeypatch.setattr(presets, "HERE", tmp_path)
    monkeypatch.setattr(estimates, "calibration", lambda: 6.0)
    monkeypatch.setattr(tool, "estimate", lambda config, timed: 30.0)
    known, new = (cell.run for cell in presets.available()["toy/t"].cells)
    table = tmp_path / "table.json"
    table.write_text(json.dumps({"machine": "M", "calibration": 2.0, "seconds": {known: 7.0, "gone-digits-0": 1.0}}))
    tool.write(table, afresh=False)
    # This machine takes three times as long as M, and 30 s for the run that was not in the table.
    assert json.loads(table.read_text()) == {"machine": "M", "calibration": 2.0, "seconds": {known: 7.0, new: 10.0}}
    tool.write(table, afresh=True)
    assert json.loads(table.read_text())["seconds"] == {known: 30.0, new: 30.0}
    assert json.loads(table.read_text())["calibration"] == 6.0
