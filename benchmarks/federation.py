"""What an exchange costs across processes: Co-Dream, 100 exchanges of a 3 MB batch with three sites over TLS.

    python benchmarks/federation.py --out benchmarks/results/federation.json

Starts a whole federation on this machine (`fedgist federation sim`), runs one round of Co-Dream, and reads the sites'
audit logs. An exchange lasts from its first request at a site to the first request of the next one; what the slowest
site spent between taking its request and handing out its reply is taken off: that is the client's own computation, with
its decoding, encoding and logging. What is left is the server's part and the way there and back, four processes on one
machine.

    python benchmarks/federation.py --start 5

measures instead how long a run takes to begin, from the command to the start of the run at a site, and the processor
time of that command, which other work on the machine hardly lengthens: five short runs across sites that wait.
"""

import argparse
import itertools
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from datetime import datetime
from pathlib import Path
from typing import Any

SETTINGS = {"dreams": 1000, "exchanges": 100, "warm_up": 1, "steps": 1, "distil_steps": 1}
MODEL = "mlp:hidden=100:norm=batch"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dataset", default="mnist5k", help="28×28 images: 1,000 of them are 3.1 MB")
    parser.add_argument("--port", type=int, default=8002)
    parser.add_argument("--start", type=int, metavar="N", help="measure how long so many runs take to begin")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        federation = Path(folder) / "federation"
        if arguments.start:
            print(json.dumps(starts(federation, arguments.dataset, arguments.port, arguments.start), indent=1))
            return
        run(federation, arguments.dataset, arguments.port)
        sites = [read_exchanges(log) for log in sorted(federation.glob("sites/*/fedgist/audit.jsonl"))]
    figures = {**summarise(sites), "machine": f"{platform.machine()}, {os.cpu_count()} cores"}
    print(json.dumps(figures, indent=1))
    if arguments.out:
        arguments.out.write_text(json.dumps(figures, indent=1) + "\n")


def run(federation: Path, dataset: str, port: int) -> None:
    options = [option for name, value in SETTINGS.items() for option in ("--set", f"{name}={value}")]
    command = [sys.executable, "-m", "fedgist", "federation", "sim", str(federation), "codream", *options]
    command += ["--dataset", dataset, "--model", MODEL, "--rounds", "1", "--port", str(port)]
    subprocess.run([*command, "--out", str(federation / "run")], check=True)


def starts(federation: Path, dataset: str, port: int, runs: int) -> dict[str, Any]:
    """Seconds until the first request of each run has come to a site, and those of the whole command."""
    fedgist = [sys.executable, "-m", "fedgist", "federation"]
    trial = [*fedgist, "sim", str(federation), "--dataset", dataset, "--port", str(port)]
    with subprocess.Popen(trial, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as staying:
        assert staying.stdout is not None
        here = 0
        while here < 3:
            here += "is connected and waits" in staying.stdout.readline()
        threading.Thread(target=staying.stdout.read, daemon=True).start()
        figures: dict[str, list[float]] = {
            "seconds to begin": [],
            "processor seconds": [],
            "whole": [],
        }
        for number in range(runs + 1):  # the first one also waits for the sites to be ready
            begun, spent = time.time(), os.times()
            command = ["run", "fedavg", "--federation", str(federation), "--dataset", dataset, "--rounds", "1"]
            subprocess.run([*fedgist, *command, "--wait", "300", "--quiet", "--out", str(federation / f"run-{number}")])
            lines = [json.loads(line) for line in next(federation.glob("sites/*/fedgist/audit.jsonl")).open()]
            first = [line["time"] for line in lines if line["kind"] == "Start" and line["direction"] == "in"][-1]
            after = os.times()
            figures["seconds to begin"].append(datetime.fromisoformat(first).timestamp() - begun)
            used = after.children_user + after.children_system - spent.children_user - spent.children_system
            figures["processor seconds"].append(used)
            figures["whole"].append(time.time() - begun)
        staying.terminate()
    return {name: round(statistics.median(values[1:]), 2) for name, values in figures.items()} | {"runs": runs}


def read_exchanges(log: Path) -> dict[int, dict[str, Any]]:
    """Exchange -> when its request came in, when its reply went out, and the bytes of both."""
    times: dict[int, dict[str, Any]] = {}
    for line in map(json.loads, log.read_text().splitlines()):
        if line.get("type") in ("codream.Dreams", "codream.DreamUpdate"):
            entry = times.setdefault(line["exchange"], {})
            entry[line["direction"]] = datetime.fromisoformat(line["time"]).timestamp()
            entry[f"{line['direction']} bytes"] = line["bytes"]
    return times


def summarise(sites: list[dict[int, dict[str, Any]]]) -> dict[str, Any]:
    numbers = sorted(sites[0])
    begun = {n: min(site[n]["in"] for site in sites) for n in numbers}
    own = {n: max(site[n]["out"] - site[n]["in"] for site in sites) for n in numbers}
    whole = [begun[b] - begun[a] for a, b in itertools.pairwise(numbers)]
    rest = [begun[b] - begun[a] - own[a] for a, b in itertools.pairwise(numbers)]
    return {
        "exchanges": len(numbers),
        "sites": len(sites),
        "bytes down": sites[0][numbers[0]]["in bytes"],
        "bytes up": sites[0][numbers[0]]["out bytes"],
        "seconds an exchange, median": round(statistics.median(whole), 3),
        "without the client's own computation, median": round(statistics.median(rest), 3),
        "without the client's own computation, mean": round(statistics.fmean(rest), 3),
        "without the client's own computation, 90th percentile": round(statistics.quantiles(rest, n=10)[-1], 3),
    }


if __name__ == "__main__":
    main()
