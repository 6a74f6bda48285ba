"""The table of docs/leakage.md and docs/images/leakage.svg, from the files of results: python docs/make_leakage.py

The picture is accuracy against bytes, with what membership inference finds as the third dimension.
"""

import json
import math
import re
from pathlib import Path
from typing import Any

from fedgist.experiments.leak_table import markdown

HERE = Path(__file__).parent
PAGE, PICTURE = HERE / "leakage.md", HERE / "images" / "leakage.svg"
RESULTS = HERE.parent / "benchmarks" / "results"
TABLE = re.compile(r"(<!-- leaks: (\S+) -->\n\n)(?:\|.*\n)*")
DRAWN = "leaks-mnist", "leaks-digits"
"""The file that is drawn: the first of these that is there."""
WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 760, 420, 60, 700, 30, 350
TEXT = 'font-family="system-ui, sans-serif" font-size="12"'
LARGEST = 0.25
"""AUC above the blind guess at which the colour ends."""


def results(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text("utf-8"))
    return found


def page(text: str) -> str:
    """The page with its tables as the files say."""
    return TABLE.sub(lambda found: found[1] + markdown(results(found[2])), text)


def points() -> list[tuple[str, float, float, float]]:
    """Name, bytes, accuracy, and by how much the best membership inference on replies beats the blind guess."""
    name = next(name for name in DRAWN if (RESULTS / f"{name}.json").is_file())
    found = []
    for row, runs in results(name)["rows"].items():
        for run in list(runs.values())[:1]:
            if "refused" in run:
                continue
            tried = [
                one["value"] - one["control"]
                for one in run["attacks"]
                if one["attack"] in ("membership", "trajectory", "images", "moments")
                and one["level"] == "replies"
                and one["value"]
            ]
            if tried and run["accuracy"] is not None:
                found.append((row, float(run["bytes"]), 100 * run["accuracy"], max(tried)))
    return found


def draw() -> str:
    """The picture as SVG."""
    shown = points()
    least, most = (end([math.log10(one[1]) for one in shown]) for end in (min, max))
    low, high = math.floor(min(one[2] for one in shown) / 10) * 10, 100
    least, most = math.floor(least), math.ceil(most)

    def at(bytes: float, accuracy: float) -> tuple[float, float]:
        x = LEFT + (RIGHT - LEFT) * (math.log10(bytes) - least) / (most - least)
        return x, BOTTOM - (BOTTOM - TOP) * (accuracy - low) / (high - low)

    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" '
        f'role="img" aria-label="Accuracy against bytes, with leakage as colour" {TEXT} fill="#1c2733">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#ffffff"/>',
    ]
    for accuracy in range(low, high + 1, 10):
        y = at(10**least, accuracy)[1]
        lines.append(f'<path d="M{LEFT} {y:g}H{RIGHT}" stroke="#d8dce0"/>')
        lines.append(f'<text x="{LEFT - 8}" y="{y + 4:g}" text-anchor="end">{accuracy} %</text>')
    for power in range(least, most + 1):
        x = at(10.0**power, low)[0]
        lines.append(
            f'<text x="{x:g}" y="{BOTTOM + 18}" text-anchor="middle">10<tspan dy="-4" font-size="9">{power}</tspan>'
            "</text>"
        )
    for name, bytes, accuracy, leak in shown:
        x, y = at(bytes, accuracy)
        share = min(1.0, max(0.0, leak / LARGEST))
        colour = f"rgb({round(46 + share * 150)},{round(125 - share * 85)},{round(79 - share * 40)})"
        lines.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{4 + 8 * share:.1f}" fill="{colour}" fill-opacity="0.75"/>')
        lines.append(
            f'<text x="{x:.1f}" y="{y - 13:.1f}" text-anchor="middle" fill="{colour}">{name} {leak:+.2f}</text>'
        )
    lines.append(
        f'<text x="{(LEFT + RIGHT) / 2:g}" y="{BOTTOM + 40}" text-anchor="middle">bytes up and down, all clients</text>'
    )
    lines.append(
        f'<text x="{LEFT}" y="{HEIGHT - 8}">Number, size and colour: AUC of the best membership inference on replies, '
        "above a blind guess.</text>"
    )
    return "\n".join([*lines, "</svg>", ""])


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text("utf-8")), "utf-8")
    PICTURE.write_text(draw(), "utf-8")
    print(PAGE, PICTURE)
