"""What is known of how long runs take here: counted from a few timed steps, and kept in the user's cache.

What has not been timed here is guessed from a reference that comes with the presets, by how fast this machine is.
"""

import hashlib
import json
import platform
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from fedgist.data.datasets import cache_folder
from fedgist.experiments.config import RunConfig
from fedgist.experiments.counting import Timed, calibration, estimate
from fedgist.experiments.folder import write_json
from fedgist.experiments.presets import HERE, HOW, chosen

REFERENCE = HERE / "estimates.json"
LONG = 3600  # seconds
CHEAP = ("tf32", "precision", "augmentation", "server_augmentation", "crop", "flip")  # the first two are for GPUs


def cost_key(config: RunConfig) -> str:
    """What an estimate depends on: whole numbers and names, not rates, weights, seeds or what hardly costs anything."""
    told = {key: value for key, value in chosen(config).items() if key not in (*HOW, *CHEAP)}
    lasting = {key: value for key, value in told.items() if not isinstance(value, float) or key in ("active", "alpha")}
    return hashlib.sha256(json.dumps(lasting, sort_keys=True).encode()).hexdigest()[:12]


class Estimates:
    """What is known of this machine, in the user's cache, and what can be guessed from another."""

    def __init__(self) -> None:
        self.path = cache_folder() / f"estimates-{machine()}.json"
        self.reference: dict[str, Any] = json.loads(REFERENCE.read_text("utf-8")) if REFERENCE.is_file() else {}
        self.known: dict[str, Any] = {"calibration": None, "seconds": {}}
        self.timed_steps = Timed()
        if self.path.is_file():
            with suppress(ValueError):
                self.known = json.loads(self.path.read_text("utf-8"))

    def get(self, config: RunConfig) -> float | None:
        """Seconds of one core: as timed here, else as timed on the reference machine, times how much slower this is."""
        key = cost_key(config)
        if key in self.known["seconds"]:
            return self.known["seconds"][key]
        elsewhere = self.reference.get("seconds", {}).get(key)
        return None if elsewhere is None else elsewhere * self.factor()

    def measure(self, config: RunConfig) -> float | None:
        """What is known, or what a few timed steps say."""
        key = cost_key(config)
        if key not in self.known["seconds"]:
            self.known["seconds"][key] = estimate(config, self.timed_steps)
            self._write()
        return self.known["seconds"][key]

    def quick(self, config: RunConfig) -> float | None:
        """As timed here, unless a run is so long that even a few of its steps would keep one waiting."""
        guess = self.get(config)
        if guess is not None and guess > LONG:
            return guess
        try:
            return self.measure(config)
        except Exception:  # whatever is wrong with an estimate, it is no reason not to run
            return guess

    def factor(self) -> float:
        """How many times as long as the reference machine this one takes."""
        if self.known["calibration"] is None:
            self.known["calibration"] = calibration()
            self._write()
        return float(self.known["calibration"] / self.reference["calibration"])

    def write_reference(self, configs: Iterable[RunConfig], path: Path) -> None:
        """Times all of these here, and writes what other machines guess from."""
        self.known["calibration"] = calibration()
        seconds = {cost_key(config): self.measure(config) for config in configs}
        kept = {key: None if value is None else round(value, 1) for key, value in sorted(seconds.items())}
        about = {"machine": processor(), "calibration": round(self.known["calibration"], 3)}
        write_json(path, {**about, "seconds": kept})

    def how(self) -> str:
        """Where the figures come from."""
        timed = "a few steps of each kind timed, the rest counted"
        if not self.reference or self.known["calibration"] is None:
            return timed
        return f"{timed}; long runs: on another machine ({self.reference['machine']}), times {self.factor():.2g} here"

    def _write(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        write_json(self.path, self.known)


def machine() -> str:
    """A name for machines that should be equally fast."""
    text = f"{platform.machine()} {processor()} {torch.__version__}"
    return hashlib.sha256(text.encode()).hexdigest()[:8]


def processor() -> str:
    with suppress(OSError), open("/proc/cpuinfo", encoding="utf-8") as file:
        for line in file:
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor()
