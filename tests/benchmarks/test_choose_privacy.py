"""What was tuned is set by held-out accuracy alone, and the presets that fedgist comes with are what the rule gives."""

import json
import runpy
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]
TOOL = runpy.run_path(str(ROOT / "benchmarks" / "choose_privacy.py"))
PRESETS = TOOL["PRESET"].read_text("utf-8")
ROW = "CNN, each (FedAvg)"


def test_the_best_on_held_out_samples_is_taken(tmp_path: Path) -> None:
    """Rates at ε = 8 also for 4, at 1 also for 2; Fashion-MNIST has MNIST's; what has not run stays as it was."""
    found = {
        (2, "MNIST", 8): 70,
        (8, "MNIST", 8): 90,
        (8, "MNIST", 1): 70,
        (2, "MNIST", 1): 80,
        (16, "CIFAR-10", 1): 40,
    }
    cells = {f"{ROW}, lr {lr}, {data}, ε = {at}": {"numbers": {"0": [hits]}} for (lr, data, at), hits in found.items()}
    (tmp_path / "privacy-sgd-tuning.json").write_text(json.dumps({"cells": cells}))
    released = {"M = 16, 1 round, C = 1, MNIST": 92.0, "M = 4, 5 rounds, C = 0.5, MNIST": 91.0}
    rates = TOOL["held_out"]([tmp_path], "privacy-sgd-tuning")
    before, after = tomllib.loads(PRESETS), tomllib.loads(TOOL["chosen"](PRESETS, rates, released))
    assert [part["rows"][ROW]["lr"] for part in after["sgd-mnist"]["part"]] == [8.0, 2.0]
    usual = before["sgd-others"]["part"][2]["rows"][ROW]["lr"]
    assert [part["rows"][ROW]["lr"] for part in after["sgd-others"]["part"]] == [8.0, 2.0, usual, 16.0]
    for part in (*after["sgd-mnist"]["part"], *after["sgd-others"]["part"]):
        part["rows"].pop(ROW)
    for part in (*before["sgd-mnist"]["part"], *before["sgd-others"]["part"]):
        part["rows"].pop(ROW)
    assert after["sgd-mnist"] == before["sgd-mnist"] and after["sgd-others"] == before["sgd-others"]
    rows = after["feddm"]["part"][0]["rows"]
    assert all((row["nets"], row["rounds"], row["clip"]) == (16, 1, 1.0) for row in rows.values())
    assert after["feddm"]["part"][1] == before["feddm"]["part"][1] and after["sgd-tuning"] == before["sgd-tuning"]


def test_the_presets_are_what_the_published_tuning_says() -> None:
    results = [ROOT / "docs" / "results"]
    tuned = [TOOL["held_out"](results, f"privacy-{name}-tuning") for name in ("sgd", "feddm")]
    assert TOOL["chosen"](PRESETS, *tuned) == PRESETS, "python benchmarks/choose_privacy.py docs/results"
