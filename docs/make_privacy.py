"""Draws docs/images/privacy.svg, accuracy against epsilon: python docs/make_privacy.py

From the files in docs/results of the presets privacy/…, as far as they have run; the published numbers beside them are
as their papers print them, of central data and other models.
"""

import json
import math
import statistics
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent
PICTURE, RESULTS = HERE / "images" / "privacy.svg", HERE / "results"
WIDTH, HEIGHT, PLOT, LEFT, TOP, BOTTOM = 960, 420, 270, 50, 44, 300
EPSILONS = (1, 2, 4, 8)
ONCE, EACH = "#2e7d4f", "#c25a1c"
TEXT = 'font-family="system-ui, sans-serif" font-size="12"'


@dataclass(frozen=True)
class Line:
    """A row of a preset: its name here, whether noise is in the sum once, and how it is drawn."""

    name: str
    file: str
    cells: str
    """What a cell is called, with {} where ε is."""
    colour: str
    dashes: str = ""


@dataclass(frozen=True)
class Panel:
    title: str
    low: float
    high: float
    lines: tuple[Line, ...]
    published: tuple[tuple[str, float, float], ...]
    """Name, ε, accuracy."""


def lines(gist: str, others: str, column: str) -> tuple[Line, ...]:
    return (
        Line("gist, noise once", gist, "sum, ε = {}", ONCE),
        Line("gist, each client's", gist, "local, ε = {}", EACH),
        Line("DP-SGD, linear, once", others, f"linear, once, {column}ε = {{}}", ONCE, "6 3"),
        Line("DP-SGD, linear, each client's", others, f"linear, each, {column}ε = {{}}", EACH, "6 3"),
        Line("DP-SGD, CNN, once", others, f"CNN, once, {column}ε = {{}}", ONCE, "2 3"),
        Line("DP-SGD, CNN (FedAvg), each", others, f"CNN, each (FedAvg), {column}ε = {{}}", EACH, "2 3"),
        Line("FedDM released, once", "privacy-feddm", f"once, {column or 'MNIST, '}ε = {{}}", ONCE, "10 3 2 3"),
        Line("FedDM released, each", "privacy-feddm", f"each, {column or 'MNIST, '}ε = {{}}", EACH, "10 3 2 3"),
    )


PANELS = (
    Panel(
        "MNIST",
        76,
        100,
        lines("privacy-mnist", "privacy-sgd-mnist", ""),
        (("DP-MERF", 1, 80.3), ("DPDM", 1, 95.3), ("DP-FETA", 1, 95.6)),
    ),
    Panel("Fashion-MNIST", 60, 92, lines("privacy-fashion", "privacy-sgd-others", "Fashion-MNIST, "), ()),
    Panel(
        "CIFAR-10",
        30,
        85,
        lines("privacy-cifar10", "privacy-sgd-others", "CIFAR-10, "),
        (("DP-FETA", 1, 35.1), ("Tramèr and Boneh", 3, 67.0), ("De et al.", 8, 81.4)),
    ),
)


def numbers(line: Line) -> dict[int, float]:
    """The mean over seeds at each ε that has run."""
    path = RESULTS / f"{line.file}.json"
    cells = json.loads(path.read_text("utf-8"))["cells"] if path.is_file() else {}
    found = {epsilon: cells.get(line.cells.format(epsilon)) for epsilon in EPSILONS}
    return {
        epsilon: statistics.fmean(value for values in one["numbers"].values() for value in values)
        for epsilon, one in found.items()
        if one
    }


def draw() -> str:
    """The picture as SVG."""
    words = "Accuracy against epsilon on MNIST, Fashion-MNIST and CIFAR-10"
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" '
        f'role="img" aria-label="{words}" {TEXT} fill="#1c2733">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#ffffff"/>',
    ]
    for number, panel in enumerate(PANELS):
        parts += draw_panel(LEFT + number * (PLOT + 34), panel)
    below = "ε at δ = 1e-5, one record added or removed"
    parts.append(f'<text x="{WIDTH / 2}" y="{BOTTOM + 36}" text-anchor="middle">{below}</text>')
    shown = [same[0] for same in zip(*(panel.lines for panel in PANELS), strict=True) if any(map(numbers, same))]
    for i, line in enumerate(shown):
        x, y = LEFT + (i % 3) * 300, BOTTOM + 62 + 18 * (i // 3)
        stroke = f'stroke="{line.colour}" stroke-width="2" stroke-dasharray="{line.dashes}"'
        parts.append(f'<path d="M{x} {y - 4}h28" {stroke}/>')
        parts.append(f'<text x="{x + 34}" y="{y}">{line.name}</text>')
    return "\n".join([*parts, "</svg>", ""])


def draw_panel(left: float, panel: Panel) -> list[str]:
    parts = [f'<text x="{left + PLOT / 2:g}" y="24" text-anchor="middle" font-weight="bold">{panel.title}</text>']

    def place(epsilon: float, accuracy: float) -> tuple[float, float]:
        share = (accuracy - panel.low) / (panel.high - panel.low)
        return left + 15 + (PLOT - 30) * math.log2(epsilon) / 3, BOTTOM - (BOTTOM - TOP) * min(1.0, max(0.0, share))

    for i in range(5):
        accuracy = panel.low + (panel.high - panel.low) * i / 4
        y = place(1, accuracy)[1]
        parts.append(f'<path d="M{left:g} {y:g}h{PLOT}" stroke="#d8dce0"/>')
        parts.append(f'<text x="{left - 4:g}" y="{y + 4:g}" text-anchor="end" font-size="10">{accuracy:g}</text>')
    for epsilon in EPSILONS:
        x = place(epsilon, panel.low)[0]
        parts.append(f'<text x="{x:g}" y="{BOTTOM + 16}" text-anchor="middle">{epsilon}</text>')
    for line in panel.lines:
        dots = [place(epsilon, accuracy) for epsilon, accuracy in numbers(line).items()]
        if dots:
            path = "L".join(f"{x:.1f} {y:.1f}" for x, y in dots)
            stroke = f'stroke="{line.colour}" stroke-width="2" stroke-dasharray="{line.dashes}"'
            parts.append(f'<path d="M{path}" fill="none" {stroke}/>')
        parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.5" fill="{line.colour}"/>' for x, y in dots]
    for name, epsilon, accuracy in panel.published:
        x, y = place(epsilon, accuracy)
        parts.append(f'<path d="M{x - 4:.1f} {y - 4:.1f}l8 8m0 -8l-8 8" stroke="#5b6670" stroke-width="1.5"/>')
        shift, end = (-8, "end") if epsilon == 8 else (8, "start")
        style = f'font-size="10" fill="#5b6670" text-anchor="{end}"'
        parts.append(f'<text x="{x + shift:.1f}" y="{y + 4:.1f}" {style}>{name} {accuracy:g}</text>')
    return parts


if __name__ == "__main__":
    PICTURE.write_text(draw(), encoding="utf-8")
