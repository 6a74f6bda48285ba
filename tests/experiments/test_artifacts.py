"""What runs keep to look at: at which rounds, what is in it, and that nothing else depends on it."""

import json

import pytest
import torch

from fedgist.core.federation import Exhibit
from fedgist.core.task import Task
from fedgist.experiments import artifacts, runner
from fedgist.experiments import config as configs
from fedgist.experiments.folder import RunFolder

TASK = Task((1, 2, 2), 3, (-1.0,), (3.0,), {}, "")


def exhibit(values, labels=None, name="images", owner="", stretched=False):
    return Exhibit(name, values, labels, owner, stretched)


def kept(tmp_path, *exhibits):
    artifacts.save(exhibits, TASK, tmp_path / "round-000007.safetensors")
    return list(artifacts.load(tmp_path))


@pytest.mark.parametrize(
    ("rounds", "every", "expected"),
    [
        (3, None, [1, 2, 3]),
        (30, None, [1, 4, 8, 12, 16, 20, 24, 28, 30]),
        (10, 4, [1, 4, 8, 10]),
        (5, 0, []),
    ],
)
def test_the_rounds_that_are_kept(rounds, every, expected):
    assert [r for r in range(1, rounds + 1) if artifacts.due(r, rounds, every)] == expected


def test_images_are_kept_as_pixels(tmp_path):
    """Pixels run from -1 to 3, so that level 255 · (x + 1) / 4 is kept, and what lies outside is black or white."""
    (shown,) = kept(tmp_path, exhibit(torch.tensor([-9.0, -1.0, 0.0, 4.0]).view(1, 1, 2, 2), torch.tensor([2])))
    assert (shown.round, shown.name, shown.are_images) == (7, "images", True)
    assert shown.values.flatten().tolist() == [0, 0, 64, 255]
    assert shown.labels.tolist() == [2]


def test_a_stretched_image_spans_its_own_range(tmp_path):
    two = torch.tensor([[0.0, 1.0, 2.0, 4.0], [-10.0, -10.0, -10.0, 10.0]]).view(2, 1, 2, 2)
    (shown,) = kept(tmp_path, exhibit(two, stretched=True))
    assert shown.values.flatten(1).tolist() == [[0, 64, 128, 255], [0, 0, 0, 255]]


def test_at_most_a_hundred_images_evenly_from_all_classes(tmp_path):
    labels = torch.tensor([0] * 500 + [1] * 200 + [2] * 5)
    marks = torch.linspace(-1, 3, 705)[:, None, None, None].expand(-1, 1, 2, 2)
    (shown,) = kept(tmp_path, exhibit(marks, labels))
    assert torch.bincount(shown.classes).tolist() == [33, 33, 5]
    first = shown.values[shown.classes == 0, 0, 0, 0]
    assert first[0] == 0
    assert first[-1] == round(499 / 704 * 255)


def test_exhibits_of_one_name_are_one_with_their_owners(tmp_path):
    parts = [exhibit(torch.full((2, 5), float(i)), torch.tensor([0, 1]), "means", str(i)) for i in range(3)]
    (shown,) = kept(tmp_path, *parts)
    assert shown.owners == ["0", "0", "1", "1", "2", "2"]
    assert shown.values[:, 0].tolist() == [0, 0, 1, 1, 2, 2]
    assert not shown.are_images


def test_the_likeliest_class_of_soft_labels(tmp_path):
    soft = torch.tensor([[0.1, 0.9, 0.0], [0.6, 0.2, 0.2]])
    (shown,) = kept(tmp_path, exhibit(torch.zeros(2, 1, 2, 2), soft))
    assert shown.classes.tolist() == [1, 0]
    assert shown.labels[0, 1] == pytest.approx(0.9, abs=1e-3)


def test_what_is_no_picture_is_left_out_and_without_anything_there_is_no_file(tmp_path):
    assert kept(tmp_path, exhibit(torch.zeros(4, 7, 3, 3)), exhibit(torch.zeros(0, 1, 2, 2))) == []
    assert list(tmp_path.iterdir()) == []


def test_a_torn_file_is_left_out(tmp_path):
    assert kept(tmp_path, exhibit(torch.zeros(1, 1, 2, 2)))
    path = tmp_path / "round-000007.safetensors"
    path.write_bytes(path.read_bytes()[:-3])
    assert list(artifacts.load(tmp_path)) == []


METHODS = {
    "feddm": {"images that the clients sent": (True, 1)},
    "codream": {"dreams": (True, 2)},
    "tofu": {"proxy images up": (True, None), "proxy images down": (True, None)},
    "repshare": {"class representations": (False, 1)},
}


def run(method, path, **values):
    config = configs.resolve({"method": method, "clients": 3, "device": "cpu", **values}, profile="toy")
    runner.run(config, path)
    return RunFolder(path)


@pytest.mark.parametrize("method", METHODS)
def test_methods_show_what_they_share_and_nothing_depends_on_it(method, tmp_path):
    folder = run(method, tmp_path / "run")
    shown = list(artifacts.load(folder.shown))
    assert {s.name: (s.are_images, None if s.labels is None else s.labels.ndim) for s in shown} == METHODS[method]
    assert {s.round for s in shown} == {1, 2}
    blind = run(method, tmp_path / "blind", artifacts_every=0)
    assert not blind.shown.exists()
    a, b = (json.loads(one.result.read_text())["state_sha256"] for one in (folder, blind))
    assert a == b
    rows = [[line.partition(",")[2] for line in one.ledger.read_text().splitlines()] for one in (folder, blind)]
    assert rows[0] == rows[1]  # but for the run's name, in which the configuration has a part


class Killed(BaseException):
    """Nothing catches it, as nothing catches SIGKILL."""


def test_a_resumed_run_has_the_same_files(tmp_path, monkeypatch):
    """It dies in round 3, which has shown its images but has no checkpoint yet."""
    config = configs.resolve({"method": "tofu", "clients": 3, "device": "cpu", "rounds": 4}, profile="toy")
    runner.run(config, tmp_path / "whole")
    checkpoint = RunFolder.save_checkpoint

    def dying(self, round, *kept):
        if round == 3:
            raise Killed
        checkpoint(self, round, *kept)

    monkeypatch.setattr(RunFolder, "save_checkpoint", dying)
    with pytest.raises(Killed):
        runner.run(config, tmp_path / "resumed")
    monkeypatch.undo()
    runner.run(config, tmp_path / "resumed", resume=True)
    whole, resumed = (
        {p.name: p.read_bytes() for p in RunFolder(tmp_path / name).shown.iterdir()} for name in ("whole", "resumed")
    )
    assert len(whole) == 4
    assert resumed == whole


def test_class_representations_say_whose_they_are(tmp_path):
    shown = [s for s in artifacts.load(run("repshare", tmp_path / "run").shown) if s.round == 2]
    assert set(shown[0].owners) == {"0", "1", "2"}
    assert len(shown[0].owners) == len(shown[0].values) == len(shown[0].labels)


def test_peers_show_their_own(tmp_path):
    folder = run("repshare", tmp_path / "run", topology="ring")
    last = [s for s in artifacts.load(folder.shown) if s.round == 2]
    assert set(last[0].owners) == {"0", "1", "2"}


def test_dreams_inside_a_model_are_no_pictures(tmp_path):
    folder = run("codream", tmp_path / "run", layer="classifier")
    assert list(artifacts.load(folder.shown)) == []


def test_signals_and_rows_become_curves(tmp_path):
    """A rising line goes from the lower left to the upper right corner, and no column of the picture is without it."""

    def shown(values):
        task = Task(tuple(values.shape[1:]), 2, (0.0,), (1.0,), {}, "")
        artifacts.save([Exhibit("made", values, None, "", False)], task, tmp_path / "round-1.safetensors")
        (found,) = artifacts.load(tmp_path)
        assert found.are_images and (found.values.amax(2) == 255).all()
        return found.values[:, 0]

    line, flat = shown(torch.stack([torch.linspace(-1, 1, 30)[None], torch.zeros(1, 30)]))
    assert line[-1, 0] == line[0, -1] == 255 and line[0, 0] == line[-1, -1] == 0
    assert flat[22].min() == 255 and flat[:21].max() == 0
    (row,) = shown(torch.tensor([[0.0, 1.0, 0.0, 1.0]]))  # parallel coordinates: down, up, down, up
    assert row[-1, 0] == row[0, -1] == 255 and row[-1, 58:61].max() == 255
