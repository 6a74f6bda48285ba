"""A transcript shows each client's update exactly as the receiver got it."""

from pathlib import Path
from typing import Any

import pytest
import torch

from fedgist import storage
from fedgist.core import tree
from fedgist.core.errors import FedgistError
from fedgist.core.ledger import Ledger
from fedgist.engines.local import LocalEngine
from fedgist.privacy.attacks.images import images_in
from fedgist.privacy.transcript import Transcript, Update, update_of
from fedgist.synthesis.encoded_updates import apply_update
from toys import SHAPE, clients, federation

QUICK: dict[str, Any] = {"steps": 2, "batch": 4, "lr": 0.1}
TOFU = QUICK | {"images": 2, "iterations": 2}


def watched(
    folder: Path, name: str, sizes: tuple[int, ...], record: Any = ("all",), site: str = "{}", **given: Any
) -> tuple[LocalEngine, Transcript]:
    ledger = Ledger(record=record, transcript=folder)
    engine = federation(name, clients(*sizes, name=site), "mlp:hidden=6", ledger=ledger, **given)
    return engine, Transcript(folder, engine.method)


def update_so_far(transcript: Transcript, client: str, round: int) -> Update:
    """A transcript is of a run that is over: one that goes on is read anew."""
    return update_of(Transcript(transcript.folder, transcript.method), client, round)


@pytest.mark.parametrize("pixels", ["float32", "uint8"])
def test_tofu_weights_before_are_those_of_the_client(pixels: str, tmp_path: Path) -> None:
    """Bit for bit, in every round, for clients that come and go (updates missed, weights instead)."""
    away = {("0", 3), ("1", 2), ("1", 3), ("1", 4)}
    engine, transcript = watched(
        tmp_path, "tofu", (7, 20, 3), offline=lambda id, round, exchange: (id, round) in away, pixels=pixels, **TOFU
    )
    for round in range(1, 6):
        engine.run_round()
        for id, state in engine.site_states.items():
            if (id, round) not in away:
                assert storage.digest(update_so_far(transcript, id, round).before) == storage.digest(state["w"])
    kinds = {kept.tag for kept in Transcript(tmp_path, engine.method).between("server", "1")}
    assert kinds == {"tofu.Start", "tofu.Weights" if pixels == "float32" else "tofu.Updates"}  # the smaller


def test_tofu_update_is_what_the_receiver_applied(tmp_path: Path) -> None:
    """A single device and its server both move by the decoded update and by nothing else."""
    engine, transcript = watched(tmp_path, "tofu", (20,), single=True, **TOFU)
    for round in (1, 2, 3):
        engine.run_round()
        seen = update_so_far(transcript, "0", round)
        after = apply_update(engine.method.model, seen.before, seen.update, torch.zeros(0))
        assert storage.digest(after) == storage.digest(engine.state["w"])
        assert tree.norm(seen.update) > 1e-3
        shown = images_in(seen.seen, engine.method.task)
        assert shown is not None and shown[0].shape == (2, *SHAPE)


def test_full_rounds_of_tofu_and_fedavg_show_the_raw_update(tmp_path: Path) -> None:
    """With one client the server's new weights are the client's, to the rounding of p w on the wire."""
    fedavg, raw = watched(tmp_path / "fedavg", "fedavg", (20,), **QUICK)
    tofu, full = watched(tmp_path / "tofu", "tofu", (20,), switch2=0, **TOFU)
    for engine, transcript in ((fedavg, raw), (tofu, full)):
        engine.run_round()
        seen = update_so_far(transcript, "0", 1)
        assert images_in(seen.seen, engine.method.task) is None
        torch.testing.assert_close(tree.sub(seen.before, seen.update), engine.state["w"], rtol=0, atol=1e-6)
        assert tree.norm(seen.update) > 1e-2


def test_sites_may_have_dashes_in_their_names(tmp_path: Path) -> None:
    """And a name that is the end or the beginning of another is not taken for it."""
    engine, transcript = watched(tmp_path, "fedavg", (20, 20), site="hospital-{}", **QUICK)
    engine.run_round()
    for id in ("hospital-0", "hospital-1"):
        assert [kept.tag for kept in transcript.between("server", id)] == ["global_model.Global"]
        assert update_so_far(transcript, id, 1).seen.clients == (id,)
    assert transcript.between("1", "server") == transcript.between("server", "hospital") == []


@pytest.mark.parametrize(
    ("name", "record", "line"),
    [
        ("fedavg", ("Global",), "has no reply of client 0 in round 3; of this client it has none"),
        ("fedavg", ("Local",), "has no request to client 0 in round 3"),
        ("tofu", ("Upload", "Start"), "has not all requests to client 0 up to round 3"),
        ("tofu", ("Upload", "Updates"), "has not all requests to client 0 up to round 3"),
    ],
)
def test_what_was_not_recorded_is_said(name: str, record: tuple[str, ...], line: str, tmp_path: Path) -> None:
    engine, transcript = watched(tmp_path, name, (20,), record=record, **(TOFU if name == "tofu" else QUICK))
    for _ in range(3):
        engine.run_round()
    with pytest.raises(FedgistError, match=f"{line}.*run again with --record all"):
        update_so_far(transcript, "0", 3)


def test_rounds_that_are_there_are_named(tmp_path: Path) -> None:
    engine, transcript = watched(
        tmp_path, "fedavg", (20, 20), offline=lambda id, round, exchange: (id, round) == ("0", 2), **QUICK
    )
    for _ in range(4):
        engine.run_round()
    with pytest.raises(FedgistError, match="client 0 in round 2; of this client it has rounds 1, 3 to 4"):
        update_so_far(transcript, "0", 2)


def test_a_client_without_data_has_nothing_to_find(tmp_path: Path) -> None:
    for name, settings in (("fedavg", QUICK), ("tofu", TOFU)):
        engine, transcript = watched(tmp_path / name, name, (0, 20), **settings)
        engine.run_round()
        with pytest.raises(FedgistError, match="client 0 holds no data"):
            update_so_far(transcript, "0", 1)


def test_only_heads_are_not_enough(tmp_path: Path) -> None:
    engine, transcript = watched(tmp_path, "fedavg", (20,), share="head", **QUICK)
    engine.run_round()
    with pytest.raises(FedgistError, match="needs all weights on the wire"):
        update_so_far(transcript, "0", 1)
