"""The folder of a run: what lies where, written so that a killed process leaves nothing half done.

`metrics.jsonl` grows by one line a round, and a checkpoint says how long it was, so that a resumed run cuts off what
came after. `result.json` comes last: it says "finished". All other files appear whole.
"""

import dataclasses
import json
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from fedgist import storage
from fedgist.core.errors import FedgistError
from fedgist.experiments import config as configs
from fedgist.experiments.config import RunConfig
from fedgist.storage import replacing

KEPT_CHECKPOINTS = 2  # the last, and the one before it in case the last cannot be read


class RunFolder:
    """One run on disk."""

    def __init__(self, path: str | Path):
        self.path = Path(path)
        self.config = self.path / "config.toml"
        self.environment = self.path / "env.json"
        self.method = self.path / "method.json"
        self.partition = self.path / "partition.json"
        self.indices = self.path / "partition.npz"
        self.metrics = self.path / "metrics.jsonl"
        self.ledger = self.path / "ledger.csv"
        self.checkpoints = self.path / "checkpoint"
        self.artifacts = self.path / "artifacts"
        self.shown = self.path / "artifacts" / "shown"
        self.transcript = self.path / "artifacts" / "transcript"
        self.state = self.path / "artifacts" / "state.safetensors"
        self.privacy = self.path / "privacy"
        """A book of releases for each client's data, in a private run."""
        self.result = self.path / "result.json"
        self.standardisation = self.path / "standardisation.json"
        self.fairness = self.path / "fairness.json"
        self.report = self.path / "report.html"
        self.plotly = self.path / "plotly.min.js"
        self.model = self.path / "model"
        """Without .safetensors and .json."""
        self.clients = self.path / "clients"
        self.card = self.path / "MODEL_CARD.md"
        self.tensorboard = self.path / "tensorboard"

    @property
    def started(self) -> bool:
        return self.config.is_file()

    @property
    def finished(self) -> bool:
        return self.result.is_file()

    def configuration(self) -> RunConfig:
        """That of its run."""
        return configs.resolve(configs.load(self.config))

    def check_free(self, resume: bool) -> None:
        """Refuses a folder that has a run already, unless that is to go on."""
        if self.started and not resume:
            what = "a finished run; show it with" if self.finished else "an unfinished run; go on with"
            raise FedgistError(
                f"{self.path} holds {what} --resume, make it anew with --overwrite, or choose another folder with --out"
            )

    def reopen(self, rounds: int, whole: bool) -> None:
        """Makes a run that ended after `rounds` one that can go on.

        What only its last round did, `whole` being false, is done no more: it goes on from the checkpoint before.
        """
        self.result.unlink(missing_ok=True)
        if not whole:
            self._checkpoint(rounds).unlink(missing_ok=True)

    def check_method(self, file: Path) -> None:
        """Refuses to go on with a method whose file has changed: half of the result would be another method's."""
        before = read_json(self.method).get("sha256") if self.method.is_file() else None
        if before not in (None, storage.file_digest(file)):
            raise FedgistError(
                f"{self.path} was begun with another version of {file}: put that back, make the run anew with "
                f"--overwrite, or delete {self.method} to go on all the same"
            )

    def open(
        self, config: str, partition: Any, parts: Mapping[str, np.ndarray] | None, environment: Any, method: Any
    ) -> Any:
        """Makes the folder, or finds the last checkpoint in it, and cuts off what was written after that."""
        self._create(config)
        if self.partition.is_file() and read_json(self.partition) != partition:
            raise FedgistError(f"{self.path} was begun with other data: its partition.json does not match")
        write_json(self.partition, partition, indent=None)
        if parts is not None:
            sizes, indices = [len(part) for part in parts.values()], np.concatenate([*parts.values()])
            with (
                replacing(self.indices) as draft,
                draft.open("wb") as file,
            ):  # few arrays: a file for each client is slow
                np.savez_compressed(file, clients=np.array([*parts]), sizes=np.array(sizes), indices=indices)
        write_json(self.environment, environment)
        write_json(self.method, method)
        saved = self.last_checkpoint()
        with self.metrics.open("ab") as file:
            file.truncate(0 if saved is None else saved["metrics"])
        return saved

    def _create(self, config: str) -> None:
        """The folder, with what runs in it; one that holds other things is refused."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            if not self.started and any(not path.name.startswith(".") for path in self.path.iterdir()):
                raise FedgistError(f"{self.path} is neither empty nor a run; choose another folder with --out")
            write_text(self.config, config)
            self.checkpoints.mkdir(exist_ok=True)
            self.artifacts.mkdir(exist_ok=True)
        except OSError as error:
            why = "it is a file" if self.path.is_file() else error.strerror
            raise FedgistError(f"cannot make the folder {self.path}: {why}; choose another with --out") from error

    def discard(self) -> None:
        """Takes the run away, unless something else lies in its folder."""
        if not self.others():
            shutil.rmtree(self.path)

    def others(self) -> list[str]:
        """What lies in the folder that no run puts there."""
        own = {path.relative_to(self.path).parts[0] for path in vars(self).values() if path != self.path}
        own |= {f"{self.model.name}{suffix}" for suffix in (".safetensors", ".json")}
        return sorted({path.name for path in self.path.iterdir()} - own)

    def clear(self) -> None:
        """Takes away the run that is here, if any; a folder that holds anything else stays as it is."""
        if self.path.is_dir() and (others := self.others()):
            raise FedgistError(f"{self.path} holds more than a run ({', '.join(others)}): take that away yourself")
        if self.started:
            shutil.rmtree(self.path)

    def exhibits(self, round: int) -> Path:
        """What the round showed, where it was kept."""
        return self.shown / f"round-{round:06d}.safetensors"

    def _checkpoint(self, round: int) -> Path:
        return self.checkpoints / f"round-{round:06d}.safetensors"

    def checkpoint_files(self) -> list[Path]:
        """Those that there are, the newest first."""
        return sorted(self.checkpoints.glob("round-*.safetensors"), reverse=True)

    def rounds_kept(self) -> int:
        """The round of the newest checkpoint."""
        return max((_round(path) for path in self.checkpoint_files()), default=0)

    def save_checkpoint(self, round: int, engine: Any, ledger: Any) -> None:
        """All that going on needs. The rows and the ledger are on disk before; how long they are goes in here."""
        for path in (self.metrics, self.ledger):
            storage.sync(path)
        kept = {"engine": engine, "ledger": json.dumps(ledger), "metrics": self.metrics.stat().st_size}
        storage.save(kept, self._checkpoint(round))
        drafts = self.checkpoints.glob(".round-*")  # of a process that was killed
        files = self.checkpoint_files()
        oldest = _round(files[:KEPT_CHECKPOINTS][-1])
        logs = sorted(self.checkpoints.glob("states-*.log"), reverse=True)  # each named by the round it begins after
        unused = [log for log, later in zip(logs[1:], logs, strict=False) if _round(later) <= oldest]
        for path in [*files[KEPT_CHECKPOINTS:], *drafts, *unused]:
            path.unlink()

    def last_checkpoint(self) -> Any:
        """The newest checkpoint that can be read and whose rows are all there; None begins anew."""
        for path in self.checkpoint_files():
            try:
                saved = storage.load(path)
                saved["ledger"] = json.loads(saved["ledger"])
                wanted = {self.metrics: saved["metrics"], self.ledger: saved["ledger"]["bytes"]}
                if "log" in saved["engine"]:
                    wanted[self.checkpoints / saved["engine"]["log"]] = saved["engine"]["log bytes"]
                whole = all(file.stat().st_size >= size for file, size in wanted.items())
            except (OSError, ValueError, KeyError, TypeError):
                continue  # cut short by a loss of power: the one before it is whole
            if whole:
                return saved
        return None

    def append(self, row: Mapping[str, Any]) -> None:
        """One more row of metrics.jsonl."""
        with self.metrics.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")

    def rows(self) -> list[dict[str, Any]]:
        """The rows of metrics.jsonl, one a round."""
        if not self.metrics.is_file():
            return []
        lines = self.metrics.read_text(encoding="utf-8").splitlines(keepends=True)
        return [json.loads(line) for line in lines if line.endswith("\n")]  # a killed run may leave half a line


def _round(path: Path) -> int:
    """The round that a file's name ends with."""
    return int(path.stem.rpartition("-")[2])


def write_text(path: Path, text: str) -> None:
    storage.write(path, text.encode())


def write_json(path: Path, value: Any, indent: int | None = 1) -> None:
    write_text(path, json.dumps(value, indent=indent, ensure_ascii=False, allow_nan=False) + "\n")


def read_json(path: Path) -> Any:
    if not path.is_file():
        raise FedgistError(f"there is no {path.name} in {path.parent}: it is not the folder of a run")
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:  # also what is no UTF-8
        raise FedgistError(f"{path} is damaged ({error}); make the run again in another folder") from error


def run_folders(path: str | Path) -> list[RunFolder]:
    """The run in `path`, or the runs in the folders below it (several seeds, a comparison)."""

    def found(at: Path) -> Iterator[RunFolder]:
        if (at / "config.toml").is_file():
            yield RunFolder(at)
        else:
            for below in sorted(at.iterdir() if at.is_dir() else ()):
                if below.is_dir():
                    yield from found(below)

    runs = list(found(Path(path)))
    if not runs:
        raise FedgistError(f"there is no run in {path}: no folder with a config.toml")
    return runs


def free_folder(parent: str | Path, name: str) -> Path:
    """The first of NAME-1, NAME-2, … that does not exist yet."""
    number = 1
    while (Path(parent) / f"{name}-{number}").exists():
        number += 1
    return Path(parent) / f"{name}-{number}"


def run_name(config: RunConfig) -> str:
    """METHOD-DATASET-SEED-HASH of a configuration that is prepared: what really runs names the run."""
    seed = str(config.seed) if config.seeds == 1 else f"{config.seed}to{config.seed + config.seeds - 1}"
    return f"{config.method}-{config.dataset}-{seed}-{configs.digest(config)}"


def default_folder(config: RunConfig) -> Path:
    """Where a prepared configuration runs if nobody says otherwise; several seeds share a folder."""
    return Path("runs") / run_name(config)


def each_seed(config: RunConfig, out: Path) -> list[tuple[RunConfig, Path]]:
    """The runs of a configuration with several seeds, each with its folder."""
    if config.seeds == 1:
        return [(config, out)]
    seeds = range(config.seed, config.seed + config.seeds)
    return [(dataclasses.replace(config, seed=seed, seeds=1), out / f"seed-{seed}") for seed in seeds]
