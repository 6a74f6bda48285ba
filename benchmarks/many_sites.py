"""What an exchange costs across machines: eight NVFlare sites as processes with TLS, or fifty hosts in one process.

    python benchmarks/many_sites.py --sites 8 --out benchmarks/results/many_sites.json
    python benchmarks/many_sites.py --hosts 50 --out benchmarks/results/many_sites.json

FedAvg (an MLP of 200 and 100 hidden units, five steps) and gist (scattering, one round) on mnist5k. Seconds
are those of a round by the exchanges in it, as the run's folder has them; memory is what the server's processes have at
their highest, or with hosts what the process has beyond Python, torch and the data.
"""

import argparse
import csv
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

JOBS: dict[str, list[str]] = {
    "fedavg": ["--model", "mlp:hidden=200x100", "--rounds", "8", "--set", "steps=5", "--set", "batch=32"],
    "gist": ["--rounds", "1"],
}


def exchanges(ledger: Path) -> dict[int, int]:
    """How many there were in each round."""
    with ledger.open(newline="", encoding="utf-8") as file:
        seen = {(int(row["round"]), row["exchange"]) for row in csv.DictReader(file) if row["phase"] == "round"}
    return {round: sum(at == round for at, _ in seen) for round, _ in seen}


def server_memory() -> int:
    """Bytes of the server's processes, all of which are of this machine's only federation."""
    total = 0
    for process in Path("/proc").glob("[0-9]*"):
        try:
            command = (process / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            if "app.server" in command or "listener server" in command or "federation start" in command:
                total += int((process / "smaps_rollup").read_text().split("Pss:", 1)[1].split()[0]) * 1024
        except (OSError, IndexError):
            continue
    return total


def across_processes(method: str, sites: int, port: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run"
        command = [sys.executable, "-m", "fedgist", "federation", "sim", str(Path(folder) / "federation"), method]
        command += [
            *JOBS[method],
            "--dataset",
            "mnist5k",
            "--sites",
            str(sites),
            "--port",
            str(port),
            "--out",
            str(out),
        ]
        process, most = subprocess.Popen([*command, "-q"], stdout=subprocess.DEVNULL), 0
        while process.poll() is None:
            most = max(most, server_memory())
            time.sleep(0.5)
        if process.returncode:
            raise SystemExit(f"{' '.join(command)} ended with {process.returncode}")
        return {**seconds(out), "server_mb": round(most / 1e6)}


def seconds(out: Path) -> dict[str, Any]:
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text("utf-8").splitlines()]
    count = exchanges(out / "ledger.csv")
    each = [row["seconds"] / count[row["round"]] for row in rows if row["round"] in count]
    sent = rows[-1]["bytes_up"] / sum(count.values())
    return {
        "exchanges": sum(count.values()),
        "s_an_exchange": round(statistics.median(each[1:] or each), 3),
        "first_s": round(each[0], 3),
        "mb_up_an_exchange": round(sent / 1e6, 2),
        "accuracy": rows[-1]["accuracy"],
    }


def in_one_process(method: str, hosts: int) -> dict[str, Any]:
    """The server's engine and the hosts of sites, with bytes in between; no network and no other process."""
    from fedgist import methods
    from fedgist.engines import executor
    from fedgist.experiments import config as configs
    from fedgist.experiments import runner
    from fedgist.experiments.inputs import from_dataset
    from fedgist.federation.protocol.policy import opened
    from fedgist.federation.protocol.remote_engine import RemoteEngine
    from fedgist.federation.protocol.site_host import SiteHost
    from fedgist.federation.sim import TRIAL

    given = dict(zip(JOBS[method][::2], JOBS[method][1::2], strict=True))
    pairs = [
        text.split("=", 1) for flag, text in zip(JOBS[method][::2], JOBS[method][1::2], strict=True) if flag == "--set"
    ]
    layer = {flag[2:]: text for flag, text in given.items() if flag != "--set"} | dict(pairs)
    named = {"method": method, "dataset": "mnist5k", "clients": hosts, "partition": "iid", "device": "cpu"}
    config = configs.resolve({**named, **layer, "engine": "sequential"})
    inputs = from_dataset(config)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

    class Transport:
        def exchange(self, requests: Any, timeout: float, enough: int) -> Any:
            return {id: sites[id].handle(data) for id, data in requests.items()}

    with tempfile.TemporaryDirectory() as folder:
        rules = opened(methods.find(method)(config.options, inputs.task), TRIAL)

        def host(id: str) -> SiteHost:
            def prepare(start: Any) -> Any:
                return methods.find(method)(config.options, inputs.task), inputs.sites[id]

            return SiteHost(id, Path(folder) / id, prepare, executor("sequential"), rules)

        sites = {id: host(id) for id in inputs.sites}

        def make(method: Any, inputs: Any, config: Any, executor: Any) -> Any:
            return RemoteEngine(method, Transport(), inputs.info, seed=config.seed, executor=executor)

        began = time.process_time()
        runner.run(config, Path(folder) / "run", load=lambda _: inputs, engine=make)
        spent, most = time.process_time() - began, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        found = seconds(Path(folder) / "run")
        cpu = round(spent / found["exchanges"], 3)  # with evaluations, and with the clients' own work
        return {**found, "cpu_s_an_exchange": cpu, "process_mb": round((most - before) / 1024)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sites", type=int, default=0, help="NVFlare sites, each with processes of its own")
    parser.add_argument("--hosts", type=int, default=0, help="hosts of sites in one process")
    parser.add_argument("--methods", nargs="+", default=list(JOBS), choices=list(JOBS))
    parser.add_argument("--port", type=int, default=8102)
    parser.add_argument("--one", help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(in_one_process(options.one, options.hosts)))
        return
    known = json.loads(options.out.read_text("utf-8"))["results"] if options.out and options.out.is_file() else []
    done = {(row["method"], row["how"]): row for row in known}
    for number, method in enumerate(options.methods):
        if options.sites:
            how, found = f"{options.sites} sites", across_processes(method, options.sites, options.port + 10 * number)
        else:
            command = [sys.executable, __file__, "--one", method, "--hosts", str(options.hosts)]
            said = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
            how, found = f"{options.hosts} hosts", json.loads(said.splitlines()[-1])
        done[method, how] = {"method": method, "how": how, "command": " ".join(["python", *sys.argv]), **found}
        print(done[method, how], flush=True)
        if options.out:
            about = {"cores": os.cpu_count(), "results": list(done.values())}
            options.out.write_text(json.dumps(about, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()
