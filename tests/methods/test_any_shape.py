"""Methods on inputs that are no images: tables, signals, volumes; and the options that mean nothing there."""

from typing import Any

import pytest

from fedgist.core.errors import FedgistError
from toys import clients, federation, play

TABLE, SIGNAL, VOLUME = (12,), (1, 187), (2, 3, 4, 5)
TINY: dict[str, dict[str, Any]] = {
    "fedavg": {"steps": 2},
    "feddm": {"steps": 2, "ipc": 1, "min_class": 1, "server_epochs": 1, "batch": 4},
    "feddm-released": {"steps": 2, "ipc": 1, "server_epochs": 1},
    "codream": {"warm_up": 1, "dreams": 4, "exchanges": 2, "distil_steps": 2, "distil_batch": 4},
    "tofu": {"steps": 2, "images": 2, "iterations": 2},
    "fedgen": {"steps": 2, "generator_steps": 2, "generator_batch": 4},
    "repshare": {"steps": 2},
    "gist": {"dimensions": 16},
}


@pytest.mark.parametrize("method", TINY)
@pytest.mark.parametrize("shape", [TABLE, SIGNAL, VOLUME], ids=["table", "signal", "volume"])
def test_a_round_on_inputs_of_any_rank(method: str, shape: tuple[int, ...]) -> None:
    net = "cnn1d:depth=2:width=4" if shape == SIGNAL else "mlp:hidden=6:norm=batch"
    play(federation(method, clients(9, 12, shape=shape), net, **TINY[method]))


IMAGES_ONLY: list[tuple[str, dict[str, Any], str]] = [
    ("fedavg", {"crop": 1}, "crop or flip"),
    ("feddm", {"augmentation": ("cutout",)}, "an augmentation"),
    ("feddm", {"server_augmentation": ("flip",)}, "an augmentation"),
    ("codream", {"tv": 0.1}, "tv"),
    ("codream", {"generator": True}, "generator"),
    ("tofu", {"prior": "half"}, "prior=half"),
    ("gist", {"features": "scattering"}, "features=scattering"),
    ("gist", {"mirrored": True}, "mirrored"),
]


@pytest.mark.parametrize(("method", "options", "named"), IMAGES_ONLY)
def test_options_for_images_refuse_a_table(method: str, options: dict[str, Any], named: str) -> None:
    with pytest.raises(FedgistError, match=f"^{named} is for images, and an input here .*: leave it out"):
        play(federation(method, clients(9, 12, shape=TABLE), "mlp:hidden=6", **TINY.get(method, {}), **options))
