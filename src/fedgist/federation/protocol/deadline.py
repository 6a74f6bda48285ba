"""An end for a computation that somebody else asked for."""

import ctypes
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress


class TookTooLong(Exception):
    """The time for an answer is over."""


GRACE = 60.0
"""Seconds for a call into torch that is under way when the time is over."""


@contextmanager
def within_seconds(seconds: float, overdue: Callable[[], None] | None = None) -> Iterator[None]:
    """Raise `TookTooLong` here after so many seconds.

    It comes between two steps of Python: a single call into torch cannot be broken off. Python may also pass it over,
    in what it calls when an object goes: then it comes at the end. If all that still goes on after some grace,
    `overdue` is called, in another thread; it may end the process.
    """
    thread, lock, finished = ctypes.c_ulong(threading.get_ident()), threading.Lock(), threading.Event()
    over = False

    def watch() -> None:
        nonlocal over
        if not finished.wait(seconds):
            with lock:
                if not finished.is_set():
                    over = True
                    ctypes.pythonapi.PyThreadState_SetAsyncExc(thread, ctypes.py_object(TookTooLong))
            if overdue is not None and not finished.wait(GRACE):
                overdue()

    threading.Thread(target=watch, daemon=True).start()
    try:
        yield
    finally:
        while not finished.is_set():
            with suppress(TookTooLong), lock:  # which may come here, too
                finished.set()
    if over:
        raise TookTooLong
