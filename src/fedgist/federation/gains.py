"""Who gains by taking part, across machines: each site compares the run's model with the one that it learned alone.

Alone means a run of `independent` across the same sites, in which nothing but scores is sent. A site judges both models
on its own test samples and learns its own gain; the server learns sums over sites: how many there are, the sums of
accuracies, of gains and of squares, and two histograms in steps of a hundredth, of accuracies and of gains. Which site
is in which step, it does not learn.
"""

import logging
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fedgist.core import tree
from fedgist.core.errors import FedgistError
from fedgist.core.federation import Federation, Site, State
from fedgist.core.ledger import Ledger, Totals
from fedgist.core.message import Params, float64, int64, message, wire
from fedgist.core.method import Method, handler
from fedgist.core.task import Model, Samples, Task
from fedgist.engines.engine import Engine
from fedgist.experiments import fairness
from fedgist.experiments.fairness import GLOBAL, OWN, OWN_LABELS, Fairness
from fedgist.experiments.folder import RunFolder, read_json, write_json
from fedgist.learning.evaluation import accuracy
from fedgist.options import option

log = logging.getLogger("fedgist")

STEPS = 100
"""Of a histogram, between 0 and 1."""

Recall = Callable[[str], tuple[Model, Params] | None]
"""A site's own model of a run, as it was judged last, where it keeps one."""
Note = Callable[[str, float, float, int], None]
"""Takes down at the site: whose model, its accuracy, that of the one learned alone, and on how many samples."""


@message
class Compare:
    """Compare your own model of the run with the one that you learned alone."""


@message
class CompareThis:
    """Compare these weights with the model that you learned alone."""

    w: Params


@message
class Gains:
    """Sums over sites, and how many of them are in which step of accuracy and of gain."""

    clients: int = wire(int64, additive=True, low=0, high=1)
    accuracy: float = wire(float64, additive=True, low=0, high="clients")
    squares: float = wire(float64, additive=True, low=0, high="clients")
    gain: float = wire(float64, additive=True, low=-1, high="clients")
    accuracies: Tensor = wire(int64, shape=(STEPS + 1,), additive=True, low=0, high="clients")
    gains: Tensor = wire(int64, shape=(2 * STEPS + 1,), additive=True, low=0, high="clients")


@dataclass(frozen=True)
class Runs:
    """Which runs are compared, by the names that sites know them under."""

    run: str = option("", "The run.")
    alone: str = option("", "The run of `independent`.")


class Comparison(Method[Runs]):
    """One exchange for the server's model, where it has one, and one for those that sites keep."""

    name = "gains"
    summary = "How many sites gain over learning alone, from sums."

    def __init__(
        self,
        config: Runs,
        task: Task,
        server: Params | None = None,
        recall: Recall = lambda run: None,
        note: Note = lambda whose, mine, alone, samples: None,
    ):
        super().__init__(config, task)
        self.server, self.recall, self.note = server, recall, note

    async def round(self, state: State, fed: Federation) -> State:
        return state

    async def evaluate(self, state: State, fed: Federation, test: Samples) -> dict[str, float]:
        answers = {OWN: await fed.ask(fed.ids, Compare(), Gains)}
        alike = [id for id in fed.ids if fed.info[id]["model"] == self.task.model]
        if self.server is not None and alike:
            answers[GLOBAL] = await fed.ask(alike, CompareThis(self.server), Gains)
        found = {whose: summary(of.sum) for whose, of in answers.items() if of.sum.clients}
        return {f"{whose} {key}": value for whose, one in found.items() for key, value in _numbers(one).items()}

    @handler
    async def compare(self, me: Site, msg: Compare) -> Gains:
        return await self._compared(me, OWN, self.recall(self.config.run))

    @handler
    async def compare_this(self, me: Site, msg: CompareThis) -> Gains:
        return await self._compared(me, GLOBAL, (self.model_of(me), msg.w))

    async def _compared(self, me: Site, whose: str, mine: tuple[Model, Params] | None) -> Gains:
        """A site that does not hold both models, or too few test samples for its policy, counts for nothing."""
        alone = self.recall(self.config.alone)
        if mine is None or alone is None or me.data.test is None or not len(me.data.test[1]):
            return told(None, None)
        device = me.data.test[0].device
        with_others, by_itself = [await accuracy(net, tree.to(w, device), me.data.test) for net, w in (mine, alone)]
        self.note(whose, with_others, by_itself, len(me.data.test[1]))
        return told(with_others, by_itself)


def told(mine: float | None, alone: float | None) -> Gains:
    """What a site says of its two accuracies, or that it has none."""
    accuracies, gains = torch.zeros(STEPS + 1, dtype=int64), torch.zeros(2 * STEPS + 1, dtype=int64)
    if mine is None or alone is None:
        return Gains(0, 0.0, 0.0, 0.0, accuracies, gains)
    gain = mine - alone
    accuracies[round(STEPS * mine)] = 1
    # Away from 0, so that who gains and who loses can be told from who does not: step k is (k − 1, k] hundredths.
    gains[STEPS + int(math.copysign(math.ceil(STEPS * abs(gain) - 1e-9), gain))] = 1
    return Gains(1, mine, mine**2, gain, accuracies, gains)


def summary(total: Gains) -> Fairness:
    """How the sites fare; the worst tenths are as exact as the steps."""
    n, mean = int(total.clients), float(total.accuracy) / int(total.clients)
    below, gains = total.gains[:STEPS], total.gains.tolist()
    middle = [(k - STEPS - math.copysign(0.5, k - STEPS)) / STEPS if k != STEPS else 0.0 for k in range(len(gains))]
    return Fairness(
        clients=n,
        mean=mean,
        worst_tenth=_worst_tenth(total.accuracies.tolist(), [k / STEPS for k in range(STEPS + 1)]),
        deviation=math.sqrt(max(0.0, float(total.squares) / n - mean**2)),
        gain=int(total.gains[STEPS + 1 :].sum()),
        lose=int(below.sum()),
        gain_mean=float(total.gain) / n,
        gain_worst_tenth=_worst_tenth(gains, middle),
        losers={},  # nobody but each site knows
    )


def _worst_tenth(counts: list[int], values: list[float]) -> float:
    """Their mean; counts may be sums that a site which lies has made as large, or as small, as it likes."""
    counts = [max(0, count) for count in counts]
    wanted = left = max(1, math.ceil(sum(counts) / 10))
    total = 0.0
    for value, count in zip(values, counts, strict=True):
        total, left = total + min(count, left) * value, left - min(count, left)
    return total / max(1, wanted - left)


def _numbers(one: Fairness) -> dict[str, float]:
    return {key: value for key, value in asdict(one).items() if isinstance(value, int | float)}


# At the server


def run_id(folder: RunFolder) -> str:
    """The name that sites know a run under."""
    saved = folder.last_checkpoint()
    if saved is None or "run" not in saved["engine"]:
        raise FedgistError(f"{folder.path} does not say under which name sites know it: make it anew with --overwrite")
    return str(saved["engine"]["run"])


def compared(folder: RunFolder, alone: RunFolder) -> bool:
    """Whether a finished run was compared with this one already."""
    return folder.fairness.is_file() and read_json(folder.fairness).get("against") == run_id(alone)


def compare(
    folder: RunFolder, alone: RunFolder, task: Task, server: Params | None, make: Callable[[Method], Engine]
) -> None:
    """Has the sites compare a finished run with one of `independent`, and writes what came out into its folder."""
    whole = server is not None and server.keys() == task.models[task.model].shapes.keys()
    engine = make(Comparison(Runs(run_id(folder), run_id(alone)), task, server if whole else None))
    size = folder.ledger.stat().st_size
    engine.ledger = Ledger(folder.ledger, folder.path.name, position={"bytes": size, "totals": asdict(Totals())})
    try:
        rows = engine.evaluate((torch.zeros(0), torch.zeros(0, dtype=int64)))
    finally:
        engine.ledger.close()
    across: dict[str, Any] = {}
    for key, value in rows.items():
        whose, _, name = key.partition(" ")
        across.setdefault(whose, {}).setdefault(OWN_LABELS, {"losers": {}})[name] = value
    if not across:
        log.warning(
            "no site could compare: it must hold its model of both runs and enough test samples for its policy; make "
            f"{alone.path} anew with --overwrite if sites have forgotten it"
        )
    write_json(folder.fairness, {**read_json(folder.fairness), "across": across, "against": run_id(alone)}, indent=None)
    said = read_json(folder.result)
    write_json(folder.result, {**said, "fairness": fairness.as_json(fairness.across(folder))})


# At a site


def own_note(run: Path, site: str) -> Note:
    """Takes a site's gain down in its log and beside the states of the run, in the run's folder there."""

    def note(whose: str, mine: float, alone: float, samples: int) -> None:
        path = run / "gain.json"
        known = read_json(path) if path.is_file() else {}
        if path.parent.is_dir():
            write_json(path, {**known, whose: {"accuracy": mine, "alone": alone, "samples": samples}})
        log.info(f"site {site}: {said(run.name, whose, mine, alone, samples)}")

    return note


def said(run: str, whose: str, accuracy: float, alone: float, samples: int) -> str:
    """A site's own gain, in a sentence."""
    gain = 100 * (accuracy - alone)
    how = "gains" if gain > 0 else "loses" if gain < 0 else "gains and loses nothing:"
    points = f" {abs(gain):.2f} points" if gain else ""
    model = "the run's model" if whose == GLOBAL else "its own model"
    return (
        f"{run}: {how}{points} over learning alone with {model}: {100 * accuracy:.2f} % against {100 * alone:.2f} % of "
        f"its {samples} test samples"
    )


def known_gains(folder: Path) -> list[str]:
    """What a site knows of its gains."""
    found = []
    for path in sorted((folder / "runs").glob("*/gain.json"), key=lambda path: path.stat().st_mtime):
        found += [said(path.parent.name, whose, **one) for whose, one in read_json(path).items()]
    return found
