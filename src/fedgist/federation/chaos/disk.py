"""The disks of all machines, between Python and real files: they fill up, and machines die while they write.

A process that is killed leaves what it wrote. A machine that loses its power also loses what nobody waited for: the
ends of files that grew since their last fsync, and new names in folders since theirs.
"""

import errno
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

Step = Callable[[], str]
"""Called before each write: "" lets it through, "full" fails it for want of room; or the writer dies in it."""


class Disk:
    """All files below `root`. Other files are not touched."""

    def __init__(self, root: Path, step: Step, now: Callable[[], float], pid: Callable[[], int]):
        self.root, self._step, self._now, self._pid = str(root), step, now, pid
        self._synced: dict[str, int] = {}
        """How much of a file is sure to stay."""
        self._names: dict[str, bytes | None] = {}
        """What stood under names that are not sure to stay."""
        self._whole: set[str] = set()
        """Files that appeared under their name as a whole."""

    @contextmanager
    def between(self) -> Iterator[None]:
        """For as long as this lasts, writes come here first."""
        replace, open, unlink = Path.replace, Path.open, Path.unlink

        def synced(descriptor: int) -> None:
            path = os.readlink(f"/proc/self/fd/{descriptor}")
            if self._ours(path):
                self._write(path)
                if os.path.isdir(path):
                    self._names = {name: old for name, old in self._names.items() if os.path.dirname(name) != path}
                else:
                    self._synced[path] = os.path.getsize(path)
            # fsync itself is left out: the files are in memory

        def renamed(path: Path, target: Any) -> Path:
            if not self._ours(path):
                return replace(path, target)
            self._write(str(path))
            name = str(target)
            self._names.setdefault(name, Path(name).read_bytes() if os.path.exists(name) else None)
            self._synced[name] = self._synced.pop(str(path), 0)
            self._whole.add(name)
            found = replace(path, target)
            os.utime(os.path.dirname(name), (self._now(), self._now()))
            self._write(name)
            return found

        def opened(path: Path, mode: str = "r", *more: Any, **named: Any) -> Any:
            if not self._ours(path) or not set(mode) & set("wa+x"):
                return open(path, mode, *more, **named)
            return _Written(open(path, mode, *more, **named), self._step)

        def unlinked(path: Path, missing_ok: bool = False) -> None:
            if self._ours(path):
                self._step()
            unlink(path, missing_ok)

        with (
            mock.patch.object(os, "fsync", synced),
            mock.patch.object(os, "getpid", self._pid),
            mock.patch.object(Path, "replace", renamed),
            mock.patch.object(Path, "open", opened),
            mock.patch.object(Path, "unlink", unlinked),
        ):
            yield

    def lose_power(self, folder: Path, draw: Callable[[int, int], int]) -> None:
        """What is not sure to stay goes, each file as far as `draw` says."""
        for name in [name for name in self._names if name.startswith(str(folder))]:
            before = self._names.pop(name)
            if not draw(0, 1):
                continue
            if before is None:
                os.unlink(name)
            else:
                with open(name, "wb") as file:
                    file.write(before)
        for path in filter(Path.is_file, folder.rglob("*")):
            if str(path) not in self._whole:
                size = path.stat().st_size
                os.truncate(path, draw(min(self._synced.get(str(path), 0), size), size))

    def _ours(self, path: object) -> bool:
        return str(path).startswith(self.root)

    def _write(self, path: str) -> None:
        if self._step():
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)


class _Written:
    """A file that is being written; where the disk is full, or its writer dies, half of the last write stays."""

    def __init__(self, file: Any, step: Step):
        self._file, self._step = file, step

    def write(self, data: Any) -> int:
        try:
            full = self._step()
        except BaseException:
            self._half(data)
            raise
        if full:
            self._half(data)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return int(self._file.write(data))

    def _half(self, data: Any) -> None:
        self._file.write(data[: len(data) // 2])
        self._file.flush()

    def __enter__(self) -> "_Written":
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def __iter__(self) -> Iterator[Any]:
        return iter(self._file)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)
