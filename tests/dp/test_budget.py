"""The book of a data set's releases: durable, once a key, never over its budget, whole after any crash."""

import json
import os
from pathlib import Path

import pytest

from fedgist.core.errors import FedgistError
from fedgist.dp import accountant
from fedgist.dp.accountant import CLIENT, Release
from fedgist.dp.budget import Book, Limit, Outbox, Plan, Spent, books, known_plans, risky

ONE = Release(3.7306317)
"""Costs ε = 1 at δ = 1e-5."""


def test_the_budget_is_kept_across_runs_and_processes(tmp_path: Path) -> None:
    first, second = Book(tmp_path / "privacy.jsonl"), Book(tmp_path / "privacy.jsonl")
    limit = Limit(1.5, 1e-5)
    first.charge("a", ONE, limit, run="r1")
    first.charge("a", ONE, limit)  # the same release again: sent twice, noised and charged once
    second.charge("b", ONE, limit, run="r2")
    assert Book(first.path).releases == (Release(ONE.noise, times=2),)
    before = first.path.read_bytes()  # type: ignore[union-attr]
    with pytest.raises(Spent, match=r"ε = 1\.4\d+ of 1\.5 at δ = 1e-05 are used, and this release would make it 1\.8"):
        first.charge("c", ONE, limit)
    assert first.path.read_bytes() == before  # type: ignore[union-attr]
    assert len({json.loads(line)["run"] for line in before.splitlines()}) == 2


def test_every_torn_end_is_cut_off_and_nothing_else(tmp_path: Path) -> None:
    """A crash may leave any part of the last line; the release of a whole line counts, of a torn one never left."""
    path, limit = tmp_path / "privacy.jsonl", Limit(9, 1e-5)
    for key in "ab":
        Book(path).charge(key, ONE, limit)
    whole = path.read_bytes()
    start = whole.index(b"\n") + 1
    for cut in range(start, len(whole) + 1):
        path.write_bytes(whole[:cut])
        book = Book(path)
        assert book.releases == (Release(ONE.noise, times=2 if cut == len(whole) else 1),)
        book.charge("c", ONE, limit)
        assert sum(one.times for one in Book(path).releases) == (3 if cut == len(whole) else 2)
    path.write_bytes(b'{"key": 1}\n' + whole)
    with pytest.raises(FedgistError, match="is damaged"):
        _ = Book(path).releases


def test_the_outbox_keeps_the_very_bytes(tmp_path: Path) -> None:
    outbox = Outbox(tmp_path / "outbox")
    assert outbox.get("run 1 round 2") is None
    outbox.put("run 1 round 2", b"noised")
    assert Outbox(tmp_path / "outbox").get("run 1 round 2") == b"noised"
    assert outbox.get("run 1 round 3") is None


def test_a_plan_stands_in_for_the_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    planned = Release(1.0, 0.02, 300)  # what it costs was worked out elsewhere
    Plan((planned,), 2.0, 1e-5).write(tmp_path / "plan.json")
    plan = Plan.load(tmp_path / "plan.json")

    def missing(*_: object) -> float:
        raise accountant.MissingLibrary

    monkeypatch.setattr(accountant, "_epsilon", missing)
    book = Book()
    part = Release(planned.noise, planned.rate, 150)
    for key in "ab":
        book.charge(key, part, Limit(2.0, 1e-5, plan))
    for limit in (Limit(2.0, 1e-5, plan), Limit(2.0, 1e-6, plan), Limit(2.0, 1e-5)):
        with pytest.raises(accountant.MissingLibrary):  # more than was planned, at another δ, without a plan
            book.charge("c", part, limit)
    with pytest.raises(Spent):
        Book().charge("a", part, Limit(1.0, 1e-5, plan))
    (tmp_path / "plan.json").write_text("{}")
    with pytest.raises(FedgistError, match="is not a plan"):
        Plan.load(tmp_path / "plan.json")


def test_a_plan_is_for_its_releases_and_its_budget_alone(tmp_path: Path) -> None:
    plan = Plan((Release(1.2, 0.1, 30),), 1.999, 1e-5)
    assert plan.fits(2.0, 1e-5, 0.1, 30)
    dearer, cheaper, other_delta = (1.998, 1e-5, 0.1, 30), (2.1, 1e-5, 0.1, 30), (2.0, 1e-4, 0.1, 30)
    for other in (dearer, cheaper, other_delta, (2.0, 1e-5, 0.2, 30), (2.0, 1e-5, 0.1, 29)):
        assert not plan.fits(*other)
    assert plan.noise(0.1, 30) == plan.noise(0.1, 1) == 1.2
    for rate, times in ((0.1, 31), (0.05, 30)):
        with pytest.raises(FedgistError, match=f"the plan has no {times} releases at a rate of {rate}: make one"):
            plan.noise(rate, times)
    with pytest.raises(FedgistError, match=r"cannot read the plan .*: No such file"):
        Plan.load(tmp_path / "none.json")


def test_books_are_found_and_delta_is_warned_about(tmp_path: Path) -> None:
    for path in (tmp_path / "privacy" / "c1.jsonl", tmp_path / "privacy" / "c2.jsonl"):
        Book(path).charge("a", ONE, Limit(2, 1e-5))
    assert [*books(tmp_path)] == ["c1", "c2"]
    with pytest.raises(FedgistError, match="no book"):
        books(tmp_path / "privacy")
    assert risky(1e-5, 9_000) is None
    assert "take delta=9e-06 or less" in str(risky(1e-5, 11_000))


def test_the_plans_that_come_with_fedgist_cost_what_they_say() -> None:
    assert known_plans()
    for plan in known_plans():
        assert accountant.epsilon(plan.releases, plan.delta) == pytest.approx(plan.epsilon, rel=1e-9)


def test_a_budget_of_records_pays_for_clients_as_for_records(tmp_path: Path) -> None:
    """A client hidden by noise z costs its records what noise z/2 costs; as it stands, there would be room for more."""
    path, limit = tmp_path / "book.jsonl", Limit(accountant.epsilon([Release(5.0, times=2)], 1e-5), 1e-5)
    Book(path).charge("records", Release(5.0), limit)
    Book(path).charge("client", Release(10.0, unit=CLIENT), limit)
    for more in (Release(10.0, unit=CLIENT), Release(5.0)):
        with pytest.raises(Spent):
            Book(path).charge("more", more, limit)
    assert [json.loads(line).get("unit") for line in path.read_text().splitlines()] == [None, "client"]
    of_clients = Limit(limit.epsilon, 1e-5, unit=CLIENT)
    with pytest.raises(FedgistError, match="count by the record"):
        Book(path).charge("another", Release(10.0, unit=CLIENT), of_clients)
    assert "for 11,000 clients: a mechanism that gives a whole client away" in str(risky(1e-5, 11_000, CLIENT))


def test_a_line_that_a_crash_left_unsynced_is_on_the_disk_before_its_release_leaves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process killed between the write and fsync leaves a whole line, by which its release is known as charged."""
    path, synced = tmp_path / "privacy.jsonl", []

    def killed(descriptor: int) -> None:
        if os.readlink(f"/proc/self/fd/{descriptor}") == str(path):
            raise InterruptedError

    book, sync = Book(path), os.fsync
    book.charge("before", Release(10.0), Limit(2, 1e-5))
    monkeypatch.setattr(os, "fsync", killed)
    with pytest.raises(InterruptedError):
        book.charge("a", Release(10.0), Limit(2, 1e-5))

    def watched(descriptor: int) -> None:
        synced.append((os.readlink(f"/proc/self/fd/{descriptor}"), path.read_bytes()))
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", watched)
    Book(path).charge("a", Release(10.0), Limit(2, 1e-5))
    assert path.read_bytes().count(b"\n") == 2
    assert synced == [(str(tmp_path), path.read_bytes()), (str(path), path.read_bytes())]
