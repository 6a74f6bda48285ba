"""Every method × every engine: the same states, the same bytes, the same after a resume, whatever the order.

A new method joins by being in the registry; its `toy` profile is what is run, on 300 real 8×8 digits over five clients.
"""

import math
import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

import toys
from fedgist import methods, storage
from fedgist.core import tree
from fedgist.core.codec import Codec
from fedgist.core.ledger import Ledger
from fedgist.core.message import tag_of
from fedgist.core.method import who_sees_what
from fedgist.engines import EXECUTORS
from fedgist.engines.local import LocalEngine
from fedgist.experiments.config import RunConfig, resolve
from fedgist.experiments.inputs import Inputs
from fedgist.families.local_training import TrainingOptions
from toys import play, toy

EPS = torch.finfo(torch.float32).eps
DEVICE = os.environ.get("FEDGIST_TEST_DEVICE", "cpu")  # `cuda` runs the suite on a GPU
ON_A_GPU = pytest.mark.skipif(DEVICE == "cpu", reason="15 s and more a method: set FEDGIST_TEST_DEVICE=cuda")
COMPILED = pytest.param("compiled", marks=[ON_A_GPU, pytest.mark.filterwarnings("ignore")])  # the compiler's warnings
FAST = [*(name for name in EXECUTORS if name != "sequential"), COMPILED]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "method" in metafunc.fixturenames:
        metafunc.parametrize("method", methods.registry())
    if "engine" in metafunc.fixturenames:
        metafunc.parametrize("engine", FAST)
    if "any_engine" in metafunc.fixturenames:
        metafunc.parametrize("any_engine", ["sequential", *FAST])


def digits(method: str) -> tuple[RunConfig, Inputs]:
    return toy(method, clients=5)


def with_odd_clients(inputs: Inputs) -> Inputs:
    """The same federation, with one client that has no samples and one that has a single one."""
    ids = sorted(inputs.sites)
    few = {ids[0]: 0, ids[-1]: 1} if len(ids) > 2 else {ids[-1]: 1}
    sites = {
        id: replace(data, x=data.x[: few[id]], y=data.y[: few[id]]) if id in few else data
        for id, data in inputs.sites.items()
    }
    return replace(inputs, sites=sites)


Build = Callable[..., LocalEngine]


@pytest.fixture
def federation(tmp_path: Path) -> Iterator[Build]:
    """Builds the toy federation of a method."""
    ledgers: list[Ledger] = []

    def build(
        method: str,
        engine: str = "sequential",
        dtype: torch.dtype = torch.float32,
        seed: int = 0,
        inputs: Inputs | None = None,
        record: bool = False,
        options: dict[str, Any] | None = None,
        **settings: Any,
    ) -> LocalEngine:
        config, usual = digits(method)
        inputs = inputs or usual
        number = len(ledgers)
        ledger = Ledger(
            tmp_path / f"ledger-{number}.csv",
            record=["all"] if record else [],
            transcript=tmp_path / f"transcript-{number}" if record else None,
        )
        ledgers.append(ledger)
        built = methods.find(method)(replace(config.options, **(options or {})), inputs.task)
        where = {"engine": engine, "device": DEVICE, "dtype": dtype, "info": inputs.info}
        return toys.federation(built, inputs.sites, **where, seed=seed, ledger=ledger, **settings)

    yield build
    for ledger in ledgers:
        ledger.close()


def floats(state: Any) -> Tensor:
    """All floating numbers of a state, as one float64 vector."""
    found = [leaf for leaf in tree.leaves(state) if isinstance(leaf, Tensor) and leaf.is_floating_point()]
    return torch.cat([torch.zeros(0, dtype=torch.float64)] + [leaf.cpu().double().flatten() for leaf in found])


def others(state: Any) -> list[Any]:
    """Everything in a state that must be equal exactly: integers, strings, integer tensors, the structure."""
    exact = [leaf for leaf in tree.leaves(state) if not (isinstance(leaf, Tensor) and leaf.is_floating_point())]
    return [leaf.tolist() if isinstance(leaf, Tensor) else leaf for leaf in exact] + [tree.structure(state)]


def test_engines_agree(federation: Build, method: str, engine: str) -> None:
    """A fast engine is as near to the float64 truth as the slow one, per client in L2, and counts the same bytes.

    Derivation of the tolerance: both engines compute the same sums in different orders, so each has an error of the
    size of float32 rounding against a float64 run of the same rounds. The slow engine's error measures that size; where
    it happens to be nil, a few units in the last place of the state's norm stand in for it.
    """
    truth = play(federation(method, dtype=torch.float64), 2)
    slow, fast = play(federation(method), 2), play(federation(method, engine), 2)
    assert ledger(slow) == ledger(fast)
    parts = {"nodes": (truth.states, slow.states, fast.states)}
    parts |= {id: (truth.site_states[id], slow.site_states[id], fast.site_states[id]) for id in slow.site_states}
    assert truth.site_states.keys() == slow.site_states.keys() == fast.site_states.keys()
    for who, (exact, plain, quick) in parts.items():
        assert others(plain) == others(quick), who
        size = floats(exact).norm().item()
        usual = (floats(plain) - floats(exact)).norm().item()
        error = (floats(quick) - floats(exact)).norm().item()
        assert error <= 4 * usual + 16 * EPS * size, (who, error, usual, size)


def ledger(engine: LocalEngine) -> str:
    engine.ledger.position()  # flushes
    assert engine.ledger.path is not None
    return engine.ledger.path.read_text()


def test_same_seed_same_result(federation: Build, method: str) -> None:
    first, again, other = (play(federation(method, seed=seed), 2) for seed in (1, 1, 2))
    assert storage.digest(first.snapshot()) == storage.digest(again.snapshot())
    assert storage.digest(first.snapshot()) != storage.digest(other.snapshot())


def test_client_order_does_not_matter(federation: Build, method: str) -> None:
    inputs = digits(method)[1]
    backwards = replace(inputs, sites=dict(reversed(inputs.sites.items())), info=dict(reversed(inputs.info.items())))
    first, second = play(federation(method), 2), play(federation(method, inputs=backwards), 2)
    assert {k: storage.digest(v) for k, v in first.site_states.items()} == {
        k: storage.digest(v) for k, v in second.site_states.items()
    }
    assert storage.digest(first.states) == storage.digest(second.states)
    assert ledger(first) == ledger(second)


def test_resume_equals_uninterrupted(federation: Build, method: str, tmp_path: Path) -> None:
    whole = play(federation(method), 3)
    for killed_after in (0, 1, 2):
        first = play(federation(method), killed_after)
        first.evaluate(digits(method)[1].test)  # an evaluation leaves no trace in the state
        storage.save(first.snapshot(), tmp_path / "checkpoint")
        second = federation(method)
        second.restore(storage.load(tmp_path / "checkpoint"))
        assert storage.digest(play(second, 3 - killed_after).snapshot()) == storage.digest(whole.snapshot())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_restored_federation_is_where_it_was(
    federation: Build, method: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    """Bit for bit and dtype for dtype, before anything more is done."""
    engine = play(federation(method, dtype=dtype), 1)
    storage.save(engine.snapshot(), tmp_path / "checkpoint")
    again = federation(method, dtype=dtype)
    again.restore(storage.load(tmp_path / "checkpoint"))
    assert again.digest() == engine.digest()


def test_nothing_is_changed_in_place(federation: Build, method: str, engine: str) -> None:
    """Neither a round nor an evaluation writes into the tensors of a committed state: a skipped round needs them."""
    played = play(federation(method, engine), 1)
    committed = tree.copy(played.snapshot())
    before = storage.digest(committed)
    play(played, 1).evaluate(digits(method)[1].test)
    assert storage.digest(played.snapshot()) != before
    assert storage.digest(committed) == before


def test_evaluation_gives_an_accuracy(federation: Build, method: str) -> None:
    engine = play(federation(method), 1)
    metrics = engine.evaluate(digits(method)[1].test)
    assert 0 <= metrics["accuracy"] <= 1
    assert all(isinstance(value, float) and math.isfinite(value) for value in metrics.values())


def test_drop_outs(federation: Build, method: str) -> None:
    """About half of the clients miss an exchange: somebody is missing, and what is learnt stays finite."""
    engine = federation(method, offline=0.5)
    reports = [engine.run_round() for _ in range(3)]
    assert any(report.answered < len(engine.ids) for report in reports)
    assert torch.isfinite(floats([engine.states, engine.site_states])).all()


def test_nobody_answers(federation: Build, method: str) -> None:
    """A round finds nobody: it is skipped, said so, and nothing is lost; the next goes on from the one before it."""
    plain = play(federation(method), 1)
    asked = plain.ledger.totals().messages
    silent = 2 if play(plain, 1).ledger.totals().messages > asked else 1  # a method may be done after its first round
    engine = play(federation(method, offline=lambda id, round, exchange: round == silent), silent - 1)
    before = storage.digest([engine.states, engine.site_states])
    report = engine.run_round()
    assert f"round {silent}" in (report.skipped or "")
    assert storage.digest([engine.states, engine.site_states]) == before
    assert engine.run_round().skipped is None


def test_odd_clients(federation: Build, method: str, any_engine: str) -> None:
    """Clients with few or no samples crash nothing and spoil nothing."""
    inputs = with_odd_clients(digits(method)[1])
    played = play(federation(method, any_engine, inputs=inputs), 2)
    assert torch.isfinite(floats([played.states, played.site_states])).all()
    played.evaluate(inputs.test)


def test_a_client_sees_only_its_own_data(federation: Build, method: str, tmp_path: Path) -> None:
    """What a client replies to the first request of the first round is the same whatever the others hold."""
    inputs = digits(method)[1]
    ids = sorted(inputs.sites)
    changed = {id: replace(data, x=-data.x) if id != ids[0] else data for id, data in inputs.sites.items()}
    replies = []
    for given in (inputs, replace(inputs, sites=changed)):
        engine = play(federation(method, inputs=given, record=True), 1)
        assert engine.ledger.transcript is not None
        found = sorted(engine.ledger.transcript.glob(f"00001-round-00000-{ids[0]}-*"))
        replies.append([path.read_bytes() for path in found])
    assert replies[0], "the client was not asked, so nothing is compared"
    assert replies[0] == replies[1]


def test_moved_images(federation: Build, method: str) -> None:
    """Whoever trains on own images mirrors them where that is asked for, and draws everything else as before."""
    config, inputs = digits(method)
    if not isinstance(config.options, TrainingOptions):
        pytest.skip("clients do not train")
    halves = {id: data.x[..., : data.x.shape[-1] // 2] for id, data in inputs.sites.items()}
    their_own_mirror_image = replace(
        inputs,
        sites={
            id: replace(data, x=torch.cat([halves[id], halves[id].flip(-1)], -1)) for id, data in inputs.sites.items()
        },
    )
    for given, same in ((inputs, False), (their_own_mirror_image, True)):
        plain, moved = (play(federation(method, inputs=given, options={"flip": flip}), 2) for flip in (False, True))
        assert (plain.digest() == moved.digest()) is same


def test_wire_and_ledger_agree(federation: Build, method: str) -> None:
    """Each message's bytes are what the ledger counts, safetensors reads them, and decoding gives what was received."""
    engine = play(federation(method, record=True), 1)
    engine.evaluate(digits(method)[1].test)
    assert engine.ledger.transcript is not None
    counted = [line.split(",") for line in ledger(engine).splitlines()[1:]]
    files = {path.name: path for path in engine.ledger.transcript.iterdir()}
    assert len(files) == len(counted) > 0
    classes = {
        tag_of(cls): cls for handler in engine.method.handlers.values() for cls in (handler.request, handler.reply)
    }
    for row in counted:
        _, round, phase, exchange, _, sender, receiver, tag, header, payload, paper = row
        path = files[f"{int(round):05d}-{phase}-{int(exchange):05d}-{sender}-{receiver}-{tag}.safetensors"]
        data = path.read_bytes()
        assert len(data) == int(header) + int(payload)
        tensors = load_file(path)
        assert sum(t.numel() * t.element_size() for t in tensors.values()) == int(payload)
        assert int(paper) <= 4 * sum(t.numel() for t in tensors.values())
        site = receiver if receiver in engine.info else sender
        codec = Codec(engine.method.bounds(engine.info[site]["model"]))
        assert codec.encode(codec.decode(classes[tag], data)) == data
        assert len(data) <= codec.limit(classes[tag])


def test_additive_fields_are_never_visible(federation: Build, method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """An asker gets additive fields as a sum only; `who_sees_what` says the same."""
    seen: list[tuple[str, set[str], set[str]]] = []
    collect = LocalEngine.collect

    def spy(self: LocalEngine, ask: Any) -> Any:
        answers = collect(self, ask)
        visible = {name for id in answers for name in vars(answers[id])}
        seen.append((ask.reply.__name__, visible, set(vars(answers.sum))))
        return answers

    monkeypatch.setattr(LocalEngine, "collect", spy)
    play(federation(method), 1)
    declared = who_sees_what(methods.find(method))
    assert seen
    for reply, visible, summed in seen:
        assert visible == {field for _, name, field, additive in declared if name == reply and not additive}
        assert summed == {field for _, name, field, additive in declared if name == reply and additive}


def test_profiles(method: str) -> None:
    """Each profile resolves to a valid configuration, and a reduced one says what it reduced."""
    found = methods.find(method)
    if found.__module__.startswith("fedgist.methods."):  # others may do without
        assert found.profiles.keys() >= {"paper", "small", "toy"}
        assert "demo" in found.profiles or method in ("fedsgd", "dp-fedavg")  # which know no BatchNorm
        assert found.summary.endswith(".")
    for profile in found.profiles:
        assert resolve({"method": method}, profile=profile).method == method
    assert all("dataset" in found.profiles[profile] for profile in found.profiles.keys() - {"demo", "toy"})
    assert all("note" in found.profiles[profile] for profile in found.profiles.keys() & {"small", "demo"})
    assert len(found.summary) < 140


def test_messages_have_docstrings(method: str) -> None:
    for handler in methods.find(method).handlers.values():
        for cls in (handler.request, handler.reply):
            assert not (cls.__doc__ or f"{cls.__name__}(").startswith(f"{cls.__name__}("), tag_of(cls)
