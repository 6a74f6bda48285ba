"""What came out of a run: a summary of its rows, the state that it ended in, and both as they lie in its folder."""

import dataclasses
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from fedgist import storage
from fedgist.core.errors import FedgistError
from fedgist.core.federation import SERVER
from fedgist.experiments import trained
from fedgist.experiments.folder import RunFolder, read_json, write_json
from fedgist.experiments.trained import Trained


@dataclass(frozen=True)
class Result:
    """What a run gave."""

    method: str
    accuracy: float
    """Test accuracy after the last round."""
    accuracy_max: float
    accuracy_best5: float
    """Mean of the five best evaluations, or of all where there are fewer."""
    bytes_up: int
    """What the clients sent in all, as encoded on the wire, evaluation not counted."""
    bytes_down: int
    seconds: float
    """Wall time of the rounds, evaluation not counted."""
    metrics: list[dict[str, Any]] = dataclasses.field(repr=False)
    """One row a round."""
    folder: Path | None
    state: Any = dataclasses.field(repr=False)
    """The server's state: a tree of tensors, on the CPU."""
    weights: dict[str, Tensor] | None = dataclasses.field(repr=False)
    """The server's model, where the method has one: load it with `module.load_state_dict(weights, strict=False)`."""
    trained: Mapping[str, Trained] = dataclasses.field(repr=False, default_factory=dict)
    """The models, where they cannot be read back from the folder."""

    @cached_property
    def model(self) -> nn.Module:
        """The server's model as a module in eval mode; where there is but one client, that client's."""
        found = self._models()
        return self._open(trained.choose(found, None, "this run"))

    @cached_property
    def client_models(self) -> dict[str, nn.Module]:
        """The models that clients keep, by their names; where only the server has one, nobody's."""
        return {name: self._open(found) for name, found in self._models().items() if name != SERVER}

    def _models(self) -> Mapping[str, Trained | Path]:
        if found := self.trained or (trained.stems(self.folder) if self.folder else {}):
            return found
        raise FedgistError("this run left no model here: `fedgist site export` writes one that a site keeps")

    def _open(self, found: Trained | Path) -> nn.Module:
        return found.module() if isinstance(found, Trained) else trained.read(found)[0]


SUMMARY = ("method", "accuracy", "accuracy_max", "accuracy_best5", "bytes_up", "bytes_down", "seconds")


def best_five(values: Sequence[float]) -> list[float]:
    """The five best evaluations, or all where there are fewer, the best last."""
    return sorted(values)[-5:]


def summarise(
    method: str, rows: list[dict[str, Any]], state: Any, weights: dict[str, Tensor] | None, folder: Path | None
) -> Result:
    """The result of a run from its rows and the state that it ended in."""
    accuracies = [row["accuracy"] for row in rows if row.get("accuracy") is not None]  # None: it was not a number
    if not accuracies:
        raise FedgistError(
            "no evaluation gave a number, because no client answered or what was learned is not finite; --resume makes "
            "the last round and its evaluation again, more --rounds another one"
        )
    return Result(
        method,
        accuracy=accuracies[-1],
        accuracy_max=max(accuracies),
        accuracy_best5=statistics.fmean(best_five(accuracies)),
        bytes_up=rows[-1]["bytes_up"],
        bytes_down=rows[-1]["bytes_down"],
        seconds=round(sum(row["seconds"] for row in rows), 3),
        metrics=rows,
        folder=folder,
        state=state,
        weights=weights,
    )


def save(result: Result, folder: RunFolder, about: Mapping[str, Any]) -> None:
    """Writes what `load` reads, and what else there is to say about the run; with that, it is finished."""
    storage.save({"state": result.state, "weights": result.weights}, folder.state)
    write_json(folder.result, {**about, **{name: getattr(result, name) for name in SUMMARY}})


def load(folder: RunFolder) -> Result:
    """The result of a finished run."""
    saved = read_json(folder.result)
    known = {name: saved[name] for name in SUMMARY}
    return Result(**known, metrics=folder.rows(), folder=folder.path, **storage.load(folder.state))
