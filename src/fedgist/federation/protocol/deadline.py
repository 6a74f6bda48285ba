"""An end for a computation that somebody else asked for."""

import ctypes
import threading
from collections.abc import Iterator
from contextlib import contextmanager


class TookTooLong(Exception):
    """The time for an answer is over."""


@contextmanager
def within_seconds(seconds: float) -> Iterator[None]:
    """Raise `TookTooLong` here after so many seconds.

    It comes between two steps of Python; a single call into torch is not broken off, so that its size needs a bound.
    """
    thread, lock, done = ctypes.c_ulong(threading.get_ident()), threading.Lock(), False

    def stop() -> None:
        with lock:
            if not done:
                ctypes.pythonapi.PyThreadState_SetAsyncExc(thread, ctypes.py_object(TookTooLong))

    timer = threading.Timer(seconds, stop)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        with lock:
            done = True
        timer.cancel()
