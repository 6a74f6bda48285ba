"""One step of supervised training: masks, clipping, and who moves what."""

import math

import pytest
import torch
import torch.nn.functional as F

from fedgist import models
from fedgist.core.rng import Rng
from fedgist.core.task import Output
from fedgist.learning.optimisers import SGD
from fedgist.learning.training import Trainer, clip, cross_entropy


def test_masked_samples_do_not_count() -> None:
    logits = Rng(0).normal(4, 3).double()
    y, mask = torch.tensor([0, 1, 2, 0]), torch.tensor([1.0, 0.0, 1.0, 0.0])
    masked = cross_entropy(Output(logits, logits, {}), y, mask, {})
    assert masked.item() == pytest.approx(F.cross_entropy(logits[[0, 2]], y[[0, 2]]).item(), rel=1e-12)


def test_clipping_scales_only_what_is_too_long() -> None:
    grads = {"a": torch.tensor([3.0]), "b": torch.tensor([4.0])}
    assert math.hypot(*(g.item() for g in clip(grads, 1.0).values())) == pytest.approx(1.0)
    assert clip(grads, 10.0)["a"].item() == 3.0
    assert clip({"a": torch.zeros(2)}, 1.0)["a"].tolist() == [0, 0]


def test_the_optimiser_moves_the_weights_and_the_forward_pass_the_statistics() -> None:
    model = models.build("mlp", (1, 4, 4), 3, hidden=(5,), norm="batch")
    w = {name: value.double() for name, value in model.init(Rng(0)).items()}
    pool = {"x": Rng(1)("x").normal(9, 1, 4, 4).double(), "y": Rng(1)("y").integers(3, 9)}
    batch = {"index": torch.tensor([3, 1, 7, 7]), "mask": torch.tensor([1.0, 1.0, 1.0, 0.0]).double()}
    trainer, lr = Trainer(model, SGD(momentum=0.9)), torch.tensor(0.5).double()
    with torch.no_grad():
        after, _ = trainer.step((w, trainer.init(w)), batch, pool, lr)
    reference = {name: w[name].clone().requires_grad_() for name in w if name not in model.buffers}
    output = model({**w, **reference}, pool["x"][batch["index"]], train=True)
    F.cross_entropy(output.logits[:3], pool["y"][batch["index"][:3]]).backward()
    for name, value in reference.items():
        torch.testing.assert_close(after[name], value.detach() - 0.5 * value.grad)
    for name in model.buffers:
        assert torch.equal(after[name], output.buffers[name])
    assert after.keys() == w.keys() and len(model.buffers) == 2

    held = frozenset(model.names_from("classifier"))
    decaying = Trainer(model, SGD(momentum=0.9, weight_decay=0.1), held=held)
    with torch.no_grad():
        under, state = decaying.step((w, decaying.init(w)), batch, pool, lr)
    assert not state.keys() & held
    for name in reference:  # nothing moves what is held, and the others move as they would
        moved = after[name] - 0.5 * 0.1 * w[name]
        torch.testing.assert_close(under[name], w[name] if name in held else moved)
