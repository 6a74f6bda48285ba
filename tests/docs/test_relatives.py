"""The table of gist's relatives in docs/gist.md says what its script has found."""

import json
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOUND = json.loads((ROOT / "benchmarks/results/gist_relatives.json").read_text("utf-8"))


def test_every_row_is_in_the_page() -> None:
    page = (ROOT / "docs/gist.md").read_text("utf-8")
    for name, grounds in FOUND["accuracies"].items():
        cells = [f"{mean:.2f} ± {deviation:.2f}" for parts in grounds.values() for mean, deviation in parts.values()]
        assert "| " + " | ".join([name, *cells]) + " |" in page
