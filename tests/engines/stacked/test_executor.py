"""The stacked engine equals the sequential one, stacks what is equal, and copies nothing that is shared."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fedgist import storage
from fedgist.core import tree
from fedgist.core.work import Chunks, Place, Pool, Scan, compute, execute, gradient, scan, stacked
from fedgist.data.client_data import ClientData
from fedgist.engines import executor
from fedgist.engines.local import run_rounds
from fedgist.engines.sequential import Sequential
from fedgist.engines.stacked import Stacked, programs
from fedgist.engines.stacked.columns import Column, PoolCache
from fedgist.engines.stacked.executor import split_evenly
from fedgist.engines.stacked.grouping import Group
from toys import SHAPE, clients, federation

EPS = torch.finfo(torch.float32).eps
HERE = Place()


def sites(*sizes: int) -> dict[str, ClientData]:
    return clients(*sizes, name="{:02d}")


def train(runner: Any, data: dict[str, ClientData], method: str = "fedavg", nets: Any = "mlp", **given: Any) -> Any:
    return federation(method, data, nets, engine=runner, **{"batch": 8, "lr": 0.1, **given})


def floats(what: Any) -> Tensor:
    found = [leaf for leaf in tree.leaves(what) if isinstance(leaf, Tensor) and leaf.is_floating_point()]
    return torch.cat([torch.zeros(0, dtype=torch.float64), *(leaf.double().flatten() for leaf in found)])


def as_near_to_the_truth(exact: Any, plain: Any, quick: Any) -> bool:
    """Whether `quick` errs about as much as `plain`, both being float32 versions of the float64 `exact`.

    Both compute the same sums in different orders, so the error of each against float64 is of the size of float32
    rounding; where the plain one happens to have none, some units in the last place of the norm stand in for it.
    """
    size, usual, error = (floats(a) for a in (exact, tree.sub(plain, exact), tree.sub(quick, exact)))
    return bool(error.norm() <= 4 * usual.norm() + 16 * EPS * size.norm())


@pytest.fixture
def stacks(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many clients were in each group that the engine made, in their order."""
    sizes: list[int] = []

    def group(members: Any) -> Group:
        sizes.append(len(members))
        return Group(members)

    monkeypatch.setattr("fedgist.engines.stacked.executor.Group", group)
    return sizes


@pytest.fixture
def traces(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the computations that were traced, in their order."""
    names: list[str] = []
    trace = programs.trace

    def note(call: Any, group: Group, *rest: Any) -> Any:
        made = trace(call, group, *rest)
        names.append(group.name)
        return made

    monkeypatch.setattr("fedgist.engines.stacked.executor.trace", note)
    return names


SEVEN = (20, 30, 17, 25, 40, 9, 24)
CASES: dict[str, dict[str, Any]] = {
    "steps": {"steps": 4},
    "BatchNorm": {"steps": 4, "nets": "cnn"},
    "local BatchNorm": {"steps": 4, "nets": "cnn", "batch_norm": "local"},
    "ragged epochs": {"epochs": 2, "momentum": 0.9},
    "kept momentum": {"steps": 3, "momentum": 0.9, "keep_momentum": True},
    "Adam": {"steps": 3, "optimiser": "adam", "keep_momentum": True, "lr": 0.01},
    "clipped": {"steps": 3, "clip": 0.5},
    "moved images": {"epochs": 1, "crop": 2, "flip": True, "nets": "cnn"},
    "proximal": {"steps": 3, "method": "fedprox", "mu": 0.5},
    "clients' own models": {"epochs": 1, "method": "independent"},
}


@pytest.mark.parametrize("case", CASES)
def test_equals_sequential(case: str, caplog: pytest.LogCaptureFixture) -> None:
    data = sites(*SEVEN)
    runners = [Sequential(Place(dtype=torch.float64)), Sequential(), Stacked(workers=2)]
    exact, plain, quick = (train(runner, data, **CASES[case]) for runner in runners)
    for engine in (exact, plain, quick):
        engine.run_round()
        engine.run_round()
    assert not caplog.records, "something was not stacked"
    assert as_near_to_the_truth(exact.state, plain.state, quick.state)
    assert plain.site_states.keys() == quick.site_states.keys()
    for id in plain.site_states:
        assert as_near_to_the_truth(exact.site_states[id], plain.site_states[id], quick.site_states[id]), id


def test_clients_without_samples(caplog: pytest.LogCaptureFixture) -> None:
    """They return what they got, bit for bit, and the others are stacked without them."""
    data = sites(0, 20, 0, 1, 30)
    runners = [Sequential(Place(dtype=torch.float64)), Sequential(), Stacked(workers=1)]
    exact, plain, quick = (train(runner, data, epochs=1, keep_momentum=True, momentum=0.9) for runner in runners)
    for engine in (exact, plain, quick):
        engine.run_round()
    assert not caplog.records
    assert as_near_to_the_truth(exact.state, plain.state, quick.state)
    assert storage.digest(plain.site_states["00"]) == storage.digest(quick.site_states["00"])


@dataclass(frozen=True)
class Affine:
    """A step whose result is known: carry ← slope · carry + x."""

    slope: float
    note: str = ""

    def step(self, carry: Tensor, x: Tensor, *consts: Any) -> Tensor:
        return self.slope * carry + x

    def gradient(self, at: Tensor) -> Tensor:
        return gradient(lambda w: (self.slope * (w**3).sum(), ()), at)[0]


def counting(calls: list[int]) -> Any:
    """A step that notes how often Python ran it."""

    def step(carry: Tensor, x: Tensor) -> Tensor:
        calls.append(1)
        return 0.5 * carry + x

    return step


def test_one_call_for_all_and_ragged_lengths() -> None:
    """Scans of 1, 5 and 3 steps take five calls in all, and each gives what it gives alone."""
    calls: list[int] = []
    step = counting(calls)
    works = [Scan(step, torch.full((2,), float(n)), torch.arange(2.0 * n).view(n, 2), ()) for n in (1, 5, 3, 0)]
    expected = [execute(work, HERE) for work in works]
    calls.clear()
    found = Stacked(workers=1).drive([scan(work.step, work.carry, work.xs) for work in works])
    assert len(calls) == 5
    for one, other in zip(expected, found, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)


def test_inputs_made_piece_by_piece() -> None:
    """Scans of different lengths, longer than one piece, equal the plain loop."""

    def make(seed: int, first: int, count: int) -> Tensor:
        return torch.arange(first, first + count, dtype=torch.float32) * seed

    works = [
        Scan(Affine(0.9).step, torch.zeros(()), Chunks(make, seed, n), ()) for seed, n in ((1, 150), (2, 3), (3, 70))
    ]
    found = Stacked(workers=1).drive([scan(work.step, work.carry, work.xs) for work in works])
    for work, result in zip(works, found, strict=True):
        torch.testing.assert_close(result, execute(work, HERE))


def test_gradients_are_stacked() -> None:
    points = [torch.tensor([1.0, 2.0]) * n for n in range(1, 4)]
    found = Stacked().drive([compute(Affine(2.0).gradient, at) for at in points])
    for at, grad in zip(points, found, strict=True):
        torch.testing.assert_close(grad, 6 * at**2)


def test_different_architectures_fall_apart(stacks: list[int]) -> None:
    """Five clients with two kinds of net: two groups, and each client's result is its own."""
    data = sites(20, 20, 20, 20, 20)
    nets = ("mlp:feature_size=8", "mlp:feature_size=6")
    runners = (Sequential(Place(dtype=torch.float64)), Sequential(), Stacked(workers=1))
    engines = [train(runner, data, "independent", nets, steps=3) for runner in runners]
    for engine in engines:
        engine.run_round()
    exact, plain, quick = (engine.site_states for engine in engines)
    assert all(as_near_to_the_truth(exact[id], plain[id], quick[id]) for id in plain)
    assert stacks == [3, 2]


def test_the_same_request_of_all_is_done_once() -> None:
    """Nobody can change another client's result by writing into its own."""
    calls: list[int] = []

    def double(x: Tensor) -> Tensor:
        calls.append(1)
        return 2 * x

    x = torch.ones(2)
    first, second = Stacked(workers=1).drive([compute(double, x), compute(double, x)])
    first.zero_()
    assert (len(calls), second.tolist()) == (1, [2.0, 2.0])


def test_data_are_stacked_once_for_all_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    pools: list[tuple[int, ...]] = []
    stack = Column.stacked

    def note(column: Column, place: Place) -> Tensor:
        made = stack(column, place)
        pools.extend([tuple(made.shape)] * (column.pooled and not column.shared))
        return made

    monkeypatch.setattr(Column, "stacked", note)
    engine = train(Stacked(workers=1), sites(*SEVEN), steps=2)
    engine.run_round()
    engine.run_round()
    assert sorted(pools) == [(7, 40), (7, 40, *SHAPE)], "labels and images"


def test_several_seeds_together(stacks: list[int]) -> None:
    """Two seeds driven together give what they give apart, in half as many stacked calls."""
    data, runner = sites(20, 20, 20), Stacked(workers=1)
    together = [train(runner, data, seed=seed, steps=2) for seed in (0, 1)]
    run_rounds(together)
    assert stacks == [6, 6], "what they train and what they send of it"
    for seed, engine in enumerate(together):
        exact, alone = (
            train(Sequential(Place(dtype=d)), data, seed=seed, steps=2) for d in (torch.float64, torch.float32)
        )
        exact.run_round(), alone.run_round()
        assert as_near_to_the_truth(exact.state, alone.state, engine.state)


def test_control_flow_that_depends_on_data(caplog: pytest.LogCaptureFixture) -> None:
    """Such work runs client by client, and the log says so once."""

    def absolute(x: Tensor) -> Tensor:
        return x if x.item() > 0 else -x

    runner = Stacked(workers=1)
    for _ in range(2):
        assert [x.item() for x in runner.drive([compute(absolute, torch.tensor(x)) for x in (-1.0, 2.0, -3.0)])] == [
            1,
            2,
            3,
        ]
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "absolute cannot be stacked" in caplog.text


def test_a_carry_with_a_python_number(caplog: pytest.LogCaptureFixture) -> None:
    """A step that counts in Python cannot be one call for all steps; it still counts."""

    def step(carry: tuple[int, Tensor], x: Tensor) -> tuple[int, Tensor]:
        return carry[0] + 1, carry[1] + carry[0] * x

    found = Stacked(workers=1).drive([scan(step, (0, torch.zeros(())), torch.ones(n)) for n in (3, 4)])
    assert [(n, total.item()) for n, total in found] == [(3, 3.0), (4, 6.0)]
    assert "cannot be stacked" in caplog.text


def test_an_error_of_the_work_itself(caplog: pytest.LogCaptureFixture) -> None:
    def broken(x: Tensor) -> Tensor:
        raise ZeroDivisionError("one over nothing")

    with pytest.raises(ZeroDivisionError, match="one over nothing"):
        Stacked().drive([compute(broken, torch.ones(1) * n) for n in range(3)])
    assert not caplog.records


def test_the_step_knows_that_it_is_stacked() -> None:
    def ask(x: Tensor) -> Tensor:
        return x + stacked()

    runner = Stacked(workers=1)
    assert [x.item() for x in runner.drive([compute(ask, torch.zeros(())) for _ in range(2)])] == [1, 1]
    assert [x.item() for x in runner.drive([compute(ask, torch.zeros(()))])] == [0]


def test_chunks_are_even() -> None:
    for count in range(1, 60):
        parts = split_evenly(list(range(count)), 6)
        assert [i for part in parts for i in part] == list(range(count))
        assert max(map(len, parts)) - min(map(len, parts)) <= 1


def test_a_stack_that_does_not_fit_is_halved(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten clients where four fit: stacks of five fail too, so it goes on with three and two, and remembers."""
    sizes: list[int] = []
    run = programs.run_scan

    def small(call: Any, group: Group, *rest: Any) -> Any:
        sizes.append(group.size)
        if group.size > 4:
            raise torch.cuda.OutOfMemoryError("no room")
        return run(call, group, *rest)

    monkeypatch.setattr("fedgist.engines.stacked.executor.run_scan", small)
    found = Stacked(workers=1).drive([scan(Affine(0.5).step, torch.tensor(float(n)), torch.ones(2)) for n in range(10)])
    assert sizes == [10, 5, 3, 2, 5, 3, 2]
    assert [x.item() for x in found] == [0.25 * n + 1.5 for n in range(10)]


class Recording:
    """What stands in for a graph: it runs the step, and is as long as the pool that it was made for."""

    def __init__(self, call: Any, group: Group, place: Place, memory: int):
        self.call, self.rows, self.memory = call, group.consts[0].rows, memory

    def fits(self, group: Group) -> bool:
        return group.consts[0].rows <= self.rows

    def run(self, group: Group) -> Any:
        return programs.run_scan(self.call, group, Place(), PoolCache())


def test_graphs_share_memory_that_ends_with_the_last_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever records a longer pool gives up the old graph first; without another one its memory cannot be taken up."""
    handles, made = iter(range(9)), list[Recording]()
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: next(handles))

    def capture(*about: Any) -> Recording:
        made.append(Recording(*about))
        return made[-1]

    monkeypatch.setattr("fedgist.engines.stacked.executor.capture", capture)
    runner = Stacked(workers=1)
    runner.on_gpu = True

    def go(slope: float, *rows: int) -> list[float]:
        works = [scan(Affine(slope).step, torch.tensor(float(n)), torch.ones(4), Pool(x=torch.zeros(n))) for n in rows]
        return [one.item() for one in runner.drive(works)]

    assert go(1.0, 20, 10) == [24.0, 14.0]
    go(1.0, 10, 15)
    go(1.0, 30, 10)
    go(0.5, 10, 40)
    go(1.0, 50, 10)
    assert [(one.rows, one.memory) for one in made] == [(20, 0), (30, 1), (40, 1), (50, 1)]
    monkeypatch.setattr("fedgist.engines.stacked.executor.FILLS_A_GPU", 0)
    made.clear()
    assert go(2.0, 10, 30, 20) == [16.0 * n + 15 for n in (10, 30, 20)]
    assert [one.rows for one in made] == [30], "the graph for the largest serves the others"


def test_clients_who_fill_a_gpu_are_not_stacked_there(monkeypatch: pytest.MonkeyPatch, stacks: list[int]) -> None:
    """What counts is what one step of a client writes, not what it reads, nor what it sees of a pool."""
    monkeypatch.setattr("fedgist.engines.stacked.executor.FILLS_A_GPU", 50)
    runner = Stacked(workers=1)
    runner.on_gpu = True

    def count(works: list[Any]) -> int:
        stacks.clear()
        runner.drive(works)
        return len(stacks)

    def scans(carry: int, rows: int = 3, read: int = 0) -> list[Any]:
        step, consts = Affine(0.5).step, (Pool(x=torch.zeros(rows)), torch.zeros(read))
        return [scan(step, torch.zeros(carry), torch.ones(2), *consts) for _ in range(4)]

    def calls(own: int) -> list[Any]:
        return [compute(torch.add, torch.zeros(own), torch.zeros(own)) for _ in range(4)]

    assert count(scans(24)) == 1 and count(scans(25)) == 4  # 0.5 c + 1: two operations
    assert count(scans(24, rows=1000, read=1000)) == 1
    assert count(calls(49)) == 1 and count(calls(50)) == 4


def test_a_traced_step_is_bit_equal_and_serves_longer_pools(monkeypatch: pytest.MonkeyPatch, traces: list[str]) -> None:
    tracing = Stacked(workers=1)
    for sizes in (SEVEN, tuple(2 * n for n in SEVEN)):
        ends = []
        for runner, worth in ((tracing, 1), (Stacked(workers=1), 1000)):
            monkeypatch.setattr("fedgist.engines.stacked.executor.WORTH_TRACING", worth)
            engine = train(runner, sites(*sizes), steps=3, momentum=0.9)
            engine.run_round()
            ends.append(storage.digest(engine.state))
        assert ends[0] == ends[1]
    assert traces == ["Trainer.step", "scale"]


@dataclass(frozen=True)
class Reader:
    """A step that only indexes its pool, and one that looks at its size, which changes from stack to stack."""

    def index(self, carry: Tensor, x: Tensor, pool: Pool) -> Tensor:
        return carry + pool["x"][x]

    def size(self, carry: Tensor, x: Tensor, pool: Pool) -> Tensor:
        return carry + pool["x"][x] * len(pool["x"])


@pytest.mark.parametrize(("name", "traced"), [("index", ["Reader.index"]), ("size", [])])
def test_only_what_indexes_its_pools_is_traced(
    name: str, traced: list[str], monkeypatch: pytest.MonkeyPatch, traces: list[str]
) -> None:
    """A trace that has the size of its first clients' pools in it would be wrong for others, so it is refused."""
    monkeypatch.setattr("fedgist.engines.stacked.executor.WORTH_TRACING", 1)
    runner, step = Stacked(workers=1), getattr(Reader(), name)
    pools = [Pool(x=torch.ones(3) * n) for n in (1, 2)]
    runner.drive([scan(step, torch.zeros(()), torch.zeros(2, dtype=torch.int64), pool) for pool in pools])
    assert traces == traced


def test_compiled_steps(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    """One compiled object for each stack, in the user's cache; a compiler that fails is said once and done without."""
    given: list[Any] = []
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    monkeypatch.setenv("FEDGIST_CACHE", str(tmp_path))
    monkeypatch.setattr(torch, "compile", lambda graph, dynamic: given.append(graph) or graph)
    plain, found = (train(executor(name), sites(*[20] * 4), steps=3) for name in ("stacked", "compiled"))
    for engine in (plain, found):
        engine.run_round()
        engine.run_round()
    assert len(given) == 2, "the step, and what is sent of its end"
    assert storage.digest(plain.state) == storage.digest(found.state)
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(tmp_path / "compiled")

    def fail(graph: Any, dynamic: bool) -> Any:
        raise RuntimeError("no C++ compiler here")

    monkeypatch.setattr(torch, "compile", fail)
    broken = train(executor("compiled"), sites(*[20] * 4), steps=3)
    broken.run_round()
    assert [record.getMessage() for record in caplog.records] == [
        "Trainer.step cannot be compiled: no C++ compiler here"
    ]
