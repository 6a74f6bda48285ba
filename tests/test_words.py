"""Numbers for people."""

import pytest

from fedgist import words


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (999, "999 B"), (1000, "1 kB"), (999_600, "1 MB"), (1234567, "1.23 MB"), (5e15, "5e+03 TB")],
)
def test_sizes(count, text):
    assert words.size(count) == text


@pytest.mark.parametrize(("seconds", "text"), [(0.4, "0:00"), (75, "1:15"), (3661, "1:01:01")])
def test_durations(seconds, text):
    assert words.duration(seconds) == text
