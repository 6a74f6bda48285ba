"""Commands are given in a folder of their own, without data files unless a test brings some."""

import pytest


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("FEDGIST_DATA", raising=False)
