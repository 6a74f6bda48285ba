"""Samples set apart for choosing settings: nobody trains on them, and the test set is not looked at."""

import pytest
import torch

from fedgist.core.errors import FedgistError
from fedgist.experiments.config import resolve
from fedgist.experiments.inputs import from_dataset


def test_a_share_of_every_client_is_judged_on_and_not_trained_on() -> None:
    base = {"method": "fedavg", "dataset": "digits", "clients": 4, "partition": "iid", "device": "cpu", "seed": 3}
    whole, apart = from_dataset(resolve(base)), from_dataset(resolve(base, {"validation": 0.25}))
    assert apart.sha256 == whole.sha256  # the partition is the same
    sizes = {id: int(0.25 * data.n) for id, data in whole.sites.items()}
    assert len(apart.test[1]) == sum(sizes.values())
    for id, data in apart.sites.items():
        assert data.n == whole.sites[id].n - sizes[id]
    kept = torch.cat([data.x for data in apart.sites.values()]).flatten(1)
    together = torch.cat([kept, apart.test[0].flatten(1)])
    everything = torch.cat([data.x for data in whole.sites.values()]).flatten(1)
    assert torch.equal(_sorted(together), _sorted(everything))
    for data in apart.sites.values():
        assert data.test is not None and data.test[0] is apart.test[0]  # clients judge their own models on it too
    again = from_dataset(resolve(base, {"validation": 0.25}))
    assert torch.equal(again.test[0], apart.test[0])
    with pytest.raises(FedgistError, match="leaves nothing to judge on"):
        from_dataset(resolve(base, {"validation": 0.001}))


def test_clients_may_be_judged_on_what_was_held_out_of_them() -> None:
    """Each on its own share of what all are judged on; which needs something that is held out."""
    base = {"method": "fedavg", "dataset": "digits", "clients": 4, "alpha": 0.1, "device": "cpu", "validation": 0.25}
    made = from_dataset(resolve(base, {"client_test": "own-share"}))
    own = [data.test[1] for data in made.sites.values() if data.test is not None]
    assert torch.equal(torch.cat(own), made.test[1]) and all(len(y) < len(made.test[1]) for y in own)
    for wrong in ({"validation": 0.0}, {"discrepancy": "rotation"}):
        with pytest.raises(FedgistError, match="own-share is what validation holds out"):
            resolve({**base, "client_test": "own-share", **wrong})


def _sorted(rows: torch.Tensor) -> torch.Tensor:
    """In an order that depends on the values alone."""
    return torch.tensor(sorted(rows.tolist()))
