"""The stacked engine on a GPU: recorded graphs compute bit for bit what the step computes without them."""

import subprocess
import sys
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from fedgist import models, storage
from fedgist.core import tree
from fedgist.core.rng import Rng
from fedgist.core.work import Place, Pool, compute, execute, gradient, scan
from fedgist.engines.sequential import Sequential
from fedgist.engines.stacked import Stacked, graphs
from fedgist.engines.stacked.columns import Column
from fedgist.engines.stacked.graphs import Captured
from fedgist.learning.optimisers import SGD, Adam
from fedgist.learning.training import Trainer

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")

GPU = Place(torch.device("cuda"))
SHAPE, CLASSES, BATCH = (1, 8, 8), 4, 8


def works(
    trainer: Trainer, lengths: tuple[int, ...], samples: tuple[int, ...] | None = None, seed: int = 0
) -> list[Any]:
    """One client's training for each of `lengths`; all start from the same weights."""
    rng = Rng(seed)
    w = GPU.put(trainer.model.init(rng("w")))
    lr = torch.tensor(0.1)
    roles = []
    for i, (steps, n) in enumerate(zip(lengths, samples or (20,) * len(lengths), strict=True)):
        pool = Pool(x=rng("x", i).normal(n, *SHAPE).cuda(), y=rng("y", i).integers(CLASSES, n).cuda())
        plan = {"index": rng("plan", i).integers(n, steps, BATCH), "mask": torch.ones(steps, BATCH)}
        roles.append(scan(trainer.step, (w, trainer.init(w)), plan, pool, lr))
    return roles


def mlp(**optimiser: Any) -> Trainer:
    return Trainer(models.build("mlp", SHAPE, CLASSES), SGD(**optimiser))


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> list[Captured]:
    """The graphs that were recorded, in their order."""
    found: list[Captured] = []

    def note(*about: Any) -> Captured:
        found.append(graphs.capture(*about))
        return found[-1]

    monkeypatch.setattr("fedgist.engines.stacked.executor.capture", note)
    return found


CASES: dict[str, tuple[Trainer, tuple[int, ...]]] = {
    "equal lengths": (mlp(momentum=0.9), (6, 6, 6)),
    "more than one graph holds": (mlp(momentum=0.9), (19, 19)),
    "ragged": (mlp(momentum=0.9), (3, 9, 70, 5)),
    "Adam": (Trainer(models.build("mlp", SHAPE, CLASSES), Adam()), (5, 5)),
    "clipped": (Trainer(models.build("mlp", SHAPE, CLASSES), SGD(), clip=0.1), (5, 5)),
    "BatchNorm": (Trainer(models.build("mlp", SHAPE, CLASSES, norm="batch"), SGD()), (5, 5, 4)),
}


@pytest.mark.parametrize("case", CASES)
def test_replay_is_bit_equal_to_the_eager_scan(
    case: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, recorded: list[Captured]
) -> None:
    replayed = Stacked(GPU).drive(works(*CASES[case]))
    monkeypatch.setattr("fedgist.engines.stacked.executor.SHORTEST_CAPTURE", 1000)
    eager = Stacked(GPU).drive(works(*CASES[case]))
    assert len(recorded) == 1
    assert [storage.digest(one) for one in replayed] == [storage.digest(one) for one in eager]
    assert not [record for record in caplog.records if record.name == "fedgist"]


@pytest.mark.parametrize("tf32", [False, True])
def test_training_repeats_itself(tf32: bool) -> None:
    """Bit for bit; cuDNN's own choice for these convolutions adds their gradients up in any order."""
    net = models.build("resnet9", (3, 32, 32), 10, norm="batch")
    trainer, rng = Trainer(net, SGD(momentum=0.9)), Rng(0)
    w = GPU.put(net.init(rng("w")))
    pool = Pool(x=rng("x").normal(512, 3, 32, 32).cuda(), y=rng("y").integers(10, 512).cuda())
    plan = {"index": rng("plan").integers(512, 20, 256), "mask": torch.ones(20, 256)}
    place = replace(GPU, tf32=tf32)
    ends = [
        Stacked(place).drive([scan(trainer.step, (w, trainer.init(w)), plan, pool, torch.tensor(0.1))])
        for _ in range(3)
    ]
    assert len({storage.digest(end) for end in ends}) == 1


@pytest.mark.parametrize("model", ["mlp", "cnn", "lenet5-thesis"])
def test_equals_sequential(model: str, caplog: pytest.LogCaptureFixture) -> None:
    """Per client in L2 against a float64 run: within a small factor of the sequential engine's float32 error."""
    trainer = Trainer(models.build(model, (1, 8, 8), CLASSES), SGD(momentum=0.9))
    exact = Sequential(Place(GPU.device, torch.float64)).drive(works(trainer, (5, 5, 8)))
    plain, quick = (runner.drive(works(trainer, (5, 5, 8))) for runner in (Sequential(GPU), Stacked(GPU)))
    eps = torch.finfo(torch.float32).eps
    for truth, slow, fast in zip(exact, plain, quick, strict=True):
        usual, error = (tree.norm(tree.sub(tree.map(Tensor.double, one), truth)) for one in (slow, fast))
        assert error <= 4 * usual + 16 * eps * tree.norm(truth)
    assert not [record for record in caplog.records if record.name == "fedgist"]


def test_large_clients_are_recorded_one_by_one(monkeypatch: pytest.MonkeyPatch, recorded: list[Captured]) -> None:
    """One graph serves all of them, for scans and for calls, and there is no vmap in it."""
    monkeypatch.setattr("fedgist.engines.stacked.executor.FILLS_A_GPU", 0)
    monkeypatch.setattr(torch.func, "vmap", None)
    trainer = mlp(momentum=0.9)
    runner = Stacked(GPU)
    found, plain = (one.drive(works(trainer, (6, 6, 6))) for one in (runner, Sequential(GPU)))
    assert len(recorded) == 1
    for one, other in zip(found, plain, strict=True):
        torch.testing.assert_close(one[0], other[0])
    own = [torch.full((5,), float(i), device="cuda") for i in range(3)]
    for _ in range(3):
        made = runner.drive([compute(torch.sin, each) for each in own])
        assert all(torch.equal(one, each.sin()) for one, each in zip(made, own, strict=True))
    assert len(recorded) == 2


def test_results_survive_the_next_replay(recorded: list[Captured]) -> None:
    runner, trainer = Stacked(GPU), mlp(momentum=0.9)
    first = runner.drive(works(trainer, (6, 6), seed=1))
    before = [storage.digest(one) for one in first]
    second = runner.drive(works(trainer, (6, 6), seed=2))
    assert len(recorded) == 1
    assert [storage.digest(one) for one in first] == before
    assert [storage.digest(one) for one in second] == [
        storage.digest(o) for o in Stacked(GPU).drive(works(trainer, (6, 6), seed=2))
    ]


def test_a_longer_pool_is_recorded_anew_and_a_shorter_one_is_not(recorded: list[Captured]) -> None:
    runner, trainer = Stacked(GPU), mlp()
    for samples, count in (((20, 30), 1), ((10, 15), 1), ((40, 20), 2)):
        found = runner.drive(works(trainer, (6, 6), samples))
        alone = Sequential(GPU).drive(works(trainer, (6, 6), samples))
        assert len(recorded) == count
        for one, other in zip(found, alone, strict=True):
            torch.testing.assert_close(one[0], other[0])


def test_the_only_graph_of_a_process_is_recorded_anew() -> None:
    """Its memory outlives it where cuBLAS keeps a workspace there, which happens to the first graph of a process."""
    code = """if True:
        import torch
        from fedgist import models
        from fedgist.core.rng import Rng
        from fedgist.core.work import Place, Pool, scan
        from fedgist.engines.stacked import Stacked
        from fedgist.learning.optimisers import SGD
        from fedgist.learning.training import Trainer

        net = models.build("mlp", (1, 8, 8), 4)
        trainer, w = Trainer(net, SGD()), net.init(Rng(0))
        runner = Stacked(Place(torch.device("cuda")))
        plan = {"index": torch.zeros(5, 8, dtype=torch.int64), "mask": torch.ones(5, 8)}
        for n in (20, 30, 40):
            pool = Pool(x=torch.ones(n, 1, 8, 8), y=torch.zeros(n, dtype=torch.int64))
            runner.drive([scan(trainer.step, (w, trainer.init(w)), plan, pool, torch.tensor(0.1))])
    """
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "cannot be recorded" not in done.stderr


def test_data_stay_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same pools in the next round are not copied again."""
    loads: list[bool] = []
    runner, trainer = Stacked(GPU), mlp()
    pools = [Pool(x=torch.ones(9, *SHAPE).cuda(), y=torch.zeros(9, dtype=torch.int64).cuda()) for _ in range(2)]
    plan = {"index": torch.zeros(5, BATCH, dtype=torch.int64), "mask": torch.ones(5, BATCH)}
    w = GPU.put(trainer.model.init(Rng(0)))

    def go() -> None:
        runner.drive([scan(trainer.step, (w, {}), plan, pool, torch.tensor(0.1)) for pool in pools])

    go()
    write = Column.write

    def note(column: Column, into: Tensor, place: Place) -> None:
        loads.append(column.pooled)
        write(column, into, place)

    monkeypatch.setattr(Column, "write", note)
    go()
    assert not any(loads)


@dataclass(frozen=True)
class Cube:
    power: int = 3

    def gradient(self, at: Tensor) -> Tensor:
        return gradient(lambda w: ((w**self.power).sum(), ()), at)[0]

    def upload(self, carry: Tensor, x: Tensor) -> Tensor:
        return carry + x * torch.tensor([1.0, 2.0]).to(x.device)


def test_a_call_that_comes_again_is_recorded(recorded: list[Captured]) -> None:
    runner = Stacked(GPU)
    for turn in range(5):
        points = [torch.tensor([1.0, 2.0]) * n + turn for n in range(3)]
        found = runner.drive([compute(Cube().gradient, at) for at in points])
        assert len(recorded) == (turn >= 2)
        for at, grad in zip(points, found, strict=True):
            torch.testing.assert_close(grad.cpu(), 3 * at**2)


def test_what_cannot_be_recorded_runs_without(caplog: pytest.LogCaptureFixture) -> None:
    """A copy from the host waits for it, which a graph cannot."""
    runner = Stacked(GPU)
    for _ in range(2):
        found = runner.drive([scan(Cube().upload, torch.zeros(2), torch.full((5, 2), n)) for n in (1.0, 2.0)])
        assert [one.tolist() for one in found] == [[5.0, 10.0], [10.0, 20.0]]
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "cannot be recorded" in caplog.text


def test_a_stack_that_does_not_fit_is_halved(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each client needs 1 GiB for its step and the process may have 5 more: eight go on by fours or fewer."""
    monkeypatch.setattr("fedgist.engines.stacked.executor.FILLS_A_GPU", 1 << 40)
    caplog.set_level("INFO", "fedgist")

    def step(carry: Tensor, x: Tensor) -> Tensor:
        return carry + (x + torch.zeros(1 << 28, device=x.device)).mean()

    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.empty_cache()
    held = torch.cuda.memory_reserved()  # by what ran before in this process
    torch.cuda.set_per_process_memory_fraction(min(1.0, (held + (5 << 30)) / total))
    try:
        found = Stacked(GPU).drive([scan(step, torch.zeros(()), torch.full((5,), float(n))) for n in range(8)])
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
        torch.cuda.empty_cache()
    assert "do not fit" in caplog.text
    torch.testing.assert_close(torch.stack(found).cpu(), 5 * torch.arange(8.0))


def test_a_step_may_swap_what_it_carries() -> None:
    def step(carry: tuple[Tensor, Tensor], x: Tensor) -> tuple[Tensor, Tensor]:
        return carry[1], carry[0]

    starts = [(torch.tensor(1.0) * n, torch.tensor(2.0) * n) for n in (1, 2)]
    found = Stacked(GPU).drive([scan(step, start, torch.zeros(5)) for start in starts])
    assert [(a.item(), b.item()) for a, b in found] == [(2.0, 1.0), (4.0, 2.0)]


def test_float32_is_float32_and_the_setting_is_put_back() -> None:
    """Products of numbers with 20 significant bits differ in TF32, which keeps 10."""
    a, b = (torch.full((64, 64), 1 + 2.0**-20) * n for n in (1, 2))
    before = torch.backends.cudnn.allow_tf32
    exact, rough = (
        Stacked(replace(GPU, tf32=tf32)).drive([compute(torch.matmul, x, x) for x in (a, b)])[0]
        for tf32 in (False, True)
    )
    torch.testing.assert_close(exact.cpu(), a @ a, rtol=1e-6, atol=0)
    assert (rough.cpu() - a @ a).abs().max() > 5e-5
    assert torch.backends.cudnn.allow_tf32 == before


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # the compiler's own
def test_compiled(caplog: pytest.LogCaptureFixture) -> None:
    trainer = mlp(momentum=0.9)
    found = Stacked(GPU, compile=True).drive(works(trainer, (6, 6, 9)))
    plain = Stacked(GPU).drive(works(trainer, (6, 6, 9)))
    for one, other in zip(found, plain, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
    assert not [record for record in caplog.records if record.name == "fedgist"]


def test_one_client_alone_is_recorded_too(recorded: list[Captured]) -> None:
    (role,) = works(mlp(), (5,))
    runner = Stacked(GPU)
    work = role.send(None)
    role.close()
    expected = execute(work, GPU)
    (found,) = runner.drive([scan(work.step, work.carry, work.xs, *work.consts)])
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    assert recorded
