"""A client's states at a site: files under (run, phase, round, exchange), of which the server says where to start from.

So a reply that was lost, a round that was skipped or a server that was restarted leaves no trace, and a restarted site
finds its way back.
"""

from collections.abc import Callable, Collection
from pathlib import Path

from fedgist import storage
from fedgist.core.tree import Tree
from fedgist.engines.engine import SiteFailure

NEWER = 8
"""States kept that are newer than what is asked for: the request may be an old one that was long on its way."""


class States:
    """The versions of a client's state in one run, on disk and in memory."""

    def __init__(self, folder: Path, first: Tree, put: Callable[[Tree], Tree]):
        self.folder, self._put = folder, put
        self._known = {"": put(first)}

    def beside(self, name: str, first: Tree) -> "States":
        """Versions of another state of the same run."""
        return States(self.folder / name, first, self._put)

    def get(self, version: str) -> Tree:
        if version not in self._known:
            path = self._path(version)
            if not path.is_file():
                raise SiteFailure(f"it does not hold its state {version} any more")
            self._known[version] = self._put(storage.load(path))
        return self._known[version]

    def put(self, version: str, state: Tree) -> None:
        here = self._put(state)
        storage.save(here, self._path(version))
        self._known[version] = here

    def forget(self, now: str, keep: Collection[str]) -> None:
        """Of the states that were before `now` only those to keep stay; of those after it, the last few do."""
        others = {path.stem for path in self.folder.glob("*.safetensors")} | self._known.keys()
        others -= {"", now, *keep}
        newer = sorted((version for version in others if _when(version) > _when(now)), key=_when)
        for version in others - set(newer[-NEWER:]):
            self._known.pop(version, None)
            self._path(version).unlink(missing_ok=True)

    def _path(self, version: str) -> Path:
        return self.folder / f"{version}.safetensors"


def _when(version: str) -> tuple[int, bool, int]:
    """The place of a version in its run; a round is evaluated after it."""
    phase, round, exchange = version.rsplit("-", 2)
    return int(round), phase == "evaluation", int(exchange)
