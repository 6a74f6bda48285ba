"""Draws docs/images/architecture.svg, the packages as layers: python docs/make_architecture.py

Every box has a colour of its own behind dark letters, so that the picture is legible on a light and on a dark page.
"""

from pathlib import Path

PICTURE = Path(__file__).parent / "images" / "architecture.svg"
LAYERS: tuple[tuple[tuple[str, str, str], ...], ...] = (
    (("cli", "commands: what the user typed, what came out", ""),),
    (("federation", "everything across machines", "protocol"),),
    (("experiments", "configuration, runs, reports, the papers' tables", ""),),
    (("engines", "who executes here", "stacked"), ("privacy", "attacks on what was sent", "")),
    (("methods", "one file a method, as in its paper", ""),),
    (("api", "the names that a method's author needs", ""),),
    (("families", "abstract bases of methods, with their messages", ""),),
    (("synthesis", "pure maths of making data", ""), ("features", "fixed maps, and their sums", "")),
    (("learning", "pure maths of learning", ""),),
    (("dp", "differential privacy: accountant, noise, budgets", ""),),
    (("models", "pure functions", "gpu"), ("data", "sets, partitions, shares", "")),
    (("options", "declared once", ""), ("words", "numbers for people", ""), ("storage", "whole files", "")),
    (("core", "messages, codec, work, ledger, trees", ""), ("secure", "sums that hide their addends", "")),
)
"""From top to bottom: name, what lives there, and a package inside of it."""
COLOURS = ("#dbe7f6", "#e3e0f5", "#f6ead2", "#dcefdc")
"""The outside, what executes, what a method is made of, and the ground it stands on."""
GROUPS = (0, 0, 0, 1, 2, 2, 2, 2, 2, 2, 3, 3, 3)
WIDTH, LEFT, HEIGHT, GAP = 760, 56, 44, 8
TEXT = 'font-family="system-ui, sans-serif" font-size="15"'


def draw() -> str:
    """The picture as SVG."""
    total = len(LAYERS) * (HEIGHT + GAP) + GAP
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {total}" width="{WIDTH}" height="{total}" '
        f'role="img" aria-label="The packages of fedgist as layers; imports point down" {TEXT} fill="#1c2733">',
        *draw_arrow(total),
    ]
    for i, (layer, group) in enumerate(zip(LAYERS, GROUPS, strict=True)):
        width = (WIDTH - LEFT - GAP * len(layer)) / len(layer)
        for j, (name, sentence, inner) in enumerate(layer):
            x, y = LEFT + j * (width + GAP), GAP + i * (HEIGHT + GAP)
            lines += [draw_rectangle(x, y, width, HEIGHT, COLOURS[group]), *draw_words(x, y, name, sentence)]
            if inner:
                lines += draw_inner(x + width, y, inner)
    return "\n".join([*lines, "</svg>", ""])


def draw_arrow(total: int) -> list[str]:
    x, top, bottom = LEFT / 2 + 8, GAP, total - GAP
    return [
        f'<path d="M{x:g} {top}V{bottom - 12}" stroke="#808890" stroke-width="2" fill="none"/>',
        f'<path d="M{x - 7:g} {bottom - 12}h14l-7 12z" fill="#808890"/>',
        f'<text transform="translate({x - 12:g} {total / 2:g}) rotate(-90)" text-anchor="middle" fill="#808890">'
        "imports point down</text>",
    ]


def draw_rectangle(x: float, y: float, width: float, height: float, colour: str) -> str:
    size = f'width="{width:g}" height="{height:g}"'
    return f'<rect x="{x:g}" y="{y:g}" {size} rx="5" fill="{colour}" stroke="#808890"/>'


def draw_words(x: float, y: float, name: str, sentence: str) -> list[str]:
    base = y + HEIGHT / 2 + 5
    return [
        f'<text x="{x + 12:g}" y="{base:g}" font-weight="bold">{name}</text>',
        f'<text x="{x + 128:g}" y="{base:g}" font-size="13">{sentence}</text>',
    ]


def draw_inner(right: float, y: float, name: str) -> list[str]:
    """A package inside of the one whose box ends at `right`."""
    width = 8 * len(name) + 16
    x, base = right - width - 8, y + HEIGHT / 2 + 5
    return [
        draw_rectangle(x, y + 8, width, HEIGHT - 16, "#ffffff"),
        f'<text x="{x + width / 2:g}" y="{base:g}" text-anchor="middle" font-size="13">{name}</text>',
    ]


if __name__ == "__main__":
    PICTURE.write_text(draw(), encoding="utf-8")
