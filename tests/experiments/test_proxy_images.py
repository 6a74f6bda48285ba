"""Unlabelled images of the server: set apart before the split, or taken from another data set."""

from pathlib import Path

import numpy as np
import pytest
import torch

from fedgist.core.errors import FedgistError
from fedgist.experiments.config import RunConfig, proxy_spec, resolve
from fedgist.experiments.inputs import from_dataset


def config(**settings: object) -> RunConfig:
    return resolve({"dataset": "digits", "clients": 4, "partition": "iid", "device": "cpu", **settings})


def test_what_is_set_apart_belongs_to_nobody() -> None:
    """Proxy and clients together are the training set, once each."""
    inputs, plain = from_dataset(config(proxy="100")), from_dataset(config())
    assert plain.task.proxy is None
    assert inputs.task.proxy is not None
    assert inputs.task.proxy.shape == (100, 1, 8, 8)
    everything = torch.cat([inputs.task.proxy, *(site.x for site in inputs.sites.values())]).flatten(1)
    whole = torch.cat([site.x for site in plain.sites.values()]).flatten(1)
    assert sorted(everything.tolist()) == sorted(whole.tolist())


def test_the_saved_indices_are_those_of_the_training_set() -> None:
    whole, inputs = from_dataset(config(clients=1)), from_dataset(config(proxy="100"))
    assert inputs.parts is not None
    for name, part in inputs.parts.items():
        assert torch.equal(inputs.sites[name].x, whole.sites["0"].x[part])
    assert len(np.unique(np.concatenate(list(inputs.parts.values())))) == len(whole.sites["0"].y) - 100


def test_images_of_another_data_set(tmp_path: Path) -> None:
    folder = tmp_path / "strangers"
    folder.mkdir()
    for split in ("train", "test"):
        images, labels = np.full((12, 8, 8), 200, np.uint8), np.arange(12) % 2
        np.savez(folder / f"{split}.npz", images=images, labels=labels)
    inputs = from_dataset(config(proxy="strangers:7", data_dir=str(tmp_path), normalise="unit"))
    assert inputs.task.proxy is not None
    assert torch.allclose(inputs.task.proxy, torch.full((7, 1, 8, 8), 200 / 255))
    assert sum(len(site.y) for site in inputs.sites.values()) == 1438


@pytest.mark.parametrize("text", ["many", "0", "mnist:", "-3"])
def test_mistakes_are_named(text: str) -> None:
    with pytest.raises(FedgistError, match="proxy must be a number of images"):
        config(proxy=text)


def test_asking_for_all_images_is_refused() -> None:
    assert proxy_spec("fashion-mnist:2000") == ("fashion-mnist", 2000)
    with pytest.raises(FedgistError, match="clients need some"):
        from_dataset(config(proxy="1438"))
