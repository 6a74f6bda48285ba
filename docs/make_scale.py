"""Draws docs/images/scale.svg, memory and time against the number of clients: python docs/make_scale.py

From benchmarks/results/scale.json, which `python benchmarks/scale.py` makes.
"""

import json
import math
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
PICTURE, RESULTS = HERE / "images" / "scale.svg", HERE.parent / "benchmarks" / "results" / "scale.json"
COLOURS = {"fedavg": "#2e7d4f", "scaffold": "#c25a1c"}
PANELS = {  # title -> (of a result, the powers of ten at the ends of the axis)
    "memory beyond Python and data, MB": ("memory_mb", 0, 4),
    "milliseconds a round, a hundred clients asked": ("round_ms", 0, 4),
    "milliseconds a checkpoint": ("checkpoint_ms", 0, 4),
}
WIDTH, HEIGHT, PLOT, LEFT, TOP, BOTTOM = 960, 340, 260, 56, 44, 270
FEWEST, MOST = 1, 5
"""Powers of ten of the clients at the ends of the axis."""
TEXT = 'font-family="system-ui, sans-serif" font-size="12"'


def draw() -> str:
    found = json.loads(RESULTS.read_text("utf-8"))["results"]
    shown = [row for row in found if row["active"] == min(100, row["clients"])]
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" '
        f'role="img" aria-label="Memory and time against the number of clients" {TEXT} fill="#1c2733">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#ffffff"/>',
    ]
    for number, (title, (name, low, high)) in enumerate(PANELS.items()):
        lines += draw_panel(LEFT + number * (PLOT + 44), title, name, (low, high), shown)
    lines.append(f'<text x="{WIDTH / 2}" y="{BOTTOM + 34}" text-anchor="middle">clients</text>')
    for number, (method, colour) in enumerate(COLOURS.items()):
        x = 380 + 110 * number
        lines.append(f'<circle cx="{x}" cy="{HEIGHT - 14}" r="4" fill="{colour}"/>')
        lines.append(f'<text x="{x + 10}" y="{HEIGHT - 10}">{method}</text>')
    return "\n".join([*lines, "</svg>", ""])


def draw_panel(left: float, title: str, name: str, ends: tuple[int, int], rows: list[dict[str, Any]]) -> list[str]:
    low, high = ends

    def across(clients: float) -> float:
        return left + PLOT * (math.log10(clients) - FEWEST) / (MOST - FEWEST)

    def up(value: float) -> float:
        return BOTTOM - (BOTTOM - TOP) * (math.log10(max(value, 10**low)) - low) / (high - low)

    lines = [f'<text x="{left + PLOT / 2:g}" y="24" text-anchor="middle" font-weight="bold">{title}</text>']
    for power in range(low, high + 1):
        y = up(10**power)
        lines.append(f'<path d="M{left:g} {y:g}h{PLOT}" stroke="#d8dce0"/>')
        lines.append(f'<text x="{left - 6:g}" y="{y + 4:g}" text-anchor="end" font-size="11">{10**power:,}</text>')
    for power in range(FEWEST, MOST + 1):
        x = across(10**power)
        lines.append(f'<path d="M{x:g} {TOP}V{BOTTOM}" stroke="#eceff1"/>')
        lines.append(f'<text x="{x:g}" y="{BOTTOM + 16}" text-anchor="middle" font-size="11">{10**power:,}</text>')
    for method, colour in COLOURS.items():
        mine = sorted((row["clients"], row[name]) for row in rows if row["method"] == method)
        dots = [(across(clients), up(value)) for clients, value in mine]
        path = "L".join(f"{x:.1f} {y:.1f}" for x, y in dots)
        lines.append(f'<path d="M{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        lines += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"/>' for x, y in dots]
    return lines


if __name__ == "__main__":
    PICTURE.write_text(draw(), encoding="utf-8")
    print(PICTURE)
