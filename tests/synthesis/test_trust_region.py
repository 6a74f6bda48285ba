"""The ball in which a surrogate is good: its projection, the weighted loss, and training that stays inside."""

import pytest
import torch
import torch.nn.functional as F

from fedgist import models, storage
from fedgist.core import tree
from fedgist.core.rng import Rng
from fedgist.core.task import Output
from fedgist.learning.optimisers import SGD
from fedgist.learning.training import Trainer
from fedgist.synthesis.augmentation import Augmentation, Change
from fedgist.synthesis.trust_region import SurrogateTrainer, project, weighted_cross_entropy


def test_projection_finds_the_nearest_point_of_the_ball() -> None:
    rng = Rng(0)
    centre = {"a": rng("a").normal(3, 2), "b": rng("b").normal(4), "mean": torch.zeros(2)}
    far = {"a": centre["a"] + 3.0, "b": centre["b"] - 2.0, "mean": torch.ones(2)}
    back = project(far, centre, 0.5, frozenset({"mean"}))
    moved = {name: back[name] - centre[name] for name in ("a", "b")}
    assert abs(tree.norm(moved) - 0.5) < 1e-6
    # nearest: what is cut off points along the radius
    rest = {name: far[name] - back[name] for name in moved}
    assert tree.dot(rest, moved) > (1 - 1e-6) * tree.norm(rest) * tree.norm(moved)
    assert torch.equal(back["mean"], far["mean"])
    near = project(back, centre, 0.6, frozenset({"mean"}))
    assert tree.norm(tree.sub(near, back)) < 1e-6
    assert storage.digest(project(centre, centre, 0.5, frozenset())) == storage.digest(centre)


def test_the_loss_weighs_images_and_divides_by_those_that_count() -> None:
    """(2 ℓ_0 + ½ ℓ_2) / 2: the image of weight 0 only fills up the batch."""
    logits, y = Rng(0).normal(3, 4).double(), torch.tensor([1, 0, 3])
    each = F.cross_entropy(logits, y, reduction="none")
    found = weighted_cross_entropy(Output(logits, logits, {}), y, torch.tensor([2.0, 0.0, 0.5]).double(), {})
    torch.testing.assert_close(found, (2 * each[0] + 0.5 * each[2]) / 2)
    none = weighted_cross_entropy(Output(logits, logits, {}), y, torch.zeros(3).double(), {})
    assert none.item() == 0  # a batch of one site, which says that its images stand for nothing


@pytest.mark.parametrize("rho", [0.01, 10.0])
def test_a_step_is_one_of_the_trainer_and_then_back_into_the_ball(rho: float) -> None:
    """BatchNorm statistics are not trained, so that the ball does not hold them."""
    model = models.build("mlp", (1, 4, 4), 3, hidden=(5,), norm="batch")
    learner = SurrogateTrainer(Trainer(model, SGD(), weighted_cross_entropy), rho)
    w = {name: value.double() for name, value in model.init(Rng(1)).items()}
    pool = {"x": Rng(2)("x").normal(6, 1, 4, 4).double(), "y": Rng(2)("y").integers(3, 6)}
    batch = {"index": torch.arange(6), "mask": torch.ones(6).double(), "lr": torch.tensor(0.5).double()}
    with torch.no_grad():
        free, _ = learner.trainer.step((w, {}), batch, pool, batch["lr"])
        held, _ = learner.step((w, {}), batch, pool, w)
    moved, way = ({name: end[name] - w[name] for name in w if name not in model.buffers} for end in (held, free))
    assert 0.01 < tree.norm(way) < 10
    torch.testing.assert_close(tree.norm(moved), tree.norm(way).clamp_max(rho))
    for name in model.buffers:
        assert torch.equal(held[name], free[name]) and not torch.equal(held[name], w[name])


def test_changed_images_are_those_of_the_batch() -> None:
    """A step on shifted images is the step of a pool that holds them shifted."""
    model = models.build("mlp", (1, 8, 8), 3, hidden=(5,))
    learner = SurrogateTrainer(Trainer(model, SGD(), weighted_cross_entropy), 10.0)
    w, x = model.init(Rng(1)), Rng(2)("x").normal(6, 1, 8, 8)
    pool = {"x": x, "y": Rng(2)("y").integers(3, 6)}
    batch = {"index": torch.tensor([4, 0, 5]), "mask": torch.ones(3), "lr": torch.tensor(0.5)}
    changes = Augmentation(("crop",), (8, 8)).draw(torch.arange(3))
    moved = x.clone()
    moved[batch["index"]] = Change(changes, x[batch["index"]])(x[batch["index"]])
    assert not torch.equal(moved, x)
    with torch.no_grad():
        found, _ = learner.step((w, {}), {**batch, "changes": changes}, pool, w)
        expected, _ = learner.step((w, {}), batch, {**pool, "x": moved}, w)
    assert storage.digest(found) == storage.digest(expected)
