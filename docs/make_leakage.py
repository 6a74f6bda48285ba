"""The table of docs/leakage.md and docs/images/leakage.svg, from the files of results: python docs/make_leakage.py

The picture is accuracy against bytes, with what membership inference finds as the third dimension.
"""

import json
import math
import re
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from fedgist.experiments.leak_table import markdown

HERE = Path(__file__).parent
PAGE, PICTURE = HERE / "leakage.md", HERE / "images" / "leakage.svg"
RESULTS = HERE.parent / "benchmarks" / "results"
TABLE = re.compile(r"(<!-- leaks: (\S+) -->\n\n)(?:(?:\||Not run yet).*\n)*")
TRIALS = re.compile(r"(<!-- trials: (\S+) -->\n\n)(?:(?:\||Not run yet).*\n)*")
FIGURE = re.compile(r"(<!-- figure 3 -->\n\n)(?:(?:\||Not run yet).*\n)*")
SHADOWS = re.compile(r"(<!-- lira -->\n\n)(?:(?:\||Not run yet).*\n)*")
DRAWN = "leaks-mnist", "leaks-mnist5k", "leaks-digits"
"""The file that is drawn: the first of these that is there."""
MEMBERSHIP = ("membership", "trajectory", "images", "moments")
WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 900, 530, 60, 760, 24, 410
LETTER = 6.2
"""The width of one, more or less."""
Spot = tuple[float, float]
TEXT = 'font-family="system-ui, sans-serif" font-size="12"'
LARGEST = 0.25
"""AUC above the blind guess at which the colour ends."""
FOUND = 30.0
"""dB from which on an image is as good as the client's."""
LEGEND = (
    "Number, size and colour: AUC of the best of four membership inferences on replies, above a blind guess; in",
    "brackets on their sum, where a secure sum hides all else. ★: an image of a client was found at over 30 dB.",
    "Where nothing was found, these attacks did not find it; no more is said.",
)


def results(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text("utf-8"))
    return found


def page(text: str) -> str:
    """The page with its tables as the files say."""
    text = TABLE.sub(lambda found: found[1] + table(found[2]), text)
    text = TRIALS.sub(lambda found: found[1] + trials(found[2]), text)
    text = FIGURE.sub(lambda found: found[1] + figure(), text)
    return SHADOWS.sub(lambda found: found[1] + shadows(), text)


def table(name: str) -> str:
    if not (RESULTS / f"{name}.json").is_file():
        return f"Not run yet: there is no `benchmarks/results/{name}.json`.\n"
    return markdown(results(name))


def trials(name: str) -> str:
    """What was tried of each row, and how accurate it was on held-out samples; what was chosen is printed bold."""
    kept = results(name) if (RESULTS / f"{name}.json").is_file() else {}
    if not kept.get("trials"):
        return f"Not run yet: there are no trials in `benchmarks/results/{name}.json`.\n"
    lines = ["| | settings: accuracy on held-out samples |", "|---|---|"]
    for row in (row for row in kept["rows"] if row in kept["trials"]):
        tried = kept["trials"][row]
        best = max(tried, key=lambda one: tried[one] or 0.0)
        cells = {one: f"{one}: {'refused' if value is None else f'{100 * value:.1f}'}" for one, value in tried.items()}
        lines.append(f"| {row} | {'; '.join(f'**{cells[o]}**' if o == best else cells[o] for o in sorted(cells))} |")
    return "\n".join(lines) + "\n"


def figure() -> str:
    """What inversion finds in updates on CIFAR-10, by net, beside the class means: PSNR, SSIM."""
    lines = ["| net | update | iterations | found | class means | synthetic images as they are |", "|" + "---|" * 6]
    for net in ("vgg13", "convnet"):
        path = RESULTS / f"tofu_leakage-{net}.json"
        for name, one in (results(path.stem) if path.is_file() else {}).items():
            alike = one["similarity"]
            scores = [
                f"{alike[of]['psnr']:.1f}, {alike[of]['ssim']:.2f}" if of in alike else ""
                for of in ("recovered", "class means", "proxy images")
            ]
            told = net, name.removeprefix("cosine: "), f"{one['restarts']} × {one['iterations']:,}"
            lines.append(f"| {' | '.join((*told, *scores))} |")
    return "\n".join(lines) + "\n"


def shadows() -> str:
    """What likelihood ratios found, by data set, method and number of clients."""
    files = sorted(RESULTS.glob("lira-*.json"))
    if not files:
        return "Not run yet: there is no `benchmarks/results/lira-*.json`.\n"
    lines = ["| | accuracy | right of members, of others | AUC | found at 1 % wrong | loss alone: AUC | blind: AUC |"]
    lines.append("|" + "---|" * 7)
    for path in files:
        for name, one in results(path.stem)["rows"].items():
            ratio, loss, blind = (one[key] for key in ("likelihood ratio", "loss threshold", "blind"))
            rate = "–" if ratio["at_one_percent"] is None else f"{100 * ratio['at_one_percent']:.1f} %"
            right = ", ".join(f"{100 * one['right'][key]:.1f}" for key in ("held", "others"))
            areas = [f"{ratio['auc']:.3f} ± {ratio['auc std']:.3f}", rate, f"{loss['auc']:.3f}", f"{blind['auc']:.3f}"]
            told = f"{path.stem.removeprefix('lira-')}, {name}", f"{100 * one['accuracy']:.1f}", right
            lines.append(f"| {' | '.join((*told, *areas))} |")
    return "\n".join(lines) + "\n"


@dataclass(frozen=True)
class Point:
    """A row of the table: means over seeds."""

    name: str
    bytes: float
    accuracy: float
    replies: float | None
    """By how much the best membership inference on replies beats the blind guess; None where only sums are seen."""
    sums: float | None
    """The same on sums, where a secure sum hides the rest."""
    image: bool
    """Whether one was found."""

    @property
    def leak(self) -> float:
        return max(0.0, *(value for value in (self.replies, self.sums) if value is not None))

    @property
    def text(self) -> str:
        replies = "" if self.replies is None else f" {self.replies:+.2f}"
        return f"{self.name}{' ★' * self.image}{replies}" + ("" if self.sums is None else f" ({self.sums:+.2f})")


def points() -> list[Point]:
    """All rows that ran and have a model to infer from."""
    name = next(name for name in DRAWN if (RESULTS / f"{name}.json").is_file())
    found = []
    for row, by_seed in results(name)["rows"].items():
        runs = [run for run in by_seed.values() if "refused" not in run]
        if not runs:
            continue
        replies = best(runs, "replies")
        sums = None if runs[0].get("shown") else best(runs, "sums")
        if replies is not None or sums is not None:
            sizes = (fmean(run[key] for run in runs) for key in ("bytes", "accuracy"))
            found.append(Point(row, next(sizes), 100 * next(sizes), replies, sums, any(map(image_found, runs))))
    return found


def image_found(run: dict[str, Any]) -> bool:
    """Whether an attack has found an image of a client's, or one was sent."""
    if any(one["attack"] == "copies" and (one["value"] or 0) > (one.get("control") or 0) for one in run["attacks"]):
        return True
    alike = [one.get("best") or one["value"] for one in run["attacks"] if one.get("measure") == "PSNR, dB"]
    return max(alike, default=0.0) > FOUND


def best(runs: list[dict[str, Any]], level: str) -> float | None:
    """Of the attacks on membership, that which finds most over the seeds, less its control (a coin at the least)."""
    gains: dict[str, list[float]] = {}
    for run in runs:
        for one in run["attacks"]:
            if one["attack"] in MEMBERSHIP and one["level"] == level and one["value"] is not None:
                gains.setdefault(one["attack"], []).append(one["value"] - max(0.5, one["control"]))
    return max(map(fmean, gains.values()), default=None)


def draw() -> str:
    """The picture as SVG."""
    shown = sorted(points(), key=lambda point: -point.leak)
    ends = [math.log10(point.bytes) for point in shown]
    least, most = math.floor(min(ends)), math.ceil(max(ends))
    low, high = math.floor(min(point.accuracy for point in shown) / 10) * 10, 100

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
        raised = f'10<tspan dy="-4" font-size="9">{power}</tspan>'
        lines.append(f'<text x="{x:g}" y="{BOTTOM + 18}" text-anchor="middle">{raised}</text>')
    taken: list[tuple[float, float, float, float]] = []
    for point in shown:  # a label stands on no circle
        (x, y), radius = at(point.bytes, point.accuracy), size(point)
        taken.append((x - radius, y - radius, x + radius, y + radius))
    for point in shown:
        (x, y), radius = at(point.bytes, point.accuracy), size(point)
        share = min(1.0, point.leak / LARGEST)
        colour = f"rgb({round(46 + share * 150)},{round(125 - share * 85)},{round(79 - share * 40)})"
        lines.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{radius:.1f}" fill="{colour}" fill-opacity="0.75"/>')
        left, line = place(x, y, radius, LETTER * len(point.text), taken)
        lines.append(f'<text x="{left:.1f}" y="{line:.1f}" font-size="11" fill="{colour}">{point.text}</text>')
    middle = f'x="{(LEFT + RIGHT) / 2:g}" y="{BOTTOM + 40}" text-anchor="middle"'
    lines.append(f"<text {middle}>bytes up and down, all clients</text>")
    for i, text in enumerate(LEGEND):
        lines.append(f'<text x="{LEFT}" y="{HEIGHT - 8 - 16 * (len(LEGEND) - 1 - i)}">{text}</text>')
    return "\n".join([*lines, "</svg>", ""])


def size(point: Point) -> float:
    """The radius of its circle."""
    return 4 + 8 * min(1.0, point.leak / LARGEST)


def place(x: float, y: float, radius: float, width: float, taken: list[tuple[float, float, float, float]]) -> Spot:
    """Where a label stands: the nearest free line beside its circle."""
    right, left = min(x + radius + 3, WIDTH - width - 4), max(LEFT + 2.0, x - radius - 3 - width)
    tries = [(side, y + 4 + shift) for shift in (0, -13, 13, -26, 26, -39, 39) for side in (right, left)]
    for start, line in tries:
        box = start, line - 11, start + width, line + 2
        if not any(box[0] < b[2] and b[0] < box[2] and box[1] < b[3] and b[1] < box[3] for b in taken):
            break
    taken.append(box)
    return start, line


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text("utf-8")), "utf-8")
    PICTURE.write_text(draw(), "utf-8")
    print(PAGE, PICTURE)
