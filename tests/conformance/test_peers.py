"""Methods without a server, whose sites write to each other: the same states and ledger as in one process."""

from contextlib import closing
from pathlib import Path

import pytest

from fedgist import methods, storage
from fedgist.core.ledger import Ledger
from peers import Relay, digest, in_process

PEERS = [name for name, method in methods.registry().items() if method.peer_to_peer]


@pytest.mark.parametrize("topology", ["ring", "gossip:2"])
@pytest.mark.parametrize("method", PEERS)
def test_letters_between_sites_give_the_same(method: str, topology: str, tmp_path: Path) -> None:
    """Three rounds and an evaluation: states bit for bit, ledger to the byte; those of the sites add up to it."""
    relay = Relay(method, tmp_path / "sites")
    near, far = in_process(method, topology), relay.engine(topology)
    with closing(Ledger(tmp_path / "near.csv")) as near.ledger, closing(Ledger(tmp_path / "far.csv")) as far.ledger:
        for _ in range(3):
            reports = near.run_round(), far.run_round()
            assert len({(report.answered, report.skipped) for report in reports}) == 1 and not reports[1].missing
        total = far.ledger.totals()
        assert near.ledger.totals() == total
    assert (tmp_path / "near.csv").read_text() == (tmp_path / "far.csv").read_text()
    assert near.digest() == digest(far, tmp_path / "sites")
    near.ledger, far.ledger = Ledger(), Ledger()
    assert near.evaluate(relay.inputs.test) == far.evaluate(relay.inputs.test)
    kept = [path.read_text().splitlines()[1:] for path in tmp_path.glob(f"sites/*/runs/{far.run}/ledger.csv")]
    rows = sorted(row.partition(",")[2] for ledger in kept for row in ledger)
    assert rows == sorted(row.partition(",")[2] for row in (tmp_path / "near.csv").read_text().splitlines()[1:])
    assert len(rows) == total.messages > 0


@pytest.mark.parametrize("method", PEERS)
def test_everybody_killed_and_resumed(method: str, tmp_path: Path) -> None:
    """Coordinator and sites die after round 1 and in the middle of round 2; new ones go on to the same end."""
    whole = Relay(method, tmp_path / "whole")
    engine = whole.engine()
    for _ in range(3):
        engine.run_round()
    first = Relay(method, tmp_path / "killed")
    begun = first.engine()
    begun.run_round()
    storage.save(begun.snapshot(), tmp_path / "checkpoint")
    begun.run_round()  # its end was never written down
    second = Relay(method, tmp_path / "killed").engine()
    second.restore(storage.load(tmp_path / "checkpoint"))
    for _ in range(2):
        second.run_round()
    assert digest(second, tmp_path / "killed") == digest(engine, tmp_path / "whole")
    ledgers = [sorted((tmp_path / part).glob("*/runs/*/ledger.csv")) for part in ("whole", "killed")]
    rows = [
        [path.read_text().replace(run, "") for path in paths]
        for paths, run in zip(ledgers, (engine.run, second.run), strict=True)
    ]
    assert rows[0] == rows[1]
