"""A client's round of training: schedules, kept momentum, moved images, and a plain torch loop as the oracle."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fedgist import models
from fedgist.core.errors import FedgistError
from fedgist.core.federation import Site
from fedgist.core.rng import Rng
from fedgist.core.work import Place
from fedgist.data.client_data import ClientData
from fedgist.engines.scheduler import drive_one
from fedgist.families.local_training import LocalOptions, train, trainer
from fedgist.learning.moves import move

MODEL = models.build("mlp", (1, 4, 4), 3, hidden=(5,))
PLACE = Place(dtype=torch.float64)


def site(n: int, round: int = 1) -> Site:
    rng = Rng(1)
    data = ClientData(rng("x").normal(n, 1, 4, 4).double(), rng("y").integers(3, n), 3)
    return Site("0", round, data, {}, rng("batches of", round), {})


def start() -> dict[str, Tensor]:
    return {name: value.double() for name, value in MODEL.init(Rng(0)).items()}


def run(options: LocalOptions, me: Site, w: dict[str, Tensor]) -> dict[str, Tensor]:
    result: dict[str, Tensor] = drive_one(train(options, trainer(options, MODEL), me, w), PLACE)
    return result


@pytest.mark.parametrize("n", [1, 5, 11])
def test_epochs_are_a_plain_torch_loop(n: int) -> None:
    """Two epochs in batches of 4 with the last batch short, as DataLoader would give them."""
    options = LocalOptions(epochs=2, batch=4, lr=0.3, momentum=0.9, weight_decay=0.01)
    me, w = site(n), start()
    reference = {name: value.clone().requires_grad_() for name, value in w.items()}
    optimizer = torch.optim.SGD(reference.values(), lr=0.3, momentum=0.9, weight_decay=0.01)
    plan = me.data.epochs(me.rng("batches"), 2, 4)
    for index, mask in zip(plan["index"], plan["mask"], strict=True):
        kept = index[mask.bool()]
        optimizer.zero_grad()
        F.cross_entropy(MODEL(reference, me.data.x[kept]).logits, me.data.y[kept]).backward()
        optimizer.step()
    trained = run(options, me, w)
    for name, value in reference.items():
        torch.testing.assert_close(trained[name], value.detach(), rtol=1e-10, atol=1e-12)


def test_moved_images_are_a_plain_torch_loop() -> None:
    """The same batches in the same order, each image moved as drawn."""
    options = LocalOptions(epochs=2, batch=4, lr=0.3, crop=1, flip=True)
    me, w = site(7), start()
    plan = options.plan(me.data, me.rng("batches"))
    usual = me.data.epochs(me.rng("batches"), 2, 4)
    assert all(torch.equal(plan[name], usual[name]) for name in usual)
    reference = {name: value.clone().requires_grad_() for name, value in w.items()}
    optimizer = torch.optim.SGD(reference.values(), lr=0.3)
    for index, mask, moves in zip(plan["index"], plan["mask"], plan["moves"], strict=True):
        kept = mask.bool()
        optimizer.zero_grad()
        x = move(me.data.x[index[kept]], moves[kept])
        F.cross_entropy(MODEL(reference, x).logits, me.data.y[index[kept]]).backward()
        optimizer.step()
    trained = run(options, me, w)
    for name, value in reference.items():
        torch.testing.assert_close(trained[name], value.detach(), rtol=1e-10, atol=1e-12)


def test_a_crop_as_large_as_the_image_is_refused() -> None:
    with pytest.raises(FedgistError, match="crop=4 shifts images of 4 × 4 pixels out of sight"):
        run(LocalOptions(steps=1, crop=4), site(5), start())


def test_a_client_without_data_keeps_its_weights() -> None:
    w = start()
    for options in (LocalOptions(steps=3), LocalOptions(epochs=2), LocalOptions(epochs=2, crop=1, flip=True)):
        trained = run(options, site(0), w)
        assert all(torch.equal(trained[name], w[name]) for name in w)


def test_kept_momentum_is_one_long_run() -> None:
    """Two rounds of 2 steps with kept state are 4 steps; with a fresh state they are not."""
    me, w = site(8), start()
    batches = me.data.steps(Rng(5), 4, 4)

    def rounds(keep: bool, cuts: list[slice]) -> dict[str, Tensor]:
        now, here = w, Site("0", 1, me.data, {}, me.rng, {})
        for cut in cuts:
            options = Fixed(steps=2, lr=0.1, momentum=0.9, keep_momentum=keep)
            options.given.update({name: value[cut] for name, value in batches.items()})
            now = run(options, here, now)
        return now

    class Fixed(LocalOptions):
        given: dict[str, Tensor] = {}

        def plan(self, data: Any, rng: Rng) -> dict[str, Tensor]:
            return self.given

    whole = rounds(True, [slice(0, 4)])
    kept = rounds(True, [slice(0, 2), slice(2, 4)])
    fresh = rounds(False, [slice(0, 2), slice(2, 4)])
    assert all(torch.equal(whole[name], kept[name]) for name in w)
    assert any(not torch.allclose(whole[name], fresh[name]) for name in w)


def test_schedules() -> None:
    assert [LocalOptions(lr=1.0).lr_at(r) for r in (1, 9)] == [1, 1]
    falling = LocalOptions(lr=1.0, schedule="exponential", decay=0.5)
    assert [falling.lr_at(r) for r in (1, 2, 4)] == [1, 0.5, 0.125]
    cosine = LocalOptions(lr=2.0, schedule="cosine", horizon=10)
    assert [cosine.lr_at(r) for r in (1, 6, 11, 99)] == pytest.approx([2, 1, 0, 0])
    steps = LocalOptions(lr=1.0, schedule="steps", decay=0.2, falls=(250, 400))  # TOFU, section 4.1
    assert [steps.lr_at(r) for r in (1, 250, 251, 400, 401)] == pytest.approx([1, 1, 0.2, 0.2, 0.04])
