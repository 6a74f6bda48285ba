"""The tables of docs/robustness.md, from the results of the presets: python docs/make_robustness.py"""

import re
import statistics
from pathlib import Path

from fedgist.experiments import reproduction

HERE = Path(__file__).parent
PAGE = HERE / "robustness.md"
TABLE = re.compile(r"(<!-- robustness: (\S+) -->\n\n)(?:(?:\||Not run yet).*\n)*")


def page(text: str) -> str:
    """The page with its tables as the results say."""
    return TABLE.sub(lambda found: found[1] + table(found[2]), text)


def table(name: str) -> str:
    """Accuracy by what bad clients do (rows) and what is done against it (columns): mean ± deviation over seeds."""
    preset = reproduction.find(f"robustness/{name}")
    results = reproduction.load(preset, [HERE / "results"])
    if not results:
        return f"Not run yet: `fedgist reproduce robustness/{name} --results docs/results`.\n"
    columns = list(dict.fromkeys(cell.column for cell in preset.cells))
    lines = [f"| bad clients | {' | '.join(columns)} |", "|---" * (1 + len(columns)) + "|"]
    for row in dict.fromkeys(cell.row for cell in preset.cells):
        cells = [results.get(f"{row}, {column}") for column in columns]
        texts = ["" if found is None else told(found.values) for found in cells]
        lines.append(f"| {' | '.join((row, *texts))} |")
    return "\n".join(lines) + "\n"


def told(values: list[float]) -> str:
    spread = f" ± {statistics.stdev(values):.1f}" if len(values) > 1 else ""
    return f"{statistics.fmean(values):.1f}{spread}"


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text("utf-8")), "utf-8")
    print(PAGE)
