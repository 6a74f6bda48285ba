"""What holds for every test: one thread, no global randomness, the same examples everywhere, real data where it is."""

import os
import random
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sklearn.datasets  # noqa: F401 (its first import draws from Python's global generator, which tests watch)
import torch

from fedgist import storage
from fedgist.core.ledger import Ledger
from fedgist.core.method import Method
from fedgist.engines import executor
from fedgist.engines.local import LocalEngine
from fedgist.experiments.inputs import Inputs
from fedgist.federation.protocol.remote_engine import RemoteEngine, Transport

# The nets in the tests are so small that a second intra-op thread only costs time.
torch.set_num_threads(1)

with suppress(
    ImportError
):  # a machine with a GPU may lack the development tools; the other tests run there all the same
    from hypothesis import settings

    # The same examples on every machine; no deadline, because the first call of a torch operator is slow.
    settings.register_profile("fedgist", derandomize=True, deadline=None, max_examples=50, database=None)
    settings.load_profile("fedgist")


def _global_rng_states() -> dict[str, object]:
    """The states of the process-wide generators, in a form that `==` compares."""
    name, keys, *rest = np.random.get_state()  # noqa: NPY002 (read, to show that nobody draws from it)
    return {
        "torch": torch.get_rng_state().numpy().tobytes(),
        "numpy": (name, keys.tobytes(), *rest),
        "random": random.getstate(),
    }


@pytest.fixture(autouse=True)
def no_global_rng() -> Iterator[None]:
    """A test fails when something in it drew from a process-wide generator: all randomness has a name (core/rng.py)."""
    before = _global_rng_states()
    yield
    after = _global_rng_states()
    moved = [library for library in before if before[library] != after[library]]
    if moved:
        pytest.fail(
            f"the global generator of {' and '.join(moved)} moved: draw from fedgist.core.rng.Rng instead, and build "
            "torch modules, whose constructors draw, inside torch.random.fork_rng()",
            pytrace=False,
        )


@pytest.fixture
def same_as_in_one_process(tmp_path: Path) -> Callable[..., RemoteEngine]:
    """Two rounds here and through a transport, an evaluation after each: states bit for bit, ledger to the byte.

    `sites` is the folder in which the remote sites keep their states.
    """

    def compare(method: Method, transport: Transport, inputs: Inputs, sites: Path) -> RemoteEngine:
        with closing(Ledger(tmp_path / "near.csv")) as one, closing(Ledger(tmp_path / "far.csv")) as other:
            alike: dict[str, Any] = {"info": inputs.info, "seed": 0, "executor": executor("sequential")}
            near = LocalEngine(method, inputs.sites, **alike, ledger=one)
            far = RemoteEngine(method, transport, **alike, ledger=other)
            for _ in range(2):
                near.run_round()
                far.run_round()
                assert near.evaluate(inputs.test) == far.evaluate(inputs.test)
        assert not far.gone
        assert storage.digest(near.states) == storage.digest(far.states)
        for id, version in far.versions.items():
            kept = storage.load(sites / id / "runs" / far.run / f"{version}.safetensors")
            assert storage.digest(near.site_states[id]) == storage.digest(kept)
        assert (tmp_path / "near.csv").read_text() == (tmp_path / "far.csv").read_text()
        return far

    return compare


@pytest.fixture
def real_data() -> Callable[[str], Path]:
    """`real_data("mnist")` is the folder, as for --data-dir, that holds mnist/; without one, the test skips."""

    def find(name: str) -> Path:
        folder = os.environ.get("FEDGIST_DATA")
        if not folder:
            pytest.skip(f"needs real {name}: set FEDGIST_DATA to a folder that holds {name}/")
        if not (Path(folder) / name).is_dir():
            pytest.skip(f"needs real {name}: there is no {name}/ in FEDGIST_DATA={folder}")
        return Path(folder)

    return find
