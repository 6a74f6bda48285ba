"""What a person sees while a run runs, on standard error: a bar on a terminal, plain lines elsewhere, or nothing."""

import sys
import time
from typing import Any, Protocol

from fedgist.words import duration, size


class Progress(Protocol):
    """Told of a run's beginning, of each finished round, and of its end, whatever ended it.

    A class that says nothing to one of them leaves it out.
    """

    def start(self, title: str, done: int, rounds: int) -> None:
        return None

    def round(self, row: dict[str, Any]) -> None:
        return None

    def stop(self) -> None:
        return None


class Silent(Progress):
    """Says nothing."""


class Several:
    """Tells all of them."""

    def __init__(self, *listeners: Progress):
        self.listeners = listeners

    def start(self, title: str, done: int, rounds: int) -> None:
        for listener in self.listeners:
            listener.start(title, done, rounds)

    def round(self, row: dict[str, Any]) -> None:
        for listener in self.listeners:
            listener.round(row)

    def stop(self) -> None:
        for listener in self.listeners:
            listener.stop()


class Lines(Progress):
    """One plain line a round."""

    def start(self, title: str, done: int, rounds: int) -> None:
        self.title, self.done, self.rounds = title, done, rounds
        self.clock, self.first = time.perf_counter(), done

    def round(self, row: dict[str, Any]) -> None:
        self.done = row["round"]
        rate = (time.perf_counter() - self.clock) / (self.done - self.first)
        left = duration(rate * (self.rounds - self.done))
        print(f"{self.title}: round {self.done}/{self.rounds}, {standing(row)}, {left} left", file=sys.stderr)


class Bar:
    """A bar that shows the round, the accuracy, the bytes and the time left."""

    def start(self, title: str, done: int, rounds: int) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
        from rich.progress import Progress as RichProgress

        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[standing]}"),
            TimeRemainingColumn(),
        )
        self.bar = RichProgress(*columns, console=Console(stderr=True))
        self.bar.start()
        self.task = self.bar.add_task(title, total=rounds, completed=done, standing="")
        self.accuracy: float | None = None

    def round(self, row: dict[str, Any]) -> None:
        self.accuracy = row.get("accuracy", self.accuracy)
        self.bar.update(self.task, completed=row["round"], standing=standing({**row, "accuracy": self.accuracy}))

    def stop(self) -> None:
        self.bar.stop()


def standing(row: dict[str, Any]) -> str:
    """Where a run stands after a round."""
    accuracy = row.get("accuracy")
    parts = [] if accuracy is None else [f"accuracy {accuracy:.4f}"]
    parts += [f"up {size(row['bytes_up'])}", f"down {size(row['bytes_down'])}"]
    parts += [f"ε {row['epsilon']:.3g} for a {row['unit']}"] if row.get("epsilon") is not None else []
    return ", ".join(parts + ["skipped"] * bool(row.get("skipped")))


def choose(quiet: bool) -> Progress:
    """The progress for this standard error."""
    if quiet:
        return Silent()
    return Bar() if sys.stderr.isatty() else Lines()
