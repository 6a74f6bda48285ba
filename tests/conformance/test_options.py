"""Every option of every method at each of its extremes, one at a time: a run comes to a finite end, or says why not.

A new method joins by being in the registry: what its options declare is what is tried, from its `toy` profile on.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Union, get_args, get_origin

import pytest

import fedgist.api as fg
import toys
from fedgist import methods
from fedgist.core.method import Method
from fedgist.experiments.inputs import Inputs
from fedgist.options import SMALLEST, Option, build, options
from toys import toy


def extremes(of: Option) -> Iterator[Any]:
    """The ends of its range, each of its choices, nothing where it may be; of a list each alone, all, and none."""
    kind = of.kind
    if get_origin(kind) in (Union, type(int | None)):
        yield None
        kind = next(part for part in get_args(kind) if part is not type(None))
    if of.is_list:
        parts = list(_ends(of, get_args(kind)[0]))
        yield from [(), *((part,) for part in parts), tuple(parts)]
    else:
        yield from _ends(of, kind)


def _ends(of: Option, kind: type) -> Iterator[Any]:
    if of.choices is not None:
        yield from of.choices
    elif kind is bool:
        yield from (False, True)
    elif kind is str:
        yield from ("", "nonsense")
    else:
        yield from (end for end in (of.low, of.high) if end is not None)
        if of.above is not None:
            yield of.above + (1e-6 if of.above else SMALLEST)
        if of.or_all:
            yield "all"


def trouble(kind: type[Method], inputs: Inputs, settings: dict[str, Any]) -> str | None:
    """What is wrong with two rounds and an evaluation, if anything; to be refused in a sentence is not."""
    try:
        built = kind(build(kind.Config, settings), inputs.task)
        engine = toys.federation(built, inputs.sites, info=inputs.info)
        for _ in range(2):
            engine.run_round()
        metrics = engine.evaluate(inputs.test)
    except fg.FedgistError:
        return None
    except Exception as error:  # whatever it is, a user would get it as a traceback
        return repr(error)
    wrong = [*engine.diverged(), *(name for name, value in metrics.items() if not math.isfinite(value))]
    return f"not finite: {', '.join(wrong)}" if wrong else None


def sweep(kind: type[Method], inputs: Inputs, usual: Any) -> dict[str, str]:
    """What is wrong, by option and value."""
    start = {name: getattr(usual, name) for name in options(usual)}
    every = [(name, value) for name, option in options(usual).items() for value in extremes(option)]
    tried = [(name, value) for name, value in every if value != start[name]]  # as usual is what all others have it
    found = {f"{name}={value!r}": trouble(kind, inputs, {**start, name: value}) for name, value in tried}
    return {what: wrong for what, wrong in found.items() if wrong}


@pytest.mark.parametrize("method", methods.registry())
def test_extremes_run_or_are_refused(method: str) -> None:
    config, inputs = toy(method, clients=3, limit=60)
    assert sweep(methods.find(method), inputs, config.options) == {}


@dataclass(frozen=True)
class Faults:
    parts: int = fg.option(2, "Divides; 0 was not thought of.", low=0)
    batch: int = fg.option(2, "All is beyond what a tensor is multiplied by.", low=1, or_all=True)
    slope: float = fg.option(1.0, "Its square is 0 long before it is.", above=0)
    way: str = fg.option("one", "The second was never tried.", choices=("one", "two"))
    layers: tuple[str, ...] = fg.option((), "Together they are too many.", choices=("a", "b"))
    limit: float | None = fg.option(1.0, "Not made for none.", low=0)
    steps: int = fg.option(1, "Right: 0 is refused in a sentence.", low=0)
    sound: bool = fg.option(True, "Right.")


class Faulty(fg.ServerModel[Faults]):
    name = "faulty"

    def __init__(self, config: Faults, task: fg.Task):
        super().__init__(config, task)
        if config.steps == 0:
            raise fg.FedgistError("steps must be at least 1 here")

    async def round(self, state: fg.State, fed: fg.Federation) -> fg.State:
        assert self.config.way == "one" and len(self.config.layers) < 2
        w = fg.tree.map(lambda w: w / (self.config.batch * len(fed.ids)), state["w"])
        return {"w": fg.tree.scale(w, 1 / self.config.parts + abs(self.config.limit))}  # type: ignore[arg-type]

    async def evaluate(self, state: fg.State, fed: fg.Federation, test: fg.Samples) -> dict[str, float]:
        return {"accuracy": 0.5, "steepness": math.inf if self.config.slope**2 < 1e-70 else 1.0}


def test_a_faulty_method_is_caught() -> None:
    found = sweep(Faulty, toy("fedavg", clients=3, limit=60)[1], Faults())
    assert found.keys() == {
        "parts=0", "batch='all'", f"slope={SMALLEST}", "way='two'", "layers=('a', 'b')", "limit=None"
    }  # fmt: skip
    assert "ZeroDivisionError" in found["parts=0"] and found[f"slope={SMALLEST}"] == "not finite: steepness"
