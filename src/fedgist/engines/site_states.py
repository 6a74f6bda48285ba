"""What sites remember between rounds: in memory, and beyond a limit on the disk, where a checkpoint finds it too."""

from collections.abc import Iterator, Mapping, MutableMapping
from pathlib import Path

import torch

from fedgist.core import tree
from fedgist.core.tree import Tree
from fedgist.core.work import Place
from fedgist.storage import TreeLog

MOST_IN_MEMORY = 1 << 28
"""Bytes of states that are held in memory where there is a disk, and on a GPU as much of its own memory as a quarter;
beyond it go those that changed longest ago."""
SLACK = 1 << 20
"""Bytes that a log may hold for nothing, beside as many as are of use."""


class SiteStates(MutableMapping[str, Tree]):
    """States by site. Without a folder, all of them in memory.

    With one, a checkpoint is the length of a log, to which only those are added that have changed since the last.
    """

    def __init__(self, place: Place):
        self.place, self.most = place, MOST_IN_MEMORY
        if place.device.type == "cuda":
            self.most = torch.cuda.get_device_properties(place.device).total_memory // 4
        self.diverged: set[str] = set()
        """Sites on the disk of whose numbers some are not finite."""
        self._held: dict[str, Tree] = {}  # the one that changed longest ago comes first
        self._bytes = 0
        self._changed: set[str] = set()  # held, and otherwise or not at all in the log
        self._folder: Path | None = None
        self._log: TreeLog | None = None

    def __getitem__(self, id: str) -> Tree:
        if id in self._held:
            return self._held[id]
        if self._log is None:
            raise KeyError(id)
        return self.place.put(self._log.read(id))

    def __setitem__(self, id: str, state: Tree) -> None:
        self._drop(id)
        self._held[id] = state
        self._bytes += _size(state)
        self._changed.add(id)
        self.diverged.discard(id)
        while self._folder is not None and self._bytes > self.most:
            self._write(oldest := next(iter(self._held)))
            if not tree.finite(self._held[oldest]):
                self.diverged.add(oldest)
            self._drop(oldest)

    def __delitem__(self, id: str) -> None:
        raise TypeError("a site's state is replaced, never taken away")

    def __iter__(self) -> Iterator[str]:
        yield from self._held
        if self._log is not None:
            yield from [id for id in self._log.names() if id not in self._held]

    def __len__(self) -> int:
        return len(self._held) + sum(id not in self._held for id in (self._log.names() if self._log else ()))

    def in_memory(self) -> Mapping[str, Tree]:
        return self._held

    def release(self, id: str) -> None:
        """Another state will take the place of this one, which need not be in memory if the log has it."""
        if id not in self._changed and self._log is not None:
            self._drop(id)

    # On the disk

    def keep_in(self, folder: Path) -> None:
        """From now on the disk may be used, and checkpoints name a log in this folder."""
        self._folder = folder

    def snapshot(self, round: int) -> Tree:
        """What a checkpoint of this round says: all states, or which log they are in, and how long that is."""
        if self._folder is None:
            return {"sites": dict(self)}
        if (log := self._log) is not None:
            coming = sum(_size(self._held[id]) for id in self._changed)
            if log.length + coming > 2 * max(log.live, coming) + SLACK:
                self._begin(round, log)
        for id in sorted(self._changed):
            self._write(id, round)
        if self._log is None:
            return {"sites": {}}
        self._log.sync()
        return {"sites": {}, "log": self._log.path.name, "log bytes": self._log.length}

    def close(self) -> None:
        if self._log is not None:
            self._log.close()

    def restore(self, snapshot: Tree) -> None:
        self._held, self._bytes, self._changed = {}, 0, set()
        if "log" in snapshot:
            assert self._folder is not None
            self._log = TreeLog(self._folder / snapshot["log"], snapshot["log bytes"])
        for id, state in snapshot["sites"].items():
            self[id] = self.place.put(state)

    def _write(self, id: str, round: int = 0) -> None:
        if id not in self._changed:
            return
        if self._log is None:
            self._begin(round)
        assert self._log is not None
        self._log.write(id, self._held[id])
        self._changed.discard(id)

    def _begin(self, round: int, before: TreeLog | None = None) -> None:
        """A new log, with what is of use in the one before."""
        assert self._folder is not None
        self._log = TreeLog(self._folder / f"states-{round:06d}.log")
        if before is not None:
            for id in before.names() - self._changed:
                self._log.write_bytes(id, before.read_bytes(id))
            before.close()

    def _drop(self, id: str) -> None:
        if id in self._held:
            self._bytes -= _size(self._held.pop(id))
            self._changed.discard(id)


def _size(state: Tree) -> int:
    return sum(leaf.numel() * leaf.element_size() for leaf in tree.tensors(state))
