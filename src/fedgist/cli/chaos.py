"""The command that plays a federation's faults: chaos."""

import os
import sys
import time
from typing import Annotated

import typer

from fedgist.cli.common import Commands, flag
from fedgist.core.errors import check_known
from fedgist.words import duration

app = Commands()
EVERY = 10.0
"""Seconds between two lines of progress."""


@app.command()
def chaos(
    schedules: Annotated[int, flag("schedules", "How many schedules are played.", "N", low=1)] = 300,
    seed: Annotated[int, flag("seed", "Seed of all schedules: with a number, it says what happens.", "N")] = 0,
    first: Annotated[int, flag("first", "Number of the first schedule, to go on with a campaign.", "N", low=0)] = 0,
    number: Annotated[
        int | None, flag("schedule", "Play this schedule alone, and tell what happens in it.", "N")
    ] = None,
    method: Annotated[str, flag("method", "The method that runs; tally is the quickest.", "NAME")] = "tally",
    workers: Annotated[int, flag("workers", "Processes; 0 is one a core.", "N", low=0)] = 0,
) -> None:
    """Play a federation's faults against the real site, server and folders: lost messages, crashes, full disks.

    After each schedule it is checked that nothing wrong was committed, lost or said twice. docs/chaos.md tells what is
    simulated. A broken schedule is named, and played again with --schedule; the exit code is then 1.
    """
    from fedgist import methods
    from fedgist.federation.chaos import tally

    check_known("method", method, (tally.Tally.name, *methods.registry()))
    if number is not None:
        raise typer.Exit(_tell(seed, number, method))
    raise typer.Exit(_play(seed, first, schedules, method, workers or os.cpu_count() or 1))


def _tell(seed: int, number: int, method: str) -> int:
    from fedgist.federation.chaos import schedule

    outcome = schedule.play(seed, number, method)
    print(f"schedule {number} of seed {seed}: {outcome.faults}")
    print("\n".join(outcome.story))
    print("\n".join(f"BROKEN: {what}" for what in outcome.wrong) or "all is as it should be")
    return int(bool(outcome.wrong))


def _play(seed: int, first: int, count: int, method: str, workers: int) -> int:
    from fedgist.federation.chaos import campaign

    began = told = time.monotonic()
    done = broken = resumed = complete = 0
    how = f"fedgist chaos --seed {seed}" + f" --method {method}" * (method != "tally")
    try:
        for outcome in campaign.play_all(seed, first, count, method, workers):
            done, broken = done + 1, broken + bool(outcome.wrong)
            resumed, complete = resumed + (outcome.attempts > 1), complete + outcome.complete
            if outcome.wrong:
                print(f"schedule {outcome.number} ({outcome.faults}) is broken: {'; '.join(outcome.wrong)}")
                print(f"  play it again with: {how} --schedule {outcome.number}", flush=True)
            if (now := time.monotonic()) - told > EVERY:
                told, left = now, duration((now - began) / done * (count - done))
                print(f"{done:,} of {count:,} schedules, {broken} broken, {left} left", file=sys.stderr, flush=True)
    except KeyboardInterrupt:
        raise KeyboardInterrupt(
            f"stopped after {done:,} schedules, {broken} broken; go on with: "
            f"{how} --first {first + done} --schedules {count - done}"
        ) from None
    print(
        f"{done:,} schedules in {duration(time.monotonic() - began)}: {broken} broken; {resumed:,} went on after the "
        f"server had died, {complete:,} lost no answer"
    )
    return int(broken > 0)
