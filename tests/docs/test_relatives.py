"""The tables of gist's relatives and of rare classes say what their scripts have found."""

import json
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOUND = json.loads((ROOT / "benchmarks/results/gist_relatives.json").read_text("utf-8"))


def test_every_row_is_in_the_page() -> None:
    page = (ROOT / "docs/gist.md").read_text("utf-8")
    for name, grounds in FOUND["accuracies"].items():
        cells = [f"{mean:.2f} ± {deviation:.2f}" for parts in grounds.values() for mean, deviation in parts.values()]
        assert "| " + " | ".join([name, *cells]) + " |" in page


def test_every_row_of_rare_classes_is_in_the_page() -> None:
    page = (ROOT / "docs/gist-findings.md").read_text("utf-8")
    tails = json.loads((ROOT / "benchmarks/results/gist_balance.json").read_text("utf-8"))["accuracies"]
    for row in tails.values():
        cells = (f"{one['even']:.2f} ± {one['deviation']:.2f}, {one['worst']:.1f}" for one in row.values())
        assert f"| {' | '.join(cells)} |" in page
