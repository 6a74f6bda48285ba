"""Every method that shares only sums: under masks the bits of the ring's sum, and of floats all that float32 shows."""

from importlib.util import find_spec
from typing import Any

import pytest
import torch
from torch import Tensor

from fedgist import methods, storage
from fedgist.core.federation import Answers
from fedgist.core.method import who_sees_what
from fedgist.engines.layer import Layer
from fedgist.engines.local import LocalEngine
from fedgist.engines.schemes import Helped, Masks, Simulated, helped_here, masks_here
from fedgist.engines.secure_sum import SecureSum
from fedgist.secure.ring import Grid
from toys import clients, federation, received, toy, toy_federation


def sums_only(name: str) -> bool:
    config, inputs = toy(name, clients=5)
    seen = who_sees_what(methods.find(name)(config.options, inputs.task))
    return len(inputs.sites) > 1 and bool(seen) and all(additive for *_, additive in seen)


METHODS = [name for name in methods.registry() if sums_only(name)]


def test_they_are_those_that_the_page_names() -> None:
    assert {"fedavg", "scaffold", "codream", "gist", "feddistill", "fednova"} <= set(METHODS)


def run(name: str, layer: Layer | None) -> tuple[LocalEngine, list[Answers[Any]]]:
    engine = toy_federation(name, clients=5, between=layer)
    got = received(engine)
    for _ in range(2):
        assert engine.run_round().skipped is None
    engine.evaluate(toy(name, clients=5)[1].test)
    return engine, got


def flat(answers: Answers[Any]) -> Tensor:
    """All that the asker sees as sums, as one vector a field."""
    parts = [torch.zeros(1, dtype=torch.float64)]
    for value in vars(answers.sum).values():
        for leaf in value.values() if isinstance(value, dict) else [value]:
            parts.append(torch.as_tensor(leaf, dtype=torch.float64).reshape(-1))
    return torch.cat(parts)


def off(ours: Answers[Any], exact: Answers[Any]) -> float:
    return float((flat(ours) - flat(exact)).norm() / flat(exact).norm().clamp_min(1e-300))


@pytest.mark.skipif(find_spec("cryptography") is None, reason="needs pip install 'fedgist[secure]'")
@pytest.mark.parametrize("method", METHODS)
def test_masks_change_no_bit_of_the_ring_s_sum(method: str) -> None:
    ids = [str(i) for i in range(5)]
    masks, helper = masks_here(ids, 3), helped_here(ids, 3)
    assert isinstance(masks, Masks) and isinstance(helper, Helped)
    (masked, ours), (with_helper, helped), (ring, theirs), (_, floats) = (
        run(method, layer) for layer in (*(SecureSum(ids, one) for one in (masks, helper, Simulated())), None)
    )
    assert masked.digest() == with_helper.digest() == ring.digest()
    for sums in (ours, helped):
        assert [storage.digest(flat(one)) for one in sums] == [storage.digest(flat(one)) for one in theirs]
    assert max(off(one, exact) for one, exact in zip(ours, floats, strict=True)) <= 1e-6
    assert masked.ledger.totals().messages > ring.ledger.totals().messages


def test_a_thousand_clients_of_ten_samples() -> None:
    """A client's w·10/2^20 is small: 64 bits keep its digits, and 32, the planted fault, lose them."""
    sites = clients(*[10] * 1000, name="{:04d}")
    ids, got = list(sites), []
    for layer in (None, SecureSum(ids, Simulated()), SecureSum(ids, Simulated(), Grid(32, 20))):
        engine = federation("fedavg", sites, "mlp:hidden=4", engine="stacked", between=layer, steps=1, batch=10)
        got.append(received(engine))
        assert engine.run_round().skipped is None
    (floats,), (ours,), (few,) = got
    assert off(ours, floats) <= 1e-8
    assert off(few, floats) > 1e-6
