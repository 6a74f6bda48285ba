"""Two versions of the code in one run on one machine: whole rounds and the training in them, against the usual loop.

    mkdir -p build/before && git archive COMMIT src | tar -x -C build/before
    python benchmarks/before_and_after.py --before build/before/src --device cuda --out speed.json

Every model is timed by benchmarks/engines.py in a process of each version, one after the other; what follows `--` goes
to it.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent


def timed(source: Path, model: str, engines: list[str], more: list[str]) -> dict[str, Any]:
    """The report of benchmarks/engines.py with the code in `source`; empty where it failed, which is said."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out.json"
        command = [sys.executable, str(HERE / "engines.py"), "--models", model, "--engines", *engines]
        done = subprocess.run(
            [*command, *more, "--out", str(out)], env={**os.environ, "PYTHONPATH": str(source)}, check=False
        )
        if done.returncode or not out.exists():
            print(f"{source}: {model} failed with exit code {done.returncode}", flush=True)
            return {}
        found: dict[str, Any] = json.loads(out.read_text("utf-8"))
        return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", type=Path, required=True, help="the other version's src")
    parser.add_argument("--models", nargs="+", default=["mlp", "lenet5", "convnet"])
    parser.add_argument("--engines", nargs="+", default=["stacked"])
    parser.add_argument("--out", type=Path, required=True)
    options, more = parser.parse_known_args()
    report: dict[str, Any] = {"command": " ".join(["python", *sys.argv]), "results": {}}
    for model in options.models:
        for version, source in (("before", options.before), ("after", HERE.parent / "src")):
            found = timed(source, model, options.engines, [word for word in more if word != "--"])
            report["results"].setdefault(model, {})[version] = found.pop("results", {}).get(model)
            report |= {key: value for key, value in found.items() if key != "command"}
            options.out.parent.mkdir(parents=True, exist_ok=True)
            options.out.write_text(json.dumps(report, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()
