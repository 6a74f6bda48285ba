"""Runs in processes of their own, several at a time. A worker ends at once when whoever started it does.

The two sides speak lines of JSON: down a job (runs of one configuration, to be made together), up what became of it.
"""

import json
import os
import queue
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedgist.core.errors import FedgistError
from fedgist.experiments import config as configs
from fedgist.experiments.config import RunConfig

Told = Callable[["Job", str | None], None]
"""What is told of each job that has ended: the job, and what was wrong, if anything."""

ENDED = "a process that makes runs has died; go on with the same command, and a smaller --jobs if memory is short"


@dataclass(frozen=True)
class Job:
    """Runs of one configuration with different seeds, each with its folder."""

    runs: tuple[tuple[RunConfig, Path], ...]


def do(job: Job) -> str | None:
    """The job, here and now; returns what was wrong, if it is something the user can mend."""
    from fedgist.experiments import runner

    try:
        runner.run_together(job.runs)
    except FedgistError as error:
        return str(error)
    return None


def do_all(jobs: Sequence[Job], count: int, told: Told) -> None:
    """All jobs, `count` at a time; one at a time needs no other process."""
    if count == 1:
        for job in jobs:
            told(job, do(job))
        return
    todo: queue.SimpleQueue[Job] = queue.SimpleQueue()
    for job in jobs:
        todo.put(job)
    done: queue.SimpleQueue[tuple[Job, str | None] | None] = queue.SimpleQueue()
    threads = max(1, (os.cpu_count() or 1) // count)
    workers = [_start(threads) for _ in range(min(count, len(jobs)))]
    try:
        for worker in workers:
            threading.Thread(target=_feed, args=(worker, todo, done), daemon=True).start()
        idle = 0
        while idle < len(workers):
            if (news := done.get()) is None:
                idle += 1
            else:
                told(*news)
        while not todo.empty():  # nobody is left to make these
            told(todo.get(), ENDED)
    finally:
        for worker in workers:
            worker.kill()
            worker.communicate()


def _start(threads: int) -> "subprocess.Popen[str]":
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    command = [sys.executable, "-c", "from fedgist.experiments import workers; workers.work()"]
    return subprocess.Popen(command, env=environment, **pipes)


def _feed(worker: "subprocess.Popen[str]", todo: "queue.SimpleQueue[Job]", done: "queue.SimpleQueue[Any]") -> None:
    """Hands one job after the other to a worker; None says that nothing more will come of it."""
    try:
        while True:
            job = todo.get_nowait()
            answer = _ask(worker, job)
            done.put((job, json.loads(answer) if answer else ENDED))
            if not answer:
                break
    except queue.Empty:
        pass
    finally:
        done.put(None)


def _ask(worker: "subprocess.Popen[str]", job: Job) -> str:
    """A worker's answer to a job; empty when the worker has ended, or ends meanwhile."""
    assert worker.stdin is not None and worker.stdout is not None
    lines = [{"config": configs.flat(config), "folder": str(folder)} for config, folder in job.runs]
    try:
        worker.stdin.write(json.dumps(lines) + "\n")
        worker.stdin.flush()
        answer = worker.stdout.readline()
        return answer if answer.endswith("\n") else ""  # half a line: it died while it spoke
    except (BrokenPipeError, ValueError):  # a ValueError: its pipes were closed here, for all is over
        return ""


def work() -> None:
    """A worker: jobs come on standard input, and its end is the worker's, whatever it is doing."""
    import torch

    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    lines: queue.SimpleQueue[str] = queue.SimpleQueue()
    threading.Thread(target=_listen, args=(lines,), daemon=True).start()
    answers, sys.stdout = sys.stdout, sys.stderr  # nothing but answers goes up
    try:
        while True:
            runs = json.loads(lines.get())
            job = Job(tuple((configs.resolve(run["config"]), Path(run["folder"])) for run in runs))
            try:
                wrong = do(job)
            except Exception as error:
                traceback.print_exc()
                wrong = f"internal error, please report it ({type(error).__name__}: {error})"
            answers.write(json.dumps(wrong) + "\n")
            answers.flush()
    except KeyboardInterrupt:  # Ctrl-C reaches all processes; what was kept is on disk
        os._exit(130)


def _listen(lines: "queue.SimpleQueue[str]") -> None:
    for line in sys.stdin:
        lines.put(line)
    os._exit(0)
