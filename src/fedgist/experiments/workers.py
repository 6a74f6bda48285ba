"""Work in processes of their own, several at a time. A worker ends at once when whoever started it does.

The two sides speak lines of JSON: down what there is to do, up what came of it.
"""

import importlib
import json
import os
import queue
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Generator, Sequence
from typing import Any

DIED = "a process that makes runs has died; go on with the same command, and a smaller --jobs if memory is short"

News = queue.SimpleQueue[tuple[int, Any] | None]


def each(function: Callable[[Any], Any], given: Sequence[Any], count: int) -> Generator[tuple[int, Any], None, None]:
    """What a function makes of each of these, with its place, as it ends; `count` at a time.

    The function is one of a module; it takes and gives what JSON can say, and not None: that is what comes of those
    whose worker died. One at a time needs no other process.
    """
    if count == 1:
        yield from enumerate(map(function, given))
        return
    todo: queue.SimpleQueue[int] = queue.SimpleQueue()
    for place in range(len(given)):
        todo.put(place)
    done: News = queue.SimpleQueue()
    threads = max(1, (os.cpu_count() or 1) // count)
    workers = [_start(function, threads) for _ in range(min(count, len(given)))]
    try:
        for worker in workers:
            threading.Thread(target=_feed, args=(worker, given, todo, done), daemon=True).start()
        idle = 0
        while idle < len(workers):
            if (news := done.get()) is None:
                idle += 1
            else:
                yield news
        while not todo.empty():  # nobody is left to do these
            yield todo.get(), None
    finally:
        for worker in workers:
            worker.kill()
            worker.communicate()


def _start(function: Callable[[Any], Any], threads: int) -> "subprocess.Popen[str]":
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    work = f"workers.work({function.__module__!r}, {function.__qualname__!r})"
    command = [sys.executable, "-c", f"from fedgist.experiments import workers; {work}"]
    return subprocess.Popen(command, env=environment, **pipes)


def _feed(worker: "subprocess.Popen[str]", given: Sequence[Any], todo: "queue.SimpleQueue[int]", done: News) -> None:
    """Hands one after the other to a worker; None says that nothing more will come of it."""
    try:
        while True:
            place = todo.get_nowait()
            answer = _ask(worker, given[place])
            done.put((place, json.loads(answer) if answer else None))
            if not answer:
                break
    except queue.Empty:
        pass
    finally:
        done.put(None)


def _ask(worker: "subprocess.Popen[str]", one: Any) -> str:
    """A worker's answer; empty when the worker has ended, or ends meanwhile."""
    assert worker.stdin is not None and worker.stdout is not None
    try:
        worker.stdin.write(json.dumps(one) + "\n")
        worker.stdin.flush()
        answer = worker.stdout.readline()
        return answer if answer.endswith("\n") else ""  # half a line: it died while it spoke
    except (BrokenPipeError, ValueError):  # a ValueError: its pipes were closed here, for all is over
        return ""


def work(module: str, function: str) -> None:
    """A worker: what there is to do comes on standard input, whose end is the worker's, whatever it is doing."""
    import torch

    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    lines: queue.SimpleQueue[str] = queue.SimpleQueue()
    threading.Thread(target=_listen, args=(lines,), daemon=True).start()
    answers, sys.stdout = sys.stdout, sys.stderr  # nothing but answers goes up
    try:
        do = getattr(importlib.import_module(module), function)
        while True:
            one = json.loads(lines.get())
            try:
                answer = do(one)
            except Exception as error:
                traceback.print_exc()
                answer = f"internal error, please report it ({type(error).__name__}: {error})"
            answers.write(json.dumps(answer) + "\n")
            answers.flush()
    except KeyboardInterrupt:  # Ctrl-C reaches all processes; what was kept is on disk
        os._exit(130)


def _listen(lines: "queue.SimpleQueue[str]") -> None:
    for line in sys.stdin:
        lines.put(line)
    os._exit(0)
