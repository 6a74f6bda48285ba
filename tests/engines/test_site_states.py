"""States in memory and on the disk are the same states, and a checkpoint writes only what has changed."""

from pathlib import Path

import pytest
import torch

from fedgist import storage
from fedgist.core.tree import Tree
from fedgist.core.work import Place
from fedgist.engines.site_states import SiteStates


def states(folder: Path | None, most: int = 4000) -> SiteStates:
    made = SiteStates(Place())
    made.most = most
    if folder is not None:
        made.keep_in(folder)
    return made


def some(value: float) -> Tree:
    return {"c": torch.full((200,), float(value)), "n": [int(value), None, "x"]}


def test_what_is_on_the_disk_is_what_was_put_in(tmp_path: Path) -> None:
    """Five of twenty fit into memory; a log of mostly no use is replaced; the last checkpoints can be gone to."""
    found, expected, kept = states(tmp_path), {}, []
    for round in range(1, 9000 // 6):
        for i in range(6):
            id = str((round * 7 + i * 5) % 20)
            found[id] = expected[id] = some(round)
        if round % 300 == 0:
            kept.append((found.snapshot(round), storage.digest(expected)))
            assert storage.digest(found) == kept[-1][1]
            assert sum(len(state["c"]) * 4 for state in found.in_memory().values()) <= 4000
    found.close()
    assert len(found) == 20 and len({snapshot["log"] for snapshot, _ in kept}) > 1
    for snapshot, digest in kept[-2:][::-1]:
        again = states(tmp_path)
        again.restore(snapshot)
        assert storage.digest(again) == digest
        again.close()


def test_a_checkpoint_costs_what_has_changed(tmp_path: Path) -> None:
    found = states(tmp_path, most=1 << 20)
    for i in range(100):
        found[str(i)] = some(i)
    first = found.snapshot(1)["log bytes"]
    found["7"] = some(-1)
    second = found.snapshot(2)["log bytes"]
    assert second - first < first / 90 and found.snapshot(3)["log bytes"] == second
    found.close()


def test_what_is_not_finite_is_known_on_the_disk_too(tmp_path: Path) -> None:
    found = states(tmp_path, most=1000)
    found["0"] = {"c": torch.full((200,), torch.nan)}
    found["1"] = some(1)
    assert found.diverged == {"0"} and list(found.in_memory()) == ["1"]
    found["0"] = some(0)
    assert not found.diverged
    found.close()


def test_without_a_folder_all_stay_in_memory() -> None:
    found = states(None, most=100)
    for i in range(3):
        found[str(i)] = some(i)
    assert len(found.in_memory()) == 3 and found.snapshot(1)["sites"].keys() == {"0", "1", "2"}
    with pytest.raises(KeyError):
        found["3"]
