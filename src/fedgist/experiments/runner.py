"""Runs a configuration: builds the federation, runs its rounds, writes the folder, resumes a killed run exactly."""

import dataclasses
import inspect
import json
import logging
import math
import os
import platform
import shlex
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

import fedgist
from fedgist import engines, methods
from fedgist.core import tree
from fedgist.core.errors import FedgistError, unknown
from fedgist.core.files import replacing
from fedgist.core.federation import SERVER, TooFewAnswers
from fedgist.core.ledger import Ledger
from fedgist.core.method import Method, who_sees_what
from fedgist.core.rng import Rng
from fedgist.data import topologies
from fedgist.engines.engine import Engine, RoundReport
from fedgist.engines.local import LocalEngine, run_rounds
from fedgist.engines.scheduler import Executor
from fedgist.experiments import artifacts
from fedgist.experiments import config as configs
from fedgist.experiments import inputs as sources
from fedgist.experiments.config import OWN, RunConfig
from fedgist.experiments.folder import RunFolder, read_json, write_json
from fedgist.experiments.inputs import Inputs
from fedgist.experiments.progress import Progress, Silent

log = logging.getLogger("fedgist")

LIBRARIES = ("numpy", "safetensors", "scikit-learn", "typer", "rich")


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


class Interrupted(KeyboardInterrupt):
    """Ctrl-C: what is kept, and how to go on."""

    def __init__(self, kept: str, again: str):
        super().__init__(f"{kept}; go on with {again}" if again else kept)
        self.kept = kept


def prepare(config: RunConfig) -> RunConfig:
    """The configuration with `auto` replaced by what this machine has, so that the folder says what really ran."""
    device = engines.find_device(config.device)
    if config.engine not in ("auto", *engines.NAMES):
        raise unknown("engine", config.engine, ("auto", *engines.NAMES))
    engine = _fitting_engine(config, device.type) if config.engine == "auto" else config.engine
    return dataclasses.replace(config, device=str(device), engine=engine)


def _fitting_engine(config: RunConfig, device: str) -> str:
    """By device and model, not by timing: what `measured` picks, and so the last digit, may differ from run to run."""
    nets = config.architectures or (config.model,)
    small = all(net.partition(":")[0] in ("mlp", "cnn") for net in nets)
    return "stacked" if device == "cuda" or small else "threaded"


def run(
    config: RunConfig,
    out: str | Path | None = None,
    resume: bool = False,
    inputs: Inputs | None = None,
    progress: Progress | None = None,
    engine: "Maker | None" = None,
) -> Result:
    """One run with one seed; without `out` nothing is written. `resume` continues the run in `out`, if any.

    `engine` makes what runs it; without it, a federation in this process.
    """
    config = dataclasses.replace(prepare(config), seeds=1)
    folder = None if out is None else RunFolder(out)
    if folder is not None and folder.started:
        _check_again(folder, config, resume)
        if folder.finished:
            return load_result(folder)
    inputs = inputs or sources.from_dataset(config)
    return _Run(config, inputs, folder, progress or Silent(), engine or in_process).go()


def run_together(runs: Sequence[tuple[RunConfig, Path]]) -> list[Result]:
    """Several seeds of a configuration, round by round together, so that an engine that stacks may stack them too.

    Each goes on from its last checkpoint; those that are behind catch up first.
    """
    prepared = [(dataclasses.replace(prepare(config), seeds=1), RunFolder(out)) for config, out in runs]
    for config, folder in prepared:
        if folder.started:
            _check_again(folder, config, resume=True)
    first = prepared[0][0]
    executor = engines.executor(first.engine, first.device, tf32=first.tf32)
    begun = [
        _Run(config, sources.from_dataset(config), folder, Silent(), in_process, executor)
        for config, folder in prepared
        if not folder.finished
    ]
    with ExitStack() as stack:
        for one in begun:
            stack.enter_context(one.under_way())
        while unfinished := [one for one in begun if one.left]:
            most = max(one.left for one in unfinished)
            some = [one for one in unfinished if one.left == most]
            start = time.perf_counter()
            reports = run_rounds([cast(LocalEngine, one.engine) for one in some])
            seconds = (time.perf_counter() - start) / len(some)
            for one, report in zip(some, reports, strict=True):
                one.keep(report, seconds)
        for one in begun:
            one.finish()
    return [load_result(folder) for _, folder in prepared]


def default_folder(config: RunConfig) -> Path:
    """runs/METHOD-DATASET-SEED-HASH; several seeds share a folder, in which each has its own."""
    config = prepare(config)
    seed = str(config.seed) if config.seeds == 1 else f"{config.seed}to{config.seed + config.seeds - 1}"
    return Path("runs") / f"{config.method}-{config.dataset}-{seed}-{configs.digest(config)}"


def each_seed(config: RunConfig, out: Path) -> list[tuple[RunConfig, Path]]:
    """The runs of a configuration with several seeds, each with its folder."""
    if config.seeds == 1:
        return [(config, out)]
    seeds = range(config.seed, config.seed + config.seeds)
    return [(dataclasses.replace(config, seed=seed, seeds=1), out / f"seed-{seed}") for seed in seeds]


def load_result(folder: RunFolder) -> Result:
    """The result of a finished run."""
    saved = read_json(folder.result)
    names = ("method", "accuracy", "accuracy_max", "accuracy_best5", "bytes_up", "bytes_down", "seconds")
    known = {name: saved[name] for name in names}
    return Result(**known, metrics=folder.rows(), folder=folder.path, **tree.load(folder.state))


def check_free(folder: RunFolder, resume: bool) -> None:
    """Refuses a folder that has a run already, unless that is to go on."""
    if folder.started and not resume:
        what = "a finished run; show it with" if folder.finished else "an unfinished run; go on with"
        raise FedgistError(f"{folder.path} holds {what} --resume, or choose another folder with --out")


def _check_again(folder: RunFolder, config: RunConfig, resume: bool) -> None:
    """Whether a run may go on in a folder that has one already."""
    check_free(folder, resume)
    before = configs.resolve(configs.load(folder.config))
    if changed := configs.differences(before, config):
        changes = "; ".join(changed)
        raise FedgistError(f"{folder.path} was begun with another configuration: {changes}; --out names another folder")


class _Run:
    """One run under way."""

    def __init__(
        self,
        config: RunConfig,
        inputs: Inputs,
        folder: RunFolder | None,
        progress: Progress,
        make: "Maker",
        executor: Executor | None = None,
    ):
        self.config, self.inputs, self.folder, self.progress = config, inputs, folder, progress
        self.rows: list[dict[str, Any]] = []
        self.title, self.sound = f"{config.method}, {config.dataset}, seed {config.seed}", True
        self.method = methods.find(config.method)(config.options, inputs.task)
        self.executor = executor = executor or engines.executor(config.engine, config.device, tf32=config.tf32)
        self.test = executor.place.put(inputs.test)
        self.engine = make(self.method, inputs, config, executor)

    def go(self) -> Result:
        with self.under_way():
            while self.left:
                start = time.perf_counter()
                report = self.engine.run_round()
                self.keep(report, time.perf_counter() - start)
            return self.finish()

    @property
    def left(self) -> int:
        """Rounds to go."""
        return self.config.rounds - self.engine.rounds_done

    @contextmanager
    def under_way(self) -> Iterator[None]:
        """The folder, the ledger and the state as the last checkpoint left them; what stops the run is explained."""
        # Only now, when most of what the user may have got wrong has been built, does the folder come to be.
        new = self.folder is not None and not self.folder.started
        saved = None if self.folder is None else self._open(self.folder)
        try:
            with closing(self._ledger(saved)) as self.engine.ledger:
                if saved is not None:
                    self.engine.restore(saved["engine"])
                    self._picked().update(json.loads(saved["picked"]))
                self._warn_of_empty_clients()
                self.progress.start(self.title, self.engine.rounds_done, self.config.rounds)
                try:
                    yield
                finally:
                    self.progress.stop()
        except KeyboardInterrupt:
            raise self._interrupted() from None
        except Exception:
            if self.folder is not None and new and not self.rows:
                self.folder.discard()  # what only a round finds wrong, as too little memory: mended, the command works
            raise

    def keep(self, report: RoundReport, seconds: float) -> None:
        """Writes down a finished round."""
        done, last = self.engine.rounds_done, self.engine.rounds_done == self.config.rounds
        if self.folder is not None and artifacts.due(done, self.config.rounds, self.config.artifacts_every):
            artifacts.save(report.shown, self.inputs.task, self.folder.exhibits(done))
        row: dict[str, Any] = {
            "round": done,
            "seconds": round(seconds, 6),
            "answered": report.answered,
            "skipped": report.skipped,
        }
        row |= {"missing": dict(report.missing)} if report.missing else {}
        if last or (self.config.eval_every and done % self.config.eval_every == 0):
            row |= self._evaluate()
            self._warn_of_divergence()
        totals = self.engine.ledger.totals()
        row |= {"bytes_up": totals.bytes_up, "bytes_down": totals.bytes_down}
        self.rows.append(row)
        if self.folder is not None:
            with self.folder.metrics.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
            if last or done % self.config.checkpoint_every == 0:
                self._checkpoint(self.folder)
        self.progress.round(row)

    def _evaluate(self) -> dict[str, Any]:
        try:
            found = self.engine.evaluate(self.test)
        except TooFewAnswers as missing:  # models that clients hold cannot be judged while the clients are away
            return {"unevaluated": str(missing)}
        # JSON has no NaN: a row with one could not be read by others, nor drawn by a browser.
        return {name: value if math.isfinite(value) else None for name, value in found.items()}

    def _warn_of_empty_clients(self) -> None:
        clients, split = self.inputs.sites.values(), f"{self.config.dataset}, seed {self.config.seed}"
        if empty := sum(client.n == 0 for client in clients):
            log.warning(
                f"{split}: {empty} of {len(clients)} clients hold no data, so that nothing is learned from them; "
                "if that is not meant, choose fewer clients or another partition"
            )

    def _warn_of_divergence(self) -> None:
        """Once: the accuracy alone would look like that of a model that guesses."""
        if self.sound and (diverged := self.engine.diverged()):
            self.sound = False
            clients, done = len(set(diverged) - {SERVER}), self.engine.rounds_done
            holders = ["the server"] * (SERVER in diverged) + [f"{clients} of the clients"] * (clients > 0)
            log.warning(
                f"{self.title}: what {' and '.join(holders)} learned up to round {done} is not finite (NaN or "
                "infinity), so that no result from here on means anything; a smaller lr helps most often"
            )

    def _checkpoint(self, folder: RunFolder) -> None:
        """All that going on needs. The rows and the ledger are on disk already; how long they are goes in here."""
        kept = {
            "engine": self.engine.snapshot(),
            "ledger": json.dumps(self.engine.ledger.position()),
            "metrics": folder.metrics.stat().st_size,
            "picked": json.dumps(self._picked()),
        }
        tree.save(kept, folder.checkpoint(self.engine.rounds_done))
        folder.drop_old_checkpoints()

    def _picked(self) -> dict[str, str]:
        """What the engine that measures has picked so far; to be followed when the run goes on."""
        return getattr(self.executor, "picked", {})

    def _open(self, folder: RunFolder) -> Any:
        """Makes the folder, or finds the last checkpoint in it and cuts off what was written after."""
        folder.create(configs.dump(self.config))
        held = {
            "clients": self.inputs.counts,
            "classes": self.inputs.task.classes,
            "sha256": self.inputs.sha256,
        }
        if folder.partition.is_file() and read_json(folder.partition) != held:
            raise FedgistError(f"{folder.path} was begun with other data: its partition.json does not match")
        write_json(folder.partition, held, indent=None)
        if self.inputs.parts is not None:
            _write_indices(folder.indices, self.inputs.parts)
        write_json(folder.environment, environment(self.config.device))
        write_json(folder.method, _about(self.method))
        saved = _last_checkpoint(folder)
        length = 0 if saved is None else saved["metrics"]
        with folder.metrics.open("ab") as file:
            file.truncate(length)
        self.rows = folder.rows()
        return saved

    def _ledger(self, saved: Any) -> Ledger:
        if self.folder is None:
            return Ledger()
        name = f"{self.config.method}-{self.config.dataset}-{self.config.seed}-{configs.digest(self.config)}"
        position = None if saved is None else json.loads(saved["ledger"])
        return Ledger(self.folder.ledger, name, self.config.record, self.folder.transcript, position)

    def finish(self) -> Result:
        accuracies = [row["accuracy"] for row in self.rows if "accuracy" in row]
        if not accuracies:
            raise FedgistError("no evaluation got an answer from the clients; make offline smaller or rounds more")
        totals = self.engine.ledger.totals()
        summary = {
            "method": self.config.method,
            "accuracy": accuracies[-1],
            "accuracy_max": max(accuracies),
            "accuracy_best5": statistics.fmean(sorted(accuracies)[-5:]),
            "bytes_up": totals.bytes_up,
            "bytes_down": totals.bytes_down,
            "seconds": round(sum(row["seconds"] for row in self.rows), 3),
        }
        state = tree.to(self.engine.state, "cpu")
        weights = self.method.weights(state)
        if self.folder is None:
            return Result(**summary, metrics=self.rows, folder=None, state=state, weights=weights)
        tree.save({"state": state, "weights": weights}, self.folder.state)
        more = {
            "dataset": self.config.dataset,
            "seed": self.config.seed,
            "rounds": self.config.rounds,
            **dataclasses.asdict(totals),
            "state_sha256": self.engine.digest(),
            "citation": self.method.citation,
            "picked": self._picked(),
        }
        write_json(self.folder.result, {**more, **summary})
        return load_result(self.folder)

    def _interrupted(self) -> Interrupted:
        if self.folder is None:
            return Interrupted("stopped; nothing is kept, for there is no folder", "")
        kept = f"stopped; {self.folder.rounds_kept()} of {self.config.rounds} rounds are kept"
        if OWN in (self.config.dataset, self.config.model):
            return Interrupted(kept, "the same call and resume=True")
        return Interrupted(kept, f"fedgist run --resume --out {shlex.quote(str(self.folder.path))}")


Maker = Callable[[Method, Inputs, RunConfig, Executor], Engine]
"""What makes the engine of a run."""


def in_process(method: Method, inputs: Inputs, config: RunConfig, executor: Executor) -> Engine:
    """All clients here, in one process."""
    return LocalEngine(
        method,
        inputs.sites,
        seed=config.seed,
        executor=executor,
        info=inputs.info,
        offline=config.offline,
        delay=config.delay,
        topology=_topology(config, inputs),
    )


def _topology(config: RunConfig, inputs: Inputs) -> topologies.Graph | None:
    if config.topology is None:
        return None
    return topologies.build(config.topology, sorted(inputs.sites), Rng(config.seed))


def _last_checkpoint(folder: RunFolder) -> Any:
    """The newest checkpoint that can be read and whose rows are all there; None begins anew."""
    for path in folder.checkpoint_files():
        try:
            saved = tree.load(path)
            wanted = saved["metrics"], json.loads(saved["ledger"])["bytes"]
            there = folder.metrics.stat().st_size, folder.ledger.stat().st_size
        except (OSError, ValueError, KeyError, TypeError):
            continue  # cut short by a loss of power: the one before it is whole
        if there[0] >= wanted[0] and there[1] >= wanted[1]:
            return saved
    return None


def _write_indices(path: Path, parts: dict[str, np.ndarray]) -> None:
    with replacing(path) as draft, draft.open("wb") as file:
        np.savez_compressed(file, **parts)  # type: ignore[arg-type]


def _about(method: Method) -> dict[str, Any]:
    """What a reader of the folder wants to know about the method as it was configured: who sees what, above all."""
    sees = [dict(zip(("request", "reply", "field", "additive"), row, strict=True)) for row in who_sees_what(method)]
    says = {handler.reply.__name__: inspect.getdoc(handler.reply) for handler in method.handlers.values()}
    about = {"name": method.name, "summary": method.summary, "citation": method.citation}
    return {**about, "sees": sees, "replies": says}


def environment(device: str) -> dict[str, Any]:
    """What the numbers may depend on besides the configuration."""
    gpu = torch.device(device).type == "cuda"
    return {
        "fedgist": fedgist.__version__,
        "python": platform.python_version(),
        "platform": f"{platform.system()} {platform.machine()}",
        "libraries": {"torch": str(torch.__version__)} | {name: metadata.version(name) for name in LIBRARIES},
        "device": torch.cuda.get_device_name(device) if gpu else "cpu",
        "cuda": torch.version.cuda if gpu else None,
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
    }
