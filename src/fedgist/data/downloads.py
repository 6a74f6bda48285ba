"""Data sets from the network, through the libraries that know where they are: torchvision and medmnist.

Nothing here is called unless a user asks for it by name (`fedgist data download NAME DIR`).
"""

import importlib
import tempfile
from types import ModuleType
from typing import Any

import numpy as np

from fedgist.core.errors import FedgistError, check_known, extra
from fedgist.data.cards import CARDS
from fedgist.data.files import Images, check_forms, checked
from fedgist.data.formats import emnist, single_labels

TORCHVISION = {name: card.torchvision for name, card in CARDS.items() if card.torchvision}
EMNIST = tuple(f"emnist-{split}" for split in ("letters", "balanced", "byclass", "bymerge", "digits", "mnist"))
MEDMNIST = (
    *("pathmnist", "dermamnist", "octmnist", "pneumoniamnist", "breastmnist", "bloodmnist", "tissuemnist"),
    *("organamnist", "organcmnist", "organsmnist", "retinamnist"),
)


def fetch(name: str) -> tuple[Images, Images]:
    """The train and the test split of a named data set, from the network."""
    check_known("data set to download", name, (*TORCHVISION, *EMNIST, *MEDMNIST))
    library = _library("medmnist" if name in MEDMNIST else "torchvision.datasets", name)
    with tempfile.TemporaryDirectory() as root:
        train, test = (_split(library, name, split, root) for split in ("train", "test"))
    return check_forms(name, train, test)


def _library(module: str, name: str) -> ModuleType:
    package = module.partition(".")[0]
    with extra(f"downloading {name} needs {package}: pip install {package}"):
        return importlib.import_module(module)


def _split(library: Any, name: str, split: str, root: str) -> Images:
    try:
        if name in MEDMNIST:
            source = getattr(library, library.INFO[name]["python_class"])(split=split, root=root, download=True)
            return checked(name, np.asarray(source.imgs), single_labels(name, np.asarray(source.labels)))
        kind, more = TORCHVISION.get(name, "EMNIST"), {}
        if name in EMNIST:
            more["split"] = name.removeprefix("emnist-")
        source = getattr(library, kind)(root, train=split == "train", download=True, **more)
    except (OSError, RuntimeError) as error:
        raise FedgistError(f"{name} could not be downloaded: {error}") from error
    pixels, labels = np.asarray(source.data), np.asarray(source.targets)
    if name in EMNIST:
        pixels, labels = emnist(more["split"], pixels, labels)
    return checked(name, pixels, labels)
