"""The folder of a run: what lies where, written so that a killed process leaves nothing half done.

Whole files are written beside their place and moved there; `metrics.jsonl` grows by one line a round, and a checkpoint
says how long it was, so that a resumed run cuts off what came after. `result.json` comes last: it says "finished".
"""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fedgist.core.errors import FedgistError
from fedgist.core.files import replacing

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
        self.result = self.path / "result.json"
        self.report = self.path / "report.html"

    @property
    def started(self) -> bool:
        return self.config.is_file()

    @property
    def finished(self) -> bool:
        return self.result.is_file()

    def create(self, config: str) -> None:
        """Makes the folder and says in it what runs; one that holds other things is refused."""
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
        own = {path.relative_to(self.path).parts[0] for path in vars(self).values() if path != self.path}
        if {path.name for path in self.path.iterdir()} <= own:
            shutil.rmtree(self.path)

    def checkpoint(self, round: int) -> Path:
        return self.checkpoints / f"round-{round:06d}.safetensors"

    def exhibits(self, round: int) -> Path:
        """What the round showed, where it was kept."""
        return self.shown / f"round-{round:06d}.safetensors"

    def checkpoint_files(self) -> list[Path]:
        """Those that there are, the newest first."""
        return sorted(self.checkpoints.glob("round-*.safetensors"), reverse=True)

    def rounds_kept(self) -> int:
        """The round of the newest checkpoint."""
        return max((int(path.stem.removeprefix("round-")) for path in self.checkpoint_files()), default=0)

    def drop_old_checkpoints(self) -> None:
        for path in self.checkpoint_files()[KEPT_CHECKPOINTS:]:
            path.unlink()

    def rows(self) -> list[dict[str, Any]]:
        """The rows of metrics.jsonl, one a round."""
        if not self.metrics.is_file():
            return []
        lines = self.metrics.read_text(encoding="utf-8").splitlines(keepends=True)
        return [json.loads(line) for line in lines if line.endswith("\n")]  # a killed run may leave half a line


def write_text(path: Path, text: str) -> None:
    with replacing(path) as draft:
        draft.write_text(text, encoding="utf-8")


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
