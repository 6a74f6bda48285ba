"""What an exchange costs without a server: models of 3 MB between five sites on a ring, beside the server's star.

    python benchmarks/peers.py --out benchmarks/results/peers.json

Starts a whole federation on this machine (`fedgist federation sim`) with TLS, runs DFedAvg once with a server and once
on a ring, and reads the sites' audit logs. In both an exchange begins when the first site is asked for its model, and
ends when the last has been sent what it asked for or is to learn from: with a server the mean of all models, on a ring
the sealed models of its two neighbours, which it averages itself. Five sites, a server and a coordinator share one
machine.
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any

from fedgist.federation import sim

MODEL = "mlp:hidden=980"  # 779,110 weights for 28×28 images in ten classes: 3.1 MB
ROUNDS, SITES = 15, 5


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dataset", default="mnist5k", help="28×28 images")
    parser.add_argument("--port", type=int, default=8002)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    figures: dict[str, Any] = {
        "sites": SITES,
        "rounds": ROUNDS,
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
    }
    with tempfile.TemporaryDirectory() as folder:
        federation = Path(folder) / "federation"
        with running(federation, arguments.dataset, arguments.port):
            for name, more in (("star", []), ("ring", ["--topology", "ring"])):
                run(federation, name, arguments.dataset, more)
                figures[name] = summarise(federation, name)
    print(json.dumps(figures, indent=1))
    if arguments.out:
        arguments.out.write_text(json.dumps(figures, indent=1) + "\n")


@contextmanager
def running(federation: Path, dataset: str, port: int) -> Iterator[None]:
    """A server and its sites, which take part in DFedAvg."""
    for site in sim.provide(federation, sim.names(federation, SITES), None, dataset, None, port).sites:
        policy = federation / "sites" / site / "policy.toml"
        policy.write_text(policy.read_text().replace('methods = ["sums"]', 'methods = ["dfedavg"]'))
    command = [sys.executable, "-m", "fedgist", "federation", "sim", str(federation), "--dataset", dataset]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as staying:
        try:
            yield
        finally:
            staying.terminate()


def run(federation: Path, name: str, dataset: str, more: list[str]) -> None:
    command = [sys.executable, "-m", "fedgist", "federation", "run", "dfedavg", "--federation", str(federation)]
    command += ["--dataset", dataset, "--model", MODEL, "--rounds", str(ROUNDS), "--wait", "600", "--quiet"]
    command += ["--set", "steps=10", "--set", "eval_every=0", "--set", f"checkpoint_every={ROUNDS}", *more]
    while not (federation / "server" / "links").exists():  # the server is coming up
        time.sleep(1)
    subprocess.run([*command, "--min-sites", str(SITES), "--out", str(federation / name)], check=True)


def summarise(federation: Path, name: str) -> dict[str, Any]:
    """Models are asked for in the exchange 1 of a round; what comes of it is sent with the first of exchange 2."""
    asked, sent = ("Step", "Step") if name == "ring" else ("Request", "Request")
    begun: dict[int, list[float]] = {}
    ended: dict[int, list[float]] = {}
    sizes = []
    for log in federation.glob("sites/*/fedgist/audit.jsonl"):
        for line in map(json.loads, log.open()):
            if line["direction"] != "in" or line.get("phase", "round") != "round" or "exchange" not in line:
                continue
            when = datetime.fromisoformat(line["time"]).timestamp()
            if (line["kind"], line["exchange"]) == (asked, 1):
                begun.setdefault(line["round"], []).append(when)
            if (line["kind"], line["exchange"]) == (sent, 2):
                ended.setdefault(line["round"], []).append(when)
                sizes.append(line["bytes"])
    seconds = [max(ended[round]) - min(begun[round]) for round in sorted(begun)][1:]  # the first opens connections
    return {
        "bytes that reach a site": round(statistics.median(sizes)),
        "seconds an exchange, median": round(statistics.median(seconds), 3),
        "seconds an exchange, 90th percentile": round(statistics.quantiles(seconds, n=10)[-1], 3),
    }


if __name__ == "__main__":
    main()
