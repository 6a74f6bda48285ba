"""What NVFlare leaves on the disk of each of its jobs, of which only the last few are kept: there is no end of jobs.

None of it is needed once a job has ended: what runs need lies in their folders, and at sites in `fedgist/` of a kit.
"""

import contextlib
import json
import re
import shutil
import threading
import time
from collections.abc import Callable, Collection, Iterator
from pathlib import Path

from fedgist.federation import processes

STORE = "store/jobs"
"""Where NVFlare's server keeps its jobs, in its kit."""
KEPT = 10
"""Ended jobs whose logs are kept, for who wants to know why they ended."""
PAUSE = 60.0
"""Seconds between two looks at a kit that is in use."""
OVERLOOKED = 0.2
"""Seconds in which NVFlare, which reads its store each second, has done with what it had begun to read there."""
JOB = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")
"""What NVFlare calls a job, and the folders that it makes for it."""


def remove(folder: Path, living: Callable[[], Collection[str]] = set) -> None:
    """Remove what lies in a folder of jobs, but for those that live, by their names, and the last few that do not."""
    found = [job for job in folder.glob("*/") if JOB.fullmatch(job.name)]
    names = living() if len(found) > KEPT else set()  # asked after the look: who is new is not among those found
    old = sorted((job for job in found if job.name not in names), key=_changed)[:-KEPT]
    for job in old:  # without it a job is none to NVFlare, whose server would stumble over one that is half there
        (job / "data").unlink(missing_ok=True)
    if old:
        time.sleep(OVERLOOKED)
    for job in old:
        shutil.rmtree(job, ignore_errors=True)


def unended(store: Path) -> set[str]:
    """The jobs in the store of a server that runs of which it does not say that they have ended."""
    return {job.name for job in store.glob("*/") if not _has_ended(job)}


def _has_ended(job: Path) -> bool:
    try:  # what cannot be read is being made, or stays until the server is started again
        return str(json.loads((job / "meta").read_text(encoding="utf-8"))["status"]).startswith("FINISHED")
    except (OSError, ValueError, LookupError, TypeError):
        return False


def _changed(job: Path) -> float:
    """When something was last written there."""
    try:
        return max(one.stat().st_mtime for one in (job, *job.iterdir()))
    except FileNotFoundError:  # NVFlare itself has removed it just now
        return 0.0


@contextlib.contextmanager
def bounded(kit: Path) -> Iterator[None]:
    """Keep little of ended jobs in a kit, from now on, while this process and whatever it starts use it."""
    over = threading.Event()

    def look() -> None:
        while True:
            with contextlib.suppress(OSError):  # a disk that fails has others who say so
                remove(kit, processes.commands)
            if over.wait(PAUSE):
                return

    looking = threading.Thread(target=look, daemon=True)
    looking.start()
    try:
        yield
    finally:
        over.set()
        looking.join()
