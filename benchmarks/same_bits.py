"""Whether a change of the code left every byte where it was: runs of a few methods, before and after it.

    python benchmarks/same_bits.py --out before.json      # before the change
    python benchmarks/same_bits.py --against before.json  # after it, on the same machine: exit 1 if one differs

A run goes through the command line with the method's toy profile, on one thread, one client after the other. Compared
are the ledger (every message with its type and its bytes) and the digest of all states after the last round. Rounding
differs between machines, so digests are to be compared on one; the ledgers' are the same everywhere.
"""

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

METHODS = ("fedavg", "feddm", "codream", "tofu", "repshare")


def bits(method: str, folder: Path) -> dict[str, str]:
    """The digests of one run."""
    command = [sys.executable, "-m", "fedgist", "run", method, "--profile", "toy", "--seed", "0", "--quiet"]
    where = ["--engine", "sequential", "--device", "cpu", "--out", str(folder / method)]
    subprocess.run(
        [*command, *where], check=True, stdout=subprocess.DEVNULL, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    rows = (folder / method / "ledger.csv").read_text("utf-8").splitlines()
    ledger = "\n".join(row.partition(",")[2] for row in rows)  # without the run's name
    result = json.loads((folder / method / "result.json").read_text("utf-8"))
    return {"ledger": hashlib.sha256(ledger.encode()).hexdigest(), "states": result["state_sha256"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--methods", nargs="+", default=METHODS)
    parser.add_argument("--out", type=Path, help="where the digests go, as JSON")
    parser.add_argument("--against", type=Path, help="digests from before, to compare with")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = {method: bits(method, Path(folder)) for method in options.methods}
    if options.out:
        options.out.write_text(json.dumps(found, indent=2) + "\n", "utf-8")
    before = json.loads(options.against.read_text("utf-8")) if options.against else found
    for method, digests in found.items():
        changed = [name for name, value in digests.items() if before.get(method, {}).get(name) != value]
        short = "  ".join(f"{name} {value[:12]}" for name, value in digests.items())
        print(f"{method:12} {short}  {'differs: ' + ', '.join(changed) if changed else 'same' * bool(options.against)}")
    sys.exit(any(before.get(method) != digests for method, digests in found.items()))


if __name__ == "__main__":
    main()
