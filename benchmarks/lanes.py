"""Cells of the papers' tables side by side on one GPU, in the order of a list, in the time that there is.

    python benchmarks/lanes.py run benchmarks/evidence.toml --minutes 27 --out runs/lanes
    python benchmarks/lanes.py take runs/lanes/results.tgz --commit 1234abc

A lane is a process of `fedgist reproduce`, which leaves part of an H200 idle: five, with NVIDIA's MPS where it is
there, have 1.4 to 1.5 times the throughput of one. The list names cells with their seeds and the seconds that a seed of
one takes alone. What is published is passed over, what lacks its data set waits for it, and nothing is begun that would
hardly end in time. Results of every job lie in OUT/results, all of them in OUT/results.tgz after each; a run that
several presets show is in each. `take` adds them to what is published, and writes docs/reproduction.md anew; --commit
is that of the tree they were made from, where it had no history of its own. It may be given again, with what has come
since.
"""

import argparse
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedgist.data import inventory
from fedgist.experiments import presets, reproduction, reproduction_page
from fedgist.experiments.folder import write_json

DOCS = Path(__file__).parents[1] / "docs"
CROWDED = 2.0
"""How many times its seconds alone a job may take beside others."""


@dataclass(frozen=True)
class Job:
    """One cell, the seeds that it lacks, and the cells of other presets that the same runs make."""

    cells: tuple[tuple[str, str], ...]
    seeds: tuple[int, ...]
    seconds: float
    data: str

    def __str__(self) -> str:
        return f"{': '.join(self.cells[0])}, seeds {', '.join(map(str, self.seeds))}"

    def command(self, device: str, scale: str, out: Path) -> str:
        folder = "".join(c if c.isalnum() else "-" for c in str(self))
        where = ["--out", out / "runs" / folder, "--results", out / "results" / folder]
        how = ["--seeds", "".join(f"{seed}," for seed in self.seeds), "--scale", scale, "--device", device]
        once = ["--jobs", "1", "--together", "1", "--quiet"]
        calls = [
            [sys.executable, "-m", "fedgist", "reproduce", preset, "--only", cell, *how, *once, *where]
            for preset, cell in self.cells
        ]
        return " && ".join(shlex.join(map(str, call)) for call in calls)


def jobs(entry: dict[str, Any], known: dict[str, presets.Preset]) -> Iterator[Job]:
    """A job for each cell of an entry of the list that lacks seeds."""
    for words in entry["cells"]:
        preset = known[entry["preset"]]
        cells = [cell for cell in preset.cells if presets.matches(cell, words)]
        if len({cell.run for cell in cells}) != 1:
            sys.exit(f"{preset.name}: {words!r} names no run, or several: {[cell.name for cell in cells]}")
        run, published = cells[0].run, reproduction.load(preset, [DOCS / "results"]).get(cells[0].name)
        seeds = tuple(s for s in entry["seeds"] if published is None or str(s) not in published.numbers)
        if seeds:
            others = [(other.name, name) for other in known.values() for name in made_by(run, other)]
            named = {(preset.name, cell.name) for cell in cells}
            same = ((preset.name, words), *(one for one in others if one not in named))
            yield Job(same, seeds, entry["seconds"] * len(seeds), cells[0].config.dataset)


def made_by(run: str, preset: presets.Preset) -> list[str]:
    """The cells that a run makes, if their names name no other run."""
    names = [cell.name for cell in preset.cells if cell.run == run]
    return [name for name in names if {cell.run for cell in preset.cells if presets.matches(cell, name)} == {run}]


class Lanes:
    """The jobs under way, and what they left."""

    def __init__(self, out: Path, ends: float):
        self.out, self.ends = out, ends
        self.under_way: dict[subprocess.Popen[bytes], Job] = {}
        self.out.mkdir(parents=True, exist_ok=True)

    def note(self, words: str) -> None:
        line = f"{time.strftime('%H:%M:%S')} {self.ends - time.time():5.0f} s left  {words}"
        print(line, flush=True)
        with (self.out / "lanes.log").open("a", encoding="utf-8") as log:
            print(line, file=log)

    def begin(self, job: Job, command: str) -> None:
        with (self.out / "jobs.log").open("ab") as log:
            process = subprocess.Popen(command, shell=True, stdout=log, stderr=log, start_new_session=True)
        self.under_way[process] = job
        self.note(f"begun   {job}")

    def look(self) -> None:
        """Keep what has ended; after the time, stop what has not."""
        for process, job in [(process, job) for process, job in self.under_way.items() if process.poll() is not None]:
            del self.under_way[process]
            self.note(f"{'ended' if process.returncode == 0 else 'FAILED':7} {job}")
            if (self.out / "results").is_dir():
                with tarfile.open(self.out / "results.new", "w:gz") as kept:
                    kept.add(self.out / "results", "results")
                (self.out / "results.new").replace(self.out / "results.tgz")
        if time.time() > self.ends:
            self.stop()

    def stop(self) -> None:
        for process in self.under_way:
            os.killpg(process.pid, signal.SIGTERM)


def share_the_gpu(out: Path) -> None:
    """Start NVIDIA's MPS, where it is there."""
    if control := shutil.which("nvidia-cuda-mps-control"):
        for name in ("PIPE", "LOG"):
            folder = out / f"mps-{name.lower()}"
            folder.mkdir(exist_ok=True)
            os.environ[f"CUDA_MPS_{name}_DIRECTORY"] = str(folder)
        subprocess.run([control, "-d"], check=False)


def run(options: argparse.Namespace) -> None:
    known = presets.available(options.scale)
    entries = tomllib.loads(options.list.read_text("utf-8"))["cells"]
    waiting = [job for entry in entries for job in jobs(entry, known)]
    lanes = Lanes(options.out.resolve(), time.time() + 60 * options.minutes)
    lanes.note(f"{len(waiting)} jobs, {sum(job.seconds for job in waiting):.0f} s alone")
    if options.device.startswith("cuda"):
        share_the_gpu(lanes.out)
    try:
        while waiting or lanes.under_way:
            lanes.look()
            waiting = [job for job in waiting if time.time() + CROWDED * job.seconds < lanes.ends]
            ready = [job for job in waiting if job.data in inventory.readable()]
            for job in ready[: options.lanes - len(lanes.under_way)]:
                waiting.remove(job)
                lanes.begin(job, job.command(options.device, options.scale, lanes.out))
            time.sleep(1)
    finally:
        lanes.stop()
    lanes.note("done")


def take(options: argparse.Namespace) -> None:
    known = presets.available()
    with tempfile.TemporaryDirectory() as folder:
        with tarfile.open(options.results) as packed:
            packed.extractall(folder, filter="data")
        for path in sorted(Path(folder).glob("results/*/*.json")):
            content = json.loads(path.read_text("utf-8"))
            for cell in content["cells"].values():
                for origin in cell["made"]:
                    origin["commit"] = origin["commit"] or options.commit
            write_json(path, content)
            reproduction.add(known[content["preset"]], path.parent, DOCS / "results")
            print(f"{content['preset']}: {'; '.join(content['cells'])}")
    reproduction_page.write(DOCS / "reproduction.md", DOCS / "results")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    calls = parser.add_subparsers(required=True)
    made = calls.add_parser("run", help="make what a list names")
    made.add_argument("list", type=Path)
    made.add_argument("--minutes", type=float, required=True)
    made.add_argument("--out", type=Path, required=True)
    made.add_argument("--lanes", type=int, default=5)
    made.add_argument("--device", default="cuda")
    made.add_argument("--scale", default="full")
    made.set_defaults(call=run)
    taken = calls.add_parser("take", help="add what was made to what is published")
    taken.add_argument("results", type=Path)
    taken.add_argument("--commit", required=True)
    taken.set_defaults(call=take)
    options = parser.parse_args()
    options.call(options)


if __name__ == "__main__":
    main()
