"""Runs a configuration: builds the federation, runs its rounds, writes the folder, resumes a killed run exactly."""

import dataclasses
import errno
import math
import shlex
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

from fedgist import engines, methods
from fedgist.core import tree
from fedgist.core.errors import FedgistError, MixedModels
from fedgist.core.federation import TooFewAnswers
from fedgist.core.ledger import Ledger
from fedgist.core.method import Method
from fedgist.core.rng import Rng
from fedgist.data import topologies
from fedgist.engines.engine import Engine, RoundReport
from fedgist.engines.local import LocalEngine, run_rounds
from fedgist.engines.scheduler import Executor
from fedgist.experiments import (
    adversaries,
    artifacts,
    fairness,
    finishing,
    model_card,
    privacy,
    provenance,
    results,
    security,
    standardisation,
    trained,
)
from fedgist.experiments import config as configs
from fedgist.experiments import inputs as sources
from fedgist.experiments.config import OWN, RunConfig, is_own
from fedgist.experiments.engine_choice import fitting_engine
from fedgist.experiments.folder import RunFolder, run_name, write_json, write_text
from fedgist.experiments.inputs import Inputs
from fedgist.experiments.progress import Progress, Silent
from fedgist.experiments.results import Result
from fedgist.experiments.watch import Watch

Source = Callable[[RunConfig], Inputs]
"""What loads the data of a run, once its device is known."""
Maker = Callable[[Method, Inputs, RunConfig, Executor], Engine]
"""What makes the engine of a run."""


class Interrupted(KeyboardInterrupt):
    """Ctrl-C: what is kept, and how to go on."""

    def __init__(self, kept: str, again: str):
        super().__init__(f"{kept}; go on with {again}" if again else kept)
        self.kept = kept


def prepare(config: RunConfig, begun: RunFolder | None = None) -> RunConfig:
    """The configuration with `auto` replaced by what this machine has, noise that is left open by what the budget
    allows, and a file of links by what is in it, so that the folder says what really ran.

    A run that was `begun` keeps the engine that it began with, whatever another version would choose.
    """
    device = engines.find_device(config.device)
    engines.check_name(config.engine, ("auto", *engines.NAMES))
    engine = config.engine
    if engine == "auto":
        kept = begun is not None and begun.started and begun.configuration().engine
        engine = kept or fitting_engine(config)
    topology = config.topology and topologies.settled(config.topology)
    return privacy.planned(dataclasses.replace(config, device=str(device), engine=engine, topology=topology))


def in_process(method: Method, inputs: Inputs, config: RunConfig, executor: Executor) -> Engine:
    """All clients here, in one process."""
    ids, topology = sorted(inputs.sites), config.topology
    inner = adversaries.around(config, ids, security.in_process(config, ids))
    return LocalEngine(
        method,
        adversaries.sites(config, inputs.sites, inputs.task),
        seed=config.seed,
        executor=executor,
        info=inputs.info,
        offline=config.offline,
        delay=config.delay,
        topology=None if topology is None else topologies.over_time(topology, ids, Rng(config.seed)),
        layer=privacy.simulated(method, inputs, config, inner, executor.place.device),
    )


def run(
    config: RunConfig,
    out: str | Path | None = None,
    resume: bool = False,
    load: Source = sources.from_dataset,
    progress: Progress | None = None,
    engine: Maker = in_process,
    overwrite: bool = False,
    alone: RunFolder | None = None,
) -> Result:
    """One run with one seed; without `out` nothing is written. `resume` continues the run in `out`, if any.

    `engine` makes what runs it; without it, a federation in this process. `overwrite` takes away the run in `out`.
    `alone` is a run of `independent` on the same ground, to which the gains of the clients are told.
    """
    if resume and overwrite:
        raise FedgistError("a run either goes on (resume) or is made anew (overwrite)")
    folder = None if out is None else RunFolder(out)
    config = dataclasses.replace(prepare(config, folder if resume else None), seeds=1)
    if folder is not None and folder.started and not overwrite:
        provenance.check_again(folder, config, resume)
        if folder.finished:
            return results.load(folder)
    executor = engines.executor(config.engine, config.device, tf32=config.tf32, workers=config.workers)
    with engines.one_thread(config.engine, config.device):
        one = _Run(config, load(config), folder, progress or Silent(), engine, executor)
        if folder is not None and overwrite:
            folder.clear()  # only now, when most of what the user may have got wrong has been built
        one.alone = None if alone is None else fairness.alone_in(alone)
        return one.go()


def run_together(runs: Sequence[tuple[RunConfig, Path]], load: Source = sources.from_dataset) -> list[Result]:
    """Several seeds of a configuration, round by round together, so that an engine that stacks may stack them too.

    Each goes on from its last checkpoint; those that are behind catch up first.
    """
    asked = [(config, RunFolder(out)) for config, out in runs]
    prepared = [(dataclasses.replace(prepare(config, folder), seeds=1), folder) for config, folder in asked]
    for config, folder in prepared:
        if folder.started:
            provenance.check_again(folder, config, resume=True)
    first = prepared[0][0]
    executor = engines.executor(first.engine, first.device, tf32=first.tf32, workers=first.workers)
    begun = {
        folder.path: _Run(config, load(config), folder, Silent(), in_process, executor)
        for config, folder in prepared
        if not folder.finished
    }
    with engines.one_thread(first.engine, first.device), ExitStack() as stack:
        for one in begun.values():
            stack.enter_context(one.under_way())
        while unfinished := [one for one in begun.values() if one.left]:
            most = max(one.left for one in unfinished)
            some = [one for one in unfinished if one.left == most]
            start = time.perf_counter()
            reports = run_rounds([cast(LocalEngine, one.engine) for one in some])
            seconds = (time.perf_counter() - start) / len(some)
            for one, report in zip(some, reports, strict=True):
                one.keep(report, seconds)
        made = {path: one.finish() for path, one in begun.items()}
    return [made.get(folder.path) or results.load(folder) for _, folder in prepared]


class _Run:
    """One run under way."""

    def __init__(
        self,
        config: RunConfig,
        inputs: Inputs,
        folder: RunFolder | None,
        progress: Progress,
        make: Maker,
        executor: Executor,
    ):
        self.config, self.folder, self.progress = config, folder, progress
        self.make, self.executor = make, executor
        self.rows: list[dict[str, Any]] = []
        self.alone: fairness.Parts | None = None
        self.title = f"{config.method}, {config.dataset}, seed {config.seed}"
        self._build(inputs)

    def _build(self, inputs: Inputs) -> None:
        """All that follows from the inputs."""
        config, self.inputs = self.config, inputs
        self.watch = Watch(self.title, config, inputs)
        try:
            self.method = methods.find(config.method)(config.options, inputs.task)
        except MixedModels as error:
            raise FedgistError(f"{error}; {inputs.who_runs_what()}") from error
        security.check(config, self.method)
        adversaries.check(config, self.method)
        self.test = self.executor.place.put(inputs.test)
        self.engine = self.make(self.method, inputs, config, self.executor)
        self.finishing = finishing.method(config, self.method, self.engine.state) if config.finish else None

    def go(self) -> Result:
        with self.under_way():
            while self.left:
                start = time.perf_counter()
                report = self.engine.run_round()
                self.keep(report, time.perf_counter() - start)
            return self.finish()

    @property
    def left(self) -> int:
        """Rounds to go; none where one more, as dear as the dearest so far, would be beyond the bytes there are."""
        spent = [row["bytes_up"] + row["bytes_down"] for row in self.rows]
        if self.config.max_bytes is not None and spent:
            dearest = max(after - before for before, after in pairwise([0, *spent]))
            if spent[-1] + dearest > self.config.max_bytes:
                return 0
        return self.config.rounds - self.engine.rounds_done

    @contextmanager
    def under_way(self) -> Iterator[None]:
        """The folder, the ledger and the state as the last checkpoint left them; what stops the run is explained."""
        # Only now, when most of what the user may have got wrong has been built, does the folder come to be.
        new = self.folder is not None and not self.folder.started
        saved = None if self.folder is None else self._open(self.folder)
        try:
            with closing(self._ledger(saved)) as ledger:
                if self.config.normalise == standardisation.SUMS:
                    self._standardise(ledger, begun=saved is not None)
                self.engine.ledger, states = ledger, self.engine.site_states
                if self.folder is not None:
                    states.keep_in(self.folder.checkpoints)
                if saved is not None:
                    self.engine.restore(saved["engine"])
                self.watch.clients()
                whole = self.config.rounds + (self.finishing is not None)
                self.progress.start(self.title, self.engine.rounds_done, whole)
                try:
                    yield
                finally:
                    self.progress.stop()
                    states.close()
        except KeyboardInterrupt:
            raise self._interrupted() from None
        except Exception as error:
            full = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
            if self.folder is not None and new and not self.rows:
                self.folder.discard()  # what only a round finds wrong, as too little memory: mended, the command works
            if self.folder is not None and full:
                raise FedgistError(
                    f"the disk of {self.folder.path} is full: make room and go on with {self._again}"
                ) from error
            raise

    def _standardise(self, ledger: Ledger, begun: bool) -> None:
        """Before the first round, an exchange of sums says how inputs are scaled; a run that goes on knows it."""
        if self.folder is not None and begun:
            self._build(standardisation.recalled(self.config, self.inputs, self.folder))
            return
        at_once = dataclasses.replace(self.config, delay=0)
        engine = self.make(standardisation.method(self.inputs), self.inputs, at_once, self.executor)
        engine.ledger, engine.rounds_done = ledger, -1
        report = engine.run_round()
        if report.skipped is not None:
            raise FedgistError(f"inputs cannot be standardised: {report.skipped}")
        found = standardisation.numbers(engine.state)
        if self.folder is not None:
            write_json(self.folder.standardisation, found)
        self._build(standardisation.applied(self.inputs, found))

    def keep(self, report: RoundReport, seconds: float) -> None:
        """Writes down a finished round."""
        done = self.engine.rounds_done
        self.watch.images(report)
        if self.folder is not None and artifacts.due(done, self.config.rounds, self.config.artifacts_every):
            artifacts.save(report.shown, self.inputs.task, self.folder.exhibits(done))
        row = self._add_row(report, seconds)
        last = not self.left
        self._write_row(row, report, last or (self.config.eval_every > 0 and done % self.config.eval_every == 0))
        if self.folder is not None and (last or done % self.config.checkpoint_every == 0):
            self.folder.save_checkpoint(done, self.engine.snapshot(), self.engine.ledger.position())
        self.progress.round(self.rows[-1])  # what is shown as done is kept

    def _add_row(self, report: RoundReport, seconds: float) -> dict[str, Any]:
        """A row for a round that was made, and what that cost."""
        totals = self.engine.ledger.totals()
        row: dict[str, Any] = {
            "round": self.engine.rounds_done,
            "seconds": round(seconds, 6),
            "answered": report.answered,
            "skipped": report.skipped,
            **({} if report.steps is None else {"client_steps": report.steps}),
            "bytes_up": totals.bytes_up,
            "bytes_down": totals.bytes_down,
            **privacy.told(self.engine.layer),
        }
        self.rows.append(row)
        return row

    def _write_row(self, row: dict[str, Any], report: RoundReport, judged: bool) -> None:
        missing = dict(report.missing)
        if judged:
            row |= self._evaluate()
            self.watch.states(self.engine)
            missing |= self.engine.missing
        row |= {"missing": missing} if missing else {}
        if self.folder is not None:
            self.folder.append(row)

    def _finish_features(self) -> None:
        """One more round, of another method: the head of the model that the rounds made, from sums over all data.

        It has no checkpoint of its own: a run that is stopped here has all its rounds, and does this again.
        """
        start, ledger = time.perf_counter(), self.engine.ledger
        at_once = dataclasses.replace(self.config, delay=0)  # no later round could hear a late reply
        method = finishing.method(self.config, self.method, self.engine.state)
        exact = engines.executor(self.config.engine, self.config.device)  # sums bear no tf32
        engine = self.make(method, self.inputs, at_once, exact)
        engine.ledger, engine.rounds_done = ledger, self.engine.rounds_done
        report = engine.run_round()
        if report.skipped is not None:
            raise FedgistError(f"the finish was not made: {report.skipped}; go on with {self._again}")
        self.engine = engine
        self._write_row(self._add_row(report, time.perf_counter() - start), report, judged=True)
        self.progress.round(self.rows[-1])

    def _evaluate(self) -> dict[str, Any]:
        try:
            found = self.engine.evaluate(self.test)
            found |= adversaries.opened(self.config, self.engine.method, self.engine.state, self.test)
        except TooFewAnswers as missing:  # models that clients hold cannot be judged while the clients are away
            return {"unevaluated": str(missing)}
        # JSON has no NaN: a row with one could not be read by others, nor drawn by a browser.
        return {name: value if math.isfinite(value) else None for name, value in found.items()}

    def _open(self, folder: RunFolder) -> Any:
        """Says in the folder what runs; returns the last checkpoint, if any."""
        inputs = self.inputs
        held = {"clients": inputs.counts, "classes": inputs.task.classes, "sha256": inputs.sha256}
        where, what = provenance.environment(self.config.device), self._about()
        where |= {"sites": [*inputs.info]} if self.config.partition == OWN else {}
        saved = folder.open(configs.dump(self.config), held, inputs.parts, where, what)
        self.rows = folder.rows()
        privacy.keep_books(self.engine.layer, folder)
        return saved

    def _about(self) -> dict[str, Any]:
        about = provenance.about(self.method, self.finishing)
        return {**about, "secure": self.engine.layer.title} if self.engine.layer.title else about

    def _ledger(self, saved: Any) -> Ledger:
        if self.folder is None:
            return Ledger()
        folder, position = self.folder, None if saved is None else saved["ledger"]
        return Ledger(folder.ledger, run_name(self.config), self.config.record, folder.transcript, position)

    def finish(self) -> Result:
        done = dataclasses.replace(self.config, rounds=self.engine.rounds_done)
        if self.finishing is not None:
            self._finish_features()
        state, folder, method = tree.to(self.engine.state, "cpu"), self.folder, self.engine.method
        if folder is not None and not any(row.get("accuracy") is not None for row in self.rows):
            folder.reopen(self.config.rounds, whole=False)  # resumed, its last round asks the clients once more
        path = None if folder is None else folder.path
        result = results.summarise(self.config.method, self.rows, state, method.weights(state), path)
        made = trained.collect(self.engine, done, self.inputs, self.test)
        if folder is None or is_own(self.config.model):  # a caller's module cannot be built from its files
            result = dataclasses.replace(result, trained=made)
        if folder is not None:
            trained.write(made, folder)
            if made:
                card = model_card.text(done, self._about(), made, result, privacy.sentence(self.engine.layer, done))
                write_text(folder.card, card)
            accuracies = fairness.by_client(self.engine, self.test, self.rows[-1], made)
            write_json(folder.fairness, {"accuracies": accuracies, "alone": self.alone}, indent=None)
            about = {
                "dataset": self.config.dataset,
                "seed": self.config.seed,
                "rounds": done.rounds,
                **dataclasses.asdict(self.engine.ledger.totals()),
                "state_sha256": self.engine.digest(),
                "citation": self.method.citation,
                "privacy": privacy.promised(self.engine.layer, self.method, self.config),
                "fairness": fairness.as_json(fairness.summary(accuracies, self.alone)),
            }
            results.save(result, folder, about)
        return result

    def _interrupted(self) -> Interrupted:
        if self.folder is None:
            return Interrupted("stopped; nothing is kept, for there is no folder", "")
        kept = f"stopped; {self.folder.rounds_kept()} of {self.config.rounds} rounds are kept"
        return Interrupted(kept, self._again)

    @property
    def _again(self) -> str:
        """What goes on with this run, in its folder."""
        if self.folder is None or not self.folder.started:
            return "the same command"
        if self.config.dataset == OWN or is_own(self.config.model):
            return "the same call and resume=True"
        return f"fedgist run --resume --out {shlex.quote(str(self.folder.path))}"
