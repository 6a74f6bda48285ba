"""Bad clients and what holds against them: by hand, and for every method."""

from dataclasses import replace

import pytest
import torch

from fedgist import methods
from fedgist.core.codec import Codec
from fedgist.engines import robust
from fedgist.engines.adversary import Adversary, Bad, poisoned, triggered
from fedgist.engines.layer import Exchange, Plain
from fedgist.engines.local import LocalEngine
from fedgist.engines.sequential import Sequential
from fedgist.families.global_model import Global, Local
from fedgist.families.surrogate import Images
from toys import by_label, task_of, toy

HERE = Exchange("run", "round", 1, 0)
CODEC = Codec({"model": {"w": (2,)}})
BEFORE = torch.tensor([1.0, 2.0])


def local(w, p):
    return CODEC.pack(Local({"w": p * torch.tensor(w)}, p))


def sent(layer, id, leaves, exchange=HERE):
    site = layer.site(id)
    site.hear(exchange, Global, CODEC.pack(Global({"w": BEFORE})))
    return site.wrap(exchange, {}, Local, leaves)["pw/w"]


@pytest.mark.parametrize(
    ("kind", "strength", "after"),
    [("sign-flip", 1.0, [0.0, 1.5]), ("scale", 10.0, [11.0, 7.0]), ("free-rider", 0.0, [1.0, 2.0])],
)
def test_a_bad_client_changes_what_it_learned_and_keeps_its_weight(kind, strength, after):
    """It began at (1, 2), got to (2, 2.5), and sends p = 1/2 times what it says."""
    layer = Adversary(Plain(), Bad(kind, strength, 0), ["b"])
    honest = local([2.0, 2.5], 0.5)
    torch.testing.assert_close(sent(layer, "b", honest), 0.5 * torch.tensor(after))
    assert torch.equal(sent(layer, "a", honest), honest["pw/w"])
    judged = Exchange("run", "evaluation", 1, 0)
    assert torch.equal(sent(layer, "b", honest, judged), honest["pw/w"])


def test_noise_is_as_large_as_it_is_said_to_be():
    leaves = Codec({"model": {"w": (20_000,)}}).pack(Local({"w": torch.full((20_000,), 0.1)}, 1.0))
    made = Adversary(Plain(), Bad("noise", 3.0, 0), ["b"]).site("b").wrap(HERE, {}, Local, leaves)["pw/w"]
    assert made.std() == pytest.approx(0.3, rel=0.03) and abs(made.mean()) < 0.01


def test_colluders_send_the_same_and_a_little_is_enough():
    replies = {"a": local([9.0, 9.0], 1.0), "b": local([1.0, 4.0], 1.0), "c": local([3.0, 4.0], 1.0)}
    same = Adversary(Plain(), Bad("collude", 1.0, 0), ["b", "c"]).accept(HERE, Local, replies)
    assert torch.equal(same["b"]["pw/w"], same["c"]["pw/w"]) and torch.equal(same["a"]["pw/w"], replies["a"]["pw/w"])
    little = Adversary(Plain(), Bad("alie", 1.5, 0), ["b", "c"]).accept(HERE, Local, replies)
    torch.testing.assert_close(little["b"]["pw/w"], torch.tensor([2.0 - 1.5 * 2**0.5, 4.0]))


def test_poisoned_data():
    task, data = task_of("mlp:hidden=4"), by_label({"0": [0, 4, 0, 4]})["0"]
    assert poisoned(data, "label-flip", task).y.tolist() == [2, 2, 2, 2, 0, 0, 0, 0]
    bad = poisoned(data, "backdoor", task)
    assert bad.y.tolist() == [0, 1, 0, 1, 0, 3, 0, 3] and data.y.tolist() == [1, 1, 1, 1, 3, 3, 3, 3]
    assert torch.equal(bad.x[1], data.x[1]) and (bad.x[0, :, -3:, -3:] == 1).all()
    assert torch.equal(triggered(data.x, task)[..., :-3, :], data.x[..., :-3, :])


def test_the_trigger_of_a_table_is_the_largest_value_of_each_of_its_last_columns():
    task = replace(task_of("mlp:hidden=4", (5,)), high=(1.0, 2.0, 3.0, 4.0, 5.0))
    assert triggered(torch.zeros(2, 5), task).tolist() == [[0.0, 0.0, 3.0, 4.0, 5.0]] * 2


# Defences


def test_medians_and_trimmed_means_by_hand():
    values = torch.tensor([0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 1e9])[:, None]
    assert robust.middle(values, "trimmed").tolist() == [4.5]  # three off at both ends
    assert robust.middle(values, "median").tolist() == [4.5]
    assert robust.middle(values[:9], "median").tolist() == [4.0]
    assert robust.middle(torch.tensor([[1.0], [torch.nan], [5.0], [2.0]]), "median").tolist() == [2.0]


def test_krum_takes_the_one_in_the_crowd():
    points = torch.tensor([[0.0], [1.0], [1.5], [2.1], [50.0]])
    assert robust.krum(points) == 2  # of five, one may be bad: the two nearest are 0.25 and 0.36 away, squared


@pytest.mark.parametrize(("way", "mean"), [("median", [2.0, 2.0]), ("trimmed", [2.0, 2.0])])
def test_weights_are_compared_for_each_p(way, mean):
    """Five clients; a bad one with the largest p says 1000. What is summed is as if all had said the middle."""
    told = [([1.0, 1.0], 0.1), ([2.0, 2.0], 0.3), ([3.0, 3.0], 0.2), ([2.0, 2.0], 0.1), ([1000.0, -1000.0], 1.0)]
    made = robust.held_together(Local, {str(i): local(*one) for i, one in enumerate(told)}, way)
    total = sum(leaves["pw/w"] for leaves in made.values()) / sum(p for _, p in told)
    if way == "median":
        torch.testing.assert_close(total, torch.tensor(mean))
    assert (total - torch.tensor(mean)).abs().max() < 0.5


def test_clipping_pulls_the_farthest_in_and_leaves_the_nearest_alone():
    told = {str(i): local([float(i), 0.0], 1.0) for i in range(4)} | {"bad": local([100.0, 0.0], 1.0)}
    made = robust.held_together(Local, told, "clip")  # centre 2, distances 2, 1, 0, 1, 98: none beyond 1
    assert [leaves["pw/w"][0].item() for leaves in made.values()] == pytest.approx([1.0, 1.0, 2.0, 3.0, 3.0])


def test_images_far_from_those_of_the_others_are_left_out():
    codec = Codec({"images": 20, "input": (1, 4, 4), "shown counts": {}, "classes": 2})

    def images(level, label):
        return codec.pack(Images(torch.full((3, 1, 4, 4), level), torch.full((3,), label), {}))

    replies = {
        "a": images(0.9, 1),
        "b": images(1.0, 1),
        "c": images(1.1, 1),
        "bad": images(-1.0, 1),
        "d": images(5.0, 0),
    }
    made = robust.without_outliers(Images, replies)
    assert {id: len(leaves["labels"]) for id, leaves in made.items()} == {"a": 3, "b": 3, "c": 3, "bad": 0, "d": 3}


def test_replies_without_images_have_none_that_could_be_left_out():
    replies = {id: local([1.0, 1.0], 1.0) for id in "abc"}
    assert robust.Robust(Plain(), "filter").accept(HERE, Local, replies) == replies


def test_clients_that_clip_bind_only_those_that_do():
    """The norm binds an honest client; a bad one turns round what its own code has clipped, ten times as far."""
    layer = robust.Robust(Adversary(Plain(), Bad("scale", 10.0, 0), ["b"]), "clip", norm=0.5)
    far = local([1.0, 5.0], 0.5)
    torch.testing.assert_close(sent(layer, "a", far), 0.5 * torch.tensor([1.0, 2.5]))
    torch.testing.assert_close(sent(layer, "b", far), 0.5 * torch.tensor([1.0, 7.0]))


@pytest.mark.parametrize("name", [name for name in methods.available() if not methods.find(name).pooled])
def test_every_method_meets_bad_clients(name):
    """No method has a line for them: a round goes through, differently, and with a defence differently again."""
    config, inputs = toy(name)
    images = name in ("feddm", "real", "tofu")
    ways = [None, "filter"] if name in ("feddm", "real") else [None] if images else [None, "median"]
    method = methods.find(name)(config.options, inputs.task)
    found = []
    for bad, way in [([], None), *((sorted(inputs.sites)[1:], way) for way in ways)]:
        layer = Adversary(Plain(), Bad("sign-flip", 1.0, 0), bad)
        layer = layer if way is None else robust.Robust(layer, way)
        engine = LocalEngine(method, inputs.sites, seed=0, executor=Sequential(), info=inputs.info, layer=layer)
        assert engine.run_round().skipped is None
        found.append(engine.digest())
    assert len({*found}) == len(found) or name in ("independent", "real")
