"""Two versions of the code in one run on one machine: whole rounds and the training in them, against the usual loop.

    mkdir -p build/before && git archive COMMIT src | tar -x -C build/before
    python benchmarks/before_and_after.py --before build/before/src --device cuda --clients 100 --out speed.json

Both are timed by benchmarks/engines.py, each in a process of its own, one after the other; options that are not named
here go to it. At the end stands a table of milliseconds and of how many times faster than the usual loop that is.
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


def timed(source: Path, more: list[str]) -> dict[str, Any]:
    """The report of benchmarks/engines.py with the code in `source`; of one that fails, what it wrote."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out.json"
        done = subprocess.run(
            [sys.executable, str(HERE / "engines.py"), *more, "--out", str(out)],
            env={**os.environ, "PYTHONPATH": str(source)},
            check=False,
        )
        if done.returncode:
            print(f"{source} ended with exit code {done.returncode}", flush=True)
        found: dict[str, Any] = json.loads(out.read_text("utf-8")) if out.exists() else {"results": {}}
        return found


def table(before: dict[str, Any], after: dict[str, Any]) -> str:
    """Rows of Markdown: both parts of every model and engine that both versions have."""
    parts = list(next(iter(after.values()), {}))
    head = ["", *(f"{part} {version}" for part in parts for version in ("before", "after"))]
    lines = ["| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    for model in filter(after.get, before):
        old, new = before[model], after[model]
        for way in new[parts[0]]:
            cells = [each[part].get(way) for part in parts for each in (old, new)]
            shown = [f"{cell['ms']:.1f} ({cell['times_faster']:.3g}×)" if cell else "" for cell in cells]
            lines += [f"| {model}, {way} | {' | '.join(shown)} |"] if way != "usual" else []
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", type=Path, required=True, help="the other version's src")
    parser.add_argument("--engines", nargs="+", default=["stacked", "stacked+tf32"])
    parser.add_argument("--out", type=Path, required=True)
    options, more = parser.parse_known_args()
    report: dict[str, Any] = {"command": " ".join(["python", *sys.argv])}
    for version, source in (("before", options.before), ("after", HERE.parent / "src")):
        report[version] = timed(source, ["--engines", *options.engines, *more])
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(report, indent=1) + "\n", "utf-8")
    print(table(report["before"]["results"], report["after"]["results"]))


if __name__ == "__main__":
    main()
