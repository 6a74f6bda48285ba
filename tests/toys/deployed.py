"""The command line as a user has it, in processes of their own: for tests of real federations."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}
# Who runs tests in a shell's background has them ignore Ctrl-C, and what they start would do so, too.
signal.signal(signal.SIGINT, signal.default_int_handler)
LONG = 300.0
"""Seconds for what takes a few on a quiet machine: tests of many processes run on busy ones, too."""


def fedgist(*arguments: Any, timeout: float = LONG) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "fedgist", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout, env=ENVIRONMENT)


class Background:
    """A command that goes on while a test looks at what it says."""

    def __init__(self, log: Path, *arguments: Any):
        self.log = log
        command = [sys.executable, "-m", "fedgist", *map(str, arguments)]
        with log.open("w") as file:
            self.process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, env=ENVIRONMENT)

    @property
    def said(self) -> str:
        return self.log.read_text()

    def expect(self, text: str, seconds: float = LONG) -> None:
        until = time.monotonic() + seconds
        while text not in self.said:
            ended = self.process.poll() is not None
            assert time.monotonic() < until and not (ended and text not in self.said), f"no {text!r} in: {self.said}"
            time.sleep(0.1)

    def kill_all(self) -> None:
        """kill -9 of the command and of all that it started."""
        family = psutil.Process(self.process.pid).children(recursive=True)
        for member in [psutil.Process(self.process.pid), *family]:
            with contextlib.suppress(psutil.NoSuchProcess):  # it ended with its parent
                member.kill()
        self.process.wait()

    def stop(self) -> None:
        if self.process.poll() is None:
            self.process.terminate()
            self.process.wait(LONG)


def wait_for(condition: Callable[[], bool], seconds: float = LONG) -> None:
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.1)
