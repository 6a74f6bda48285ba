"""What NVFlare leaves of jobs goes, but for the last few, and never that of one that runs."""

import json
import os
import subprocess
import sys
import time
import uuid
from pathlib import Path

import pytest

pytest.importorskip("nvflare", reason="needs NVFlare: pip install 'fedgist[nvflare]'")
from nvflare.app_common.storages.filesystem_storage import FilesystemStorage

from deployed import wait_for
from fedgist.federation import leftovers
from fedgist.federation.leftovers import KEPT, bounded, remove, unended


def jobs(folder: Path, statuses: list[str]) -> list[Path]:
    """The older first; every file in them is older still, but for one."""
    made = []
    for age, status in enumerate(reversed(statuses)):
        job = folder / str(uuid.uuid4())
        (job / "app").mkdir(parents=True)
        (job / "data").touch()
        (job / "meta").write_text(json.dumps({"status": status}))
        for path in (job / "data", job / "app", job):
            os.utime(path, (1, 1))
        os.utime(job / "meta", (1000 - age, 1000 - age))
        made.append(job)
    return made[::-1]


def test_the_last_few_are_kept(tmp_path: Path) -> None:
    made = jobs(tmp_path, ["FINISHED:COMPLETED"] * (KEPT + 5))
    others = [tmp_path / "local", tmp_path / "startup", tmp_path / "fedgist"]
    for other in others:
        other.mkdir()
    remove(tmp_path)
    assert {*tmp_path.iterdir()} == {*made[5:], *others}
    remove(tmp_path / "nowhere")


def test_a_store_keeps_what_may_run(tmp_path: Path) -> None:
    """Of a server that runs: also what it does not say, as of a job that is being made."""
    made = jobs(tmp_path, ["RUNNING", "SUBMITTED", "DISPATCHED", *["FINISHED:ABORTED"] * (KEPT + 3)])
    (made[3] / "meta").unlink()
    (made[4] / "meta").write_text("{")
    remove(tmp_path, lambda: unended(tmp_path))
    assert {*tmp_path.iterdir()} == {*made[:5], *made[6:]}


def test_to_nvflare_a_job_is_gone_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its server ends for good when it finds a job that lacks something as it looks for new ones, each second."""
    storage, seen = FilesystemStorage(), []
    made = jobs(tmp_path, ["FINISHED:COMPLETED"] * (KEPT + 1))

    def look(seconds: float) -> None:
        assert made[0].is_dir()  # nothing but what makes it a job is gone yet, also not the mark that it is no new one
        seen.extend(storage.list_objects(str(tmp_path)))

    monkeypatch.setattr(leftovers.time, "sleep", look)
    remove(tmp_path)
    assert {*seen} == {*map(str, made[1:])} and not made[0].exists()


def test_a_kit_in_use_is_kept_small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a command of this process names is a job that runs, however old it is."""
    monkeypatch.setattr(leftovers, "PAUSE", 0.05)
    monkeypatch.setattr(leftovers, "OVERLOOKED", 0.0)
    made = jobs(tmp_path, [""] * (KEPT + 3))
    waits = [sys.executable, "-c", "import sys; sys.stdin.read()", "-n", made[1].name]
    with subprocess.Popen(waits, stdin=subprocess.PIPE) as process:
        with bounded(tmp_path):
            wait_for(lambda: not made[0].exists() and not made[2].exists())
            later = jobs(tmp_path, [""])
            wait_for(lambda: not made[3].exists())
            assert made[1].is_dir() and later[0].is_dir()
            process.communicate()
            jobs(tmp_path, [""])
            wait_for(lambda: not made[1].exists())
        jobs(tmp_path, [""] * 3)
        time.sleep(0.2)
        assert len([*tmp_path.iterdir()]) == KEPT + 3
