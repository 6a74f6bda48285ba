"""Many schedules, in several processes, in the order of their numbers."""

import multiprocessing
from collections.abc import Iterator
from functools import partial

import torch

from fedgist.federation.chaos import schedule
from fedgist.federation.chaos.schedule import Outcome


def play_all(seed: int, first: int, count: int, method: str, workers: int) -> Iterator[Outcome]:
    """The schedules `first`, `first` + 1, …, of which a broken one brings its story along."""
    numbers = range(first, first + count)
    play = partial(_play, seed, method)
    if workers == 1:
        yield from map(play, numbers)
        return
    # Fresh processes: what torch keeps of its threads does not survive a fork. Each with one thread: the numbers are so
    # few that a second one only costs time.
    with multiprocessing.get_context("spawn").Pool(min(workers, count), torch.set_num_threads, (1,)) as pool:
        yield from pool.imap(play, numbers, chunksize=8)


def _play(seed: int, method: str, number: int) -> Outcome:
    outcome = schedule.play(seed, number, method)
    if not outcome.wrong:
        outcome.story.clear()  # nobody will ask, and there are many
    return outcome
