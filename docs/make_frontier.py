"""Draws docs/images/frontier.svg, accuracy against bytes a client: python docs/make_frontier.py

From the files in docs/results: of every run of gist/table1 on CIFAR-10, also where another table has the same run.
"""

import json
import math
import statistics
from dataclasses import dataclass
from pathlib import Path

from fedgist import methods
from fedgist.core.method import who_sees_what
from fedgist.experiments import presets
from fedgist.experiments.presets import Cell

HERE = Path(__file__).parent
PICTURE, RESULTS = HERE / "images" / "frontier.svg", HERE / "results"
PANELS = ("CIFAR-10, Dirichlet 0.5", "CIFAR-10, Dirichlet 0.1", "CIFAR-10, Dirichlet 0.01")
COLOURS = {"sums only": "#2e7d4f", "something of each client": "#c25a1c"}
WIDTH, HEIGHT, PLOT, LEFT, TOP, BOTTOM = 960, 460, 270, 56, 44, 400
LEAST, MOST = 1e6, 1e9
"""Bytes at the ends of the axis."""
LOW, HIGH = 20, 80
"""Accuracies at the ends of the other."""
LETTER = 6.4
"""The width of one, more or less."""
Box = tuple[float, float, float, float]
TEXT = 'font-family="system-ui, sans-serif" font-size="12"'


@dataclass(frozen=True)
class Point:
    name: str
    bytes: float
    """Up and down, of one client."""
    accuracy: float
    sees: str


def sees(cell: Cell) -> str:
    """What the server has of a client besides sums, evaluations aside."""
    shown = [row for row in who_sees_what(methods.find(cell.config.method)) if not row[3]]
    return "something of each client" if shown else "sums only"


def points(column: str) -> list[Point]:
    """What is known of a column of the table, the cheapest first."""
    known = {}
    for path in sorted(RESULTS.glob("*.json")):
        known |= {found["run"]: found for found in json.loads(path.read_text("utf-8"))["cells"].values()}
    found = []
    for cell in presets.available()["gist/table1"].cells:
        if cell.column == column and cell.run in known:
            one = known[cell.run]
            accuracy = statistics.fmean(value for values in one["numbers"].values() for value in values)
            sent = (one["bytes_up"] + one["bytes_down"]) / cell.config.clients
            found.append(Point(cell.row, sent, accuracy, sees(cell)))
    return sorted(found, key=lambda point: point.bytes)


def draw() -> str:
    """The picture as SVG."""
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" '
        f'role="img" aria-label="Accuracy against the bytes that cross the wire for one client" {TEXT} fill="#1c2733">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#ffffff"/>',
    ]
    for number, column in enumerate(PANELS):
        lines += draw_panel(LEFT + number * (PLOT + 30), column, number == 0)
    lines.append(
        f'<text x="{WIDTH / 2}" y="{BOTTOM + 32}" text-anchor="middle">bytes up and down, of one client</text>'
    )
    x = 300
    for words, colour in COLOURS.items():
        lines += [f'<circle cx="{x}" cy="{HEIGHT - 14}" r="5" fill="{colour}"/>']
        lines += [f'<text x="{x + 10}" y="{HEIGHT - 10}">the server sees {words}</text>']
        x += 190
    return "\n".join([*lines, "</svg>", ""])


def draw_panel(left: float, column: str, first: bool) -> list[str]:
    lines = [f'<text x="{left + PLOT / 2:g}" y="24" text-anchor="middle" font-weight="bold">{column}</text>']
    for accuracy in range(LOW, HIGH + 1, 10):
        y = height_of(accuracy)
        lines.append(f'<path d="M{left:g} {y:g}h{PLOT}" stroke="#d8dce0"/>')
        lines += [f'<text x="{left - 8:g}" y="{y + 4:g}" text-anchor="end">{accuracy} %</text>'] if first else []
    for power in range(int(math.log10(LEAST)), int(math.log10(MOST)) + 1):
        x, words = left + across(10.0**power), {6: "1 MB", 7: "10 MB", 8: "100 MB", 9: "1 GB"}[power]
        lines.append(f'<path d="M{x:g} {TOP}V{BOTTOM}" stroke="#eceff1"/>')
        lines.append(f'<text x="{x:g}" y="{BOTTOM + 16}" text-anchor="middle" font-size="11">{words}</text>')
    shown = sorted(points(column), key=lambda point: -point.accuracy)
    dots = [(left + across(point.bytes), height_of(point.accuracy)) for point in shown]
    taken = [(x - 6, y - 6, x + 6, y + 6) for x, y in dots]
    for point, (x, y) in zip(shown, dots, strict=True):
        colour, words = COLOURS[point.sees], f"{point.name} {point.accuracy:.1f}"
        box = free_place(x, y, LETTER * len(words), left, taken)
        taken.append(box)
        near = min(max(x, box[0]), box[2]), min(max(y, box[1] + 3), box[3] - 3)
        lines.append(f'<path d="M{x:.1f} {y:.1f}L{near[0]:.1f} {near[1]:.1f}" stroke="{colour}" stroke-width="0.6"/>')
        lines.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="5" fill="{colour}"/>')
        lines.append(f'<text x="{box[0]:.1f}" y="{box[3] - 3:.1f}" fill="{colour}">{words}</text>')
    return lines


def free_place(x: float, y: float, width: float, left: float, taken: list[Box]) -> Box:
    """Where words about a dot are on no other dot and no other words: beside it, else above or below, ever farther."""
    middle = min(max(x - width / 2, left), left + PLOT - width)
    sides = [side for side in (x + 8, x - 8 - width) if left <= side <= left + PLOT - width]
    places = [(side, y - 7) for side in sides]
    places += [(at, y + shift) for far in range(2, 80, 3) for shift in (-far - 13, far) for at in (*sides, middle)]
    boxes = [(px, py, px + width, py + 14) for px, py in places]
    return next((box for box in boxes if not any(overlap(box, other) for other in taken)), boxes[0])


def overlap(one: Box, other: Box) -> bool:
    return one[0] < other[2] and other[0] < one[2] and one[1] < other[3] and other[1] < one[3]


def across(amount: float) -> float:
    share = math.log(amount / LEAST) / math.log(MOST / LEAST)
    return PLOT * min(1.0, max(0.0, share))


def height_of(accuracy: float) -> float:
    share = (accuracy - LOW) / (HIGH - LOW)
    return BOTTOM - (BOTTOM - TOP) * min(1.0, max(0.0, share))


if __name__ == "__main__":
    PICTURE.write_text(draw(), encoding="utf-8")
    print(PICTURE)
