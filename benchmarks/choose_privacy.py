"""Sets what was tuned in the presets of DP-SGD and of released class sums: python benchmarks/choose_privacy.py RESULTS…

The rule: of the rows of `privacy/sgd-tuning` and `privacy/feddm-tuning` the one with the best accuracy on held-out
training samples; of equals the first. A test set has no say. RESULTS are folders with what ran of the two; what has not
run leaves a preset as it is. `--preset` names the file that is written, without it the one that fedgist comes with.
"""

import argparse
import json
import re
from pathlib import Path

PRESET = Path(__file__).parents[1] / "src" / "fedgist" / "experiments" / "presets" / "privacy.toml"
TUNED_AT = {"8": "8", "4": "8", "2": "1", "1": "1"}
"""The ε at which rates were judged, for each at which they are used."""
TUNED_ON = {"": "MNIST", "MNIST": "MNIST", "Fashion-MNIST": "MNIST", "CIFAR-10": "CIFAR-10"}
COLUMN = re.compile(r'^"(?:(?P<data>[\w-]+), )?ε = (?P<epsilon>\d)" = ')


def held_out(folders: list[Path], preset: str) -> dict[str, float]:
    """Accuracy by the names of cells."""
    paths = [path for folder in folders if (path := folder / f"{preset}.json").is_file()]
    cells = {name: cell for path in paths for name, cell in json.loads(path.read_text("utf-8"))["cells"].items()}
    return {name: next(iter(cell["numbers"].values()))[0] for name, cell in cells.items()}


def best(found: dict[str, float], form: str) -> str | None:
    """What stands for the group of the pattern `form` in the name of the best cell that it fits."""
    fitting = {match[1]: accuracy for name, accuracy in found.items() if (match := re.fullmatch(form, name))}
    return max(fitting, key=lambda one: fitting[one]) if fitting else None


def chosen(text: str, rates: dict[str, float], released: dict[str, float]) -> str:
    """The text of the presets with the best of what was tuned."""
    lines, preset, data, epsilon = [], "", "", ""
    for line in text.splitlines():
        if heading := re.match(r"\[+([\w-]+)", line):
            preset = heading[1]
        if column := COLUMN.match(line):
            data, epsilon = TUNED_ON[column["data"] or ""], TUNED_AT[column["epsilon"]]
        row = re.match(r'"(.+?)" = \{', line)
        if row and preset in ("sgd-mnist", "sgd-others") and "lr = " in line:
            form = rf"{re.escape(row[1])}, lr ([\d.]+), {data}, ε = {epsilon}"
            if rate := best(rates, form):
                line = re.sub(r"lr = [\d.]+", f"lr = {float(rate)}", line)
        if row and preset == "feddm" and "nets = " in line and (one := best(released, rf"(M = .*), {data}")):
            nets, rounds, clip = re.findall(r"[\d.]+", one)
            line = re.sub(r"nets = .* }", f"nets = {nets}, rounds = {rounds}, clip = {float(clip)} }}", line)
        lines.append(line)
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", nargs="+", type=Path)
    parser.add_argument("--preset", type=Path, default=PRESET)
    given = parser.parse_args()
    rates, released = (held_out(given.results, f"privacy-{name}-tuning") for name in ("sgd", "feddm"))
    for name, accuracy in {**rates, **released}.items():
        print(f"{accuracy:6.2f}  {name}")
    before = given.preset.read_text("utf-8") if given.preset.is_file() else PRESET.read_text("utf-8")
    given.preset.write_text(made := chosen(before, rates, released), encoding="utf-8")
    for old, new in zip(before.splitlines(), made.splitlines(), strict=True):
        if old != new:
            print(f"- {old}\n+ {new}")


if __name__ == "__main__":
    main()
