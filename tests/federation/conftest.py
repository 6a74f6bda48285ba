"""Tests that start a whole federation take minutes: they run only when they are asked for by their marker."""

from contextlib import suppress

import pytest

with suppress(ImportError):  # its first import draws from Python's global generator, which tests watch
    import nvflare.collab  # noqa: F401


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if "federation" in config.getoption("markexpr"):
        return
    for item in items:
        if item.get_closest_marker("federation"):
            item.add_marker(pytest.mark.skip(reason="minutes of real processes: make test-federation"))
